"""Programs: both ends of a connection expect the same frames in the same order, whatever the interleaving every result
is the documented sum, and nothing blocks."""

from __future__ import annotations

import random
from collections import Counter
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fireflyer.base.errors import InvariantViolation, UsageError
from fireflyer.collectives import Plan, make_plan
from fireflyer.collectives.planning import programs, simulator
from fireflyer.collectives.planning.plan import ALGORITHMS, HALVING_DOUBLING, LINE, RING, SUITABLE, TREE, Route
from fireflyer.collectives.planning.programs import (
    CONTROL,
    RECEIVES,
    SENDS,
    Action,
    Link,
    Step,
    build,
    channel_of,
    links,
)
from fireflyer.collectives.planning.simulator import Value, expected_sum, run
from fireflyer.collectives.planning.trees import orient
from fireflyer.native import tree_program

WAYS = [(kind, algorithm) for kind, suitable in SUITABLE.items() for algorithm in suitable]


class Case(NamedTuple):
    plan: Plan
    kind: str
    algorithm: str
    root: int | None


@st.composite
def cases(draw: st.DrawFn, most_nodes: int = 9) -> Case:
    nodes = draw(st.integers(1, most_nodes))
    kind, algorithm = draw(st.sampled_from(WAYS))
    plan = make_plan(
        [node for node in range(nodes) for _ in range(draw(st.integers(1, 2)))],
        window=draw(st.sampled_from([2, 4, 8])),
        node_order=draw(st.permutations(range(nodes))),
        sockets=draw(st.sampled_from([1, 1, 2, 3])),
    )
    root = draw(st.integers(0, nodes - 1)) if kind in ("reduce", "broadcast") else None
    return Case(plan, kind, algorithm, root)


@given(case=cases(40), lane=st.integers(0, 1))
def test_every_send_has_its_receive_in_the_same_round(case: Case, lane: int) -> None:
    made = build(case.plan, case.kind, case.algorithm, lane, case.root)
    sent: Counter[tuple[int, int, int, int, int, bool]] = Counter()
    received: Counter[tuple[int, int, int, int, int, bool]] = Counter()
    for node, program in enumerate(made):
        assert program[:3] == made[0][:3]
        for step in program.steps:
            assert 0 <= step.block < step.block + step.span <= program.blocks
            assert 0 <= step.round < program.rounds
            what = (step.round, step.block, step.span, step.action in (Action.SEND_ACC, Action.RECEIVE_ADD))
            if step.action in SENDS:
                sent[(node, step.peer, *what)] += 1
            if step.action in RECEIVES:
                received[(step.peer, node, *what)] += 1
    assert sent == received
    assert all(count == 1 for count in sent.values())


@given(case=cases(40), lane=st.integers(0, 1))
def test_a_transfer_depends_on_lower_rounds_only(case: Case, lane: int) -> None:
    for program in build(case.plan, case.kind, case.algorithm, lane, case.root):
        for index, step in enumerate(program.steps):
            for before in step.after:
                assert before < index
                earlier = program.steps[before]
                local = step.action is Action.FINISH or (
                    step.action in RECEIVES and earlier.action is Action.RECEIVE_ADD
                )
                assert earlier.round <= step.round if local else earlier.round < step.round


@settings(max_examples=150)
@given(
    case=cases(), chunks=st.integers(0, 9), in_transit=st.integers(1, 3), scratch=st.integers(1, 3), seed=st.integers()
)
def test_in_every_order_the_results_are_right_and_nothing_blocks(
    case: Case, chunks: int, in_transit: int, scratch: int, seed: int
) -> None:
    choose = random.Random(seed).randrange
    ends, _ = run(
        case.plan, case.kind, case.algorithm, chunks, choose, root=case.root, in_transit=in_transit, scratch=scratch
    )
    for node, end in enumerate(ends):
        takes = case.kind != "reduce" or node == case.root
        assert end == (None, False, chunks if takes else 0)


@pytest.mark.parametrize("favour", ["first", "last"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("nodes", [2, 3, 16, 21])
def test_greedy_orders_do_not_block_either(nodes: int, algorithm: str, favour: str) -> None:
    plan = make_plan(range(nodes), window=2)
    run(plan, "allreduce", algorithm, 3, lambda n: 0 if favour == "first" else n - 1)


def tree_sum(plan: Plan, lane: int) -> Value:
    tree = plan.trees[lane]
    views = orient(tree, tree.index(-1))

    def below(node: int) -> Value:
        value: Value = node
        for child in views[node].children:
            value = (value, below(child))
        return value

    return below(tree.index(-1))


def ring_sum(plan: Plan, lane: int, block: int) -> Value:
    order = plan.order if lane == 0 else plan.order[::-1]
    last = order.index(block)
    round_trip = [*order[last + 1 :], *order[: last + 1]]
    value: Value = round_trip[0]
    for node in round_trip[1:]:
        value = (node, value)
    return value


def line_sum(plan: Plan, lane: int, block: int) -> Value:
    order = plan.order if lane == 0 else plan.order[::-1]
    place = order.index(block)
    value: Value = block
    for side in (order[:place], order[:place:-1]):
        if side:
            collected: Value = side[0]
            for node in side[1:]:
                collected = (node, collected)
            value = (value, collected)
    return value


def halving_doubling_sum(plan: Plan, lane: int, block: int) -> Value:
    order = plan.order if lane == 0 else plan.order[::-1]
    p = 1 << (len(order).bit_length() - 1)
    extra = len(order) - p
    pairs: list[Value] = [(order[2 * v], order[2 * v + 1]) for v in range(extra)]
    values: list[Value] = [*pairs, *order[2 * extra :]]

    def sum_at(v: int, distance: int) -> Value:
        """What v holds after the exchange at this distance."""
        return values[v] if distance == p else (sum_at(v, 2 * distance), sum_at(v ^ distance, 2 * distance))

    return sum_at(block, 1)


@given(nodes=st.integers(2, 20).flatmap(lambda n: st.permutations(range(n))), lane=st.integers(0, 1))
def test_sums_are_taken_in_the_documented_order(nodes: list[int], lane: int) -> None:
    plan = make_plan(range(len(nodes)), node_order=nodes)
    assert expected_sum(build(plan, "allreduce", TREE, lane), 0) == tree_sum(plan, lane)
    for block in range(len(nodes)):
        for kind in ("allreduce", "reduce_scatter"):
            assert expected_sum(build(plan, kind, RING, lane), block) == ring_sum(plan, lane, block)
            assert expected_sum(build(plan, kind, LINE, lane), block) == line_sum(plan, lane, block)
    halving = build(plan, "allreduce", HALVING_DOUBLING, lane)
    for block in range(halving[0].blocks):
        assert expected_sum(halving, block) == halving_doubling_sum(plan, lane, block)


@given(case=cases(30), lane=st.integers(0, 1))
def test_native_trees_are_the_same_programs(case: Case, lane: int) -> None:
    if case.algorithm != TREE:
        return
    root = case.plan.trees[lane].index(-1) if case.root is None else case.root
    for node, program in enumerate(build(case.plan, case.kind, TREE, lane, case.root)):
        native = tree_program(case.kind, list(case.plan.trees[lane]), root, node, lane)
        steps = [(int(s.action), s.peer, s.block, s.span, 0, list(s.after)) for s in program.steps]
        assert native == (case.kind, lane, program.channel, 1, 1, steps)


@given(case=cases(12))
def test_both_ends_of_every_link_know_it_and_every_step_has_its_link(case: Case) -> None:
    route = Route(case.kind, None, case.algorithm, 4096)
    plan = make_plan(case.plan.node_of_rank, routes=[route], sockets=case.plan.sockets)
    of_node = [set(links(plan, node)) for node in range(plan.nodes)]
    made = [build(plan, case.kind, case.algorithm, lane, case.root) for lane in (0, 1)]
    for node, mine in enumerate(of_node):
        assert len(mine) == len(links(plan, node))
        for link in mine:
            assert link._replace(node=node) in of_node[link.node]
            assert any((other.channel, other.node) == (CONTROL, link.node) for other in mine)
        for program in (made[0][node], made[1][node]):
            for step in program.steps:
                if step.peer >= 0:
                    sockets = {
                        link.socket for link in mine if (link.channel, link.node) == (program.channel, step.peer)
                    }
                    assert sockets == set(range(plan.sockets))


@pytest.mark.parametrize(
    ("algorithm", "nodes", "most"), [(TREE, 64, 2.0), (RING, 12, 2.0), (HALVING_DOUBLING, 16, 2.0), (LINE, 12, 2.0)]
)
def test_nobody_sends_more_than_twice_the_data(algorithm: str, nodes: int, most: float) -> None:
    plan = make_plan(range(nodes))
    sent: Counter[int] = Counter()
    for lane in (0, 1):
        for node, program in enumerate(build(plan, "allreduce", algorithm, lane)):
            sent[node] += sum(step.span for step in program.steps if step.action in SENDS)
    blocks = build(plan, "allreduce", algorithm, 0)[0].blocks
    assert max(sent.values()) <= most * 2 * blocks


@given(networks=st.integers(1, programs.MAX_NETWORKS), case=cases(12))
def test_the_connections_of_a_node_use_every_network_equally(networks: int, case: Case) -> None:
    plan = msgspec.structs.replace(case.plan, sockets=programs.sockets_for(networks))
    for algorithm in ALGORITHMS:
        used = Counter(
            programs.network_of(Link(channel_of(algorithm, lane), 0, socket), networks)
            for lane in programs.LANES
            for socket in range(plan.sockets)
        )
        assert sorted(used) == list(range(networks))
        assert max(used.values()) - min(used.values()) <= 1
    assert {programs.network_of(link, networks) for link in links(plan, 0) if link.channel == CONTROL} <= {0}


def test_steps_of_a_leaf_can_be_read() -> None:
    leaf = build(make_plan([0, 1]), "allreduce", TREE, 0)[1]
    assert leaf.steps == (
        Step(Action.SEND_ACC, 0, 0, 1, 0, ()),
        Step(Action.RECEIVE_RESULT, 0, 0, 1, 1, (0,)),
    )


def test_what_cannot_be_done_is_told() -> None:
    plan = make_plan([0, 1])
    with pytest.raises(UsageError, match="needs a root"):
        build(plan, "reduce", TREE, 0)
    with pytest.raises(UsageError, match="allreduce has no root"):
        build(plan, "allreduce", TREE, 0, 1)
    with pytest.raises(UsageError, match="broadcast cannot be done by ring"):
        build(plan, "broadcast", RING, 0, 1)


def blocks_or_goes_wrong(plan: Plan, algorithm: str) -> bool:
    for seed in range(30):
        try:
            run(plan, "allreduce", algorithm, 12, random.Random(seed).randrange)
        except InvariantViolation:
            return True
    return False


def test_the_simulator_notices_an_order_of_frames_that_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(range(6), window=4)
    assert not blocks_or_goes_wrong(plan, RING)
    monkeypatch.setattr(simulator, "stride_of", lambda rounds, depth: 0)
    assert blocks_or_goes_wrong(plan, RING)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_simulator_notices_a_step_that_waits_for_too_little(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(*arguments: object) -> tuple[programs.Program, ...]:
        return tuple(
            program._replace(
                steps=tuple(s._replace(after=()) if s.action is Action.FINISH else s for s in program.steps)
            )
            for program in build(*arguments)  # type: ignore[arg-type]
        )

    monkeypatch.setattr(simulator, "build", careless)
    assert blocks_or_goes_wrong(make_plan(range(5)), algorithm)
