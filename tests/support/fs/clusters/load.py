"""Clients that write and verify all the time, each its own chunks, and remember what must be there."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import numpy as np
from tests.support.patience import allowed_s

from fireflyer.base.errors import FireflyerError, NotFound, TransientError
from fireflyer.base.units import KIB, SECOND
from fireflyer.fs.client import MISSING, READ, Chunks, Completed, Ring
from fireflyer.fs.schema.ids import ChunkId

__all__ = ["FIRST_FILE", "WRITERS", "Load", "read_batches"]

FIRST_FILE = 1000
"""Of the first writer; the next one has the next."""
WRITERS = 4
CHUNKS = 6
"""Of each writer."""
MAX_BYTES = 96 * KIB
TIMEOUT_NS = 20 * SECOND


READ_FILE = 2000
READ_CHUNKS = 16
READ_BYTES = 4096


def read_batches(ring: Ring, chains: list[int], stop: threading.Event) -> int:
    """Writes some chunks once, then reads pieces of them in batches, compares, and returns how many it has read."""
    content = np.random.default_rng(1).integers(0, 256, (READ_CHUNKS, 4, READ_BYTES), dtype=np.uint8)
    left = list(range(READ_CHUNKS))
    while left:
        for one in left:
            chunk = ChunkId(READ_FILE, one)
            ring.prepare_write(one, chains[one % len(chains)], chunk, content[one], timeout_ns=TIMEOUT_NS)
        left = _failed(ring.wait(len(left)))
    reads, back = np.zeros(READ_CHUNKS * 4, READ), np.zeros_like(content)
    at = np.arange(len(reads))
    reads["file"], reads["index"], reads["length"], reads["at"] = READ_FILE, at // 4, READ_BYTES, at * READ_BYTES
    reads["offset"], reads["chain"] = at % 4 * READ_BYTES, np.array(chains)[at // 4 % len(chains)]
    count = 0
    while not stop.is_set():
        back[:] = 0
        ring.prepare_reads(0, reads, back, timeout_ns=TIMEOUT_NS)
        over = ring.wait(len(reads))
        failed = _failed(over)
        read = np.setdiff1d(at, failed)
        assert len(over.tags) == len(reads)
        assert np.array_equal(back.reshape(-1, READ_BYTES)[read], content.reshape(-1, READ_BYTES)[read])
        count += len(read)
    return count


def _failed(over: Completed) -> list[int]:
    strange = [error for error in over.errors.values() if not isinstance(error, TransientError)]
    assert not strange, strange
    assert MISSING not in over.counts
    return list(over.errors)


class _Chunk:
    """`may_be`: contents that it can have; more than one while it is not known whether the last write was done."""

    def __init__(self) -> None:
        self.may_be: list[bytes | None] = [None]


class Load:
    """`WRITERS` tasks on one client. `stop` ends them; whatever one of them found wrong comes out of it."""

    def __init__(self, chunks: Chunks, chains: list[int], *, seed: int = 0) -> None:
        self.done = 0
        """Operations that were answered."""
        self.longest_gap_s = 0.0
        """In which no operation of a writer was answered."""
        self._chunks, self._chains = chunks, chains
        self._stop = asyncio.Event()
        self._state: dict[ChunkId, _Chunk] = {}
        self._answered = asyncio.Condition()
        probabilities = [random.Random(seed + number) for number in range(WRITERS)]
        self._tasks = [asyncio.create_task(self._write(number, rng)) for number, rng in enumerate(probabilities)]

    async def progress(self, operations: int, *, within_s: float) -> None:
        """Waits until so many more were answered. `within_s`: of a machine that is not busy."""
        wanted = self.done + operations
        async with asyncio.timeout(allowed_s(within_s)), self._answered:
            await self._answered.wait_for(lambda: self.done >= wanted or any(task.done() for task in self._tasks))

    async def stop(self) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)

    async def check_all(self) -> None:
        for chunk in self._state:
            await self._check(chunk)

    def chain_of(self, chunk: ChunkId) -> int:
        return self._chains[(chunk.file + chunk.index) % len(self._chains)]

    async def _write(self, number: int, rng: random.Random) -> None:
        last_s = time.monotonic()
        try:
            await self._work(number, rng, last_s)
        finally:
            async with self._answered:
                self._answered.notify_all()

    async def _work(self, number: int, rng: random.Random, last_s: float) -> None:
        while not self._stop.is_set():
            chunk = ChunkId(FIRST_FILE + number, rng.randrange(CHUNKS))
            try:
                if rng.random() < 0.5:
                    await self._check(chunk)
                else:
                    await self._change(chunk, rng)
            except TransientError:
                continue
            async with self._answered:
                self.done += 1
                self._answered.notify_all()
            now_s = time.monotonic()
            self.longest_gap_s, last_s = max(self.longest_gap_s, now_s - last_s), now_s

    async def _change(self, chunk: ChunkId, rng: random.Random) -> None:
        state = self._state.setdefault(chunk, _Chunk())
        if len(state.may_be) > 1:
            await self._check(chunk)
        new = None if rng.random() < 0.1 else rng.randbytes(rng.randrange(1, MAX_BYTES))
        before = state.may_be
        state.may_be = [*before, new]
        try:
            # All of it at once: a write over a longer content would leave the rest of that.
            await self._chunks.remove(self.chain_of(chunk), chunk, timeout_ns=TIMEOUT_NS)
            state.may_be = [None, new]
            if new is not None:
                await self._chunks.write(self.chain_of(chunk), chunk, new, timeout_ns=TIMEOUT_NS)
            state.may_be = [new]
        except TransientError:
            state.may_be = [*dict.fromkeys([*before, None, new])]
            raise

    async def _check(self, chunk: ChunkId) -> None:
        state = self._state.setdefault(chunk, _Chunk())
        found: bytes | None
        try:
            found = bytes(await self._chunks.read(self.chain_of(chunk), chunk, timeout_ns=TIMEOUT_NS))
        except NotFound:
            found = None
        except FireflyerError as error:
            if isinstance(error, TransientError):
                raise
            raise AssertionError(f"{chunk}: {type(error).__name__}: {error}") from error
        sizes = [None if one is None else len(one) for one in state.may_be]
        assert found in state.may_be, f"{chunk} has {None if found is None else len(found)} bytes, may have {sizes}"
