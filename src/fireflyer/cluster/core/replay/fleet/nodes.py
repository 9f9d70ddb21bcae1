"""The nodes of a fleet as a driver of a replay: faults strike them and end their runs, people repair them.

This is all there is where the loop is off: a node whose fault has ended a run takes the next one at once. A fault that
lasts ends runs until a person notices that runs fail there, lets the last one end, and repairs the node. A lemon stays.

A node that is closed and has no run is being looked after: no fault strikes it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from fireflyer.base.errors import InvariantViolation
from fireflyer.cluster.core.health.remedies import Remedy
from fireflyer.cluster.core.replay.fleet.agenda import Agenda
from fireflyer.cluster.core.replay.fleet.faults import Fault, Plan, faults_of_new_node
from fireflyer.cluster.core.replay.fleet.settings import FleetSettings
from fireflyer.cluster.core.replay.node_driver import Nodes, PlacedRun, RunEnd
from fireflyer.cluster.core.replay.streams import Stream

__all__ = ["ActiveFault", "EndedRun", "FailedBy", "FleetNodes", "Watch"]

_SPREAD = 0.5
"""Of the lognormal lengths of repairs, in natural logarithms."""
_REMEDIES = tuple(Remedy)
"""From a test on; a later one cures what an earlier one does."""
_REPAIRS = 7


class FailedBy(enum.Enum):
    FAULT = "fault"
    """The first run that a fault ended."""
    SAME_FAULT = "same fault"
    """Another one before."""
    CHECK = "check"
    """The run was taken off a node that a check found faulty, before the fault had ended it."""


class EndedRun(NamedTuple):
    at_ns: int
    nodes: int
    failed_by: FailedBy | None
    of_lemon: bool


class ActiveFault:
    """A fault that is there."""

    __slots__ = ("again", "ends_runs_now", "fault", "node", "noticed", "over", "runs_ended")

    def __init__(self, node: int, fault: Fault) -> None:
        self.node, self.fault = node, fault
        self.again = Stream(fault.again)
        self.ends_runs_now = False
        self.runs_ended = 0
        self.noticed = False
        self.over = False


class Watch(Protocol):
    """Who is told of what checks and accounting show."""

    def begin(self, fleet: FleetNodes) -> None: ...

    def fault(self, now_ns: int, active: ActiveFault) -> None:
        """That some check sees. It is there from now on."""

    def run_failed(self, now_ns: int, active: ActiveFault, nodes: Sequence[int]) -> None:
        """It was on these nodes, which are free now, and was ended by this fault."""


class FleetNodes:
    def __init__(self, settings: FleetSettings, plan: Plan, seed: int, watch: Watch | None) -> None:
        self.settings, self.agenda = settings, Agenda()
        self.lemons = set(plan.lemons)
        """That are still there."""
        self.ended_runs: list[EndedRun] = []
        self._seed, self._watch = seed, watch
        self._faults = list(plan.faults)
        self._next = [0] * settings.nodes
        self._active: dict[int, list[ActiveFault]] = {}
        self._closed: dict[int, set[Hashable]] = {}
        self._when_free: dict[int, list[Callable[[int], None]]] = {}
        self._repairs = Stream(seed, _REPAIRS)
        self._failing: tuple[int, FailedBy] | None = None
        self.ending: ActiveFault | None = None
        """The fault that is ending a run now."""
        self._nodes: Nodes | None = None

    # --- as a driver ---

    def begin(self, nodes: Nodes) -> None:
        self._nodes = nodes
        for node in range(self.settings.nodes):
            self._plan_strike(node)
        if self._watch is not None:
            self._watch.begin(self)

    def next_ns(self) -> int | None:
        return self.agenda.next_ns()

    def happen(self, now_ns: int) -> None:
        self.agenda.happen(now_ns)

    def started(self, now_ns: int, run: PlacedRun) -> None:
        for node, those in self._active.items():
            if self._run_on(node) is run:
                for active in those:
                    if active.ends_runs_now:
                        after_ns = 1 + round(active.again.exponential(self.settings.again_ns))
                        self.agenda.at(now_ns + after_ns, partial(self._strikes_again, active, run.number))

    def ended(self, now_ns: int, run: PlacedRun, end: RunEnd) -> None:
        node, failed_by = self._failing if end is RunEnd.FAILED and self._failing is not None else (-1, None)
        self.ended_runs.append(EndedRun(now_ns, len(run.nodes), failed_by, node in self.lemons))
        for node in [node for node in self._when_free if self._run_on(node) is None]:
            for what in self._when_free.pop(node):
                self.agenda.at(now_ns, what)

    # --- for those who look after nodes ---

    def is_busy(self, node: int) -> bool:
        return self._run_on(node) is not None

    def visible(self, node: int) -> list[ActiveFault]:
        """Faults that its checks show now."""
        return [active for active in self._active.get(node, ()) if active.fault.kind.check]

    def close(self, now_ns: int, node: int, why: Hashable) -> None:
        reasons = self._closed.setdefault(node, set())
        if not reasons:
            self._of_replay().close(now_ns, node)
        reasons.add(why)

    def open(self, now_ns: int, node: int, why: Hashable) -> None:
        """Where nobody else has closed it."""
        reasons = self._closed.get(node)
        if reasons is None or why not in reasons:
            return
        reasons.remove(why)
        if not reasons:
            del self._closed[node]
            self._of_replay().open(now_ns, node)

    def when_free(self, now_ns: int, node: int, what: Callable[[int], None]) -> None:
        if self.is_busy(node):
            self._when_free.setdefault(node, []).append(what)
        else:
            self.agenda.at(now_ns, what)

    def take_run_off(self, now_ns: int, node: int) -> None:
        """As it is on a faulty node."""
        self._fail_run(now_ns, node, FailedBy.CHECK)

    def repair_ns(self, remedy: Remedy) -> int:
        """How long an operator needs, drawn anew."""
        settings = self.settings
        medians = {
            Remedy.RESET: settings.reset_ns,
            Remedy.REBOOT: settings.reboot_ns,
            Remedy.FIELD_DIAGNOSIS: settings.diagnosis_ns,
            Remedy.RMA: settings.replacement_ns,
        }
        return 1 + round(self._repairs.lognormal(medians.get(remedy, settings.reset_ns), _SPREAD))

    def repair(self, node: int, remedy: Remedy) -> None:
        """Cures what it cures."""
        rank = _REMEDIES.index(remedy)
        for active in list(self._active.get(node, ())):
            if _REMEDIES.index(active.fault.cured_by) <= rank:
                self._is_over(active)

    def replace(self, now_ns: int, node: int) -> None:
        """Another node takes its place."""
        for active in list(self._active.get(node, ())):
            self._is_over(active)
        self.lemons.discard(node)
        self._faults[node] = faults_of_new_node(self.settings, self._seed, node, now_ns)
        self._next[node] = 0
        self._plan_strike(node)

    # --- faults ---

    def _of_replay(self) -> Nodes:
        if self._nodes is None:
            raise InvariantViolation("a driver of nodes was asked before it began")
        return self._nodes

    def _run_on(self, node: int) -> PlacedRun | None:
        return self._of_replay().run_on(node)

    def _plan_strike(self, node: int) -> None:
        if self._next[node] < len(self._faults[node]):
            fault = self._faults[node][self._next[node]]
            self.agenda.at(fault.at_ns, partial(self._strikes, node, fault))

    def _strikes(self, node: int, fault: Fault, now_ns: int) -> None:
        if self._next[node] >= len(self._faults[node]) or self._faults[node][self._next[node]] is not fault:
            return  # of a node that was replaced
        self._next[node] += 1
        self._plan_strike(node)
        if node in self._closed and not self.is_busy(node):
            return
        active = ActiveFault(node, fault)
        if fault.ends_runs:
            self._active.setdefault(node, []).append(active)
        else:
            active.over = True
        if self._watch is not None and fault.kind.check:
            self._watch.fault(now_ns, active)
        if fault.warned_ns:
            self.agenda.at(now_ns + fault.warned_ns, partial(self._begins_to_end_runs, active))
        elif fault.ends_runs:
            self._begins_to_end_runs(active, now_ns)

    def _begins_to_end_runs(self, active: ActiveFault, now_ns: int) -> None:
        if active.over:
            return
        active.ends_runs_now = True
        self._ends_run(active, now_ns)
        if not active.fault.lasts:
            self._is_over(active)

    def _strikes_again(self, active: ActiveFault, number: int, now_ns: int) -> None:
        run = self._run_on(active.node)
        if not active.over and run is not None and run.number == number:
            self._ends_run(active, now_ns)

    def _ends_run(self, active: ActiveFault, now_ns: int) -> None:
        run = self._run_on(active.node)
        if run is None:
            return
        if active.fault.lasts and not active.noticed:
            active.noticed = True
            self.agenda.at(now_ns + active.fault.noticed_ns, partial(self._is_noticed, active))
        active.runs_ended += 1
        by = FailedBy.FAULT if active.runs_ended == 1 else FailedBy.SAME_FAULT
        self.ending = active
        self._fail_run(now_ns, active.node, by)
        self.ending = None
        if self._watch is not None:
            self._watch.run_failed(now_ns, active, run.nodes)

    def _fail_run(self, now_ns: int, node: int, by: FailedBy) -> None:
        self._failing = (node, by)
        self._of_replay().fail_run(now_ns, node)
        self._failing = None

    def _is_over(self, active: ActiveFault) -> None:
        active.over = True
        those = self._active[active.node]
        those.remove(active)
        if not those:
            del self._active[active.node]

    # --- people ---

    def _is_noticed(self, active: ActiveFault, now_ns: int) -> None:
        if not active.over:
            self.close(now_ns, active.node, active)
            self.when_free(now_ns, active.node, partial(self._repair_begins, active))

    def _repair_begins(self, active: ActiveFault, now_ns: int) -> None:
        self.agenda.at(now_ns + self.repair_ns(active.fault.cured_by), partial(self._is_repaired, active))

    def _is_repaired(self, active: ActiveFault, now_ns: int) -> None:
        if not active.over:
            self.repair(active.node, active.fault.cured_by)
        self.open(now_ns, active.node, active)
