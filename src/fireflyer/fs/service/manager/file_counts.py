"""How many files there are, and what waits to be collected, for people: counted a page at a time, in proportion."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, Generic, NamedTuple, TypeVar

from fireflyer.base.units import SECOND
from fireflyer.fs.core.meta.context import SYSTEM, ClusterDefaults, Context
from fireflyer.fs.core.meta.open_files import garbage_collection
from fireflyer.fs.core.meta.tables import INODES, WRITERS, prefix_end
from fireflyer.fs.schema.manager import COUNTED, FilesStatus
from fireflyer.kvstore import Engine, Reader, Savepoint, TransactionBatch, key_after

__all__ = ["Counter"]

PAGE_ROWS: Final = 1000
MAX_INODES: Final = 1_000_000
WORTH: Final = 50
"""It rests so many times as long as counting took: who asks again and again must not keep the store busy."""
MAX_PAUSE_NS: Final = SECOND
"""... but nobody waits longer for what is bounded."""
T = TypeVar("T")


class _Count(NamedTuple):
    rows: int
    whole: bool


class _Now(NamedTuple):
    """Of what is bounded."""

    writing: int
    backlog: garbage_collection.Backlog


class Counter:
    """Of one process, over its store."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inodes = _Kept(lambda: self._rows(INODES, MAX_INODES))
        self._now = _Kept(self._count_now)

    async def status(self, services: int, last_error: str) -> FilesStatus:
        """What waits to be collected is counted after this was asked: who has removed something may rely on it. Inodes
        may be older, and it is said how old. Raises what the store raises."""
        asked_ns = time.monotonic_ns()
        now = await self._now.since(asked_ns, MAX_PAUSE_NS)
        inodes = await self._inodes.since(asked_ns, None)
        age_ns = max(0, asked_ns - self._inodes.began_ns)
        return FilesStatus(
            services, inodes.rows, inodes.whole, now.writing, now.backlog.inodes, now.backlog.bytes, last_error, age_ns
        )

    async def _count_now(self) -> _Now:
        writers = await self._rows(WRITERS, COUNTED)
        return _Now(
            writers.rows,
            await self._engine.read(
                lambda reader: garbage_collection.backlog(_context(TransactionBatch(reader).savepoint()))
            ),
        )

    async def _rows(self, table: bytes, limit: int) -> _Count:
        """Others are served between two pages."""
        rows, begin = 0, table

        async def page_from(reader: Reader) -> tuple[int, bytes]:
            page = await reader.get_range(begin, prefix_end(table), limit=PAGE_ROWS)
            return len(page.items), page.items[-1][0] if page.more else b""

        while rows < limit:
            count, last = await self._engine.read(page_from)
            rows += count
            if not last:
                return _Count(rows, True)
            begin = key_after(last)
            await asyncio.sleep(0)
        return _Count(rows, False)


class _Kept(Generic[T]):
    """What was counted last, and when. One counts at a time, and all who asked before it began have its result."""

    def __init__(self, count: Callable[[], Awaitable[T]]) -> None:
        self._count = count
        self._lock = asyncio.Lock()
        self._value: T | None = None
        self.began_ns = 0
        self._rests_until_ns = 0

    async def since(self, asked_ns: int, pause_ns: int | None) -> T:
        """Counted at this time or later, after a pause of that length at most; None: or before, while it rests."""
        async with self._lock:
            value, rest_ns = self._value, self._rests_until_ns - time.monotonic_ns()
            if value is not None and (self.began_ns >= asked_ns or (pause_ns is None and rest_ns > 0)):
                return value
            if pause_ns is not None and rest_ns > 0:
                await asyncio.sleep(min(rest_ns, pause_ns) / SECOND)
            began_ns = time.monotonic_ns()
            value = await self._count()
            now_ns = time.monotonic_ns()
            self._value, self.began_ns = value, began_ns
            self._rests_until_ns = now_ns + WORTH * (now_ns - began_ns)
            return value


def _context(rows: Savepoint) -> Context:
    return Context(rows=rows, requester=SYSTEM, now_ns=0, new_id=_no_id, cluster=ClusterDefaults())


def _no_id() -> int:
    raise AssertionError("counting writes nothing")
