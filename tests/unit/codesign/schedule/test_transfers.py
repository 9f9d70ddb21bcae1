"""Transfers of a pipeline: the time of the schedule, where the network is fast, and the bytes that ranks send."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import pytest
from tests.unit.codesign.test_parallel_plan import A100

from fireflyer.base.errors import UsageError
from fireflyer.codesign.model import ModelShape
from fireflyer.codesign.model.shape import Attention
from fireflyer.codesign.parallel import ParallelPlan
from fireflyer.codesign.parallel.traffic import stage_traffic
from fireflyer.codesign.schedule import (
    SCHEDULES,
    Costs,
    MessageBytes,
    build_schedule,
    compile_schedule,
    pipeline_transfers,
    simulate,
    uniform_costs,
)
from fireflyer.netsim import Settings
from fireflyer.netsim import simulate as simulate_network
from fireflyer.topology.fabrics import NodeGroup, two_layer_tree
from fireflyer.topology.traffic import Transfer, check_transfers

GBIT_PER_S = 200
BYTES_PER_S = GBIT_PER_S / 8 * 1e9
RANKS, MICRO_BATCHES = 4, 8


def of_schedule(
    name: str, nbytes: int, *, send_s: float = 0.0, nodes: tuple[int, ...] = ()
) -> tuple[list[Transfer], float]:
    """Transfers, and seconds of the step as the schedule's own simulator has them."""
    program = compile_schedule(build_schedule(name, RANKS, MICRO_BATCHES))
    placement = program.schedule.placement
    costs = uniform_costs(placement, forward=0.001, backward=0.002, weights=0.001, send=send_s)
    sizes = (nbytes,) * (placement.stages - 1)
    return pipeline_transfers(program, costs, MessageBytes(sizes, sizes), nodes=nodes), simulate(program, costs).total_s


def seconds_of(transfers: list[Transfer], nodes: int = RANKS) -> float:
    fabric = two_layer_tree([NodeGroup(kind="gpu", count=nodes)], radix=8, gbit_per_s=GBIT_PER_S)
    return simulate_network(fabric, transfers, Settings(routing="adaptive")).makespan_s


@pytest.mark.parametrize("name", SCHEDULES)
def test_messages_that_take_no_time_leave_the_time_of_the_schedule(name: str) -> None:
    transfers, total_s = of_schedule(name, 0)
    check_transfers(transfers, RANKS)
    assert seconds_of(transfers) == pytest.approx(total_s, rel=1e-9)


def test_messages_that_meet_no_others_take_their_time_on_the_wire() -> None:
    """GPipe sends in one direction at a time, and a rank takes longer for a pass than its message on the wire."""
    nbytes = 10_000_000
    transfers, total_s = of_schedule("gpipe", nbytes, send_s=nbytes / BYTES_PER_S)
    assert seconds_of(transfers) == pytest.approx(total_s, rel=1e-9)


def test_messages_that_share_a_nic_make_the_step_longer() -> None:
    alone, _ = of_schedule("1f1b", 20_000_000)
    on_one_nic = [
        one
        for replica in range(2)
        for one in pipeline_transfers(
            compile_schedule(build_schedule("1f1b", RANKS, MICRO_BATCHES)),
            Costs(forward_s=(0.001,) * 4, backward_s=(0.002,) * 4, input_s=(0.001,) * 4, weights_s=(0.001,) * 4),
            MessageBytes((20_000_000,) * 3, (20_000_000,) * 3),
            first_id=replica * 1_000_000,
        )
    ]
    assert seconds_of(on_one_nic) > 1.05 * seconds_of(alone)


def test_ranks_of_one_node_send_nothing_over_the_network() -> None:
    transfers, _ = of_schedule("1f1b", 1000, nodes=(0, 0, 1, 1))
    sent = Counter((one.source, one.target) for one in transfers if one.nbytes and one.source != one.target)
    assert sent == {(0, 1): MICRO_BATCHES, (1, 0): MICRO_BATCHES}


@pytest.mark.parametrize(("schedule", "pieces"), [("1f1b", 4), ("zbv", 8), ("dualpipe", 4)])
def test_ranks_send_the_bytes_that_plans_of_training_count(
    schedule: Literal["1f1b", "zbv", "dualpipe"], pieces: int
) -> None:
    shape = ModelShape(
        model_type="test",
        layers=16,
        hidden=1024,
        vocabulary=1000,
        feed_forward=4096,
        attention=Attention(heads=8, kv_heads=8, head_dim=128),
    )
    node = A100
    plan = ParallelPlan(
        pipeline=RANKS, shard=node.gpus, schedule=schedule, batch_sequences=MICRO_BATCHES * node.gpus,
        sequence_tokens=128,
    )  # fmt: skip
    assert (plan.pieces, plan.micro_batches) == (pieces, MICRO_BATCHES)
    transfers, _ = of_schedule(schedule, plan.micro_batch_tokens * shape.hidden * 2)
    sent = Counter[int]()
    for one in transfers:
        sent[one.source] += one.nbytes
    for rank in range(RANKS):
        counted = stage_traffic(plan, shape, node, rank).by_purpose["pipeline"]["nic"]
        assert sent[rank] * node.gpus == counted


def test_sizes_and_nodes_of_other_numbers_are_refused() -> None:
    program = compile_schedule(build_schedule("1f1b", 2, 2))
    costs = uniform_costs(program.schedule.placement, forward=1, backward=2, weights=1)
    with pytest.raises(UsageError, match="give one size, at least 0, for each of 1"):
        pipeline_transfers(program, costs, MessageBytes((1, 1), (1,)))
    with pytest.raises(UsageError, match="3 nodes for 2 ranks"):
        pipeline_transfers(program, costs, MessageBytes((1,), (1,)), nodes=(0, 1, 2))
