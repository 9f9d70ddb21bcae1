"""What data loaders do: small files, and records at random places of large ones, through the library beside ext4.

Small files of 160 KB are made, written and closed, then opened and read whole. Ours are durable on 2 replicas when
`close` has returned; those on ext4 are in its page cache, or durable on its one disk where they are synced. One after
the other by one thread (`FileSystem`), and 32 at once (`Files` in an event loop; 32 threads on ext4).

Records: 64 at random places of 8 shards, all under one `read_batch` into memory that is there; on ext4 one `os.preadv`
after the other by one thread. What is read lies in the page cache everywhere, and is compared after the clock has
stopped, of small files every tenth.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

import fireflyer.fs
from bench.fs.cluster import Cluster, processor_s, running, spread
from bench.report import Options, Result, figure
from fireflyer.base.errors import DataCorruption
from fireflyer.base.units import KIB, MIB
from fireflyer.fs.client.connecting import connect_async
from fireflyer.fs.client.files.asyncio_files import Files
from fireflyer.fs.client.files.file_system import FileSystem

__all__ = ["run"]

SMALL_BYTES: Final = 160_000
FILES: Final = {"tiny": 20, "brief": 1000, "full": 10_000}
ROUNDS: Final = {"tiny": 1, "brief": 3, "full": 3}
"""After one that does not count."""
AT_ONCE: Final = 32
SHARDS: Final = 8
SHARD_BYTES: Final = {"tiny": 4 * MIB, "brief": 32 * MIB, "full": 256 * MIB}
RECORDS: Final = 64
BATCHES: Final = {"tiny": 3, "brief": 200, "full": 1000}
RECORD_BYTES: Final = (4 * KIB, 64 * KIB, 256 * KIB)
CACHED, SYNCED, READ = "ext4, in the page cache", "ext4, fsync of each", "ext4"
PREAD: Final = "os.preadv on ext4"


class _Took(NamedTuple):
    elapsed_s: float
    client_s: float
    servers_s: float


def run(options: Options) -> Iterator[Result]:
    if options.selects("loading/"):
        with tempfile.TemporaryDirectory(prefix="ff-bench-") as directory:
            yield from asyncio.run(_measure(options, Path(directory)))


async def _measure(options: Options, directory: Path) -> list[Result]:
    async with running(directory, nodes=2, chains=spread(2, 2)) as cluster:
        await cluster.add_table()
        where = f"ff://{cluster.manager.address}"
        files = await connect_async(where, credential=cluster.credential)
        try:
            results = await _Small(options, cluster, directory, files).at_once()
        finally:
            await files.close()
        results += await asyncio.to_thread(_by_one_thread, options, cluster, directory)
    return results


def _by_one_thread(options: Options, cluster: Cluster, directory: Path) -> list[Result]:
    with fireflyer.fs.connect(f"ff://{cluster.manager.address}", credential=cluster.credential) as fs:
        small = _Small(options, cluster, directory, None).one_by_one(fs)
        return [*small, *_Records(options, directory, fs).all()]


# --- small files


class _Small:
    def __init__(self, options: Options, cluster: Cluster, directory: Path, files: Files | None) -> None:
        self._options = options
        self._cluster = cluster
        self._files = files
        self._count = FILES[options.scale]
        self._local = directory / "local"
        self._local.mkdir(exist_ok=True)
        self._names = [f"file-{number:06d}" for number in range(self._count)]
        self._content = [os.urandom(SMALL_BYTES) for _ in range(33)]
        self._turns = itertools.count()

    def _data(self, number: int) -> bytes:
        return self._content[number % len(self._content)]

    async def at_once(self) -> list[Result]:
        files = self._files
        assert files is not None
        took: dict[str, dict[str, list[_Took]]] = {}
        for turn in range(ROUNDS[self._options.scale] + 1):
            top = self._top()
            await files.mkdir(top)
            writes = {"": await self._timed(self._all_at_once(functools.partial(self._write, files, top)))}
            reads = {"": await self._timed(self._all_at_once(functools.partial(self._read, files, top)))}
            for number in range(0, self._count, 10):
                async with await files.open(f"{top}/{self._names[number]}") as file:
                    self._compare(number, await file.pread(0, SMALL_BYTES + 1))
            await files.rmtree(top)
            with ThreadPoolExecutor(AT_ONCE) as pool:
                await asyncio.to_thread(self._peers, writes, reads, functools.partial(self._by_threads, pool))
            _keep(took, {"write": writes, "read": reads}, turn)
        return self._results(took, f"{AT_ONCE} at once")

    def one_by_one(self, fs: FileSystem) -> list[Result]:
        took: dict[str, dict[str, list[_Took]]] = {}

        def write(number: int) -> None:
            with fs.open(f"{top}/{self._names[number]}", "wb", buffering=0) as file:
                file.write(self._data(number))

        def read(number: int) -> None:
            with fs.open(f"{top}/{self._names[number]}", "rb", buffering=0) as file:
                self._check(file.read())

        for turn in range(ROUNDS[self._options.scale] + 1):
            top = self._top()
            fs.mkdir(top)
            writes = {"": self._took(lambda: self._each(write))}
            reads = {"": self._took(lambda: self._each(read))}
            for number in range(0, self._count, 10):
                with fs.open(f"{top}/{self._names[number]}", "rb") as file:
                    self._compare(number, file.read())
            fs.rmtree(top)
            self._peers(writes, reads, self._each)
            _keep(took, {"write": writes, "read": reads}, turn)
        return self._results(took, "one after the other")

    def _top(self) -> str:
        return f"/small-{'at-once' if self._files else 'one'}-{next(self._turns)}"

    @property
    def _numbers(self) -> range:
        return range(self._count)

    def _each(self, act: Callable[[int], None]) -> None:
        for number in self._numbers:
            act(number)

    def _by_threads(self, pool: ThreadPoolExecutor, act: Callable[[int], None]) -> None:
        list(pool.map(act, self._numbers))

    async def _all_at_once(self, act: Callable[[int], Any]) -> None:
        numbers = iter(self._numbers)

        async def one() -> None:
            for number in numbers:
                await act(number)

        await asyncio.gather(*(one() for _ in range(AT_ONCE)))

    async def _write(self, files: Files, top: str, number: int) -> None:
        async with await files.open(f"{top}/{self._names[number]}", "wb") as file:
            await file.pwrite(self._data(number), 0)

    async def _read(self, files: Files, top: str, number: int) -> None:
        async with await files.open(f"{top}/{self._names[number]}") as file:
            self._check(await file.pread(0, file.length))

    def _check(self, data: bytes) -> None:
        if len(data) != SMALL_BYTES:
            raise DataCorruption(f"a file has {len(data)} bytes of {SMALL_BYTES}")

    def _compare(self, number: int, data: bytes) -> None:
        if data != self._data(number):
            raise DataCorruption(f"file {number} came back with other bytes than were written")

    # --- ext4

    def _peers(
        self, writes: dict[str, _Took], reads: dict[str, _Took], each: Callable[[Callable[[int], None]], object]
    ) -> None:
        for name, synced in ((CACHED, False), (SYNCED, True)):
            writes[name] = self._took(functools.partial(each, functools.partial(self._write_local, synced)))
            if not synced:
                reads[READ] = self._took(lambda: each(self._read_local))
            for one in self._names:
                os.unlink(self._local / one)

    def _write_local(self, synced: bool, number: int) -> None:
        with open(self._local / self._names[number], "wb", buffering=0) as file:
            file.write(self._data(number))
            if synced:
                os.fsync(file.fileno())

    def _read_local(self, number: int) -> None:
        with open(self._local / self._names[number], "rb", buffering=0) as file:
            self._check(file.read())

    # --- results

    def _used(self) -> tuple[float, float]:
        mine = resource.getrusage(resource.RUSAGE_SELF)
        servers_s = self._cluster.processor_s() + processor_s(self._cluster.manager.pid)
        return mine.ru_utime + mine.ru_stime, servers_s

    async def _timed(self, work: Any) -> _Took:
        before, began_s = self._used(), time.perf_counter()
        await work
        return self._since(before, began_s)

    def _took(self, work: Callable[[], object]) -> _Took:
        before, began_s = self._used(), time.perf_counter()
        work()
        return self._since(before, began_s)

    def _since(self, before: tuple[float, float], began_s: float) -> _Took:
        elapsed_s, now = time.perf_counter() - began_s, self._used()
        return _Took(elapsed_s, now[0] - before[0], now[1] - before[1])

    def _results(self, took: dict[str, dict[str, list[_Took]]], how: str) -> list[Result]:
        results = []
        for what, all_ in took.items():
            rates = {
                name: figure([self._count * SMALL_BYTES / one.elapsed_s for one in some]) for name, some in all_.items()
            }
            ours, peers = rates.pop(""), rates
            state = "durable, 2 replicas" if what == "write" else "cached"
            used = {
                f"{part}_processor_s": statistics.median(getattr(one, f"{part}_s") for one in all_[""]) / self._count
                for part in ("client", "servers")
            }
            note = f"{ours.median / SMALL_BYTES:,.0f} files a second; " + ", ".join(
                f"{ours.median / peer.median:.0%} of {name}" for name, peer in peers.items()
            )
            results.append(
                Result(
                    suite="fs", case=f"loading/{what}/{self._count} files of 160 KB/{how}/{state}",
                    metric="rate_bytes_per_s", better="higher", ours=ours, peers=dict(peers), bound=None, target="",
                    note=note, more=used,
                )
            )  # fmt: skip
        return results


def _keep(took: dict[str, dict[str, list[_Took]]], turn: dict[str, dict[str, _Took]], number: int) -> None:
    """The first round warms up."""
    for what, all_ in turn.items():
        for name, one in all_.items():
            kept = took.setdefault(what, {}).setdefault(name, [])
            if number:
                kept.append(one)


# --- records


class _Records:
    def __init__(self, options: Options, directory: Path, fs: FileSystem) -> None:
        self._options = options
        self._fs = fs
        self._local = directory / "shards"
        self._bytes = SHARD_BYTES[options.scale]
        self._rng = np.random.default_rng(3)

    def all(self) -> list[Result]:
        self._local.mkdir()
        self._fs.mkdir("/shards")
        for shard in range(SHARDS):
            data = self._rng.bytes(self._bytes)
            (self._local / str(shard)).write_bytes(data)
            with self._fs.open(f"/shards/{shard}", "wb", buffering=0) as file:
                file.write(data)
        mine = [self._fs.open_file(f"/shards/{shard}") for shard in range(SHARDS)]
        theirs = [os.open(self._local / str(shard), os.O_RDONLY) for shard in range(SHARDS)]
        try:
            return [self._measured(size, mine, theirs) for size in RECORD_BYTES]
        finally:
            for file in mine:
                file.close()
            for fd in theirs:
                os.close(fd)

    def _measured(self, size: int, mine: list[Any], theirs: list[int]) -> Result:
        count = BATCHES[self._options.scale]
        into, other = np.ones((RECORDS, size), dtype=np.uint8), [bytearray(size) for _ in range(RECORDS)]
        shards = self._rng.integers(0, SHARDS, (count, RECORDS)).tolist()
        places = (self._rng.integers(0, self._bytes // size, (count, RECORDS)) * size).tolist()

        def ours() -> None:
            for of, at in zip(shards, places, strict=True):
                self._fs.read_batch([(mine[one], place, row) for one, place, row in zip(of, at, into, strict=True)])

        def peer() -> None:
            for of, at in zip(shards, places, strict=True):
                for one, place, row in zip(of, at, other, strict=True):
                    os.preadv(theirs[one], [row], place)

        each: dict[str, list[float]] = {"ours": [], PREAD: []}
        for turn in range(ROUNDS[self._options.scale] + 1):
            for name, act in (("ours", ours), (PREAD, peer)):
                began_s = time.perf_counter()
                act()
                if turn:
                    each[name].append((time.perf_counter() - began_s) / count / RECORDS)
            if not into.tobytes() == b"".join(other):
                raise DataCorruption(f"records of {size} bytes came back with other bytes than were written")
        figures = {name: figure(some) for name, some in each.items()}
        ours_, peer_ = figures["ours"], figures[PREAD]
        return Result(
            suite="fs", case=f"loading/records/{size // KIB}KiB of {SHARDS} shards, batches of {RECORDS}/cached",
            metric="each_s", better="lower", ours=ours_, peers={PREAD: peer_}, bound=None, target="",
            note=f"{1 / ours_.median:,.0f} a second, {peer_.median / ours_.median:.0%} of the rate of {PREAD}",
        )  # fmt: skip
