"""Operations as transfers: each byte that programs send, in an order in which they can be sent."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.base.errors import UsageError
from fireflyer.collectives import make_plan, traffic
from fireflyer.collectives.planning.plan import LINE, RING, SUITABLE, TREE, Route, double_binary_tree
from fireflyer.netsim import Settings, simulate
from fireflyer.topology.fabrics import NodeGroup, two_layer_tree
from fireflyer.topology.traffic import check_transfers

KIB = 1024
WAYS = [(kind, algorithm) for kind, suitable in SUITABLE.items() if kind != "barrier" for algorithm in suitable]


def bytes_of_pairs(transfers: object) -> Counter[tuple[int, int]]:
    found: Counter[tuple[int, int]] = Counter()
    for one in transfers:  # type: ignore[attr-defined]
        found[one.source, one.target] += one.nbytes
    return found


@given(st.sampled_from(WAYS), st.integers(2, 9), st.integers(1, 20_000), st.sampled_from([2, 4, 8]))
def test_transfers_can_be_simulated_and_follow_each_other_in_order(
    way: tuple[str, str], nodes: int, elements: int, window: int
) -> None:
    kind, algorithm = way
    routes = [Route(kind, None, algorithm, 4 * KIB)]
    plan = make_plan([node // 2 for node in range(2 * nodes)], routes=routes, window=window)
    transfers = traffic(plan, kind, elements, root=0 if kind in ("reduce", "broadcast") else None)
    check_transfers(transfers, nodes)
    assert all(other < one.id for one in transfers for other in one.after)
    received = Counter(one.target for one in transfers if one.nbytes)
    assert sum(received.values()) > 0


@pytest.mark.parametrize("nodes", [2, 5, 8])
def test_a_tree_sends_each_chunk_over_each_of_its_edges_up_and_down(nodes: int) -> None:
    plan = make_plan(range(nodes), routes=[Route("allreduce", None, TREE, 4 * KIB)])
    chunks = 6
    sent = bytes_of_pairs(traffic(plan, "allreduce", chunks * KIB, element_bytes=2, sum_bytes=4))
    expected: Counter[tuple[int, int]] = Counter()
    for parents in double_binary_tree(nodes):
        for node, parent in enumerate(parents):
            if parent >= 0:
                expected[node, parent] += chunks // 2 * KIB * 4
                expected[parent, node] += chunks // 2 * KIB * 2
    assert sent == expected


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_a_ring_sends_almost_the_array_twice(nodes: int) -> None:
    plan = make_plan(range(nodes), routes=[Route("allreduce", None, RING, 64 * KIB)])
    sent = bytes_of_pairs(traffic(plan, "allreduce", 64 * KIB))
    whole = 64 * KIB * 4
    assert sum(sent.values()) == nodes * 2 * (nodes - 1) * whole // nodes


def test_parts_are_those_of_the_ranks_of_a_node() -> None:
    plan = make_plan([0, 0, 0, 1], routes=[Route("allgather", None, LINE, 4 * KIB)])
    sent = bytes_of_pairs(traffic(plan, "allgather", 1000, element_bytes=2))
    assert sent == {(0, 1): 3 * 2000, (1, 0): 2000}


def test_a_window_limits_how_many_chunks_are_under_way() -> None:
    """On one link at a time a chunk goes up and down a line of nodes; with a window of 2 each lane has one chunk."""
    fabric = two_layer_tree([NodeGroup(kind="gpu", count=8)], radix=8, gbit_per_s=8)

    def lasts(window: int) -> float:
        plan = make_plan(range(8), routes=[Route("allreduce", None, TREE, 64 * KIB)], window=window)
        transfers = traffic(plan, "allreduce", 32 * 16 * KIB)
        return simulate(fabric, transfers, Settings(routing="static")).makespan_s

    assert lasts(2) > 1.5 * lasts(8)
    assert lasts(8) >= 32 * 64 * KIB / 1e9


def test_what_a_plan_cannot_do_is_one_line() -> None:
    plan = make_plan(range(3))
    with pytest.raises(UsageError, match="has no route"):
        traffic(plan, "alltoall", 1)
    with pytest.raises(UsageError, match="use larger chunks"):
        traffic(plan, "allreduce", 1 << 45)
