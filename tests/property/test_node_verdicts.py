"""The verdict on a node, for any evidence."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from fireflyer.base.node_counters import LinkCounters, NodeCounters
from fireflyer.validators.core.evidence import DirectoryTest, Evidence, MemoryTest, PeerTest
from fireflyer.validators.core.judge import judge

NUMBERS = st.integers(0, 1 << 40)
NAMES = st.sampled_from(["a", "b", "c\n\x1b[0m"])
COUNTS = st.dictionaries(NAMES, NUMBERS)
LINKS = st.builds(LinkCounters, st.booleans(), NUMBERS, NUMBERS, NUMBERS, NUMBERS)
COUNTERS = st.builds(
    NodeCounters,
    boot=st.just("b"),
    uncorrected=COUNTS,
    corrected=COUNTS,
    poisoned_kib=NUMBERS,
    file_system_errors=COUNTS,
    turned_read_only=st.lists(NAMES, unique=True).map(tuple),
    links=st.dictionaries(NAMES, LINKS),
)
DIRECTORIES = st.builds(
    DirectoryTest,
    path=NAMES,
    local=st.booleans(),
    free_bytes=st.none() | NUMBERS,
    free_inodes=st.none() | NUMBERS,
    read_only=st.booleans(),
    finished=st.booleans(),
    error=st.sampled_from(["", "EIO", "EACCES"]),
    same=st.booleans(),
)
EVIDENCE = st.builds(
    Evidence,
    before=COUNTERS,
    now=COUNTERS,
    since=st.sampled_from(["", "since then"]),
    total_bytes=NUMBERS,
    available_bytes=NUMBERS,
    memory=st.none() | st.builds(MemoryTest, tested_bytes=NUMBERS, wrong_words=NUMBERS, first=NAMES),
    directories=st.lists(DIRECTORIES, max_size=3).map(tuple),
    peers=st.lists(st.builds(PeerTest, NAMES, st.sampled_from(["", "no route"])), max_size=3).map(tuple),
)


@settings(max_examples=40)
@given(EVIDENCE)
def test_the_verdict_is_one_line_that_says_what_the_findings_say(evidence: Evidence) -> None:
    report = judge(evidence)
    faults = [finding for finding in report.findings if finding.level == "fault"]
    assert report.suspect == bool(faults)
    assert report.verdict.startswith("suspect: " if faults else "sound: ")
    assert report.verdict.isprintable()
    assert all(finding.text.isprintable() and finding.text for finding in report.findings)
    if faults:
        assert faults[0].text in report.verdict


@settings(max_examples=40)
@given(EVIDENCE)
def test_no_time_that_passes_without_an_event_makes_a_fault_of_counters(evidence: Evidence) -> None:
    """What is at fault then was seen by a test now."""
    quiet = msgspec.structs.replace(
        evidence, now=evidence.before, since="since then", memory=None, directories=(), peers=(), total_bytes=0
    )
    assert not judge(quiet).suspect


@settings(max_examples=40)
@given(EVIDENCE, EVIDENCE)
def test_more_evidence_against_a_node_never_clears_it(evidence: Evidence, more: Evidence) -> None:
    if not judge(evidence).suspect:
        return
    both = msgspec.structs.replace(evidence, directories=(*evidence.directories, *more.directories))
    assert judge(both).suspect


@settings(max_examples=40)
@given(EVIDENCE, st.integers(1, 1 << 20))
def test_one_uncorrected_error_more_is_enough(evidence: Evidence, grown: int) -> None:
    now = {name: count + grown for name, count in evidence.now.uncorrected.items()} or {"mc0": grown}
    before = msgspec.structs.replace(evidence.before, uncorrected=evidence.now.uncorrected)
    worse = msgspec.structs.replace(evidence, before=before, now=msgspec.structs.replace(evidence.now, uncorrected=now))
    assert judge(worse).suspect
