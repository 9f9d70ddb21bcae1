"""How figures change from ten thousand chunks in a target to a million, and what memory a chunk takes.

The chunks are made by the engine itself and then served by a process. `WITH_DATA` of them, spread evenly among the
others, have 4 KiB of zeros, and those are read; the others are of length 0, which takes no space on the disk. So what
is read stays as much, and only what the engine keeps grows. Large reads and writes are of other chunks, in the same
target.
"""

from __future__ import annotations

import asyncio
import select
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from bench.fs import bounds
from bench.fs.cases import growth
from bench.fs.cases.growth import LARGE, SMALL, WRITES
from bench.fs.cluster import CLUSTER, Cluster, running, spread, target_directory
from bench.fs.results import of_small
from bench.fs.turns import in_turns
from bench.fs.work import Chunks, Reads, Slots, Work, keep_reading, since, used
from bench.report import Bound, Options, Result, figure
from fireflyer.base.errors import DataCorruption
from fireflyer.base.units import KIB, MIB
from fireflyer.fs.client import READ, Ring
from fireflyer.fs.service.storage.target_directory import make_target
from fireflyer.native import ChunkNode, ChunkTarget

__all__ = ["run"]

CHUNKS: Final = {"tiny": (1_000,), "brief": (10_000, 100_000), "full": (10_000, 100_000, 1_000_000)}
WITH_DATA: Final = 10_000
FILE: Final = 3
"""Of all these; others have the files of `bench.fs.work`."""
MEMORY: Final = "memory of a chunk"
START: Final = "start"
MOST_MEMORY_BYTES: Final = 200
_STAGED: Final = 1024
"""At once, while the chunks are made."""
_DEPTH: Final = 64
_SIZE: Final = 4 * KIB


class _Made(NamedTuple):
    chunks: int
    every: int
    """Chunk `every` * i has data."""
    records_bytes: int
    """What the engine says that its records take."""


def run(options: Options) -> Iterator[Result]:
    for count in CHUNKS[options.scale]:
        name = f"growth/chunks/{count}"
        chosen = [what for what in (SMALL, LARGE, WRITES, MEMORY, START) if options.selects(f"{name}/{what}")]
        if chosen:
            yield from asyncio.run(_measure(options, count, name, chosen))


async def _measure(options: Options, count: int, name: str, chosen: list[str]) -> list[Result]:
    results = []
    empty = await _running_without_chunks()
    with tempfile.TemporaryDirectory(prefix="ff-bench-") as directory:
        stream = bounds.random_file(directory)
        target = target_directory(Path(directory), 1)
        make_target(str(target), CLUSTER, 1)
        made = _make_chunks(target / "chunks", count)
        async with running(Path(directory), nodes=1, chains=spread(1, 1)) as cluster:
            process = cluster.nodes[1]
            if MEMORY in chosen:
                results.append(_memory(f"{name}/{MEMORY}", made, process.anonymous_bytes() - empty.memory_bytes))
            started_s = process.ready_s
            with cluster.ring() as ring:
                chunks = Chunks(ring, growth.KEPT, storage_s=cluster.processor_s)
                chunks.fill()
                if SMALL in chosen:
                    results.append(_small(options, f"{name}/{SMALL}", ring, made, cluster))
                results += [
                    growth.measure(options, what, f"{name}/{what}", chunks, stream, 1)
                    for what in (LARGE, WRITES)
                    if what in chosen
                ]
            if START in chosen:
                await process.kill()
                await process.start()
                results.append(_start(f"{name}/{START}", started_s, process.ready_s, empty.ready_s))
    return results


class _Empty(NamedTuple):
    memory_bytes: int
    ready_s: float


async def _running_without_chunks() -> _Empty:
    with tempfile.TemporaryDirectory(prefix="ff-bench-") as name:
        async with running(Path(name), nodes=1, chains=spread(1, 1)) as cluster:
            return _Empty(cluster.nodes[1].anonymous_bytes(), cluster.nodes[1].ready_s)


def _memory(case: str, made: _Made, memory_bytes: int) -> Result:
    each = memory_bytes / made.chunks
    target = f"under {MOST_MEMORY_BYTES} bytes"
    return Result(
        suite="fs", case=case, metric="memory_bytes", better="lower", ours=figure([each]), peers={}, bound=None,
        target=target, met=each < MOST_MEMORY_BYTES, verdicts={target: each < MOST_MEMORY_BYTES},
        more={"records_bytes": made.records_bytes / made.chunks},
        note="anonymous memory of the storage process above that of one without chunks; records: what the engine says "
        "of itself; checksums of blocks are on the disk",
    )  # fmt: skip


def _start(case: str, orderly_s: float, killed_s: float, empty_s: float) -> Result:
    return Result(
        suite="fs", case=case, metric="start_s", better="lower", ours=figure([orderly_s]), peers={},
        bound=Bound(empty_s, "the same without chunks"), target="", more={"killed_s": killed_s},
        note="from the start of the process until it is ready, after an orderly end; killed: after kill -9",
    )  # fmt: skip


def _small(options: Options, case: str, ring: Ring, made: _Made, cluster: Cluster) -> Result:
    duration_s = growth.DURATION_S[options.scale]
    taken = in_turns(
        min(growth.ROUNDS, options.rounds),
        lambda: _read(ring, made, duration_s, cluster),
        {"echo": lambda: bounds.echo(_SIZE, _DEPTH, duration_s, 1)},
    )
    return of_small(case, taken, "a bare epoll server with messages of the same sizes")


def _make_chunks(directory: Path, count: int) -> _Made:
    directory.mkdir(mode=0o700)
    every = max(1, count // WITH_DATA)
    node = ChunkNode(io_threads=1, job_threads=2, buffer_bytes=128 * MIB)
    try:
        target = node.open_target(1, str(directory), reserve=0.0, durable=False)
        _stage_all(node, target, [0 if index % every else _SIZE for index in range(count)])
        records_bytes = target.stats()["memory_bytes"]
        target.close()
        return _Made(count, every, records_bytes)
    finally:
        node.close()


def _stage_all(node: ChunkNode, target: ChunkTarget, lengths: list[int]) -> None:
    """Chunk i gets `lengths[i]` zeros."""
    poll = select.poll()
    poll.register(node.event_fd, select.POLLIN)
    begun = done = 0
    while done < len(lengths):
        more = range(begun, min(len(lengths), done + _STAGED))
        for index in more:
            target.stage(index, (FILE, index), (1, 1), None, "truncate", 0, lengths[index], 0, 0, None)
        begun += len(more)
        poll.poll()
        for kind, *rest in node.take(_STAGED):
            if kind != "staged":
                raise DataCorruption(f"a chunk was not made: {kind} {rest}")
            target.commit((FILE, rest[1]), (1, 1))
            done += 1


def _read(ring: Ring, made: _Made, duration_s: float, cluster: Cluster) -> Work:
    random = np.random.default_rng(made.chunks)
    memory = np.full((_DEPTH, _SIZE), 1, dtype=np.uint8)
    with_data = -(-made.chunks // made.every)

    def choose(slots: Slots) -> Reads:
        some = np.zeros(len(slots), READ)
        some["chain"], some["file"] = 1, FILE
        some["index"] = random.integers(0, with_data, len(slots)) * made.every
        return some

    began = used(cluster.processor_s)
    done, elapsed_s = keep_reading(ring, memory, choose, duration_s)
    work = since(began, cluster.processor_s, done, elapsed_s)
    if memory.any():
        raise DataCorruption("chunks came back with other bytes than were written")
    return work
