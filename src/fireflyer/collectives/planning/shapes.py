"""What an algorithm between nodes does to them: how far a chunk travels, and what the busiest node does for it. Pure.

A `Shape` says what one chunk in each of the two lanes costs. For the tree it is counted on the trees of the layout
(those that cross zones by one pair of nodes, `topology.two_zone`), for the other algorithms computed: ring, line, and
halving and doubling of R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in
MPICH", IJHPCA 19 (2005), in the nodes' order by zone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from fireflyer.base.errors import UsageError
from fireflyer.collectives.planning.plan import HALVING_DOUBLING, RING, SUITABLE, TREE
from fireflyer.collectives.planning.trees import double_binary_tree
from fireflyer.topology import zone_trees

__all__ = ["ROUND_TRIPS", "Shape", "shape_of"]

ROUND_TRIPS = ("allreduce", "barrier")
"""What every node sends comes back to it."""


class Shape(NamedTuple):
    """What one chunk in each of the two lanes costs. Bytes are in units of the chunk."""

    hops: int
    """Messages one after the other on the longest way of a chunk."""
    cross_hops: int
    """Those of them between zones."""
    trip: float
    """Bytes for which a chunk waits on that way."""
    trip_added: float
    """Bytes of operands that are added on that way."""
    traffic: float
    """Bytes that the busiest node sends, or receives."""
    messages: int
    """That the busiest node sends and receives."""
    added: float
    """Bytes of operands that the busiest node adds."""
    crossing: float
    """Bytes between two zones in one direction."""
    held: float = 1.0
    """Share of the trip for which a node keeps a slot."""


def shape_of(kind: str, algorithm: str, zones: tuple[int, ...]) -> Shape:
    """Of an algorithm over nodes in these zones. Raises `UsageError` for a kind that it cannot do."""
    if algorithm not in SUITABLE.get(kind, ()):
        raise UsageError(f"{kind!r} cannot be done by {algorithm!r}")
    if algorithm == TREE:
        return _tree_shape(kind, zones)
    if algorithm == HALVING_DOUBLING:
        return _halving_shape(zones)
    return _ring_shape(kind, zones) if algorithm == RING else _line_shape(kind, zones)


@lru_cache(maxsize=256)
def _tree_shape(kind: str, zones: tuple[int, ...]) -> Shape:
    trees = zone_trees(zones, double_binary_tree)
    nodes = range(len(zones))
    sent, children, added = [0] * len(zones), [0] * len(zones), [0] * len(zones)
    hops = cross_hops = crossing = fan = 0
    for tree in trees:
        below = [0] * len(zones)
        for node in nodes:
            if tree[node] >= 0:
                below[tree[node]] += 1
        fan = max(fan, *below)
        for node in nodes:
            sent[node] += tree[node] >= 0
            children[node] += below[node]
            added[node] += below[node] + 1 if below[node] else 0
        way = [_way_up(tree, zones, node) for node in nodes]
        hops = max(hops, max(length for length, _ in way))
        cross_hops = max(cross_hops, max(crossed for _, crossed in way))
        crossing += cross_hops > 0
    both = kind in ROUND_TRIPS
    edges = [sent[node] + children[node] for node in nodes]
    return Shape(
        hops=2 * hops if both else hops,
        cross_hops=2 * cross_hops if both else cross_hops,
        trip=float(fan * hops * (2 if both else 1)),
        trip_added=0.0 if kind == "broadcast" else float((fan + 1) * hops),
        traffic=float(max(edges) if both else max(*sent, *children)),
        messages=2 * max(edges) if both else max(edges),
        added=0.0 if kind == "broadcast" else float(max(added)),
        crossing=float(crossing),
        held=1.0 if both or not hops else 1 / hops,
    )


def _way_up(tree: Sequence[int], zones: Sequence[int], node: int) -> tuple[int, int]:
    """Hops from a node to the root, and those of them between zones."""
    hops = crossed = 0
    while tree[node] >= 0:
        crossed += zones[node] != zones[tree[node]]
        node = tree[node]
        hops += 1
    return hops, crossed


@lru_cache(maxsize=256)
def _ring_shape(kind: str, zones: tuple[int, ...]) -> Shape:
    """Blocks of 1/n of a chunk go round once to be summed and once to be told."""
    nodes, rounds = len(zones), 2 if kind in ROUND_TRIPS else 1
    share = rounds * (nodes - 1) / nodes
    crossing = len(set(zones)) > 1
    hops = rounds * (nodes - 1)
    return Shape(
        hops=hops,
        cross_hops=rounds * min(nodes - 1, len(set(zones))) if crossing else 0,
        trip=share,
        trip_added=0.0 if kind == "allgather" else 2 * (nodes - 1) / nodes,
        traffic=2 * share,
        messages=4 * hops,
        added=0.0 if kind == "allgather" else 4 * (nodes - 1) / nodes,
        crossing=2 * share if crossing else 0.0,
    )


@lru_cache(maxsize=256)
def _line_shape(kind: str, zones: tuple[int, ...]) -> Shape:
    """Blocks of 1/n of a chunk go to their nodes from both ends to be summed, and to both ends to be told. A node that
    is no end passes on as much as in a ring, and gets its own block from, or gives it to, both sides."""
    nodes, rounds = len(zones), 2 if kind in ROUND_TRIPS else 1
    ordered = sorted(zones)
    cuts = [place for place in range(1, nodes) if ordered[place - 1] != ordered[place]]
    larger = max((max(place, nodes - place) for place in cuts), default=0)
    inner, summed = nodes > 2, kind != "allgather"
    both_ways = (nodes - 1) // 2  # rounds in which some node sends to both sides, for which its messages wait
    moved = (2 * nodes if rounds == 2 else nodes + 1) if inner else rounds
    return Shape(
        hops=rounds * (nodes - 1 - -2 * both_ways // 5),
        cross_hops=rounds * len(cuts),
        trip=rounds * (nodes - 1 + both_ways) / nodes,
        trip_added=(4.0 if inner else 1.0) * summed,
        traffic=2 * moved / nodes,
        messages=rounds * (5 * nodes if inner else 4),  # a quarter on top: most come late, when both sides send
        added=(4 * (nodes + 1) / nodes if inner else 2.0) * summed,
        crossing=(2.0 if rounds == 2 else 2 * larger / nodes) if cuts else 0.0,
    )


@lru_cache(maxsize=256)
def _halving_shape(zones: tuple[int, ...]) -> Shape:
    """Halves with the farthest partner first; the nodes beyond a power of two give their chunk to the node before them,
    and get the result from it."""
    nodes = len(zones)
    levels = nodes.bit_length() - 1
    power = 1 << levels
    rest = nodes > power
    share = 2 * (1 - 1 / power)
    ordered = sorted(zones)
    pairs = [(ordered[2 * pair], ordered[2 * pair + 1]) for pair in range(nodes - power)]
    outside = sum(even != odd for even, odd in pairs)
    inside = [even for even, _ in pairs] + ordered[2 * len(pairs) :]
    crossing = float(outside)
    crossed_levels = 0
    for level in range(levels):
        distance = power >> (level + 1)
        out = sum(inside[node] != inside[node ^ distance] for node in range(power)) / 2  # in one direction
        crossing += 2 * out / (1 << (level + 1))
        crossed_levels += out > 0
    return Shape(
        hops=2 * levels + 2 * rest,
        cross_hops=2 * crossed_levels + 2 * (outside > 0),
        trip=share + 4 * rest,  # the lanes meet at the node that takes in another
        trip_added=share + 2 * rest,
        traffic=2 * (share + rest),
        messages=2 * (4 * levels + 2 * rest),
        added=2 * (share + 2 * rest),
        crossing=2 * crossing,
    )
