"""The plan: two trees that share the work, every send received, every contribution counted once, never a deadlock."""

from __future__ import annotations

import random
from collections import Counter
from typing import cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fireflyer.base.errors import UsageError
from fireflyer.collectives import Plan, double_binary_tree, make_plan, orient
from fireflyer.collectives.plan import chunk_tree
from fireflyer.collectives.steps import Action, Kind, Step, expand, simulate
from fireflyer.native import orient as native_orient

KINDS: list[Kind] = ["allreduce", "reduce", "broadcast"]
OPPOSITE = {Action.SEND_UP: Action.RECEIVE_UP, Action.SEND_DOWN: Action.RECEIVE_DOWN}


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


@given(nodes=st.integers(1, 12), kind=st.sampled_from(KINDS), chunks=st.integers(0, 9), data=st.data())
def test_every_send_has_its_receive_in_the_same_order(nodes: int, kind: Kind, chunks: int, data: st.DataObject) -> None:
    plan = make_plan(range(nodes))
    root = None if kind == "allreduce" else data.draw(st.integers(0, nodes - 1))
    sent: dict[tuple[int, int, int, Action], list[int]] = {}
    received: dict[tuple[int, int, int, Action], list[int]] = {}
    for stream in expand(plan, kind, chunks, root):
        for step in stream.steps:
            assert chunk_tree(step.chunk) == stream.tree
            if step.action in OPPOSITE:
                key = (stream.tree, stream.node, step.peer, OPPOSITE[step.action])
                sent.setdefault(key, []).append(step.chunk)
            elif step.action in OPPOSITE.values():
                received.setdefault((stream.tree, step.peer, stream.node, step.action), []).append(step.chunk)
    assert sent == received


@settings(deadline=None)
@given(
    nodes=st.integers(1, 9),
    kind=st.sampled_from(KINDS),
    chunks=st.integers(0, 12),
    window=st.sampled_from([2, 4, 8]),
    in_transit=st.integers(1, 3),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_in_every_order_each_contribution_counts_once_and_nothing_blocks(
    nodes: int, kind: Kind, chunks: int, window: int, in_transit: int, seed: int, data: st.DataObject
) -> None:
    plan = make_plan(range(nodes), window=window)
    root = None if kind == "allreduce" else data.draw(st.integers(0, nodes - 1))
    order = random.Random(seed)
    steps = simulate(plan, kind, chunks, order.randrange, root=root, in_transit=in_transit)
    assert steps == sum(len(stream.steps) for stream in expand(plan, kind, chunks, root))


@pytest.mark.parametrize("favour", ["first", "last"])
@pytest.mark.parametrize("nodes", [2, 3, 16, 33])
def test_greedy_orders_do_not_block_either(nodes: int, favour: str) -> None:
    plan = make_plan(range(nodes), window=2)
    simulate(plan, "allreduce", 10, lambda n: 0 if favour == "first" else n - 1)


@pytest.mark.parametrize("nodes", [2, 4, 16, 64])
def test_nobody_sends_more_than_twice_the_data(nodes: int) -> None:
    chunks = 100
    sends: Counter[int] = Counter()
    for stream in expand(make_plan(range(nodes)), "allreduce", chunks):
        sends[stream.node] += sum(step.action in OPPOSITE for step in stream.steps)
    assert max(sends.values()) <= 2 * chunks


def test_steps_of_a_leaf_can_be_read() -> None:
    leaf = [s for s in expand(make_plan([0, 1]), "allreduce", 2) if s.node == 1 and s.tree == 0]
    assert [stream.steps for stream in leaf] == [
        (Step(Action.ADD, 0, -1),),
        (Step(Action.SEND_UP, 0, 0),),
        (Step(Action.RECEIVE_DOWN, 0, 0),),
        (Step(Action.DELIVER, 0, -1),),
    ]


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
    with pytest.raises(UsageError, match="needs a root"):
        expand(make_plan([0, 1]), "reduce", 1)
