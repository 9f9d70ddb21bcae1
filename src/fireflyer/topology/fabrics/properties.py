"""What a fabric can do, from its graph: distances, planes and bisections. Pure.

Bandwidths are links, of `Fabric.link_bytes_per_s` in each direction. Nodes do not forward: a path goes through
switches.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

from fireflyer.base.errors import UsageError
from fireflyer.topology.fabrics.cuts import links_across
from fireflyer.topology.fabrics.graph import Fabric
from fireflyer.topology.fabrics.inside import INSIDE_LAYERS
from fireflyer.topology.fabrics.narrow import dragonfly_bisection, tree_bisection
from fireflyer.topology.fabrics.spectra import slim_fly_bisection, spectral_bound

__all__ = ["Bisection", "bisection", "diameter", "planes_of", "separated_nodes"]

MAX_WORK: Final = 50_000_000
"""Links between switches that `diameter` follows: some seconds."""


class Bisection(NamedTuple):
    """Links between two halves of the nodes, in the worst division: not more than `links`, not fewer than `lower`."""

    links: int
    lower: int = 0
    """0: nothing is known."""

    @property
    def exact(self) -> bool:
        return self.links == self.lower


def separated_nodes(fabric: Fabric) -> tuple[int, int] | None:
    """First node, and one that it cannot reach through switches; None where each node reaches all others."""
    near, nodes = _switch_neighbours(fabric), fabric.nodes
    ends: list[list[int]] = [[] for _ in range(nodes)]
    for cable in fabric.cables:
        if cable.a < nodes:
            ends[cable.a].append(cable.b - nodes)
    distance = _distances(near, tuple(ends[0])) if ends else []
    for node in range(1, nodes):
        if all(distance[switch] < 0 for switch in ends[node]):
            return 0, node
    return None


def diameter(fabric: Fabric) -> int | None:
    """Most switches on a shortest path between two nodes; None where some nodes cannot reach each other. Raises
    `UsageError` for a fabric that is too large to look at all pairs."""
    near, nodes = _switch_neighbours(fabric), fabric.nodes
    ends: dict[int, list[int]] = {}
    for cable in fabric.cables:
        if cable.a < nodes:
            ends.setdefault(cable.a, []).append(cable.b - nodes)
    places = set(map(tuple, ends.values()))
    alike = _one_of_each(places, near)
    if len(alike) * (sum(map(len, near)) + len(places)) > MAX_WORK:
        raise UsageError(f"{fabric.name}: {len(near)} switches are too many to look at all pairs of them")
    most = 0
    for start in alike:
        distance = _distances(near, start)
        for place in places:
            reached = [distance[switch] for switch in place if distance[switch] >= 0]
            if not reached:
                return None
            most = max(most, min(reached) + 1)
    return most


def _one_of_each(places: Collection[tuple[int, ...]], near: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Places whose switches have the same neighbours are as far from all others: one of them, of a tree one for each
    pod. All of them where two places have a switch in common, since these are nearer to each other."""
    if sum(map(len, places)) > len({switch for place in places for switch in place}):
        return sorted(places)
    return list({tuple(tuple(sorted(set(near[switch]))) for switch in place): place for place in places}.values())


def _switch_neighbours(fabric: Fabric) -> list[list[int]]:
    nodes = fabric.nodes
    near: list[list[int]] = [[] for _ in range(fabric.switches)]
    for cable in fabric.cables:
        if cable.a >= nodes:
            near[cable.a - nodes].append(cable.b - nodes)
            near[cable.b - nodes].append(cable.a - nodes)
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


def planes_of(fabric: Fabric) -> list[list[int]]:
    """Switches that links join with each other, each plane in ascending order; one plane of a network that is whole.
    NVSwitches and NICs are of nodes, and in no plane."""
    first_switch = fabric.nodes + sum(layer.count for layer in fabric.layers if layer.name in INSIDE_LAYERS)
    up: dict[int, Counter[int]] = {}
    for cable in fabric.cables:
        if cable.a >= first_switch:
            up.setdefault(cable.a, Counter())[cable.b] += cable.links
    found: dict[int, list[int]] = {}
    for switch, first in sorted(_parts(up, range(first_switch, fabric.nodes + fabric.switches)).items()):
        found.setdefault(first, []).append(switch)
    return list(found.values())


def bisection(fabric: Fabric) -> Bisection:
    """Exact for trees that keep the bandwidth of their leaf switches, and for several of them beside each other, as
    planes: whatever the halves are, each node of one can send to a node of the other at the rate of all its ports
    (Clos networks with as many links above as below route any permutation, by König's theorem on colours of edges), so
    no division has fewer links than the ports of the smaller half. Exact, too, for trees that are narrower above where
    parallel switches are alike, for a Dragonfly with large groups (`narrow`), and for a Slim Fly (`spectra`). Elsewhere
    the better one of two divisions, of which nobody has shown that it is the worst: nodes in the order of their
    switches, all together, or those with links to one switch and those with several apart, as storage with a port in
    each zone. Where all switches have as many nodes, eigenvalues say which number of links no division is below."""
    nodes = fabric.nodes
    ends: dict[int, Counter[int]] = {node: Counter() for node in range(nodes)}
    for cable in fabric.cables:
        if cable.a < nodes:
            ends[cable.a][cable.b] += cable.links
    ports = {links.total() for links in ends.values()}
    if len(ports) == 1:
        if _routes_any_permutation(fabric, ends):
            links = ports.pop() * (nodes // 2)
            return Bisection(links, links)
        for closed_form in (tree_bisection, dragonfly_bisection, slim_fly_bisection):
            found = closed_form(fabric, ends)
            if found is not None:
                return Bisection(found, found)
    order = sorted(ends, key=lambda node: (min(ends[node]), node))
    single, several = ([node for node in order if (len(ends[node]) > 1) == many] for many in (False, True))
    apart = [*single[: len(single) // 2], *several[: nodes // 2 - len(single) // 2]]
    links = min(_links_of_division(fabric, side) for side in (order[: nodes // 2], apart))
    return Bisection(links, spectral_bound(fabric, ends))


def _links_of_division(fabric: Fabric, half: Collection[int]) -> int:
    """Of nodes; each switch above is on the side where fewer of its links cross."""
    near: list[list[tuple[int, int]]] = [[] for _ in range(fabric.nodes + fabric.switches)]
    for cable in fabric.cables:
        near[cable.a].append((cable.b, cable.links))
        near[cable.b].append((cable.a, cable.links))
    side = set(half)
    for vertex in range(fabric.nodes, len(near)):  # from the leaf switches upwards: what is below is decided already
        inside = sum(links for other, links in near[vertex] if other in side)
        outside = sum(links for other, links in near[vertex] if other < vertex and other not in side)
        if inside > outside:
            side.add(vertex)
    return links_across(fabric, side)


def _routes_any_permutation(fabric: Fabric, ends: Mapping[int, Counter[int]]) -> bool:
    """Whether that is known, since the switches are one or several Clos networks, and all nodes have as many ports in
    each of them."""
    first = fabric.nodes
    up: dict[int, Counter[int]] = {}
    for cable in fabric.cables:
        if cable.a >= first:
            up.setdefault(cable.a, Counter())[cable.b] += cable.links
    layers = []
    for layer in fabric.layers:
        layers.append(range(first, first + layer.count))
        first += layer.count
    below: Counter[int] = Counter()
    for links in ends.values():
        below.update(links)
    parts = _parts(up, range(fabric.nodes, first))
    first_ends = _by_part(ends[0], parts)
    return all(_by_part(one, parts) == first_ends for one in ends.values()) and _is_clos(up, layers, below)


def _by_part(links: Counter[int], parts: Mapping[int, int]) -> Counter[int]:
    found: Counter[int] = Counter()
    for switch, count in links.items():
        found[parts[switch]] += count
    return found


def _is_clos(up: Mapping[int, Counter[int]], layers: Sequence[range], below: Counter[int]) -> bool:
    """Whether the lowest one of these layers, with `below` links to what is under each of its switches, has as many
    links above, each switch as many to each of the networks that join it to the others, and these are Clos networks."""
    lowest, *above = layers
    inner = _parts(up, [switch for layer in above for switch in layer])
    outer = _parts(up, [switch for layer in layers for switch in layer])
    members: dict[int, list[int]] = {}
    for switch in lowest:
        members.setdefault(outer[switch], []).append(switch)
    for switches in members.values():
        if len(switches) == 1:
            continue
        if not above or any(other not in inner for switch in switches for other in up.get(switch, ())):
            return False
        links = [_by_part(up.get(switch, Counter()), inner) for switch in switches]
        if any(one != links[0] for one in links) or links[0].total() < max(below[switch] for switch in switches):
            return False
    under: Counter[int] = Counter()
    for switch in lowest:
        under.update(up.get(switch, Counter()))
    return not above or _is_clos(up, above, under)


def _parts(up: Mapping[int, Counter[int]], switches: Collection[int]) -> dict[int, int]:
    """Of each of these switches the lowest one that it is joined with by links between them."""
    near: dict[int, list[int]] = {switch: [] for switch in switches}
    for switch in switches:
        for other in up.get(switch, ()):
            if other in near:
                near[switch].append(other)
                near[other].append(switch)
    found: dict[int, int] = {}
    for start in sorted(near):
        if start in found:
            continue
        found[start] = start
        queue = [start]
        while queue:
            for other in near[queue.pop()]:
                if other not in found:
                    found[other] = start
                    queue.append(other)
    return found
