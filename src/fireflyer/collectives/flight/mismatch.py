"""Where ranks called different things: the first collective, else the first message, whose two sides do not fit.

Pure. The odd ones out are those that differ from the majority; where there is none, all are named and nobody for
certain. A rank that left a call out goes on with the next one under the number of the one that it missed, so its calls
fit those of the others when moved by one.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

from fireflyer.collectives.flight.dump import Record
from fireflyer.collectives.flight.evidence import Evidence

__all__ = ["Mismatch", "find_mismatch"]

_COMPARED: Final = 16
_Call: TypeAlias = tuple[str, str, str, int, int]


class Mismatch(NamedTuple):
    summary: str
    culprits: tuple[int, ...]
    why: str
    certain: bool
    lines: tuple[str, ...]
    """What each side called."""


_MISMATCH: Final = "mismatch"
"""The failure on record of a call that does not fit the message that it met."""


def find_mismatch(evidence: Evidence, *, upto: int | None) -> Mismatch | None:
    """The first one, among the collectives up to that number: what lies behind has not come to pass. None: all."""
    seqs = sorted({seq for facts in evidence.ranks for seq in facts.calls if upto is None or seq <= upto})
    for seq in seqs:
        sides: dict[_Call, list[int]] = {}
        for facts in evidence.ranks:
            if seq in facts.calls:
                sides.setdefault(_call(facts.calls[seq]), []).append(facts.rank)
        if len(sides) > 1:
            return _collective(evidence, seq, list(sides.values()))
    return _message(evidence)


def _call(record: Record) -> _Call:
    return record.kind, record.dtype, record.op, record.count, record.root


def _collective(evidence: Evidence, seq: int, sides: list[list[int]]) -> Mismatch:
    sides.sort(key=lambda ranks: (-len(ranks), ranks))
    clear = len(sides[0]) > len(sides[1])
    odd = [rank for ranks in (sides[1:] if clear else sides) for rank in ranks]
    lines = tuple(f"#{seq}: {_ranks(ranks)} called {evidence.ranks[ranks[0]].calls[seq].call()}" for ranks in sides)
    if not clear:
        return Mismatch(
            f"ranks called different collectives at #{seq}, and there is no majority: {'; '.join(lines)}",
            tuple(odd),
            f"called another collective than the others at #{seq}{_moved(evidence, seq, sides[1][0], sides[0][0])}",
            False,
            lines,
        )
    called = evidence.ranks[odd[0]].calls[seq].call()
    expected = evidence.ranks[sides[0][0]].calls[seq].call()
    moved = _moved(evidence, seq, odd[0], sides[0][0])
    why = f"called {called} at #{seq} where {_ranks(sides[0])} called {expected}{moved}"
    who = evidence.ranks[odd[0]].label if len(odd) == 1 else _ranks(odd)
    return Mismatch(f"{who} {why}", tuple(odd), why, True, lines)


def _moved(evidence: Evidence, seq: int, odd: int, other: int) -> str:
    """Whether the calls of `odd` from `seq` on are those of `other`, one earlier or one later."""

    def fits(mine: int, theirs: int) -> bool:
        pairs = [
            (left, right)
            for i in range(_COMPARED)
            if (left := evidence.ranks[odd].calls.get(mine + i)) is not None
            and (right := evidence.ranks[other].calls.get(theirs + i)) is not None
        ]
        return bool(pairs) and all(_call(left) == _call(right) for left, right in pairs)

    missed, extra, unmoved = fits(seq, seq + 1), fits(seq + 1, seq), fits(seq + 1, seq + 1)
    if missed and not extra and not unmoved:
        return f"; its calls fit those of rank {other} one later: it skipped a call, #{seq} or an equal one before"
    if extra and not missed and not unmoved:
        extra_call = f"it made an extra call, #{seq} or an equal one before"
        return f"; its calls fit those of rank {other} one earlier: {extra_call}"
    return ""


def _message(evidence: Evidence) -> Mismatch | None:
    """The first message that ended since size or type of its two ends differ."""
    for facts in evidence.ranks:
        for received in facts.messages:
            if received.kind != "recv" or received.failure != _MISMATCH:
                continue
            for sent in evidence.ranks[received.peer].messages_with("send", facts.rank, received.tag):
                if (sent.count, sent.dtype) != (received.count, received.dtype):
                    return _ends(received.peer, facts.rank, sent, received)
    return None


def _ends(source: int, target: int, sent: Record, received: Record) -> Mismatch:
    lines = (f"rank {source} called {sent.call()}", f"rank {target} called {received.call()}")
    where = f"message #{sent.seq} from rank {source} to rank {target}"
    summary = f"{where} is not what is received: {sent.call()}, but {received.call()}"
    return Mismatch(summary, (source, target), f"disagrees with the other end about {where}", False, lines)


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
