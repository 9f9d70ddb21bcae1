"""Which pairs of nodes of a plan talk across zones, for each of its algorithms. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from fireflyer.collectives.planning.plan import ALGORITHMS, LINE, RING, TREE, Plan
from fireflyer.collectives.planning.programs import LANES, program_of
from fireflyer.topology import count_crossings, pairs_across

__all__ = ["crossings"]

_Pair = tuple[int, int]


def crossings(plan: Plan, zones: Sequence[int]) -> dict[str, tuple[_Pair, ...]]:
    """Algorithm → pairs of nodes of different zones that exchange messages, each in ascending order; of the algorithms
    that the plan has a route for. `zones[n]` is the zone of node n."""
    used = {route.algorithm for route in plan.all_routes()}
    return {algorithm: _pairs(plan, algorithm, zones) for algorithm in ALGORITHMS if algorithm in used}


def _pairs(plan: Plan, algorithm: str, zones: Sequence[int]) -> tuple[_Pair, ...]:
    if algorithm == TREE:
        return count_crossings(plan.trees, zones).pairs
    return pairs_across(_neighbours(plan, algorithm), zones)


def _neighbours(plan: Plan, algorithm: str) -> Iterable[_Pair]:
    order = plan.order
    if algorithm == LINE:
        return itertools.pairwise(order)
    if algorithm == RING:
        return zip(order, (*order[1:], order[0]), strict=True)
    return (
        (node, step.peer)
        for node in range(plan.nodes)
        for lane in LANES
        for step in program_of(plan, "allreduce", algorithm, lane, node).steps
        if step.peer >= 0
    )
