"""Records of a data set at random, as a loader of training data reads them, beside reading the same bytes without it.

A batch of records comes through `RecordSet.read_batch`: places in the indexes, a plan, one batch of reads, a checksum
of each record. Its peers read what the plan says into memory that is there: through `read_batch` of the file client,
and through the ring of the chunk client alone, for which chunks and chains were worked out before the clock began.
All is in the page cache of the storage processes. What came is compared after the clock has stopped.
"""

from __future__ import annotations

import asyncio
import functools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

import fireflyer.fs
from bench.fs.cluster import Cluster, running, spread
from bench.report import Options, Result, figure
from fireflyer.base.errors import DataCorruption
from fireflyer.base.units import KIB, MIB
from fireflyer.data import RecordSet, RecordSetWriter
from fireflyer.data.places import Place
from fireflyer.data.read_plan import plan_reads
from fireflyer.fs.client import READ, Ring
from fireflyer.fs.client.files.disk import FileSystemDisk
from fireflyer.fs.client.files.file_system import FileSystem
from fireflyer.fs.client.replica_selector import Reads

__all__ = ["run"]

RECORD_BYTES: Final = (4 * KIB, 64 * KIB)
SET_BYTES: Final = {"tiny": 8 * MIB, "brief": 64 * MIB, "full": 1024 * MIB}
SHARDS: Final = 8
BATCH: Final = 256
BATCHES: Final = {"tiny": 2, "brief": 30, "full": 200}
ROUNDS: Final = {"tiny": 1, "brief": 3, "full": 5}
"""After one that does not count."""
FILES, CHUNKS = "read_batch of files", "the chunk client alone"
Numbers = np.ndarray[Any, np.dtype[np.int64]]


class _Batch(NamedTuple):
    numbers: Numbers
    places: list[int]
    """Where the peers put each record."""
    reads: list[tuple[Any, int, memoryview]]
    """Of the file client."""
    chunks: Reads
    """Of the chunk client; the ends of records that lie across chunks are reads of their own."""


def run(options: Options) -> Iterator[Result]:
    if options.selects("loading/records of a data set/"):
        with tempfile.TemporaryDirectory(prefix="ff-bench-") as directory:
            yield from asyncio.run(_measure(options, Path(directory)))


async def _measure(options: Options, directory: Path) -> list[Result]:
    async with running(directory, nodes=2, chains=spread(2, 2)) as cluster:
        await cluster.add_table()
        return await asyncio.to_thread(_all, options, cluster)


def _all(options: Options, cluster: Cluster) -> list[Result]:
    where = f"ff://{cluster.manager.address}"
    with fireflyer.fs.connect(where, credential=cluster.credential) as fs, cluster.ring() as ring:
        return [_of_size(options, fs, ring, size) for size in RECORD_BYTES]


def _of_size(options: Options, fs: FileSystem, ring: Ring, size: int) -> Result:
    path = f"/records-{size}"
    fs.mkdir(path)
    count = SET_BYTES[options.scale] // size
    rng = np.random.default_rng(7)
    with RecordSetWriter(path, shard_bytes=SET_BYTES[options.scale] // SHARDS, disk=FileSystemDisk(fs)) as writer:
        for _ in range(count):
            writer.add(rng.bytes(size))
    with RecordSet(Place(fs, path, f"ff://{path}", remote=True)) as records:
        files = [fs.open_file(f"{path}/{shard.name}") for shard in records.shards]
        memory = np.ones(BATCH * size * 2, np.uint8)
        chosen = rng.integers(0, count, (BATCHES[options.scale], BATCH))
        batches = [_batch(records, files, numbers, size, memory) for numbers in chosen]
        each = _times(options, records, fs, ring, batches, memory)
        for file in files:
            file.close()
    figures = {name: figure([BATCH * size / one for one in some]) for name, some in each.items()}
    ours = figures.pop("ours")
    note = f"{ours.median / size:,.0f} records a second; " + ", ".join(
        f"{ours.median / peer.median:.0%} of {name}" for name, peer in figures.items()
    )
    return Result(
        suite="fs", case=f"loading/records of a data set/{size // KIB}KiB, batches of {BATCH}/cached",
        metric="rate_bytes_per_s", better="higher", ours=ours, peers=dict(figures), bound=None, target="", note=note,
    )  # fmt: skip


def _batch(records: RecordSet, files: list[Any], numbers: Numbers, size: int, memory: Any) -> _Batch:
    places = [records.locate(int(number)) for number in numbers]
    shards = np.array([shard for shard, _ in places])
    offsets = 16 + np.array([record for _, record in places]) * size
    plan = plan_reads(shards, offsets, np.full(len(numbers), size))
    view = memory.data
    runs = list(zip(*(array.tolist() for array in plan[:4]), strict=True))
    reads = [(files[shard], offset, view[at : at + length]) for shard, offset, length, at in runs]
    parts = [
        (files[shard].inode_id, at + part.at, part.chain, part.chunk, part.offset, part.size)
        for shard, offset, length, at in runs
        for part in files[shard].file.body.where.parts(offset, length)
    ]
    chunks = np.zeros(len(parts), READ)
    for name, column in zip(
        ("file", "at", "chain", "index", "offset", "length"), zip(*parts, strict=True), strict=True
    ):
        chunks[name] = column
    return _Batch(numbers, plan.records.tolist(), reads, chunks)


def _times(
    options: Options, records: RecordSet, fs: FileSystem, ring: Ring, batches: list[_Batch], memory: Any
) -> dict[str, list[float]]:
    """Seconds of a batch, of each round."""
    last: list[memoryview] = []

    def ours() -> None:
        for batch in batches:
            last[:] = records.read_batch(batch.numbers)

    def by_files() -> None:
        for batch in batches:
            fs.read_batch(batch.reads)

    acts: dict[str, Callable[[], None]] = {
        "ours": ours,
        FILES: by_files,
        CHUNKS: functools.partial(_read_chunks, ring, batches, memory),
    }
    each: dict[str, list[float]] = {name: [] for name in acts}
    for turn in range(ROUNDS[options.scale] + 1):
        for name, act in acts.items():
            memory[:] = 1
            began_s = time.perf_counter()
            act()
            if turn:
                each[name].append((time.perf_counter() - began_s) / len(batches))
            if name != "ours":
                _compare(name, memory, batches[-1], last)
    return each


def _read_chunks(ring: Ring, batches: list[_Batch], memory: Any) -> None:
    for batch in batches:
        ring.prepare_reads(0, batch.chunks, memory)
        ring.submit()
        while ring.under_way:
            for error in ring.wait(ring.under_way).errors.values():
                raise error


def _compare(name: str, memory: Any, batch: _Batch, records: list[memoryview]) -> None:
    for record, place in zip(records, batch.places, strict=True):
        if record != memory[place : place + len(record)].data:
            raise DataCorruption(f"{name} brought other bytes than the records have")
