"""Removes the oldest rows of a table, in one short transaction that holds the lock of the tables.

Each function removes some hundred rows at most that are older than `before_ns`, and says how many; None: there is
nothing more to look at. What is removed and what stays of it (`usage_days`) are one transaction, so a manager that is
killed, or leads no more, leaves reports as they are. Tables have indices for what is asked here; none is read as a
whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec
from sqlalchemy import Connection, Table, and_, delete, exists, func, or_, select, tuple_

from fireflyer.cluster.core.platform.store.retention import DAY_NS, PastEnd, PastRunTime, fold_usage
from fireflyer.cluster.history.schema import (
    AUDIT,
    NODE_STATES,
    REMOVED,
    RUN_PARTS,
    RUNS,
    TASKS,
    TOTALS,
    USAGE_DAYS,
)
from fireflyer.cluster.history.writing import PIECE_ROWS, insert_into, note_copied

__all__ = ["REMOVE", "Remove", "Removed"]

Removed: TypeAlias = Counter[str]
"""Rows that were removed of each table."""
Remove: TypeAlias = Callable[[Connection, str, int], Removed | None]
"""(connection, word of the cluster, before_ns)"""
_TASKS: Final = 100


# --- tasks ---


def _remove_tasks(connection: Connection, cluster: str, before_ns: int) -> Removed | None:
    """Those that ended, with their runs; not while a run may have nodes still."""
    tasks = _past_tasks(connection, cluster, before_ns)
    if not tasks:
        return None
    ids = [task.id for task in tasks]
    columns = (RUNS.c.task, RUNS.c.nodes, RUNS.c.scheduled_ns, RUNS.c.ended_ns, RUNS.c.over_ns, RUNS.c.productive_ns)
    runs = [PastRunTime(*row) for row in connection.execute(select(*columns).where(RUNS.c.task.in_(ids)))]
    ends = [PastEnd(task.id, task.user_name, task.user_group, task.outcome, task.ended_ns) for task in tasks]
    _add_usage(connection, ends, runs)
    removed = Removed()
    for table, key in ((RUN_PARTS, RUN_PARTS.c.task), (RUNS, RUNS.c.task), (TASKS, TASKS.c.id)):
        removed[table.name] = connection.execute(delete(table).where(key.in_(ids))).rowcount
    newest_ns = max(task.ended_ns or 0 for task in tasks)
    _note(connection, removed, {RUNS.name: (newest_ns, 0), TASKS.name: (newest_ns, 0)})
    note_copied(connection, cluster, max((task.change + 1 for task in tasks if task.cluster == cluster), default=0))
    return removed


def _past_tasks(connection: Connection, cluster: str, before_ns: int) -> Sequence[Any]:
    """The first that ended; where there are none, those that ended never, because their store was restored."""
    goes_on = exists().where(RUNS.c.task == TASKS.c.id, RUNS.c.over_ns.is_(None), RUNS.c.cluster == cluster)
    columns = (TASKS.c.id, TASKS.c.cluster, TASKS.c.change, TASKS.c.user_name, TASKS.c.user_group, TASKS.c.outcome,
               TASKS.c.ended_ns, TASKS.c.runs)  # fmt: skip
    ended = select(*columns).where(TASKS.c.ended_ns < before_ns, ~goes_on).order_by(TASKS.c.ended_ns, TASKS.c.id)
    found = connection.execute(ended.limit(_TASKS)).all()
    if not found:
        lost = (TASKS.c.ended_ns.is_(None), TASKS.c.cluster != cluster, TASKS.c.since_ns < before_ns, ~goes_on)
        found = connection.execute(select(*columns).where(*lost).order_by(TASKS.c.id).limit(_TASKS)).all()
    count, rows = 0, 0
    for task in found:  # of one with thousands of runs: itself alone
        rows += task.runs
        if count and rows > PIECE_ROWS:
            break
        count += 1
    return found[:count]


def _add_usage(connection: Connection, ends: list[PastEnd], runs: list[PastRunTime]) -> None:
    days = [
        {"day_ns": day_ns, "user_name": user, "user_group": group, **msgspec.structs.asdict(usage)}
        for (day_ns, user, group), usage in sorted(fold_usage(ends, runs).items())
    ]
    if days:
        insert = insert_into(connection, USAGE_DAYS)
        keys = [column.name for column in USAGE_DAYS.primary_key]
        grown = {name: USAGE_DAYS.c[name] + insert.excluded[name] for name in days[0] if name not in keys}
        connection.execute(insert.on_conflict_do_update(index_elements=keys, set_=grown), days)


def _remove_parts(connection: Connection, _cluster: str, before_ns: int) -> Removed | None:
    """Of tasks that ended, one after another: `removed` has the one that was the last."""
    done_ns, done_task = _until(connection, RUN_PARTS)
    after = or_(TASKS.c.ended_ns > done_ns, and_(TASKS.c.ended_ns == done_ns, TASKS.c.id > done_task))
    query = select(TASKS.c.ended_ns, TASKS.c.id).where(TASKS.c.ended_ns < before_ns, TASKS.c.ended_ns >= done_ns, after)
    tasks = connection.execute(query.order_by(TASKS.c.ended_ns, TASKS.c.id).limit(_TASKS)).all()
    if not tasks:
        return None
    gone = connection.execute(delete(RUN_PARTS).where(RUN_PARTS.c.task.in_([task.id for task in tasks])))
    removed = Removed({RUN_PARTS.name: gone.rowcount})
    _note(connection, removed, {RUN_PARTS.name: (tasks[-1].ended_ns, tasks[-1].id)})
    return removed


# --- all else ---


def _remove_node_states(connection: Connection, _cluster: str, before_ns: int) -> Removed | None:
    """The newest of each node stays: how it is now."""
    newer = NODE_STATES.alias("newer")
    replaced = exists().where(newer.c.node == NODE_STATES.c.node, newer.c.at_ns > NODE_STATES.c.at_ns)
    query = select(NODE_STATES.c.at_ns, NODE_STATES.c.cluster, NODE_STATES.c.change)
    query = query.where(NODE_STATES.c.at_ns < before_ns, replaced).order_by(NODE_STATES.c.at_ns).limit(PIECE_ROWS)
    rows = connection.execute(query).all()
    if not rows:
        return None
    return _delete(connection, NODE_STATES, [(row.cluster, row.change) for row in rows], rows[-1].at_ns)


def _remove_totals(connection: Connection, _cluster: str, before_ns: int) -> Removed | None:
    """All but the first reading of each day, whole days only: `removed` has the day that is looked at next."""
    day_ns, _ = _until(connection, TOTALS)
    before_ns -= before_ns % DAY_NS
    left = select(func.min(TOTALS.c.at_ns)).where(TOTALS.c.at_ns >= day_ns, TOTALS.c.at_ns < before_ns)
    first_ns: int | None = connection.execute(left).scalar()
    if first_ns is None:
        return None
    day_ns = first_ns - first_ns % DAY_NS
    query = select(TOTALS.c.cluster, TOTALS.c.change)
    query = query.where(TOTALS.c.at_ns > first_ns, TOTALS.c.at_ns < day_ns + DAY_NS).order_by(TOTALS.c.at_ns)
    keys = [tuple(row) for row in connection.execute(query.limit(PIECE_ROWS))]
    return _delete(connection, TOTALS, keys, day_ns if len(keys) == PIECE_ROWS else day_ns + DAY_NS)


def _remove_audit(connection: Connection, _cluster: str, before_ns: int) -> Removed | None:
    query = select(AUDIT.c.at_ns, AUDIT.c.entry).where(AUDIT.c.at_ns < before_ns)
    rows = connection.execute(query.order_by(AUDIT.c.at_ns, AUDIT.c.entry).limit(PIECE_ROWS)).all()
    return _delete(connection, AUDIT, [(row.entry,) for row in rows], rows[-1].at_ns) if rows else None


def _remove_usage(connection: Connection, _cluster: str, before_ns: int) -> Removed | None:
    query = select(*USAGE_DAYS.primary_key).where(USAGE_DAYS.c.day_ns < before_ns)
    rows = connection.execute(query.order_by(USAGE_DAYS.c.day_ns).limit(PIECE_ROWS)).all()
    return _delete(connection, USAGE_DAYS, [tuple(row) for row in rows], rows[-1].day_ns) if rows else None


def _delete(connection: Connection, table: Table, keys: list[tuple[Any, ...]], until_ns: int) -> Removed:
    columns = list(table.primary_key)
    chosen = columns[0].in_([key[0] for key in keys]) if len(columns) == 1 else tuple_(*columns).in_(keys)
    removed = Removed({table.name: connection.execute(delete(table).where(chosen)).rowcount if keys else 0})
    _note(connection, removed, {table.name: (until_ns, 0)})
    return removed


def _until(connection: Connection, table: Table) -> tuple[int, int]:
    found = connection.execute(
        select(REMOVED.c.until_ns, REMOVED.c.until_key).where(REMOVED.c.table_name == table.name)
    ).one_or_none()
    return (0, 0) if found is None else (found.until_ns, found.until_key)


def _note(connection: Connection, removed: Removed, until: Mapping[str, tuple[int, int]]) -> None:
    for name in sorted({*removed, *until}):
        known = connection.execute(select(REMOVED).where(REMOVED.c.table_name == name)).one_or_none()
        before = (0, 0, 0) if known is None else (known.until_ns, known.until_key, known.row_count)
        at = max(before[:2], until.get(name, (0, 0)))
        record = {"table_name": name, "until_ns": at[0], "until_key": at[1], "row_count": before[2] + removed[name]}
        insert = insert_into(connection, REMOVED)
        others = {column: insert.excluded[column] for column in record if column != "table_name"}
        connection.execute(insert.on_conflict_do_update(index_elements=["table_name"], set_=others), [record])


REMOVE: Final[Mapping[str, Remove]] = {
    RUN_PARTS.name: _remove_parts,
    TASKS.name: _remove_tasks,
    RUNS.name: _remove_tasks,
    NODE_STATES.name: _remove_node_states,
    TOTALS.name: _remove_totals,
    AUDIT.name: _remove_audit,
    USAGE_DAYS.name: _remove_usage,
}
"""Of each table of `retention.TABLES`."""
