"""What of the findings of a node of Slurm counts, and what it remembers of them."""

from __future__ import annotations

import msgspec
import pytest
from tests.support.health import fault, passes

from fireflyer.cluster.core.slurm.findings import (
    certain,
    checks_to_repeat,
    faults_in,
    findings_in,
    still_failing,
)
from fireflyer.cluster.core.slurm.node_record import DrainRecord, PendingEvent

LOST = fault("gpu_count", part="gpu:1", words="the driver has lost the GPU", at_once=True)
FULL = fault("disk_space", "low", part="mount:/data", words="99 % used")
HOME = fault("disk_space", "low", part="mount:/home")
XID = msgspec.structs.replace(fault("gpu_xid", cause="xid_79", part="gpu:1", words="Xid 79", at_once=True), once=True)
FLAPS = fault("infiniband", "low", part="infiniband:mlx5_0/1", cause="flaps", words="the link went down 9 times")
NOW_S = 1_795_811_500


def test_a_fault_counts_when_all_repetitions_find_it_unless_it_is_certain() -> None:
    faults = faults_in([LOST, FULL, HOME, fault("ipmi_log", "warn")])
    assert checks_to_repeat(faults) == ("disk_space",)
    assert still_failing(faults, [FULL]) == (LOST, FULL)
    assert still_failing(faults, []) == certain(faults) == (LOST,)
    assert faults_in([msgspec.structs.replace(LOST, could_not_run=True)]) == ()


def test_what_happens_while_checks_are_repeated_is_not_lost() -> None:
    second = msgspec.structs.replace(XID, seen_ns=5)
    assert still_failing((FULL, XID), [FULL, second, LOST, HOME]) == (FULL, XID, second, LOST)
    assert still_failing((FULL, LOST), [FULL, LOST]) == (FULL, LOST), "a state is one fault"


def test_a_round_passes_when_all_that_is_required_ran_and_nothing_is_worse_than_a_warning() -> None:
    missing = msgspec.structs.replace(passes("nvme"), could_not_run=True)
    required = msgspec.structs.replace(fault("gpu_count", "warn"), could_not_run=True)
    assert findings_in([passes("mounts"), fault("ipmi_log", "warn"), missing]) == ((), True, ("nvme",))
    assert findings_in([passes("mounts"), required]) == ((), False, ("gpu_count",))
    assert not findings_in([passes("mounts"), FULL]).passed
    assert not findings_in([]).passed, "no check at all says nothing"


def test_a_fault_that_comes_and_goes_counts_when_as_many_rounds_have_found_it() -> None:
    record = DrainRecord()
    for minutes in (0, 5):
        record = record.with_suspects((FLAPS, LOST, XID), NOW_S + minutes * 60)
        assert record.coming_and_going(3) == frozenset()
    record = record.with_suspects((FLAPS,), NOW_S + 600)
    known = record.coming_and_going(3)
    assert known == {("infiniband", "infiniband:mlx5_0/1", "flaps")}
    assert checks_to_repeat((FLAPS, FULL), known) == ("disk_space",)
    assert still_failing((FLAPS, FULL), [], known) == (FLAPS,)
    later = record.with_suspects((FLAPS,), NOW_S + 4000)
    assert later.coming_and_going(2) == known
    assert later.coming_and_going(3) == frozenset(), "three in an hour, not three in a year"
    assert record.current(NOW_S + 5000)[0].suspicions == ()


def test_what_happened_is_kept_once_with_its_start_of_the_node_and_for_a_day() -> None:
    record = DrainRecord().with_events((XID, LOST, XID), "boot-1", NOW_S).with_events((XID,), "boot-2", NOW_S + 60)
    assert record.pending == (PendingEvent(XID, "boot-1", NOW_S),)
    assert record.current(NOW_S + 86_399) == (record, ())
    assert record.current(NOW_S - 99_999) == (record, ()), "the clock was set back"
    assert record.current(NOW_S + 86_400) == (DrainRecord(), (XID,))
    assert record.acted().pending == ()


@pytest.mark.parametrize(
    ("boot", "passed_s", "words"),
    [
        ("boot-1", 59, "Xid 79"),
        ("boot-1", 3600, "Xid 79 (60 min ago)"),
        ("boot-2", 7200, "Xid 79 (2 h ago, before the node was started again)"),
    ],
)
def test_an_event_that_was_kept_says_how_old_it_is(boot: str, passed_s: int, words: str) -> None:
    told = PendingEvent(XID, "boot-1", NOW_S).told(boot, NOW_S + passed_s)
    assert told == msgspec.structs.replace(XID, words=words)


def test_checks_that_failed_are_remembered_until_the_node_serves_again() -> None:
    record = DrainRecord().drained(NOW_S).with_failed((LOST, FULL)).with_failed((FULL, XID))
    assert record.failed == ("gpu_count", "disk_space", "gpu_xid")
    assert record.serving() == DrainRecord((NOW_S,))
    assert record.serving().taken_back(NOW_S + 1) == DrainRecord()
    assert record.drained(NOW_S + 600).taken_back(NOW_S + 600).at_s == (NOW_S,), "not those before it"
