"""`Links`: the directed links of a fabric, numbered, and the ways through it. Pure."""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fireflyer.base.errors import UsageError
from fireflyer.topology.fabrics import Fabric

__all__ = ["Hop", "Links"]

_UNREACHED: Final = 1 << 30


class Hop(NamedTuple):
    """A directed link to a vertex."""

    link: int
    to: int


class Links:
    """Directed links of a fabric: those of a cable from its lower to its upper vertex first, then back. Links of
    `failed` keep their numbers, and no way leads over them. Raises `UsageError` where one direction alone fails."""

    def __init__(self, fabric: Fabric, failed: frozenset[int] = frozenset()) -> None:
        self.fabric = fabric
        self._nodes = fabric.nodes  # which adds up groups
        self.hops: list[list[Hop]] = [[] for _ in range(fabric.nodes + fabric.switches)]
        self.ends: list[tuple[int, int]] = []
        self._reverse: list[int] = []
        for cable in fabric.cables:
            first = len(self.ends)
            for low, high, back in ((cable.a, cable.b, cable.links), (cable.b, cable.a, -cable.links)):
                for _ in range(cable.links):
                    if len(self.ends) not in failed:
                        self.hops[low].append(Hop(len(self.ends), high))
                    self._reverse.append(len(self.ends) + back)
                    self.ends.append((low, high))
            for link in range(first, first + cable.links):
                if (link in failed) != (link + cable.links in failed):
                    raise UsageError(
                        f"link {link} fails in one direction only; let link {self._reverse[link]} fail, too"
                    )
        self._switches_of = [tuple(sorted({hop.to for hop in self.hops[node]})) for node in range(fabric.nodes)]
        self._distances: dict[tuple[int, ...], list[int]] = {}
        self._next: dict[tuple[int, tuple[int, ...]], list[Hop]] = {}
        self._last: dict[tuple[int, int], list[Hop]] = {}

    @property
    def capacities(self) -> NDArray[np.float64]:
        """Bytes per second of each link."""
        ways = [2 * cable.links for cable in self.fabric.cables]
        return np.repeat(np.array(self.fabric.cable_rates(), np.float64), ways)

    def reverse(self, link: int) -> int:
        """The link of the same cable that leads back."""
        return self._reverse[link]

    def between(self, a: int, b: int) -> list[int]:
        """Links from vertex `a` to vertex `b`."""
        return [hop.link for hop in self.hops[a] if hop.to == b]

    def switches_of(self, node: int) -> tuple[int, ...]:
        """Switches at the other ends of its links."""
        return self._switches_of[node]

    def next_hops(self, at: int, target: int) -> list[Hop]:
        """Links on shortest paths from a vertex to node `target`, another vertex; nodes on the way do not forward."""
        starts = self._switches_of[target]
        if at >= self._nodes and self._distance(target)[at] == 0:
            if (at, target) not in self._last:
                self._last[at, target] = [hop for hop in self.hops[at] if hop.to == target]
            return self._last[at, target]
        if (at, starts) not in self._next:
            distance = self._distance(target)
            onwards = [hop for hop in self.hops[at] if hop.to >= self._nodes]
            least = min((distance[hop.to] for hop in onwards), default=_UNREACHED)
            self._next[at, starts] = [hop for hop in onwards if distance[hop.to] == least]
        return self._next[at, starts]

    def hop_count(self, source: int, target: int) -> int | None:
        """Links of a shortest path between two nodes; None: there is none."""
        if source == target:
            return 0
        distance = self._distance(target)
        least = min((distance[switch] for switch in self._switches_of[source]), default=_UNREACHED)
        return None if least >= _UNREACHED else least + 2

    def _distance(self, target: int) -> list[int]:
        """Links to a switch of node `target` from each switch; kept for all nodes at the same switches."""
        starts = self._switches_of[target]
        found = self._distances.get(starts)
        if found is None:
            found = [_UNREACHED] * len(self.hops)
            for start in starts:
                found[start] = 0
            queue = deque(starts)
            while queue:
                at = queue.popleft()
                for hop in self.hops[at]:  # each link has one back
                    if hop.to >= self._nodes and found[hop.to] == _UNREACHED:
                        found[hop.to] = found[at] + 1
                        queue.append(hop.to)
            self._distances[starts] = found
        return found
