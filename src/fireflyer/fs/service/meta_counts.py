"""How many files there are, and what waits to be collected, for people: counted a page at a time, now and then."""

from __future__ import annotations

import asyncio
import time
from typing import Final, NamedTuple

from fireflyer.base.units import SECOND
from fireflyer.fs.core.meta import collecting
from fireflyer.fs.core.meta.context import SYSTEM, ClusterDefaults, Context
from fireflyer.fs.core.meta.tables import INODES, WRITERS, prefix_end
from fireflyer.fs.schema.manager import FilesStatus
from fireflyer.kvstore import Engine, Part, Reader, Trunk, key_after

__all__ = ["Counter"]

PAGE_ROWS: Final = 1000
MAX_INODES: Final = 1_000_000
MAX_WRITERS: Final = 10_000
FRESH_NS: Final = 10 * SECOND


class _Count(NamedTuple):
    rows: int
    whole: bool


class Counter:
    """Of one process, over its store."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = asyncio.Lock()
        self._known: FilesStatus | None = None
        self._known_ns = 0

    async def status(self, services: int, trouble: str) -> FilesStatus:
        """At most ten seconds old. Raises what the store raises."""
        async with self._lock:
            if self._known is None or time.monotonic_ns() - self._known_ns > FRESH_NS:
                self._known = await self._counted()
                self._known_ns = time.monotonic_ns()
        known = self._known
        return FilesStatus(
            services,
            known.inodes,
            known.all_inodes,
            known.writing,
            known.unlinked,
            known.unlinked_bytes,
            trouble,
        )

    async def _counted(self) -> FilesStatus:
        inodes = await self._rows(INODES, MAX_INODES)
        writers = await self._rows(WRITERS, MAX_WRITERS)
        backlog = await self._engine.read(lambda reader: collecting.backlog(_context(Trunk(reader).part())))
        return FilesStatus(0, inodes.rows, inodes.whole, writers.rows, backlog.inodes, backlog.bytes)

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


def _context(rows: Part) -> Context:
    return Context(rows=rows, asker=SYSTEM, now_ns=0, new_id=_no_id, cluster=ClusterDefaults())


def _no_id() -> int:
    raise AssertionError("counting makes nothing")
