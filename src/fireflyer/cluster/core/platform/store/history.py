"""What the history is told: one row of the outbox for each change of a task, a run or a node, and each command."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from fireflyer.cluster.core.health.findings import Finding
from fireflyer.cluster.core.platform.store.rows import RunRow, TaskRow, decode_row, encode_row

__all__ = [
    "ClusterTotals",
    "CommandDone",
    "HistoryRow",
    "NodeChange",
    "RunChange",
    "TaskChange",
    "decode_history",
    "encode_history",
]


class TaskChange(msgspec.Struct, frozen=True, tag="TaskChange"):
    at_ns: int
    task: TaskRow
    node_group: str
    nodes: int
    """That it asks for, at least."""


class RunChange(msgspec.Struct, frozen=True, tag="RunChange"):
    at_ns: int
    run: RunRow


class NodeChange(msgspec.Struct, frozen=True, tag="NodeChange"):
    at_ns: int
    node: str
    state: str
    """`up`, `lost`, `drained`, `resumed`, `removed`, `warned`; or a state of repair (`core.health.records`)."""
    reason: str = ""
    fault: Finding | None = None
    """What led to it, where checks did."""
    ticket: int = 0
    """Of the repair that it belongs to; 0: none."""


class CommandDone(msgspec.Struct, frozen=True, tag="CommandDone"):
    """The audit: who did what, submissions too."""

    at_ns: int
    user: str
    command: str
    target: str
    text: str
    address: str = ""
    """Where the request came from; empty where that is not known."""
    outcome: str = "done"
    """`begun`: whether it was done is not known; else `done`, or `refused`."""


class ClusterTotals(msgspec.Struct, frozen=True, tag="ClusterTotals"):
    """Node-time since the cluster began, as in `rows.ClusterRow`; recorded every `Settings.totals_every_ns`."""

    at_ns: int
    node_ns: int
    healthy_ns: int
    allocated_ns: int
    productive_ns: int


HistoryRow: TypeAlias = TaskChange | RunChange | NodeChange | CommandDone | ClusterTotals


class _Envelope(msgspec.Struct, frozen=True):
    row: HistoryRow


def encode_history(row: HistoryRow) -> bytes:
    return encode_row(_Envelope(row))


def decode_history(key: bytes, value: bytes) -> HistoryRow:
    """Raises `DataCorruption`."""
    return decode_row(key, value, _Envelope).row
