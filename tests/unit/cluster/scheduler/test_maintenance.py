"""Nodes are free when their maintenance begins: runs are asked to leave in time, and no others start there."""

from __future__ import annotations

import msgspec
import pytest
from tests.support.scheduler.snapshots import NOW_NS, POLICY, nodes_of, running, waiting

from fireflyer.base.units import SECOND
from fireflyer.cluster.core.scheduler.events import NodeChanged, ReservationsChanged, TaskEnded, TasksSubmitted
from fireflyer.cluster.core.scheduler.machine import SchedulerMachine
from fireflyer.cluster.core.scheduler.model import Interrupt, Reservation, Snapshot, Start, Task
from fireflyer.cluster.core.scheduler.schedule import schedule

NODES = nodes_of(4)


def fans(
    *nodes: str, begin_s: int = 100, until_s: int = 300, name: str = "fans", users: tuple[str, ...] = ()
) -> Reservation:
    begin_ns, until_ns = NOW_NS + begin_s * SECOND, NOW_NS + until_s * SECOND
    return Reservation(name=name, nodes=nodes or ("a0", "a1"), begin_ns=begin_ns, until_ns=until_ns, users=users)


def machine_with(*tasks: Task, windows: tuple[Reservation, ...]) -> SchedulerMachine:
    machine = SchedulerMachine(POLICY)
    for node in NODES:
        machine.apply(NodeChanged(node), NOW_NS)
    machine.apply(ReservationsChanged(windows), NOW_NS)
    machine.apply(TasksSubmitted(tasks), NOW_NS)
    return machine


def asked(*tasks: Task, at_s: int, windows: tuple[Reservation, ...] = ()) -> list[int]:
    """Who is asked to leave by then, by the definition; by the machine the same."""
    windows = windows or (fans(),)
    now_ns = NOW_NS + at_s * SECOND
    made = schedule(Snapshot(nodes=NODES, tasks=tasks, reservations=windows, policy=POLICY), now_ns)
    expected = [one for one in made if isinstance(one, Interrupt)]
    machine = machine_with(*tasks, windows=windows)
    assert [one for one in machine.decide(now_ns) if isinstance(one, Interrupt)] == expected
    assert all(one.for_task is None for one in expected)
    return [one.task for one in expected]


def test_a_run_without_a_declared_time_is_asked_when_it_just_has_the_time_to_leave() -> None:
    run = running(1, "a1 a2", since_s=5, priority=50, leave_ns=30 * SECOND)
    elsewhere = running(2, "a3", leave_ns=30 * SECOND)
    assert asked(run, elsewhere, at_s=69) == []
    assert asked(run, elsewhere, at_s=70) == [1], "also within its guarantee"
    machine = machine_with(run, windows=(fans(),))
    assert machine.wake_ns() == NOW_NS + 70 * SECOND, "although nothing waits"
    assert machine.decide(NOW_NS + 69 * SECOND) == ()
    [interrupt] = machine.decide(NOW_NS + 70 * SECOND)
    assert interrupt.reason == "nodes of it close: maintenance fans begins 30.0 s after it was asked"
    assert machine.decide(NOW_NS + 71 * SECOND) == (), "once"
    assert machine.wake_ns() is None


def test_a_run_that_declared_to_end_before_is_asked_only_if_it_is_still_there() -> None:
    def run(time_s: int) -> Task:
        return running(1, "a0", since_s=50, leave_ns=30 * SECOND, time_ns=time_s * SECOND)

    assert asked(run(150), at_s=99) == []
    assert asked(run(150), at_s=100) == [1]
    assert asked(run(151), at_s=70) == [1]


def test_nobody_is_asked_for_a_window_that_admits_somebody_or_is_over() -> None:
    run = running(1, "a0", leave_ns=30 * SECOND)
    assert asked(run, at_s=150, windows=(fans(users=("ann",)),)) == []
    assert asked(run, at_s=300) == []
    assert asked(run, at_s=299) == [1]


def test_no_run_without_a_declared_time_starts_on_a_node_that_it_would_be_asked_to_leave_at_once() -> None:
    every = fans("a0", "a1", "a2", "a3")
    slow = waiting(1, leave_ns=30 * SECOND)
    quick = msgspec.structs.replace(waiting(2, leave_ns=20 * SECOND), submitted_ns=NOW_NS + 1, queued_ns=NOW_NS + 1)
    machine = machine_with(slow, quick, windows=(every,))
    told = machine.why(1, NOW_NS + 70 * SECOND)
    assert "maintenance fans begins in 30.0 s, before it could leave, and lasts 3 min 20 s" in str(told)
    [start] = machine.decide(NOW_NS + 70 * SECOND)
    assert isinstance(start, Start)
    assert start.task == 2, "one of the same class that leaves sooner"


def test_what_its_runs_leave_is_for_others_that_end_before() -> None:
    run = running(1, "a0 a1 a2 a3", leave_ns=90 * SECOND)
    large = waiting(2, 4, time_ns=10 * SECOND)
    machine = machine_with(run, large, windows=(fans(),))
    expected = schedule(machine.snapshot(), NOW_NS + 10 * SECOND)
    assert machine.why(2, NOW_NS + 10 * SECOND) == expected[-1], "as if the run had been told already"
    assert machine.decide(NOW_NS + 10 * SECOND) == expected
    machine.apply(TaskEnded(1), NOW_NS + 20 * SECOND)
    [start] = machine.decide(NOW_NS + 20 * SECOND)
    assert (start.task, isinstance(start, Start)) == (2, True)


@pytest.mark.parametrize("second", [True, False])
def test_a_window_that_passed_unseen_does_not_hide_the_next_one(second: bool) -> None:
    short, later = fans(begin_s=10, until_s=20), fans(begin_s=500, until_s=600, name="disks")
    machine = machine_with(running(1, "a0"), windows=(short, later) if second else (short,))
    assert machine.decide(NOW_NS + 400 * SECOND) == ()
    assert len(machine.decide(NOW_NS + 500 * SECOND)) == second


def test_a_window_that_is_removed_asks_nobody() -> None:
    machine = machine_with(running(1, "a0"), windows=(fans(),))
    machine.apply(ReservationsChanged(()), NOW_NS)
    assert machine.decide(NOW_NS + 150 * SECOND) == ()
