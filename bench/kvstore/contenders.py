"""Who takes turns: our engines, and the same work on LMDB and asyncpg without us.

A contender does transactions for a while with so many tasks at once, each on a key of its own, and says how long one
took. `increment` reads the key, adds one and writes it; `read` reads it. Nothing conflicts, but for PostgreSQL's coarse
locks.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import asyncpg
import lmdb

from fireflyer.kvstore import Engine, Reader, Transaction

__all__ = ["BareAsyncpg", "BareLmdb", "Contender", "Ours", "synced_append_s"]


class Contender(Protocol):
    done: int
    """Increments since the beginning, for the check at the end."""

    async def run(self, work: str, tasks: int, duration_s: float) -> float:
        """Seconds per transaction."""

    async def total(self) -> int:
        """The sum of all counters."""


async def _repeat(step: Callable[[int], Awaitable[None]], tasks: int, duration_s: float) -> tuple[int, float]:
    """How many steps `tasks` tasks took together, and in which time."""
    begin = time.perf_counter()
    count = 0

    async def work(number: int) -> None:
        nonlocal count
        while True:  # once at least, however slow the machine is
            await step(number)
            count += 1
            if time.perf_counter() - begin >= duration_s:
                return

    await asyncio.gather(*(work(number) for number in range(tasks)))
    return count, time.perf_counter() - begin


def _key(number: int) -> bytes:
    return b"counter/%04d" % number


class Ours(Contender):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.done = 0

    async def run(self, work: str, tasks: int, duration_s: float) -> float:
        step = self._increment if work == "increment" else self._read
        count, elapsed_s = await _repeat(step, tasks, duration_s)
        self.done += count if work == "increment" else 0
        return elapsed_s / count

    async def total(self) -> int:
        async def add_up(tx: Reader) -> int:
            return sum(int(value) for _, value in (await tx.get_range(b"", None)).items)

        return await self._engine.read(add_up)

    async def _increment(self, number: int) -> None:
        key = _key(number)

        async def body(tx: Transaction) -> None:
            tx.set(key, b"%d" % (int(await tx.get(key) or b"0") + 1))

        await self._engine.transact(body)

    async def _read(self, number: int) -> None:
        await self._engine.read(lambda tx: tx.get(_key(number)))


class BareLmdb(Contender):
    """One synced LMDB transaction after the other: it has one writer, so tasks would wait for each other."""

    def __init__(self, directory: str) -> None:
        self._env = lmdb.open(directory, map_size=1 << 30)
        self.done = 0

    async def run(self, work: str, tasks: int, duration_s: float) -> float:
        begin = time.perf_counter()
        count = 0
        while (elapsed_s := time.perf_counter() - begin) < duration_s or count == 0:
            key = _key(count % tasks)
            if work == "increment":
                with self._env.begin(write=True) as txn:
                    txn.put(key, b"%d" % (int(txn.get(key) or b"0") + 1))
                self.done += 1
            else:
                with self._env.begin() as txn:
                    txn.get(key)
            count += 1
        return elapsed_s / count

    async def total(self) -> int:
        with self._env.begin() as txn:
            return sum(int(value) for _, value in txn.cursor())


class BareAsyncpg(Contender):
    """Serializable transactions with as many connections as ours has, repeated where the server refuses them."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.done = 0

    @classmethod
    async def connect(cls, url: str, max_connections: int) -> BareAsyncpg:
        pool = await asyncpg.create_pool(url, min_size=0, max_size=max_connections)
        await pool.execute("CREATE TABLE bare (key bytea PRIMARY KEY, value bytea NOT NULL) WITH (fillfactor = 80)")
        return cls(pool)

    async def run(self, work: str, tasks: int, duration_s: float) -> float:
        step = self._increment if work == "increment" else self._read
        count, elapsed_s = await _repeat(step, tasks, duration_s)
        self.done += count if work == "increment" else 0
        return elapsed_s / count

    async def total(self) -> int:
        return sum(int(row[0]) for row in await self._pool.fetch("SELECT value FROM bare"))

    async def close(self) -> None:
        await self._pool.close()

    async def _increment(self, number: int) -> None:
        key = _key(number)
        while True:
            try:
                async with self._pool.acquire() as connection, connection.transaction(isolation="serializable"):
                    value = await connection.fetchval("SELECT value FROM bare WHERE key = $1", key)
                    await connection.execute(
                        "INSERT INTO bare VALUES ($1, $2) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
                        key,
                        b"%d" % (int(value or b"0") + 1),
                    )
                return
            except asyncpg.SerializationError:
                continue

    async def _read(self, number: int) -> None:
        async with (
            self._pool.acquire() as connection,
            connection.transaction(isolation="serializable", readonly=True),
        ):
            await connection.fetchval("SELECT value FROM bare WHERE key = $1", _key(number))


def synced_append_s(path: str, rounds: int) -> float:
    """Seconds to append 4 KiB to a file and sync it, median."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        times = []
        for _ in range(rounds):
            begin = time.perf_counter()
            os.write(fd, os.urandom(4096))
            os.fdatasync(fd)
            times.append(time.perf_counter() - begin)
    finally:
        os.close(fd)
    return sorted(times)[len(times) // 2]
