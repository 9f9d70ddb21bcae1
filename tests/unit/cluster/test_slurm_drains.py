"""Whether a node of Slurm drains itself and serves again; what Slurm 22.05 printed (recorded), and what may come."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.health import fault

from fireflyer.base.health_event import HealthEvent
from fireflyer.cluster.core.slurm.drains import (
    Decision,
    DrainLimits,
    Step,
    decide,
    drain_reason,
    drained_since_s,
    is_own,
    jobs_to_requeue,
    reason_fault,
    reason_with_remedy,
)
from fireflyer.cluster.core.slurm.findings import Evidence
from fireflyer.cluster.core.slurm.fleet import (
    FleetNode,
    NodeJob,
    parse_drains,
    parse_fleet,
    parse_node_jobs,
    parse_reserved,
)
from fireflyer.cluster.core.slurm.node_record import DrainRecord
from fireflyer.cluster.core.slurm.output import SlurmOutputError

ROWS = """\
a|polite|allocated|4/0/0/4
a|test|allocated|4/0/0/4
b|polite|draining|2/0/2/4
b|test|draining|2/0/2/4
c|test|drained*|0/0/4/4
"""
REASONS = """\
a|Unknown|none
a|Unknown|none
b|1795811459|ff: x y|z: "hey" 'a' (#12)
b|1795811459|ff: x y|z: "hey" 'a' (#12)
c|1795811460|disk
"""
LOST = fault("gpu_count", part="gpu:1", words="the driver has lost the GPU", at_once=True)
FULL = fault("disk_space", "low", part="mount:/data", words="99 % used")
XID = msgspec.structs.replace(fault("gpu_xid", cause="xid_79", part="gpu:1", words="Xid 79", at_once=True), once=True)
MADE = msgspec.structs.replace(fault("disk_space", part="mount:/tmp", words="full"), user_made=True)
LIMITS = DrainLimits(back_off_s=600)
NOW_S = 1_795_811_500
WELL = Evidence((), passed=True)


def node(name: str = "a", state: str = "idle", *, busy: bool = False, reason: str = "", since_s: int = 0) -> FleetNode:
    return FleetNode(name=name, partitions=("test",), state=state, busy=busy, reason=reason, since_s=since_s)


def own(event: HealthEvent, name: str = "a", *, busy: bool = False, since_s: int = NOW_S - 10) -> FleetNode:
    state = "draining" if busy else "drained"
    return node(name, state, busy=busy, reason=drain_reason(name, event), since_s=since_s)


def decided(
    *nodes: FleetNode, evidence: Evidence, step: Step = "check", record: DrainRecord | None = None,
    limits: DrainLimits = LIMITS, fresh: bool = False,
) -> Decision:  # fmt: skip
    """Of the first node."""
    fleet = {one.name: one for one in nodes}
    return decide(step, nodes[0].name, fleet, evidence, record or DrainRecord(), limits, NOW_S, fresh=fresh)


def found(*events: HealthEvent) -> Evidence:
    return Evidence(events, passed=False)


@pytest.mark.parametrize("words", ["slow", "w" * 300])
def test_a_reason_has_the_cause_of_what_validators_found_also_when_it_is_written_anew(words: str) -> None:
    """A node that has forgotten its repair has the remedy of that cause."""
    slow = msgspec.structs.replace(fault("validation", "low", cause="x_per_s", words=words), once=True)
    drained = own(slow)
    again = msgspec.structs.replace(drained, reason=reason_with_remedy(drained, "field diagnosis"))
    for one in (drained, again):
        assert is_own(one)
        said = reason_fault(one, NOW_S)
        assert (said.check, said.cause) == ("validation", "x_per_s")
    assert again.reason.rpartition(" (")[0].endswith("; cause x_per_s; field diagnosis is due; validate it")


# --- what Slurm prints ---


@pytest.mark.parametrize(
    ("shown", "state", "drains"),
    [
        ("reserved", "reserved", False), ("maint", "maint", False), ("maint*", "maint", False),
        ("allocated$", "allocated", False), ("drained$", "drained", True), ("draining$", "draining", True),
        ("draining@", "draining", True), ("drained*", "drained", True), ("drained~", "drained", True),
        ("drained#", "drained", True), ("idle-", "idle", False), ("down$", "down", False), ("mixed@", "mixed", False),
    ],
)  # fmt: skip
def test_states_of_nodes_are_read_with_what_stands_behind_them(shown: str, state: str, drains: bool) -> None:
    (found,) = parse_fleet(f"a|test|{shown}|0/4/0/4\n", "a|1795811459|bob\n").values()
    assert (found.state, found.drains) == (state, drains)
    assert (found.answers, found.powered) == ("*" not in shown, not set("~#") & set(shown))
    assert not found.takes_jobs_now or shown == "idle-"
    assert found.takes_jobs_of_reservation == (shown in ("reserved", "maint"))


def test_nodes_partitions_and_reasons() -> None:
    fleet = parse_fleet(ROWS, REASONS)
    assert fleet["a"] == FleetNode(name="a", partitions=("polite", "test"), state="allocated", busy=True)
    assert (fleet["b"].reason, fleet["b"].since_s) == ("ff: x y|z: \"hey\" 'a' (#12)", 1795811459)
    assert (fleet["b"].drains, fleet["b"].busy, fleet["c"].drains) == (True, True, True)
    assert (fleet["c"].answers, fleet["c"].busy) == (False, False)
    assert parse_fleet("d|big|allocated|1.50K/0/0/2K\n", "")["d"].busy


@pytest.mark.parametrize("flag", ["~", "#", "!", "%", "*"])
def test_a_node_that_is_switched_off_or_does_not_answer_takes_no_job_now(flag: str) -> None:
    fleet = parse_fleet(f"a|test|idle{flag}|0/4/0/4\nb|test|idle|0/4/0/4\n", "")
    assert (fleet["a"].takes_jobs_now, fleet["b"].takes_jobs_now) == (False, True)


def test_a_reason_with_a_line_break_says_nothing_of_another_node() -> None:
    forged = drain_reason("b", LOST)
    fleet = parse_fleet(ROWS, f"{REASONS}c|1795811460|evil\nb|1795811459|{forged}\n")
    assert fleet["b"].reason == "(not known)"
    assert not is_own(fleet["b"])


@pytest.mark.parametrize(
    "line", ["a|test|allocated", "a b|test|idle|0/4/0/4", "sinfo: error: Unable to contact", "x" * 99]
)
def test_a_row_of_another_form_makes_the_answer_worthless(line: str) -> None:
    with pytest.raises(SlurmOutputError, match="sinfo printed"):
        parse_fleet(f"{ROWS}{line}\n", "")


SHOWN = (
    "NodeName=a Arch=x86_64 CoresPerSocket=1 CPUAlloc=0 CPUTot=4 AvailableFeatures=(null) NodeAddr=a Version=22.05.8"
    " OS=Linux 6.1.0 #1 SMP Debian RealMemory=1 Boards=1 State={} ThreadsPerCore=1 Reason=x State=IDLE+DRAIN [r]\n"
)


@pytest.mark.parametrize(
    ("state", "drains"), [("IDLE", False), ("ALLOCATED+DRAIN", True), ("IDLE+DRAIN*", True), ("DOWN*", False)]
)
def test_whether_a_node_drains_is_not_taken_from_what_people_wrote(state: str, drains: bool) -> None:
    assert parse_drains(SHOWN.format(state), "a") is drains
    with pytest.raises(SlurmOutputError, match="where node b was asked for"):
        parse_drains(SHOWN.format(state), "b")


RESERVATION = (
    "ReservationName=fans StartTime=1795900000 EndTime=1795903600 Duration=01:00:00 Nodes={nodes} NodeCnt=2 CoreCnt=8 "
    "Features=(null) PartitionName=(null) Flags=MAINT,SPEC_NODES TRES=cpu=8 Users=root Groups=(null) Accounts=(null)\n"
)


@pytest.mark.parametrize(("shown", "nodes"), [("gpu-[1-3],b", "gpu-[1-3],b"), ("(null)", "")])
def test_nodes_of_a_reservation(shown: str, nodes: str) -> None:
    assert parse_reserved(RESERVATION.format(nodes=shown), "fans") == nodes


@pytest.mark.parametrize("text", ["", RESERVATION.format(nodes="a").replace("fans", "disks"), "ReservationName=fans\n"])
def test_another_answer_is_no_reservation(text: str) -> None:
    with pytest.raises(SlurmOutputError, match="where reservation fans was asked for"):
        parse_reserved(text, "fans")


def test_jobs_of_a_node() -> None:
    assert parse_node_jobs("1           0           1           \n2           7           0\n") == (
        NodeJob(1, 0, requeues=True),
        NodeJob(2, 7, requeues=False),
    )
    with pytest.raises(SlurmOutputError):
        parse_node_jobs("slurm_load_jobs error\n")


@given(st.text(alphabet=st.sampled_from("ab|0123 /:none\n\x00drained"), max_size=200))
def test_any_reasons_give_nodes_or_nothing(text: str) -> None:
    fleet = parse_fleet(ROWS, text)
    assert set(fleet) == {"a", "b", "c"}
    assert not any(map(is_own, fleet.values()))


# --- reasons ---


def test_a_reason_names_check_and_part_and_fits_into_one_line() -> None:
    assert drain_reason("a", LOST).startswith("ff: gpu_count gpu:1: the driver has lost the GPU (")
    long = msgspec.structs.replace(XID, words="ü\n" * 200)
    assert len(drain_reason("a", long)) <= 200
    assert drain_reason("a", long).isascii()
    assert "; validate it (" in drain_reason("a", long)


@given(st.text(max_size=300), st.text(max_size=60), st.booleans())
def test_what_we_wrote_is_ours_until_it_is_edited(words: str, part: str, once: bool) -> None:
    event = msgspec.structs.replace(LOST, words=words, part=part, once=once)
    written = node(state="drained", reason=drain_reason("a", event))
    assert is_own(parse_fleet("a|test|drained|0/0/4/4\n", f"a|1|{written.reason}\n")["a"])
    for changed in (f"{written.reason} do not touch, bob", f"bob: {written.reason}", written.reason[:-2], "ff: mine"):
        assert not is_own(msgspec.structs.replace(written, reason=changed))
    assert not is_own(msgspec.structs.replace(written, name="b")), "copied from another node"


# --- decisions ---


@pytest.mark.parametrize("event", [LOST, FULL, XID])
@pytest.mark.parametrize("busy", [True, False])
def test_a_fault_drains_the_node(event: HealthEvent, busy: bool) -> None:
    decision = decided(node(busy=busy), evidence=found(event))
    assert decision.drain == drain_reason("a", event)
    assert decision == Decision(decision.words, decision.drain)


def test_jobs_are_requeued_by_a_high_fault_only_and_a_prolog_refuses_its_job() -> None:
    assert decided(own(LOST, busy=True), evidence=found(LOST)).requeue
    assert not decided(own(LOST), evidence=found(LOST)).requeue
    low = decided(own(FULL, busy=True), evidence=found(FULL), step="prolog")
    assert (low.requeue, low.refuse) == (False, True)
    assert decided(own(FULL, busy=True), evidence=found(FULL, LOST)).requeue, "a node that drains gets worse"


def test_the_high_fault_is_told_before_the_low_one() -> None:
    assert decided(node(), evidence=found(FULL, LOST)).drain == drain_reason("a", LOST)


@pytest.mark.parametrize("evidence", [WELL, found(LOST), found(XID), Evidence((), passed=True, validated=True)])
@pytest.mark.parametrize("state", ["drained", "draining"])
@pytest.mark.parametrize("reason", ["", "bob looks at it", "ff: gpu_count gpu:1: lost", drain_reason("b", LOST)])
def test_a_node_that_somebody_else_drained_is_left_alone(evidence: Evidence, state: str, reason: str) -> None:
    decision = decided(node(state=state, reason=reason), evidence=evidence, step="prolog")
    assert decision[1:] == Decision()[1:]


def test_a_node_serves_again_when_all_passes_and_no_job_is_left() -> None:
    assert decided(own(LOST), evidence=WELL).undrain
    assert not decided(own(LOST, busy=True), evidence=WELL).undrain
    missing = decided(own(LOST), evidence=Evidence((), passed=False))
    assert (missing.undrain, missing.words) == (False, "drained by ff; a check is missing, could not run or fails")
    assert decided(node(), evidence=WELL) == Decision()


def test_what_happened_once_needs_a_validation() -> None:
    waits = decided(own(XID), evidence=WELL)
    assert "ff health slurm validate" in waits.words
    assert (waits.undrain, waits.validate) == (False, True)
    strict = DrainLimits(validates=True)
    assert decided(own(LOST), evidence=WELL, limits=strict).validate, "the site wants each node validated"
    assert not decided(own(LOST), evidence=WELL, limits=strict).undrain
    assert decided(own(XID), evidence=WELL._replace(validated=True), step="resume").undrain
    assert not decided(own(XID), evidence=found(LOST)._replace(validated=True), step="resume").undrain
    worse = decided(own(FULL, busy=True), evidence=found(XID))
    assert worse.drain == drain_reason("a", XID, since_s=NOW_S - 10), "the reason of a node that drains says it, too"


def test_an_event_beside_a_worse_state_has_to_be_validated_too() -> None:
    event = msgspec.structs.replace(XID, severity="low")
    both = decided(node(), evidence=found(LOST, event)).drain
    assert both.startswith("ff: gpu_count gpu:1: the driver has lost the GPU; also gpu_xid xid_79; validate it (")
    drained = msgspec.structs.replace(own(LOST), reason=both)
    assert is_own(drained)
    assert not decided(drained, evidence=WELL).undrain
    later = decided(own(LOST, busy=True), evidence=found(LOST, event)).drain
    assert later == drain_reason("a", LOST, event, since_s=NOW_S - 10), "it came after the drain"
    assert decided(drained, evidence=found(LOST, event)).drain == "", "once"
    long = msgspec.structs.replace(LOST, words="x" * 400)
    assert "; also gpu_xid xid_79; validate it (" in drain_reason("a", long, event)


def test_a_check_that_found_the_fault_has_to_run_before_the_node_serves_again() -> None:
    silent = WELL._replace(not_run=("gpu_count", "nvme"))
    decision = decided(own(LOST), evidence=silent)
    assert (decision.undrain, decision.words) == (
        False,
        "drained by ff; gpu_count found a fault, and could not run now",
    )
    assert decided(own(FULL), evidence=silent).undrain, "what never ran on this node is not waited for"
    assert not decided(own(FULL), evidence=silent, record=DrainRecord(failed=("nvme",))).undrain
    assert not decided(own(LOST), evidence=silent._replace(validated=True), step="resume").undrain


def test_a_node_that_flaps_stays_out_longer_each_time() -> None:
    def undrained(drains: int, out_s: int) -> bool:
        record = DrainRecord(tuple(NOW_S - 3600 + number for number in range(drains)))
        return decided(own(LOST, since_s=NOW_S - out_s), evidence=WELL, record=record).undrain

    assert undrained(1, 0)
    assert [undrained(2, out_s) for out_s in (599, 600)] == [False, True]
    assert [undrained(4, out_s) for out_s in (2399, 2400)] == [False, True]
    assert undrained(60, 86_400)
    old = DrainRecord((NOW_S - 90_000, NOW_S - 80_000, NOW_S - 10))
    assert decided(own(LOST), evidence=WELL, record=old).words.endswith("as it was drained before")
    assert DrainRecord((1,) * 64).drained(NOW_S).at_s == (NOW_S,)


def rewritten(before: FleetNode, evidence: Evidence) -> FleetNode:
    """By the decision, as Slurm keeps it: it dates the reason by the time at which that was written."""
    reason = decided(before, evidence=evidence).drain
    assert reason
    return msgspec.structs.replace(before, reason=reason, since_s=NOW_S)


@pytest.mark.parametrize(
    "evidence", [WELL._replace(repair="reboot is due, ticket 1", remedy="reboot"), found(XID), found(LOST, XID)]
)
def test_a_reason_that_is_written_anew_says_since_when_the_node_is_drained(evidence: Evidence) -> None:
    first = own(LOST, since_s=NOW_S - 5000)
    again = rewritten(first, evidence)
    assert is_own(again)
    assert again.reason.endswith(f" since {NOW_S - 5000})")
    assert drained_since_s(again) == NOW_S - 5000
    for changed in (again.reason.replace("since 1", "since 2"), again.reason.replace(" since ", " until ")):
        assert not is_own(msgspec.structs.replace(again, reason=changed)), "who changes the time has the node"


def test_a_node_whose_reason_was_written_anew_waits_no_second_time() -> None:
    record = DrainRecord((NOW_S - 4000, NOW_S - 590))
    due = WELL._replace(repair="reboot is due, ticket 1", remedy="reboot")
    waits = rewritten(own(LOST, since_s=NOW_S - 590), due)
    assert decided(waits, evidence=WELL, record=record).words.endswith("it stays out for 10 s as it was drained before")
    waits = rewritten(own(LOST, since_s=NOW_S - 600), due)
    assert decided(waits, evidence=WELL, record=record).undrain, "the reboot was recorded meanwhile"


def test_a_reason_that_was_written_anew_keeps_the_place_of_its_node_at_the_breaker() -> None:
    """Else a node that drains itself beside it would stay beyond the share, and the first one's jobs, too."""
    first = rewritten(own(LOST, "a", busy=True, since_s=NOW_S - 300), found(LOST, XID))
    second = own(LOST, "b", busy=True, since_s=NOW_S - 1)
    assert decided(first, second, evidence=found(LOST, XID)).requeue
    assert decided(second, first, evidence=found(LOST), fresh=True).undrain


def test_what_a_user_can_have_made_costs_no_job() -> None:
    assert decided(node(busy=True, state="mixed"), evidence=found(MADE)).drain == ""
    assert decided(node(), evidence=found(MADE)).drain == drain_reason("a", MADE)
    assert decided(node(busy=True), evidence=found(MADE, LOST)).drain == drain_reason("a", LOST)


def test_jobs_that_stay() -> None:
    jobs = (NodeJob(1, 0, requeues=True), NodeJob(2, 0, requeues=False), NodeJob(3, 3, requeues=True))
    requeued, left = jobs_to_requeue(jobs, LIMITS)
    assert [job.id for job in requeued] == [1]
    assert left == (
        "job 2 stays: it was submitted with --no-requeue",
        "job 3 stays: it was started again 3 times already",
    )


# --- the breaker ---


def test_the_breaker_holds_a_node_while_as_many_are_out_as_may_be() -> None:
    others = [node(f"n{number}") for number in range(39)]
    out = [own(LOST, "x", since_s=1), own(LOST, "y", since_s=2)]
    assert decided(node(), *others[:38], out[0], evidence=found(LOST)).drain, "5 % of 40 are two"
    held = decided(node(), *others[:37], *out, evidence=found(LOST), step="prolog")
    assert (held.drain, held.refuse) == ("", False)
    assert "of partition test 2 may be drained by ff, and 2 are" in held.words
    edited = msgspec.structs.replace(out[0], reason=f"{out[0].reason} RMA")
    assert decided(node(), *others[:37], edited, out[1], evidence=found(LOST)).drain, "a person has it"


def test_a_node_that_waits_for_a_person_says_so_and_leaves_room_for_another() -> None:
    others = [node(f"n{number}") for number in range(18)]
    due = WELL._replace(repair="reboot is due, ticket 1", remedy="reboot")
    for event, end in ((FULL, "; reboot is due ("), (XID, "; reboot is due; validate it (")):
        first = own(event, "x", since_s=1)
        reason = decided(first, evidence=due).drain
        assert end in reason
        assert decided(first, evidence=found(event)._replace(remedy="reboot")).drain == reason
        waits = msgspec.structs.replace(first, reason=reason)
        assert is_own(waits)
        again = decided(waits, evidence=due)
        assert (again.drain, again.undrain) == ("", False), "once"
        assert "; rma is due" in decided(waits, evidence=due._replace(remedy="rma")).drain
        assert decided(waits, evidence=WELL._replace(validated=True), step="resume").undrain
        assert decided(node(), *others, waits, evidence=found(LOST), step="prolog").drain
        second = own(LOST, "y", since_s=2)
        assert decided(node(), *others[1:], waits, second, evidence=found(LOST)).held
        second = msgspec.structs.replace(second, reason=decided(second, evidence=due).drain)
        assert decided(node(), *others[1:], waits, second, evidence=found(LOST)).held, "up to a second share"
    long = msgspec.structs.replace(XID, words="x" * 400)
    assert len(decided(own(long), evidence=due).drain) <= 200


def test_of_nodes_that_drained_themselves_at_once_the_last_ones_serve_again() -> None:
    nodes = {name: own(LOST, name, busy=True, since_s=since_s) for name, since_s in (("a", 2), ("b", 1), ("c", 2))}
    args = (nodes, found(LOST), DrainRecord(), LIMITS, NOW_S)
    fates = {name: decide("check", name, *args, fresh=True) for name in nodes}
    assert [name for name, fate in fates.items() if fate.undrain] == ["a", "c"]
    assert [name for name, fate in fates.items() if fate.requeue] == ["b"]


@pytest.mark.parametrize("evidence", [found(LOST), found(XID), Evidence((), passed=False)])
@pytest.mark.parametrize("event", [LOST, XID])
def test_a_drain_of_an_earlier_round_stays_when_the_share_becomes_smaller(
    evidence: Evidence, event: HealthEvent
) -> None:
    """The partition has lost nodes since, or has got nodes that are out."""
    late = own(event, busy=True, since_s=9)
    decision = decided(late, own(LOST, "b", since_s=1), own(LOST, "c", since_s=2), evidence=evidence, step="prolog")
    assert (decision.undrain, decision.requeue, decision.refuse) == (False, False, False)


@dataclasses.dataclass
class Site:
    """What Slurm has, and nodes that look, each at what was so when it asked; 2 s after its drain each looks again."""

    fleet: dict[str, FleetNode]
    evidence: dict[str, Evidence]
    now_s: int = NOW_S
    fresh: dict[str, int] = dataclasses.field(default_factory=dict)
    """Since when they wait to look again."""

    def act(self, name: str, seen: Mapping[str, FleetNode]) -> None:
        fresh = name in self.fresh
        if fresh and self.now_s < self.fresh.pop(name) + 2:
            self.now_s += 2
        seen = self.fleet if fresh else seen
        before = self.fleet[name]
        decision = decide("check", name, seen, self.evidence[name], DrainRecord(), LIMITS, self.now_s, fresh=fresh)
        if decision.drain:
            self.fleet[name] = node(name, "drained", reason=decision.drain, since_s=self.now_s)
            self.fresh[name] = self.now_s
        elif decision.undrain:
            assert fresh, f"{before} was drained before"
            self.fleet[name] = node(name)


@given(
    size=st.integers(1, 45),
    turns=st.lists(st.tuples(st.integers(0, 44), st.integers(0, 3), st.integers(0, 2)), max_size=80),
)
def test_a_check_that_lies_everywhere_takes_out_a_share_and_no_more(
    size: int, turns: list[tuple[int, int, int]]
) -> None:
    """Whatever the order in which nodes look, decide by what is old, and act: two rounds of all later it holds."""
    names = [f"n{number:02}" for number in range(size)]
    site = Site({name: node(name) for name in names}, dict.fromkeys(names, found(LOST)))
    human = node(names[0], "drained", reason="bob")
    site.fleet[names[0]] = human
    seen = [dict(site.fleet)]
    for who, age, passes_s in turns:
        site.now_s += passes_s
        site.act(names[who % size], seen[max(0, len(seen) - 1 - age)])
        seen.append(dict(site.fleet))
    for _ in range(2):
        for name in names:
            site.act(name, site.fleet)
    out = [name for name, one in site.fleet.items() if is_own(one)]
    assert len(out) == (max(1, size // 20) if size > 1 else 0)
    assert site.fleet[names[0]] == human
