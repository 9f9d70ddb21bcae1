"""What a client does to be measured: one thread with a ring, data verified after the clock has stopped."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fireflyer.base.errors import DataCorruption
from fireflyer.base.units import KIB, MIB
from fireflyer.fs.client import READ, Ring
from fireflyer.fs.schema.ids import ChunkId

__all__ = ["FILE", "Chunks", "Work"]

FILE = 1
WRITTEN = 2
_TAGS = 1 << 16


class Work(NamedTuple):
    """What was done, and the processor time that it took: of this process, and of all storage processes."""

    done: int
    elapsed_s: float
    client_s: float
    storage_s: float


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
        memory = np.zeros((depth, size_bytes), dtype=np.uint8)
        slot_of = np.zeros(_TAGS, dtype=np.int64)
        asked = np.zeros((_TAGS, 2), dtype=np.int64)
        pieces = MIB // size_bytes
        done = np.zeros(0, dtype=np.int64)

        def prepare(slots: np.ndarray) -> None:
            count = len(slots)
            some = np.zeros(count, READ)
            tags = np.arange(self._tag, self._tag + count) % _TAGS
            where = self._random.integers(0, self._count * pieces, count)
            some["index"], some["offset"], some["at"] = where // pieces, where % pieces * size_bytes, slots * size_bytes
            some["chain"], some["file"], some["length"] = 1 + some["index"] % self._chains, FILE, size_bytes
            slot_of[tags], asked[slots % _TAGS, 0] = slots, where
            self._ring.prepare_reads(self._tag, some, memory)
            self._tag += count

        prepare(np.arange(depth))
        used, began_s, count = self._used(), time.perf_counter(), 0
        while (elapsed_s := time.perf_counter() - began_s) < duration_s:
            over = self._ring.wait(max(1, depth // 2))
            if len(over.errors) or (over.counts != size_bytes).any():
                raise DataCorruption(f"reads came back with {over.errors or over.counts}")
            done = slot_of[(over.tags % _TAGS).astype(np.int64)]
            count += len(done)
            prepare(done)
        work = self._since(used, count, elapsed_s)
        while self._ring.under_way:
            self._ring.wait(self._ring.under_way)
        for slot in range(depth):
            chunk, piece = divmod(int(asked[slot, 0]), pieces)
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
        used, began_s = self._used(), time.perf_counter()
        chosen = self._random.integers(0, self._count, 1 << 16)
        count = self._write(WRITTEN, None, depth, [int(one) for one in chosen], began_s + duration_s)
        return self._since(used, count, time.perf_counter() - began_s)

    def _used(self) -> tuple[float, float]:
        mine = resource.getrusage(resource.RUSAGE_SELF)
        return mine.ru_utime + mine.ru_stime, self._storage_s()

    def _since(self, used: tuple[float, float], count: int, elapsed_s: float) -> Work:
        mine, storage = self._used()
        return Work(count, elapsed_s, mine - used[0], storage - used[1])

    def _write(self, file: int, count: int | None, depth: int, contents: range | list[int], until_s: float = 0) -> int:
        """Chunk i of the file becomes `contents[i]`; returns how many were done."""
        ring, begun, ended = self._ring, 0, 0
        while True:
            more = begun < count if count is not None else time.perf_counter() < until_s
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
