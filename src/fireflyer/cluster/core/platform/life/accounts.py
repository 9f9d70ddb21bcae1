"""Cuts the time of a task's life so that the parts add up to it exactly.

A run's time is that between the decision and the moment when the manager knew that its launcher had ended, on cluster
time. What the launcher says of it was measured on another clock: its parts are taken as they are, as long as they fit,
and what is left over is the platform's own (`platform_ns`).
"""

from __future__ import annotations

import msgspec

from fireflyer.cluster.core.platform.store.rows import Account, RunRow, TaskRow
from fireflyer.cluster.schema.tasks import RunParts, TaskState

__all__ = ["counted", "run_account", "waiting_account"]

_PARTS = ("productive_ns", "checkpoint_ns", "lost_ns", "restart_ns", "start_ns", "other_ns", "unknown_ns")
"""What is productive is cut last."""


def _plus(account: Account, **parts: int) -> Account:
    return msgspec.structs.replace(account, **{name: getattr(account, name) + ns for name, ns in parts.items()})


def waiting_account(task: TaskRow, until_ns: int) -> Account:
    """Of a task without a run whose launcher lives."""
    part = {
        TaskState.QUEUED: "queue_ns",
        TaskState.SUSPENDED: "suspended_ns",
        TaskState.SUSPENDING: "release_ns",
    }[task.state]
    return _plus(task.account, **{part: until_ns - task.counted_ns})


def run_account(task: TaskRow, run: RunRow, until_ns: int) -> Account:
    """Of a task whose run ends now, or has come so far."""
    left = until_ns - task.counted_ns
    if run.ended is None:
        known = until_ns - (run.started_ns if run.started_ns is not None else until_ns)
        return _plus(task.account, platform_ns=left - known, unknown_ns=known)
    cut: dict[str, int] = {}
    for name in _PARTS:
        cut[name] = min(left, getattr(run.ended.parts, name))
        left -= cut[name]
    return _plus(task.account, platform_ns=left, **cut)


def counted(parts: RunParts, limit_ns: int) -> int:
    """Productive time of a run that took so long."""
    return min(parts.productive_ns, limit_ns)
