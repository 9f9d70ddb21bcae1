"""Which experts share a rank, from how many tokens each of them got.

A layer waits for the rank whose experts have most tokens. `place_experts` renumbers the experts of a layer so that the
consecutive ones of each rank have about equal loads; it is exact about what limits it: each rank has as many experts as
the others, and where routing is limited to some groups of experts, the experts of a group stay neighbours, so that a
group is on one node.

Packing is greedy, the largest load first, then pairs are exchanged while that makes the fuller one of two ranks less
full. Deterministic: equal loads are taken in the order of their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.codesign.model import Experts

__all__ = ["ExpertOrder", "imbalance", "level", "pack", "place_experts"]

MAX_EXCHANGES: Final = 1 << 12
"""Of pairs in one packing."""


class ExpertOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A new numbering of the experts of a layer."""

    order: tuple[int, ...]
    """Of each new number: the number before. Ranks have consecutive new numbers."""
    before: float
    """Load of the fullest rank over the mean of all ranks, as experts were."""
    after: float


def pack(loads: Sequence[float], bins: int) -> tuple[tuple[int, ...], ...]:
    """Numbers of the loads in each of `bins`, ascending, equally many in each, so that the fullest has about as little
    as it can. Raises `UsageError` for loads that do not divide, or are no numbers from 0.

    >>> pack([5, 1, 4, 2], 2)
    ((0, 1), (2, 3))
    """
    if bins < 1 or len(loads) % bins:
        raise UsageError(f"{len(loads)} loads do not divide into {bins} equal parts")
    if not all(math.isfinite(load) and load >= 0 for load in loads):
        raise UsageError("a load is negative, or no number; loads are counts of tokens")
    size = len(loads) // bins
    held: list[list[int]] = [[] for _ in range(bins)]
    totals = [0.0] * bins
    for item in sorted(range(len(loads)), key=lambda one: (-loads[one], one)):
        place = min((one for one in range(bins) if len(held[one]) < size), key=lambda one: (totals[one], one))
        held[place].append(item)
        totals[place] += loads[item]
    level(loads, held, totals)
    return tuple(tuple(sorted(one)) for one in held)


def level(
    loads: Sequence[float], held: list[list[int]], totals: list[float], kinds: Sequence[int] | None = None
) -> None:
    """Exchanges items of the bins `held`, whose loads are `totals`, while that makes the fuller of two bins less full.
    Items of equal `kinds` are not put together; None: all may be."""
    for _ in range(MAX_EXCHANGES):
        if not _exchange(loads, held, totals, range(len(loads)) if kinds is None else kinds):
            break


def _exchange(loads: Sequence[float], held: list[list[int]], totals: list[float], kinds: Sequence[int]) -> bool:
    """Exchanges an item of the fullest bin for a smaller one of another, the pair that leaves the fuller of both least
    full; False where none helps."""
    full = max(range(len(held)), key=lambda one: (totals[one], -one))
    best, found = totals[full] * (1 - 1e-12), None
    here = {kinds[item] for item in held[full]}
    for other in range(len(held)):
        there = {kinds[item] for item in held[other]}
        for mine in range(len(held[full])) if other != full else ():
            for theirs in range(len(held[other])):
                if kinds[held[full][mine]] in there or kinds[held[other][theirs]] in here:
                    continue
                moved = loads[held[full][mine]] - loads[held[other][theirs]]
                fuller = max(totals[full] - moved, totals[other] + moved)
                if moved > 0 and fuller < best:
                    best, found = fuller, (other, mine, theirs, moved)
    if found is None:
        return False
    other, mine, theirs, moved = found
    held[full][mine], held[other][theirs] = held[other][theirs], held[full][mine]
    totals[full] -= moved
    totals[other] += moved
    return True


def imbalance(loads: Sequence[float], ranks: int) -> float:
    """Load of the fullest of `ranks`, which have consecutive experts, over their mean; 1 where there is none."""
    each = len(loads) // ranks
    totals = [math.fsum(loads[first : first + each]) for first in range(0, len(loads), each)]
    total = math.fsum(totals)
    return max(totals) * len(totals) / total if total else 1.0


def place_experts(loads: Sequence[float], experts: Experts, ranks: int, nodes: int = 1) -> ExpertOrder:
    """The numbering with which `ranks` on `nodes`, equally many on each, have about equal loads, and then the nodes.
    Experts stay as they are where that is no better. Raises `UsageError` for loads that are not those of `experts`, and
    for experts that do not divide over the ranks, or ranks over the nodes."""
    if len(loads) != experts.routed:
        raise UsageError(f"{len(loads)} loads for {experts.routed} experts; give one for each")
    if ranks < 1 or nodes < 1 or experts.routed % ranks or ranks % nodes:
        raise UsageError(f"{experts.routed} experts do not divide over {ranks} ranks on {nodes} nodes")
    limited = experts.groups_per_token < experts.groups
    order = tuple(_within_groups(loads, experts, ranks, nodes) if limited else _over_nodes(loads, ranks, nodes))
    moved = [loads[expert] for expert in order]
    before, after = imbalance(loads, ranks), imbalance(moved, ranks)
    if (after, imbalance(moved, nodes)) < (before, imbalance(loads, nodes)):
        return ExpertOrder(order=order, before=before, after=after)
    return ExpertOrder(order=tuple(range(len(loads))), before=before, after=before)


def _over_nodes(loads: Sequence[float], ranks: int, nodes: int) -> Iterator[int]:
    """Experts on ranks, then ranks on nodes, whose networks get about equal loads, too."""
    on_ranks = pack(loads, ranks)
    totals = [math.fsum(loads[expert] for expert in one) for one in on_ranks]
    for node in pack(totals, nodes):
        for rank in node:
            yield from on_ranks[rank]


def _within_groups(loads: Sequence[float], experts: Experts, ranks: int, nodes: int) -> Iterator[int]:
    """Whole groups on ranks, or the ranks of a group; where neither divides, experts stay."""
    groups, size = experts.groups, experts.routed // experts.groups
    of_group = [range(first, first + size) for first in range(0, experts.routed, size)]
    totals = [math.fsum(loads[expert] for expert in one) for one in of_group]
    if groups % ranks == 0:
        for group in _over_nodes(totals, ranks, nodes):
            yield from of_group[group]
        return
    if ranks % groups:
        yield from range(experts.routed)
        return
    placed = pack(totals, nodes) if groups % nodes == 0 else (range(groups),)
    for group in (one for node in placed for one in node):
        for rank in pack([loads[expert] for expert in of_group[group]], ranks // groups):
            yield from (of_group[group][at] for at in rank)
