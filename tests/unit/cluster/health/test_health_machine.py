"""What is made of health events: who is drained, who is requeued, who is held, and how a node comes back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.support.health import Floor, fault, passes

from fireflyer.base.errors import UsageError
from fireflyer.base.health_event import Severity
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.health.findings import Finding, no_result
from fireflyer.cluster.core.health.machine import DOUBT_AGAIN_NS, DOUBT_LIMIT_NS
from fireflyer.cluster.core.health.messages import Probed, Rebooted, Removed, Said, Tell, TimePassed
from fireflyer.cluster.core.health.records import MAX_WARNED, Hold, RepairState
from fireflyer.cluster.core.health.remedies import Remedy, remedy_of

MINUTE = 60 * SECOND
XID_79 = fault("gpu_xid", cause="xid_79", part="gpu:0000:3b:00.0", at_once=True, once=True, words="fell off the bus")
LINK = fault("infiniband", part="ib0", at_once=True, words="down")
DISK = fault("disk_space", "low", part="mount:/data", words="1 % free")
MOUNT = fault("mounts", part="mount:/data", at_once=True, words="is missing")
UNCORRECTED = fault("kernel_errors", cause="edac_ue", once=True, words="EDAC MC0: 1 UE memory read error")


def tens(count: int, **policy: Any) -> Floor:
    return Floor(*(f"n{number}" for number in range(count)), **policy)


# --- after a run that failed ---


def test_a_node_takes_no_task_between_the_failure_of_its_run_and_the_answer_of_all_its_checks() -> None:
    floor = tens(40)
    floor.run_failed("n0", "n1")
    assert [floor.record(node).takes_tasks for node in ("n0", "n1", "n2")] == [False, False, True]
    assert floor.record("n0").asked == (1, ""), "all checks"
    floor.says("n0", passes("gpu_xid"))
    assert not floor.record("n0").takes_tasks, "a round that had begun before says nothing of the failure"
    floor.broken["n1", "gpu_xid"] = XID_79
    floor.pass_time(SECOND)
    assert floor.record("n0").takes_tasks
    assert floor.state("n1") is RepairState.DRAINED
    assert (floor.record("n1").unchecked, floor.moves("n0")) == (None, [])


def test_checks_that_do_not_answer_keep_a_node_for_the_time_of_a_probe() -> None:
    floor = tens(40)
    floor.hung.add("n0")
    floor.run_failed("n0")
    floor.pass_time(floor.policy.probe_limit_ns - SECOND)
    assert not floor.record("n0").takes_tasks
    floor.pass_time(SECOND)
    assert floor.record("n0").takes_tasks
    assert floor.record("n0").asked is None


def test_another_failure_asks_anew_and_what_was_answered_before_does_not_count() -> None:
    floor = tens(40)
    floor.run_failed("n0")
    floor.run_failed("n0")
    floor.feed(Probed("n0", 1, (passes("gpu_xid"),)))
    assert not floor.record("n0").takes_tasks
    floor.feed(Probed("n0", 2, (passes("gpu_xid"),)))
    assert floor.record("n0").takes_tasks


def test_a_node_that_is_out_or_suspect_is_not_asked_beside_its_repair() -> None:
    floor = tens(40)
    floor.breaks("n0", XID_79)
    floor.breaks("n1", MOUNT)
    before = {node: floor.record(node) for node in ("n0", "n1")}
    floor.run_failed("n0", "n1")
    assert {node: floor.record(node) for node in before} == before


# --- replicas that differ ---

BAD_VALIDATION = fault("validation", words="GEMM of GPU 3 gave another result")


def test_a_node_whose_ranks_differed_takes_no_task_until_it_has_been_validated() -> None:
    floor = tens(40)
    told = floor.run_failed("n0", "n1", corrupt=("n1",))
    faults = [(one.node, one.fault) for one in told if isinstance(one, Tell) and one.fault is not None]
    assert [(node, one.cause, one.user_made) for node, one in faults] == [("n1", "corruption", True)]
    assert (floor.record("n0").doubted, floor.record("n1").doubted) == (False, True)
    floor.hung.add("n1")
    floor.pass_time(10 * floor.policy.probe_limit_ns)
    assert floor.record("n0").takes_tasks
    assert not floor.record("n1").takes_tasks, "a validation takes longer than checks"
    floor.feed(Probed("n1", 1, (passes("gpu"), passes("validation"))))
    assert floor.record("n1").takes_tasks
    assert (floor.record("n1").doubted, floor.moves("n1")) == (False, [])


def test_only_what_the_validation_finds_takes_a_node_out_whose_ranks_differed() -> None:
    floor = tens(40)
    floor.run_failed("n0", corrupt=("n0",))
    floor.feed(Probed("n0", 1, (passes("gpu"), BAD_VALIDATION)))
    assert (floor.state("n0"), floor.parts.content) == (RepairState.DRAINED, {})
    floor.run_failed("n1", corrupt=("n1",))
    hung = msgspec.structs.replace(BAD_VALIDATION, severity="warn", could_not_run=True)
    floor.feed(Probed("n1", 1, (passes("gpu"), hung)))
    assert floor.state("n1") is RepairState.HEALTHY
    floor.run_failed("n2")
    floor.feed(Probed("n2", 1, (passes("gpu"), BAD_VALIDATION)))
    assert floor.state("n2") is RepairState.SUSPECT, "else a finding is probed as always"


def test_who_says_again_and_again_that_replicas_differ_has_no_node_validated_all_the_time() -> None:
    floor = tens(40)
    floor.pass_time(SECOND)
    floor.run_failed("n0", corrupt=("n0",))
    floor.feed(Probed("n0", 1, (passes("gpu"), passes("validation"))))
    floor.run_failed("n0", corrupt=("n0",))
    assert not floor.record("n0").doubted
    floor.pass_time(SECOND)
    assert floor.record("n0").takes_tasks
    floor.pass_time(DOUBT_AGAIN_NS, step_ns=DOUBT_AGAIN_NS)
    floor.run_failed("n0", corrupt=("n0",))
    assert floor.record("n0").doubted


def test_a_validation_that_never_answers_does_not_keep_a_node_for_ever() -> None:
    floor = tens(40)
    floor.hung.add("n0")
    floor.run_failed("n0", corrupt=("n0",))
    floor.pass_time(DOUBT_LIMIT_NS, step_ns=DOUBT_LIMIT_NS)
    assert floor.record("n0").takes_tasks
    assert not floor.record("n0").doubted


def test_a_failed_validation_that_the_breaker_held_is_validated_again_and_over_when_it_passes() -> None:
    floor = tens(20)
    floor.breaks("n0", XID_79)
    assert floor.state("n0") is RepairState.DRAINED, "as many are out as may be"
    held = ("n1", "n2", "n3")
    for node in held:
        floor.broken[node, "validation"] = BAD_VALIDATION
        floor.run_failed(node, corrupt=(node,))
        floor.pass_time(SECOND)
    assert {floor.hold(node) for node in held} == {Hold.BREAKER}
    floor.broken.clear()
    floor.repair("n0", Remedy.REBOOT)
    floor.pass_time(2 * floor.policy.probation_ns, step_ns=MINUTE)
    assert all(floor.record(node).takes_tasks for node in floor.nodes)


def test_a_suspicion_by_a_validation_asks_for_all_and_that_again_where_it_came_to_no_result() -> None:
    floor = tens(40)
    floor.says("n0", BAD_VALIDATION)
    assert floor.record("n0").asked == (1, ""), "no check of the program has this name"
    floor.hung.add("n0")
    floor.pass_time(floor.policy.probe_limit_ns)
    assert floor.hold("n0") is Hold.UNCONFIRMED
    floor.hung.clear()
    floor.pass_time(DOUBT_LIMIT_NS + MINUTE, step_ns=MINUTE)
    assert floor.record("n0").takes_tasks


def test_a_node_whose_ranks_differed_is_validated_after_a_suspicion_that_was_none() -> None:
    floor = tens(40)
    floor.run_failed("n0", corrupt=("n0",))
    floor.says("n0", fault("disk_space"))
    assert floor.record("n0").asked == (2, "disk_space")
    floor.feed(Probed("n0", 2, (passes("disk_space"),)))
    assert (floor.state("n0"), floor.record("n0").takes_tasks) == (RepairState.HEALTHY, False)
    assert (floor.record("n0").asked, floor.record("n0").is_validated) == ((3, ""), True)
    floor.feed(Probed("n0", 3, (passes("gpu"), passes("validation"))))
    assert floor.record("n0").takes_tasks


@pytest.mark.parametrize("fails_again", [False, True])
def test_a_validation_that_fails_once_counts_as_a_fault_only_if_the_test_fails_too(fails_again: bool) -> None:
    floor = tens(40)
    for _ in range(3):
        floor.broken["n0", "validation"] = BAD_VALIDATION
        floor.run_failed("n0", corrupt=("n0",))
        floor.pass_time(2 * SECOND)
        assert (floor.state("n0"), floor.requeued()) == (RepairState.TESTING, [])
        if not fails_again:
            floor.broken.clear()
        floor.pass_time(floor.policy.test_every_ns * floor.policy.probes, step_ns=floor.policy.test_every_ns)
        faults = [len(part.faults_ns) for part in floor.parts.content.values()]
        if fails_again:
            assert (floor.state("n0"), faults) == (RepairState.TESTING, [1])
            return
        assert (floor.state("n0"), faults) == (RepairState.PROBATION, [])
        floor.pass_time(DOUBT_AGAIN_NS, step_ns=DOUBT_AGAIN_NS // 2)


def test_what_is_found_beside_a_failed_validation_comes_first_and_the_node_is_validated_after_it() -> None:
    floor = tens(40)
    floor.run_failed("n0", corrupt=("n0",))
    floor.feed(Probed("n0", 1, (XID_79, BAD_VALIDATION)))
    assert floor.record("n0").fault == XID_79
    floor.run_failed("n1", corrupt=("n1",))
    floor.feed(Probed("n1", 1, (fault("disk_space"), BAD_VALIDATION)))
    assert floor.record("n1").asked == (2, "disk_space")
    floor.feed(Probed("n1", 2, (passes("disk_space"),)))
    assert (floor.record("n1").takes_tasks, floor.record("n1").is_validated) == (False, True)


def test_who_accuses_all_nodes_has_no_more_of_them_validated_at_a_time_than_may_be_out() -> None:
    floor = tens(20)
    floor.hung.update(floor.nodes)
    told = floor.run_failed(*floor.nodes, corrupt=tuple(floor.nodes))
    assert [node for node in floor.nodes if floor.record(node).doubted] == ["n0"]
    assert [one.node for one in told if isinstance(one, Tell)] == ["n0"], "the others are in the event log"
    assert floor.run_failed(*floor.nodes, corrupt=tuple(floor.nodes)) == []
    floor.pass_time(floor.policy.probe_limit_ns)
    assert [node for node in floor.nodes if not floor.record(node).takes_tasks] == ["n0"]
    floor.feed(Probed("n0", floor.record("n0").numbers, (passes("gpu"), passes("validation"))))
    floor.run_failed("n0", "n1", corrupt=("n0", "n1"))
    assert [node for node in floor.nodes if floor.record(node).doubted] == ["n1"], "each once a day"


def test_a_node_that_is_suspect_when_its_ranks_differ_is_validated_after_that() -> None:
    floor = tens(40)
    floor.says("n0", fault("disk_space"))
    floor.run_failed("n0", corrupt=("n0",))
    assert floor.record("n0").asked == (1, "disk_space")
    floor.feed(Probed("n0", 1, (passes("disk_space"),)))
    assert (floor.record("n0").takes_tasks, floor.record("n0").is_validated) == (False, True)


# --- severity and confirmation ---


def test_a_lost_gpu_takes_the_node_out_at_once_and_its_run_goes_elsewhere() -> None:
    floor = tens(40)
    floor.busy.add("n0")
    floor.breaks("n0", XID_79)
    assert (floor.state("n0"), floor.requeued()) == (RepairState.DRAINED, ["n0"])
    assert "xid_79" in floor.record("n0").reason
    floor.busy.clear()
    floor.pass_time(SECOND)
    assert floor.state("n0") is RepairState.REBOOT
    assert "reboot is due" in floor.record("n0").reason


def test_a_fault_of_low_severity_lets_the_run_end() -> None:
    floor = tens(40)
    floor.busy.add("n0")
    floor.breaks("n0", DISK)
    floor.pass_time(MINUTE)
    assert (floor.state("n0"), floor.requeued()) == (RepairState.DRAINED, [])
    floor.breaks("n0", XID_79)
    assert floor.requeued() == ["n0"], "unless something worse comes before the end"


def test_a_warning_is_told_once_until_the_check_passes() -> None:
    floor = tens(4)
    for _ in range(3):
        floor.says("n0", fault("clock", "warn", words="1 s off"))
    assert (len(floor.told()), floor.state("n0")) == (1, RepairState.HEALTHY)
    floor.says("n0", fault("clock", "warn", words="2 s off"))
    assert len(floor.told()) == 1, "the same, in other words"
    assert [one.text for one in floor.record("n0").warned] == ["clock: 1 s off"], "it stands with the node"
    floor.says("n0", passes("clock"))
    assert floor.record("n0").warned == ()
    floor.says("n0", fault("clock", "warn", words="1 s off"))
    assert len(floor.told()) == 2


def test_that_the_program_fails_stands_until_it_has_run_whatever_the_kernel_says_meanwhile() -> None:
    floor = tens(4)
    failed = msgspec.structs.replace(
        fault("health_program", "warn", words="driver does not answer"), could_not_run=True
    )
    for _ in range(3):
        floor.says("n0", failed)
        floor.says("n0", fault("gpu_xid", "warn", cause="xid_13", once=True))
    assert len(floor.told()) == 2, "each once"
    assert [one.check for one in floor.record("n0").warned] == ["health_program", "gpu_xid"]
    floor.says("n0", fault("clock", "warn", words="1 s off"))
    assert [one.check for one in floor.record("n0").warned] == ["gpu_xid", "clock"], "its checks have run"


def test_warnings_without_number_are_told_once_each_up_to_a_limit() -> None:
    floor = tens(4)
    many = [fault("clock", "warn", part=f"clock:{number}") for number in range(2 * MAX_WARNED)]
    for _ in range(3):
        floor.says("n0", *many)
    assert len(floor.told()) == MAX_WARNED
    assert "further ones" in str(floor.told()[-1])
    floor.says("n0", *(msgspec.structs.replace(passes("clock"), part=f"clock:{number}") for number in range(40)))
    told = len(floor.told())
    floor.says("n0", fault("clock", "warn", part="clock:0"))
    assert [one.text for one in floor.record("n0").warned] == ["clock of clock:0"], "there is room for it again"
    assert len(floor.told()) == told + 1
    floor.says("n0", passes("clock"))
    assert floor.record("n0").warned == ()


def test_what_is_not_certain_is_acted_on_when_three_probes_have_failed_within_ten_seconds() -> None:
    floor = tens(40)
    floor.busy.add("n0")
    floor.breaks("n0", fault("mount", words="/data is missing"))
    assert (floor.state("n0"), floor.requeued()) == (RepairState.SUSPECT, []), "one failure proves nothing"
    assert floor.record("n0").asked == (1, "mount")
    floor.pass_time(10 * SECOND)
    assert (floor.state("n0"), floor.requeued()) == (RepairState.DRAINED, ["n0"])
    assert floor.record("n0").numbers == 3


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_one_probe_that_passes_makes_it_a_flap(failing: int) -> None:
    floor = tens(40)
    floor.breaks("n0", fault("mount"))
    for _ in range(failing):
        floor.answer("n0")
        floor.now_ns += floor.policy.probe_spacing_ns
        floor.feed(TimePassed())
    floor.broken.clear()
    floor.pass_time(10 * SECOND)
    assert floor.moves("n0") == [RepairState.SUSPECT, RepairState.HEALTHY]
    assert floor.record("n0").numbers == failing + 1


def test_flaps_below_the_rate_do_nothing_and_above_it_they_are_a_fault() -> None:
    floor = tens(40)
    for number in range(1, floor.policy.flaps + 1):
        assert floor.state("n0") is RepairState.HEALTHY
        floor.says("n0", fault("ecc_rate", part="gpu:1"))
        floor.pass_time(MINUTE)
        assert (floor.state("n0") is RepairState.HEALTHY) == (number < floor.policy.flaps)
    assert "5 flaps" in floor.tickets.content[1].fault.words
    slow = tens(40)
    for _ in range(20):
        slow.says("n0", fault("ecc_rate", part="gpu:1"))
        slow.pass_time(20 * MINUTE, step_ns=MINUTE)
    assert slow.state("n0") is RepairState.HEALTHY


def test_a_tool_that_hangs_drains_nobody_and_the_node_takes_no_new_task_until_the_check_passes() -> None:
    floor = tens(40)
    floor.says("n1", fault("gpu", "warn", could_not_run=True, at_once=True, words="killed after 60 s"))
    assert (floor.state("n1"), len(floor.told("n1"))) == (RepairState.HEALTHY, 1)
    floor.hung.add("n0")
    floor.breaks("n0", fault("gpu"))
    floor.pass_time(floor.policy.probe_limit_ns + SECOND)
    assert (floor.state("n0"), floor.hold("n0")) == (RepairState.SUSPECT, Hold.UNCONFIRMED)
    floor.says("n0", passes("gpu"))
    assert floor.state("n0") is RepairState.HEALTHY


def test_a_check_that_is_not_required_and_could_not_run_is_nothing() -> None:
    floor = tens(4)
    floor.says("n0", fault("gpu_dcgm", "ok", could_not_run=True, words="dcgmi is not installed"))
    assert (floor.told(), floor.health.get("n0")) == ([], None)


@pytest.mark.parametrize("severity", ["low", "high"])
def test_a_required_check_that_cannot_run_on_a_device_that_exists_is_a_fault_when_probes_say_so_too(
    severity: Severity,
) -> None:
    floor = tens(40)
    floor.busy.add("n0")
    hangs = fault("gpu_count", severity, could_not_run=True, at_once=True, words="nvidia-smi: killed after 60 s")
    floor.breaks("n0", hangs)
    assert (floor.state("n0"), floor.requeued()) == (RepairState.SUSPECT, []), "a tool that hung once proves nothing"
    floor.pass_time(10 * SECOND)
    assert (floor.state("n0"), floor.requeued()) == (RepairState.DRAINED, ["n0"] if severity == "high" else [])
    floor.breaks("n1", hangs)
    floor.broken.pop(("n1", "gpu_count"))
    floor.pass_time(10 * SECOND)
    assert floor.state("n1") is RepairState.HEALTHY


def test_that_the_program_of_the_checks_fails_is_told_again_after_it_has_worked() -> None:
    floor = tens(4)
    for _ in range(2):
        floor.says("n0", no_result("killed after 60 s", 0))
    assert len(floor.told("n0")) == 1
    floor.says("n0", passes("mounts"))
    floor.says("n0", no_result("killed after 60 s", 0))
    assert len(floor.told("n0")) == 2


# --- events ---


@pytest.mark.parametrize(("severity", "requeued"), [("low", []), ("high", ["n0"])])
def test_what_has_happened_is_acted_on_without_a_probe_as_none_can_repeat_it(
    severity: Severity, requeued: list[str]
) -> None:
    floor = tens(40)
    floor.busy.add("n0")
    floor.happens("n0", msgspec.structs.replace(UNCORRECTED, severity=severity))
    assert (floor.state("n0"), floor.requeued()) == (RepairState.DRAINED, requeued)
    floor.happens("n0", UNCORRECTED)
    assert floor.requeued() == ["n0"], "an event of high severity does not wait for the end of the run"


def test_an_event_that_a_user_can_have_made_takes_no_node_out() -> None:
    floor = tens(40)
    floor.busy.add("n0")
    floor.happens("n0", fault("gpu_xid", cause="xid_31", user_made=True))
    assert (floor.state("n0"), floor.requeued()) == (RepairState.SUSPECT, [])
    floor.busy.clear()
    floor.pass_time(MINUTE)
    assert floor.moves("n0") == [RepairState.SUSPECT, RepairState.HEALTHY]


@pytest.mark.parametrize("suspected", [fault("mounts"), fault("gpu_xid", "low", part=XID_79.part), MOUNT, DISK])
def test_an_event_is_heavier_than_the_state_that_a_node_is_suspected_of(suspected: Finding) -> None:
    floor = tens(40, breaker_share=0.0)
    floor.breaks("n1", UNCORRECTED)
    floor.breaks("n0", suspected)
    floor.happens("n0", XID_79)
    assert (floor.hold("n0"), floor.record("n0").fault) == (Hold.BREAKER, XID_79)
    floor.says("n0", passes(suspected.check))
    assert floor.hold("n0") is Hold.BREAKER


@pytest.mark.parametrize("found", [XID_79, msgspec.structs.replace(XID_79, part="gpu:1"), UNCORRECTED, LINK])
def test_what_a_probe_finds_beside_the_fault_counts_as_in_a_report(found: Finding) -> None:
    floor = tens(40)
    floor.busy.add("n0")
    floor.says("n0", fault("gpu_xid", "low", part=XID_79.part, cause="xid_94"))
    floor.feed(Probed("n0", 1, (found, passes("fans"))))
    assert (floor.state("n0"), floor.record("n0").fault) == (RepairState.DRAINED, found)
    assert floor.requeued() == ["n0"]


def test_a_probe_that_finds_only_another_part_at_fault_has_that_one_probed() -> None:
    floor = tens(40)
    floor.says("n0", fault("infiniband", part="mlx5_0"))
    floor.feed(Probed("n0", 1, (fault("infiniband", part="mlx5_1"), fault("clock", "warn", words="1 s off"))))
    record = floor.record("n0")
    assert (record.state, record.fault, record.asked) == (
        RepairState.SUSPECT, fault("infiniband", part="mlx5_1"), (2, "infiniband"),
    )  # fmt: skip
    assert floor.told("n0") == ["clock: 1 s off"]


def test_a_probe_that_says_only_that_another_part_is_well_came_to_no_result() -> None:
    floor = tens(40)
    floor.says("n0", fault("infiniband", part="mlx5_0"))
    floor.feed(Probed("n0", 1, (passes("infiniband", "mlx5_1"),)))
    assert floor.hold("n0") is Hold.UNCONFIRMED


@pytest.mark.parametrize("by_probe", [True, False])
def test_an_event_during_a_test_fails_it_and_one_of_before_does_not(by_probe: bool) -> None:
    floor = tens(40, required=("validation",))
    floor.happens("n0", UNCORRECTED)
    floor.broken["n0", "validation"] = fault("validation", "warn", could_not_run=True)
    floor.feed(TimePassed())
    floor.happens("n0", XID_79)
    assert floor.state("n0") is RepairState.TESTING, "its report may be of before the test"
    floor.pass_time(SECOND)
    floor.hung.add("n0")
    floor.pass_time(floor.policy.test_every_ns)
    if by_probe:
        asked = floor.record("n0").asked
        assert asked is not None
        floor.feed(Probed("n0", asked[0], (XID_79,)))
    else:
        floor.happens("n0", XID_79)
    assert floor.state("n0") is RepairState.REBOOT
    assert "xid_79" in floor.record("n0").reason


@pytest.mark.parametrize("by_probe", [True, False])
def test_an_event_fails_a_test_that_nobody_has_answered_yet_where_it_happened_after_the_node_was_asked(
    by_probe: bool,
) -> None:
    floor = tens(40, required=("validation",))
    floor.hung.add("n0")
    floor.happens("n0", UNCORRECTED)
    floor.feed(TimePassed())
    number = floor.record("n0").numbers
    assert floor.state("n0") is RepairState.TESTING

    def happens(asked: int) -> RepairState:
        floor.feed(Probed("n0", number, (XID_79,), asked) if by_probe else Said("n0", (XID_79,), asked))
        return floor.state("n0")

    if not by_probe:
        assert happens(0) is RepairState.TESTING
        assert happens(number - 1) is RepairState.TESTING, "a probe of before the test"
    assert happens(number) is RepairState.REBOOT
    assert "xid_79" in floor.record("n0").reason


# --- evidence of users ---


def test_what_a_user_can_have_made_requeues_nothing_and_is_probed_after_the_run() -> None:
    floor = tens(40)
    floor.busy.add("n0")
    forged = fault("disk_space", part="mount:/data", user_made=True, at_once=True)
    floor.breaks("n0", forged)
    floor.pass_time(MINUTE)
    assert (floor.state("n0"), floor.hold("n0"), floor.requeued()) == (RepairState.SUSPECT, Hold.USER, [])
    floor.busy.clear()
    floor.broken.clear()
    floor.pass_time(MINUTE)
    assert (floor.state("n0"), floor.moves("n0").count(RepairState.DRAINED)) == (RepairState.HEALTHY, 0)
    floor.breaks("n0", forged)
    floor.pass_time(MINUTE)
    assert floor.state("n0") is not RepairState.HEALTHY, "and what is still there then is a fault"
    assert RepairState.DRAINED in floor.moves("n0")


def test_evidence_of_a_user_hides_no_fault_that_is_certain() -> None:
    floor = tens(40)
    floor.busy.add("n0")
    floor.breaks("n0", fault("disk_space", user_made=True, at_once=True))
    floor.breaks("n0", XID_79)
    assert floor.requeued() == ["n0"]


# --- breaker and leaf ---


def test_the_breaker_holds_what_would_be_one_too_many_and_tells_a_person() -> None:
    floor = tens(40, breaker_share=0.05)
    floor.busy.update(floor.nodes)
    for node in ("n0", "n1", "n2"):
        floor.breaks(node, XID_79)
    assert [floor.state(node) for node in ("n0", "n1", "n2")] == [RepairState.DRAINED] * 2 + [RepairState.SUSPECT]
    assert (floor.hold("n2"), floor.requeued()) == (Hold.BREAKER, ["n0", "n1"])
    assert any("breaker" in words for words in floor.told("n2"))
    assert not floor.record("n2").takes_tasks
    floor.says("n2", passes("gpu_xid"))
    assert floor.state("n2") is RepairState.SUSPECT, "an Xid is not undone by a check that sees it no more"
    floor.busy.clear()
    floor.pass_time(SECOND)
    floor.repair("n0", Remedy.REBOOT)
    floor.pass_time(2 * SECOND)
    assert floor.state("n2") in (RepairState.DRAINED, RepairState.REBOOT), "as a person has taken n0 over"


def test_a_shared_fault_that_is_over_costs_no_run_of_the_nodes_that_the_breaker_held() -> None:
    floor = tens(40, breaker_share=0.05)
    floor.busy.update(floor.nodes)
    for node in floor.nodes:
        floor.breaks(node, MOUNT)
    floor.pass_time(5 * MINUTE, step_ns=10 * SECOND)
    assert floor.requeued() == ["n0", "n1"]
    floor.broken.clear()
    for node in floor.nodes:
        floor.says(node, passes("mounts"))
    assert {floor.state(node) for node in floor.nodes[2:]} == {RepairState.HEALTHY}
    floor.busy.difference_update(("n0", "n1"))
    floor.pass_time(30 * MINUTE, step_ns=10 * SECOND)
    assert floor.requeued() == ["n0", "n1"]


@pytest.mark.parametrize("still", [True, False])
def test_a_state_that_the_breaker_held_is_probed_before_it_is_acted_on(still: bool) -> None:
    floor = tens(40, breaker_share=0.05)
    for node in floor.nodes[:5]:
        floor.breaks(node, MOUNT)
    floor.pass_time(SECOND)
    if not still:
        floor.broken.clear()
    floor.repair("n0", Remedy.TEST)
    floor.feed(TimePassed())
    assert [floor.record(node).asked is not None for node in ("n2", "n3", "n4")] == [True, False, False], "one has room"
    floor.pass_time(15 * SECOND)
    assert (RepairState.DRAINED in floor.moves("n2")) is still
    assert still or floor.state("n2") is RepairState.HEALTHY


def test_a_sweep_counts_the_nodes_once_however_many_are_held() -> None:
    steps: list[int] = []
    for count in (100, 200):
        floor = tens(count, breaker_share=0.0)
        floor.leaves.update(dict.fromkeys(floor.nodes[: count // 2], "leaf"))
        for node in floor.nodes:
            floor.breaks(node, LINK)
        assert sum(floor.hold(node) is not Hold.NONE for node in floor.nodes) >= count - 1
        before = floor.health.read
        floor.feed(TimePassed())
        steps.append(floor.health.read - before)
    assert steps[1] <= 2 * steps[0], steps


def test_a_sweep_that_has_room_takes_out_no_more_nodes_than_may_be() -> None:
    floor = tens(40, breaker_share=0.1)
    for node in floor.nodes[:12]:
        floor.breaks(node, UNCORRECTED)
    floor.pass_time(SECOND)
    for node in ("n0", "n1", "n2"):
        floor.repair(node, Remedy.REBOOT)
    floor.feed(TimePassed())
    assert sum(RepairState.DRAINED in floor.moves(node) for node in floor.nodes) == 4 + 3


def test_one_node_may_be_out_however_few_there_are() -> None:
    floor = tens(3, breaker_share=0.0)
    floor.breaks("n0", XID_79)
    floor.breaks("n1", XID_79)
    assert [floor.state("n0"), floor.state("n1")] == [RepairState.DRAINED, RepairState.SUSPECT]


def test_links_of_one_leaf_are_the_leafs_and_not_of_32_nodes() -> None:
    floor = tens(640)
    mine = floor.nodes[:32]
    floor.leaves.update(dict.fromkeys(mine, "leaf-7"))
    floor.busy.update(mine)
    for node in mine:
        floor.breaks(node, LINK)
        floor.pass_time(100_000_000)
    assert {floor.hold(node) for node in mine} == {Hold.LEAF}
    assert len(floor.requeued()) < floor.policy.leaf_links
    assert sum("leaf leaf-7 is suspect" in words for words in floor.told()) == 1
    assert all(ticket.closed_ns is not None for ticket in floor.tickets.content.values())
    floor.broken.clear()
    for node in mine:
        floor.says(node, passes("infiniband"))
    assert {floor.state(node) for node in mine} == {RepairState.HEALTHY}


def test_links_of_different_leaves_are_of_their_nodes() -> None:
    floor = tens(100)
    floor.leaves.update({node: f"leaf-{node}" for node in floor.nodes})
    for node in floor.nodes[:4]:
        floor.breaks(node, LINK)
    assert all(floor.state(node) is RepairState.DRAINED for node in floor.nodes[:4])


def test_what_is_left_of_a_suspect_leaf_is_acted_on_when_the_others_are_back() -> None:
    floor = tens(100)
    floor.leaves.update(dict.fromkeys(floor.nodes[:8], "leaf-0"))
    for node in floor.nodes[:8]:
        floor.breaks(node, LINK)
    for node in floor.nodes[1:8]:
        floor.broken.pop((node, "infiniband"))
        floor.says(node, passes("infiniband"))
    floor.pass_time(2 * floor.policy.leaf_window_ns, step_ns=10 * SECOND)
    assert not floor.record("n0").takes_tasks
    assert floor.record("n0").ticket


# --- repair ---


def test_a_node_returns_only_after_its_repair_when_all_required_checks_have_passed() -> None:
    floor = tens(40, required=("memory", "validation"))
    floor.breaks("n0", XID_79)
    floor.pass_time(SECOND)
    floor.broken["n0", "validation"] = fault("validation", words="GEMM is wrong")
    floor.broken.pop(("n0", "gpu_xid"))
    floor.repair("n0", Remedy.REBOOT, "power cycled", by="ann")
    floor.pass_time(20 * SECOND)
    assert floor.state("n0") is RepairState.TESTING
    floor.broken.clear()
    floor.pass_time(5 * MINUTE)
    assert (floor.state("n0"), floor.record("n0").takes_tasks) == (RepairState.PROBATION, True)
    floor.pass_time(floor.policy.probation_ns, step_ns=MINUTE)
    assert floor.state("n0") is RepairState.RETURNED
    (ticket,) = floor.tickets.content.values()
    assert [(one.by, one.what) for one in ticket.actions] == [
        ("health", "drain"), ("ann", "reboot"), ("health", "return"), ("health", "close"),
    ]  # fmt: skip
    assert (ticket.opened_by, ticket.closed_by) == ("health", "health")


def test_what_was_checked_before_the_repair_is_no_test() -> None:
    floor = tens(40)
    floor.breaks("n0", XID_79)
    floor.pass_time(SECOND)
    floor.repair("n0", Remedy.REBOOT)
    floor.says("n0", passes("gpu_xid"))
    assert floor.state("n0") is RepairState.TESTING, "a report that was on its way"


def test_a_check_that_says_nothing_has_not_passed() -> None:
    floor = tens(40, required=("validation",))
    floor.breaks("n0", XID_79)
    floor.pass_time(SECOND)
    floor.broken.clear()
    floor.hung.add("n0")
    floor.repair("n0", Remedy.REBOOT)
    for _ in range(20):
        floor.says("n0", passes("gpu_xid"))
        floor.pass_time(MINUTE)
    assert floor.state("n0") is RepairState.TESTING


def test_a_required_check_that_could_not_run_keeps_the_node_out() -> None:
    floor = tens(40)
    floor.breaks("n0", XID_79)
    floor.pass_time(SECOND)
    floor.broken = {("n0", "gpu_count"): fault("gpu_count", "warn", could_not_run=True, words="nvidia-smi hung")}
    floor.repair("n0", Remedy.REBOOT)
    floor.pass_time(5 * MINUTE)
    assert floor.state("n0") is RepairState.TESTING
    floor.broken.clear()
    floor.pass_time(MINUTE)
    assert floor.state("n0") is RepairState.PROBATION


def test_a_check_that_passes_for_another_part_does_not_pass_the_test() -> None:
    floor = tens(40)
    floor.hung.add("n0")
    floor.breaks("n0", fault("infiniband", part="mlx5_0", at_once=True))
    floor.pass_time(SECOND)
    for part, state in (("mlx5_1", RepairState.TESTING), ("mlx5_0", RepairState.PROBATION)):
        asked = floor.record("n0").asked
        assert asked is not None
        floor.feed(Probed("n0", asked[0], (passes("infiniband", part),)))
        assert floor.state("n0") is state
        floor.pass_time(floor.policy.test_every_ns)


def test_a_test_that_fails_asks_for_the_next_remedy() -> None:
    floor = tens(40)
    floor.breaks("n0", XID_79)
    floor.pass_time(SECOND)
    floor.repair("n0", Remedy.REBOOT)
    floor.pass_time(3 * floor.policy.test_every_ns)
    assert floor.state("n0") is RepairState.FIELD_DIAGNOSIS
    floor.repair("n0", Remedy.FIELD_DIAGNOSIS, "fails")
    floor.pass_time(3 * floor.policy.test_every_ns)
    assert floor.state("n0") is RepairState.RMA


def test_a_part_that_fails_again_is_tested_for_longer_each_time() -> None:
    floor = tens(40)
    waited: list[int] = []
    for _ in range(4):
        floor.breaks("n0", msgspec.structs.replace(XID_79, serial="gpu-1"))
        floor.pass_time(SECOND)
        floor.broken.clear()
        floor.repair("n0", Remedy.REBOOT)
        began_ns = floor.now_ns
        while floor.state("n0") is not RepairState.PROBATION:
            floor.pass_time(10 * SECOND, step_ns=10 * SECOND)
        waited.append(floor.now_ns - began_ns)
    assert waited[0] < waited[1] < waited[2] < waited[3]
    assert waited[3] >= 4 * floor.policy.back_off_ns


def test_a_swapped_part_begins_without_history_and_the_old_one_keeps_its_own() -> None:
    floor = tens(40)
    old, new = (msgspec.structs.replace(XID_79, serial=serial) for serial in ("gpu-1", "gpu-2"))
    floor.breaks("n0", old)
    floor.pass_time(SECOND)
    floor.broken.clear()
    floor.repair("n0", Remedy.RMA)
    floor.pass_time(MINUTE)
    floor.breaks("n0", new)
    floor.pass_time(SECOND)
    assert floor.state("n0") is RepairState.REBOOT, "the first fault of gpu-2"
    floor.breaks("n5", old)
    floor.pass_time(SECOND)
    assert floor.state("n5") is RepairState.FIELD_DIAGNOSIS, "the second one of gpu-1, wherever it is"


def test_a_reboot_that_the_agent_sees_is_the_remedy() -> None:
    floor = tens(40)
    floor.breaks("n0", XID_79)
    floor.pass_time(SECOND)
    floor.broken.clear()
    floor.feed(Rebooted("n1"))
    floor.feed(Rebooted("n0"))
    assert (floor.state("n0"), floor.state("n1")) == (RepairState.TESTING, RepairState.HEALTHY)


@pytest.mark.parametrize(
    ("cause", "remedies"),
    [
        ("xid_74", "test, test, field diagnosis, rma"),
        ("xid_63", "reset, reboot, field diagnosis, rma"),
        ("xid_95", "reset, reboot, field diagnosis, rma"),
        ("xid_48", "reset, reboot, field diagnosis, rma"),
        ("fewer_gpus", "reboot, field diagnosis, rma, rma"),
        ("xid_79", "reboot, field diagnosis, rma, rma"),
        ("xid_119", "field diagnosis, rma, rma, rma"),
        ("something", "test, reboot, field diagnosis, rma"),
    ],
)
def test_each_cause_has_its_remedies(cause: str, remedies: str) -> None:
    event = fault("gpu_xid", cause=cause)
    assert [remedy_of(event, faults).value for faults in (1, 2, 3, 4)] == remedies.split(", ")


# --- people ---


def test_a_person_who_asks_for_the_return_of_a_node_has_it_tested_and_not_returned() -> None:
    floor = tens(40)
    floor.breaks("n0", XID_79)
    floor.pass_time(SECOND)
    floor.ask_return("n0", "a wrong alarm", by="ann")
    floor.pass_time(20 * SECOND)
    assert floor.state("n0") is RepairState.TESTING
    floor.broken.clear()
    floor.pass_time(MINUTE)
    assert floor.state("n0") is RepairState.PROBATION


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("by_repair", [True, False])
def test_a_node_that_has_a_run_is_tested_when_that_has_ended(held: bool, by_repair: bool) -> None:
    floor = tens(40, breaker_share=0.0)
    floor.busy.update(floor.nodes)
    if held:
        floor.breaks("n1", UNCORRECTED)
    floor.breaks("n0", DISK if not held else UNCORRECTED)
    floor.pass_time(15 * SECOND)
    floor.broken.clear()
    state = RepairState.SUSPECT if held else RepairState.DRAINED
    if by_repair:
        floor.repair("n0", Remedy.RESET, "cleaned up")
    else:
        floor.ask_return("n0", "a wrong alarm")
    floor.pass_time(MINUTE)
    record = floor.record("n0")
    assert (record.state, record.asked, record.takes_tasks) == (state, None, False), "its run is not disturbed"
    assert "when its run has ended" in record.reason
    assert "n0" not in floor.requeued()
    floor.busy.clear()
    floor.feed(TimePassed())
    assert (floor.state("n0"), floor.record("n0").test_asked) == (RepairState.TESTING, "")
    floor.pass_time(MINUTE)
    assert floor.state("n0") is RepairState.PROBATION


def test_a_new_fault_is_not_tested_away_by_a_request_of_before() -> None:
    floor = tens(40)
    floor.busy.add("n0")
    floor.breaks("n0", DISK)
    floor.pass_time(15 * SECOND)
    floor.broken.clear()
    floor.ask_return("n0")
    floor.happens("n0", XID_79)
    assert floor.requeued() == ["n0"]
    floor.busy.clear()
    floor.pass_time(MINUTE)
    assert floor.state("n0") is RepairState.REBOOT


def test_nobody_repairs_or_returns_a_node_that_is_not_out() -> None:
    floor = tens(40)
    with pytest.raises(UsageError, match="n0 is healthy"):
        floor.repair("n0", Remedy.RESET)
    with pytest.raises(UsageError, match="n0 is healthy"):
        floor.ask_return("n0")


def test_a_node_that_is_removed_leaves_a_closed_ticket_and_the_history_of_its_parts() -> None:
    floor = tens(40)
    floor.breaks("n0", XID_79)
    floor.feed(Removed("n0", "ann"))
    assert floor.health.get("n0") is None
    assert (floor.tickets.content[1].closed_by, len(floor.parts.content)) == ("ann", 1)
