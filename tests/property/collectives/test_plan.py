"""The plan: two trees that share the work, routes by kind and size, and that what is stored stays readable."""

from __future__ import annotations

from collections import Counter
from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.base.errors import UsageError
from fireflyer.collectives import Plan, Route, make_plan
from fireflyer.collectives.planning.plan import HALVING_DOUBLING, RING, TREE
from fireflyer.collectives.planning.trees import double_binary_tree, orient
from fireflyer.native import orient as native_orient


def children_of(tree: tuple[int, ...]) -> list[int]:
    counts = Counter(tree)
    return [counts[node] for node in range(len(tree))]


def depth_of(tree: tuple[int, ...]) -> int:
    def depth(node: int) -> int:
        return 0 if tree[node] < 0 else 1 + depth(tree[node])

    return max(depth(node) for node in range(len(tree)))


@pytest.mark.parametrize("nodes", [*range(1, 70), 127, 128, 129, 180, 1000, 1250])
def test_both_trees_are_binary_span_all_nodes_and_are_as_deep_as_a_binary_tree_must_be(nodes: int) -> None:
    for tree in double_binary_tree(nodes):
        assert len(tree) == nodes
        assert tree.count(-1) == 1
        assert max(children_of(tree)) <= 2
        assert depth_of(tree) <= nodes.bit_length()
        orient(tree, 0)  # refuses what is no tree


@pytest.mark.parametrize("nodes", [*range(2, 130), 1000, 1249, 1250])
def test_every_node_is_a_leaf_in_one_tree_and_with_an_odd_number_all_but_one(nodes: int) -> None:
    first, second = (children_of(tree) for tree in double_binary_tree(nodes))
    inner_in_both = [node for node in range(nodes) if first[node] and second[node]]
    assert len(inner_in_both) == nodes % 2
    if nodes % 2 == 0:
        assert all((first[node] == 0) != (second[node] == 0) for node in range(nodes))


@given(nodes=st.integers(1, 40), tree=st.integers(0, 1), data=st.data())
def test_a_tree_can_be_hung_up_at_any_node_and_keeps_its_edges(nodes: int, tree: int, data: st.DataObject) -> None:
    parents = double_binary_tree(nodes)[tree]
    root = data.draw(st.integers(0, nodes - 1))
    views = orient(parents, root)
    assert [view.parent for view in views].count(-1) == 1
    assert views[root].parent == -1
    edges = {frozenset((node, parent)) for node, parent in enumerate(parents) if parent >= 0}
    assert {frozenset((node, view.parent)) for node, view in enumerate(views) if view.parent >= 0} == edges
    for node, view in enumerate(views):
        assert list(view.children) == sorted(other for other, v in enumerate(views) if v.parent == node)
        assert native_orient(list(parents), root, node) == (view.parent, list(view.children))


@given(nodes=st.integers(1, 20), ranks=st.integers(1, 5), chunk=st.integers(1, 100), window=st.sampled_from([2, 8, 32]))
def test_a_plan_survives_json(nodes: int, ranks: int, chunk: int, window: int) -> None:
    plan = make_plan([rank // ranks for rank in range(nodes * ranks)], chunk_bytes=4096 * chunk, window=window)
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan
    assert plan.nodes == nodes
    assert [plan.node_of_rank[plan.leader_of(node)] for node in range(nodes)] == list(range(nodes))
    assert sorted(rank for node in range(nodes) for rank in plan.ranks_of(node)) == list(range(plan.world_size))


HOSTILE: dict[str, dict[str, object]] = {
    "another algorithm": {"algorithm": "ring"},
    "no ranks": {"node_of_rank": []},
    "a gap in the nodes": {"node_of_rank": [0, 2, 2, 3]},
    "a negative node": {"node_of_rank": [0, -1, 1, 2]},
    "too many ranks on a node": {"node_of_rank": [0] * 65 + [1, 2, 3]},
    "chunks of nothing": {"chunk_bytes": 0},
    "odd chunks": {"chunk_bytes": 5000},
    "huge chunks": {"chunk_bytes": 1 << 40},
    "no window": {"window": 0},
    "an odd window": {"window": 3},
    "a huge window": {"window": 64},
    "one tree": {"trees": [[-1, 0, 0, 0]]},
    "a short tree": {"trees": [[-1, 0, 0], [-1, 0, 0]]},
    "a cycle": {"trees": [[-1, 2, 3, 1], [-1, 0, 1, 2]]},
    "two roots": {"trees": [[-1, -1, 0, 1], [-1, 0, 1, 2]]},
    "its own parent": {"trees": [[-1, 1, 0, 0], [-1, 0, 1, 2]]},
    "an unknown parent": {"trees": [[-1, 9, 0, 0], [-1, 0, 1, 2]]},
    "too many children": {"trees": [[1, -1, 1, 1, 1], [-1, 0, 1, 2, 3]], "node_of_rank": [0, 1, 2, 3, 4]},
    "an unknown field": {"ports": [1]},
    "a version to come": {"version": 3},
    "routes in the first version": {"version": 1},
    "no sockets": {"sockets": 0},
    "many sockets": {"sockets": 9},
    "an order with a node missing": {"node_order": [0, 1, 2]},
    "an order with a node twice": {"node_order": [0, 1, 2, 2]},
    "an unknown kind": {"routes": [["alltoall", None, "ring", 4096, ""]]},
    "an unknown algorithm": {"routes": [["allreduce", None, "bruck", 4096, ""]]},
    "an algorithm that cannot": {"routes": [["broadcast", None, "ring", 4096, ""]]},
    "a route with huge chunks": {"routes": [["allreduce", None, "ring", 1 << 40, ""]]},
    "a route that ends early": {"routes": [["allreduce", 4096, "ring", 4096, ""]]},
    "sizes that fall": {
        "routes": [
            ["allreduce", 99, "ring", 4096, ""],
            ["allreduce", 9, "ring", 4096, ""],
            ["allreduce", None, "ring", 4096, ""],
        ]
    },
    "a negative size": {"routes": [["allreduce", -5, "ring", 4096, ""], ["allreduce", None, "ring", 4096, ""]]},
    "a route after the last": {"routes": [["allreduce", None, "ring", 4096, ""], ["allreduce", 9, "ring", 4096, ""]]},
    "too many routes": {
        "routes": [["allreduce", n, "ring", 4096, ""] for n in range(64)] + [["allreduce", None, "ring", 4096, ""]]
    },
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_plan_that_makes_no_sense_is_refused(what: str) -> None:
    good = cast("dict[str, object]", msgspec.to_builtins(make_plan([0, 1, 2, 3])))
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(good | HOSTILE[what]), type=Plan)


def test_bad_arguments_are_told() -> None:
    with pytest.raises(UsageError, match="at least 1 node"):
        double_binary_tree(0)
    with pytest.raises(UsageError, match="root node 4 is not one of 4"):
        orient((-1, 0, 0, 0), 4)
    with pytest.raises(UsageError, match="without gaps"):
        make_plan([0, 2])
    with pytest.raises(UsageError, match="'all_to_all' has no route"):
        make_plan([0, 1]).route("all_to_all", 5)


def test_a_kind_and_a_size_choose_the_route() -> None:
    rows = [
        Route("allreduce", 4096, HALVING_DOUBLING, 8192, "few bytes: fewest rounds"),
        Route("allreduce", 1 << 20, TREE, 65536, "measured"),
        Route("allreduce", None, RING, 1 << 20, "many bytes"),
    ]
    plan = make_plan([0, 1, 2], routes=rows)
    chosen = [plan.route("allreduce", nbytes) for nbytes in (0, 4096, 4097, 1 << 20, (1 << 20) + 1, 1 << 50)]
    assert chosen == [rows[0], rows[0], rows[1], rows[1], rows[2], rows[2]]
    assert plan.route("broadcast", 1) == Route("broadcast", None, TREE, plan.chunk_bytes, "default")
    assert plan.route("allgather", 1).algorithm == RING
    assert plan.largest_chunk_bytes == 1 << 20
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan


def test_chunks_of_parts_hold_an_element_of_every_rank() -> None:
    ranks = [rank // 64 for rank in range(1 << 16)]
    plan = make_plan(ranks, chunk_bytes=4096)
    assert plan.route("reduce_scatter", 1).chunk_bytes == 8 << 16
    assert plan.route("allreduce", 1).chunk_bytes == 4096
    with pytest.raises(UsageError, match="cannot be 4096 bytes"):
        make_plan(ranks, routes=[Route("allgather", None, RING, 4096)])


def test_a_plan_stored_by_the_first_version_still_means_the_same() -> None:
    stored = (
        b'{"algorithm":"double_binary_tree","node_of_rank":[0,0,1,2],"chunk_bytes":8192,"window":8,'
        b'"trees":[[-1,2,0],[1,-1,0]]}'
    )
    plan = msgspec.json.decode(stored, type=Plan)
    assert (plan.version, plan.order, plan.sockets) == (1, (0, 1, 2), 1)
    for kind in ("allreduce", "reduce", "broadcast", "barrier"):
        route = plan.route(kind, 1 << 30)
        assert (route.algorithm, route.chunk_bytes) == (TREE, 8192)
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan


@given(order=st.integers(1, 20).flatmap(lambda nodes: st.permutations(range(nodes))))
def test_an_order_of_nodes_renames_the_trees(order: list[int]) -> None:
    plan = make_plan(range(len(order)), node_order=order)
    for tree, unnamed in zip(plan.trees, double_binary_tree(len(order)), strict=True):
        for place, parent in enumerate(unnamed):
            assert tree[order[place]] == (order[parent] if parent >= 0 else -1)


def test_more_chunks_are_in_flight_where_they_climb_trees() -> None:
    assert [make_plan(range(nodes)).window for nodes in (1, 2, 3, 8)] == [4, 4, 8, 8]
    with pytest.raises(UsageError, match="window 0"):
        make_plan([0, 1, 2], window=0)
