"""How long the history keeps what, and what stays of a task that is removed. Pure.

    run_parts     first: details of runs                        node_states   but the newest of each node
    tasks, runs   then; `usage_days` has what users had of      totals        thinned: the first reading of each day
                  the cluster on each day, which reports add    audit, usage_days   by age
                  to what the tables still have

*What a removed task leaves.* Its node-time goes to the days (of UTC) in which it lay, its runs to the day on which they
were scheduled, its end to the day on which it ended. Productive time is spread evenly over the run, as reports do. All
of it is whole nanoseconds that add up to what the run had.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Final, NamedTuple

import msgspec

from fireflyer.base.units import SECOND

__all__ = [
    "DAY_NS",
    "MIN_AGE_NS",
    "TABLES",
    "HistoryKeep",
    "PastEnd",
    "PastRunTime",
    "UsageDay",
    "fold_usage",
]

DAY_NS: Final = 86_400 * SECOND
MIN_AGE_NS: Final = 3600 * SECOND
"""Nothing younger is removed, also where a table has too many rows: a manager that leads no more may come late with
what it copied."""
TABLES: Final = ("run_parts", "tasks", "runs", "node_states", "totals", "audit", "usage_days")
_Days = Annotated[int, msgspec.Meta(ge=1, le=36_500)]


class HistoryKeep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The table `[history_keep]` of a configuration."""

    parts_days: _Days = 400
    """Where the time of each run went, after the end of its task."""
    tasks_days: _Days = 1100
    """Tasks and their runs, after the end of the task."""
    node_states_days: _Days = 400
    totals_days: _Days = 400
    """Readings of utilisation; after it one of each day stays."""
    audit_days: _Days = 1100
    usage_days: _Days = 3700
    """What users had on each day, of tasks that were removed."""
    rows: Annotated[int, msgspec.Meta(ge=1000, le=10**12)] = 20_000_000
    """Of each table; the oldest go first."""

    def keep_ns(self, table: str) -> int:
        """`table`: of `TABLES`."""
        days = {
            "run_parts": self.parts_days,
            "tasks": self.tasks_days,
            "runs": self.tasks_days,
            "node_states": self.node_states_days,
            "totals": self.totals_days,
            "audit": self.audit_days,
            "usage_days": self.usage_days,
        }
        return days[table] * DAY_NS


class PastEnd(NamedTuple):
    """A task that is removed. `ended_ns` None: it was lost with a store that was restored."""

    task: int
    user: str
    group: str
    outcome: str | None
    ended_ns: int | None


class PastRunTime(NamedTuple):
    task: int
    nodes: int
    scheduled_ns: int
    ended_ns: int | None
    over_ns: int | None
    """None: it was lost with a store that was restored, and counts nothing."""
    productive_ns: int


class UsageDay(msgspec.Struct):
    """What was added to one day of one user in one group. Node-time."""

    runs: int = 0
    node_ns: int = 0
    productive_ns: int = 0
    tasks: int = 0
    succeeded: int = 0
    failed: int = 0
    stopped: int = 0


def fold_usage(tasks: Iterable[PastEnd], runs: Iterable[PastRunTime]) -> dict[tuple[int, str, str], UsageDay]:
    """(begin of the day, user, group) -> what is added there. `runs`: all of `tasks`, and no others."""
    days: dict[tuple[int, str, str], UsageDay] = {}
    ends = {task.task: task for task in tasks}
    for end in ends.values():
        if end.ended_ns is not None and end.outcome in ("succeeded", "failed", "stopped"):
            day = days.setdefault((_day(end.ended_ns), end.user, end.group), UsageDay())
            day.tasks += 1
            setattr(day, end.outcome, getattr(day, end.outcome) + 1)
    for run in runs:
        if run.over_ns is None:
            continue
        end = ends[run.task]
        days.setdefault((_day(run.scheduled_ns), end.user, end.group), UsageDay()).runs += 1
        for day_ns, node_ns, productive_ns in _spread(run, run.over_ns):
            day = days.setdefault((day_ns, end.user, end.group), UsageDay())
            day.node_ns += node_ns
            day.productive_ns += productive_ns
    return days


def _day(at_ns: int) -> int:
    return at_ns - at_ns % DAY_NS


def _spread(run: PastRunTime, over_ns: int) -> Iterator[tuple[int, int, int]]:
    """Day, node-time and productive node-time in it."""
    ended_ns = over_ns if run.ended_ns is None else run.ended_ns
    length_ns = max(1, ended_ns - run.scheduled_ns)
    told_ns = 0
    for day_ns in range(_day(run.scheduled_ns), max(over_ns, run.scheduled_ns + 1), DAY_NS):
        begin_ns, until_ns = max(run.scheduled_ns, day_ns), min(over_ns, day_ns + DAY_NS)
        lived_ns = min(max(until_ns - run.scheduled_ns, 0), length_ns)
        productive_ns = run.nodes * run.productive_ns * lived_ns // length_ns
        yield day_ns, run.nodes * max(0, until_ns - begin_ns), productive_ns - told_ns
        told_ns = productive_ns
