"""Names: a manager's process serves them over LMDB, or over a PostgreSQL on this machine; one client process asks.

Creates are durable: each is answered when the store's log is on disk. Beside each figure what one Python thread does on
the file system of the temporary directory, where nothing is durable until `fsync`.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final

from tests.support.kvstore.postgres import postgres_programs, running_postgres

from bench.fs.cluster import Cluster, running, spread
from bench.report import Figure, Options, Result, figure
from fireflyer.fs.client.connecting import connect_async
from fireflyer.fs.client.files.asyncio_files import Files
from fireflyer.fs.schema.inodes import ROOT, InodeId, Kind
from fireflyer.fs.schema.meta import (
    Answer,
    Found,
    FoundMany,
    ListDirectory,
    Listing,
    MakeDirectory,
    MakeNode,
    PathRef,
    Removed,
    RemoveTree,
    Request,
    Stat,
    StatMany,
)

__all__ = ["run"]

FILES: Final = {"tiny": 200, "brief": 20_000, "full": 100_000}
STATS: Final = {"tiny": 200, "brief": 10_000, "full": 50_000}
DEPTH: Final = 32
MANY: Final = 1000
"""Places of one request."""
FEW: Final = 2
"""Requests for many that are in flight, so that client and service work at the same time."""
TARGETS: Final = {"create": 5000, "stat": 10_000, "stat many": 100_000, "list with inodes": 100_000}
"""Per second, over LMDB."""
WHOLE_S: Final = {"ls of all": 2.0, "remove tree of all": 30.0}
"""Of 100,000, over LMDB."""


def run(options: Options) -> Iterator[Result]:
    if options.selects("names/embedded"):
        yield from asyncio.run(_measure(options, "embedded", ""))
    programs = postgres_programs()
    if options.scale != "tiny" and options.selects("names/postgresql") and programs is not None:
        with running_postgres(programs, durable=True) as server:
            yield from asyncio.run(_measure(options, "postgresql", server.url()))


async def _measure(options: Options, store: str, url: str) -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="ff-bench-") as directory:
        local = _local(Path(directory, "local"), FILES[options.scale])
        async with running(Path(directory), nodes=2, chains=spread(2, 2), store=url) as cluster:
            await cluster.add_table()
            files = await connect_async(f"ff://{cluster.manager.address}", credential=cluster.credential)
            try:
                return await _Names(options, store, cluster, files, local).all()
            finally:
                await files.close()


class _Names:
    def __init__(
        self, options: Options, store: str, cluster: Cluster, files: Files, local: dict[str, list[float]]
    ) -> None:
        self._options = options
        self._store = store
        self._cluster = cluster
        self._files = files
        self._local = local
        self._count = FILES[options.scale]
        self._directory: InodeId = 0

    async def _ask(self, request: Request) -> Answer:
        return await self._files.meta.call(request)

    async def all(self) -> list[Result]:
        made = await self._ask(MakeDirectory(PathRef(ROOT, b"d")))
        assert isinstance(made, Found)
        self._directory = made.inode.id
        before_bytes = self._stored_bytes()
        create = await self._rate("create", [self._create(part) for part in range(10)], self._count // 10)
        stored_bytes = self._stored_bytes() - before_bytes
        results = [
            create,
            await self._rate("stat", [self._stat] * 3, STATS[self._options.scale]),
            await self._rate("stat many", [self._stat_many] * 3, self._count),
            await self._rate("list with inodes", [self._lists] * 3, self._count * FEW),
            await self._whole("ls of all", self._list(inodes=False)),
            await self._whole("remove tree of all", self._remove_tree),
        ]
        if stored_bytes:
            results.append(self._bytes_per_file(stored_bytes / self._count))
        return results

    # --- what is measured ---

    def _create(self, part: int) -> Callable[[], Awaitable[None]]:
        async def create() -> None:
            first = part * (self._count // 10)
            names = iter(range(first, first + self._count // 10))

            async def one() -> None:
                for number in names:
                    answer = await self._ask(MakeNode(self._place(number), Kind.FILE, 0o644))
                    assert isinstance(answer, Found)

            await asyncio.gather(*(one() for _ in range(DEPTH)))

        return create

    def _place(self, number: int) -> PathRef:
        return PathRef(self._directory, b"file-%08d" % number)

    async def _stat(self) -> None:
        numbers = iter(range(STATS[self._options.scale]))

        async def one() -> None:
            for number in numbers:
                answer = await self._ask(Stat(self._place(number * 7919 % self._count)))
                assert isinstance(answer, Found)

        await asyncio.gather(*(one() for _ in range(DEPTH)))

    async def _stat_many(self) -> None:
        firsts = iter(range(0, self._count, MANY))

        async def one() -> None:
            for first in firsts:
                numbers = range(first, min(self._count, first + MANY))
                answer = await self._ask(StatMany(tuple(self._place(number) for number in numbers)))
                assert isinstance(answer, FoundMany)
                assert not any(isinstance(one, int) for one in answer.inodes)

        await asyncio.gather(*(one() for _ in range(FEW)))

    async def _lists(self) -> None:
        await asyncio.gather(*(self._list(inodes=True)() for _ in range(FEW)))

    def _list(self, *, inodes: bool) -> Callable[[], Awaitable[None]]:
        async def listing() -> None:
            count, after, more = 0, b"", True
            while more:
                page = await self._ask(ListDirectory(self._directory, after, inodes=inodes))
                assert isinstance(page, Listing)
                count, more, after = count + len(page.entries), page.more, page.entries[-1].name
            assert count == self._count

        return listing

    async def _remove_tree(self) -> None:
        more = True
        while more:
            answer = await self._ask(RemoveTree(PathRef(ROOT, b"d")))
            assert isinstance(answer, Removed)
            more = answer.more

    # --- results ---

    async def _rate(self, what: str, rounds: list[Callable[[], Awaitable[None]]], count: int) -> Result:
        """Seconds for each. The first round warms up."""
        each_s = []
        for measure in rounds:
            began_s = time.perf_counter()
            await measure()
            each_s.append((time.perf_counter() - began_s) / count)
        ours = figure(each_s[1:])
        how = f"{DEPTH if what in ('create', 'stat') else FEW} in flight"
        per_s = TARGETS[what] if self._store == "embedded" else None
        target = "" if per_s is None else f"at least {per_s:,} a second"
        met = None if per_s is None else ours.median <= 1 / per_s
        return self._result(what, how, "each_s", ours, target, met, f"{1 / ours.median:,.0f} a second")

    async def _whole(self, what: str, measure: Callable[[], Awaitable[None]]) -> Result:
        began_s = time.perf_counter()
        await measure()
        ours = figure([time.perf_counter() - began_s])
        limit_s = WHOLE_S[what] if self._store == "embedded" and self._options.scale == "full" else None
        target = "" if limit_s is None else f"at most {limit_s:.0f} s"
        met = None if limit_s is None else ours.median <= limit_s
        return self._result(what, f"{self._count} files", "time_s", ours, target, met, f"{ours.median:.2f} s")

    def _result(
        self, what: str, how: str, metric: str, ours: Figure, target: str, met: bool | None, note: str
    ) -> Result:
        peer = self._local.get(what)
        return Result(
            suite="fs", case="/".join(part for part in ("names", self._store, what, how) if part), metric=metric,
            better="lower", ours=ours, peers={} if peer is None else {"one thread on this disk": figure(peer)},
            bound=None, target=target, met=met, verdicts={} if met is None else {target: met}, note=note,
        )  # fmt: skip

    def _stored_bytes(self) -> int:
        """Pages of the embedded store that are in use; 0 of another one."""
        return self._cluster.stored_bytes() if self._store == "embedded" else 0

    def _bytes_per_file(self, each: float) -> Result:
        return Result(
            suite="fs", case=f"names/{self._store}/a file in the store", metric="size_bytes", better="lower",
            ours=figure([each]), peers={}, bound=None, target="", note=f"{each:,.0f} bytes of {self._count:,} files",
        )  # fmt: skip


def _local(directory: Path, count: int) -> dict[str, list[float]]:
    """The same on the disk of this machine, through `os`: seconds for each, or for all."""
    directory.mkdir()
    names = [f"{directory}/file-{number:08d}" for number in range(count)]

    def create() -> None:
        for name in names:
            os.close(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o644))

    def stat() -> None:
        for name in names:
            os.stat(name)

    def scan() -> None:
        with os.scandir(directory) as found:
            assert sum(entry.stat().st_mode > 0 for entry in found) == count

    def listing() -> None:
        assert len(os.listdir(directory)) == count

    def remove() -> None:
        for name in os.listdir(directory):
            os.unlink(f"{directory}/{name}")
        os.rmdir(directory)

    took = {what: _took(measure) for what, measure in (("create", create), ("stat", stat), ("list", scan))}
    return {
        "create": [took["create"] / count], "stat": [took["stat"] / count], "stat many": [took["stat"] / count],
        "list with inodes": [took["list"] / count], "ls of all": [_took(listing)],
        "remove tree of all": [_took(remove)],
    }  # fmt: skip


def _took(measure: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    measure()
    return time.perf_counter() - began_s
