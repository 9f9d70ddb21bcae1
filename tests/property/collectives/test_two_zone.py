"""Trees over two zones cross by one pair of nodes, and nobody carries more for it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.collectives.trees import depth_of, edges_of, inner_nodes, subtrees_of

from fireflyer.base.errors import UsageError
from fireflyer.collectives.planning.plan import Plan, Tree, double_binary_tree, orient
from fireflyer.topology import count_crossings, pairs_across, zone_order, zone_trees, zones_of_hosts


def test_all_sizes_of_two_zones_cross_by_one_pair_in_both_trees() -> None:
    for first in range(1, 65):
        for second in range(1, first + 1):
            zones = (0,) * first + (1,) * second
            check_two_zones(zones, zone_trees(zones, double_binary_tree))
            turned = (0,) * second + (1,) * first
            assert len(count_crossings(zone_trees(turned, double_binary_tree), turned).pairs) == 1


@given(st.lists(st.integers(0, 1), min_size=2, max_size=150).filter(lambda zones: len(set(zones)) == 2))
def test_nodes_of_two_zones_in_any_order(zones: list[int]) -> None:
    check_two_zones(zones, zone_trees(zones, double_binary_tree))


def check_two_zones(zones: Sequence[int], trees: tuple[Tree, Tree]) -> None:
    nodes = len(zones)
    crossings = count_crossings(trees, zones)
    assert len(crossings.pairs) == 1, f"{zones}: {crossings}"
    assert crossings.of_trees == (crossings.pairs, crossings.pairs)
    for tree in trees:
        assert len(orient(tree, tree.index(-1))) == nodes
        assert max(edges_of(tree)) <= 3
        assert depth_of(tree) <= max(depth_of(plain) for plain in double_binary_tree(nodes)) + 1
    together = [a + b for a, b in zip(edges_of(trees[0]), edges_of(trees[1]), strict=True)]
    assert max(together) <= 4, f"{zones}: a node has {max(together)} edges"
    # Inner in both: the pair, and of each zone whose other nodes are odd in number the one that is so without zones.
    odd = sum((zones.count(zone) - 1) % 2 for zone in set(zones))
    both = inner_nodes(trees[0]) & inner_nodes(trees[1])
    assert len(both - set(crossings.pairs[0])) <= odd


@given(st.lists(st.integers(0, 5), min_size=1, max_size=120))
def test_more_zones_are_a_chain(zones: list[int]) -> None:
    trees = zone_trees(zones, double_binary_tree)
    crossings = count_crossings(trees, zones)
    ordered = sorted(set(zones))
    neighbours = list(itertools.pairwise(ordered))
    assert sorted(tuple(sorted((zones[a], zones[b]))) for a, b in crossings.pairs) == neighbours
    assert crossings.of_trees == (crossings.pairs, crossings.pairs)
    together = [a + b for a, b in zip(edges_of(trees[0]), edges_of(trees[1]), strict=True)]
    heavy = [edges for edges in together if edges > 4]
    assert all(edges == 5 for edges in heavy)
    assert len(heavy) <= max(0, len(ordered) - 2)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_a_plan_accepts_the_trees(zones: list[int]) -> None:
    trees = zone_trees(zones, double_binary_tree)
    assert Plan(node_of_rank=tuple(range(len(zones))), trees=trees).trees == trees


def test_one_zone_has_the_double_binary_tree_itself() -> None:
    for nodes in range(1, 40):
        assert zone_trees((7,) * nodes, double_binary_tree) == double_binary_tree(nodes)


def test_no_order_of_the_nodes_would_do() -> None:
    """An edge cuts off a subtree. Two zones that both trees join by one edge each are a cut of both trees; the sizes of
    all common cuts are counted, which no renumbering changes."""
    possible = {}
    for nodes in range(2, 129):
        cuts = [
            {below if 0 not in below else frozenset(range(nodes)) - below for below in subtrees_of(tree)}
            for tree in double_binary_tree(nodes)
        ]
        possible[nodes] = {min(len(cut), nodes - len(cut)) for cut in cuts[0] & cuts[1]}
    assert possible == {key: {1} for key in range(2, 129)}


def test_crossings_are_told() -> None:
    zones = (0, 1, 0, 1)
    plain, joined = double_binary_tree(4), zone_trees(zones, double_binary_tree)
    assert str(count_crossings(plain, zones)) == "3 pairs of nodes talk across zones: 0-1, 1-2, 2-3"
    assert str(count_crossings(joined, zones)) == "1 pair of nodes talks across zones: 0-1"
    assert str(count_crossings(plain, (0,) * 4)) == "no pair of nodes talks across zones"


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60))
def test_a_line_in_zone_order_crosses_by_the_pairs_of_the_trees_and_a_ring_by_one_more(zones: list[int]) -> None:
    order = zone_order(zones)
    assert sorted(order) == list(range(len(zones)))
    assert [zones[node] for node in order] == sorted(zones)
    line = pairs_across(itertools.pairwise(order), zones)
    assert line == count_crossings(zone_trees(zones, double_binary_tree), zones).pairs
    ring = pairs_across([*itertools.pairwise(order), (order[-1], order[0])], zones)
    assert len(ring) == len(line) + (len(line) > 0 and len(zones) > 2)


def test_one_zone_stays_in_its_order() -> None:
    assert zone_order((3,) * 5) == (0, 1, 2, 3, 4)
    assert zone_order((1, 0, 1, 0, 0)) == (3, 4, 1, 0, 2)


def test_hosts_need_a_zone() -> None:
    assert zones_of_hosts(["b", "a"], {"a": 0, "b": 1}) == (1, 0)
    with pytest.raises(UsageError, match="host 'c' has no zone"):
        zones_of_hosts(["a", "c"], {"a": 0})
    with pytest.raises(UsageError, match="at least 1 node"):
        zone_trees((), double_binary_tree)
