"""The tables, as SQLAlchemy Core describes them. Times are cluster time (about Unix time), nanoseconds.

They are changed by migrations alone (`migrations/versions`). A migration only adds: tables, and columns that are
nullable or have a default of the server. So a manager of the release before goes on copying after it.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import BigInteger, Column, Index, Integer, MetaData, Table, Text

from fireflyer.cluster.core.platform.store.retention import UsageDay
from fireflyer.cluster.core.platform.store.tables import PARTS

__all__ = [
    "AUDIT",
    "COPIED",
    "METADATA",
    "NODE_STATES",
    "REMOVED",
    "RUNS",
    "RUN_PARTS",
    "TASKS",
    "TOTALS",
    "USAGE_DAYS",
    "VERSION_TABLE",
]

METADATA: Final = MetaData()
VERSION_TABLE: Final = "history_version"
_Number = BigInteger().with_variant(Integer(), "sqlite")


def _stamp() -> tuple[Column[str], Column[int]]:
    return Column("cluster", Text, nullable=False), Column("change", _Number, nullable=False)


TASKS: Final = Table(
    "tasks",
    METADATA,
    Column("id", _Number, primary_key=True, autoincrement=False),
    *_stamp(),
    Column("name", Text, nullable=False),
    Column("user_name", Text, nullable=False),
    Column("user_group", Text, nullable=False),
    Column("node_group", Text, nullable=False),
    Column("nodes", Integer, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("submission", _Number, nullable=False),
    Column("array_index", Integer),
    Column("state", Text, nullable=False),
    Column("outcome", Text),
    Column("cause", Text),
    Column("exit_code", Integer),
    Column("reason", Text, nullable=False),
    Column("submitted_ns", _Number, nullable=False),
    Column("since_ns", _Number, nullable=False),
    Column("ended_ns", _Number),
    Column("runs", Integer, nullable=False),
    Column("requeues", Integer, nullable=False),
    Column("whole_life", _Number, nullable=False),
    *(Column(part, _Number, nullable=False, server_default="0") for part in PARTS),
    Index("tasks_by_end", "ended_ns", "id"),
    Index("tasks_by_user", "user_name", "ended_ns"),
)

RUNS: Final = Table(
    "runs",
    METADATA,
    Column("task", _Number, primary_key=True, autoincrement=False),
    Column("number", Integer, primary_key=True, autoincrement=False),
    *_stamp(),
    Column("state", Text, nullable=False),
    Column("nodes", Integer, nullable=False),
    Column("node_names", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("leave_reason", Text, nullable=False),
    Column("scheduled_ns", _Number, nullable=False),
    Column("prepared_ns", _Number),
    Column("started_ns", _Number),
    Column("ended_ns", _Number),
    Column("over_ns", _Number),
    Column("cause", Text),
    Column("exit_code", Integer),
    Column("end_reason", Text, nullable=False),
    Column("productive_ns", _Number, nullable=False, server_default="0"),
    Column("wish", Text),
    Column("saved_ns", _Number),
    Index("runs_by_change", "cluster", "change"),
    Index("runs_by_over", "over_ns"),
    Index("runs_by_end", "ended_ns"),
)

RUN_PARTS: Final = Table(
    "run_parts",
    METADATA,
    Column("task", _Number, primary_key=True, autoincrement=False),
    Column("run", Integer, primary_key=True, autoincrement=False),
    Column("part", Text, primary_key=True),
    Column("ns", _Number, nullable=False),
)

NODE_STATES: Final = Table(
    "node_states",
    METADATA,
    Column("cluster", Text, primary_key=True),
    Column("change", _Number, primary_key=True, autoincrement=False),
    Column("at_ns", _Number, nullable=False),
    Column("node", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("fault", Text),
    Column("ticket", _Number),
    Index("node_states_by_node", "node", "at_ns"),
    Index("node_states_by_time", "at_ns"),
)

AUDIT: Final = Table(
    "audit",
    METADATA,
    Column("entry", Text, primary_key=True),
    Column("at_ns", _Number, nullable=False),
    Column("user_name", Text, nullable=False),
    Column("command", Text, nullable=False),
    Column("target", Text, nullable=False),
    Column("text", Text, nullable=False),
    Column("address", Text, nullable=False),
    Column("outcome", Text, nullable=False),
    Index("audit_by_time", "at_ns", "entry"),
)

TOTALS: Final = Table(
    "totals",
    METADATA,
    Column("cluster", Text, primary_key=True),
    Column("change", _Number, primary_key=True, autoincrement=False),
    Column("at_ns", _Number, nullable=False),
    Column("node_ns", _Number, nullable=False),
    Column("healthy_ns", _Number, nullable=False),
    Column("allocated_ns", _Number, nullable=False),
    Column("productive_ns", _Number, nullable=False),
    Index("totals_by_time", "at_ns"),
)

USAGE_DAYS: Final = Table(
    "usage_days",
    METADATA,
    Column("day_ns", _Number, primary_key=True, autoincrement=False),
    Column("user_name", Text, primary_key=True),
    Column("user_group", Text, primary_key=True),
    *(Column(name, _Number, nullable=False) for name in UsageDay.__struct_fields__),
)
"""Of tasks that were removed from the other tables (`core.platform.store.retention`)."""

REMOVED: Final = Table(
    "removed",
    METADATA,
    Column("table_name", Text, primary_key=True),
    Column("until_ns", _Number, nullable=False),
    Column("until_key", _Number, nullable=False),
    Column("removed_rows", _Number, nullable=False),
)
"""Of each table: the newest that was removed, and how many rows were."""

COPIED: Final = Table(
    "copied",
    METADATA,
    Column("cluster", Text, primary_key=True),
    Column("until", _Number, nullable=False),
)
"""Rows of the outbox below `until` were copied, and are never again: what they made may have been removed since."""
