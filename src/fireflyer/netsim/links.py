"""`Links`: the directed links of a fabric, numbered, and the ways through it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fireflyer.base.errors import UsageError
from fireflyer.netsim.distances import UNREACHED, Adjacency
from fireflyer.topology.fabrics import Fabric
from fireflyer.topology.fabrics.inside import INSIDE_LAYERS

__all__ = ["Hop", "Links"]

_NOWHERE: Final[frozenset[int]] = frozenset()


class Hop(NamedTuple):
    """A directed link to a vertex."""

    link: int
    to: int


class _Ways(NamedTuple):
    """To a node, of links from each switch to the nearest one of its own switches."""

    entries: tuple[tuple[int, int], ...]
    """Switches of the network from which its node is entered, and links from each to a switch of the target; of a node
    that is one vertex, its own switches with 0."""
    outside: Sequence[int]
    """From each switch over one of the entries."""
    inside: dict[int, int]
    """From switches of the same opened node, without leaving it."""
    around: frozenset[int]
    """All that a link joins with the opened node."""

    def of(self, switch: int) -> int:
        return min(self.outside[switch], self.inside.get(switch, UNREACHED))


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
        inside = sum(layer.count for layer in fabric.layers if layer.name in INSIDE_LAYERS)
        self._network = fabric.nodes + inside
        """The first switch that is of no node."""
        self._ways: dict[tuple[int, ...], _Ways] = {}
        self._entries: dict[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]] = {}
        self._around: dict[tuple[int, ...], frozenset[int]] = {}
        """Of an opened node, by its switches."""
        self._next: dict[tuple[int, tuple[int, ...] | tuple[tuple[int, int], ...]], list[Hop]] = {}
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
        ways = self._ways_to(target)
        if at >= self._nodes and ways.of(at) == 0:
            if (at, target) not in self._last:
                self._last[at, target] = [hop for hop in self.hops[at] if hop.to == target]
            return self._last[at, target]
        # Away from the target's node its ways are those of all targets with the same entries.
        near = at in ways.around
        key = (at, self._switches_of[target] if near else ways.entries)
        if key not in self._next:
            onwards = [hop for hop in self.hops[at] if hop.to >= self._nodes]
            links = [ways.of(hop.to) if near else ways.outside[hop.to] for hop in onwards]
            least = min(links, default=UNREACHED)
            self._next[key] = [hop for hop, count in zip(onwards, links, strict=True) if count == least]
        return self._next[key]

    def hop_count(self, source: int, target: int) -> int | None:
        """Links of a shortest path between two nodes; None: there is none."""
        if source == target:
            return 0
        ways = self._ways_to(target)
        least = min((ways.of(switch) for switch in self._switches_of[source]), default=UNREACHED)
        return None if least >= UNREACHED else least + 2

    @cached_property
    def _adjacency(self) -> Adjacency:
        return Adjacency([[hop.to for hop in hops] for hops in self.hops], self._nodes)

    def _ways_to(self, target: int) -> _Ways:
        """Kept for all nodes at the same switches. Each GPU of an opened node is at switches of its own, and all of one
        node that are alike enter it from the same switches: what lies beyond is found once for these."""
        starts = self._switches_of[target]
        found = self._ways.get(starts)
        if found is None:
            inside, entries = self._inside(starts)
            entries = self._entries.setdefault(entries, entries)  # one tuple for all
            around = self._around_of(inside) if inside else _NOWHERE
            found = self._ways[starts] = _Ways(entries, self._adjacency.distances(entries), inside, around)
        return found

    def _inside(self, starts: Sequence[int]) -> tuple[dict[int, int], tuple[tuple[int, int], ...]]:
        """Links from each switch of the same opened node to one of `starts`, and where the node is entered."""
        found = {start: 0 for start in starts if start < self._network}
        entries = {start: 0 for start in starts if start >= self._network}
        frontier = list(found)
        while frontier:
            after = []
            for at in frontier:
                for hop in self.hops[at]:  # each link has one back
                    if self._nodes <= hop.to < self._network and hop.to not in found:
                        found[hop.to] = found[at] + 1
                        after.append(hop.to)
                    elif hop.to >= self._network:
                        entries.setdefault(hop.to, found[at] + 1)
            frontier = after
        return found, tuple(sorted(entries.items()))

    def _around_of(self, inside: dict[int, int]) -> frozenset[int]:
        switches = tuple(sorted(inside))
        if switches not in self._around:
            self._around[switches] = frozenset(inside).union(hop.to for at in inside for hop in self.hops[at])
        return self._around[switches]
