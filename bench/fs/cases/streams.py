"""Files through the library, beside the chunk client alone in the same process and the same run.

One file of several GiB from front to back, pieces of 1 MiB: written until `close` has returned (durable on 2 replicas,
and the length known), then read by `readinto`. The chunk client does the same with chunks of 1 MiB, several under way.
Records: batches of 64 at random places, one batch after the other, into one array.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

import fireflyer.fs
from bench.fs.cluster import Cluster, running, spread
from bench.fs.host_memory import take_back
from bench.report import Options, Result, figure
from fireflyer.base.errors import DataCorruption
from fireflyer.base.units import GIB, KIB, MIB
from fireflyer.fs.client import READ, ChunkId, Ring
from fireflyer.fs.client.files.file_system import FileSystem

__all__ = ["run"]

BYTES: Final = {"tiny": 16 * MIB, "brief": GIB // 2, "full": 4 * GIB}
BATCHES: Final = {"tiny": 5, "brief": 500, "full": 3000}
DEPTH: Final = 32
"""Of the chunk client, of 1 MiB: what a file may have that is not at the storage nodes."""
AHEAD: Final = 8
"""... and what is fetched ahead of a reader."""
NEEDED: Final = 2.25
"""Memory that the pages of two replicas take, at most, of the bytes."""
RECORDS: Final = 64
LEAST_SHARE: Final = 0.85
TARGET: Final = f"at least {LEAST_SHARE:.0%} of the chunk client"
FIRST_FILE: Final = 1 << 50
"""Of chunks that belong to no file."""


def run(options: Options) -> Iterator[Result]:
    if options.selects("files/write") or options.selects("files/read") or options.selects("files/records"):
        yield from asyncio.run(_measure(options))


async def _measure(options: Options) -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="ff-bench-") as directory:
        async with running(Path(directory), nodes=2, chains=spread(2, 2)) as cluster:
            await cluster.add_table()
            return await asyncio.to_thread(_inside, options, cluster)


def _inside(options: Options, cluster: Cluster) -> list[Result]:
    where = f"ff://{cluster.manager.address}"
    with cluster.ring() as ring, fireflyer.fs.connect(where, credential=cluster.credential) as fs:
        streams = _Streams(options, ring, fs)
        results = streams.sequential()
        return [*results, *(streams.records(size) for size in (4 * KIB, 64 * KIB, 256 * KIB))]


class _Streams:
    def __init__(self, options: Options, ring: Ring, fs: FileSystem) -> None:
        self._options = options
        self._ring = ring
        self._fs = fs
        self._chain = ring.chains()[0]
        self._count = BYTES[options.scale] // MIB
        self._content = np.random.default_rng(1).integers(0, 256, (DEPTH + 1, MIB), dtype=np.uint8)
        self._number = FIRST_FILE

    def sequential(self) -> list[Result]:
        """Ours and the chunk client's in turns; the first round warms up."""
        writes: dict[str, list[float]] = {"ours": [], "theirs": []}
        reads: dict[str, list[float]] = {"ours": [], "theirs": []}
        for turn in range(self._options.rounds + 1):
            if turn:
                self._remove()
            for name, write in (("ours", self._write_file), ("theirs", self._write_chunks)):
                take_back(NEEDED * self._count * MIB)
                writes[name].append(_took(write))
            reads["ours"].append(_took(self._read_file))
            reads["theirs"].append(_took(self._read_chunks))
        return [self._result("write", writes), self._result("read", reads)]

    def _result(self, what: str, took: dict[str, list[float]]) -> Result:
        each = {name: figure([one / self._count for one in all_[1:]]) for name, all_ in took.items()}
        ours, theirs = each["ours"], each["theirs"]
        met = ours.median <= theirs.median / LEAST_SHARE
        share = theirs.median / ours.median
        note = f"{1 / ours.median:,.0f} MiB/s, {share:.0%} of the chunk client"
        return Result(
            suite="fs", case=f"files/{what}/1MiB pieces of {self._count} MiB", metric="each_s", better="lower",
            ours=ours, peers={"the chunk client": theirs}, bound=None, target=TARGET, met=met, verdicts={TARGET: met},
            note=note, more={"of_chunk_client_share": share},
        )  # fmt: skip

    def records(self, size_bytes: int) -> Result:
        rng, count = np.random.default_rng(2), BATCHES[self._options.scale]
        into = np.ones((RECORDS, size_bytes), dtype=np.uint8)
        places = rng.integers(0, self._count * MIB // size_bytes, (count, RECORDS)) * size_bytes
        ours, theirs = [], []
        with self._fs.open_file("/stream") as file:
            for turn in range(self._options.rounds + 1):
                mine = _took(lambda: [self._fs.read_records(file, some, into) for some in places])
                self._check(into, places[-1])
                their = _took(partial(self._read_all, places, into))
                self._check(into, places[-1])
                if turn:
                    ours.append(mine / count / RECORDS)
                    theirs.append(their / count / RECORDS)
        each, other = figure(ours), figure(theirs)
        met = each.median <= other.median / LEAST_SHARE
        return Result(
            suite="fs", case=f"files/records/{size_bytes // KIB}KiB, batches of {RECORDS}", metric="each_s",
            better="lower", ours=each, peers={"the chunk client": other}, bound=None, target=TARGET, met=met,
            verdicts={TARGET: met}, note=f"{1 / each.median:,.0f} a second, {other.median / each.median:.0%} of the "
            "chunk client", more={"of_chunk_client_share": other.median / each.median},
        )  # fmt: skip

    def _check(self, into: Any, places: Any) -> None:
        for place, row in zip(places.tolist(), into, strict=True):
            within = place % MIB
            if not np.array_equal(row, self._content[place // MIB % len(self._content)][within : within + len(row)]):
                raise DataCorruption(f"bytes at {place} came back other than they were written")

    # --- files ---

    def _write_file(self) -> None:
        with self._fs.open("/stream", "wb", buffering=0) as file:
            for number in range(self._count):
                file.write(self._content[number % len(self._content)])

    def _read_file(self) -> None:
        into = np.ones(MIB, dtype=np.uint8)
        with self._fs.open("/stream", "rb", buffering=0) as file:
            for _ in range(self._count):
                if file.readinto(into) != MIB:
                    raise DataCorruption("the file is shorter than it was written")
        self._compare(into, self._count - 1)

    def _compare(self, piece: Any, number: int) -> None:
        if not np.array_equal(piece, self._content[number % len(self._content)]):
            raise DataCorruption(f"piece {number} came back with other bytes than were written")

    def _remove(self) -> None:
        """What the round before has written; new chunks are another thing than chunks that are changed."""
        self._fs.unlink("/stream")
        self._keep_going(lambda number: self._ring.prepare_remove(number, self._chain, self._chunk(number)), DEPTH)
        self._number += 1

    # --- chunks ---

    def _chunk(self, number: int) -> ChunkId:
        return ChunkId(self._number, number)

    def _write_chunks(self) -> None:
        def write(number: int) -> None:
            piece = self._content[number % len(self._content)]
            self._ring.prepare_write(number, self._chain, self._chunk(number), piece)

        self._keep_going(write, DEPTH)

    def _read_chunks(self) -> None:
        into = np.ones((AHEAD, MIB), dtype=np.uint8)
        free, slots = list(range(AHEAD)), dict[int, int]()

        def read(number: int) -> None:
            slots[number] = free.pop()
            self._ring.prepare_read(number, self._chain, self._chunk(number), into[slots[number]])

        def over(number: int) -> None:
            free.append(slots.pop(number))

        self._keep_going(read, AHEAD, over)

    def _keep_going(self, begin: Callable[[int], None], depth: int, over: Callable[[int], None] | None = None) -> None:
        begun = ended = 0
        while ended < self._count:
            while begun < self._count and begun - ended < depth:
                begin(begun)
                begun += 1
            done = self._ring.wait(1)
            for error in done.errors.values():
                raise error
            if over is not None:
                for tag in done.tags.tolist():
                    over(tag)
            ended += len(done.tags)

    def _read_all(self, batches: Any, into: Any) -> None:
        for places in batches:
            self._read_records(places, into)

    def _read_records(self, places: Any, into: Any) -> None:
        reads = np.zeros(len(places), READ)
        reads["file"], reads["chain"] = self._number, self._chain
        reads["index"], reads["offset"] = places // MIB, places % MIB
        reads["length"], reads["at"] = into.shape[1], np.arange(len(places)) * into.shape[1]
        self._ring.prepare_reads(0, reads, into)
        done = self._ring.wait(len(places))
        if done.errors or (done.counts != into.shape[1]).any():
            raise DataCorruption(f"reads came back with {done.errors or done.counts}")


def _took(measure: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    measure()
    return time.perf_counter() - began_s
