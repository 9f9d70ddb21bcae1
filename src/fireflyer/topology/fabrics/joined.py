"""Networks of several trees: the two-zone network of Fire-Flyer 2, planes and rails. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from fireflyer.base.errors import UsageError
from fireflyer.topology.fabrics.graph import Cable, Fabric, Layer, NodeGroup, dealt
from fireflyer.topology.fabrics.trees import rate_of, two_layer_tree, uplinks_of

__all__ = ["multi_plane", "rail_optimised", "zones"]

MAX_PARTS: Final = 64


def zones(
    groups: Sequence[NodeGroup],
    *,
    radix: int,
    gbit_per_s: float,
    between: int,
    shared: Sequence[NodeGroup] = (),
    count: int = 2,
    zone_switches: int | None = None,
    spread: bool = True,
    name: str = "two-zone network",
) -> Fabric:
    """`count` two-layer fat-trees (Fire-Flyer paper, III-B). Nodes of `groups` are divided among the zones; those of
    `shared`, as storage servers, have one port in each. `between`: links from each zone to the zone switches,
    which take a port of as many leaf switches in turn. `spread`: each leaf switch has its share of each kind of node,
    otherwise kinds follow one another. Raises `UsageError` where a zone has too few ports."""
    half, parts = uplinks_of(radix), count
    if not 2 <= parts <= MAX_PARTS:
        raise UsageError(f"{name}: {parts} zones; use 2 to {MAX_PARTS}")
    if any(group.ports != 1 for group in groups) or any(group.ports != parts for group in shared):
        raise UsageError(f"{name}: nodes have one port, and shared ones {parts}, one in each zone")
    if not 0 <= between <= half * radix:
        raise UsageError(f"{name}: {between} links between zones; a zone has {half * radix} ports in all")
    middle = -(-between * parts // radix) if zone_switches is None else zone_switches
    if middle > between:
        raise UsageError(
            f"{name}: a zone with {between} links does not reach all of {middle} zone switches; use more links, or "
            "switches with more ports"
        )
    nodes = [*groups, *shared]
    own, everywhere = sum(group.count for group in groups), sum(group.count for group in shared)
    order = dealt(nodes, spread=spread)
    members = [_members(order, own, zone, parts) for zone in range(parts)]
    most = max(len(one) for one in members)
    leaves = radix
    if most > leaves * half - between:
        raise UsageError(
            f"{name}: a zone needs {most} ports for nodes and has {leaves * half - between}, {between} of "
            f"{leaves * half} being links to other zones; use fewer nodes or links, more ports or zones"
        )
    first = own + everywhere
    of_zone = leaves + half
    cables: list[Cable] = []
    for zone, ends in enumerate(members):
        leaf, spine, center = first + zone * leaves, first + parts * leaves + zone * half, first + parts * of_zone
        cables += _at_leaves(ends, leaf, leaves, half, between, spread=spread)
        cables += [Cable(leaf + low, spine + high, 1) for low in range(leaves) for high in range(half)]
        # The zone switches go on in turn from zone to zone, so that each has as many links.
        found = Counter((leaf + turn % leaves, center + (zone * between + turn) % middle) for turn in range(between))
        cables += [Cable(low, high, links) for (low, high), links in found.items()]
    layers = [
        Layer(name="leaf", count=parts * leaves, radix=radix),
        Layer(name="spine", count=parts * half, radix=radix),
    ]
    layers += [Layer(name="zone", count=middle, radix=radix)] if middle else []
    return Fabric(
        name=name,
        groups=tuple(nodes),
        layers=tuple(layers),
        cables=tuple(cables),
        link_bytes_per_s=rate_of(gbit_per_s),
    ).check()


def _members(order: Sequence[int], own: int, zone: int, parts: int) -> list[int]:
    """Nodes of a zone, in the order of cabling: every `parts`-th of the own ones, all shared ones."""
    found, turn = [], 0
    for node in order:
        if node >= own:
            found.append(node)
        else:
            if turn % parts == zone:
                found.append(node)
            turn += 1
    return found


def _at_leaves(ends: Sequence[int], first: int, leaves: int, half: int, between: int, *, spread: bool) -> list[Cable]:
    """Ports for nodes are those that links to other zones leave, filled in turn over all leaf switches; without
    `spread` as many ports, but the nodes in their order from the first switch to the last."""
    free = [half - len(range(leaf, between, leaves)) for leaf in range(leaves)]
    slots = sorted((round_ / free[leaf], leaf) for leaf in range(leaves) for round_ in range(free[leaf]))
    places = [leaf for _, leaf in slots[: len(ends)]]
    if not spread:
        places.sort()
    return [Cable(node, first + leaf, 1) for node, leaf in zip(ends, places, strict=True)]


def multi_plane(
    groups: Sequence[NodeGroup], *, planes: int, radix: int, gbit_per_s: float, name: str = "multi-plane fat-tree"
) -> Fabric:
    """A two-layer fat-tree for each port of a node (DeepSeek-V3 paper, 5.1): port p of each node is in plane p. Planes
    are joined by nothing but the nodes. Raises `UsageError`."""
    if not 1 <= planes <= MAX_PARTS:
        raise UsageError(f"{name}: {planes} planes; use 1 to {MAX_PARTS}")
    if any(group.ports != planes for group in groups):
        raise UsageError(f"{name}: nodes have {groups[0].ports} ports; each has one in each of the {planes} planes")
    single = [NodeGroup(kind=group.kind, count=group.count) for group in groups]
    plane = two_layer_tree(single, radix=radix, gbit_per_s=gbit_per_s, name=name)
    nodes, per_layer = plane.nodes, {layer.name: layer.count for layer in plane.layers}
    leaves = per_layer["leaf"]

    def moved(vertex: int, index: int) -> int:
        """Leaf switches of all planes come first, then all spine switches."""
        if vertex < nodes:
            return vertex
        switch = vertex - nodes
        if switch < leaves:
            return nodes + index * leaves + switch
        return nodes + planes * leaves + index * per_layer["spine"] + switch - leaves

    return Fabric(
        name=name,
        groups=tuple(groups),
        layers=tuple(Layer(name=one.name, count=one.count * planes, radix=radix) for one in plane.layers),
        cables=tuple(
            Cable(moved(cable.a, index), moved(cable.b, index), cable.links)
            for index in range(planes)
            for cable in plane.cables
        ),
        link_bytes_per_s=plane.link_bytes_per_s,
    ).check()


def rail_optimised(
    groups: Sequence[NodeGroup], *, rails: int, radix: int, gbit_per_s: float, name: str = "rail-optimised fat-tree"
) -> Fabric:
    """Port r of each node is at leaf switches of rail r; spine switches join all rails, so that ranks of the same
    number meet at a leaf switch, and others one layer above. Raises `UsageError` where two layers do not suffice."""
    if not 1 <= rails <= MAX_PARTS or any(group.ports != rails for group in groups):
        raise UsageError(f"{name}: {rails} rails need nodes with as many ports, 1 to {MAX_PARTS}")
    nodes, half = sum(group.count for group in groups), uplinks_of(radix)
    per_rail = -(-nodes // half)
    by_rail = [
        NodeGroup(kind=f"rail {rail}", count=1, ports=per_rail * half) for rail in range(rails)
    ]  # whole leaf switches, so that no switch serves two rails
    tree = two_layer_tree(by_rail, radix=radix, gbit_per_s=gbit_per_s, spread=False, name=name)
    order = dealt(groups, spread=True)
    cables = [
        Cable(node, nodes + rail * per_rail + place * per_rail // nodes, 1)
        for rail in range(rails)
        for place, node in enumerate(order)
    ]
    cables += [
        Cable(cable.a - rails + nodes, cable.b - rails + nodes, cable.links)
        for cable in tree.cables
        if cable.a >= rails
    ]
    return Fabric(
        name=name,
        groups=tuple(groups),
        layers=tree.layers,
        cables=tuple(cables),
        link_bytes_per_s=tree.link_bytes_per_s,
    ).check()
