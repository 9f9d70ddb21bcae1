"""The nodes of a replay that are free, by zone, for the policies that the scheduler is compared with.

They obey the scheduler's rules of placement: in one zone where one has room, the tightest; in several only tasks of
`cross_zone_nodes` or more, `cross_zone_tasks` at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from fireflyer.base.errors import InvariantViolation
from fireflyer.cluster.core.replay.policy import ClusterSettings

__all__ = ["Rooms", "Shape", "fit"]

Shape = tuple[tuple[int, int], ...]
"""(zone, nodes in it) of a run."""


def fit(nodes: int, rooms: Sequence[int], cluster: ClusterSettings, crossing: int) -> Shape | None:
    """In which zones a task of so many nodes gets how many, where `rooms` of each zone may be used and `crossing` other
    tasks run in several. None where it does not fit."""
    best = -1
    for zone, room in enumerate(rooms):
        if room >= nodes and (best < 0 or room < rooms[best]):
            best = zone
    if best >= 0:
        return ((best, nodes),)
    if nodes < cluster.cross_zone_nodes or crossing >= cluster.cross_zone_tasks or sum(rooms) < nodes:
        return None
    shape = []
    for zone in sorted(range(len(rooms)), key=lambda zone: (-rooms[zone], zone)):
        taken = min(rooms[zone], nodes)
        if taken > 0:
            shape.append((zone, taken))
            nodes -= taken
    return tuple(shape)


class Rooms:
    """Which nodes are free."""

    def __init__(self, cluster: ClusterSettings) -> None:
        self._cluster = cluster
        self._free: list[int] = [0] * cluster.zones
        for node in range(cluster.nodes):
            self._free[cluster.zone(node)] |= 1 << node
        self._down: dict[int, None] = {}
        self.counts = cluster.zone_nodes()
        """Free nodes of each zone."""
        self.crossing = 0
        self.total = cluster.nodes

    def take(self, shape: Shape) -> tuple[int, ...]:
        nodes: list[int] = []
        for zone, count in shape:
            free = self._free[zone]
            for _ in range(count):
                if not free:
                    raise InvariantViolation(f"zone {zone} has no {count} free nodes")
                low = free & -free
                nodes.append(low.bit_length() - 1)
                free ^= low
            self._free[zone] = free
            self.counts[zone] -= count
        self.total -= len(nodes)
        self.crossing += len(shape) > 1
        return tuple(nodes)

    def give_back(self, nodes: Sequence[int], shape: Shape) -> None:
        for node in nodes:
            if node not in self._down:
                self._free_one(node)
        self.crossing -= len(shape) > 1

    def node_down(self, node: int) -> None:
        self._down[node] = None
        zone = self._cluster.zone(node)
        if self._free[zone] >> node & 1:
            self._free[zone] ^= 1 << node
            self.counts[zone] -= 1
            self.total -= 1

    def node_up(self, node: int) -> None:
        del self._down[node]
        self._free_one(node)

    def _free_one(self, node: int) -> None:
        zone = self._cluster.zone(node)
        self._free[zone] |= 1 << node
        self.counts[zone] += 1
        self.total += 1
