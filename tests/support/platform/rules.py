"""What the site sets, checked at each start, each interruption, and every second: limits, reservations, maintenance.

Written anew from docs/design/0042, over rows: nothing of the scheduler is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tests.support.platform.hosts import Grounds
from tests.support.platform.managers import SETTINGS

from fireflyer.base.units import SECOND
from fireflyer.cluster.core.platform.store.rows import ConfigRow, PlaceRow, RunRow, TaskRow
from fireflyer.cluster.core.scheduler.model import Limit, LimitKind, Reservation
from fireflyer.cluster.schema.tasks import Outcome, TaskSpec, TaskState

__all__ = [
    "Maintenance",
    "aged",
    "check_limits",
    "check_order",
    "check_reservations",
    "closes",
    "counted",
    "leave_ns",
    "may_leave_early",
    "waits_for_others",
]

SLACK_NS = 15 * SECOND
"""Beside its grace period, a run has so long to leave."""
LATE_NS = 3 * SECOND


def check_limits(row: TaskRow, config: ConfigRow, tasks: Mapping[int, TaskRow], places: Iterable[PlaceRow]) -> None:
    """After a run of it was started."""
    having = [tasks[place.task] for place in places]
    own = {(limit.name, limit.priority) for limit in config.limits if limit.kind is LimitKind.USER}
    for limit in config.limits:
        each = limit.kind is LimitKind.EACH
        if row in counted(limit, [row]) and not (each and (row.user, limit.priority) in own):
            used = len(counted(limit, [one for one in having if not each or one.user == row.user]))
            assert used <= limit.nodes, f"task {row.id} was started, and {limit.words} has {used} nodes"


def counted(limit: Limit, rows: Iterable[TaskRow]) -> list[TaskRow]:
    of_priority = [row for row in rows if limit.priority in (None, row.priority)]
    match limit.kind:
        case LimitKind.USER:
            return [row for row in of_priority if row.user == limit.name]
        case LimitKind.GROUP:
            return [row for row in of_priority if row.group == limit.name]
        case LimitKind.EACH:
            return of_priority


def leave_ns(spec: TaskSpec) -> int:
    return spec.grace_ns + SLACK_NS


def closes(window: Reservation, row: TaskRow, nodes: Iterable[str]) -> bool:
    admitted = row.user in window.users or row.group in window.user_groups or row.id in window.tasks
    return not admitted and not set(nodes).isdisjoint(window.nodes)


def check_reservations(run: RunRow, row: TaskRow, spec: TaskSpec, windows: Iterable[Reservation]) -> None:
    """A run that begins ends before its nodes are another's, as far as it says; else it could leave before."""
    from_ns = run.scheduled_ns
    to_ns = from_ns + (spec.time_ns if spec.time_ns is not None else leave_ns(spec))
    for window in windows:
        if closes(window, row, run.nodes):
            apart = to_ns < window.begin_ns or window.until_ns <= from_ns
            assert apart, f"task {row.id} begins on nodes of {window.name} {window.begin_ns - from_ns} ns before that"


def may_leave_early(run: RunRow, row: TaskRow, spec: TaskSpec, windows: Iterable[Reservation]) -> bool:
    """Whether a run may be interrupted within its guaranteed time: its nodes are another's, or close soon."""
    at_ns = run.wanted_ns or 0
    for window in windows:
        early_ns = leave_ns(spec) if window.maintenance else 0
        if closes(window, row, run.nodes) and window.begin_ns - early_ns <= at_ns < window.until_ns:
            return True
    return False


def aged(row: TaskRow, spec: TaskSpec, at_ns: int, config: ConfigRow) -> int:
    gang_ns = (spec.least_nodes.bit_length() - 1) * config.policy.gang_age_ns
    return row.priority + (gang_ns + max(0, at_ns - row.queued_ns)) // config.policy.age_step_ns


def check_order(
    run: RunRow,
    config: ConfigRow,
    tasks: Mapping[int, TaskRow],
    specs: Mapping[int, TaskSpec],
    zones: Mapping[str, str],
) -> None:
    """A run that begins has no nodes that would do for a task that waits and counts more, by its age too: that is what
    keeps a task from waiting for ever. `run` began without a claim. Tasks that a limit counts are left out: they may
    have to wait for the sake of another that it counts."""
    at_ns, mine = run.scheduled_ns, aged(tasks[run.task], specs[run.task], run.scheduled_ns, config)
    most = max(sum(zones[name] == zone for name in run.nodes) for zone in zones.values())
    for row in tasks.values():
        spec = specs[row.id]
        if row.state not in (TaskState.QUEUED, TaskState.SUSPENDED) or aged(row, spec, at_ns, config) <= mine:
            continue
        limited = any(counted(limit, [row]) for limit in config.limits)
        barred = row.held or at_ns < row.not_before_ns or waits_for_others(row, spec, tasks)
        to_ns = at_ns + (spec.time_ns if spec.time_ns is not None else leave_ns(spec))
        closed = any(
            closes(window, row, run.nodes) and window.begin_ns <= to_ns and at_ns < window.until_ns
            for window in config.reservations
        )
        other_nodes = closed or not set(run.nodes).isdisjoint(row.excluded)
        passed = not (limited or barred or other_nodes or row.claim) and spec.least_nodes <= most
        assert not passed, f"task {run.task} begins on nodes that task {row.id} waits for, which counts more"


def waits_for_others(row: TaskRow, spec: TaskSpec, tasks: Mapping[int, TaskRow]) -> bool:
    others = [tasks.get(after.task) for after in spec.after]
    return any(other is not None and other.outcome is not Outcome.SUCCEEDED for other in others)


class Maintenance:
    """While nothing fails, nodes are free when their maintenance begins."""

    def __init__(self) -> None:
        self._set_ns: dict[Reservation, int] = {}
        self.calm = False
        self._calm_since_ns: int | None = None
        self.seen_free = 0

    def put(self, config: ConfigRow, time_ns: int) -> None:
        for window in config.reservations:
            self._set_ns.setdefault(window, time_ns)

    def look(self, time_ns: int, config: ConfigRow, specs: Mapping[int, TaskSpec], grounds: Grounds) -> None:
        """`time_ns`: of the cluster, now; `specs`: of tasks."""
        if not self.calm:
            self._calm_since_ns = None
            return
        if self._calm_since_ns is None:
            self._calm_since_ns = time_ns
        settled_ns = self._calm_since_ns + SETTINGS.stop_after_ns + SETTINGS.stop_slack_ns + SETTINGS.settle_ns
        for window in config.reservations:
            if not window.maintenance or not window.begin_ns <= time_ns < window.until_ns:
                continue
            for launcher in grounds.launchers:
                spec = specs[launcher.task]
                here = [name for name in window.nodes if name in launcher.nodes]
                alive = [name for name in here if grounds.hosts[name].lives(launcher.token)]
                # What declared to end before is asked when the window begins.
                asked_ns = max(self._set_ns[window], settled_ns, window.begin_ns - leave_ns(spec))
                asked_ns = max(asked_ns, window.begin_ns) if spec.time_ns is not None else asked_ns
                late = time_ns > asked_ns + leave_ns(spec) + LATE_NS
                assert not (alive and late), f"task {launcher.task} runs on {alive} during {window.name}"
                self.seen_free += late and bool(here)
