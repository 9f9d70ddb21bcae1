"""Puts a batch of the outbox into the tables, in one transaction that holds the lock of the tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Table, delete, select, tuple_

from fireflyer.cluster.core.platform.store.history import HistoryRow, RunChange, TaskChange
from fireflyer.cluster.core.platform.store.rows import Account
from fireflyer.cluster.core.platform.store.tables import PARTS, KnownTask, Record, Stamp, fold
from fireflyer.cluster.history.schema import AUDIT, COPIED, NODE_STATES, RUN_PARTS, RUNS, TASKS, TOTALS

__all__ = ["PIECE_ROWS", "copied_until", "copy_rows", "insert_into", "note_copied", "write_audit"]

PIECE_ROWS: Final = 400
"""Rows, or keys, of one statement."""


def copy_rows(connection: Connection, cluster: str, rows: Sequence[tuple[int, HistoryRow]]) -> None:
    """Rows of the outbox with their numbers, in order. What was copied before changes nothing."""
    until = copied_until(connection, cluster)
    rows = [row for row in rows if row[0] >= until]
    if not rows:
        return
    changed = [row.task.id for _, row in rows if isinstance(row, TaskChange)]
    ran = [(row.run.task, row.run.number) for _, row in rows if isinstance(row, RunChange)]
    batch = fold(cluster, rows, _known_tasks(connection, changed), _known_runs(connection, ran))
    for piece in _pieces(batch.begun_again):
        connection.execute(delete(RUN_PARTS).where(RUN_PARTS.c.task.in_(piece)))
    _upsert(connection, TASKS, batch.tasks.values())
    _upsert(connection, RUNS, batch.runs.values())
    parts = [{"task": task, "run": run, "part": part, "ns": ns} for (task, run, part), ns in batch.parts.items() if ns]
    _add_parts(connection, parts)
    _upsert(connection, NODE_STATES, batch.node_states)
    _upsert(connection, TOTALS, batch.totals)
    write_audit(connection, batch.audit)
    note_copied(connection, cluster, rows[-1][0] + 1)


def copied_until(connection: Connection, cluster: str) -> int:
    found = connection.execute(select(COPIED.c.until).where(COPIED.c.cluster == cluster)).scalar()
    return int(found or 0)


def note_copied(connection: Connection, cluster: str, until: int) -> None:
    """All rows of the outbox below `until`."""
    if until > copied_until(connection, cluster):
        _upsert(connection, COPIED, [{"cluster": cluster, "until": until}])


def write_audit(connection: Connection, records: Iterable[Record]) -> None:
    """An entry whose outcome is known stays: a manager that leads no more may come late with `begun`."""
    _upsert(connection, AUDIT, records, where=AUDIT.c.outcome == "begun")


def _known_tasks(connection: Connection, ids: Iterable[int]) -> Mapping[int, KnownTask]:
    columns = [TASKS.c.id, TASKS.c.cluster, TASKS.c.change, *(TASKS.c[part] for part in PARTS)]
    found: dict[int, KnownTask] = {}
    for piece in _pieces(ids):
        for task, cluster, change, *parts in connection.execute(select(*columns).where(TASKS.c.id.in_(piece))):
            account = Account(**dict(zip(PARTS, parts, strict=True)))
            found[task] = KnownTask(Stamp(cluster, change), account)
    return found


def _known_runs(connection: Connection, keys: Iterable[tuple[int, int]]) -> Mapping[tuple[int, int], Stamp]:
    found: dict[tuple[int, int], Stamp] = {}
    for piece in _pieces(keys):
        query = select(RUNS.c.task, RUNS.c.number, RUNS.c.cluster, RUNS.c.change)
        query = query.where(tuple_(RUNS.c.task, RUNS.c.number).in_(piece))
        for task, number, cluster, change in connection.execute(query):
            found[task, number] = Stamp(cluster, change)
    return found


def _pieces(keys: Iterable[Any]) -> list[list[Any]]:
    unique = list(dict.fromkeys(keys))
    return [unique[place : place + PIECE_ROWS] for place in range(0, len(unique), PIECE_ROWS)]


def insert_into(connection: Connection, table: Table) -> Any:
    # Of the dialect that is in use, the only one that is imported: the other one takes longer than a connection.
    if connection.dialect.name == "postgresql":
        from sqlalchemy.dialects.postgresql import insert as insert_postgresql

        return insert_postgresql(table)
    from sqlalchemy.dialects.sqlite import insert as insert_sqlite

    return insert_sqlite(table)


def _upsert(
    connection: Connection, table: Table, records: Iterable[Record], *, where: ColumnElement[bool] | None = None
) -> None:
    """In the place of the rows with the same keys."""
    wanted = [{name: _stored(value) for name, value in record.items()} for record in records]
    if not wanted:
        return
    keys = [column.name for column in table.primary_key]
    insert = insert_into(connection, table)
    others = {name: insert.excluded[name] for name in wanted[0] if name not in keys}
    statement = insert.on_conflict_do_update(index_elements=keys, set_=others, where=where)
    connection.execute(statement, wanted)


def _add_parts(connection: Connection, parts: list[Record]) -> None:
    if parts:
        insert = insert_into(connection, RUN_PARTS)
        connection.execute(
            insert.on_conflict_do_update(
                index_elements=["task", "run", "part"], set_={"ns": RUN_PARTS.c.ns + insert.excluded.ns}
            ),
            parts,
        )


def _stored(value: Any) -> Any:
    """Programs of users may end with any reason; PostgreSQL takes no NUL in a text."""
    return value.replace("\0", "\ufffd") if isinstance(value, str) else value
