"""Nobody waits for ever: the bound of docs/design/0042 in numbers, for each task that fits its quota and the nodes that
are there. Written anew over rows: nothing of the scheduler is used.

*Age.* A task that waits again has the age with which its run began: no interruption sends it back behind newcomers.
*Turn.* A task that has passed all newcomers (its aged priority is above the highest that one can be submitted with) and
comes before all that wait has its nodes within a turn: what runs by a claim or began just before keeps its nodes for
its guarantee or one step of age, and leaves; once before that, and once after it, somebody is on the way out.
*Bound.* It passes newcomers after A; from then on k others, which lead it by L, can come before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from tests.support.platform.managers import SETTINGS
from tests.support.platform.rules import aged, closes, counted, leave_ns, waits_for_others

from fireflyer.base.units import SECOND
from fireflyer.cluster.core.platform.store.rows import ConfigRow, PlaceRow, RunRow, TaskRow
from fireflyer.cluster.schema.tasks import FINISHED, TaskSpec, TaskState

__all__ = ["Starvation"]

HIGHEST = 50
"""Priority that a task can be submitted with."""
SLACK_NS = 5 * SECOND
"""Until everybody has heard of it."""
WAITS = (TaskState.QUEUED, TaskState.SUSPENDED)


class _Bound(msgspec.Struct):
    passed_ns: int
    until_ns: int


class Starvation:
    def __init__(self) -> None:
        self.calm = False
        """Nothing fails, so what is promised holds."""
        self.longest_turn_ns = self.longest_wait_ns = 0
        self.passed = 0
        self._first_ns: dict[int, int] = {}
        """Since when a task comes before all others."""
        self._bounds: dict[int, _Bound] = {}

    def waits_again(self, row: TaskRow, old: TaskRow, run: RunRow) -> None:
        waited_ns = max(0, run.scheduled_ns - old.queued_ns)
        kept_ns = row.since_ns - row.queued_ns
        assert kept_ns == waited_ns, f"task {row.id} had waited {waited_ns} ns, and counts as if it were {kept_ns}"

    def look(
        self,
        time_ns: int,
        config: ConfigRow,
        tasks: Mapping[int, TaskRow],
        specs: Mapping[int, TaskSpec],
        zones: Mapping[str, str],
        places: Mapping[str, PlaceRow],
    ) -> None:
        if not self.calm:
            self._first_ns.clear()
            self._bounds.clear()
            return
        barred = [row for row in tasks.values() if row.state in WAITS and not _may_run(row, specs, tasks, time_ns)]
        waiting = [row for row in tasks.values() if row.state in WAITS and row not in barred]
        ages = {row.id: aged(row, specs[row.id], time_ns, config) for row in waiting}
        highest = _highest(config, specs.values())
        top = max(ages.values(), default=0)
        first = [row for row in waiting if ages[row.id] == top]
        head = first[0] if len(first) == 1 and top > highest else None
        if head is None or not _fits(head, time_ns, config, tasks, specs, zones, places):
            head = None
        self._first_ns = {} if head is None else {head.id: self._first_ns.get(head.id, time_ns)}
        if head is not None:
            self._check_turn(head, time_ns, config, specs)
        for row in waiting:
            if ages[row.id] > highest and row.id not in self._bounds:
                self.passed += 1
                self._bounds[row.id] = _bound(row, time_ns, config, tasks, specs)
            if row.id in self._bounds:
                self._check_bound(row, time_ns)
        self._bounds = {task: bound for task, bound in self._bounds.items() if task in ages}

    def _check_turn(self, head: TaskRow, time_ns: int, config: ConfigRow, specs: Mapping[int, TaskSpec]) -> None:
        waited_ns = time_ns - self._first_ns[head.id]
        self.longest_turn_ns = max(self.longest_turn_ns, waited_ns)
        turn_ns = _turn_ns(config, specs.values())
        assert waited_ns <= turn_ns, f"task {head.id} comes first for {waited_ns / SECOND:.0f} s, and does not start"

    def _check_bound(self, row: TaskRow, time_ns: int) -> None:
        bound = self._bounds[row.id]
        self.longest_wait_ns = max(self.longest_wait_ns, time_ns - bound.passed_ns)
        assert time_ns <= bound.until_ns, f"task {row.id} waits for longer than the bound"


def _highest(config: ConfigRow, specs: Iterable[TaskSpec]) -> int:
    """With which a task can be submitted, with the age of the largest gang that there is."""
    gang_ns = max((spec.least_nodes.bit_length() - 1 for spec in specs), default=0) * config.policy.gang_age_ns
    return HIGHEST + gang_ns // config.policy.age_step_ns


def _turn_ns(config: ConfigRow, specs: Iterable[TaskSpec]) -> int:
    longest_ns = max(leave_ns(spec) for spec in specs)
    passes_ns = SETTINGS.schedule_every_ns + config.policy.usage_step_ns
    return max(config.guaranteed_ns, config.policy.age_step_ns) + 2 * longest_ns + passes_ns + SLACK_NS


def _bound(
    row: TaskRow, time_ns: int, config: ConfigRow, tasks: Mapping[int, TaskRow], specs: Mapping[int, TaskSpec]
) -> _Bound:
    others = [one for one in tasks.values() if one.id != row.id and one.state is not FINISHED]
    mine = aged(row, specs[row.id], time_ns, config)
    leads = [aged(one, specs[one.id], time_ns, config) - mine for one in others if one.state in WAITS]
    lead_ns = max((HIGHEST, *leads)) * config.policy.age_step_ns
    turns = 1 + lead_ns / max(1, config.guaranteed_ns)
    return _Bound(time_ns, time_ns + int((len(others) + 1) * turns * _turn_ns(config, specs.values())))


def _may_run(row: TaskRow, specs: Mapping[int, TaskSpec], tasks: Mapping[int, TaskRow], time_ns: int) -> bool:
    return not (row.held or time_ns < row.not_before_ns or waits_for_others(row, specs[row.id], tasks))


def _fits(
    row: TaskRow,
    time_ns: int,
    config: ConfigRow,
    tasks: Mapping[int, TaskRow],
    specs: Mapping[int, TaskSpec],
    zones: Mapping[str, str],
    places: Mapping[str, PlaceRow],
) -> bool:
    """Beside its user's own tasks that it may not interrupt, on nodes that nobody has reserved, within its quotas."""
    spec, by_node = specs[row.id], {node: tasks[place.task] for node, place in places.items()}
    for limit in config.limits:
        if counted(limit, [row]):
            others = [one for one in counted(limit, by_node.values()) if one.id != row.id]
            if limit.nodes - len(others) < spec.least_nodes:
                return False
    closed = {
        node
        for window in config.reservations
        for node in window.nodes
        if closes(window, row, window.nodes) and window.begin_ns <= time_ns + leave_ns(spec) < window.until_ns
    }
    own = {node for node, one in by_node.items() if one.user == row.user and one.priority >= row.priority}
    free = [node for node in zones if node not in closed and node not in own and node not in row.excluded]
    by_zone = {zone: sum(zones[node] == zone for node in free) for zone in dict.fromkeys(zones.values())}
    return max(by_zone.values(), default=0) >= spec.least_nodes
