"""Fat-trees of two and three layers (Leiserson; Al-Fares et al.), the fabrics that both papers build from. Pure.

A switch of `radix` ports gives half of them to what is below and half to what is above, so that no layer is narrower
than the one below; `uplinks` makes leaves with fewer. Where a tree is not full, its links are dealt in turn to the
switches above, so that these differ by one port at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from fireflyer.base.errors import UsageError
from fireflyer.topology.fabrics.graph import Cable, Fabric, Layer, NodeGroup, dealt

__all__ = ["GBIT", "MAX_ENDPOINTS", "three_layer_tree", "two_layer_tree"]

GBIT: Final = 125e6
"""Bytes per second of 1 Gb/s."""
MAX_ENDPOINTS: Final = 1 << 20
"""Of one fabric: each is a vertex in memory."""


def two_layer_tree(
    groups: Sequence[NodeGroup],
    *,
    radix: int,
    gbit_per_s: float,
    uplinks: int | None = None,
    spread: bool = True,
    name: str = "two-layer fat-tree",
) -> Fabric:
    """Leaf and spine switches of `radix` ports. `uplinks`: of each leaf switch, by default half of its ports; `spread`:
    each leaf switch has its share of each kind of node, otherwise kinds follow one another. Raises `UsageError` where
    two layers do not suffice."""
    up = uplinks_of(radix, uplinks)
    ends = _ends(groups, spread=spread)
    leaves = -(-len(ends) // (radix - up))
    if leaves > radix:
        raise UsageError(
            f"{name}: {len(ends)} ports of nodes need {leaves} leaf switches, and spine switches of {radix} ports join "
            f"{radix}; use more ports, a third layer, or several planes"
        )
    spines = 0 if leaves == 1 else max(1, -(-leaves * up // radix))
    nodes = sum(group.count for group in groups)
    cables = _node_cables(ends, nodes, radix - up)
    if spines:
        cables += _dealt_up(nodes, leaves, up, nodes + leaves, spines)
    layers = [Layer(name="leaf", count=leaves, radix=radix)]
    layers += [Layer(name="spine", count=spines, radix=radix)] if spines else []
    return Fabric(
        name=name,
        groups=tuple(groups),
        layers=tuple(layers),
        cables=tuple(cables),
        link_bytes_per_s=rate_of(gbit_per_s),
    ).check()


def three_layer_tree(
    groups: Sequence[NodeGroup],
    *,
    radix: int,
    gbit_per_s: float,
    uplinks: int | None = None,
    spine_uplinks: int | None = None,
    cores: int | None = None,
    spread: bool = True,
    name: str = "three-layer fat-tree",
) -> Fabric:
    """Pods of leaf switches, each joined to all spine switches of its pod, and core switches. Spine switch j of each
    pod is joined to the j-th set of core switches. `uplinks` of a leaf switch are the spine switches of a pod, and
    `spine_uplinks` those of a spine switch, by default half of their ports. `cores`: how many there are, by default as
    few as keep the bandwidth of spine switches. Raises `UsageError`."""
    up, spine_up = uplinks_of(radix, uplinks), uplinks_of(radix, spine_uplinks)
    down, in_pod = radix - up, radix - spine_up
    ends = _ends(groups, spread=spread)
    leaves = -(-len(ends) // down)
    pods = -(-leaves // in_pod)
    if pods > radix:
        raise UsageError(
            f"{name}: {len(ends)} ports of nodes are more than the {radix * in_pod * down} of three layers of switches "
            f"with {radix} ports; use more ports, or several planes"
        )
    nodes, spines = sum(group.count for group in groups), pods * up
    in_set = _cores_of_a_set(cores, pods * spine_up, up, radix, name)
    cables = _node_cables(ends, nodes, down)
    first_spine, first_core = nodes + leaves, nodes + leaves + spines
    for leaf in range(leaves):
        pod = leaf // in_pod
        cables += [Cable(nodes + leaf, first_spine + pod * up + j, 1) for j in range(up)]
    for j in range(up):
        members = [first_spine + pod * up + j for pod in range(pods)]
        cables += _dealt(members, spine_up, [first_core + j * in_set + core for core in range(in_set)])
    layers = (("leaf", leaves), ("spine", spines), ("core", up * in_set))
    return Fabric(
        name=name,
        groups=tuple(groups),
        layers=tuple(Layer(name=layer, count=count, radix=radix) for layer, count in layers),
        cables=tuple(cables),
        link_bytes_per_s=rate_of(gbit_per_s),
    ).check()


def _cores_of_a_set(cores: int | None, links: int, sets: int, radix: int, name: str) -> int:
    """`links`: to each set."""
    least = -(-links // radix)
    if cores is None:
        return least
    if cores % sets or cores // sets < least:
        raise UsageError(
            f"{name}: {cores} core switches do not take the {links * sets} links of spine switches; use a multiple of "
            f"{sets}, {least * sets} or more"
        )
    return cores // sets


def rate_of(gbit_per_s: float) -> float:
    """Bytes per second. Raises `UsageError`."""
    if not 0 < gbit_per_s <= 1e6:
        raise UsageError(f"{gbit_per_s} Gb/s is no rate of a link; write gbit_per_s = 200, or 400")
    return gbit_per_s * GBIT


def uplinks_of(radix: int, uplinks: int | None = None) -> int:
    """Ports of a leaf switch that lead upwards. Raises `UsageError`."""
    if not 2 <= radix <= 4096 or radix % 2:
        raise UsageError(f"no switch has {radix} ports; radix is an even number from 2 to 4096")
    if uplinks is None:
        return radix // 2
    if not 1 <= uplinks < radix:
        raise UsageError(f"a leaf switch of {radix} ports cannot have {uplinks} uplinks; use 1 to {radix - 1}")
    return uplinks


def _ends(groups: Sequence[NodeGroup], *, spread: bool) -> list[int]:
    """The node of each port, in the order of cabling."""
    if not groups:
        raise UsageError("a network without nodes; add a group of nodes")
    ports = sum(group.count * group.ports for group in groups)
    if ports > MAX_ENDPOINTS:
        raise UsageError(f"{ports} ports of nodes are more than {MAX_ENDPOINTS} of one network")
    of = [group.ports for group in groups for _ in range(group.count)]
    return [node for node in dealt(groups, spread=spread) for _ in range(of[node])]


def _node_cables(ends: Sequence[int], first_switch: int, down: int) -> list[Cable]:
    """`down` ports at each leaf switch, as evenly as can be."""
    leaves = -(-len(ends) // down)
    found = Counter((node, first_switch + place * leaves // len(ends)) for place, node in enumerate(ends))
    return [Cable(node, leaf, links) for (node, leaf), links in found.items()]


def _dealt_up(first: int, count: int, up: int, first_above: int, above: int) -> list[Cable]:
    return _dealt(range(first, first + count), up, range(first_above, first_above + above))


def _dealt(below: Iterable[int], up: int, above: Sequence[int]) -> list[Cable]:
    """`up` links from each switch below, in turn to those above."""
    found: Counter[tuple[int, int]] = Counter()
    turn = 0
    for switch in below:
        for _ in range(up):
            found[switch, above[turn % len(above)]] += 1
            turn += 1
    return [Cable(low, high, links) for (low, high), links in found.items()]
