"""Copies the outbox into the tables, as long as this manager leads.

    outbox (first, next) ──> the next rows, bounded ──> one transaction of the database ──> `copied`: the leader clears

The leader clears in a transaction under its lease, after the database has committed. A leader that is killed in between
leaves rows that are there already; the next one copies them again, which changes nothing (`store.tables`). While the
database is away the outbox keeps all rows; over its bound submissions are refused.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, NamedTuple, Protocol

from fireflyer.base.errors import Busy, DataCorruption, TransientError
from fireflyer.cluster.core.platform.store.history import CommandDone, HistoryRow, decode_history
from fireflyer.cluster.core.platform.store.rows import OUTBOX_PREFIX, decode_row, outbox_key
from fireflyer.cluster.core.platform.store.tables import audit_record
from fireflyer.cluster.history.audit import AUDIT_PREFIX
from fireflyer.cluster.history.database import Database
from fireflyer.cluster.history.writing import copy_rows, write_audit
from fireflyer.kvstore import Engine, Transaction, prefix_range

__all__ = ["BATCH_ROWS", "Copier", "Leader", "Outbox"]

_log = logging.getLogger(__name__)
BATCH_ROWS: Final = 1000
_AUDIT_ROWS: Final = 200
"""Of one batch."""
LOOK_S: Final = 0.5
RETRY_S: Final = (1.0, 30.0)
"""After the first failure and the longest pause; doubles in between."""


class Outbox(NamedTuple):
    cluster: str
    first: int
    """Not cleared yet."""
    next: int
    """Of the next row that will be put there."""


class Leader(Protocol):
    def outbox(self) -> Outbox | None:
        """None: this manager does not lead."""

    def copied(self, until: int) -> None:
        """Rows below are in the tables."""


class Copier:
    def __init__(self, leader: Leader, engine: Engine, database: Database) -> None:
        self._leader, self._engine, self._database = leader, engine, database
        self._prepared = False
        self._copied: tuple[str, int] = ("", 0)
        self.failing = ""
        """Why nothing is copied now; empty: all is well."""

    @property
    def prepared(self) -> bool:
        """The tables are there."""
        return self._prepared

    async def run(self) -> None:
        """For ever."""
        pause_s = RETRY_S[0]
        while True:
            try:
                more = await self.step()
            except (TransientError, DataCorruption) as error:
                if self.failing != str(error):
                    _log.warning("the history is not copied reason=%s", error)
                self.failing = str(error)
                await asyncio.sleep(pause_s)
                pause_s = min(RETRY_S[1], 2 * pause_s)
                continue
            if self.failing:
                _log.info("the history is copied again")
            self.failing, pause_s = "", RETRY_S[0]
            if not more:
                await asyncio.sleep(LOOK_S)

    async def step(self) -> bool:
        """Copies one batch. Whether there may be more. Raises `Busy` where the database is away, what the store
        raises, and `DataCorruption` for a row that this release cannot read: it stays until a newer one leads."""
        outbox = self._leader.outbox()
        if outbox is None:
            return False
        if not self._prepared:
            revision = await self._database.prepare()
            self._prepared = True
            _log.info("the history is kept database=%s revision=%s", self._database.name, revision)
        audited = await _copy_audit(self._engine, self._database)
        cluster, copied = self._copied
        begin = max(outbox.first, copied if cluster == outbox.cluster else 0)
        rows = await self._rows(begin, min(outbox.next, begin + BATCH_ROWS))
        if rows:
            await self._database.call(lambda connection: copy_rows(connection, outbox.cluster, rows), writes=True)
            until = rows[-1][0] + 1
            self._copied = outbox.cluster, until
            self._leader.copied(until)
        elif outbox.first < begin:
            self._leader.copied(begin)  # an earlier draft that cleared them was dropped
        return audited or (bool(rows) and rows[-1][0] + 1 < outbox.next)

    async def _rows(self, begin: int, end: int) -> list[tuple[int, HistoryRow]]:
        """Those that are there, without a gap."""
        if begin >= end:
            return []
        first, last = outbox_key(begin), outbox_key(end)
        found = await self._engine.read(lambda rows: rows.get_range(first, last, limit=BATCH_ROWS))
        decoded: list[tuple[int, HistoryRow]] = []
        for key, value in found.items:
            number = int.from_bytes(key[len(OUTBOX_PREFIX) :], "big")
            if number != begin + len(decoded):
                break
            try:
                decoded.append((number, decode_history(key, value)))
            except DataCorruption:
                if decoded:
                    break
                raise
        if not decoded and self._leader.outbox() is not None:
            raise Busy(f"row {begin} of the outbox is not there yet; it is looked for again", retry_ns=0)
        return decoded


async def _copy_audit(engine: Engine, database: Database) -> bool:
    """One batch. Whether there may be more."""
    begin, end = prefix_range(AUDIT_PREFIX)
    page = await engine.read(lambda rows: rows.get_range(begin, end, limit=_AUDIT_ROWS))
    if not page.items:
        return False
    records = [audit_record(key.hex(), decode_row(key, value, CommandDone)) for key, value in page.items]
    await database.call(lambda connection: write_audit(connection, records), writes=True)

    async def clear(rows: Transaction) -> None:
        for key, value in page.items:
            if await rows.get(key) == value:
                rows.clear(key)

    await engine.transact(clear, idempotent=True)
    return len(page.items) == _AUDIT_ROWS
