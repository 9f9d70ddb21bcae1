"""Which runs accuse a node: of which tasks and users, since when, and until an operator has looked at it."""

from __future__ import annotations

import re

import msgspec
from tests.support.platform.desk import Desk, spec
from tests.support.platform.pages import node as shown_node

from fireflyer.base.units import SECOND
from fireflyer.cli.platform.nodes import _accused, _shown
from fireflyer.cluster.core.platform.access import OPERATOR
from fireflyer.cluster.core.platform.accusations import MAX_SHOWN
from fireflyer.cluster.core.platform.commands import DrainNode, ResumeNode
from fireflyer.cluster.core.platform.life.accused import accused_nodes
from fireflyer.cluster.core.platform.store.rows import RunRow, RunState, Wish
from fireflyer.cluster.core.platform.views import Accusation, Accused, NodeView
from fireflyer.cluster.schema.sync import EndedRun
from fireflyer.cluster.schema.tasks import Cause


def fails(
    desk: Desk, task: int, cause: Cause = Cause.INFRASTRUCTURE, *, after_ns: int = SECOND, reason: str = ""
) -> str:
    """Its run, which accuses the one node that it has; the name of that."""
    (node,) = desk.nodes_of(task)
    desk.runs_on(task, node)
    desk.pass_time(after_ns)
    desk.gone(task, cause, reason=reason, bad_nodes=(node,) if cause is Cause.INFRASTRUCTURE else ())
    return node


def seen(desk: Desk, node: str) -> NodeView:
    view = desk.machine.node(node, desk.now_ns)
    (listed,) = [one for one in desk.machine.nodes(desk.now_ns) if one.name == node]
    assert listed == msgspec.structs.replace(view, accusations=()), "the list has the counts alone"
    return view


def test_a_node_shows_which_tasks_of_which_users_accuse_it_and_since_when() -> None:
    desk = Desk("n0", requeue_pause_ns=SECOND)
    assert seen(desk, "n0").accused is None
    first = desk.task(spec("a"), user="ann")
    fails(desk, first, reason="uncorrectable memory")
    began_ns = desk.machine.time_ns(desk.now_ns)
    second = desk.task(spec("b"), user="bob")
    fails(desk, second, after_ns=3 * SECOND, reason="the link is down")
    desk.command(DrainNode("n0", "looks bad"), roles=(OPERATOR,))
    view = seen(desk, "n0")
    ended_ns = desk.machine.time_ns(desk.now_ns)
    assert view.accused == Accused(runs=2, tasks=2, users=2, since_ns=began_ns, last_ns=ended_ns)
    assert [(one.task, one.run, one.user, one.reason) for one in view.accusations] == [
        (second, 0, "bob", "the link is down"),
        (first, 0, "ann", "uncorrectable memory"),
    ]
    again = Desk(rows=desk.rows, holder="m1")
    assert seen(again, "n0").accused == view.accused, "the next leader says the same"


def test_an_operator_who_resumes_a_node_has_looked_at_what_was_said_of_it() -> None:
    desk = Desk("n0", requeue_pause_ns=SECOND)
    fails(desk, desk.task(spec("a")))
    desk.command(DrainNode("n0", "looks bad"), roles=(OPERATOR,))
    desk.command(ResumeNode("n0"), roles=(OPERATOR,))
    assert (seen(desk, "n0").accused, seen(desk, "n0").accusations) == (None, ())
    desk.pass_time(5 * SECOND)
    fails(desk, 1)
    accused = seen(desk, "n0").accused
    assert accused is not None
    assert (accused.runs, accused.tasks) == (1, 1)


def test_a_users_error_accuses_nobody_and_a_launcher_that_does_not_start_accuses_its_node() -> None:
    desk = Desk("n0", "n1")
    node = fails(desk, desk.task(spec("a")), Cause.PROGRAM)
    assert seen(desk, node).accused is None
    run = RunRow(task=1, number=0, token="t" * 8, nodes=("n0", "n1"), queued_ns=0, scheduled_ns=0, wish=Wish.NO_START)
    assert accused_nodes(run) == (), "it has not ended"
    run = msgspec.structs.replace(run, state=RunState.ENDED)
    assert accused_nodes(run) == ("n0",)
    said = EndedRun(cause=Cause.INFRASTRUCTURE, exit_code=1, bad_nodes=("n1", "n1", "elsewhere"))
    assert accused_nodes(msgspec.structs.replace(run, ended=said)) == ("n1",), "of its own nodes"


def test_what_is_remembered_of_a_node_is_bounded_as_tasks_are() -> None:
    desk = Desk("n0", max_finished=3, requeue_pause_ns=0)
    for number in range(6):
        fails(desk, desk.task(spec(f"t{number}", max_requeues=0)))
    accused = seen(desk, "n0").accused
    assert accused is not None
    assert accused.runs == 3
    leading = desk.machine._leading
    assert leading is not None
    assert len(leading.ledger.index.accusing["n0"]) == 3
    assert MAX_SHOWN >= 3


def test_people_read_it_in_one_line_of_the_list_and_below_the_node() -> None:
    accused = Accused(runs=3, tasks=1, users=1, since_ns=10**18, last_ns=2 * 10**18)
    said = Accusation(task=7, run=2, user="ann", at_ns=2 * 10**18, reason="ECC\x1b[31m error\nand more")
    node = msgspec.structs.replace(shown_node(1), accused=accused, accusations=(said,))
    assert re.fullmatch(r"3 runs of 1 user since \d\d-\d\d \d\d:\d\d", _accused(node))
    assert _accused(shown_node(1)) == "-"
    *_, head, row = _shown(node).splitlines()
    assert head.split() == ["ENDED", "TASK", "RUN", "USER", "SAYS"]
    assert "ann" in row
    assert "\x1b" not in row
