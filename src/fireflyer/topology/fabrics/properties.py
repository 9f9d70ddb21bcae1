"""What a fabric can do, from its graph: distances, disjoint paths, and cuts. Pure.

Bandwidths are links, of `Fabric.link_bytes_per_s` in each direction. Nodes do not forward: a path goes through
switches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from itertools import pairwise
from typing import Final, NamedTuple

from fireflyer.base.errors import UsageError
from fireflyer.topology.fabrics.graph import Fabric

__all__ = ["Bisection", "bisection", "diameter", "disjoint_paths", "links_across"]

MAX_WORK: Final = 20_000_000
"""Switches times cables that `diameter` looks at; a network of 1,000 switches needs as much."""


class Bisection(NamedTuple):
    """Links between two halves of the nodes, in the worst division: not more than `links`; exactly so many where
    `exact`."""

    links: int
    exact: bool


def diameter(fabric: Fabric) -> int | None:
    """Most switches on a shortest path between two nodes; None where some nodes cannot reach each other. Raises
    `UsageError` for a fabric that is too large to look at all pairs."""
    near = _switch_neighbours(fabric)
    if len(near) * max(1, len(fabric.cables)) > MAX_WORK:
        raise UsageError(f"{fabric.name}: {len(near)} switches are too many to look at all pairs of them")
    ends: dict[int, list[int]] = {}
    for cable in fabric.cables:
        if cable.a < fabric.nodes:
            ends.setdefault(cable.a, []).append(cable.b - fabric.nodes)
    places = set(map(tuple, ends.values()))
    most = 0
    for start in places:
        distance = _distances(near, start)
        for place in places:
            reached = [distance[switch] for switch in place if distance[switch] >= 0]
            if not reached:
                return None
            most = max(most, min(reached) + 1)
    return most


def _switch_neighbours(fabric: Fabric) -> list[list[int]]:
    near: list[list[int]] = [[] for _ in range(fabric.switches)]
    for cable in fabric.cables:
        if cable.a >= fabric.nodes:
            near[cable.a - fabric.nodes].append(cable.b - fabric.nodes)
            near[cable.b - fabric.nodes].append(cable.a - fabric.nodes)
    return near


def _distances(near: list[list[int]], starts: Collection[int]) -> list[int]:
    """Links from the nearest of `starts`; -1: not reached."""
    found = [-1] * len(near)
    for start in starts:
        found[start] = 0
    queue = deque(starts)
    while queue:
        at = queue.popleft()
        for other in near[at]:
            if found[other] < 0:
                found[other] = found[at] + 1
                queue.append(other)
    return found


def disjoint_paths(fabric: Fabric, a: int, b: int) -> int:
    """Paths between two vertices (nodes or switches) of which no two share a link: one fewer links may die before the
    pair is cut. By augmenting paths (Ford and Fulkerson), each of which is a path more. Raises `UsageError`."""
    if a == b or not (0 <= a < fabric.nodes + fabric.switches) or not (0 <= b < fabric.nodes + fabric.switches):
        raise UsageError(f"{fabric.name} has no pair of vertices {a} and {b}")
    free: list[dict[int, int]] = [{} for _ in range(fabric.nodes + fabric.switches)]
    for cable in fabric.cables:
        if cable.a >= fabric.nodes or cable.a in (a, b):  # other nodes do not forward
            free[cable.a][cable.b] = free[cable.b][cable.a] = cable.links
    found = 0
    while (path := _augmenting(free, a, b)) is not None:
        for low, high in pairwise(path):
            free[low][high] -= 1
            free[high][low] += 1
        found += 1
    return found


def _augmenting(free: list[dict[int, int]], a: int, b: int) -> list[int] | None:
    before = {a: a}
    queue = deque([a])
    while queue:
        at = queue.popleft()
        for other, links in free[at].items():
            if links > 0 and other not in before:
                before[other] = at
                if other == b:
                    path = [b]
                    while path[-1] != a:
                        path.append(before[path[-1]])
                    return path[::-1]
                queue.append(other)
    return None


def links_across(fabric: Fabric, side: Collection[int]) -> int:
    """Links between the vertices of `side` and all others."""
    inside = set(side)
    return sum(cable.links for cable in fabric.cables if (cable.a in inside) != (cable.b in inside))


def bisection(fabric: Fabric) -> Bisection:
    """Of the nodes in the order of their switches, the first half against the second, each switch above on the side
    where fewer of its links cross. Exact for a full two-layer tree with an even number of leaf switches and as many
    uplinks as nodes; elsewhere a division that nobody has shown to be the worst."""
    by_switch: dict[int, list[int]] = {}
    for cable in fabric.cables:
        if cable.a < fabric.nodes:
            by_switch.setdefault(cable.b, []).append(cable.a)
    order = list(dict.fromkeys(node for switch in sorted(by_switch) for node in by_switch[switch]))
    side = set(order[: len(order) // 2])
    free = list(range(fabric.nodes, fabric.nodes + fabric.switches))
    near: dict[int, list[tuple[int, int]]] = {vertex: [] for vertex in range(fabric.nodes + fabric.switches)}
    for cable in fabric.cables:
        near[cable.a].append((cable.b, cable.links))
        near[cable.b].append((cable.a, cable.links))
    undecided = set(free)
    for vertex in free:  # from the leaf switches upwards: what is below is decided already
        inside = sum(links for other, links in near[vertex] if other in side)
        outside = sum(links for other, links in near[vertex] if other not in side and other not in undecided)
        undecided.discard(vertex)
        if inside > outside:
            side.add(vertex)
    names = [layer.name for layer in fabric.layers]
    leaf = fabric.layers[0]
    full = names == ["leaf", "spine"] and leaf.count % 2 == 0 and fabric.endpoints == leaf.count * (leaf.radix // 2)
    exact = full and fabric.endpoints == fabric.links and fabric.endpoints == fabric.nodes
    return Bisection(links_across(fabric, side), exact)
