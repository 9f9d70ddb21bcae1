"""Limits and reservations: who may set them, what of them is used, and what a task that waits is told of them."""

from __future__ import annotations

import pytest
from tests.support.platform.desk import WALL_NS, Desk, spec

from fireflyer.base.units import SECOND
from fireflyer.cluster.core.platform.access import ADMIN, OPERATOR
from fireflyer.cluster.core.platform.commands import (
    AddReservation,
    RemoveLimit,
    RemoveReservation,
    SetLimit,
    SetShare,
)
from fireflyer.cluster.core.platform.messages import Done, Refused
from fireflyer.cluster.core.scheduler.model import Limit, LimitKind, Reservation
from fireflyer.cluster.schema.tasks import TaskState

HOUR = 3600 * SECOND
MINE = Limit(kind=LimitKind.USER, name="ann", nodes=1)
EACH = Limit(kind=LimitKind.EACH, nodes=2)
URGENT = Limit(kind=LimitKind.EACH, priority=30, nodes=0)


def refused(result: object, code: str) -> str:
    assert isinstance(result, Refused), result
    assert result.code == code, result
    return result.message


def at(desk: Desk, **fields: object) -> Reservation:
    now_ns = desk.machine.time_ns(desk.now_ns)
    window = {"name": "fans", "nodes": ("n1",), "begin_ns": now_ns, "until_ns": now_ns + 2 * HOUR, **fields}
    return Reservation(**window)  # type: ignore[arg-type]


def test_a_limit_takes_the_place_of_the_one_before_and_is_removed_by_its_subject() -> None:
    desk = Desk("n1", "n2", "n3")
    assert refused(desk.command(SetLimit(EACH)), "permission_denied")
    for limit in (EACH, MINE, URGENT, Limit(kind=LimitKind.USER, name="ann", nodes=2)):
        assert isinstance(desk.command(SetLimit(limit), roles=(OPERATOR,)), Done)
    shown = desk.machine.quota("ann", "", desk.now_ns)
    assert [(one.limit.kind, one.limit.nodes, one.used) for one in shown.limits] == [
        (LimitKind.EACH, 0, 0),
        (LimitKind.USER, 2, 0),
    ], "her own limit takes the place of that of each user for the same priority"
    assert refused(desk.command(RemoveLimit(LimitKind.USER, "bob"), roles=(OPERATOR,)), "not_found")
    assert isinstance(desk.command(RemoveLimit(LimitKind.USER, "ann"), roles=(OPERATOR,)), Done)
    shown = desk.machine.quota("ann", "", desk.now_ns)
    assert [one.limit for one in shown.limits] == [EACH, URGENT]
    assert refused(desk.command(SetLimit(Limit(kind=LimitKind.USER, nodes=1)), roles=(OPERATOR,)), "usage")


def test_what_is_used_of_a_limit_is_what_the_scheduler_counts() -> None:
    desk = Desk("n1", "n2", "n3")
    desk.command(SetLimit(EACH), roles=(OPERATOR,))
    desk.command(SetLimit(Limit(kind=LimitKind.GROUP, name="vision", nodes=3)), roles=(OPERATOR,))
    desk.task(spec("a", least_nodes=2, most_nodes=2), group="vision")
    waits = desk.task(spec("b"), group="vision")
    desk.task(spec("c"), user="bob", group="vision")
    assert "user ann may use 2 nodes of default at a time" in desk.machine.why(waits, desk.now_ns).text
    ann = desk.machine.quota("ann", "vision", desk.now_ns)
    assert (ann.nodes, ann.unfinished, [one.used for one in ann.limits]) == (2, 2, [2, 3])
    shown = [(one.user, one.used) for one in desk.machine.limits(desk.now_ns)]
    assert shown == [("ann", 2), ("bob", 1), ("", 3)]
    desk.command(SetLimit(Limit(kind=LimitKind.EACH, nodes=9)), roles=(OPERATOR,))
    assert "group vision may use 3 nodes" in desk.machine.why(waits, desk.now_ns).text


def test_one_share_is_set_and_taken_by_administrators() -> None:
    desk = Desk("n1")
    assert refused(desk.command(SetShare("ann", 4.0), roles=(OPERATOR,)), "permission_denied")
    for share, shown in ((4.0, 4.0), (6.0, 6.0), (None, 0.0)):
        desk.command(SetShare("bob", 1.0), roles=(ADMIN,))
        assert isinstance(desk.command(SetShare("ann", share), roles=(ADMIN,)), Done)
        assert desk.machine.quota("ann", "", desk.now_ns).share == shown
        assert desk.machine.quota("bob", "", desk.now_ns).share == 1.0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"nodes": ("n9",)}, "no node n9"),
        ({"nodes": ()}, "no nodes"),
        ({"name": "a b"}, "no name"),
        ({"until_ns": WALL_NS - 1, "begin_ns": 1}, "over already"),
        ({"begin_ns": WALL_NS + 9 * HOUR}, "ends before it begins"),
    ],
)
def test_a_reservation_that_cannot_be_is_refused_in_words(wrong: dict[str, object], said: str) -> None:
    desk = Desk("n1")
    result = desk.command(AddReservation(at(desk, **wrong)), roles=(OPERATOR,))
    assert isinstance(result, Refused)
    assert said in result.message


def test_a_node_that_is_reserved_goes_to_its_users_alone_and_others_are_told() -> None:
    desk = Desk("n1")
    assert refused(desk.command(AddReservation(at(desk)), user="ann"), "permission_denied")
    desk.command(AddReservation(at(desk, users=("bob",))), roles=(OPERATOR,))
    waits = desk.task(spec("a"))
    why = desk.machine.why(waits, desk.now_ns).text
    assert "reservation fans lasts 2 h 00 min more" in why
    (view,) = desk.machine.nodes(desk.now_ns)
    assert [(one.name, one.maintenance) for one in view.reserved] == [("fans", False)]
    theirs = desk.task(spec("b"), user="bob")
    assert desk.nodes_of(theirs) == ("n1",)
    desk.command(RemoveReservation("fans"), roles=(OPERATOR,))
    assert refused(desk.command(RemoveReservation("fans"), roles=(OPERATOR,)), "not_found")
    assert not desk.machine.node("n1", desk.now_ns).reserved


def test_a_task_that_would_not_end_before_maintenance_waits_and_one_that_ends_runs() -> None:
    desk = Desk("n1")
    begin_ns = desk.machine.time_ns(desk.now_ns) + HOUR
    desk.command(AddReservation(at(desk, begin_ns=begin_ns)), roles=(OPERATOR,))
    long = desk.task(spec("long", time_ns=2 * HOUR))
    why = desk.machine.why(long, desk.now_ns).text
    assert "maintenance fans begins in 1 h 00 min, before it would end" in why
    short = desk.task(spec("short", time_ns=HOUR // 2))
    assert desk.state(short) is TaskState.SCHEDULED


def test_a_task_starts_when_its_nodes_are_open_again() -> None:
    desk = Desk("n1")
    until_ns = desk.machine.time_ns(desk.now_ns) + 20 * SECOND
    desk.command(AddReservation(at(desk, until_ns=until_ns)), roles=(OPERATOR,))
    task = desk.task(spec("a"))
    assert desk.state(task) is TaskState.QUEUED
    desk.pass_time(21 * SECOND)
    assert desk.nodes_of(task) == ("n1",)
