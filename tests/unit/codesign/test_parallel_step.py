"""Traffic, step times and search of plans, against the figures of the papers and a plain brute force."""

from __future__ import annotations

import itertools
import random
from time import process_time
from typing import Any

import msgspec
import pytest
from tests.support.model_configs import DEEPSEEK_MOE_16B, LLAMA_13B, Config
from tests.unit.codesign.test_parallel_plan import A100, H800, LLAMA, V3, V3_PLAN, plan

from fireflyer.codesign.model import Experts, shape_from_config, training_flops
from fireflyer.codesign.parallel import (
    MeasuredStep,
    ParallelPlan,
    SearchSpace,
    estimate_step,
    load_node,
    plan_memory,
    refusals,
    search_plans,
)
from fireflyer.codesign.parallel.experts import copies_per_token, expected_places, nodes_per_token
from fireflyer.codesign.parallel.memory import held_parameters
from fireflyer.codesign.parallel.plan import FORMAT_BYTES
from fireflyer.codesign.parallel.search import order_key
from fireflyer.codesign.parallel.step import optimizer_seconds
from fireflyer.codesign.parallel.traffic import link_rate, reduction, stage_traffic

TABLE_4 = MeasuredStep(
    forward_s=1.13,
    bubble_s=2.06,
    backward_s=1.99,
    weight_s=0.48,
    overlapped_s=13.95,
    optimizer_s=0.29,
    step_s=19.926,
    tokens_per_day=272.80e9,
    gpus=2048,
)


def test_table_4_parts_and_both_utilizations() -> None:
    assert TABLE_4.parts_s == pytest.approx(19.90)
    assert TABLE_4.step_tokens == pytest.approx(15_360 * 4096, rel=1e-4)
    for causal, mfu in ((True, 38.94), (False, 43.73)):
        found = TABLE_4.utilization(training_flops(V3, 4096, causal=causal), 989e12)
        assert 100 * found == pytest.approx(mfu, abs=0.006)


def test_a_byte_reduced_in_host_memory_costs_what_the_paper_counts() -> None:
    """IV-D3: 24 memory operations for 8 GPUs; 13.3 GB/s of memory, 12.5 of the NIC, 9.4 of the host bridge."""
    plain = msgspec.structs.replace(A100, nvlink_gpus=1)
    found = reduction(plain, slices=1, adds=8, nodes=1 << 20, up=1.0, down=1.0)
    assert found["host_memory"] == 24
    speeds = {link: link_rate(plain, link) / count for link, count in found.items()}
    assert speeds["host_memory"] == pytest.approx(13.33e9, rel=1e-3)
    assert speeds["nic"] == pytest.approx(12.5e9, rel=1e-3)
    assert speeds["host_bridge"] == pytest.approx(9.375e9)
    assert min(speeds, key=speeds.__getitem__) == "host_bridge"


def test_bridged_pairs_add_first_and_the_nic_binds() -> None:
    found = reduction(A100, slices=1, adds=8, nodes=1 << 20, up=1.0, down=1.0)
    speeds = {link: link_rate(A100, link) / count for link, count in found.items()}
    assert found["host_memory"] == 16
    assert speeds["host_bridge"] == pytest.approx(18.75e9)
    assert min(speeds, key=speeds.__getitem__) == "nic"


def test_the_nic_carries_one_sum_for_8_over_tensor_gradients() -> None:
    """Without adding on the node, each of its 8 GPUs would send its gradient."""
    given = plan(shard=8, tensor=2)
    stage = stage_traffic(given, LLAMA, A100, 1)
    dense, _ = held_parameters(given, LLAMA, 1)
    nodes = given.data * given.tensor // 8
    sums = given.tensor * dense * 4
    assert stage.by_purpose["gradients"]["nic"] == pytest.approx(sums * 2 * (nodes - 1) / nodes), "there and back"


def test_gradients_of_experts_are_added_over_ranks_with_the_same_experts_only() -> None:
    alone = ParallelPlan(shard=64, expert=64, zero=1, sequence_tokens=4096, batch_sequences=64)
    shape = shape_from_config(DEEPSEEK_MOE_16B)
    dense, routed = held_parameters(alone, shape, 0)
    assert routed > 0
    found = stage_traffic(alone, shape, H800, 0).by_purpose["gradients"]
    assert found["nic"] == pytest.approx(dense * 4 * 2 * 7 / 8), (
        "whole gradients are added up, each rank steps its rows"
    )


@pytest.mark.parametrize(
    ("degrees", "of_dense", "of_routed"),
    [
        ({"replicate": 8, "expert": 2}, 1, 1),
        ({"shard": 8, "zero": 1, "expert": 2}, 8, 4),
        ({"shard": 8, "zero": 1, "expert": 8}, 8, 1),
        ({"replicate": 2, "shard": 4, "zero": 1, "expert": 4}, 4, 1),
    ],
)
def test_the_optimizer_steps_a_shard_and_of_experts_one_of_the_ranks_with_the_same_ones(
    degrees: dict[str, int], of_dense: int, of_routed: int
) -> None:
    given = msgspec.convert({**degrees, "sequence_tokens": 4096, "batch_sequences": 64}, ParallelPlan)
    shape = shape_from_config(DEEPSEEK_MOE_16B)
    dense, routed = held_parameters(given, shape, 0)
    each = 2 * given.precision.state_bytes + 4 + FORMAT_BYTES[given.precision.parameters]
    wanted = (dense / of_dense + routed / of_routed) * each / H800.hbm_bytes_per_s
    assert given.precision.gradients == "fp32"
    assert optimizer_seconds(given, shape, H800, 0) == pytest.approx(wanted)


@pytest.mark.parametrize(("shard", "replicate", "gathered"), [(16, 1, 1 / 2), (8, 2, 0), (1, 16, 0)])
@pytest.mark.parametrize("node", [A100, H800], ids=["hfreduce", "ring"])
def test_stages_with_zero_1_add_whole_gradients_over_all_ranks_and_then_gather(
    shard: int, replicate: int, gathered: float, node: Any
) -> None:
    """In gradients and parameters of a stage that a node sends, with 2 nodes of 8 for each stage."""
    given = plan(shard=shard, replicate=replicate, zero=int(shard > 1))
    dense, _ = held_parameters(given, LLAMA, 1)
    found = stage_traffic(given, LLAMA, node, 1).by_purpose
    assert found["gradients"]["nic"] == pytest.approx(2 * 1 / 2 * dense * 4), "an allreduce, as without ZeRO"
    assert found["parameters"].get("nic", 0) == pytest.approx(gathered * dense * 2), "BF16"


@pytest.mark.parametrize(
    ("shard", "replicate", "zero", "nic"),
    [
        (8, 8, 1, 2 * 7 / 8),  # shards on a node; each of 8 parts is added over 8 nodes
        (32, 2, 1, 3 / 4 + 2 * 1 / 2 / 4),  # shards over 4 nodes, then an eighth of them on each node, between 2
        (64, 1, 1, 7 / 8),
        (1, 64, 0, 2 * 7 / 8),
        (8, 8, 3, 2 * 7 / 8),
        (32, 2, 3, 8 * 3 / 4 + 2 * 1 / 2 / 4),  # in each of 8 micro-batches, but once between replicas
    ],
)
@pytest.mark.parametrize("node", [A100, H800], ids=["hfreduce", "ring"])
def test_hybrid_sharding_adds_within_shards_and_then_between_replicas(
    shard: int, replicate: int, zero: int, nic: float, node: Any
) -> None:
    """In gradients of all parameters that a node sends, on 8 nodes of 8."""
    given = ParallelPlan(shard=shard, replicate=replicate, zero=zero, sequence_tokens=2048, batch_sequences=512)
    dense, _ = held_parameters(given, LLAMA, 0)
    found = stage_traffic(given, LLAMA, node, 0).by_purpose["gradients"]
    assert found["nic"] == pytest.approx(nic * dense * 4)


def test_expert_groups_that_begin_inside_a_node_send_over_the_network() -> None:
    """12 expert ranks on nodes of 8: each rank of the middle one of three nodes has 8 of its group elsewhere."""
    shape = shape_from_config(DEEPSEEK_MOE_16B | {"n_routed_experts": 72})
    given = ParallelPlan(shard=24, expert=12, zero=1, sequence_tokens=4096, batch_sequences=24)
    assert refusals(given, shape, H800, 3) == []
    experts = shape.experts
    assert experts is not None
    rng = random.Random(3)
    copies = [0.0] * 3
    draws = 4000
    for _ in range(draws):
        chosen = {expert // 6 for expert in rng.sample(range(72), experts.per_token)}  # ranks in the group
        for rank in range(24):
            first = rank // 12 * 12
            copies[rank // 8] += len({(first + one) // 8 for one in chosen} - {rank // 8}) / 8 / draws
    remote = copies_per_token(given, experts, 8).remote
    assert remote == pytest.approx(max(copies), rel=0.02)
    assert stage_traffic(given, shape, H800, 0).by_purpose["experts"]["nic"] > 0


def test_tokens_go_once_to_each_node() -> None:
    assert expected_places(256, 8, 8) == pytest.approx(5.295, abs=5e-4)
    experts = Experts(routed=256, per_token=8, feed_forward=2048, groups=8, groups_per_token=4)
    assert nodes_per_token(experts, 8) == 4
    assert nodes_per_token(experts, 2) == pytest.approx(expected_places(256, 8, 2))
    assert nodes_per_token(experts, 1) == 1


def test_what_goes_over_the_links_of_v3() -> None:
    stage = stage_traffic(V3_PLAN, V3, H800, 8)
    layers, tokens = 4, V3_PLAN.micro_batches * 4096
    one = tokens * (7392 + 2 * 7168) * 2 * layers  # FP8 with its scales out, BF16 back, forward and backward
    assert stage.by_purpose["experts"]["nic"] == pytest.approx(8 * 4 * 7 / 8 * one)
    assert stage.by_purpose["pipeline"]["nic"] == pytest.approx(8 * 2 * tokens * 7168 * 2)
    assert stage.by_purpose["tensor"] == {}


@pytest.mark.parametrize(
    ("config", "pipeline", "sequence", "batch", "gpus", "expected"),
    [
        (LLAMA_13B, 4, 2048, 4096, (64, 512), 64.118 / 9.717),
        (DEEPSEEK_MOE_16B, 10, 4096, 4608, (40, 320), 79.615 / 10.71),
        (DEEPSEEK_MOE_16B, 10, 4096, 4608, (40, 640), 79.615 / 6.535),
    ],
)
def test_speed_up_of_the_paper(
    config: Config, pipeline: int, sequence: int, batch: int, gpus: tuple[int, int], expected: float
) -> None:
    """Figure 9; one efficiency was taken from its first point, the speed-up is a prediction."""
    shape = shape_from_config(config)
    times = []
    for count in gpus:
        given = ParallelPlan(
            pipeline=pipeline,
            shard=count // pipeline,
            zero=1,
            sequence_tokens=sequence,
            batch_sequences=batch,
            recompute="operators",
        )
        assert refusals(given, shape, A100, count // 8) == []
        estimate = estimate_step(given, shape, A100)
        assert estimate.fits
        times.append(estimate.step_s)
    assert times[0] / times[1] == pytest.approx(expected, rel=0.08)


def test_the_step_of_llama_is_predicted() -> None:
    found = estimate_step(plan(shard=128, recompute="operators"), LLAMA, A100)
    assert found.step_s == pytest.approx(9.717, rel=0.05)
    assert found.limit == "compute"
    assert found.step_s == pytest.approx(sum(getattr(found.parts, name) for name in found.parts.__struct_fields__))


def test_a_step_is_never_shorter_than_what_its_busiest_link_needs() -> None:
    slow = msgspec.structs.replace(A100, nic_bytes_per_s=1e9)
    found = estimate_step(plan(), LLAMA, slow)
    (nic,) = (one for one in found.links if one.link == "nic")
    assert found.limit == "nic"
    assert found.step_s == pytest.approx(nic.seconds)
    assert found.parts.waiting > 0


def test_dualpipe_hides_the_all_to_all() -> None:
    hidden = estimate_step(V3_PLAN, V3, H800).parts
    exposed = estimate_step(msgspec.structs.replace(V3_PLAN, schedule="1f1b"), V3, H800).parts
    assert hidden.experts < exposed.experts / 5


def test_v3_is_feasible_and_near_its_measured_step() -> None:
    found = estimate_step(V3_PLAN, V3, H800)
    assert found.fits
    assert found.step_s == pytest.approx(TABLE_4.step_s, rel=0.02)


def brute_force(space: SearchSpace, shape: Any, node: Any, nodes: int, keep: int) -> list[ParallelPlan]:
    """Every combination of degrees up to the number of GPUs, each checked and simulated."""
    gpus = nodes * node.gpus
    degrees = range(1, gpus + 1)
    found = []
    for p, t in itertools.product(degrees, degrees):
        if gpus % (p * t):
            continue
        data = gpus // (p * t)
        for shard, expert, zero in itertools.product(degrees, degrees, range(4)):
            if data % shard or shard not in (1, data, min(data, max(1, node.gpus // t))):
                continue
            for schedule, chunks in (("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zbv", 1), ("dualpipe", 1)):
                if schedule not in space.schedules:
                    continue
                for micro, again in itertools.product(space.micro_batches, space.recompute):
                    one = ParallelPlan(
                        sequence_tokens=space.sequence_tokens,
                        batch_sequences=space.batch_sequences,
                        pipeline=p,
                        tensor=t,
                        replicate=data // shard,
                        shard=shard,
                        expert=expert,
                        zero=zero,
                        schedule=schedule,
                        chunks=chunks,
                        micro_batch=micro,
                        recompute=again,
                    )
                    if p == 1 and schedule == "interleaved":
                        continue
                    if refusals(one, shape, node, nodes):
                        continue
                    if max(stage.total for stage in plan_memory(one, shape)) > node.usable_bytes:
                        continue
                    found.append((order_key(one, estimate_step(one, shape, node)), one))
    return [one for _, one in sorted(found, key=lambda pair: pair[0])[:keep]]


@pytest.mark.parametrize(
    ("config", "nodes", "batch", "keep"),
    [
        (LLAMA_13B, 2, 64, 5),
        (DEEPSEEK_MOE_16B, 2, 64, 12),
        pytest.param(DEEPSEEK_MOE_16B, 4, 256, 3, marks=pytest.mark.slow),
        pytest.param(LLAMA_13B, 8, 4096, 8, marks=pytest.mark.slow),
        pytest.param(DEEPSEEK_MOE_16B, 8, 256, 4, marks=pytest.mark.slow),
    ],
)
def test_the_search_finds_what_a_brute_force_finds(config: Config, nodes: int, batch: int, keep: int) -> None:
    shape = shape_from_config(config)
    space = SearchSpace(
        sequence_tokens=2048,
        batch_sequences=batch,
        micro_batches=(1, 2),
        schedules=("gpipe", "1f1b", "interleaved", "zbv", "dualpipe"),
        chunks=(2,),
        recompute=("operators", "full"),
    )
    found = search_plans(space, shape, A100, nodes, keep=keep)
    assert [one.plan for one in found.ranked] == brute_force(space, shape, A100, nodes, keep)
    assert found.ranked
    assert found.enumerated == found.refused + found.out_of_memory + found.bounded + found.simulated
    assert found.bounded > 0


def test_the_search_for_v3_on_2048_gpus_takes_seconds_and_ranks_its_own_plan() -> None:
    space = SearchSpace(sequence_tokens=4096, batch_sequences=15_360, precision=V3_PLAN.precision)
    began = process_time()
    found = search_plans(space, V3, load_node("h800"), 256, compare=estimate_step(V3_PLAN, V3, H800))
    assert process_time() - began < 10
    assert found.enumerated > 50_000
    assert found.faster is not None
    assert found.faster < 100
    assert all(one.estimate.fits for one in found.ranked)
    assert all(one.plan.expert >= 8 for one in found.ranked)
