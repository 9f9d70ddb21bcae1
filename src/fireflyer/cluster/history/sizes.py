"""How large the tables are: rows, the oldest of them, and how many were removed; bytes of the whole."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from sqlalchemy import Column, Connection, Table, func, select, text

from fireflyer.base.errors import NotFound
from fireflyer.cluster.core.platform.store.retention import TABLES
from fireflyer.cluster.history.database import Database
from fireflyer.cluster.history.schema import (
    AUDIT,
    METADATA,
    NODE_STATES,
    REMOVED,
    RUN_PARTS,
    RUNS,
    TASKS,
    TOTALS,
    USAGE_DAYS,
)
from fireflyer.cluster.history.upgrade import HEAD, found_revision

__all__ = ["HistorySizes", "TableSize", "measured", "measured_at"]

_TIMES: Final[dict[str, tuple[Table, Column[Any] | None]]] = {
    RUN_PARTS.name: (RUN_PARTS, None),
    TASKS.name: (TASKS, TASKS.c.ended_ns),
    RUNS.name: (RUNS, RUNS.c.ended_ns),
    NODE_STATES.name: (NODE_STATES, NODE_STATES.c.at_ns),
    TOTALS.name: (TOTALS, TOTALS.c.at_ns),
    AUDIT.name: (AUDIT, AUDIT.c.at_ns),
    USAGE_DAYS.name: (USAGE_DAYS, USAGE_DAYS.c.day_ns),
}


class TableSize(NamedTuple):
    rows: int
    oldest_ns: int | None
    """None: there is none, or its rows have no time."""
    removed: int
    """Since the tables were made."""


class HistorySizes(NamedTuple):
    tables: dict[str, TableSize]
    """Of each of `retention.TABLES`."""
    size_bytes: int
    """Of all tables and their indices; of SQLite the file, without its write-ahead log."""


def measured(connection: Connection) -> HistorySizes:
    """Counts rows: of millions that takes a second or more. Reads indices only."""
    removed = {row.table_name: row.row_count for row in connection.execute(select(REMOVED))}
    tables = {name: _size(connection, name, removed.get(name, 0)) for name in TABLES}
    return HistorySizes(tables, _bytes(connection))


def _size(connection: Connection, name: str, removed: int) -> TableSize:
    table, time = _TIMES[name]
    rows: int = connection.execute(select(func.count()).select_from(table)).scalar_one()
    oldest_ns = None if time is None else connection.execute(select(func.min(time))).scalar()
    return TableSize(rows, oldest_ns, removed)


def _bytes(connection: Connection) -> int:
    if connection.dialect.name == "sqlite":
        pages: int = connection.execute(text("SELECT page_count FROM pragma_page_count")).scalar_one()
        return pages * int(connection.execute(text("SELECT page_size FROM pragma_page_size")).scalar_one())
    names = [f"SELECT pg_total_relation_size(to_regclass('{name}')) AS size" for name in sorted(METADATA.tables)]
    total = connection.execute(text(f"SELECT sum(size) FROM ({' UNION ALL '.join(names)}) AS sizes"))  # noqa: S608
    return int(total.scalar_one() or 0)


async def measured_at(url: str) -> HistorySizes:
    """For whoever may open the database; a manager may run meanwhile. Raises `NotFound` where there are no tables of
    this release, and as `Database` does."""
    database = Database(url)
    if urlsplit(url).scheme == "sqlite" and not await asyncio.to_thread(os.path.exists, database.name):
        raise NotFound(f"there is no history at {database.name} yet; a manager makes it")
    try:
        revision = await database.call(found_revision)
        if revision < HEAD:
            raise NotFound(
                f"the history ({database.name}) has no tables of this release; they are made when one of its managers "
                "leads"
            )
        return await database.call(measured)
    finally:
        await database.close()
