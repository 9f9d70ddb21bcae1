"""`NodeFabric`: the inside of a node as a graph: GPUs, PCIe bridges, sockets, memories, processors, NICs. Pure.

A wire is two links, one in each direction, or one link that both directions share: a host bridge of a Rome processor
has 37.5 GB/s for both together, and memory has one bandwidth for reads and writes. Routes are the shortest ones by the
lengths of wires; of several with the same length each carries as much, which is what a bond of NICs does. What devices
(GPUs and the network) write to each other through a socket may have a limit of its own (peer to peer without chained
writes).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from heapq import heappop, heappush
from typing import NamedTuple

import msgspec

from fireflyer.base.errors import UsageError

__all__ = ["NodeFabric", "Path", "Wire"]


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """Joins two vertices by name."""

    a: str
    b: str
    bytes_per_s: float
    """In each direction, or of both together where `shared`."""
    shared: bool = False
    length: int = 1
    """In the choice of ways; 1 or more."""


class Path(NamedTuple):
    """The links that a transfer uses, and the bytes on each for one byte of the transfer."""

    links: tuple[int, ...]
    weights: tuple[float, ...]


class _Hop(NamedTuple):
    to: str
    link: int
    length: int


class NodeFabric(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """`devices` and `host` are where transfers begin and end; everything else that wires name forwards. `through`: over
    which of the latter devices reach each other at `peer_bytes_per_s` at most, each of another; None: no such limit.

    Links are numbered: two for each wire (from `a` to `b`, and back), one for a shared wire; then the limits of pairs
    of devices.
    """

    name: str
    devices: tuple[str, ...]
    host: tuple[str, ...]
    wires: tuple[Wire, ...]
    through: tuple[str, ...] = ()
    peer_bytes_per_s: float | None = None

    @cached_property
    def _hops(self) -> dict[str, list[_Hop]]:
        found: dict[str, list[_Hop]] = {name: [] for name in self.devices + self.host}
        link = 0
        for wire in self.wires:
            back = link if wire.shared else link + 1
            found.setdefault(wire.a, []).append(_Hop(wire.b, link, wire.length))
            found.setdefault(wire.b, []).append(_Hop(wire.a, back, wire.length))
            link = back + 1
        return found

    @cached_property
    def _peers(self) -> dict[tuple[str, str], int]:
        """Links of the limits."""
        if self.peer_bytes_per_s is None:
            return {}
        first = sum(1 if wire.shared else 2 for wire in self.wires)
        pairs = [(one, other) for one in self.devices for other in self.devices if one != other]
        return {pair: first + place for place, pair in enumerate(pairs)}

    @cached_property
    def link_names(self) -> list[str]:
        """Of each link: `gpu0 to bridge0`; `gpu0 and bridge0` where both directions share it, and so the limit of a
        pair of devices, `gpu0 to network, as peers`."""
        found = []
        for wire in self.wires:
            ways = (f"{wire.a} to {wire.b}", f"{wire.b} to {wire.a}")
            found += [f"{wire.a} and {wire.b}"] if wire.shared else list(ways)
        return found + [f"{one} to {other}, as peers" for one, other in self._peers]

    @property
    def capacities(self) -> list[float]:
        """Bytes per second of each link."""
        found = [wire.bytes_per_s for wire in self.wires for _ in range(1 if wire.shared else 2)]
        return found + [self.peer_bytes_per_s or 0.0] * len(self._peers)

    def path(self, sources: Sequence[str], targets: Sequence[str], over: str | None = None) -> Path:
        """Of a transfer whose bytes come from all sources and go to all targets in equal parts, as from memory that is
        interleaved over sockets. `over`: a vertex on all ways, as the NIC that a message takes. Raises `UsageError` for
        names that are no devices or host, and where no way is."""
        weights: dict[int, float] = {}
        share = 1 / (len(sources) * len(targets))
        ends = set(self.devices) | set(self.host)
        for name in (*sources, *targets):
            if name not in ends:
                raise UsageError(f"{name} is no end of transfers of {self.name}; those are {', '.join(sorted(ends))}")
        for source in sources:
            for target in targets:
                for one, other in ((source, target),) if over is None else ((source, over), (over, target)):
                    for link, part in self._between(one, other, ends).items():
                        weights[link] = weights.get(link, 0.0) + share * part
        return Path(tuple(weights), tuple(weights.values()))

    def _between(self, source: str, target: str, ends: set[str]) -> dict[int, float]:
        if target not in self._known_distances:
            self._known_distances[target] = self._distances(target, ends)
        distance = self._known_distances[target]
        if source not in distance:
            raise UsageError(f"no way leads from {source} to {target} in {self.name}")
        used: dict[int, float] = {}
        shares = {source: 1.0}
        crosses = False
        while shares:
            after: dict[str, float] = {}
            for at, share in shares.items():
                crosses |= at in self.through
                onwards = [hop for hop in self._hops[at] if distance.get(hop.to, -1) == distance[at] - hop.length]
                for to, link, _ in onwards:
                    used[link] = used.get(link, 0.0) + share / len(onwards)
                    if to != target:
                        after[to] = after.get(to, 0.0) + share / len(onwards)
            shares = after if source != target else {}
        if crosses and (source, target) in self._peers:
            used[self._peers[source, target]] = 1.0
        return used

    @cached_property
    def _known_distances(self) -> dict[str, dict[str, int]]:
        """By target."""
        return {}

    def _distances(self, target: str, ends: set[str]) -> dict[str, int]:
        """Length of the shortest way to `target` from what reaches it (Dijkstra); ends forward nothing."""
        found: dict[str, int] = {}
        queue = [(0, target)]
        while queue:
            distance, at = heappop(queue)
            if at in found:
                continue
            found[at] = distance
            if at == target or at not in ends:
                for hop in self._hops.get(at, ()):
                    heappush(queue, (distance + hop.length, hop.to))
        return found
