"""What becomes of tasks: each rule of the platform's machine with a manager, a store and some nodes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.support.platform.desk import Desk, spec

from fireflyer.base.errors import PermissionDenied
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.platform.access import ADMIN, OPERATOR, RIGHTS, Right, check
from fireflyer.cluster.core.platform.commands import (
    Command,
    DrainNode,
    MoveNode,
    PriorityBound,
    RemoveNode,
    ResumeNode,
    ResumeTask,
    SetLimits,
    SetPolicy,
    SetPriority,
    SetPriorityBounds,
    StopTask,
    SuspendTask,
)
from fireflyer.cluster.core.platform.life.states import TRANSITIONS, Step, pause_ns
from fireflyer.cluster.core.platform.messages import Copied, Done, Refused, Submission
from fireflyer.cluster.core.platform.store.rows import OUTBOX_PREFIX
from fireflyer.cluster.core.scheduler.model import Limit, LimitKind, Policy
from fireflyer.cluster.schema.sync import RunStatus
from fireflyer.cluster.schema.tasks import FINISHED, After, Cause, Outcome, RunParts, TaskState


def running(desk: Desk, **fields: Any) -> int:
    task = desk.task(spec(**fields))
    desk.runs_on(task, *desk.nodes_of(task))
    assert desk.state(task) is TaskState.RUNNING
    return task


def refused(result: object, code: str) -> str:
    assert isinstance(result, Refused), result
    assert result.code == code, result
    return result.message


# --- a task's way ---


def test_a_task_is_scheduled_started_and_succeeds_and_its_account_is_its_life() -> None:
    desk = Desk("n1", "n2")
    task = desk.task(spec(least_nodes=2, most_nodes=2))
    assert desk.state(task) is TaskState.SCHEDULED
    desk.pass_time(2 * SECOND)
    desk.runs_on(task, *desk.nodes_of(task))
    desk.pass_time(7 * SECOND)
    desk.gone(task, Cause.SUCCEEDED, parts=RunParts(start_ns=SECOND, productive_ns=5 * SECOND))
    view = desk.machine.task(task, desk.now_ns)
    assert (view.state, view.outcome) == (FINISHED, Outcome.SUCCEEDED)
    assert (view.account.productive_ns, view.account.platform_ns) == (5 * SECOND, 3 * SECOND)
    assert view.account.total_ns == (view.ended_ns or 0) - view.submitted_ns == 9 * SECOND


def test_the_launchers_parts_never_count_for_more_than_the_run() -> None:
    desk = Desk("n1")
    task = running(desk)
    desk.pass_time(3 * SECOND)
    desk.gone(task, Cause.SUCCEEDED, parts=RunParts(productive_ns=2 * SECOND, lost_ns=50 * SECOND))
    account = desk.machine.task(task, desk.now_ns).account
    assert (account.productive_ns, account.lost_ns, account.total_ns) == (2 * SECOND, SECOND, 3 * SECOND)


def test_only_the_first_node_gets_the_launch_and_only_until_it_runs() -> None:
    desk = Desk("n1", "n2")
    task = desk.task(spec(least_nodes=2, most_nodes=2))
    first, second = desk.nodes_of(task)
    assert desk.orders(first).runs[0].launch is not None
    assert desk.orders(second).runs[0].launch is None
    desk.runs_on(task, first)
    assert desk.orders(first).runs[0].launch is None


@pytest.mark.parametrize("cause", [Cause.PROGRAM, Cause.HUNG, Cause.TIME_LIMIT])
def test_the_users_errors_end_the_task(cause: Cause) -> None:
    desk = Desk("n1")
    task = running(desk)
    desk.gone(task, cause, reason="exit code 1")
    view = desk.machine.task(task, desk.now_ns)
    assert (view.state, view.outcome, view.reason) == (FINISHED, Outcome.FAILED, "exit code 1")


def test_a_task_in_two_zones_says_that_it_crosses() -> None:
    desk = Desk("a", "b")
    for node in ("a", "b"):
        desk.command(MoveNode(node, zone=f"zone-{node}"), roles=(ADMIN,))
    desk.command(SetPolicy(Policy(cross_zone_nodes=2)), roles=(ADMIN,))
    one, two = running(desk), desk.task(spec("two", least_nodes=2, most_nodes=2))
    assert "zones" not in desk.machine.why(one, desk.now_ns).text
    desk.gone(one, Cause.SUCCEEDED)
    desk.runs_on(two, *desk.nodes_of(two))
    assert "it lies in 2 zones" in desk.machine.why(two, desk.now_ns).text


def test_an_infrastructure_failure_is_run_again_after_a_pause_on_another_node() -> None:
    desk = Desk("n1", "n2", requeue_pause_ns=10 * SECOND)
    task = running(desk)
    (bad,) = desk.nodes_of(task)
    desk.gone(task, Cause.INFRASTRUCTURE, bad_nodes=(bad,), reason=f"{bad}: its disk is full")
    assert desk.state(task) is TaskState.QUEUED
    why = desk.machine.why(task, desk.now_ns)
    assert why.text == f"it failed and is started again after a pause; {bad}: its disk is full"
    assert why.earliest_ns == 10 * SECOND + desk.machine.task(task, desk.now_ns).since_ns
    desk.pass_time(9 * SECOND)
    assert desk.state(task) is TaskState.QUEUED
    desk.pass_time(2 * SECOND)
    assert desk.state(task) is TaskState.SCHEDULED
    assert desk.nodes_of(task) != (bad,)


def test_who_asks_why_a_task_waits_does_not_make_it_wait_longer() -> None:
    desk = Desk("n1", "n2", requeue_pause_ns=10 * SECOND)
    task = running(desk)
    desk.gone(task, Cause.INFRASTRUCTURE)
    desk.pass_time(10 * SECOND - 1)
    desk.now_ns += 2
    assert "it can start now" in desk.machine.why(task, desk.now_ns).text
    desk.pass_time(SECOND)
    assert desk.state(task) is TaskState.SCHEDULED


def test_the_check_of_the_site_is_in_the_orders_of_a_run() -> None:
    desk = Desk("n1", node_check=("/site/check", "-q"), node_check_limit_ns=7 * SECOND)
    desk.task(spec())
    launch = desk.orders("n1").runs[0].launch
    assert launch is not None
    assert (launch.node_check, launch.node_check_limit_ns) == (("/site/check", "-q"), 7 * SECOND)


def test_infrastructure_failures_end_the_task_after_max_requeues() -> None:
    desk = Desk("n1", requeue_pause_ns=SECOND)
    task = desk.task(spec(max_requeues=1))
    for _ in range(2):
        desk.pass_time(3 * SECOND)
        desk.gone(task, Cause.INFRASTRUCTURE)
    view = desk.machine.task(task, desk.now_ns)
    assert (view.outcome, view.requeues) == (Outcome.FAILED, 1)


def test_pauses_double_up_to_a_bound() -> None:
    assert [pause_ns(count, 10, 100) for count in range(6)] == [0, 10, 20, 40, 80, 100]
    assert pause_ns(10_000, 10, 100) == 100


def test_a_run_over_its_declared_time_is_stopped_and_the_task_fails() -> None:
    desk = Desk("n1")
    task = running(desk, time_ns=5 * SECOND)
    desk.pass_time(6 * SECOND)
    assert desk.orders("n1").runs[0].wanted == "stop"
    desk.gone(task, Cause.STOPPED)
    view = desk.machine.task(task, desk.now_ns)
    assert (view.outcome, view.cause) == (Outcome.FAILED, Cause.TIME_LIMIT)


def test_a_run_that_does_not_start_in_time_is_given_up() -> None:
    desk = Desk("n1", start_timeout_ns=5 * SECOND)
    task = desk.task(spec())
    desk.pass_time(6 * SECOND)
    assert desk.orders("n1").runs[0].wanted == "stop"
    desk.say("n1", RunStatus(token=desk.token(task), state="gone", lead=True))
    assert desk.machine.task(task, desk.now_ns).requeues == 1


# --- suspension ---


def test_an_interrupted_task_saves_leaves_and_goes_on_with_its_whole_life_state() -> None:
    desk = Desk("n1")
    assert isinstance(desk.command(SetPolicy(Policy(), guaranteed_ns=0), roles=(ADMIN,)), Done)
    low = running(desk, priority=5)
    high = desk.task(spec("high", priority=20), user="bob")
    assert desk.state(low) is TaskState.SUSPENDING
    assert desk.orders("n1").runs[0].wanted == "suspend"
    desk.gone(low, Cause.SUSPENDED, whole_life=41)
    assert (desk.state(low), desk.state(high)) == (TaskState.SUSPENDED, TaskState.SCHEDULED)
    desk.runs_on(high, "n1")
    desk.gone(high, Cause.SUCCEEDED)
    assert desk.state(low) is TaskState.SCHEDULED
    launch = desk.orders("n1").runs[0].launch
    assert launch is not None
    assert (launch.run, launch.whole_life) == (1, 41)


def test_a_run_that_does_not_leave_within_its_grace_is_stopped() -> None:
    desk = Desk("n1", suspend_slack_ns=2 * SECOND)
    task = running(desk, grace_ns=3 * SECOND)
    desk.command(SuspendTask(task))
    desk.pass_time(4 * SECOND)
    assert desk.orders("n1").runs[0].wanted == "suspend"
    desk.pass_time(2 * SECOND)
    assert desk.orders("n1").runs[0].wanted == "stop"


def test_a_task_that_its_user_suspended_waits_until_it_is_resumed() -> None:
    desk = Desk("n1")
    task = running(desk)
    desk.command(SuspendTask(task))
    desk.gone(task, Cause.SUSPENDED)
    desk.pass_time(60 * SECOND)
    assert desk.state(task) is TaskState.SUSPENDED
    assert "resume" in desk.machine.why(task, desk.now_ns).text
    desk.command(ResumeTask(task))
    assert desk.state(task) is TaskState.SCHEDULED


def test_stopping_ends_a_waiting_task_at_once_and_a_running_one_when_its_launcher_has_ended() -> None:
    desk = Desk("n1")
    first, second = running(desk), desk.task(spec("second"))
    desk.command(StopTask(second))
    assert desk.state(second) is FINISHED
    desk.command(StopTask(first, "enough"))
    assert desk.state(first) is TaskState.SUSPENDING
    desk.gone(first, Cause.INFRASTRUCTURE)
    view = desk.machine.task(first, desk.now_ns)
    assert (view.outcome, view.reason) == (Outcome.STOPPED, "ann stopped it: enough")


# --- when a node is free ---


def test_a_task_waits_for_its_next_run_until_no_process_of_the_last_one_is_left() -> None:
    desk = Desk("n1", "n2", "n3", "n4", requeue_pause_ns=0)
    task = running(desk, least_nodes=2, most_nodes=2)
    first, second = desk.nodes_of(task)
    token = desk.token(task)
    desk.say(second, RunStatus(token=token, state="running"))
    desk.say(first, RunStatus(token=token, state="gone", lead=True))
    desk.pass_time(5 * SECOND)
    assert desk.state(task) is TaskState.SUSPENDING
    assert desk.orders(second).runs[0].wanted == "stop"
    assert desk.orders(first).runs[0].wanted == "stop", "it must not forget the run before that is over"
    desk.say(second, RunStatus(token=token, state="gone"))
    assert desk.state(task) in (TaskState.QUEUED, TaskState.SCHEDULED)
    assert {run.wanted for run in desk.orders(first).runs if run.run_token == token} == {"forget"}


def test_a_silent_launcher_has_ended_when_its_lease_has_and_its_other_nodes_a_lease_later() -> None:
    desk = Desk("n1", "n2", stop_after_ns=20 * SECOND, stop_slack_ns=5 * SECOND, requeue_pause_ns=0)
    task = running(desk, least_nodes=2, most_nodes=2)
    desk.pass_time(24 * SECOND, hear=False)
    assert desk.machine.runs(task, desk.now_ns)[0].state == "running"
    desk.pass_time(2 * SECOND, hear=False)
    assert desk.machine.runs(task, desk.now_ns)[0].state == "ended"
    desk.pass_time(23 * SECOND, hear=False)
    assert desk.state(task) is TaskState.SUSPENDING
    desk.pass_time(3 * SECOND, hear=False)
    assert desk.state(task) is TaskState.QUEUED


def test_a_launcher_of_which_its_node_knows_nothing_is_stopped_there_first() -> None:
    desk = Desk("n1", requeue_pause_ns=0)
    task = running(desk)
    desk.statuses["n1"].clear()
    desk.pass_time(2 * SECOND)
    assert desk.state(task) is TaskState.SUSPENDING
    assert desk.orders("n1").runs[0].wanted == "stop"


def test_a_node_with_a_run_that_is_not_its_own_gets_none_and_is_told_to_stop_it() -> None:
    desk = Desk("n1")
    desk.say("n1", RunStatus(token="ab" * 16, state="running"))
    task = desk.task(spec())
    assert desk.state(task) is TaskState.QUEUED
    assert [run.wanted for run in desk.orders("n1").runs] == ["stop"]
    desk.say("n1", RunStatus(token="ab" * 16, state="gone"))
    desk.pass_time(SECOND)
    assert desk.state(task) is TaskState.SCHEDULED


def test_a_drained_node_keeps_its_run_and_gets_no_new_one() -> None:
    desk = Desk("n1")
    task = running(desk)
    desk.command(DrainNode("n1", "fan"), roles=(OPERATOR,))
    second = desk.task(spec("second"))
    assert desk.machine.node("n1", desk.now_ns).state == "draining"
    desk.gone(task, Cause.SUCCEEDED)
    assert desk.state(second) is TaskState.QUEUED
    desk.command(ResumeNode("n1"), roles=(OPERATOR,))
    assert desk.state(second) is TaskState.SCHEDULED


def test_a_node_is_forgotten_only_when_it_is_silent_and_free() -> None:
    desk = Desk("n1", "n2")
    refused(desk.command(RemoveNode("n1"), roles=(OPERATOR,)), "busy")
    desk.pass_time(60 * SECOND, hear=False)
    assert isinstance(desk.command(RemoveNode("n1"), roles=(OPERATOR,)), Done)
    assert [node.name for node in desk.machine.nodes(desk.now_ns)] == ["n2"]


# --- submissions ---


def test_an_array_is_so_many_tasks_with_one_spec() -> None:
    desk = Desk("n1")
    result = desk.submit(spec(array=5))
    assert isinstance(result, Submission)
    assert [desk.machine.task(task, desk.now_ns).array_index for task in result.tasks] == [0, 1, 2, 3, 4]


def test_the_same_submission_with_the_same_key_is_done_once() -> None:
    desk = Desk("n1")
    first = desk.submit(spec(), spec("other"), key="k")
    again = desk.submit(spec(), spec("other"), key="k")
    assert isinstance(first, Submission)
    assert again == Submission(first.tasks, repeated=True)
    refused(desk.submit(spec("third"), key="k"), "usage")


def test_a_users_unfinished_tasks_have_names_of_their_own() -> None:
    desk = Desk("n1")
    desk.task(spec("a"))
    refused(desk.submit(spec("a")), "exists")
    refused(desk.submit(spec("b"), spec("b")), "usage")
    desk.task(spec("a"), user="bob")


def test_submissions_beyond_a_limit_are_refused_as_a_whole() -> None:
    desk = Desk("n1", max_unfinished_per_user=3)
    desk.task(spec("a"))
    refused(desk.submit(spec("b", array=3)), "busy")
    assert len(desk.machine.tasks(desk.now_ns)) == 1


def test_tasks_of_a_group_without_nodes_and_of_more_nodes_than_there_are_wait_and_say_so() -> None:
    desk = Desk("n1", "n2")
    other = desk.task(spec("a", node_group="a100"))
    why = desk.machine.why(other, desk.now_ns)
    assert why.text.startswith("needs 1 nodes of a100; 0 have what it asks for, and it waits until there are as many")
    assert why.text.endswith("there is no node in group a100")
    assert why.before == 0
    task = desk.task(spec("b", least_nodes=9, most_nodes=9))
    why = desk.machine.why(task, desk.now_ns)
    assert why.text == "needs 9 nodes of default; 2 have what it asks for, and it waits until there are as many"
    assert why.before == 0, "known at once, so that who submits it is told"


def test_a_priority_above_the_users_bound_is_refused() -> None:
    desk = Desk("n1")
    bounds = SetPriorityBounds((PriorityBound(priority=10), PriorityBound(user="bob", priority=30)))
    assert isinstance(desk.command(bounds, roles=(ADMIN,)), Done)
    refused(desk.submit(spec(priority=11)), "permission_denied")
    task = desk.task(spec(priority=30), user="bob")
    refused(desk.command(SetPriority(task, 31), user="bob"), "permission_denied")
    assert isinstance(desk.command(SetPriority(task, 31), user="op", roles=(OPERATOR,)), Done)


def test_tasks_run_after_others_and_end_with_them_if_they_need_their_success() -> None:
    desk = Desk("n1", "n2")
    first = running(desk)
    any_end = desk.task(spec("any", after=(After(first),)))
    needs = desk.task(spec("ok", after=(After(first, ok=True),)))
    needs_too = desk.task(spec("chain", after=(After(needs, ok=True),)))
    assert "after task" in desk.machine.why(needs, desk.now_ns).text
    desk.gone(first, Cause.PROGRAM)
    assert desk.state(any_end) is TaskState.SCHEDULED
    assert (desk.state(needs), desk.state(needs_too)) == (FINISHED, FINISHED)
    refused(desk.submit(spec("late", after=(After(first, ok=True),))), "usage")
    refused(desk.submit(spec("never", after=(After(999),))), "not_found")


def test_limits_count_nodes_until_they_are_free() -> None:
    desk = Desk("n1", "n2")
    desk.command(SetLimits((Limit(kind=LimitKind.USER, name="ann", nodes=1),)), roles=(ADMIN,))
    running(desk)
    second = desk.task(spec("second"))
    assert desk.state(second) is TaskState.QUEUED
    assert "ann may use 1 nodes" in desk.machine.why(second, desk.now_ns).text


def test_the_oldest_finished_tasks_are_forgotten_with_their_rows() -> None:
    desk = Desk("n1", max_finished=2)
    tasks = [desk.task(spec(f"t{number}")) for number in range(4)]
    for task in tasks:
        desk.runs_on(task, "n1")
        desk.gone(task, Cause.SUCCEEDED)
    assert [view.id for view in desk.machine.tasks(desk.now_ns)] == [4, 3]
    again = Desk("n1", rows=desk.rows, holder="m1")
    assert [view.id for view in again.machine.tasks(again.now_ns)] == [4, 3]


# --- leaders ---


def test_a_new_leader_knows_all_and_orders_the_same_again() -> None:
    desk = Desk("n1", "n2", "n3")
    task = running(desk, least_nodes=2, most_nodes=2)
    waiting = desk.task(spec("waits", least_nodes=3, most_nodes=3), user="bob")
    before = desk.machine.task(task, desk.now_ns)
    other = Desk(rows=desk.rows, holder="m1")
    for node in ("n1", "n2", "n3"):
        other.statuses[node] = dict(desk.statuses[node])
        other.say(node)
    assert other.machine.term > desk.machine.term
    assert other.machine.task(task, other.now_ns).nodes == before.nodes
    assert [run.run_token for run in other.orders("n1").runs] == [run.run_token for run in desk.orders("n1").runs]
    assert other.state(waiting) is TaskState.QUEUED
    other.gone(task, Cause.SUCCEEDED)
    assert other.state(waiting) is TaskState.SCHEDULED
    account = other.machine.task(task, other.now_ns).account
    assert account.total_ns == (other.machine.task(task, other.now_ns).ended_ns or 0) - before.submitted_ns


def test_the_outbox_has_a_row_for_each_change_and_is_cleared_by_the_copier() -> None:
    desk = Desk("n1", history=True)
    task = running(desk)
    desk.gone(task, Cause.SUCCEEDED)
    view = desk.machine.cluster(desk.now_ns)
    rows = [key for key in desk.rows if key.startswith(OUTBOX_PREFIX)]
    assert len(rows) == view.outbox_next - view.outbox_first > 5
    desk.handle(Copied(view.outbox_next))
    assert not [key for key in desk.rows if key.startswith(OUTBOX_PREFIX)]


def test_submissions_are_refused_while_the_outbox_is_full() -> None:
    desk = Desk("n1", history=True, max_outbox_rows=4)
    desk.task(spec("a"))
    refused(desk.submit(spec("b")), "busy")


def test_changes_are_numbered_without_gaps() -> None:
    desk = Desk("n1")
    desk.gone(running(desk), Cause.SUCCEEDED)
    assert [change.number for change in desk.changes] == list(range(1, len(desk.changes) + 1))


# --- tables ---


def test_every_command_has_a_right_and_only_those_who_have_it_may() -> None:
    assert set(RIGHTS) == set(Command.__args__)
    who = {"owner": ("ann", ()), "other": ("eve", ()), "operator": ("op", (OPERATOR,)), "admin": ("adm", (ADMIN,))}
    allowed = {
        Right.OWNER: {"owner", "operator", "admin"},
        Right.OPERATOR: {"operator", "admin"},
        Right.ADMIN: {"admin"},
    }
    for kind, right in RIGHTS.items():
        command = _some(kind)
        for name, (user, roles) in who.items():
            if name in allowed[right]:
                check(command, user, roles, "ann")
            else:
                with pytest.raises(PermissionDenied, match=r"role|belongs") as refused:
                    check(command, user, roles, "ann")
                assert kind.__name__ not in str(refused.value), "people know commands of ff, not those of the machine"


def _some(kind: type) -> Command:
    values = {field.name: Policy() if field.name == "policy" else None for field in msgspec.structs.fields(kind)}
    return kind(**values)  # type: ignore[no-any-return]


def test_every_state_but_the_last_can_end_and_the_last_leads_nowhere() -> None:
    assert all((state, Step.FINISH) in TRANSITIONS for state in TaskState if state is not FINISHED)
    assert all(state is not FINISHED for state, _ in TRANSITIONS)
    assert set(TRANSITIONS.values()) == set(TaskState)
