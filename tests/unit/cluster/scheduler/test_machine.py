"""What the scheduler's machine promises to whoever uses it, beside deciding as the definition does."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.support.scheduler.snapshots import NOW_NS, POLICY, nodes_of, of_kind, running, waiting

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.scheduler.events import (
    LimitsChanged,
    NodeChanged,
    NodeRemoved,
    ReservationsChanged,
    RunEnded,
    RunLeaving,
    TaskEnded,
    TasksSubmitted,
)
from fireflyer.cluster.core.scheduler.machine import SchedulerMachine
from fireflyer.cluster.core.scheduler.model import Limit, LimitKind, Node, Policy, Reservation, Start, Task, Wait
from fireflyer.cluster.core.scheduler.schedule import schedule
from fireflyer.cluster.core.scheduler.usage import UsageWindow

FOUR = nodes_of(4)
LONG_S = 3 * 3600


def machine_with(*tasks: Task, nodes: tuple[Node, ...] = FOUR, policy: Policy = POLICY) -> SchedulerMachine:
    machine = SchedulerMachine(policy)
    for node in nodes:
        machine.apply(NodeChanged(node), NOW_NS)
    machine.apply(TasksSubmitted(tasks), NOW_NS)
    return machine


def test_what_it_decides_it_takes_as_done() -> None:
    machine = machine_with(waiting(1, 3), waiting(2, 2))
    [start] = machine.decide(NOW_NS)
    assert isinstance(start, Start)
    assert machine.task(1).run is not None
    assert machine.decide(NOW_NS) == ()
    machine.apply(TaskEnded(1), NOW_NS + 1)
    assert [one.task for one in machine.decide(NOW_NS + 1)] == [2]


def test_an_array_is_one_event_and_its_first_elements_start_first() -> None:
    first = waiting(0)
    machine = machine_with(*(msgspec.structs.replace(first, id=number) for number in range(1000)))
    assert [one.task for one in machine.decide(NOW_NS)] == [0, 1, 2, 3]


def test_an_interrupted_run_leaves_and_then_waits_in_its_old_place_with_its_old_age() -> None:
    old = msgspec.structs.replace(running(2, "a0 a1", since_s=LONG_S), queued_ns=NOW_NS - (LONG_S + 70) * SECOND)
    machine = machine_with(waiting(1, 4, priority=20), old)
    _, interrupts, waits = of_kind(machine.decide(NOW_NS))
    assert interrupts == {1: [2]}
    assert set(waits[1].claim) == {"a0", "a1", "a2", "a3"}
    assert machine.decide(NOW_NS + 5) == ()
    machine.apply(RunEnded(2), NOW_NS + 9 * SECOND)
    assert [one.task for one in machine.decide(NOW_NS + 9 * SECOND)] == [1]
    task = machine.task(2)
    assert (task.run, task.submitted_ns) == (None, old.submitted_ns)
    assert task.queued_ns == NOW_NS + 9 * SECOND - 70 * SECOND


def test_a_failed_run_is_started_again_after_a_pause_and_elsewhere() -> None:
    machine = machine_with(waiting(1, 1), nodes=nodes_of(2))
    [start] = machine.decide(NOW_NS)
    assert isinstance(start, Start)
    machine.apply(RunEnded(1, not_before_ns=NOW_NS + 50, never=start.nodes), NOW_NS + 10)
    assert machine.decide(NOW_NS + 10) == ()
    assert machine.wake_ns() == NOW_NS + 50
    [again] = machine.decide(NOW_NS + 50)
    assert isinstance(again, Start)
    assert set(again.nodes).isdisjoint(start.nodes)


def test_an_elastic_task_that_was_interrupted_runs_again_with_fewer_nodes() -> None:
    """Nodes are not taken from a run one by one: it is interrupted as a whole."""
    elastic = running(2, "a0 a1 a2 a3", since_s=LONG_S, least_nodes=1, most_nodes=4)
    machine = machine_with(waiting(1, 2, priority=20), elastic)
    assert of_kind(machine.decide(NOW_NS))[1] == {1: [2]}
    machine.apply(RunEnded(2), NOW_NS + 1)
    starts, _, _ = of_kind(machine.decide(NOW_NS + 1))
    assert (len(starts[1].nodes), len(starts[2].nodes)) == (2, 2)


def test_while_many_have_claims_nobody_is_interrupted_for_another() -> None:
    runs = [running(10 + at, f"a{at}", since_s=LONG_S) for at in range(4)]
    policy = msgspec.structs.replace(POLICY, most_claims=2)
    machine = machine_with(*(waiting(at, priority=20) for at in range(4)), *runs, policy=policy)
    _, interrupts, _ = of_kind(machine.decide(NOW_NS))
    assert interrupts.keys() == {0, 1}
    left = [task for tasks in interrupts.values() for task in tasks]
    for task in left:
        machine.apply(TaskEnded(task), NOW_NS + 1)
    starts, interrupts, _ = of_kind(machine.decide(NOW_NS + 1))
    assert (set(starts), set(interrupts)) == ({0, 1}, {2, 3})


def test_one_that_yielded_to_the_head_does_not_speak_for_those_who_would_get_other_nodes() -> None:
    nodes = tuple(
        msgspec.structs.replace(node, labels=("big",)) if node.zone == "A" else node for node in nodes_of(4, 5)
    )
    head = waiting(1, 4, user="ann", labels=("big",), age_s=9)
    first, second = waiting(2, user="ann", age_s=8), waiting(4, user="ann", age_s=6)
    between = waiting(3, 3, user="bob", labels=("big",), age_s=7)
    machine = machine_with(head, first, between, second, running(5, "a0"), nodes=nodes)
    machine.apply(LimitsChanged((Limit(kind=LimitKind.USER, name="ann", nodes=4),)), NOW_NS)
    expected = [one for one in schedule(machine.snapshot(), NOW_NS) if isinstance(one, Start)]
    assert [one.task for one in expected] == [3, 4]
    assert list(machine.decide(NOW_NS)) == expected


def test_why_changes_nothing() -> None:
    machine = machine_with(waiting(1, 4, age_s=9), waiting(2, 4), running(3, "a0"))
    before = machine.snapshot()
    assert machine.why(1, NOW_NS) == Wait(1, "needs 4 of 4 nodes that it may use; 3 are free")
    assert machine.why(2, NOW_NS) == Wait(2, "task 1 comes first and does not fit either")
    assert machine.snapshot() == before


def test_time_does_not_go_back() -> None:
    machine = machine_with(waiting(1))
    [start] = machine.decide(NOW_NS - 100)
    run = machine.task(start.task).run
    assert run is not None
    assert run.started_ns == NOW_NS


def test_it_wakes_at_the_next_sum_of_usage_while_somebody_waits() -> None:
    machine = machine_with(waiting(1, 9))
    machine.decide(NOW_NS)
    step_ns = POLICY.usage_step_ns
    assert machine.wake_ns() == (NOW_NS // step_ns + 1) * step_ns
    machine.apply(TaskEnded(1), NOW_NS)
    assert machine.wake_ns() is None


def test_a_run_goes_on_when_its_node_is_removed_and_comes_back() -> None:
    machine = machine_with(running(1, "a0"), nodes=nodes_of(1))
    machine.apply(NodeRemoved("a0"), NOW_NS)
    machine.apply(NodeRemoved("a0"), NOW_NS)
    machine.apply(NodeChanged(nodes_of(1)[0]), NOW_NS)
    machine.apply(TasksSubmitted((waiting(2),)), NOW_NS)
    assert machine.decide(NOW_NS) == ()
    machine.apply(TaskEnded(1), NOW_NS)
    assert [one.task for one in machine.decide(NOW_NS)] == [2]


def test_events_that_cannot_be_are_refused() -> None:
    machine = machine_with(running(1, "a0"), waiting(2))
    with pytest.raises(UsageError, match="no task 7: submit it first"):
        machine.apply(TaskEnded(7), NOW_NS)
    with pytest.raises(UsageError, match="task 2 does not run"):
        machine.apply(RunEnded(2), NOW_NS)
    with pytest.raises(UsageError, match="task 1 runs on node a0: end it before task 3 runs there"):
        machine.apply(TasksSubmitted((running(3, "a0"),)), NOW_NS)
    with pytest.raises(UsageError, match="task 1 runs; only"):
        machine.why(1, NOW_NS)
    machine.apply(RunLeaving(2), NOW_NS)
    assert machine.task(2).run is None


def test_usage_is_node_seconds_of_a_window_that_decays() -> None:
    window = UsageWindow(half_life_ns=1000 * SECOND)
    window.change("ann", 3, 0)
    assert window.sample(1 * SECOND)["ann"] == pytest.approx(3.0, rel=1e-3)
    window.change("ann", -3, 1 * SECOND)
    assert window.sample(1001 * SECOND)["ann"] == pytest.approx(1.5, rel=1e-3)
    assert window.sample(100_000 * SECOND) == {}


def test_usage_of_what_always_runs_stays_at_the_length_of_the_window() -> None:
    window = UsageWindow(half_life_ns=100 * SECOND)
    window.change("ann", 2, 0)
    assert window.sample(10_000 * SECOND)["ann"] == pytest.approx(2 * 100 / 0.6931, rel=1e-3)


def reserved(*tasks: Task, begin_s: int = 100, **named: Any) -> SchedulerMachine:
    """Both nodes, from then on for 100 s."""
    machine = machine_with(*tasks, nodes=nodes_of(2))
    begin_ns = NOW_NS + begin_s * SECOND
    until_ns = begin_ns + 100 * SECOND
    course = Reservation(name="course", nodes=("a0", "a1"), begin_ns=begin_ns, until_ns=until_ns, **named)
    machine.apply(ReservationsChanged((course,)), NOW_NS)
    return machine


@pytest.mark.parametrize("named", [{"users": ("ann",)}, {"user_groups": ("lab",)}, {"tasks": (1,)}])
def test_reserved_nodes_are_closed_to_all_others_who_would_still_run(named: dict[str, Any]) -> None:
    long = {"time_ns": 200 * SECOND}
    machine = reserved(waiting(1, user="ann", user_group="lab", **long), waiting(2, user="bob", **long), **named)
    assert [one.task for one in machine.decide(NOW_NS)] == [1]
    assert "1 are down, drained, closed or reserved" not in str(machine.why(2, NOW_NS))
    assert "2 are down, drained, closed or reserved" in str(machine.why(2, NOW_NS))
    machine.apply(TasksSubmitted((waiting(3, user="bob", time_ns=50 * SECOND),)), NOW_NS)
    assert [one.task for one in machine.decide(NOW_NS)] == [3]


def test_who_runs_on_reserved_nodes_too_long_is_interrupted_for_those_that_they_are_reserved_for() -> None:
    machine = reserved(running(1, "a0", user="bob"), waiting(2, 2, user="ann"), users=("ann",))
    assert of_kind(machine.decide(NOW_NS))[1] == {}
    begun_ns = NOW_NS + 100 * SECOND
    assert of_kind(machine.decide(begun_ns))[1] == {2: [1]}
    stays = reserved(running(1, "a0", user="bob"), waiting(2, 2, user="cy"), users=("ann",), begin_s=0)
    assert of_kind(stays.decide(NOW_NS))[1] == {}
