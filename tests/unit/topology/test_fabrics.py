"""Fabrics have the switches, links and distances that their families promise, and refuse what cannot be cabled."""

from __future__ import annotations

import msgspec
import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.base.errors import UsageError
from fireflyer.topology.fabrics import (
    Bisection,
    Cable,
    Counts,
    Fabric,
    Layer,
    NodeGroup,
    bisection,
    counts_of,
    diameter,
    disjoint_paths,
    dragonfly,
    dragonfly_counts,
    links_across,
    minimum_cut,
    multi_plane,
    planes_of,
    rail_optimised,
    slim_fly,
    slim_fly_counts,
    three_layer_tree,
    two_layer_tree,
    zones,
)

RATE = 200.0


def gpus(count: int, ports: int = 1) -> tuple[NodeGroup, ...]:
    return (NodeGroup(kind="gpu", count=count, ports=ports),)


def graph_of(fabric: Fabric) -> networkx.Graph:
    graph = networkx.Graph()
    for cable in fabric.cables:
        graph.add_edge(cable.a, cable.b, capacity=cable.links)
    return graph


@pytest.mark.parametrize("half", [1, 2, 3, 4, 8])
def test_full_trees_have_the_counts_of_the_closed_forms(half: int) -> None:
    radix = 2 * half
    two = two_layer_tree(gpus(radix * half), radix=radix, gbit_per_s=RATE)
    assert counts_of(two) == Counts(radix**2 // 2, 3 * radix // 2, radix**2 // 2)
    three = three_layer_tree(gpus(radix**3 // 4), radix=radix, gbit_per_s=RATE)
    assert counts_of(three) == Counts(radix**3 // 4, 5 * radix**2 // 4, radix**3 // 2)
    assert two.unused_ports == three.unused_ports == 0
    assert diameter(two) == 3
    assert diameter(three) == 5


@given(half=st.integers(1, 6), count=st.integers(1, 80), spread=st.booleans())
def test_trees_of_any_size_keep_the_bandwidth_of_each_leaf_switch(half: int, count: int, spread: bool) -> None:
    groups = [*gpus(count), NodeGroup(kind="storage", count=1 + count // 7)]
    ends = count + 1 + count // 7
    for build in (two_layer_tree, three_layer_tree):
        try:
            fabric = build(groups, radix=2 * half, gbit_per_s=RATE, spread=spread)
        except UsageError:
            assert ends > (2 * half * half if build is two_layer_tree else 2 * half**3)
            continue
        assert fabric.endpoints == ends
        above = fabric.links_by_layer().get(("leaf", "spine"), 0)
        assert above >= ends or fabric.layers[0].count == 1
        spines = fabric.ports_used()[fabric.layers[0].count :]
        if build is two_layer_tree and spines:
            assert max(spines) - min(spines) <= 1
        assert ends == 1 or networkx.is_connected(graph_of(fabric))


def test_kinds_of_nodes_are_spread_over_leaf_switches_or_follow_one_another() -> None:
    groups = [*gpus(30), NodeGroup(kind="storage", count=10)]
    for spread, most in ((True, 4), (False, 10)):
        fabric = two_layer_tree(groups, radix=20, gbit_per_s=RATE, spread=spread)
        of_leaf = [cable.b for cable in fabric.cables if 30 <= cable.a < 40]
        assert max(of_leaf.count(leaf) for leaf in of_leaf) == pytest.approx(most, abs=1)


def test_two_zones_have_122_switches_and_meet_in_two_of_them() -> None:
    storage = (NodeGroup(kind="storage", count=180, ports=2),)
    fabric = zones(gpus(1160), radix=40, gbit_per_s=RATE, between=40, shared=storage)
    assert counts_of(fabric) == Counts(1520, 122, 2 * 800 + 2 * 40)
    assert [(layer.name, layer.count) for layer in fabric.layers] == [("leaf", 80), ("spine", 40), ("zone", 2)]
    assert diameter(fabric) == 5
    first = fabric.first_of("leaf")
    for leaf in range(80):
        of_leaf = [cable.a for cable in fabric.cables if cable.b == first + leaf and cable.a < fabric.nodes]
        assert len(of_leaf) == 19
        assert sum(node >= 1160 for node in of_leaf) in (4, 5)  # each leaf switch has its share of storage
    whole_zone = [cable.b for cable in fabric.cables if cable.a == 1160]
    assert len({(leaf - first) // 40 for leaf in whole_zone}) == 2  # a storage server is in both zones


def test_kinds_of_nodes_follow_one_another_in_zones_that_do_not_spread_them() -> None:
    storage = (NodeGroup(kind="storage", count=16, ports=2),)
    for spread in (True, False):
        fabric = zones(gpus(64), radix=16, gbit_per_s=RATE, between=16, shared=storage, spread=spread)
        first = fabric.first_of("leaf")
        for zone in range(2):
            leaves = range(first + 16 * zone, first + 16 * (zone + 1))
            at_leaf = [[cable.a for cable in fabric.cables if cable.b == leaf and cable.a < 80] for leaf in leaves]
            assert [len(nodes) for nodes in at_leaf] == [3] * 16  # the same ports, whatever is at them
            mixed = sum(len({node >= 64 for node in nodes}) == 2 for nodes in at_leaf)
            assert mixed == (16 if spread else 1)


def test_any_number_of_zones_has_as_many_links_between_them_as_were_asked_for() -> None:
    for count in (2, 3, 5):
        fabric = zones(gpus(10), radix=8, gbit_per_s=RATE, between=6, count=count)
        assert fabric.links_by_layer()["leaf", "zone"] == 6 * count
        assert networkx.is_connected(graph_of(fabric))


def test_planes_are_joined_by_nothing_but_the_nodes() -> None:
    fabric = multi_plane(gpus(32, 4), planes=4, radix=8, gbit_per_s=RATE)
    assert counts_of(fabric) == Counts(128, 4 * 12, 4 * 32)
    graph = graph_of(fabric)
    graph.remove_nodes_from(range(32))
    assert [len(part) for part in networkx.connected_components(graph)] == [12] * 4
    assert sorted(map(tuple, planes_of(fabric))) == sorted(
        map(tuple, map(sorted, networkx.connected_components(graph)))
    )
    assert planes_of(fabric)[1][0] == planes_of(fabric)[0][0] + 8  # leaf switches of all planes come first
    assert len(planes_of(two_layer_tree(gpus(32), radix=8, gbit_per_s=RATE))) == 1
    assert disjoint_paths(fabric, 0, 31) == 4


def test_ranks_of_a_rail_meet_at_one_switch() -> None:
    fabric = rail_optimised(gpus(8, 4), rails=4, radix=16, gbit_per_s=RATE)
    for rail in range(4):
        assert len({cable.b for cable in fabric.cables if cable.a < 8 and (cable.b - 8) == rail}) == 1
    assert diameter(fabric) == 1
    assert counts_of(fabric) == Counts(32, 4 + 2, 32)


@pytest.mark.parametrize("order", [3, 4, 5, 7, 8, 9, 11, 13, 16, pytest.param(27, marks=pytest.mark.slow)])
def test_a_slim_fly_has_its_counts_and_switches_at_most_two_links_apart(order: int) -> None:
    fabric = slim_fly(order, gbit_per_s=RATE)
    assert counts_of(fabric) == slim_fly_counts(order)
    switches = graph_of(fabric)
    switches.remove_nodes_from(range(fabric.nodes))
    assert networkx.diameter(switches) == 2
    assert {degree for _, degree in switches.degree()} == {slim_fly_counts(order).links * 2 // fabric.switches}


@pytest.mark.parametrize(("a", "h", "groups"), [(4, 2, 9), (4, 2, 5), (3, 2, 3), (2, 1, 2)])
def test_a_dragonfly_joins_each_pair_of_groups_by_the_same_number_of_links(a: int, h: int, groups: int) -> None:
    fabric = dragonfly(nodes_per_switch=2, group_switches=a, global_links=h, groups=groups, gbit_per_s=RATE)
    assert counts_of(fabric) == dragonfly_counts(nodes_per_switch=2, group_switches=a, global_links=h, groups=groups)
    assert set(fabric.ports_used()) == {2 + a - 1 + h}
    between: dict[tuple[int, int], int] = {}
    for cable in fabric.cables:
        ends = tuple((vertex - fabric.nodes) // a for vertex in (cable.a, cable.b))
        if cable.a >= fabric.nodes and ends[0] != ends[1]:
            between[ends[0], ends[1]] = between.get((ends[0], ends[1]), 0) + cable.links
    assert set(between.values()) == {a * h // (groups - 1)}
    assert len(between) == groups * (groups - 1) // 2


def test_rows_of_papers_that_cannot_be_built_say_why() -> None:
    assert slim_fly_counts(28)[:3] == (32_928, 1_568, 32_928)
    assert "no power of a prime" in slim_fly_counts(28).why_not_built
    ideal = dragonfly_counts(nodes_per_switch=16, group_switches=32, global_links=16, groups=511)
    assert ideal[:3] == (261_632, 16_352, 384_272)
    assert "not divisible by the 510 other groups" in ideal.why_not_built


@given(
    st.integers(2, 7).flatmap(
        lambda switches: st.lists(
            st.tuples(st.integers(0, switches - 1), st.integers(0, switches - 1), st.integers(1, 3)),
            min_size=1,
            max_size=14,
        ).map(lambda links: (switches, links))
    )
)
def test_disjoint_paths_are_the_largest_flow(drawn: tuple[int, list[tuple[int, int, int]]]) -> None:
    switches, links = drawn
    pairs = {(min(a, b), max(a, b)): count for a, b, count in links if a != b}
    cables = [Cable(0, 2, 2), Cable(1, 1 + switches, 3)]
    cables += [Cable(2 + a, 2 + b, count) for (a, b), count in pairs.items()]
    layers = (Layer(name="switch", count=switches, radix=64),)
    fabric = Fabric(name="drawn", groups=gpus(2), layers=layers, cables=tuple(cables), link_bytes_per_s=1.0)
    graph = graph_of(fabric)
    graph.add_nodes_from((0, 1))
    assert disjoint_paths(fabric, 0, 1) == networkx.maximum_flow_value(graph, 0, 1)
    cut = minimum_cut(fabric, 0, 1)
    assert cut.links == disjoint_paths(fabric, 0, 1)
    rest = tuple(cable for cable in fabric.cables if cable not in cut.cables)
    assert disjoint_paths(msgspec.structs.replace(fabric, cables=rest), 0, 1) == 0


def test_several_cables_between_two_vertices_count_together() -> None:
    cables = (Cable(0, 2, 1), Cable(0, 2, 1), Cable(1, 2, 3))
    layers = (Layer(name="switch", count=1, radix=8),)
    fabric = Fabric(name="two", groups=gpus(2), layers=layers, cables=cables, link_bytes_per_s=1.0)
    assert disjoint_paths(fabric, 0, 1) == minimum_cut(fabric, 0, 1).links == 2


def test_a_cut_names_the_links_of_an_oversubscribed_leaf() -> None:
    fabric = two_layer_tree(gpus(24, 4), radix=32, uplinks=3, gbit_per_s=RATE)
    leaf, other = fabric.first_of("leaf"), fabric.first_of("leaf") + 1
    cut = minimum_cut(fabric, leaf, other)
    assert cut.links == 3
    assert {cable.a for cable in cut.cables} == {leaf}
    assert minimum_cut(fabric, 0, 23).links == 3  # fewer than the four ports of a node
    assert {cable.a for cable in minimum_cut(fabric, 0, 1).cables} == {0}


def test_nodes_do_not_forward() -> None:
    fabric = multi_plane(gpus(4, 2), planes=2, radix=4, gbit_per_s=RATE)
    first = fabric.first_of("leaf")
    other = first + fabric.layers[0].count // 2
    assert disjoint_paths(fabric, first, other) == 0  # leaf switches of two planes


STORAGE = NodeGroup(kind="storage", count=180, ports=2)


@pytest.mark.parametrize(
    ("fabric", "links", "exact"),
    [
        (two_layer_tree(gpus(800), radix=40, gbit_per_s=RATE), 400, True),
        (two_layer_tree(gpus(30), radix=8, gbit_per_s=RATE), 15, True),
        (three_layer_tree(gpus(1024), radix=16, gbit_per_s=RATE), 512, True),
        (multi_plane(gpus(128, 4), planes=4, radix=16, gbit_per_s=RATE), 256, True),
        (rail_optimised(gpus(16, 8), rails=8, radix=16, gbit_per_s=RATE), 64, True),
        (two_layer_tree(gpus(48), radix=8, uplinks=2, gbit_per_s=RATE), 8, True),
        (zones(gpus(1160), radix=40, gbit_per_s=RATE, between=40, shared=[STORAGE]), 40 + 180, False),
        (zones(gpus(20), radix=8, gbit_per_s=RATE, between=0), 0, True),
    ],
    ids=lambda value: value.name if isinstance(value, Fabric) else None,
)
def test_the_bisection_is_half_of_the_ports_of_trees_that_are_not_narrower_above_and_else_a_bound(
    fabric: Fabric, links: int, exact: bool
) -> None:
    assert bisection(fabric) == Bisection(links, links if exact else 0)


@pytest.mark.parametrize(
    "fabric",
    [
        two_layer_tree(gpus(8), radix=4, gbit_per_s=RATE),
        two_layer_tree(gpus(7), radix=4, gbit_per_s=RATE),
        two_layer_tree(gpus(3, 2), radix=4, gbit_per_s=RATE),
        two_layer_tree(gpus(6), radix=4, uplinks=1, gbit_per_s=RATE),
        multi_plane(gpus(4, 2), planes=2, radix=4, gbit_per_s=RATE),
        three_layer_tree(gpus(5), radix=4, gbit_per_s=RATE),
        zones(gpus(4), radix=2, gbit_per_s=RATE, between=0),
    ],
    ids=lambda fabric: f"{fabric.name} {fabric.nodes}",
)
def test_no_division_of_a_small_network_has_fewer_links_than_its_bisection(fabric: Fabric) -> None:
    from itertools import chain, combinations

    nodes, switches = fabric.nodes, range(fabric.nodes, fabric.nodes + fabric.switches)
    choices = list(chain.from_iterable(combinations(switches, size) for size in range(fabric.switches + 1)))
    best = min(
        links_across(fabric, {*half, *side}) for half in combinations(range(nodes), nodes // 2) for side in choices
    )
    assert bisection(fabric).links == best


@pytest.mark.parametrize(
    "fabric",
    [
        two_layer_tree(gpus(3), radix=4, gbit_per_s=RATE),
        three_layer_tree(gpus(20), radix=6, gbit_per_s=RATE),
        multi_plane(gpus(8, 2), planes=2, radix=4, gbit_per_s=RATE),
        zones(gpus(10), radix=8, gbit_per_s=RATE, between=6, shared=[NodeGroup(kind="storage", count=3, ports=2)]),
        dragonfly(nodes_per_switch=2, group_switches=4, global_links=2, groups=9, gbit_per_s=RATE),
        slim_fly(5, gbit_per_s=RATE),
    ],
    ids=lambda fabric: fabric.name,
)
def test_the_diameter_is_that_of_all_pairs(fabric: Fabric) -> None:
    graph = graph_of(fabric)
    graph.remove_nodes_from(range(fabric.nodes))  # nodes do not forward
    at = [{cable.b for cable in fabric.cables if cable.a == node} for node in range(fabric.nodes)]
    lengths = dict(networkx.all_pairs_shortest_path_length(graph))
    far = max(
        min(lengths[low].get(high, 1 << 30) for low in at[a] for high in at[b])
        for a in range(fabric.nodes)
        for b in range(a)
    )
    assert diameter(fabric) == far + 1


def test_the_diameter_of_the_16384_ports_of_a_paper_is_known() -> None:
    assert diameter(multi_plane(gpus(2048, 8), planes=8, radix=64, gbit_per_s=RATE)) == 3


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: two_layer_tree(gpus(801), radix=40, gbit_per_s=RATE), "need 41 leaf switches"),
        (lambda: two_layer_tree(gpus(8), radix=7, gbit_per_s=RATE), "even number from 2 to 4096"),
        (lambda: two_layer_tree(gpus(8), radix=8, gbit_per_s=0.0), "is no rate of a link"),
        (lambda: two_layer_tree((), radix=8, gbit_per_s=RATE), "without nodes"),
        (lambda: two_layer_tree(gpus(1 << 21), radix=4096, gbit_per_s=RATE), "more than 1048576"),
        (lambda: two_layer_tree(gpus(8), radix=8, gbit_per_s=RATE, uplinks=8), "cannot have 8 uplinks"),
        (lambda: three_layer_tree(gpus(1025), radix=16, gbit_per_s=RATE), "more than the 1024 of three layers"),
        (lambda: three_layer_tree(gpus(64), radix=8, gbit_per_s=RATE, cores=3), "use a multiple of 4"),
        (lambda: zones(gpus(1600), radix=40, gbit_per_s=RATE, between=40), "needs 800 ports for nodes and has 760"),
        (lambda: zones(gpus(9), radix=8, gbit_per_s=RATE, between=1, count=9), "does not reach all of 2 zone"),
        (lambda: zones(gpus(8, 2), radix=40, gbit_per_s=RATE, between=40), "nodes have one port"),
        (lambda: zones(gpus(8), radix=8, gbit_per_s=RATE, between=8, zone_switches=1), "needs 16 ports and has 8"),
        (lambda: multi_plane(gpus(8, 3), planes=4, radix=8, gbit_per_s=RATE), "one in each of the 4 planes"),
        (lambda: rail_optimised(gpus(8, 3), rails=4, radix=8, gbit_per_s=RATE), "4 rails need nodes"),
        (lambda: slim_fly(28, gbit_per_s=RATE), "no power of a prime.*; use 3, 4, 5, 7, .*, 25, 27, 29, 31, 32, 37, "),
        (lambda: slim_fly(6, gbit_per_s=RATE), "not 6; those that can be built are 3, 4, 5, .*, 61 or 64"),
        (lambda: slim_fly(81, gbit_per_s=RATE), "the largest that is built: use 3, "),
        (
            lambda: dragonfly(nodes_per_switch=1, group_switches=4, global_links=2, groups=8, gbit_per_s=RATE),
            "not divisible by the 7 other groups",
        ),
        (lambda: NodeGroup(kind="gpu", count=0), "are none"),
        (lambda: NodeGroup(kind="", count=1), "no kind"),
    ],
)
def test_what_cannot_be_cabled_is_refused(build: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build()  # type: ignore[operator]


def test_each_zone_may_use_all_ports_of_its_leaf_switches() -> None:
    """625 nodes, 160 servers and 15 links to zone switches at 40 leaf switches with 20 ports each."""
    storage = NodeGroup(kind="storage", count=160, ports=2)
    network = zones([NodeGroup(kind="gpu", count=1250)], radix=40, gbit_per_s=200, between=15, shared=[storage])
    assert set(network.ports_used()[:80]) == {40}
