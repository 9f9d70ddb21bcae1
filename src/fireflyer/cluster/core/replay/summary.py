"""What is told of a replay: shares of node-time, waits by size and by priority, interrupts, lost work, ETTR.

*Utilisation* is allocated over healthy node-time, *goodput* productive over healthy node-time, both of the window: from
the end of the warm-up to the last submission. Waits, interrupts and ETTR are of all tasks of the trace, to their end.
ETTR of a task is its work over the time from its submission to its end; that of several is weighted with their nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from fireflyer.base.units import SECOND
from fireflyer.cluster.core.replay.meter import BUCKET_NS
from fireflyer.cluster.core.replay.replay import Outcome, TaskLife
from fireflyer.cluster.core.replay.trace import TraceTask

__all__ = ["GroupSummary", "HourSummary", "Summary", "Waits", "summarise"]

MAX_SIZES = 16
"""More sizes than this are told by powers of two."""


class Waits(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds."""

    p50_s: float
    p95_s: float
    max_s: float


class GroupSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Tasks of one size or of one priority."""

    name: str
    tasks: int
    first_start: Waits
    """From submission to the first start."""
    queued: Waits
    """All waits of a task together, those after interrupts and failures too."""
    interrupts: int
    failures: int
    lost_node_hours: float
    ettr: float


class HourSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One hour of the trace."""

    utilisation: float
    waiting: float
    """Tasks, on average."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One policy. Node-hours are of the window."""

    policy: str
    tasks: int
    window_s: tuple[float, float]
    utilisation: float
    goodput: float
    healthy_node_hours: float
    allocated_node_hours: float
    productive_node_hours: float
    start_node_hours: float
    checkpoint_node_hours: float
    save_node_hours: float
    lost_node_hours: float
    interrupts: int
    failures: int
    """Runs that ended because a node failed."""
    all_lost_node_hours: float
    """Until the last task finished."""
    finished_s: float
    """When the last task finished."""
    most_waiting: int
    ettr: float
    all: GroupSummary
    by_size: tuple[GroupSummary, ...]
    by_priority: tuple[GroupSummary, ...]
    hours: tuple[HourSummary, ...]
    events: int


def summarise(outcome: Outcome) -> Summary:
    window, whole = outcome.window, outcome.whole
    pairs = list(zip(outcome.tasks, outcome.lives, strict=True))
    everything = _group("all", pairs)
    hours = tuple(
        HourSummary(
            utilisation=round(_ratio(bucket.allocated, bucket.healthy), 6), waiting=round(bucket.waiting / BUCKET_NS, 3)
        )
        for bucket in outcome.hours
    )
    return Summary(
        policy=outcome.policy,
        tasks=len(pairs),
        window_s=(outcome.window_ns[0] / SECOND, outcome.window_ns[1] / SECOND),
        utilisation=_ratio(window.allocated, window.healthy),
        goodput=_ratio(window.parts.productive, window.healthy),
        healthy_node_hours=_hours(window.healthy),
        allocated_node_hours=_hours(window.allocated),
        productive_node_hours=_hours(window.parts.productive),
        start_node_hours=_hours(window.parts.start),
        checkpoint_node_hours=_hours(window.parts.checkpoint),
        save_node_hours=_hours(window.parts.save),
        lost_node_hours=_hours(window.parts.lost),
        interrupts=everything.interrupts,
        failures=everything.failures,
        all_lost_node_hours=_hours(whole.parts.lost),
        finished_s=max(life.ended_ns or 0 for life in outcome.lives) / SECOND,
        most_waiting=round(max(hour.waiting for hour in hours)),
        ettr=everything.ettr,
        all=everything,
        by_size=_grouped(pairs, _size_name(outcome.tasks)),
        by_priority=_grouped(pairs, lambda task: (-task.priority, str(task.priority))),
        hours=hours,
        events=outcome.events,
    )


_Pair = tuple[TraceTask, TaskLife]


def _size_name(tasks: Sequence[TraceTask]) -> Callable[[TraceTask], tuple[int, str]]:
    """Order and name of a task's size."""
    if len({task.nodes for task in tasks}) <= MAX_SIZES:
        return lambda task: (task.nodes, str(task.nodes))

    def between_powers(task: TraceTask) -> tuple[int, str]:
        most = 1 << (task.nodes - 1).bit_length()
        return most, str(most) if most <= 2 else f"{most // 2 + 1}-{most}"

    return between_powers


def _grouped(pairs: Sequence[_Pair], key: Callable[[TraceTask], tuple[int, str]]) -> tuple[GroupSummary, ...]:
    members: dict[tuple[int, str], list[_Pair]] = {}
    for pair in pairs:
        members.setdefault(key(pair[0]), []).append(pair)
    return tuple(_group(key[1], members[key]) for key in sorted(members))


def _group(name: str, pairs: Sequence[_Pair]) -> GroupSummary:
    ended = [(task, life, life.ended_ns) for task, life in pairs if life.ended_ns is not None]
    return GroupSummary(
        name=name,
        tasks=len(pairs),
        first_start=_waits(
            [life.first_start_ns - task.submit_ns for task, life in pairs if life.first_start_ns is not None]
        ),
        queued=_waits([life.queued_ns for _, life in pairs]),
        interrupts=sum(life.interrupts for _, life in pairs),
        failures=sum(life.failures for _, life in pairs),
        lost_node_hours=_hours(sum(life.lost_ns * task.nodes for task, life in pairs)),
        ettr=_ratio(
            sum(task.nodes * task.work_ns for task, _, _ in ended),
            sum(task.nodes * (ended_ns - task.submit_ns) for task, _, ended_ns in ended),
        ),
    )


def _waits(waits_ns: list[int]) -> Waits:
    waits_ns.sort()

    def at(share: float) -> float:
        return waits_ns[min(int(share * len(waits_ns)), len(waits_ns) - 1)] / SECOND if waits_ns else 0.0

    return Waits(p50_s=at(0.5), p95_s=at(0.95), max_s=at(1.0))


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _hours(node_ns: int) -> float:
    return round(node_ns / (3600 * SECOND), 3)
