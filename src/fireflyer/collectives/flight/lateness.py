"""Who comes late again and again: how long each rank kept the others waiting at the start of a collective.

Pure. Lateness is measured from the first rank to arrive, over the collectives that all dumps record. The clocks of two
nodes never agree to a microsecond; what is constant between them is taken out by the ends of those operations that
nobody can leave before everybody has entered: these end on all nodes at once, but for the time of a message.
"""

from __future__ import annotations

import statistics
from typing import Final, NamedTuple

from fireflyer.base.units import MS
from fireflyer.collectives.flight.dump import Record
from fireflyer.collectives.flight.evidence import Evidence

__all__ = ["Lateness", "measure_lateness"]

_TOGETHER: Final = ("allreduce", "allgather", "all_to_all", "barrier", "reduce_scatter")
_ENOUGH: Final = 16
_LEAST_NS: Final = MS
_FACTOR: Final = 3


class Lateness(NamedTuple):
    """Of one rank, over `operations` collectives."""

    rank: int
    median_ns: int
    worst_ns: int
    last: int
    """How often it was the last to arrive."""
    operations: int
    straggler: bool
    """It is late by more than the others' habits explain."""


def measure_lateness(evidence: Evidence) -> tuple[Lateness, ...]:
    """Of every rank that left a dump, ascending; empty where fewer than two did, or
    nothing is common to all, or nothing tells how their clocks differ."""
    facts = [facts for facts in evidence.ranks if facts.dump is not None]
    if len(facts) < 2:
        return ()
    common = sorted(set.intersection(*(set(each.calls) for each in facts)))
    rows = [[each.calls[seq] for each in facts] for seq in common]
    rows = [row for row in rows if all(record.inside and record.state == "done" for record in row)]
    if not rows:
        return ()
    ranks = [each.rank for each in facts]
    offsets = _offsets(evidence, ranks, rows)
    if offsets is None:
        return ()
    late: list[list[int]] = [[] for _ in ranks]
    last = [0] * len(ranks)
    for row in rows:
        arrivals = [
            evidence.wall_ns(rank, record.started_ns) - offset
            for rank, record, offset in zip(ranks, row, offsets, strict=True)
        ]
        for index, arrival in enumerate(arrivals):
            late[index].append(arrival - min(arrivals))
        last[arrivals.index(max(arrivals))] += 1
    medians = [round(statistics.median(each)) for each in late]
    return tuple(
        Lateness(rank, medians[i], max(late[i]), last[i], len(rows), _stands_out(medians, i, last[i], len(rows)))
        for i, rank in enumerate(ranks)
    )


def _stands_out(medians: list[int], index: int, last: int, operations: int) -> bool:
    others = [median for i, median in enumerate(medians) if i != index]
    limit_ns = max(_LEAST_NS, _FACTOR * statistics.median(others))
    return operations >= _ENOUGH and 3 * last > 2 * operations and medians[index] >= limit_ns


def _offsets(evidence: Evidence, ranks: list[int], rows: list[list[Record]]) -> list[int] | None:
    """How far the clock of each rank's node is ahead of the first one's; None where nothing tells."""
    together = [row for row in rows if row[0].kind in _TOGETHER]
    nodes = [dump.node for rank in ranks if (dump := evidence.ranks[rank].dump) is not None]
    if len(set(nodes)) < 2:
        return [0] * len(ranks)
    if not together:
        return None
    ahead: dict[int, list[int]] = {node: [] for node in nodes}
    for row in together:
        ends = [evidence.wall_ns(rank, record.finished_ns) for rank, record in zip(ranks, row, strict=True)]
        first = {node: min(end for end, where in zip(ends, nodes, strict=True) if where == node) for node in ahead}
        for node, end_ns in first.items():
            ahead[node].append(end_ns - first[nodes[0]])
    offset = {node: round(statistics.median(values)) for node, values in ahead.items()}
    return [offset[node] for node in nodes]
