"""The health machine of the platform over a simulated fleet: checks report, agents answer probes, an operator repairs.

The machine is told what a leader tells it: what checks say, runs that failed, answers to probes, repairs that people
record, time. Checks run when a run ends, on all nodes of one that failed, and every few minutes; only reports that say
something new are simulated. An operator carries out each remedy that is due, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final, TypeVar

from fireflyer.base.units import SECOND
from fireflyer.cluster.core.health.findings import Finding
from fireflyer.cluster.core.health.machine import HealthMachine
from fireflyer.cluster.core.health.messages import (
    Event,
    Moved,
    Probed,
    Removed,
    Repaired,
    Requeue,
    RunFailed,
    Said,
    TimePassed,
)
from fireflyer.cluster.core.health.policy import HealthPolicy
from fireflyer.cluster.core.health.records import (
    REMEDY_STATES,
    TAKES_TASKS,
    Hold,
    MemoryRows,
    NodeHealth,
    PartHistory,
    RepairState,
    RepairTicket,
)
from fireflyer.cluster.core.health.remedies import Remedy
from fireflyer.cluster.core.replay.fleet.faults import finding_of
from fireflyer.cluster.core.replay.fleet.nodes import ActiveFault, FleetNodes

__all__ = ["HealthLoop"]

REPORT_NS: Final = 10 * SECOND
"""From the end of a run until the checks that it starts are reported."""
ANSWER_NS: Final = 2 * SECOND
HELD_NS: Final = 600 * SECOND
LEAF_NODES: Final = 20
_CLOSED: Final = "health"
_OPERATOR: Final = "operator"
_REMEDY_OF: Final = {state: remedy for remedy, state in REMEDY_STATES.items() if remedy is not Remedy.TEST}

K = TypeVar("K")
R = TypeVar("R")


class _Rows(MemoryRows[K, R]):
    """That know which of them have changed."""

    def __init__(self) -> None:
        super().__init__()
        self.changed: dict[K, None] = {}

    def put(self, key: K, row: R | None, /) -> None:
        self.changed[key] = None
        super().put(key, row)


class _Records:
    def __init__(self) -> None:
        self.health: _Rows[str, NodeHealth] = _Rows()
        self.tickets: _Rows[int, RepairTicket] = _Rows()
        self.parts: _Rows[str, PartHistory] = _Rows()


def _name(node: int) -> str:
    return f"n{node:05d}"


def _number(name: str) -> int:
    return int(name[1:])


class _Fleet:
    def __init__(self, fleet: FleetNodes) -> None:
        self._fleet = fleet

    def count(self) -> int:
        return self._fleet.settings.nodes

    def leaf_of(self, node: str, /) -> str:
        return str(_number(node) // LEAF_NODES)

    def group_of(self, node: str, /) -> str:  # noqa: ARG002
        return ""

    def is_busy(self, node: str, /) -> bool:
        return self._fleet.is_busy(_number(node))


class HealthLoop:
    def __init__(self, fleet: FleetNodes, policy: HealthPolicy) -> None:
        self._fleet, self._policy = fleet, policy
        self._records = _Records()
        self._machine = HealthMachine(policy, self._records, _Fleet(fleet))
        self._asked: dict[str, int] = {}
        self._begun: dict[str, int] = {}
        """Remedies that the operator has begun, by the time when they were due."""
        self._sweeps: dict[int, None] = {}
        self.drains = 0

    def fault(self, now_ns: int, active: ActiveFault) -> int:
        """When it will be reported. A fault that ends a run is: checks begin with the end."""
        every_ns = self._fleet.settings.check_every_ns
        busy = self._fleet.is_busy(active.node) and not active.fault.warned_ns and active.fault.ends_runs
        at_ns = now_ns + (REPORT_NS if busy else SECOND + round(active.fault.report_share * every_ns))
        self._fleet.agenda.at(at_ns, partial(self._report, active))
        return at_ns

    def run_failed(self, now_ns: int, nodes: Sequence[int]) -> None:
        self._feed(now_ns, RunFailed(tuple(_name(node) for node in nodes)))

    def removed(self, now_ns: int, node: int) -> None:
        self._feed(now_ns, Removed(_name(node), _OPERATOR))

    def _report(self, active: ActiveFault, now_ns: int) -> None:
        if not (active.over and active.fault.lasts):
            finding = finding_of(active.fault.kind, active.fault.part, now_ns)
            self._feed(now_ns, Said(_name(active.node), (finding,)))

    def _feed(self, now_ns: int, event: Event) -> None:
        effects = self._machine.handle(now_ns, event)
        for effect in effects:
            if isinstance(effect, Requeue):
                self._fleet.take_run_off(now_ns, _number(effect.node))
            elif isinstance(effect, Moved):
                self.drains += effect.state is RepairState.DRAINED
                self._moved(now_ns, effect)
        changed = list(self._records.health.changed)
        self._records.health.changed.clear()
        for node in changed:
            self._follow(now_ns, node, self._records.health.get(node))

    def _moved(self, now_ns: int, moved: Moved) -> None:
        node = _number(moved.node)
        if moved.state not in TAKES_TASKS:
            self._fleet.close(now_ns, node, _CLOSED)
            return
        for active in self._fleet.visible(node):  # the next round of its checks says it
            at_ns = now_ns + SECOND + round(active.fault.report_share * self._fleet.settings.check_every_ns)
            self._fleet.agenda.at(at_ns, partial(self._report, active))

    # --- what a record asks for ---

    def _follow(self, now_ns: int, node: str, record: NodeHealth | None) -> None:
        if record is None:
            self._fleet.open(now_ns, _number(node), _CLOSED)
            self._asked.pop(node, None)
            return
        if record.takes_tasks:
            self._fleet.open(now_ns, _number(node), _CLOSED)
        else:
            self._fleet.close(now_ns, _number(node), _CLOSED)
        asked = record.asked
        if asked is not None and asked[0] != self._asked.get(node):
            self._asked[node] = asked[0]
            after_ns = ANSWER_NS if record.unchecked is None else REPORT_NS
            self._fleet.agenda.at(now_ns + after_ns, partial(self._answer, node, *asked))
        remedy = _REMEDY_OF.get(record.state)
        if remedy is not None and self._begun.get(node) != record.since_ns:
            self._begun[node] = record.since_ns
            done_ns = now_ns + self._fleet.repair_ns(remedy)
            self._fleet.agenda.at(done_ns, partial(self._remedied, node, remedy, record.since_ns))
        if record.state is RepairState.DRAINED:
            self._fleet.when_free(now_ns, _number(node), self._sweep)
        due_ns = self._due_ns(now_ns, record)
        if due_ns is not None:
            self._sweep_at(max(due_ns, now_ns + 1))

    def _due_ns(self, now_ns: int, record: NodeHealth) -> int | None:
        """When passing time changes it. Of a test that lasts, what passes in between changes nothing."""
        confirming = record.confirming
        match record.state:
            case RepairState.SUSPECT if record.hold is not Hold.NONE:
                return now_ns + HELD_NS
            case RepairState.SUSPECT if confirming is not None and not confirming.number:
                return confirming.at_ns + self._policy.probe_spacing_ns
            case RepairState.TESTING if confirming is not None and not confirming.number:
                due_ns = confirming.at_ns + self._policy.test_every_ns
                return due_ns if record.failed else max(due_ns, record.until_ns)
            case RepairState.PROBATION:
                return record.until_ns
            case _:
                return None

    def _sweep_at(self, at_ns: int) -> None:
        if at_ns not in self._sweeps:
            self._sweeps[at_ns] = None
            self._fleet.agenda.at(at_ns, self._sweep)

    def _sweep(self, now_ns: int) -> None:
        self._sweeps.pop(now_ns, None)
        self._feed(now_ns, TimePassed())
        rows = self._records.health.rows()
        if any(row.state is RepairState.SUSPECT and row.hold is not Hold.NONE for _, row in rows):
            self._sweep_at((now_ns // HELD_NS + 1) * HELD_NS)  # others decide when they are acted on

    def _answer(self, node: str, number: int, check: str, now_ns: int) -> None:
        """The agent's, of the check, or of all."""
        record = self._records.health.get(node)
        if record is None:
            return
        found = [
            finding_of(active.fault.kind, active.fault.part, now_ns)
            for active in self._fleet.visible(_number(node))
            if check in ("", active.fault.kind.check)
        ]
        fault = record.fault
        if fault is not None and all(finding.check != fault.check for finding in found):
            found.append(Finding(check=fault.check, severity="ok", seen_ns=now_ns))
        self._feed(now_ns, Probed(node, number, tuple(found)))

    def _remedied(self, node: str, remedy: Remedy, since_ns: int, now_ns: int) -> None:
        record = self._records.health.get(node)
        if record is None or record.since_ns != since_ns or REMEDY_STATES[remedy] is not record.state:
            return
        self._fleet.repair(_number(node), remedy)
        self._feed(now_ns, Repaired(node, remedy, "", _OPERATOR))
