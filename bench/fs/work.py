"""What a client does to be measured: one thread with a ring, data verified after the clock has stopped."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fireflyer.base.errors import DataCorruption
from fireflyer.base.units import KIB, MIB
from fireflyer.fs.client import READ, Ring
from fireflyer.fs.schema.ids import ChunkId

__all__ = ["FILE", "Chunks", "Reads", "Slots", "Work", "keep_reading", "since", "used"]

FILE = 1
WRITTEN = 2
_TAGS = 1 << 16
Memory: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
Slots: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Reads: TypeAlias = np.ndarray[Any, np.dtype[np.void]]


class Work(NamedTuple):
    """What was done, and the processor time that it took: of this process, and of all storage processes."""

    done: int
    elapsed_s: float
    client_s: float
    storage_s: float


def used(storage_s: Callable[[], float]) -> tuple[float, float]:
    """Processor time so far: of this process, and what `storage_s` says."""
    mine = resource.getrusage(resource.RUSAGE_SELF)
    return mine.ru_utime + mine.ru_stime, storage_s()


def since(began: tuple[float, float], storage_s: Callable[[], float], done: int, elapsed_s: float) -> Work:
    client, storage = used(storage_s)
    return Work(done, elapsed_s, client - began[0], storage - began[1])


def keep_reading(ring: Ring, memory: Memory, choose: Callable[[Slots], Reads], duration_s: float) -> tuple[int, float]:
    """How many reads were done in how many seconds, one under way for each row of `memory`, and some were: it
    goes on until then. `choose` says what to read into rows; when it returns, each row has what it chose last."""
    depth, size_bytes = memory.shape
    slot_of = np.zeros(_TAGS, dtype=np.int64)
    first = 0

    def prepare(slots: Slots) -> None:
        nonlocal first
        some = choose(slots)
        some["length"], some["at"] = size_bytes, slots * size_bytes
        slot_of[np.arange(first, first + len(slots)) % _TAGS] = slots
        ring.prepare_reads(first, some, memory)
        first += len(slots)

    prepare(np.arange(depth))
    began_s, count = time.perf_counter(), 0
    while (elapsed_s := time.perf_counter() - began_s) < duration_s or not count:
        over = ring.wait(max(1, depth // 2))
        if len(over.errors) or (over.counts != size_bytes).any():
            raise DataCorruption(f"reads came back with {over.errors or over.counts}")
        count += len(over.tags)
        prepare(slot_of[(over.tags % _TAGS).astype(np.int64)])
    while ring.under_way:
        ring.wait(ring.under_way)
    return count, elapsed_s


class Chunks:
    """`count` chunks of 1 MiB of random data, read and written through `ring`. Chunk i is on chain 1 + i % `chains`."""

    def __init__(self, ring: Ring, count: int, chains: int = 1, storage_s: Callable[[], float] = lambda: 0.0) -> None:
        self._ring = ring
        self._storage_s = storage_s
        self._count = count
        self._chains = chains
        self._random = np.random.default_rng(1)
        self._content = self._random.integers(0, 256, (count, MIB), dtype=np.uint8)
        self._tag = 0

    def fill(self) -> None:
        self._write(FILE, self._count, 8, range(self._count))

    def reads(self, size_bytes: int, depth: int, duration_s: float) -> Work:
        """Reads of random pieces, `depth` under way."""
        memory = np.full((depth, size_bytes), 1, dtype=np.uint8)  # touched
        asked = np.zeros(depth, dtype=np.int64)
        pieces = MIB // size_bytes

        def choose(slots: Slots) -> Reads:
            some = np.zeros(len(slots), READ)
            where = asked[slots] = self._random.integers(0, self._count * pieces, len(slots))
            some["index"], some["offset"] = where // pieces, where % pieces * size_bytes
            some["chain"], some["file"] = 1 + some["index"] % self._chains, FILE
            return some

        began = used(self._storage_s)
        count, elapsed_s = keep_reading(self._ring, memory, choose, duration_s)
        work = since(began, self._storage_s, count, elapsed_s)
        for slot in range(depth):
            chunk, piece = divmod(int(asked[slot]), pieces)
            if not np.array_equal(memory[slot], self._content[chunk, piece * size_bytes :][:size_bytes]):
                raise DataCorruption(f"chunk {chunk} came back with other bytes than were written")
        return work

    def delays_s(self, count: int) -> list[float]:
        """Of single reads of 4 KiB."""
        memory, delays = np.zeros(4 * KIB, dtype=np.uint8), []
        some = np.zeros(1, READ)
        some["file"], some["length"] = FILE, memory.nbytes
        for _ in range(count + 20):
            some["index"] = self._random.integers(0, self._count)
            some["chain"] = 1 + some["index"] % self._chains
            self._tag += 1
            began_s = time.perf_counter()
            self._ring.prepare_reads(self._tag, some, memory)
            self._ring.wait(1)
            delays.append(time.perf_counter() - began_s)
        return delays[20:]

    def writes(self, depth: int, duration_s: float) -> Work:
        """Whole chunks of 1 MiB, written again and again."""
        began, began_s = used(self._storage_s), time.perf_counter()
        chosen = self._random.integers(0, self._count, 1 << 16)
        count = self._write(WRITTEN, None, depth, [int(one) for one in chosen], began_s + duration_s)
        return since(began, self._storage_s, count, time.perf_counter() - began_s)

    def _write(self, file: int, count: int | None, depth: int, contents: range | list[int], until_s: float = 0) -> int:
        """Chunk i of the file becomes `contents[i]`; returns how many were done."""
        ring, begun, ended = self._ring, 0, 0
        while True:
            more = begun < count if count is not None else not begun or time.perf_counter() < until_s
            while more and begun - ended < depth:
                index = begun % self._count
                ring.prepare_write(
                    begun, 1 + index % self._chains, ChunkId(file, index), self._content[contents[begun]]
                )
                begun += 1
                more = begun < count if count is not None else True
            if begun == ended:
                return ended
            over = ring.wait(1)
            for error in over.errors.values():
                raise error
            ended += len(over.tags)
