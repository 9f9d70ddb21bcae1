"""The two-zone network: which node is where, and trees that cross between zones by one pair of nodes. Pure.

The paper's cluster (section III) is two fat-trees of about 600 nodes each, joined by a limited number of links; a job
that spans both must talk across by one pair of nodes only. More zones than two are a chain here, in ascending order.

**Renumbering is not enough.** In the double binary tree, an edge cuts off a set of nodes whose size depends on the
shape alone (in the first tree 2^k - 1, or what remains at the end), and both trees must cut off the same set. Unless a
zone has a single node, no order of the nodes achieves that; tests/property/collectives/test_two_zone.py tries them all.

**Both trees by the same pair.** If both trees cross by the pair (u, v) alone, and a zone has other nodes than u, then u
is inner in both trees: as a leaf its only edge would be the crossing, and the rest of its zone would be cut off. So the
property "a leaf in one of the two trees" must be given up for the pair. It was wanted for balance, and balance can be
kept: give u one edge into its own zone in each tree. Then u has 2 + 2 edges, as any other node has 3 + 1, and sends and
receives no more than it. Each zone is

    gateway -- root of the double binary tree over all other nodes of the zone

in both trees, and the roots have room for that edge, because the root of the in-order tree has one child only. In a
zone with two neighbours a second gateway hangs at the same roots.

Lost: at most one more hop on the longest way (two zones; three for each further one), and the gateways forward in
both trees. Kept: the two trees together give no node more than 4 edges, so that no node sends or receives more than
twice the array (5 edges for one node of a zone between two others, when the number of its inner nodes is odd).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from fireflyer.base.errors import UsageError

__all__ = ["Crossings", "count_crossings", "pairs_across", "words_of_pairs", "zone_order", "zone_trees"]
__all__ += ["zones_of_hosts"]

Parents = tuple[int, ...]
"""The parent of each node, -1 at the root."""
Edge = tuple[int, int]


class Crossings(NamedTuple):
    """Edges between zones, as pairs of nodes in ascending order."""

    of_trees: tuple[tuple[Edge, ...], ...]
    """Edges between zones of each tree, by tree."""
    pairs: tuple[Edge, ...]
    """All of them, each once: the pairs of nodes that talk across."""

    def __str__(self) -> str:
        return words_of_pairs(self.pairs)


def words_of_pairs(pairs: Sequence[Edge]) -> str:
    """`1 pair of nodes talks across zones: 0-12`"""
    if not pairs:
        return "no pair of nodes talks across zones"
    shown = ", ".join(f"{a}-{b}" for a, b in pairs[:8]) + (", ..." if len(pairs) > 8 else "")
    noun = "pair of nodes talks" if len(pairs) == 1 else "pairs of nodes talk"
    return f"{len(pairs)} {noun} across zones: {shown}"


def zones_of_hosts(hosts: Sequence[str], zone_of_host: Mapping[str, int]) -> tuple[int, ...]:
    """The zone of each node of a job. Raises `UsageError` for a host that the table lacks."""
    missing = [host for host in hosts if host not in zone_of_host]
    if missing:
        raise UsageError(f"host {missing[0]!r} has no zone; the table of zones must name every host of the job")
    return tuple(zone_of_host[host] for host in hosts)


def zone_order(zones: Sequence[int]) -> tuple[int, ...]:
    """The nodes sorted by zone: the order for a line, which crosses by the pairs of nodes that `zone_trees` crosses by,
    for a ring, which has one pair more, and for halving."""
    members = _members(zones)
    order: list[int] = []
    for place, nodes in enumerate(members):
        gateways, inner = _gateways(nodes, _gates(place, len(members)))
        if place == 0 and len(members) > 1:
            order += [*inner, *gateways]
        else:
            order += [*gateways[:1], *inner, *gateways[1:]]
    return tuple(order)


def pairs_across(pairs: Iterable[Edge], zones: Sequence[int]) -> tuple[Edge, ...]:
    """Pairs of different zones, each once and in ascending order."""
    return tuple(sorted({(min(a, b), max(a, b)) for a, b in pairs if zones[a] != zones[b]}))


def count_crossings(trees: Sequence[Parents], zones: Sequence[int]) -> Crossings:
    """The edges of the trees whose ends lie in different zones."""
    of_trees = [
        pairs_across(((node, parent) for node, parent in enumerate(parents) if parent >= 0), zones) for parents in trees
    ]
    return Crossings(tuple(of_trees), tuple(sorted({edge for edges in of_trees for edge in edges})))


def zone_trees(zones: Sequence[int], double_tree: Callable[[int], tuple[Parents, Parents]]) -> tuple[Parents, Parents]:
    """Two trees over the nodes that cross between neighbouring zones by one pair of nodes, the same in both trees.

    `zones[n]` is the zone of node n, `double_tree` the double binary tree over any number of nodes
    (`fireflyer.collectives.double_binary_tree`, from which nodes of a single zone get exactly that). Raises
    `UsageError` for no nodes.
    """
    if not zones:
        raise UsageError("a tree needs at least 1 node, not 0")
    members = _members(zones)
    if len(members) == 1:
        return double_tree(len(zones))
    first, second = (_joined(members, tree, double_tree) for tree in (0, 1))
    return first, second


def _members(zones: Sequence[int]) -> list[list[int]]:
    """The nodes of each zone."""
    return [[node for node in range(len(zones)) if zones[node] == zone] for zone in sorted(set(zones))]


def _gates(place: int, zones: int) -> int:
    """How many nodes of a zone talk to others: zones are a chain."""
    return 1 if place in (0, zones - 1) else 2


def _joined(
    members: Sequence[Sequence[int]], tree: int, double_tree: Callable[[int], tuple[Parents, Parents]]
) -> Parents:
    """One of the two trees over all zones, hung up at the gateway that makes it least deep."""
    edges: list[Edge] = []
    ends: list[tuple[int, int]] = []
    for place, nodes in enumerate(members):
        gateways, inner = _gateways(nodes, _gates(place, len(members)))
        ends.append((gateways[0], gateways[-1]))
        if inner:
            parents = double_tree(len(inner))[tree]
            edges += [(inner[at], inner[above]) for at, above in enumerate(parents) if above >= 0]
            edges += [(gateway, inner[parents.index(-1)]) for gateway in gateways]
        elif len(gateways) == 2:
            edges.append((gateways[0], gateways[1]))
    edges += [(ends[place][1], ends[place + 1][0]) for place in range(len(members) - 1)]
    hung = [_hung_up(edges, gateway) for gateway in dict.fromkeys(end for pair in ends for end in pair)]
    return min(hung, key=lambda tree: tree[1])[0]


def _gateways(nodes: Sequence[int], count: int) -> tuple[Sequence[int], Sequence[int]]:
    """The first nodes of a zone, and the rest; a zone of one node is its own gateway on both sides."""
    count = min(count, len(nodes))
    return nodes[:count], nodes[count:]


def _hung_up(edges: Sequence[Edge], root: int) -> tuple[Parents, int]:
    """The parents, and the depth."""
    near: list[list[int]] = [[] for _ in range(len(edges) + 1)]
    for a, b in edges:
        near[a].append(b)
        near[b].append(a)
    parents = [-1] * len(near)
    depths = [0] * len(near)
    queue = [root]
    for node in queue:
        for other in near[node]:
            if other != parents[node]:
                parents[other] = node
                depths[other] = depths[node] + 1
                queue.append(other)
    return tuple(parents), depths[queue[-1]]
