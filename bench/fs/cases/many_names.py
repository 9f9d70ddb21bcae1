"""How names grow: files made until there are a million, in directories of 10,000, over the embedded store.

After each step what a file takes in the store and in the manager's memory, and what the next create and a stat at a
random place take. Linear growth is: each of them as with few files.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

from bench.fs.cluster import Cluster, running, spread
from bench.report import Figure, Options, Result, figure
from fireflyer.fs.client.connecting import connect_async
from fireflyer.fs.client.files.asyncio_files import Files
from fireflyer.fs.schema.inodes import ROOT, InodeId, Kind
from fireflyer.fs.schema.meta import Found, MakeDirectory, MakeNode, PathRef, Stat

__all__ = ["run"]

STEPS: Final = {
    "tiny": (100, 300),
    "brief": (2_000, 20_000),
    "full": (10_000, 100_000, 1_000_000),
}
IN_DIRECTORY: Final = 10_000
DEPTH: Final = 128
STATS: Final = {"tiny": 200, "brief": 5_000, "full": 20_000}
LAST: Final = 20_000
"""Creates of which the time is told: those at the end of a step."""
LIMIT: Final = 1.25
"""Times what it was with the fewest files."""


def run(options: Options) -> Iterator[Result]:
    if options.selects("names/growth"):
        yield from asyncio.run(_measure(options))


async def _measure(options: Options) -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="ff-bench-") as directory:
        async with running(Path(directory), nodes=2, chains=spread(2, 2)) as cluster:
            await cluster.add_table()
            files = await connect_async(f"ff://{cluster.manager.address}", credential=cluster.credential)
            try:
                return [result async for result in _Growth(options, cluster, files).all()]
            finally:
                await files.close()


class _Growth:
    def __init__(self, options: Options, cluster: Cluster, files: Files) -> None:
        self._options = options
        self._cluster = cluster
        self._files = files
        self._directories: list[InodeId] = []
        self._count = 0
        self._first: dict[str, float] = {}

    async def all(self) -> AsyncIterator[Result]:
        empty_bytes, memory_bytes = self._cluster.stored_bytes(), self._cluster.manager.anonymous_bytes()
        for count in STEPS[self._options.scale]:
            await self._make(count - LAST)
            began, first_s = self._count, time.perf_counter()
            await self._make(count)
            each_s = (time.perf_counter() - first_s) / (count - began)
            yield self._result("create", "each_s", figure([each_s]), f"{each_s * 1e6:.0f} us")
            stats = [await self._stats() for _ in range(3)]
            yield self._result("stat", "each_s", figure(stats), f"{figure(stats).median * 1e6:.0f} us")
            stored_bytes = (self._cluster.stored_bytes() - empty_bytes) / count
            yield self._result("a file in the store", "size_bytes", figure([stored_bytes]), f"{stored_bytes:.0f} bytes")
            held_bytes = self._cluster.manager.anonymous_bytes() - memory_bytes
            note = f"{held_bytes / 1e6:.0f} MB more than without files"
            yield self._result("memory of the service", "held_bytes", figure([held_bytes]), note)

    async def _make(self, count: int) -> None:
        while self._count < count:
            if self._count % IN_DIRECTORY == 0:
                made = await self._files.meta.call(MakeDirectory(PathRef(ROOT, b"d%d" % len(self._directories))))
                assert isinstance(made, Found)
                self._directories.append(made.inode.id)
            end = min(count, len(self._directories) * IN_DIRECTORY)
            numbers = iter(range(self._count, end))

            async def one(numbers: Iterator[int] = numbers) -> None:
                for number in numbers:
                    answer = await self._files.meta.call(MakeNode(self._place(number), Kind.FILE, 0o644))
                    assert isinstance(answer, Found)

            await asyncio.gather(*(one() for _ in range(DEPTH)))
            self._count = end

    def _place(self, number: int) -> PathRef:
        return PathRef(self._directories[number // IN_DIRECTORY], b"file-%08d" % number)

    async def _stats(self) -> float:
        """Seconds for each."""
        count = STATS[self._options.scale]
        numbers = iter(random.Random(self._count).choices(range(self._count), k=count))

        async def one() -> None:
            for number in numbers:
                answer = await self._files.meta.call(Stat(self._place(number)))
                assert isinstance(answer, Found)

        began_s = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(DEPTH)))
        return (time.perf_counter() - began_s) / count

    def _result(self, what: str, metric: str, ours: Figure, note: str) -> Result:
        first = self._first.setdefault(what, ours.median)
        compared = self._options.scale == "full" and metric != "held_bytes" and self._count > STEPS["full"][0]
        met = ours.median <= LIMIT * first if compared else None
        target = f"at most {LIMIT} times what it is with {STEPS['full'][0]:,}" if compared else ""
        return Result(
            suite="fs", case=f"names/growth/{self._count} files/{what}", metric=metric, better="lower", ours=ours,
            peers={}, bound=None, target=target, met=met, verdicts={} if met is None else {target: met}, note=note,
        )  # fmt: skip
