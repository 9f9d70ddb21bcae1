"""Bisections of networks that are narrower above are those of all divisions of small ones, and known of large ones."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fireflyer.base.errors import UsageError
from fireflyer.topology.fabrics import (
    Bisection,
    Fabric,
    NodeGroup,
    bisection,
    dragonfly,
    links_across,
    slim_fly,
    slim_fly_counts,
    three_layer_tree,
    two_layer_tree,
)
from fireflyer.topology.fabrics.field import prime_power
from fireflyer.topology.fabrics.spectra import Spectrum, fewest_across, slim_fly_spectrum

RATE = 200.0
MOST_SWITCHES = 14


def gpus(count: int, ports: int = 1) -> tuple[NodeGroup, ...]:
    return (NodeGroup(kind="gpu", count=count, ports=ports),)


def fewest_links(fabric: Fabric) -> int:
    """Of all sides of all switches, where as many nodes as must are not on the side of their switch."""
    sides = (np.arange(1 << fabric.switches)[:, None] >> np.arange(fabric.switches)) & 1
    links, there = np.zeros(len(sides), np.int64), np.zeros(len(sides), np.int64)
    ports = sum(cable.links for cable in fabric.cables if cable.a == 0)
    for cable in fabric.cables:
        above = sides[:, cable.b - fabric.nodes]
        if cable.a < fabric.nodes:
            there += above
        else:
            links += cable.links * (above != sides[:, cable.a - fabric.nodes])
    half = fabric.nodes // 2
    return int(min((links + ports * abs(there - count)).min() for count in (half, fabric.nodes - half)))


@st.composite
def narrow_networks(draw: st.DrawFn) -> Fabric:
    """Trees of two and three layers, Dragonflies, with up to 14 switches."""
    family, count = draw(st.sampled_from(["two", "three", "dragonfly"])), draw(st.integers(2, 24))
    ports, up, spine_up = draw(st.integers(1, 2)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    if family == "dragonfly":
        h, groups = draw(st.integers(1, 2)), draw(st.integers(2, 4))
        a = draw(st.integers(1, MOST_SWITCHES // groups))
        assume(a * h % (groups - 1) == 0)
        return dragonfly(nodes_per_switch=ports, group_switches=a, global_links=h, groups=groups, gbit_per_s=RATE)
    radix = draw(st.sampled_from([4, 6, 8]))
    try:
        if family == "two":
            fabric = two_layer_tree(gpus(count, ports), radix=radix, uplinks=up, gbit_per_s=RATE)
        else:
            fabric = three_layer_tree(gpus(count), radix=radix, uplinks=up, spine_uplinks=spine_up, gbit_per_s=RATE)
    except UsageError:
        assume(False)
        raise
    assume(fabric.switches <= MOST_SWITCHES)
    # Nodes with their ports at two switches have no side of their own.
    assume(len({(cable.a, cable.b) for cable in fabric.cables if cable.a < fabric.nodes}) == fabric.nodes)
    return fabric


@settings(max_examples=60, deadline=None)
@given(narrow_networks())
def test_no_halves_are_joined_by_fewer_links_than_the_bisection_of_narrow_networks(fabric: Fabric) -> None:
    found, best = bisection(fabric), fewest_links(fabric)
    assert found.lower <= best <= found.links


@pytest.mark.parametrize(
    ("fabric", "links"),
    [
        # Leaves of 6 nodes with 2 uplinks: half of 8 leaves cross with 2 each.
        (two_layer_tree(gpus(48), radix=8, uplinks=2, gbit_per_s=RATE), 8),
        # 4 pods of 6 leaves with 4 nodes, 4 x 2 links of a pod upwards: two pods cross.
        (three_layer_tree(gpus(96), radix=8, spine_uplinks=2, gbit_per_s=RATE), 2 * 8),
        # 3 pods: one crosses, and half of another, 3 leaves with 4 links each.
        (three_layer_tree(gpus(72), radix=8, spine_uplinks=2, cores=4, gbit_per_s=RATE), 8 + 3 * 4),
        # 4 groups of 6 switches, 2 links for each pair: 2 x 2 pairs.
        (dragonfly(nodes_per_switch=1, group_switches=6, global_links=1, groups=4, gbit_per_s=RATE), 4 * 2),
        # An odd group is divided by 3 of its 6 nodes.
        (dragonfly(nodes_per_switch=1, group_switches=6, global_links=1, groups=3, gbit_per_s=RATE), 2 * 3 + 3),
    ],
    ids=lambda value: f"{value.name} {value.nodes}" if isinstance(value, Fabric) else None,
)
def test_bisections_of_networks_that_are_narrower_above(fabric: Fabric, links: int) -> None:
    assert bisection(fabric) == Bisection(links, links)


def test_a_balanced_dragonfly_and_trees_of_unlike_switches_have_bounds() -> None:
    balanced = dragonfly(nodes_per_switch=2, group_switches=4, global_links=2, groups=9, gbit_per_s=RATE)
    assert not bisection(balanced).exact
    least, most = np.linalg.eigvalsh(laplacian(balanced))[[1, -1]]
    assert bisection(balanced).lower == int(np.ceil(36 * (least + (2 - least) ** 2 / (most - least)) / 4))
    unlike = two_layer_tree(gpus(20), radix=6, uplinks=1, gbit_per_s=RATE)  # 4 leaves at one spine
    assert bisection(unlike).exact
    uneven = two_layer_tree(gpus(18), radix=6, uplinks=3, gbit_per_s=RATE)
    spine = uneven.first_of("spine")
    cables = tuple(cable for cable in uneven.cables if (cable.a, cable.b) != (spine - 1, spine))
    assert not bisection(msgspec.structs.replace(uneven, cables=cables)).exact


def laplacian(fabric: Fabric) -> np.ndarray:
    found = np.zeros((fabric.switches, fabric.switches))
    for cable in fabric.cables:
        if cable.a >= fabric.nodes:
            a, b = cable.a - fabric.nodes, cable.b - fabric.nodes
            found[a, b] = found[b, a] = -cable.links
    return found - np.diag(found.sum(axis=0))


@pytest.mark.parametrize("order", [3, 4, 5, 7, 8, 9])
def test_eigenvalues_of_a_slim_fly_are_those_of_its_graph(order: int) -> None:
    found = np.linalg.eigvalsh(laplacian(slim_fly(order, gbit_per_s=RATE)))
    assert slim_fly_spectrum(order) == pytest.approx((found[1], found[-1]))


def test_half_of_the_columns_of_a_slim_fly_are_a_worst_division() -> None:
    """q^3/2 links, (q^3 + q)/2 of an odd q: 15 is the least of all divisions of 18 switches."""
    assert fewest_links(slim_fly(3, gbit_per_s=RATE)) == 15
    for order, links in ((3, 15), (4, 32), (5, 65), (8, 256)):
        fabric = slim_fly(order, gbit_per_s=RATE)
        assert bisection(fabric) == Bisection(links, links)
        columns = [*range((order + 1) // 2), *range(order, order + order // 2)]
        switches = {fabric.nodes + column * order + at for column in columns for at in range(order)}
        nodes = {cable.a for cable in fabric.cables if cable.a < fabric.nodes and cable.b in switches}
        assert 2 * len(nodes) == fabric.nodes
        assert links_across(fabric, nodes | switches) == links


def test_no_division_of_a_slim_fly_that_can_be_built_is_better() -> None:
    for order in range(3, 65):
        if order % 4 != 2 and prime_power(order):
            counts = slim_fly_counts(order)
            nodes = counts.endpoints // counts.switches
            bound = fewest_across(slim_fly_spectrum(order), counts.switches, nodes)
            assert bound == (order**3 + order % 2 * order) // 2, order


def test_nodes_away_from_their_switch_are_part_of_the_bound() -> None:
    """All 8 switches of a complete graph, 16 links between halves, or all on one side with half of 8 nodes away."""
    assert fewest_across(Spectrum(8.0, 8.0), 8, 4) == 16
    assert fewest_across(Spectrum(8.0, 8.0), 8, 1) == 4
    assert fewest_across(Spectrum(7.0, 7.0), 7, 1) == 3, "3 of 7 nodes"
    assert fewest_across(Spectrum(0.0, 5.0), 8, 4) == 0, "networks apart from each other"


def test_a_slim_fly_without_a_cable_has_bounds() -> None:
    whole = slim_fly(4, gbit_per_s=RATE)
    found = bisection(msgspec.structs.replace(whole, cables=whole.cables[:-1]))
    assert 24 < found.lower <= 32 <= found.links


def test_the_bisection_of_ten_thousand_nodes_is_found_at_once() -> None:
    large = three_layer_tree(gpus(10_240), radix=64, uplinks=24, spine_uplinks=16, gbit_per_s=RATE)
    found = bisection(large)
    assert found.exact
    assert 0 < found.links < 5120
