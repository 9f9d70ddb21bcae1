"""Whom the platform interrupts depends on what that loses, as the nodes of the launchers say it."""

from __future__ import annotations

from tests.support.platform.desk import Desk, spec

from fireflyer.base.units import SECOND
from fireflyer.cluster.core.platform.commands import SetPolicy
from fireflyer.cluster.core.platform.messages import Done
from fireflyer.cluster.core.platform.store.rows import STATE_KEY
from fireflyer.cluster.core.scheduler.model import Policy
from fireflyer.cluster.schema.sync import RunStatus, Saving
from fireflyer.cluster.schema.tasks import TaskState

MINUTE = 60 * SECOND


def desk_with_two_runs() -> tuple[Desk, int, int]:
    """One that began an hour ago and one of now, both of one node."""
    desk = Desk("n1", "n2")
    assert isinstance(desk.command(SetPolicy(Policy(), guaranteed_ns=0), roles=("platform:admin",)), Done)
    old = desk.task(spec("old"))
    says(desk, old)
    desk.pass_time(60 * MINUTE, step_ns=10 * SECOND)
    new = desk.task(spec("new"))
    says(desk, new)
    return desk, old, new


def says(desk: Desk, task: int, saving: Saving | None = None) -> None:
    [node] = desk.nodes_of(task)
    desk.say(node, RunStatus(token=desk.token(task), state="running", lead=True, saving=saving))


def interrupted(desk: Desk, *tasks: int) -> list[int]:
    """For a task of one node that is more important."""
    desk.task(spec("urgent", priority=40), user="bob")
    return [task for task in tasks if desk.state(task) is TaskState.SUSPENDING]


def test_a_run_that_cannot_save_loses_all_since_it_began() -> None:
    desk, old, new = desk_with_two_runs()
    assert interrupted(desk, old, new) == [new]


def test_a_run_that_saves_when_it_is_asked_loses_only_the_time_of_that() -> None:
    desk, old, new = desk_with_two_runs()
    desk.pass_time(2 * MINUTE, step_ns=10 * SECOND)
    says(desk, old, Saving(asks=True, save_ns=20 * SECOND, start_ns=20 * SECOND))
    assert interrupted(desk, old, new) == [old]


def test_it_costs_what_was_measured() -> None:
    desk, old, new = desk_with_two_runs()
    says(desk, new, Saving(asks=True, save_ns=200 * SECOND, start_ns=SECOND))
    says(desk, old, Saving(asks=True, save_ns=100 * SECOND, start_ns=90 * SECOND))
    assert interrupted(desk, old, new) == [old]


def test_a_checkpoint_keeps_what_was_done_before() -> None:
    desk, old, new = desk_with_two_runs()
    desk.pass_time(5 * MINUTE, step_ns=10 * SECOND)
    says(desk, old, Saving(age_ns=MINUTE))
    assert interrupted(desk, old, new) == [old]


def test_a_new_leader_interrupts_the_same_once_it_has_heard_the_nodes() -> None:
    desk, old, new = desk_with_two_runs()
    saving = Saving(asks=True, save_ns=SECOND, start_ns=SECOND)
    again = Desk(rows=desk.rows, holder="m1", settle_ns=10 * SECOND)
    for node, task, its in (("n1", old, saving), ("n2", new, None)):
        again.say(node, RunStatus(token=desk.token(task), state="running", lead=True, saving=its))
    assert interrupted(again, old, new) == [old]


def test_checkpoints_and_heartbeats_are_no_transactions() -> None:
    desk, old, _ = desk_with_two_runs()
    before = desk.rows[STATE_KEY]
    for age_s in (100, 60, 1):
        says(desk, old, Saving(asks=True, age_ns=age_s * SECOND, save_ns=SECOND, start_ns=age_s * SECOND))
    assert desk.rows[STATE_KEY] == before
