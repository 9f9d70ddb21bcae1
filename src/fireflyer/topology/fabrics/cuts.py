"""Which links may fail before two vertices of a fabric are cut off from each other. Pure.

By the largest flow between them with one unit on each link (Ford and Fulkerson): as many paths that share no link, and
by the theorem of the largest flow and the smallest cut as many links that cut them off. Nodes do not forward: a path
goes through switches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from itertools import pairwise
from typing import NamedTuple

from fireflyer.base.errors import UsageError
from fireflyer.topology.fabrics.graph import Cable, Fabric

__all__ = ["Cut", "disjoint_paths", "links_across", "minimum_cut"]


class Cut(NamedTuple):
    """Cables whose failure, of all their links, cuts one vertex off from another: with the fewest links."""

    cables: tuple[Cable, ...]
    """Cables of the cut; where several cuts have as few links, those nearest to the first vertex."""
    side: int
    """Vertices that the first one still reaches, itself included."""

    @property
    def links(self) -> int:
        return sum(cable.links for cable in self.cables)


def disjoint_paths(fabric: Fabric, a: int, b: int) -> int:
    """Paths between two vertices (nodes or switches) of which no two share a link: one fewer links may fail before the
    pair is cut off from each other. Raises `UsageError`."""
    return _largest_flow(fabric, a, b)[0]


def minimum_cut(fabric: Fabric, a: int, b: int) -> Cut:
    """Fewest links without which vertex `a` does not reach vertex `b`. Raises `UsageError`."""
    _, free = _largest_flow(fabric, a, b)
    before = _reached(free, a)
    across = [
        cable
        for cable in fabric.cables
        if (cable.a in before) != (cable.b in before) and cable.b in free[cable.a]  # not those of other nodes
    ]
    return Cut(tuple(across), len(before))


def links_across(fabric: Fabric, side: Collection[int]) -> int:
    """Links between the vertices of `side` and all others."""
    inside = set(side)
    return sum(cable.links for cable in fabric.cables if (cable.a in inside) != (cable.b in inside))


def _largest_flow(fabric: Fabric, a: int, b: int) -> tuple[int, list[dict[int, int]]]:
    """Its size, and links that are left from each vertex to each other one."""
    nodes = fabric.nodes
    vertices = nodes + fabric.switches
    if a == b or not 0 <= a < vertices or not 0 <= b < vertices:
        raise UsageError(f"{fabric.name} has no pair of vertices {a} and {b}")
    free: list[dict[int, int]] = [{} for _ in range(vertices)]
    for cable in fabric.cables:
        if cable.a >= nodes or cable.a in (a, b):  # other nodes do not forward
            links = free[cable.a].get(cable.b, 0) + cable.links
            free[cable.a][cable.b] = free[cable.b][cable.a] = links
    found = 0
    while b in (before := _reached(free, a, until=b)):
        path = [b]
        while path[-1] != a:
            path.append(before[path[-1]])
        for high, low in pairwise(path):
            free[low][high] -= 1
            free[high][low] += 1
        found += 1
    return found, free


def _reached(free: list[dict[int, int]], a: int, until: int | None = None) -> dict[int, int]:
    """Vertices that links which are left lead to, each with the one before it."""
    before = {a: a}
    queue = deque([a])
    while queue:
        at = queue.popleft()
        for other, links in free[at].items():
            if links > 0 and other not in before:
                before[other] = at
                if other == until:
                    return before
                queue.append(other)
    return before
