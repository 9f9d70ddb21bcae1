"""Mutants of the health loop: the machine, or what the leader makes of it, with one bug each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from fireflyer.cluster.core.health.findings import is_certain
from fireflyer.cluster.core.health.machine import HealthMachine
from fireflyer.cluster.core.health.records import Hold, NodeHealth, RepairState
from fireflyer.cluster.core.health.repair import Repairs
from fireflyer.cluster.core.platform.life import states, tasks
from fireflyer.cluster.core.platform.node_health import NodesHealth
from fireflyer.cluster.core.platform.planner import Planner
from fireflyer.cluster.schema.tasks import Cause

__all__ = ["HEALTH_MUTANTS"]

Patch = pytest.MonkeyPatch


def nothing_is_probed(patch: Patch) -> None:
    def confirm(self: HealthMachine, record: NodeHealth, now_ns: int) -> None:
        assert record.fault is not None
        self._act(record, record.fault, now_ns)

    patch.setattr(HealthMachine, "_confirm", confirm)


def users_are_believed(patch: Patch) -> None:
    """What they can have made is taken for certain."""
    original = HealthMachine._suspect

    def suspect(self: HealthMachine, record: NodeHealth, event: Any, now_ns: int) -> None:
        original(self, record, msgspec.structs.replace(event, user_made=False), now_ns)

    patch.setattr(HealthMachine, "_suspect", suspect)


def the_breaker_never_opens(patch: Patch) -> None:
    patch.setattr(Repairs, "most_out", lambda _self: 1 << 30)


def nodes_return_untested(patch: Patch) -> None:
    patch.setattr(Repairs, "test", lambda self, record, now_ns, why: self.return_to_service(record, why, now_ns))


def runs_stay_on_faulty_nodes(patch: Patch) -> None:
    patch.setattr(Repairs, "requeue", lambda _self, _record: None)


def suspects_get_tasks(patch: Patch) -> None:
    original = Planner._usable

    def usable(self: Planner, row: Any, now_ns: int) -> bool:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(NodeHealth, "takes_tasks", property(lambda _record: True))
            return original(self, row, now_ns)

    patch.setattr(Planner, "_usable", usable)


def reports_of_a_dropped_draft_are_taken(patch: Patch) -> None:
    patch.setattr(NodesHealth, "rollback", NodesHealth.committed)


def faulty_nodes_are_charged(patch: Patch) -> None:
    original = states.verdict

    def verdict(*given: Any) -> Any:
        found = original(*given)
        again = found.cause is Cause.INFRASTRUCTURE and found.step is not states.Step.FINISH
        return msgspec.structs.replace(found, counted=True) if again else found

    patch.setattr(tasks, "verdict", verdict)


def what_is_held_is_forgotten(patch: Patch) -> None:
    """By the breaker: nobody acts on it when there is room again, and nobody keeps tasks away."""
    original = HealthMachine._hold

    def hold(self: HealthMachine, record: NodeHealth, why: Any, words: str, now_ns: int) -> None:
        if why is Hold.BREAKER:
            self._records.health.put(record.name, NodeHealth(name=record.name, numbers=record.numbers))
        else:
            original(self, record, why, words, now_ns)

    patch.setattr(HealthMachine, "_hold", hold)


def reports_of_before_the_repair_count(patch: Patch) -> None:
    original = HealthMachine._said

    def said(self: HealthMachine, node: str, events: Any, asked: int, now_ns: int) -> None:
        original(self, node, events, asked, now_ns)
        record = self._known(node)
        if record.state is RepairState.TESTING:
            self._repairs.tested(record, events, asked, now_ns)

    patch.setattr(HealthMachine, "_said", said)


def what_is_over_is_acted_on(patch: Patch) -> None:
    """What the breaker holds is not released when its check passes, and is acted on without a probe."""
    original = HealthMachine._passed

    def passed(self: HealthMachine, record: NodeHealth, event: Any, now_ns: int) -> None:
        if record.hold is not Hold.BREAKER or record.fault is None or not record.fault.at_once:
            original(self, record, event, now_ns)

    patch.setattr(HealthMachine, "_passed", passed)
    patch.setattr(HealthMachine, "_act_on_held", HealthMachine._act)


def events_are_probed(patch: Patch) -> None:
    """As if a probe could find again what has happened."""
    patch.setattr("fireflyer.cluster.core.health.machine.is_certain", lambda event: event.at_once and is_certain(event))


def nodes_are_tested_beside_runs(patch: Patch) -> None:
    patch.setattr(Repairs, "test_when_empty", lambda self, record, why, now_ns: self.test(record, now_ns, why))


HEALTH_MUTANTS: dict[str, Callable[[Patch], None]] = {
    mutant.__name__: mutant
    for mutant in (
        nothing_is_probed,
        users_are_believed,
        the_breaker_never_opens,
        nodes_return_untested,
        runs_stay_on_faulty_nodes,
        suspects_get_tasks,
        reports_of_a_dropped_draft_are_taken,
        faulty_nodes_are_charged,
        what_is_held_is_forgotten,
        reports_of_before_the_repair_count,
        what_is_over_is_acted_on,
        events_are_probed,
        nodes_are_tested_beside_runs,
    )
}
