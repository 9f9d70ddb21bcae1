"""Which of the nodes that are free a gang gets, and in which order its ranks lie on them.

One zone where one has room: the one that is left with the fewest free nodes, so that large gangs find room elsewhere.
Two zones only for gangs of at least `cross_zone_nodes`, and only while fewer than `cross_zone_tasks` others do (the
paper's rule); then as few zones as can be, the fullest free ones first. Inside a zone as few leaves as can be: a leaf
that has just enough, otherwise the freest ones. Ranks follow zones and leaves, so that neighbours are near, and two
zones meet at one place in the order.
"""

from __future__ import annotations

from fireflyer.cluster.core.scheduler.model import Policy, Request
from fireflyer.cluster.core.scheduler.node_sets import NodeSets, each_bit

__all__ = ["fits", "place"]


def place(request: Request, free: int, sets: NodeSets, policy: Policy, crossing: int) -> tuple[int, ...] | None:
    """Numbers of nodes in the order of ranks, of those that are `free` and eligible; `crossing` other tasks run in
    several zones. None where the gang does not fit."""
    rooms = {zone: (free & nodes).bit_count() for zone, nodes in sets.of_zone.items()}
    fitting = [zone for zone, room in rooms.items() if room >= request.least_nodes]
    if fitting:
        # The most that the task can use, and then the tightest zone.
        zone = min(fitting, key=lambda zone: (-min(rooms[zone], request.most_nodes), rooms[zone], zone))
        return _in_zone(free, zone, min(rooms[zone], request.most_nodes), sets)
    if request.least_nodes < policy.cross_zone_nodes or crossing >= policy.cross_zone_tasks:
        return None
    if sum(rooms.values()) < request.least_nodes:
        return None
    chosen: list[int] = []
    for zone in sorted(rooms, key=lambda zone: (-rooms[zone], zone)):
        wanted = min(rooms[zone], request.least_nodes - len(chosen))
        if wanted > 0:
            chosen.extend(_in_zone(free, zone, wanted, sets))
    return tuple(chosen)


def fits(nodes: int, free: int, sets: NodeSets, policy: Policy, crossing: int) -> bool:
    """Whether `place` finds room for a gang of so many nodes."""
    if free.bit_count() < nodes:
        return False
    if any((free & zone).bit_count() >= nodes for zone in sets.of_zone.values()):
        return True
    return nodes >= policy.cross_zone_nodes and crossing < policy.cross_zone_tasks


def _in_zone(free: int, zone: str, wanted: int, sets: NodeSets) -> tuple[int, ...]:
    leaves = _by_leaf(free & sets.of_zone[zone], zone, sets)
    counts = {leaf: nodes.bit_count() for leaf, nodes in leaves.items()}
    chosen: list[int] = []
    while len(chosen) < wanted:
        missing = wanted - len(chosen)
        enough = [(count, leaf) for leaf, count in counts.items() if count >= missing]
        leaf = min(enough)[1] if enough else min(counts, key=lambda leaf: (-counts[leaf], leaf))
        del counts[leaf]
        for number in each_bit(leaves[leaf]):
            chosen.append(number)
            if len(chosen) == wanted:
                break
    return tuple(chosen)


def _by_leaf(free: int, zone: str, sets: NodeSets) -> dict[str, int]:
    if free.bit_count() >= len(sets.zones[zone]):
        return {leaf: here for leaf, nodes in sets.zones[zone].items() if (here := free & nodes)}
    found: dict[str, int] = {}
    for number in each_bit(free):
        leaf = sets.leaf_of(number)
        found[leaf] = found.get(leaf, 0) | 1 << number
    return found
