"""Health events on their way through the leader: drained and requeued in one transaction, kept by the next leader."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from tests.support.health import fault, passes
from tests.support.platform.desk import INVENTORY, Desk, ended, spec

from fireflyer.base.units import SECOND
from fireflyer.cli.platform.nodes import _shown, _state
from fireflyer.cluster.core.health.policy import HealthPolicy
from fireflyer.cluster.core.health.remedies import Remedy
from fireflyer.cluster.core.platform.access import OPERATOR
from fireflyer.cluster.core.platform.commands import (
    DrainNode,
    MoveNode,
    RecordRepair,
    RemoveNode,
    ReportFault,
    ResumeNode,
    ReturnNode,
)
from fireflyer.cluster.core.platform.messages import ChecksChanged, Done, Refused
from fireflyer.cluster.core.platform.node_checking import Checks, NodeChecking
from fireflyer.cluster.core.platform.views import HealthView, NodeView
from fireflyer.cluster.schema.sync import HealthHeard, HealthOrder, RunStatus
from fireflyer.cluster.schema.tasks import Cause, Outcome, TaskState

ORDER = HealthOrder(program=("/opt/site/health",))
POLICY = HealthPolicy(version=7, breaker_share=0.5, probation_ns=60 * SECOND, test_every_ns=5 * SECOND)
XID_79 = fault("gpu_xid", cause="xid_79", part="gpu:0", at_once=True, once=True, words="fell off the bus")


def checking(**fields: Any) -> NodeChecking:
    return NodeChecking(Checks(policy=POLICY, order=ORDER, **fields))


def desk_of(*nodes: str, **fields: Any) -> Desk:
    return Desk(*nodes, checking=checking(), **fields)


def node(desk: Desk, name: str) -> NodeView:
    return desk.machine.node(name, desk.now_ns)


def health(desk: Desk, name: str) -> HealthView:
    found = node(desk, name).health
    assert found is not None
    return found


def running(desk: Desk) -> tuple[int, str, str]:
    """A task of one node, that node, and the other one."""
    task = desk.task(spec("a", max_requeues=0))
    (mine,) = desk.nodes_of(task)
    desk.runs_on(task, mine)
    (other,) = {"n0", "n1"} - {mine}
    return task, mine, other


def test_a_fault_drains_the_node_and_its_task_runs_elsewhere_without_being_charged() -> None:
    desk = desk_of("n0", "n1")
    task, mine, other = running(desk)
    desk.checks(mine, XID_79)
    assert desk.orders(mine).runs[0].wanted == "stop"
    assert (node(desk, mine).state, health(desk, mine).state) == ("draining", "drained")
    desk.gone(task, Cause.PROGRAM, reason="NCCL error")
    desk.pass_time(2 * SECOND)
    assert desk.nodes_of(task) == (other,)
    view = desk.machine.task(task, desk.now_ns)
    assert (view.requeues, view.outcome) == (0, None), "max_requeues is 0, and the task goes on"
    assert health(desk, mine).state == "reboot"
    assert "xid_79" in health(desk, mine).reason
    ticket = health(desk, mine).ticket
    assert ticket is not None
    assert (ticket.node, ticket.fault.cause) == (mine, "xid_79")


def test_a_new_node_whose_driver_does_not_answer_is_warned_of_wherever_it_is_shown_until_it_does() -> None:
    desk = desk_of("n0", "n1")
    dead = fault("gpu_count", "warn", words="nvidia-smi has failed", could_not_run=True)
    for _ in range(3):
        desk.checks("n0", dead)
    assert [change.name for change in desk.changes if change.state == "warned"] == ["n0"], "told once"
    assert health(desk, "n0").warnings == ("gpu_count: nvidia-smi has failed could not run",)
    assert (node(desk, "n0").state, health(desk, "n0").state) == ("idle", "healthy")
    assert _state(node(desk, "n0")) == "idle: warning: gpu_count: nvidia-smi has failed could not run"
    assert "warning  gpu_count: nvidia-smi has failed could not run\n" in _shown(node(desk, "n0"))
    desk.checks("n0", passes("gpu_count"))
    assert health(desk, "n0").warnings == ()
    assert _state(node(desk, "n0")) == "idle"


def test_a_device_of_the_inventory_whose_check_cannot_run_takes_a_new_node_out() -> None:
    desk = desk_of("n0", "n1")
    dead = fault("gpu_count", words="nvidia-smi has failed", could_not_run=True)
    desk.checks("n0", dead)
    assert node(desk, "n0").state == "suspect", "no task goes there while it is probed"
    for _ in range(POLICY.probes):
        order = desk.orders("n0").health
        assert order is not None
        desk.checks("n0", dead, probe=order.probe)
        desk.pass_time(POLICY.probe_spacing_ns)
    assert node(desk, "n0").state == "drained"


@pytest.mark.parametrize("cause", [Cause.PROGRAM, Cause.INFRASTRUCTURE])
def test_a_node_takes_its_next_run_when_its_checks_have_answered_after_a_failure(cause: Cause) -> None:
    desk = desk_of("n0", requeue_pause_ns=0)
    task = desk.task(spec("a"))
    desk.runs_on(task, "n0")
    desk.gone(task, cause)
    following = desk.task(spec("b"))
    desk.pass_time(5 * SECOND)
    assert (desk.nodes_of(following), node(desk, "n0").state) == ((), "suspect")
    assert "a run failed on it" in health(desk, "n0").reason
    order = desk.orders("n0").health
    assert order is not None
    assert (order.probe, order.check, order.validation) == (1, "", ()), "no validation, which takes minutes"
    desk.checks("n0", passes("gpu_xid"), probe=order.probe)
    desk.pass_time(SECOND)
    assert node(desk, "n0").state in ("busy", "idle")
    assert "n0" in (*desk.nodes_of(task), *desk.nodes_of(following))


def test_a_node_is_validated_when_the_ranks_of_the_run_that_ended_are_gone() -> None:
    order = msgspec.structs.replace(ORDER, validation=("/opt/site/validate",))
    desk = Desk("n0", "n1", checking=NodeChecking(Checks(policy=POLICY, order=order)))
    task = desk.task(spec("a", least_nodes=2, most_nodes=2))
    lead, other = desk.nodes_of(task)
    desk.runs_on(task, lead)
    token = desk.token(task)
    end = ended(Cause.PROGRAM, corrupt=(other,))
    desk.say(lead, RunStatus(token=token, state="gone", lead=True, ended=end))
    desk.say(other, RunStatus(token=token, state="running"))
    assert "replicas of a run differed" in health(desk, other).reason
    asked = desk.orders(other).health
    assert asked is not None
    assert asked.probe == 0, "ranks live there"
    desk.say(other, RunStatus(token=token, state="gone"))
    asked = desk.orders(other).health
    assert asked is not None
    assert (asked.probe, asked.check, asked.validation) == (1, "", order.validation)


def test_a_node_whose_checks_say_nothing_after_a_failure_takes_the_next_run_at_the_deadline() -> None:
    desk = desk_of("n0")
    task = desk.task(spec("a"))
    desk.runs_on(task, "n0")
    desk.gone(task, Cause.PROGRAM)
    following = desk.task(spec("b"))
    desk.pass_time(POLICY.probe_limit_ns - 2 * SECOND, step_ns=SECOND)
    assert desk.nodes_of(following) == ()
    desk.pass_time(4 * SECOND)
    assert desk.nodes_of(following) == ("n0",)


@pytest.mark.parametrize("cause", [Cause.SUCCEEDED, Cause.SUSPENDED, Cause.INTERRUPTED])
def test_after_a_run_that_did_not_fail_the_next_one_begins_at_once(cause: Cause) -> None:
    desk = desk_of("n0")
    task = desk.task(spec("a"))
    desk.runs_on(task, "n0")
    desk.gone(task, cause)
    following = desk.task(spec("b"))
    desk.pass_time(SECOND)
    assert "n0" in (*desk.nodes_of(task), *desk.nodes_of(following))


def test_without_checks_the_next_run_begins_at_once_after_a_failure() -> None:
    desk = Desk("n0")
    task = desk.task(spec("a"))
    desk.runs_on(task, "n0")
    desk.gone(task, Cause.PROGRAM)
    following = desk.task(spec("b"))
    desk.pass_time(SECOND)
    assert desk.nodes_of(following) == ("n0",)


def test_a_run_that_had_succeeded_before_it_was_told_to_leave_has_succeeded() -> None:
    desk = desk_of("n0", "n1")
    task, mine, _ = running(desk)
    desk.checks(mine, XID_79)
    desk.gone(task, Cause.SUCCEEDED)
    assert desk.machine.task(task, desk.now_ns).outcome is Outcome.SUCCEEDED


def test_probes_are_orders_of_the_node_and_their_answers_decide() -> None:
    desk = desk_of("n0", "n1")
    _, mine, _ = running(desk)
    bad = fault("mount", words="/data is missing")
    desk.checks(mine, bad)
    for _ in range(POLICY.probes):
        order = desk.orders(mine).health
        assert order is not None
        assert (order.check, order.policy) == ("mount", 7)
        assert (node(desk, mine).state, desk.orders(mine).runs[0].wanted) == ("suspect", "run")
        desk.checks(mine, bad, probe=order.probe)
        desk.pass_time(POLICY.probe_spacing_ns)
    assert node(desk, mine).state == "draining"
    again = desk_of("n0", "n1")
    _, mine, _ = running(again)
    again.checks(mine, bad)
    order = again.orders(mine).health
    assert order is not None
    again.checks(mine, passes("mount"), probe=order.probe)
    assert (node(again, mine).state, health(again, mine).state) == ("busy", "healthy")


def test_a_suspect_gets_no_new_task() -> None:
    desk = desk_of("n0")
    desk.checks("n0", fault("mount"))
    task = desk.task(spec("a"))
    assert desk.state(task) is TaskState.QUEUED
    order = desk.orders("n0").health
    assert order is not None
    desk.checks("n0", passes("mount"), probe=order.probe)
    desk.pass_time(SECOND)
    assert desk.nodes_of(task) == ("n0",)


def test_the_next_leader_goes_on_where_the_last_one_was() -> None:
    desk = desk_of("n0", "n1")
    desk.checks("n0", XID_79)
    desk.pass_time(SECOND)
    again = Desk("n0", "n1", rows=desk.rows, holder="m1", checking=checking())
    again.report_numbers = desk.report_numbers
    assert health(again, "n0").state == "reboot"
    again.command(RecordRepair("n0", Remedy.REBOOT, "power cycled"), user="ops", roles=(OPERATOR,))
    order = again.orders("n0").health
    assert order is not None
    assert (order.probe, order.check) == (1, ""), "all checks, and the validation"
    again.checks("n0", passes("gpu_xid"), probe=order.probe)
    assert (health(again, "n0").state, node(again, "n0").state) == ("probation", "idle")
    again.pass_time(61 * SECOND)
    assert health(again, "n0").state == "returned"


def test_a_report_is_taken_once_and_acknowledged_when_it_is_committed() -> None:
    desk = desk_of("n0", "n1")
    for _ in range(3):
        desk.checks("n0", fault("clock", "warn"))
    desk.say("n0")
    order = desk.orders("n0").health
    assert order is not None
    assert order.heard == HealthHeard(1, 3)
    assert desk.reports["n0"] == []
    warned = [change for change in desk.changes if change.state == "warned"]
    assert len(warned) == 1


def test_a_human_drain_is_kept_whatever_the_checks_say() -> None:
    desk = desk_of("n0", "n1")
    desk.command(DrainNode("n0", "fan 3 is loud"), user="ops", roles=(OPERATOR,))
    desk.checks("n0", XID_79)
    desk.pass_time(SECOND)
    desk.command(RecordRepair("n0", Remedy.REBOOT), user="ops", roles=(OPERATOR,))
    order = desk.orders("n0").health
    assert order is not None
    desk.checks("n0", passes("gpu_xid"), probe=order.probe)
    view = node(desk, "n0")
    assert (health(desk, "n0").state, view.state, view.drain_reason) == ("probation", "drained", "fan 3 is loud")


def test_an_operator_who_resumes_a_node_is_told_that_its_health_holds_it() -> None:
    desk = desk_of("n0", "n1")
    desk.checks("n0", XID_79)
    result = desk.command(ResumeNode("n0"), user="ops", roles=(OPERATOR,))
    assert isinstance(result, Done)
    assert "ff node return" in result.text
    assert node(desk, "n0").state == "drained"


def test_a_node_shows_why_it_is_out_what_is_to_be_done_and_what_was_done_by_whom() -> None:
    desk = desk_of("n0", "n1")
    desk.checks("n0", msgspec.structs.replace(XID_79, serial="1650"))
    desk.pass_time(SECOND)
    desk.command(RecordRepair("n0", Remedy.RMA, "GPU 0 replaced"), user="ops", roles=(OPERATOR,))
    shown = _shown(node(desk, "n0"))
    assert re.search(r"^state +drained: testing: rma was done: GPU 0 replaced; it is tested", shown, re.MULTILINE)
    assert re.search(r"^ticket +1, of gpu:0 serial 1650", shown, re.MULTILINE)
    assert re.search(r" health +drain +gpu_xid \(xid_79\) of gpu:0: fell off the bus; then reboot", shown)
    assert re.search(r" ops +rma +GPU 0 replaced", shown)


def test_the_breaker_is_shown_where_it_holds_a_node() -> None:
    desk = desk_of("n0", "n1")
    for name in ("n0", "n1"):
        desk.checks(name, XID_79)
    desk.pass_time(SECOND)
    assert re.search(r"^held +by breaker", _shown(node(desk, "n1")), re.MULTILINE)
    states = desk.machine.health_states(desk.now_ns)
    assert {state: count for state, count in states.items() if count} == {"reboot": 1, "suspect": 1, "held": 1}


def test_who_may_record_a_repair_and_of_what() -> None:
    desk = desk_of("n0", "n1")
    for command in (RecordRepair("n0", Remedy.RESET), ReturnNode("n0")):
        refused = desk.command(command)
        assert isinstance(refused, Refused)
        assert "platform:operator" in refused.message
        refused = desk.command(command, roles=(OPERATOR,))
        assert isinstance(refused, Refused)
        assert "n0 is healthy" in refused.message
    unchecked = Desk("n0").command(ReturnNode("n0"), roles=(OPERATOR,))
    assert isinstance(unchecked, Refused)
    assert "node n0 is not checked" in unchecked.message


SLOW = fault(
    "validation", "low", cause="cpu_gemm_flop_per_s",
    words="cpu_gemm_flop_per_s is 80.0, 20.0% below the median of 6 peers, 100",
)  # fmt: skip
VALIDATED = msgspec.structs.replace(ORDER, validation=("/opt/site/validate",))


def validated(*nodes: str) -> Desk:
    policy = msgspec.structs.replace(POLICY, required=("validation",))
    return Desk(*nodes, checking=NodeChecking(Checks(policy=policy, order=VALIDATED)))


def reported(desk: Desk, name: str, found: Any) -> str:
    result = desk.command(ReportFault(name, found), user="ops", roles=(OPERATOR,))
    assert isinstance(result, Done), result
    return result.text


def test_a_figure_that_a_validation_found_opens_a_ticket_and_only_a_validation_closes_it() -> None:
    desk = validated("n0", "n1")
    assert reported(desk, "n0", SLOW) == (
        "node n0 is drained: validation (cpu_gemm_flop_per_s): cpu_gemm_flop_per_s is 80.0, 20.0% below the median of "
        "6 peers, 100; ticket 1"
    )
    desk.pass_time(SECOND)
    ticket = health(desk, "n0").ticket
    assert ticket is not None
    assert (ticket.id, ticket.fault.cause, ticket.fault.words) == (1, "cpu_gemm_flop_per_s", SLOW.words)
    assert (node(desk, "n0").state, node(desk, "n0").drain_reason) == ("drained", ""), "no drain of a person"
    assert health(desk, "n0").state == "reboot", "a test under load was what found it"
    desk.checks("n0", passes("gpu_xid"))
    assert health(desk, "n0").state == "reboot"
    desk.command(RecordRepair("n0", Remedy.REBOOT), user="ops", roles=(OPERATOR,))
    order = desk.orders("n0").health
    assert order is not None
    assert (order.check, order.validation) == ("", VALIDATED.validation)
    desk.checks("n0", passes("validation"), probe=order.probe)
    assert health(desk, "n0").state == "probation"
    assert reported(desk, "n0", SLOW).endswith("; ticket 1"), "the same repair goes on"
    desk.pass_time(SECOND)
    assert health(desk, "n0").state == "field diagnosis"


def test_wrong_results_are_no_matter_of_a_test_and_move_the_run() -> None:
    desk = validated("n0", "n1")
    task, mine, _ = running(desk)
    wrong = fault(
        "cpu_stress", "high", cause="wrong_result", words="1 of 9 products of matrices are wrong", at_once=True
    )
    assert "cpu_stress: 1 of 9 products" in reported(desk, mine, wrong)
    assert desk.orders(mine).runs[0].wanted == "stop"
    desk.gone(task, Cause.PROGRAM)
    desk.pass_time(2 * SECOND)
    assert health(desk, mine).state == "field diagnosis"


def test_what_the_breaker_holds_stays_until_there_is_room() -> None:
    desk = validated("n0", "n1")
    reported(desk, "n0", SLOW)
    assert "held by the breaker" in reported(desk, "n1", SLOW)
    desk.checks("n1", passes("validation"))
    assert health(desk, "n1").state == "suspect"
    desk.command(RecordRepair("n0", Remedy.REBOOT), user="ops", roles=(OPERATOR,))
    desk.pass_time(2 * SECOND)
    assert health(desk, "n1").state == "reboot"


def test_where_nothing_validates_a_node_it_is_drained_as_by_a_person() -> None:
    for desk in (Desk("n0"), desk_of("n0")):
        assert reported(desk, "n0", SLOW) == "node n0 gets no new run"
        view = node(desk, "n0")
        assert (view.state, view.drain_reason) == ("drained", f"validation: {SLOW.words}")
        desk.command(DrainNode("n0", "ann repairs the fan"), user="ops", roles=(OPERATOR,))
        assert reported(desk, "n0", SLOW) == "node n0 is drained already: ann repairs the fan"
        assert node(desk, "n0").drain_reason == "ann repairs the fan"


def test_only_operators_report_and_only_faults() -> None:
    desk = validated("n0", "n1")
    refused = desk.command(ReportFault("n0", SLOW))
    assert isinstance(refused, Refused)
    assert "platform:operator" in refused.message
    for found in (fault("memory", "warn"), passes("memory"), fault("memory", "low", user_made=True)):
        refused = desk.command(ReportFault("n0", found), roles=(OPERATOR,))
        assert isinstance(refused, Refused)
        assert "no fault of the node" in refused.message
    assert node(desk, "n0").state == "idle"


def switched(desk: Desk, *, on: bool) -> Desk:
    """The managers are started again with another configuration."""
    fields: dict[str, Any] = {"checking": checking()} if on else {}
    again = Desk("n0", "n1", rows=desk.rows, holder="m1" if desk.settings.holder == "m0" else "m0", **fields)
    again.report_numbers = desk.report_numbers
    return again


def test_while_nodes_are_not_checked_what_their_checks_led_to_does_not_count_and_a_humans_drain_does() -> None:
    desk = desk_of("n0", "n1")
    for name in ("n0", "n1"):
        desk.checks(name, XID_79)
    desk.pass_time(SECOND)
    assert (health(desk, "n0").state, health(desk, "n1").hold) == ("reboot", "breaker")
    desk.command(DrainNode("n1", "fan 3 is loud"), user="ops", roles=(OPERATOR,))
    off = switched(desk, on=False)
    task = off.task(spec("a"))
    off.pass_time(300 * SECOND, step_ns=10 * SECOND)
    assert (off.nodes_of(task), node(off, "n0").health, off.orders("n0").health) == (("n0",), None, None)
    assert (node(off, "n1").state, node(off, "n1").health) == ("drained", None)
    assert off.machine.health_states(off.now_ns)["healthy"] == 2
    result = off.command(ResumeNode("n1"), roles=(OPERATOR,))
    assert isinstance(result, Done)
    assert "gets runs again" in result.text
    assert (node(off, "n1").state, off.machine.node("n1", off.now_ns).drain_reason) == ("idle", "")


def test_when_nodes_are_checked_again_what_was_known_counts_and_what_was_held_is_probed() -> None:
    desk = desk_of("n0", "n1")
    mount = fault("mounts", at_once=True)
    for name in ("n0", "n1"):
        desk.checks(name, mount)
    desk.pass_time(SECOND)
    assert (health(desk, "n0").state, health(desk, "n1").hold) == ("testing", "breaker")
    off = switched(desk, on=False)
    task = off.task(spec("a"))
    off.pass_time(300 * SECOND, step_ns=10 * SECOND)
    assert off.nodes_of(task) == ("n0",)
    again = switched(off, on=True)
    order = again.orders("n0").health
    assert order is not None
    assert order.probe == 0, "its run is not tested beside"
    again.pass_time(10 * SECOND)
    assert health(again, "n0").state == "drained", "until its run has ended"
    assert again.nodes_of(task) == ("n0",), "no run leaves for what is long over"
    again.checks("n1", passes("mounts"))
    assert health(again, "n1").state == "healthy"
    assert "drained" not in [change.state for change in again.changes if change.name == "n1"]


def test_a_node_with_a_run_is_tested_when_that_has_ended_and_who_asks_is_told_so() -> None:
    desk = desk_of("n0", "n1")
    task, mine, _ = running(desk)
    desk.checks(mine, fault("disk_space", "low", at_once=True))
    assert health(desk, mine).state == "drained"
    result = desk.command(ReturnNode(mine, "cleaned up"), user="ops", roles=(OPERATOR,))
    assert isinstance(result, Done)
    assert "when its run has ended" in result.text
    desk.pass_time(10 * SECOND)
    order = desk.orders(mine).health
    assert order is not None
    assert (order.probe, desk.orders(mine).runs[0].wanted) == (0, "run")
    assert "when its run has ended" in health(desk, mine).reason
    desk.gone(task, Cause.SUCCEEDED)
    desk.pass_time(SECOND)
    order = desk.orders(mine).health
    assert order is not None
    assert (health(desk, mine).state, order.probe) == ("testing", 1)


def test_a_reboot_that_the_agent_reports_is_recorded() -> None:
    desk = desk_of("n0", "n1")
    desk.checks("n0", XID_79)
    desk.pass_time(SECOND)
    desk.say("n0", inventory=msgspec.structs.replace(INVENTORY, boot_id="another"))
    assert health(desk, "n0").state == "testing"


def test_a_draft_that_the_store_does_not_take_is_decided_again() -> None:
    desk = desk_of("n0", "n1")
    _, mine, _ = running(desk)
    desk.fail_next.append("the store is away")
    desk.checks(mine, XID_79)
    assert (node(desk, mine).health, desk.orders(mine).runs[0].wanted) == (None, "run")
    desk.pass_time(SECOND)
    assert (health(desk, mine).state, desk.orders(mine).runs[0].wanted) == ("drained", "stop")
    assert len([change for change in desk.changes if change.state == "drained"]) == 1


def test_a_node_that_is_removed_takes_its_record_along() -> None:
    desk = desk_of("n0", "n1", lost_ns=5 * SECOND)
    desk.checks("n0", XID_79)
    desk.say("n0")
    desk.pass_time(10 * SECOND, hear=False)
    assert isinstance(desk.command(RemoveNode("n0"), roles=(OPERATOR,)), Done)
    desk.say("n0")
    assert node(desk, "n0").health is None


@pytest.mark.parametrize("line", [b"", b"{}", b"[[", b"\xff" * 100, b'{"check":"A B","severity":"high","seen_ns":0}'])
def test_what_is_no_health_event_is_told_and_drains_nobody(line: bytes) -> None:
    from fireflyer.cluster.core.health.findings import PROGRAM, findings_of

    (found,) = findings_of((line,), 5)
    assert (found.check, found.could_not_run, found.severity) == (PROGRAM, True, "warn")
    known = msgspec.json.encode(XID_79)[:-1] + b',"newer":1}'
    assert findings_of((known,), 5)[0].cause == "xid_79", "a newer release may say more"


def test_minutes_of_reports_that_pass_write_nothing() -> None:
    desk = desk_of("n0", "n1")
    desk.pass_time(SECOND)
    before = {key for key in desk.rows if key.startswith((b"PMhe", b"PMrt", b"PMhp"))}
    for _ in range(5):
        desk.checks("n0", passes("gpu_xid"), passes("mount"))
        desk.pass_time(60 * SECOND, step_ns=10 * SECOND)
    assert {key for key in desk.rows if key.startswith((b"PMhe", b"PMrt", b"PMhp"))} == before


def test_a_node_returns_when_what_its_group_requires_has_passed() -> None:
    policy = msgspec.structs.replace(POLICY, required=("validation",), group_required={"gpu": ("mount",)})
    desk = Desk("n0", "n1", checking=NodeChecking(Checks(policy=policy, order=ORDER)))
    desk.command(MoveNode("n0", group="gpu"), user="ops", roles=(OPERATOR,))
    for name in ("n0", "n1"):
        desk.checks(name, XID_79)
        desk.pass_time(SECOND)
        desk.command(RecordRepair(name, Remedy.REBOOT), user="ops", roles=(OPERATOR,))
        for _ in range(3):
            desk.pass_time(6 * SECOND)
            order = desk.orders(name).health
            assert order is not None
            desk.checks(name, passes("gpu_xid"), passes("mount"), probe=order.probe)
    assert health(desk, "n0").state == "probation"
    assert health(desk, "n1").state == "testing", "the validation has not passed"


def test_what_is_checked_changes_while_the_manager_leads() -> None:
    desk = desk_of("n0", "n1")
    desk.checks("n0", XID_79)
    desk.pass_time(SECOND)
    assert health(desk, "n0").state == "reboot"
    for checks, state, version in (
        (Checks(policy=POLICY, order=ORDER, groups=("gpu",)), None, 0),
        (Checks(policy=HealthPolicy(version=9), order=ORDER, groups=("default",)), "reboot", 9),
        (Checks(), None, 0),
    ):
        desk.handle(ChecksChanged(checks))
        desk.pass_time(SECOND)
        view = node(desk, "n0").health
        assert (view.state if view is not None else None) == state
        orders = desk.machine.orders_for("n1", desk.now_ns)
        assert orders is not None
        assert (orders.health.policy if orders.health is not None else 0) == version
