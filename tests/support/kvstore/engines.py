"""The key-value engines as tests open them, and transactions that are open side by side."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from fireflyer import kvstore
from fireflyer.base.units import SECOND
from fireflyer.kvstore import Engine, MemoryEngine, MemoryStore, Transaction, steps

__all__ = ["KINDS", "Opened", "Place", "Side", "at_once", "place_of", "put", "values"]

T = TypeVar("T")

KINDS = ["memory", "embedded", "postgres"]


class Place:
    """A store that can be opened again; all but the embedded one also several times at once."""

    def __init__(self, kind: str, url: str) -> None:
        self.kind = kind
        self.url = url
        self._memory = MemoryStore()

    async def open(self) -> Engine:
        return MemoryEngine(self._memory) if self.kind == "memory" else await kvstore.open(self.url)


def place_of(kind: str, tmp_path: Path, postgres_url: Callable[[], str]) -> Place:
    if kind == "memory":
        return Place(kind, "memory:")
    return Place(kind, f"embedded:{tmp_path}/store" if kind == "embedded" else postgres_url())


class Opened:
    """A transaction that is open until `commit` or `abandon`."""

    def __init__(self, kv: Engine, *, timeout_ns: int = 5 * SECOND) -> None:
        self._context = kv.transaction(timeout_ns=timeout_ns)

    async def begin(self) -> Transaction:
        return await self._context.__aenter__()

    async def commit(self) -> None:
        await self._context.__aexit__(None, None, None)

    async def abandon(self) -> None:
        with contextlib.suppress(Side):
            await self._context.__aexit__(Side, Side("abandoned"), None)


def at_once(work: Callable[[], Awaitable[T]]) -> T:
    """The result of work on a `MemoryEngine` with `SteppedTiming`, with nobody in between."""
    step = steps(work)
    while True:
        try:
            next(step)
        except StopIteration as end:
            result: T = end.value
            return result


class Side(Exception):
    """Raised by tests, and by nothing else."""


async def put(kv: Engine, **items: bytes) -> None:
    async def body(tx: Transaction) -> None:
        for key, value in items.items():
            tx.set(key.encode(), value)

    await kv.transact(body, idempotent=True)


async def values(kv: Engine, begin: bytes = b"", end: bytes | None = None) -> dict[bytes, bytes]:
    """All of a range, by pages."""

    async def body(tx: kvstore.Reader) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = {}
        start = begin
        while True:
            page = await tx.get_range(start, end)
            found.update(page.items)
            if not page.more:
                return found
            start = kvstore.key_after(page.items[-1][0])

    return await kv.read(body)
