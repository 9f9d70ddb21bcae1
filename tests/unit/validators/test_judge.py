"""From evidence to a verdict and its reason."""

from __future__ import annotations

import msgspec
import pytest

from fireflyer.base.node_counters import LinkCounters, NodeCounters
from fireflyer.base.units import GIB, MIB
from fireflyer.validators.core.evidence import DirectoryTest, Evidence, MemoryTest, PeerTest
from fireflyer.validators.core.judge import judge

SINCE = "since the ranks were started"
LINK = LinkCounters(carrier=True, speed_mbps=100_000, packets=10**6, errors=3, drops=5)
BEFORE = NodeCounters(
    boot="b",
    uncorrected={"mc0": 2},
    corrected={"mc0": 40},
    poisoned_kib=4,
    file_system_errors={"sda1": 1},
    turned_read_only=("/old",),
    links={"eth1": LINK},
)


def seen(*, since: str = SINCE, now: NodeCounters | None = None, **fields: object) -> Evidence:
    return Evidence(before=BEFORE, now=now or BEFORE, since=since, **fields)  # type: ignore[arg-type]


def later(**changes: object) -> NodeCounters:
    return msgspec.structs.replace(BEFORE, **changes)


def link(**changes: object) -> NodeCounters:
    return later(links={"eth1": msgspec.structs.replace(LINK, **changes)})


def test_what_was_so_before_the_ranks_were_started_is_no_fault() -> None:
    report = judge(seen())
    assert not report.suspect
    assert {(finding.part, finding.level) for finding in report.findings} == {
        ("memory", "note"),
        ("disk", "note"),
        ("link", "ok"),
    }


@pytest.mark.parametrize(
    ("evidence", "verdict"),
    [
        (
            seen(memory=MemoryTest(tested_bytes=64 * MIB, wrong_words=3, first="in bits 8")),
            "memory: in 64.0 MiB 3 words were read back other than written, the first in bits 8",
        ),
        (
            seen(total_bytes=64 * GIB, available_bytes=GIB),
            "memory: only 1.0 GiB of 64.0 GiB are available, though the ranks are gone",
        ),
        (
            seen(now=later(uncorrected={"mc0": 3})),
            f"memory: mc0 counts 3 uncorrected errors (1 of them {SINCE})",
        ),
        (seen(now=later(uncorrected={"mc1": 1})), f"memory: mc1 counts 1 uncorrected error {SINCE}"),
        (
            seen(since="", now=NodeCounters(uncorrected={"mc0": 2})),
            "memory: mc0 counts 2 uncorrected errors since the node was started",
        ),
        (
            seen(now=later(poisoned_kib=8)),
            f"memory: the kernel has taken 8 KiB of bad memory out of use (4 of them {SINCE})",
        ),
        (seen(now=later(corrected={"mc0": 1040})), f"memory: mc0 corrected 1000 errors {SINCE}"),
        (seen(directories=(DirectoryTest(path="/t", kind="xfs", read_only=True),)), "disk: /t (xfs) is read-only"),
        (seen(directories=(DirectoryTest(path="/t", free_bytes=MIB),)), "disk: /t has 1.0 MiB left"),
        (seen(directories=(DirectoryTest(path="/t", free_inodes=7),)), "disk: /t has 7 inodes left"),
        (
            seen(directories=(DirectoryTest(path="/t", finished=False),)),
            "disk: /t: a small file was not written and read back in time",
        ),
        (
            seen(directories=(DirectoryTest(path="/t", error="EIO"),)),
            "disk: /t: input/output error (EIO)",
        ),
        (
            seen(directories=(DirectoryTest(path="/t", same=False),)),
            "disk: /t: a file was read back other than written",
        ),
        (seen(now=later(turned_read_only=("/old", "/var"))), f"disk: /var was turned read-only {SINCE}"),
        (seen(now=later(file_system_errors={"sda1": 3})), f"disk: the kernel found 2 errors on sda1 {SINCE}"),
        (seen(now=later(links={})), f"link: eth1 has gone {SINCE}"),
        (seen(now=link(carrier=False)), f"link: eth1 has lost its carrier {SINCE}"),
        (seen(now=link(speed_mbps=10_000)), "link: eth1 has 10000 Mbit/s, and had 100000 before"),
        (
            seen(now=link(errors=1003, packets=2 * 10**6)),
            f"link: eth1 counts 1000 errors in 1000000 packets {SINCE}",
        ),
        (seen(peers=(PeerTest("10.0.0.2:9", "no route"),)), "link: 10.0.0.2:9 is not reached: no route"),
    ],
)
def test_a_fault_makes_the_node_suspect_and_is_its_reason(evidence: Evidence, verdict: str) -> None:
    assert judge(evidence).verdict == f"suspect: {verdict}"


@pytest.mark.parametrize(
    "evidence",
    [
        seen(now=later(corrected={"mc0": 900}), total_bytes=64 * GIB, available_bytes=2 * GIB),
        seen(since="", now=later(uncorrected={}, poisoned_kib=0, links={})),
        seen(directories=(DirectoryTest(path="/n", kind="nfs4", local=False, free_bytes=0, read_only=True),)),
        seen(directories=(DirectoryTest(path="/t", error="EDQUOT"), DirectoryTest(path="/u", error="EACCES"))),
        seen(now=link(errors=1003, packets=10**9)),
        seen(now=link(errors=50, packets=10**6 + 100)),
        seen(now=link(drops=10**6, packets=2 * 10**6)),
        seen(now=link(speed_mbps=0)),
        seen(now=link(speed_mbps=200_000)),
        seen(peers=(PeerTest("10.0.0.2:9", "no route"), PeerTest("10.0.0.3:9"))),
        Evidence(before=NodeCounters(), now=NodeCounters()),
    ],
)
def test_what_another_machine_or_the_user_may_have_done_is_no_fault_of_the_node(evidence: Evidence) -> None:
    assert judge(evidence).verdict.startswith("sound: ")


def test_further_faults_are_counted_and_control_characters_are_left_out() -> None:
    tests = (DirectoryTest(path="/a\x1b[2J\nb", read_only=True), DirectoryTest(path="/c", error="EIO"))
    assert judge(seen(directories=tests)).verdict == "suspect: disk: /a[2J b is read-only (and 1 more)"
