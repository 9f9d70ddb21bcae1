"""Removes what the history keeps no longer, as long as this manager leads.

    every hour ──> sizes ──> for each table: what is too old, then what is too much ──> short transactions, with pauses

Between two transactions the copier has its turn. A manager that leads no more ends after the transaction that it is in,
which does what the next leader would have done.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Final

from sqlalchemy import Connection

from fireflyer.base.errors import Busy, TransientError
from fireflyer.cluster.core.platform.store.retention import MIN_AGE_NS, TABLES, HistoryKeep
from fireflyer.cluster.history.copier import Leader
from fireflyer.cluster.history.database import Database
from fireflyer.cluster.history.removal import REMOVE, Remove, Removed
from fireflyer.cluster.history.sizes import HistorySizes, TableSize, measured

__all__ = ["Retention"]

_log = logging.getLogger(__name__)
LOOK_S: Final = 1.0
FIRST_S: Final = 60.0
"""After the lead began: not while a new leader is busiest."""
SWEEP_S: Final = 3600.0
RETRY_S: Final = 60.0
PAUSE_S: Final = 0.02


class Retention:
    """`time_ns`: cluster time; raises `TransientError` where this manager does not lead."""

    def __init__(self, leader: Leader, time_ns: Callable[[], int], database: Database, keep: HistoryKeep) -> None:
        self._leader, self._time_ns, self._database, self._keep = leader, time_ns, database, keep
        self.sizes: HistorySizes | None = None
        """As they were at the last sweep, or when the lead began."""
        self.failing = ""
        """Why nothing is removed now; empty: all is well."""

    async def run(self, prepared: Callable[[], bool]) -> None:
        """For ever. `prepared`: whether the tables are there."""
        loop = asyncio.get_running_loop()
        next_s: float | None = None
        while True:
            await asyncio.sleep(LOOK_S)
            if self._leader.outbox() is None or not prepared():
                next_s = None
                continue
            if next_s is not None and loop.time() < next_s:
                continue
            try:
                if next_s is None:
                    self.sizes = await self._database.call(measured)
                    next_s = loop.time() + FIRST_S
                    continue
                await self.sweep()
            except TransientError as error:
                self.failing, next_s = str(error), loop.time() + RETRY_S
                _log.warning("old rows of the history are not removed, which is tried again reason=%s", error)
            else:
                self.failing, next_s = "", loop.time() + SWEEP_S

    async def sweep(self) -> None:
        """Raises `Busy` where the database does not answer, or another manager leads."""
        now_ns = self._time_ns()
        found = await self._database.call(measured)
        counts = {name: size.rows for name, size in found.tables.items()}
        removed = Removed()
        for table in TABLES:
            await self._remove(table, now_ns - self._keep.keep_ns(table), 0, counts, removed)
            await self._remove(table, now_ns - MIN_AGE_NS, self._keep.rows, counts, removed)
        if removed.total():
            _log.info("old rows of the history were removed %s", _words(removed))
        tables = {
            name: TableSize(counts[name], size.oldest_ns, size.removed + removed[name])
            for name, size in found.tables.items()
        }
        self.sizes = HistorySizes(tables, found.size_bytes)

    async def _remove(
        self, table: str, before_ns: int, enough: int, counts: dict[str, int], removed: Counter[str]
    ) -> None:
        """Until nothing older is there, or the table has `enough` rows."""
        while counts[table] > enough:
            outbox = self._leader.outbox()
            if outbox is None:
                raise Busy("another manager leads")
            gone = await self._database.call(_work(REMOVE[table], outbox.cluster, before_ns), writes=True)
            if gone is None:
                return
            removed.update(gone)
            for name, rows in gone.items():
                counts[name] -= rows
            await asyncio.sleep(PAUSE_S)


def _work(remove: Remove, cluster: str, before_ns: int) -> Callable[[Connection], Removed | None]:
    return lambda connection: remove(connection, cluster, before_ns)


def _words(removed: Counter[str]) -> str:
    return " ".join(f"{name}={rows}" for name, rows in sorted(removed.items()) if rows)
