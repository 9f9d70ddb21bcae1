"""From the dumps of a group's ranks to the one that held it up.

Pure and deterministic. What is looked for, in this order; the first that is found is the verdict:

1. *Mismatch*: at the same number ranks called different things. Who differs from the majority is named, and whether
   its calls fit those of the others when moved by one: then it left one out, or made one too many.
2. *What the ranks themselves raised*: they watch each other while they run, and see deaths that no dump can tell of.
3. *Who waits for whom*: a rank inside a collective waits for those that have not entered it; where all have, for the
   one that is least far; a message waits for the other end. Following that, the ranks that are waited for and wait for
   nobody are to blame; where there are none, the ranks in a circle are.

Where the ends of a connection between nodes show that bytes got lost between two ranks that live (`links`), that is the
verdict instead of 2 and 3: neither rank is to blame, both are named.

Nobody is blamed for waiting. A rank without a dump is a suspect, named as such: it may have died, or its dump was not
collected; it is certain only where the others raised that it failed. Where they raised that they had waited for it too
long, and not that it had died, its process lived: `asleep`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

from fireflyer.base.units import format_duration
from fireflyer.collectives.flight.dump import Dump, Fault
from fireflyer.collectives.flight.evidence import CallState, Evidence, call_name
from fireflyer.collectives.flight.lateness import Lateness, measure_lateness
from fireflyer.collectives.flight.links import StoppedLink, find_stopped_links
from fireflyer.collectives.flight.mismatch import Mismatch, find_mismatch
from fireflyer.collectives.flight.waiting import Wait, find_cycle, find_waits

__all__ = ["Culprit", "Kind", "RankRow", "Verdict", "explain"]

Kind: TypeAlias = Literal[
    "nothing",
    "mismatch",
    "absent",
    "asleep",
    "stalled",
    "gone",
    "link",
    "deadlock",
    "aborted",
    "corrupted",
    "undecided",
]
MAX_EVIDENCE: Final = 12
MAX_LINK_LINES: Final = 4
_LIVED: Final = " has not entered "
"""In the text of what a rank raised: it waited for the other too long. Of one that died it says so: ranks watch each
other's processes and connections all the time, and notice an end within 100 ms."""


class Culprit(NamedTuple):
    rank: int
    label: str
    why: str
    certain: bool


class RankRow(NamedTuple):
    """One line of the table."""

    rank: int
    label: str
    dump: bool
    entered: int
    finished: int
    operation: str
    """The first that it has not ended."""
    state: str
    chunks_done: int
    chunks: int
    idle_ns: int
    """Since its last progress in that operation, until it ended or the dump was written; -1 where unknown."""
    waits_for: tuple[int, ...]
    late_ns: int
    """Median lateness; -1 where unknown."""


class Verdict(NamedTuple):
    """Finding. `culprits` is empty for `nothing`, and for `undecided` holds suspects, if anybody."""

    group: str
    kind: Kind
    summary: str
    culprits: tuple[Culprit, ...]
    evidence: tuple[str, ...]
    table: tuple[RankRow, ...]
    stragglers: tuple[Lateness, ...]
    links: tuple[StoppedLink, ...] = ()
    """Directions of connections between nodes in which bytes stopped."""

    @property
    def decided(self) -> bool:
        return self.kind != "undecided"


def explain(dumps: Sequence[Dump]) -> Verdict:
    """The verdict on one group. Raises `UsageError` where there are no dumps, or they are not of one group."""
    evidence = Evidence(dumps)
    seq = evidence.stuck()
    waits = find_waits(evidence)
    links = find_stopped_links(evidence)
    fault = _first_fault(evidence)
    raised = fault is not None and fault.code == "usage"  # then a rank of another node may still have been one behind
    found = (
        _from_mismatch(evidence, find_mismatch(evidence, upto=None if raised else seq))
        or _from_links(evidence, fault, links)
        or _from_fault(evidence, seq, fault, waits)
        or _from_waits(evidence, seq, waits)
        or ("nothing", _all_well(evidence), (), ())
    )
    kind, summary, culprits, lines = found
    late = measure_lateness(evidence)
    stragglers = tuple(each for each in late if each.straggler)
    shown = tuple(wait for wait in waits if wait.targets or kind == "undecided")
    notes = [
        *lines,
        *_link_lines(links, kind, culprits),
        *_wait_lines(evidence, shown),
        *_raised_lines(evidence),
        *_missing_lines(evidence),
        *_saturation_lines(evidence),
    ]
    notes += [
        f"{evidence.ranks[each.rank].label} was last to enter {each.last} of {each.operations} collectives, "
        f"{format_duration(each.median_ns)} late in the median"
        for each in stragglers
    ]
    unique = tuple(dict.fromkeys(notes))
    cut = (f"... and {len(unique) - MAX_EVIDENCE} more",) if len(unique) > MAX_EVIDENCE else ()
    table = _table(evidence, waits, {each.rank: each.median_ns for each in late})
    return Verdict(evidence.group, kind, summary, culprits, unique[:MAX_EVIDENCE] + cut, table, stragglers, links)


_Found: TypeAlias = tuple[Kind, str, tuple[Culprit, ...], tuple[str, ...]]


def _culprit(evidence: Evidence, rank: int, why: str, certain: bool) -> Culprit:
    return Culprit(rank, evidence.ranks[rank].label, why, certain)


def _names(evidence: Evidence, ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return evidence.ranks[ranks[0]].label
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"ranks {shown}"


def _from_mismatch(evidence: Evidence, mismatch: Mismatch | None) -> _Found | None:
    if mismatch is None:
        return None
    culprits = tuple(_culprit(evidence, rank, mismatch.why, mismatch.certain) for rank in mismatch.culprits)
    return "mismatch", mismatch.summary, culprits, mismatch.lines


def _from_links(evidence: Evidence, fault: Fault | None, links: tuple[StoppedLink, ...]) -> _Found | None:
    """Bytes that got lost between two ranks that left dumps, where nobody raised something else."""
    if fault is not None and fault.code != "peer_failed":
        return None
    for link in links:
        ends = (link.sender, link.receiver)
        alive = all(evidence.ranks[rank].dump is not None for rank in ends)
        if link.side == "network" and alive and (fault is None or fault.rank in ends):
            culprits = tuple(_culprit(evidence, rank, f"is an end of {link.connection}", False) for rank in ends)
            raised = () if fault is None else (f"raised: {fault.text}",)
            return "link", link.text, culprits, raised
    return None


def _link_lines(links: tuple[StoppedLink, ...], kind: Kind, culprits: tuple[Culprit, ...]) -> list[str]:
    """What a sender never sent is told of those who are blamed; the others waited themselves."""
    if kind in ("nothing", "mismatch", "aborted"):
        return []
    blamed = {culprit.rank for culprit in culprits}
    told = [link.text for link in links if link.side != "sender" or link.sender in blamed or kind == "undecided"]
    return told[:MAX_LINK_LINES]


def _from_fault(evidence: Evidence, seq: int | None, fault: Fault | None, waits: tuple[Wait, ...]) -> _Found | None:
    """`fault` is what was raised first: later failures are often only its consequences."""
    if fault is None:
        return None
    if fault.code == "usage" and (circle := find_cycle(waits)):
        return _cycle(evidence, circle, waits)
    if fault.code in ("aborted", "usage", "data_corruption"):
        kinds: dict[str, Kind] = {"aborted": "aborted", "usage": "mismatch", "data_corruption": "corrupted"}
        culprits = (_culprit(evidence, fault.rank, fault.text, True),) if fault.rank >= 0 else ()
        return kinds[fault.code], fault.text, culprits, ()
    if fault.rank < 0:
        return None
    at = seq if seq is not None else fault.seq
    kind, why = _how(evidence, fault.rank, at)
    name = evidence.ranks[fault.rank].label
    if kind == "gone" and _LIVED in fault.text:
        line = f"the process of {name} lived while the others waited: it slept, was stopped or was busy elsewhere"
        said = fault.text.removeprefix(name).strip()
        return "asleep", f"{name} {said}", (_culprit(evidence, fault.rank, said, True),), (line,)
    if evidence.ranks[fault.rank].at(at) is CallState.UNKNOWN:  # the others' word is all that there is
        why = f"{fault.text.removeprefix(name).strip()}, and left no dump"
    witnesses = [
        dump.rank for dump in evidence.dumps if dump.fault is not None and dump.fault.rank == fault.rank != dump.rank
    ]
    line = f"{_names(evidence, witnesses)} raised: {fault.text}" if witnesses else f"raised: {fault.text}"
    return kind, f"{name} {why}", (_culprit(evidence, fault.rank, why, True),), (line,)


def _first_fault(evidence: Evidence) -> Fault | None:
    raised = []
    for dump in evidence.dumps:
        if dump.fault is not None:
            ends = [r.finished_ns for r in dump.snapshot.records if r.state == "failed" and r.finished_ns]
            raised.append((dump.wall_ns(min(ends, default=dump.snapshot.monotonic_ns)), dump.rank, dump.fault))
    return min(raised, key=lambda each: each[:2])[2] if raised else None


def _how(evidence: Evidence, rank: int, seq: int) -> tuple[Kind, str]:
    """In what way a rank that is to blame held the others up at `seq`."""
    facts, name = evidence.ranks[rank], call_name(seq, evidence.call(seq))
    presence = facts.at(seq)
    record = facts.calls.get(seq)
    if presence is CallState.REFUSED and record is not None:
        return "absent", f"entered {name} only after it had failed on the others"
    if presence in (CallState.ABSENT, CallState.REFUSED):
        without = "" if facts.dump is not None else ", and left no dump"
        return ("absent" if facts.dump is not None else "gone"), f"had not entered {name}{without}"
    if facts.dump is None:
        where = f" inside {name}" if presence is CallState.INSIDE else f" (the others are at {name})"
        return "gone", f"left no dump: it has died or hangs{where}"
    if record is not None and record.inside:
        return "stalled", f"stopped inside {name} after {_progress(record.chunks_done, record.chunks)}"
    return "stalled", f"held up {name}"


def _progress(done: int, total: int) -> str:
    return f"{done} of {total} chunks" if total else f"{done} chunks"


def _from_waits(evidence: Evidence, seq: int | None, waits: tuple[Wait, ...]) -> _Found | None:
    circle = find_cycle(waits)
    waiting = {wait.rank for wait in waits}
    ends = sorted({target for wait in waits for target in wait.targets} - waiting)
    if circle and not ends:
        return _cycle(evidence, circle, waits)
    if not ends:
        if not waits:
            return None
        if seq is None:
            return "undecided", "messages that both ends have posted do not move; no rank can be blamed", (), ()
        held = call_name(seq, evidence.call(seq))
        return "undecided", f"all ranks are inside {held} with equal progress: no rank can be blamed", (), ()
    culprits = tuple(_end_of_chain(evidence, rank, waits) for rank in ends)
    missing = [culprit.rank for culprit in culprits if not culprit.certain]
    if len(missing) == len(culprits) and 2 * len(missing) > len(evidence.ranks):
        have = ", ".join(str(dump.rank) for dump in evidence.dumps[:8])
        summary = f"most ranks left no dump here, only {have} did: collect the others to see who is to blame"
        return "undecided", summary, culprits, ()
    blamed = [culprit for culprit in culprits if culprit.certain] or list(culprits)
    suspects = "" if blamed[0].certain else " (suspected: if its dump was only not collected, add it)"
    kind: Kind = "gone" if not blamed[0].certain else _kind_of(waits, blamed[0].rank)
    return kind, f"{_names(evidence, [each.rank for each in blamed])} {blamed[0].why}{suspects}", culprits, ()


def _cycle(evidence: Evidence, circle: tuple[int, ...], waits: tuple[Wait, ...]) -> _Found:
    lines = tuple(wait.text(evidence) for wait in waits if wait.rank in circle)
    culprits = tuple(_culprit(evidence, rank, "is part of a cycle of waiting ranks", True) for rank in circle)
    way = " -> ".join(map(str, (*circle, circle[0])))
    return "deadlock", f"ranks wait for each other in a cycle: {way}", culprits, lines


def _kind_of(waits: tuple[Wait, ...], rank: int) -> Kind:
    reasons = {wait.reason for wait in waits if rank in wait.targets}
    return "stalled" if reasons == {"behind"} else "absent"


def _end_of_chain(evidence: Evidence, rank: int, waits: tuple[Wait, ...]) -> Culprit:
    wait = next(wait for wait in waits if rank in wait.targets)
    facts = evidence.ranks[rank]
    if wait.seq is not None:
        _, why = _how(evidence, rank, wait.seq)
    else:
        why = f"never {'sent' if wait.reason == 'not sent' else 'received'} what rank {wait.rank} waits for"
        if facts.dump is None:
            why = f"left no dump, and {why}"
    return _culprit(evidence, rank, why, facts.dump is not None)


def _wait_lines(evidence: Evidence, waits: tuple[Wait, ...]) -> list[str]:
    """The same wait of many ranks is one line."""
    groups: dict[tuple[object, ...], list[Wait]] = {}
    for wait in waits:
        groups.setdefault((wait.seq, wait.reason, wait.targets, wait.what), []).append(wait)
    lines = []
    for same in groups.values():
        longest = max(same, key=lambda wait: wait.waited_ns)
        lines.append(longest.text(evidence, ranks=tuple(wait.rank for wait in same)))
    return lines


def _raised_lines(evidence: Evidence) -> list[str]:
    by_text: dict[str, list[int]] = {}
    for dump in evidence.dumps:
        if dump.fault is not None:
            by_text.setdefault(dump.fault.text, []).append(dump.rank)
    return [f"{_names(evidence, ranks)} raised: {text}" for text, ranks in by_text.items()] if len(by_text) > 1 else []


def _missing_lines(evidence: Evidence) -> list[str]:
    missing = [facts.rank for facts in evidence.ranks if facts.dump is None]
    if not missing:
        return []
    return [f"no dump of {_names(evidence, missing)}"]


def _saturation_lines(evidence: Evidence) -> list[str]:
    """Not why a group failed, but what a loss that is not a number may come from."""
    by_seq: dict[int, int] = {}
    for facts in evidence.ranks:
        for seq, record in facts.calls.items():
            if record.saturated:
                by_seq[seq] = by_seq.get(seq, 0) + record.saturated
    if not by_seq:
        return []
    worst = max(by_seq, key=lambda seq: (by_seq[seq], -seq))
    calls = [evidence.call(seq) for seq in by_seq]
    values = sum(call.count for call in calls if call is not None)
    most = f", {by_seq[worst]:,} of them in {call_name(worst, evidence.call(worst))}" if len(by_seq) > 1 else ""
    which = f"{len(by_seq)} sums" if len(by_seq) > 1 else call_name(worst, evidence.call(worst))
    return [f"{sum(by_seq.values()):,} of {values:,} values in {which} did not fit fp8{most}"]


def _all_well(evidence: Evidence) -> str:
    least = min((facts.finished for facts in evidence.ranks if facts.dump is not None), default=0)
    return f"no failure: {least} collectives completed on every rank that left a dump, and no rank waits"


def _table(evidence: Evidence, waits: tuple[Wait, ...], late: dict[int, int]) -> tuple[RankRow, ...]:
    rows = []
    for facts in evidence.ranks:
        targets = tuple(sorted({target for wait in waits if wait.rank == facts.rank for target in wait.targets}))
        open_calls = [record for record in facts.calls.values() if record.state != "done"]
        record = min(open_calls, key=lambda record: record.seq, default=None)
        idle_ns = -1
        if record is not None and record.inside and facts.dump is not None:
            end_ns = record.finished_ns or facts.dump.snapshot.monotonic_ns
            idle_ns = end_ns - (record.progress_ns or record.started_ns)
        state = "" if facts.dump is not None else "no dump"
        if record is not None:
            state = facts.at(record.seq).value if record.state != "failed" else f"{facts.at(record.seq).value}, failed"
        rows.append(
            RankRow(
                rank=facts.rank,
                label=facts.label,
                dump=facts.dump is not None,
                entered=facts.entered,
                finished=facts.finished,
                operation="" if record is None else call_name(record.seq, record),
                state=state,
                chunks_done=record.chunks_done if record is not None else 0,
                chunks=record.chunks if record is not None else 0,
                idle_ns=idle_ns,
                waits_for=targets,
                late_ns=late.get(facts.rank, -1),
            )
        )
    return tuple(rows)
