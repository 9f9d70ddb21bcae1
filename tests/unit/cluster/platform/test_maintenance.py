"""Before maintenance begins, the platform asks what runs there to save and to leave, and says so."""

from __future__ import annotations

from tests.support.platform.desk import Desk, spec

from fireflyer.base.units import SECOND
from fireflyer.cluster.core.platform.commands import AddReservation, RemoveReservation
from fireflyer.cluster.core.platform.messages import Done
from fireflyer.cluster.core.scheduler.model import Reservation
from fireflyer.cluster.schema.tasks import Cause, Outcome, TaskState

OPERATOR = ("platform:operator",)


def running(desk: Desk, **fields: object) -> int:
    task = desk.task(spec(**{"grace_ns": 30 * SECOND, **fields}))  # type: ignore[arg-type]
    desk.runs_on(task, *desk.nodes_of(task))
    return task


def close(desk: Desk, *nodes: str, in_s: int = 100, for_s: int = 200) -> None:
    begin_ns = desk.machine.time_ns(desk.now_ns) + in_s * SECOND
    window = Reservation(name="fans", nodes=nodes, begin_ns=begin_ns, until_ns=begin_ns + for_s * SECOND)
    assert isinstance(desk.command(AddReservation(window), roles=OPERATOR), Done)


def test_a_run_is_suspended_in_time_and_goes_on_elsewhere() -> None:
    desk = Desk("n1", "n2")
    task = running(desk, least_nodes=1)
    [node] = desk.nodes_of(task)
    [other] = {"n1", "n2"} - {node}
    close(desk, node)
    desk.pass_time(54 * SECOND)
    assert desk.orders(node).runs[0].wanted == "run"
    desk.pass_time(2 * SECOND)
    assert desk.orders(node).runs[0].wanted == "suspend", "30 s of grace and 15 s before the window"
    assert "nodes of it close: maintenance fans begins" in desk.machine.why(task, desk.now_ns).text
    desk.gone(task, Cause.SUSPENDED)
    assert desk.nodes_of(task) == (other,), "and not on the node that is about to close"


def test_until_the_window_is_over_nothing_runs_there_and_why_says_so() -> None:
    desk = Desk("n1")
    task = running(desk)
    close(desk, "n1")
    desk.pass_time(60 * SECOND)
    desk.gone(task, Cause.SUSPENDED)
    assert desk.state(task) is TaskState.SUSPENDED
    assert "maintenance fans begins in" in desk.machine.why(task, desk.now_ns).text
    desk.pass_time(100 * SECOND)
    assert "maintenance fans lasts" in desk.machine.why(task, desk.now_ns).text
    desk.pass_time(150 * SECOND)
    assert desk.state(task) is TaskState.SCHEDULED


def test_a_run_that_ends_before_by_what_it_declared_is_left_alone() -> None:
    desk = Desk("n1")
    task = running(desk, time_ns=95 * SECOND)
    close(desk, "n1")
    desk.pass_time(90 * SECOND)
    assert desk.orders("n1").runs[0].wanted == "run"
    desk.gone(task, Cause.SUCCEEDED)
    assert desk.machine.task(task, desk.now_ns).outcome is Outcome.SUCCEEDED


def test_an_interactive_task_is_stopped_shortly_before() -> None:
    desk = Desk("n1")
    task = running(desk, kind="interactive", time_ns=1000 * SECOND)
    close(desk, "n1")
    desk.pass_time(84 * SECOND)
    assert desk.orders("n1").runs[0].wanted == "run"
    desk.pass_time(2 * SECOND)
    assert desk.orders("n1").runs[0].wanted == "stop"
    desk.gone(task, Cause.STOPPED)
    assert desk.state(task) is TaskState.FINISHED


def test_a_window_that_is_removed_in_time_disturbs_nobody() -> None:
    desk = Desk("n1")
    running(desk)
    close(desk, "n1")
    assert isinstance(desk.command(RemoveReservation("fans"), roles=OPERATOR), Done)
    desk.pass_time(120 * SECOND)
    assert desk.orders("n1").runs[0].wanted == "run"
