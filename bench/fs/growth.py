"""How figures change from 1 to 4 nodes, and from ten thousand to a million chunks; and what memory a chunk takes.

Nodes hold one chain each, without copies. All of them share this machine's processors: the best that can be seen is
that more nodes cost nothing. Chunks are of 4 KiB (zeros), made by the engine itself and then served by a process; each
takes a block of 64 KiB and its checksums on the disk, which bounds how many there can be.
"""

from __future__ import annotations

import asyncio
import select
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from bench.fs import bounds
from bench.fs.cluster import CLUSTER, Cluster, running, spread, target_directory
from bench.fs.turns import Taken, in_turns, times
from bench.fs.work import FILE, Chunks, Reads, Slots, Work, keep_reading, since, used
from bench.report import Bound, Options, Result, figure
from fireflyer.base.errors import DataCorruption
from fireflyer.base.units import KIB, MIB
from fireflyer.fs.client import READ, Ring
from fireflyer.fs.service.target_directory import make_target
from fireflyer.native import ChunkNode

__all__ = ["missing", "run"]

DURATION_S: Final = {"tiny": 0.1, "brief": 0.7, "full": 2.0}
_NODES: Final = {"tiny": (1, 2), "brief": (1, 2, 4), "full": (1, 2, 3, 4)}
_CHUNKS: Final = {"tiny": (1_000,), "brief": (10_000, 100_000), "full": (10_000, 100_000, 1_000_000)}
_ROUNDS: Final = 3
_KEPT: Final = 32
"""Chunks of 1 MiB."""
_DEPTH: Final = 64
_BLOCK_BYTES: Final = 68 * KIB
_STAGED: Final = 1024
"""At once, while the chunks are made."""
_SIZE: Final = 4 * KIB
_READ: Final = "read 4KiB"
_WRITE: Final = "write 1MiB, 1 replica, durable"
_MEMORY: Final = "memory of a chunk"


def missing(options: Options) -> str:
    """What does not fit on this disk, in a line."""
    left_out = [count for count in _CHUNKS[options.scale] if not _fits(count)]
    if not left_out or not _selected(options, left_out[0]):
        return ""
    needed = left_out[0] * _BLOCK_BYTES / 1e9
    return f"not measured: {left_out[0]:,} chunks need {needed:.0f} GB on the disk of {tempfile.gettempdir()}"


def run(options: Options) -> Iterator[Result]:
    for nodes in _NODES[options.scale]:
        if any(options.selects(name) for name in _names_of_nodes(nodes)):
            yield from asyncio.run(_of_nodes(options, nodes))
    for count in _CHUNKS[options.scale]:
        if _selected(options, count) and _fits(count):
            yield from asyncio.run(_of_chunks(options, count))


def _fits(count: int) -> bool:
    return count * _BLOCK_BYTES * 1.1 < shutil.disk_usage(tempfile.gettempdir()).free


def _name(count: int) -> str:
    return f"growth/chunks/{count}"


def _selected(options: Options, count: int) -> bool:
    return any(options.selects(f"{_name(count)}/{what}") for what in (_READ, _MEMORY))


def _names_of_nodes(nodes: int) -> tuple[str, str, str]:
    large, small, writes = (f"growth/nodes/{nodes}/{what}" for what in ("read 1MiB", _READ, _WRITE))
    return large, small, writes


# --- nodes ---


async def _of_nodes(options: Options, nodes: int) -> list[Result]:
    duration_s = DURATION_S[options.scale]
    rounds = min(_ROUNDS, options.rounds)
    with tempfile.TemporaryDirectory(prefix="ff-bench-") as name:
        path = bounds.random_file(name)
        async with running(Path(name), nodes=nodes, chains=spread(nodes, 1)) as cluster:
            with cluster.ring() as ring:
                chunks = Chunks(ring, _KEPT, nodes, cluster.processor_s)
                chunks.fill()

                def stream() -> bounds.Rate:
                    return bounds.stream(path, MIB, 16, duration_s)

                large = in_turns(rounds, lambda: chunks.reads(MIB, 16, duration_s), {"sockets": stream})
                small = in_turns(
                    rounds,
                    lambda: chunks.reads(_SIZE, _DEPTH, duration_s),
                    {"echo": lambda: bounds.echo(_SIZE, _DEPTH, duration_s, nodes)},
                )
                writes = in_turns(rounds, lambda: chunks.writes(8, duration_s), {"sockets": stream})
    names = _names_of_nodes(nodes)
    return [
        _bytes_result(names[0], "read_bytes_per_s", large),
        _small_result(names[1], small, f"{nodes} bare epoll servers"),
        _bytes_result(names[2], "write_bytes_per_s", writes),
    ]


def _bytes_result(case: str, metric: str, taken: Taken) -> Result:
    bound = taken.others["sockets"]
    return Result(
        suite="fs", case=case, metric=metric, better="higher", ours=times(taken.ours, MIB), peers={},
        bound=Bound(bound.median * MIB, "one C program pair: sendfile to recv over loopback, one connection"),
        target="", note=f"{100 * taken.ours.median / bound.median:.0f} % of the bound", more=taken.used(),
    )  # fmt: skip


def _small_result(case: str, taken: Taken, formula: str, **more: float) -> Result:
    return Result(
        suite="fs", case=case, metric="read_s", better="lower", ours=taken.ours_s(), peers={},
        bound=Bound(1 / taken.others["echo"].median, formula + " with messages of the same sizes"), target="",
        note=f"{taken.ours.median:,.0f} per second, bound {taken.others['echo'].median:,.0f}", more=taken.used() | more,
    )  # fmt: skip


# --- chunks ---


async def _of_chunks(options: Options, count: int) -> list[Result]:
    duration_s = DURATION_S[options.scale]
    empty_bytes = await _memory_without_chunks()
    with tempfile.TemporaryDirectory(prefix="ff-bench-") as name:
        target = target_directory(Path(name), 1)
        make_target(str(target), CLUSTER, 1)
        records_bytes = _make_chunks(target / "chunks", count)
        async with running(Path(name), nodes=1, chains=spread(1, 1)) as cluster:
            process = cluster.nodes[1]
            opened_bytes = process.anonymous_bytes()
            with cluster.ring() as ring:
                taken = in_turns(
                    min(_ROUNDS, options.rounds),
                    lambda: _read(ring, count, duration_s, cluster),
                    {"echo": lambda: bounds.echo(_SIZE, _DEPTH, duration_s, 1)},
                )
            ready_s = process.ready_s
    memory = (opened_bytes - empty_bytes) / count
    return [
        _small_result(f"{_name(count)}/{_READ}", taken, "a bare epoll server", start_s=ready_s),
        Result(
            suite="fs", case=f"{_name(count)}/{_MEMORY}", metric="memory_bytes", better="lower",
            ours=figure([memory]), peers={}, bound=None, target="under 200 bytes", met=memory < 200,
            verdicts={"under 200 bytes": memory < 200}, more={"records_bytes": records_bytes / count},
            note="anonymous memory of the storage process above that of one without chunks; records: what the engine "
            "says of itself; checksums of blocks are on the disk",
        ),
    ]  # fmt: skip


async def _memory_without_chunks() -> int:
    with tempfile.TemporaryDirectory(prefix="ff-bench-") as name:
        async with running(Path(name), nodes=1, chains=spread(1, 1)) as cluster:
            return cluster.nodes[1].anonymous_bytes()


def _make_chunks(directory: Path, count: int) -> int:
    """Returns what memory the engine uses for their records."""
    directory.mkdir(mode=0o700)
    node = ChunkNode(io_threads=1, job_threads=2, buffer_bytes=128 * MIB)
    try:
        target = node.open_target(1, str(directory), reserve=0.0, durable=False)
        poll = select.poll()
        poll.register(node.event_fd, select.POLLIN)
        begun = done = 0
        while done < count:
            more = range(begun, min(count, done + _STAGED))
            for index in more:
                target.stage(index, (FILE, index), (1, 1), None, "truncate", 0, _SIZE, 0, 0, None)
            begun += len(more)
            poll.poll()
            for kind, *rest in node.take(_STAGED):
                if kind != "staged":
                    raise DataCorruption(f"a chunk was not made: {kind} {rest}")
                target.commit((FILE, rest[1]), (1, 1))
                done += 1
        memory_bytes = target.stats()["memory_bytes"]
        target.close()
        return memory_bytes
    finally:
        node.close()


def _read(ring: Ring, count: int, duration_s: float, cluster: Cluster) -> Work:
    random = np.random.default_rng(count)
    memory = np.full((_DEPTH, _SIZE), 1, dtype=np.uint8)

    def choose(slots: Slots) -> Reads:
        some = np.zeros(len(slots), READ)
        some["chain"], some["file"], some["index"] = 1, FILE, random.integers(0, count, len(slots))
        return some

    began = used(cluster.processor_s)
    done, elapsed_s = keep_reading(ring, memory, choose, duration_s)
    work = since(began, cluster.processor_s, done, elapsed_s)
    if memory.any():
        raise DataCorruption("chunks came back with other bytes than were written")
    return work
