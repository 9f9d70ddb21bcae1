"""Who waits for whom, and why: the edges that lead from those that are held up to the one that holds them up.

Pure. Only a rank that left a dump is known to wait. It waits

- inside a collective, for every rank that has not entered it; where all have, for those that are least far, and where
  there are ranks without a dump inside, for these;
- for a message that it is to receive, for the rank that has not sent it; for one that it sends, for the rank that has
  not asked for it.

Who had waited for less than the patience of the evidence when its dump was written may simply have been early; and a
rank whose own dump is older than the wait may have come since.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from fireflyer.base.units import MS, format_duration
from fireflyer.collectives.flight.dump import Record
from fireflyer.collectives.flight.evidence import CallState, Evidence, RankFacts, call_name

__all__ = ["Wait", "find_cycle", "find_waits"]

_DISTINCT_NS: Final = 20 * MS
_OTHER_END: Final = {"recv": "send", "send": "recv"}


class Wait(NamedTuple):
    rank: int
    seq: int | None
    """Of the collective; None for a message."""
    reason: str
    """`not entered`, `behind`, `together` (nobody can be told from the others), `not sent`, `not received`."""
    targets: tuple[int, ...]
    what: str
    """The operation, for people."""
    waited_ns: int

    def text(self, evidence: Evidence, ranks: tuple[int, ...] = ()) -> str:
        """One line: who waited for whom, in what, for how long."""
        who = _ranks(evidence, ranks or (self.rank,))
        waits = "waits" if len(ranks) < 2 else "wait"
        since = f"for {format_duration(self.waited_ns)}"
        whom = _ranks(evidence, self.targets)
        return {
            "not entered": f"{who} {waits} {since} inside {self.what}; {whom} had not entered it",
            "behind": f"{who} {waits} {since} inside {self.what}; {whom} has made the least progress",
            "together": f"{who} {waits} {since} inside {self.what}, and no rank is behind the others",
            "not sent": f"{who} {waits} {since} in {self.what}; {whom} had not sent it",
            "not received": f"{who} {waits} {since} in {self.what}; {whom} had not posted the receive",
        }[self.reason]


def find_waits(evidence: Evidence) -> tuple[Wait, ...]:
    """Of all ranks that left a dump, ascending."""
    waits = []
    for facts in evidence.ranks:
        if facts.dump is None:
            continue
        inside = [record for seq, record in facts.calls.items() if facts.at(seq) is CallState.INSIDE]
        record = min(inside, key=lambda record: record.seq, default=None)
        if record is not None and _long(evidence, facts, record):
            wait = _in_collective(evidence, facts, record)
            waits += [wait] if wait is not None else []
        waits += _in_messages(evidence, facts)
    return tuple(waits)


def _long(evidence: Evidence, facts: RankFacts, record: Record) -> bool:
    return record.state == "failed" or evidence.waited_ns(facts.rank, record) >= evidence.patience_ns


def _in_collective(evidence: Evidence, facts: RankFacts, record: Record) -> Wait | None:
    seq, waited_ns = record.seq, evidence.waited_ns(facts.rank, record)
    since_ns = evidence.wall_ns(facts.rank, record.started_ns)
    outside = tuple(
        other.rank
        for other in evidence.ranks
        if other.at(seq) not in (CallState.DONE, CallState.INSIDE)
        and (other.dump is None or evidence.dumped_ns(other.rank) - since_ns >= min(waited_ns, evidence.patience_ns))
    )
    what = call_name(seq, record)
    if outside:
        return Wait(facts.rank, seq, "not entered", outside, what, waited_ns)
    behind = _behind(evidence, seq)
    if facts.rank in behind:
        return None
    return Wait(facts.rank, seq, "behind" if behind else "together", behind, what, waited_ns)


def _behind(evidence: Evidence, seq: int) -> tuple[int, ...]:
    inside = [facts for facts in evidence.ranks if facts.at(seq) is CallState.INSIDE]
    silent = tuple(facts.rank for facts in inside if facts.dump is None)
    if silent:
        return silent
    least = min(facts.calls[seq].chunks_done for facts in inside)
    slow = [facts for facts in inside if facts.calls[seq].chunks_done == least]
    if len(slow) < len(inside):
        return tuple(facts.rank for facts in slow)
    moved = sorted((evidence.wall_ns(facts.rank, _moved_ns(facts.calls[seq])), facts.rank) for facts in inside)
    if len(moved) > 1 and moved[1][0] - moved[0][0] >= _DISTINCT_NS and least > 0:
        return (moved[0][1],)
    return ()


def _moved_ns(record: Record) -> int:
    return record.progress_ns or record.started_ns


def _in_messages(evidence: Evidence, facts: RankFacts) -> list[Wait]:
    """Of each pair, direction and tag, the oldest message that is under way: the later ones wait for it."""
    oldest: dict[tuple[str, int, int], Record] = {}
    for record in facts.messages:
        if record.state != "done" and record.inside and _long(evidence, facts, record):
            oldest.setdefault((record.kind, record.peer, record.tag), record)
    waits = []
    for (kind, peer, _), record in sorted(oldest.items()):
        peers = [peer] if peer >= 0 else [other.rank for other in evidence.ranks if other.rank != facts.rank]
        waited_ns = evidence.waited_ns(facts.rank, record)
        if any(_under_way(evidence, facts, record, other) for other in peers):
            waits.append(Wait(facts.rank, None, "together", (), record.call(), waited_ns))
        else:
            reason = "not sent" if kind == "recv" else "not received"
            waits.append(Wait(facts.rank, None, reason, tuple(peers), record.call(), waited_ns))
    return waits


def _under_way(evidence: Evidence, facts: RankFacts, record: Record, peer: int) -> bool:
    """Whether `peer` has made the call that a message waits for, for all that is known."""
    other = evidence.ranks[peer]
    if other.dump is not None and evidence.dumped_ns(peer) < evidence.wall_ns(facts.rank, record.started_ns):
        return True
    calls = other.messages_with(_OTHER_END[record.kind], facts.rank, record.tag)
    calls += other.messages_with("recv", -1, record.tag) if record.kind == "send" else []
    last = record.seq if record.peer >= 0 else -1
    return any(one.state != "done" or (one.seq >= last and record.peer >= 0) for one in calls)


def find_cycle(waits: tuple[Wait, ...]) -> tuple[int, ...]:
    """Ranks each of which waits for the next, and the last for the first; the least one first. Empty: no circle."""
    edges: dict[int, list[int]] = {}
    for wait in waits:
        edges.setdefault(wait.rank, []).extend(wait.targets)
    settled: set[int] = set()
    for start in sorted(edges):
        path: list[int] = [start]
        ways = [iter(sorted(set(edges[start])))]
        while path:
            step = next((rank for rank in ways[-1] if rank in edges and rank not in settled), None)
            if step is None:
                settled.add(path.pop())
                ways.pop()
            elif step in path:
                circle = path[path.index(step) :]
                first = circle.index(min(circle))
                return tuple(circle[first:] + circle[:first])
            else:
                path.append(step)
                ways.append(iter(sorted(set(edges[step]))))
    return ()


def _ranks(evidence: Evidence, ranks: tuple[int, ...]) -> str:
    if len(ranks) == 1:
        return evidence.ranks[ranks[0]].label
    return "ranks " + ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
