"""Bisections of networks that are narrower above, where they are known exactly. Pure.

**Trees.** Let each leaf switch have as many links to each spine switch above it, and each spine switch as many to each
of its core switches, one spine switch of each pod joining one set of core switches. For given halves of the nodes the
links that cross are a minimum over the sides of all switches. It is linear in how many of the switches of a set are on
one side, so that the minimum over halves has each set of core switches, and of two layers all spine switches, on one
side; and a pod's part is concave in how many sets are on one side, so that all of them are. So the parallel switches of
a set count as one, and the network as a tree, of which the best division is found from the leaves upwards.

**Dragonfly.** Let S be the switches of one side; nodes that are not at a switch of their own side each add a link. Of a
group of a switches, all joined, let m be on the side that has fewer. Moving them to the other m - a removes m (a - m)
links and adds at most m h to other groups and m p of nodes. So where a/2, rounded up, is h + p or more, whole groups
are best.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fireflyer.topology.fabrics.graph import Fabric

__all__ = ["dragonfly_bisection", "tree_bisection"]

MAX_NODES: Final = 1 << 16
"""Of a tree whose divisions are all compared: a second."""
Costs = NDArray[np.int64]
"""Fewest links that cross, by the number of nodes on the other side than the root."""
Ends = Mapping[int, Counter[int]]
"""Links of each node to switches."""


class _Leaf(NamedTuple):
    nodes: int
    uplinks: int


class _Pod(NamedTuple):
    leaves: tuple[_Leaf, ...]
    uplinks: int


def tree_bisection(fabric: Fabric, ends: Ends) -> int | None:
    """Fewest links between two halves of the nodes; None where the network is no such tree, or a larger one than
    65,536 nodes. All nodes have as many ports."""
    ports = ends[0].total()
    leaves = range(fabric.nodes, fabric.nodes + fabric.layers[0].count)
    if fabric.nodes > MAX_NODES or any(len(one) != 1 or min(one) not in leaves for one in ends.values()):
        return None
    up = _links_up(fabric)
    at = Counter(min(one) for one in ends.values())
    by_leaf = {leaf: _Leaf(at[leaf], up[leaf].total()) for leaf in leaves}
    half, other_half = fabric.nodes // 2, fabric.nodes - fabric.nodes // 2
    if len(fabric.layers) == 2:
        spines = range(leaves.stop, leaves.stop + fabric.layers[1].count)
        if not all(_evenly(up[leaf], spines) for leaf in leaves):
            return None
        parts = [_leaf_costs(one, ports) for one in by_leaf.values()]
    elif len(fabric.layers) == 3 and (pods := _pods(up, by_leaf)) is not None:
        known: dict[_Pod, Costs] = {}
        for pod in pods:
            if pod not in known:
                below = _merged([_leaf_costs(one, ports) for one in pod.leaves])
                known[pod] = np.minimum(below, below[::-1] + pod.uplinks)
        parts = [known[pod] for pod in pods]
    else:
        return None
    costs = _merged(parts, other_half)
    return int(min(costs[half], costs[other_half]))


def _links_up(fabric: Fabric) -> dict[int, Counter[int]]:
    """Of each switch to those of higher numbers."""
    first = fabric.nodes
    up: dict[int, Counter[int]] = {switch: Counter() for switch in range(first, first + fabric.switches)}
    for cable in fabric.cables:
        if cable.a >= first:
            up[cable.a][cable.b] += cable.links
    return up


def _evenly(links: Counter[int], switches: Iterable[int]) -> bool:
    """Whether it has as many links to each of these, and none to others."""
    return set(links) == set(switches) and len(set(links.values())) <= 1


def _pods(up: Mapping[int, Counter[int]], by_leaf: Mapping[int, _Leaf]) -> list[_Pod] | None:
    """Of a network of three layers; None where parallel switches differ."""
    members: dict[frozenset[int], list[_Leaf]] = {}
    for leaf, one in by_leaf.items():
        if not _evenly(up[leaf], up[leaf]):
            return None
        members.setdefault(frozenset(up[leaf]), []).append(one)
    owners = [spine for spines in members for spine in spines]
    if len(owners) != len(set(owners)):
        return None  # a spine switch of two pods
    sets: frozenset[frozenset[int]] | None = None
    found = []
    for spines, leaves in members.items():
        cores = [frozenset(up[spine]) for spine in spines]
        above = [up[spine].total() for spine in spines]
        if not all(_evenly(up[spine], up[spine]) for spine in spines) or len(set(above)) > 1:
            return None
        if len(set(cores)) != len(cores) or any(one & other for one, other in combinations(set(cores), 2)):
            return None
        if sets is not None and sets != frozenset(cores):
            return None
        sets = frozenset(cores)
        found.append(_Pod(tuple(sorted(leaves)), sum(above)))
    return found


def _leaf_costs(leaf: _Leaf, ports: int) -> Costs:
    away = np.arange(leaf.nodes + 1) * ports
    found: Costs = np.minimum(away, away[::-1] + leaf.uplinks)
    return found


def _merged(parts: Sequence[Costs], most: int | None = None) -> Costs:
    """Of several beside each other under one root, up to so many nodes."""
    found: Costs = np.zeros(1, np.int64)
    for part in parts:
        size = len(found) + len(part) - 1
        after = np.full(size, np.iinfo(np.int64).max)
        for count, cost in enumerate(part.tolist()):
            np.minimum(after[count : count + len(found)], found + cost, out=after[count : count + len(found)])
        found = after if most is None else after[: most + 1]
    return found


class _Groups(NamedTuple):
    """Of a Dragonfly."""

    groups: int
    switches: int
    """Of a group."""
    global_links: int
    """Of a switch, at most."""
    joined: int
    """Links between two groups."""


def dragonfly_bisection(fabric: Fabric, ends: Ends) -> int | None:
    """Fewest links between two halves of the nodes, which have one port each; None where the network is no Dragonfly,
    or its groups are too small to be whole in the best division."""
    if len(fabric.layers) != 1 or any(one.total() != 1 for one in ends.values()):
        return None
    at = Counter(min(one) for one in ends.values())
    of_switch = {at[switch] for switch in range(fabric.nodes, fabric.nodes + fabric.switches)}
    found = _groups(fabric)
    if found is None or len(of_switch) != 1:
        return None
    nodes = of_switch.pop()
    if (found.switches + 1) // 2 < found.global_links + nodes:
        return None
    return min(
        found.joined * whole * (found.groups - whole) + abs(found.switches * nodes * whole - half)
        for whole in range(found.groups + 1)
        for half in (fabric.nodes // 2, fabric.nodes - fabric.nodes // 2)
    )


def _groups(fabric: Fabric) -> _Groups | None:
    """Switches that follow one another and are all joined, and as many links between each two of these groups; None:
    there are no such groups."""
    first = fabric.nodes
    near: list[Counter[int]] = [Counter() for _ in range(fabric.switches)]
    for cable in fabric.cables:
        if cable.a >= first:
            low, high = cable.a - first, cable.b - first
            near[low][high] += cable.links
            near[high][low] += cable.links
    size = next((at for at in range(1, len(near)) if any(near[at][other] == 0 for other in range(at))), len(near))
    count = len(near) // size
    if count < 2 or len(near) % size:
        return None
    between: Counter[tuple[int, int]] = Counter()
    most = 0
    for switch, links in enumerate(near):
        own = switch // size
        if any(links[other] == 0 for other in range(own * size, (own + 1) * size) if other != switch):
            return None
        leaving = {other: number for other, number in links.items() if other // size != own}
        most = max(most, sum(leaving.values()))
        for other, number in leaving.items():
            between[own, other // size] += number
    if len(between) != count * (count - 1) or len(set(between.values())) != 1:
        return None
    return _Groups(count, size, most, between[0, 1])
