"""Clients that write and verify all the time, each its own chunks, and remember what must be there."""

from __future__ import annotations

import asyncio
import random
import time

from fireflyer.base.errors import FireflyerError, NotFound, TransientError
from fireflyer.base.units import KIB, SECOND
from fireflyer.fs.client import Chunks
from fireflyer.fs.schema.ids import ChunkId

__all__ = ["FIRST_FILE", "WRITERS", "Load"]

FIRST_FILE = 1000
"""Of the first writer; the next one has the next."""
WRITERS = 4
CHUNKS = 6
"""Of each writer."""
MAX_BYTES = 96 * KIB
TIMEOUT_NS = 20 * SECOND


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
        chances = [random.Random(seed + number) for number in range(WRITERS)]
        self._tasks = [asyncio.create_task(self._write(number, chance)) for number, chance in enumerate(chances)]

    async def progress(self, operations: int, *, within_s: float) -> None:
        """Waits until so many more were answered."""
        wanted = self.done + operations
        async with asyncio.timeout(within_s), self._answered:
            await self._answered.wait_for(lambda: self.done >= wanted or any(task.done() for task in self._tasks))

    async def stop(self) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)

    async def check_all(self) -> None:
        for chunk in self._state:
            await self._check(chunk)

    def chain_of(self, chunk: ChunkId) -> int:
        return self._chains[(chunk.file + chunk.index) % len(self._chains)]

    async def _write(self, number: int, chance: random.Random) -> None:
        last_s = time.monotonic()
        try:
            await self._work(number, chance, last_s)
        finally:
            async with self._answered:
                self._answered.notify_all()

    async def _work(self, number: int, chance: random.Random, last_s: float) -> None:
        while not self._stop.is_set():
            chunk = ChunkId(FIRST_FILE + number, chance.randrange(CHUNKS))
            try:
                if chance.random() < 0.5:
                    await self._check(chunk)
                else:
                    await self._change(chunk, chance)
            except TransientError:
                continue
            async with self._answered:
                self.done += 1
                self._answered.notify_all()
            now_s = time.monotonic()
            self.longest_gap_s, last_s = max(self.longest_gap_s, now_s - last_s), now_s

    async def _change(self, chunk: ChunkId, chance: random.Random) -> None:
        state = self._state.setdefault(chunk, _Chunk())
        if len(state.may_be) > 1:
            await self._check(chunk)
        new = None if chance.random() < 0.1 else chance.randbytes(chance.randrange(1, MAX_BYTES))
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
