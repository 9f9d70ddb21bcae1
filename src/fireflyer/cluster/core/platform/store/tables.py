"""Rows of the outbox as rows of the tables of the history.

    TaskChange    tasks: one row for each task, as it was last       run_parts: where the time of each run went
    RunChange     runs: one row for each run, as it was last
    NodeChange    node_states       CommandDone    audit             ClusterTotals    totals

Each row has the number of its outbox row (`change`) and the cluster's word (`cluster`), which changes when a store is
restored from a backup. What is not newer than what the table has is left out, so copying twice changes nothing.

*Parts.* A task's row adds up its whole life. What was added since the change before is of one run: time in the queue
and suspended is of the run that it waited for, all else is of the run that it had. So the parts of all runs of a task,
with those of a run that it waited for in vain, add up to its account exactly.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from fireflyer.cluster.core.platform.life.accounts import counted
from fireflyer.cluster.core.platform.store.history import (
    ClusterTotals,
    CommandDone,
    HistoryRow,
    NodeChange,
    RunChange,
    TaskChange,
)
from fireflyer.cluster.core.platform.store.rows import Account, RunRow, TaskRow
from fireflyer.cluster.schema.tasks import TaskState

__all__ = ["PARTS", "Batch", "KnownTask", "Record", "Stamp", "audit_record", "fold"]

Record: TypeAlias = dict[str, Any]
"""A row of a table: column -> value."""
PARTS: Final = Account.__struct_fields__
_WAITING: Final = ("queue_ns", "suspended_ns")


class Stamp(NamedTuple):
    """Of a row of a table: which row of the outbox it was made from."""

    cluster: str
    change: int

    def older_than(self, cluster: str, change: int) -> bool:
        return self.cluster != cluster or self.change < change


class KnownTask(NamedTuple):
    stamp: Stamp
    account: Account


class Batch:
    """What one transaction of the database puts into the tables."""

    def __init__(self) -> None:
        self.tasks: dict[int, Record] = {}
        self.runs: dict[tuple[int, int], Record] = {}
        self.parts: dict[tuple[int, int, str], int] = {}
        """(task, run, part): nanoseconds to be added."""
        self.begun_again: dict[int, None] = {}
        """Tasks of a store that was restored: the parts that the tables have of them are no more."""
        self.node_states: list[Record] = []
        self.audit: list[Record] = []
        self.totals: list[Record] = []


def fold(
    cluster: str,
    rows: Iterable[tuple[int, HistoryRow]],
    tasks: Mapping[int, KnownTask],
    runs: Mapping[tuple[int, int], Stamp],
) -> Batch:
    """`rows`: with their numbers, in order. `tasks`, `runs`: what the tables have of those that `rows` name."""
    batch = Batch()
    known_tasks, known_runs = dict(tasks), dict(runs)
    for number, row in rows:
        stamp = Stamp(cluster, number)
        match row:
            case TaskChange():
                _task(batch, stamp, row, known_tasks)
            case RunChange():
                key = row.run.task, row.run.number
                if key not in known_runs or known_runs[key].older_than(*stamp):
                    known_runs[key] = stamp
                    batch.runs[key] = _run(stamp, row.run)
            case NodeChange():
                batch.node_states.append(_node_state(stamp, row))
            case CommandDone():
                batch.audit.append(audit_record(f"{cluster}/{number:020}", row))
            case ClusterTotals():
                batch.totals.append({**stamp._asdict(), **msgspec.structs.asdict(row)})
    return batch


def audit_record(entry: str, row: CommandDone) -> Record:
    """`entry`: the key of its row, which no other entry has."""
    return {
        "entry": entry,
        "at_ns": row.at_ns,
        "user_name": row.user,
        "command": row.command,
        "target": row.target,
        "text": row.text,
        "address": row.address,
        "outcome": row.outcome,
    }


def _node_state(stamp: Stamp, row: NodeChange) -> Record:
    return {
        **stamp._asdict(),
        "at_ns": row.at_ns,
        "node": row.node,
        "state": row.state,
        "reason": row.reason,
        "fault": None if row.fault is None else msgspec.json.encode(row.fault).decode(),
        "ticket": row.ticket or None,
    }


def _task(batch: Batch, stamp: Stamp, change: TaskChange, known: dict[int, KnownTask]) -> None:
    row, before = change.task, known.get(change.task.id)
    if before is not None and not before.stamp.older_than(*stamp):
        return
    if before is not None and before.stamp.cluster != stamp.cluster:
        batch.begun_again[row.id] = None
        for key in [key for key in batch.parts if key[0] == row.id]:
            del batch.parts[key]
        before = None
    account = before.account if before is not None else Account()
    for part in PARTS:
        grown_ns = getattr(row.account, part) - getattr(account, part)
        if grown_ns:
            key = row.id, _run_of(row, part), part.removesuffix("_ns")
            batch.parts[key] = batch.parts.get(key, 0) + grown_ns
    known[row.id] = KnownTask(stamp, row.account)
    batch.tasks[row.id] = _task_record(stamp, change)


def _run_of(row: TaskRow, part: str) -> int:
    """The run to which the time counts that was added to the account by this change."""
    begun = row.state is TaskState.SCHEDULED or part not in _WAITING
    return max(0, row.runs - 1) if begun else row.runs


def _task_record(stamp: Stamp, change: TaskChange) -> Record:
    row = change.task
    return {
        "id": row.id,
        **stamp._asdict(),
        "name": row.name,
        "user_name": row.user,
        "user_group": row.group,
        "node_group": change.node_group,
        "nodes": change.nodes,
        "priority": row.priority,
        "submission": row.submission,
        "array_index": row.array_index,
        "state": row.state.value,
        "outcome": row.outcome.value if row.outcome is not None else None,
        "cause": row.cause.value if row.cause is not None else None,
        "exit_code": row.exit_code,
        "reason": row.reason,
        "submitted_ns": row.submitted_ns,
        "since_ns": row.since_ns,
        "ended_ns": row.ended_ns,
        "runs": row.runs,
        "requeues": row.requeues,
        "whole_life": row.whole_life,
        **msgspec.structs.asdict(row.account),
    }


def _run(stamp: Stamp, row: RunRow) -> Record:
    ended = row.ended
    until_ns = row.ended_ns if row.ended_ns is not None else row.scheduled_ns
    return {
        "task": row.task,
        "number": row.number,
        **stamp._asdict(),
        "state": row.state.value,
        "nodes": len(row.nodes),
        "node_names": json.dumps(row.nodes),
        "reason": row.reason,
        "leave_reason": row.wish_reason,
        "wish": row.wish.value,
        "saved_ns": row.saved_ns,
        "scheduled_ns": row.scheduled_ns,
        "prepared_ns": row.prepared_ns,
        "started_ns": row.started_ns,
        "ended_ns": row.ended_ns,
        "over_ns": row.over_ns,
        "cause": ended.cause.value if ended is not None else None,
        "exit_code": ended.exit_code if ended is not None else None,
        "end_reason": ended.reason if ended is not None else "",
        "productive_ns": counted(ended.parts, until_ns - row.scheduled_ns) if ended is not None else 0,
    }
