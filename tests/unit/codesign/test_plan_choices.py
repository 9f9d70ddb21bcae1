"""What a plan leaves to the planner: the layout of pipelines that share a NIC, and what each layer computes again."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from tests.support.model_configs import DEEPSEEK_MOE_16B
from tests.unit.codesign.test_parallel_plan import A100, H800, LLAMA, V3, V3_PLAN, plan

from fireflyer.base.errors import UsageError
from fireflyer.codesign.model import shape_from_config
from fireflyer.codesign.parallel import ParallelPlan, balance_model, estimate_step, plan_memory, refusals
from fireflyer.codesign.parallel.layout import pipeline_layout
from fireflyer.codesign.parallel.recompute_fit import MODES, fit_recompute, layer_choices, recompute_text
from fireflyer.codesign.parallel.step import stage_seconds
from fireflyer.codesign.parallel.traffic import stage_message_bytes, stage_traffic

MOE = shape_from_config(DEEPSEEK_MOE_16B)


def by_layer(given: ParallelPlan, shape: Any, *modes: Any) -> ParallelPlan:
    count = shape.layers + shape.mtp_layers
    return msgspec.structs.replace(given, recompute=tuple(itertools.islice(itertools.cycle(modes), count)))


# --- layout ---


def test_the_layout_of_8_pipelines_on_a_nic_is_that_of_the_simulator() -> None:
    """8 stages, 32 micro-batches, a message takes a tenth of a forward pass: 1.47 of the time in lockstep, 1.06 apart
    (with a head that costs nothing)."""
    given, shape = plan(pipeline=8, shard=8, batch_sequences=256), msgspec.structs.replace(LLAMA, vocabulary=8)
    forward, _, _ = stage_seconds(given, shape, A100, balance_model(shape, 8, 2048)[0])
    node = msgspec.structs.replace(A100, nic_bytes_per_s=stage_message_bytes(given, shape) / (0.1 * forward))
    found = pipeline_layout(given, shape, node)
    assert found is not None
    assert (found.layout, found.sharing, found.micro_batches) == ("offset", 8, 32)
    assert found.slowdowns["lockstep"] == pytest.approx(1.47, abs=0.01)
    assert found.slowdowns["offset"] == pytest.approx(1.06, abs=0.01)
    assert "replica d begins by d messages late" in found.reason


def test_pipelines_that_do_not_share_a_nic_have_no_layout() -> None:
    assert pipeline_layout(plan(pipeline=1, shard=64), LLAMA, A100) is None
    assert pipeline_layout(V3_PLAN, V3, H800) is None, "a NIC for each GPU"
    assert pipeline_layout(plan(pipeline=16, shard=4), LLAMA, A100) is None, "two stages on a node"


def test_of_very_many_micro_batches_some_are_simulated() -> None:
    found = pipeline_layout(plan(pipeline=8, shard=8, batch_sequences=8 * 4096), LLAMA, A100)
    assert found is not None
    assert found.micro_batches < 4096
    assert found.micro_batches % 16 == 0


# --- recomputation by layer ---


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("given", "shape", "node"),
    [
        (plan(), LLAMA, A100),
        (plan(shard=8, tensor=2, schedule="zbv"), LLAMA, A100),
        (V3_PLAN, V3, H800),
        (plan(pipeline=10, shard=4, expert=4), MOE, H800),
    ],
    ids=["llama", "tensor", "v3", "moe"],
)
def test_a_list_of_one_mode_is_that_mode(given: ParallelPlan, shape: Any, node: Any, mode: Any) -> None:
    one, many = msgspec.structs.replace(given, recompute=mode), by_layer(given, shape, mode)
    for kernels in ("fused", "eager"):
        assert plan_memory(many, shape, kernels) == plan_memory(one, shape, kernels)
    for stage in range(given.pipeline):
        assert stage_traffic(many, shape, node, stage) == stage_traffic(one, shape, node, stage)
    wanted, found = (estimate_step(each, shape, node) for each in (one, many))
    assert found.step_s == pytest.approx(wanted.step_s, rel=1e-9)
    assert found.slowest_stage == wanted.slowest_stage


def test_a_mixture_is_between_its_modes() -> None:
    given = plan()
    mixed = by_layer(given, LLAMA, "none", "blocks")
    none, blocks = (msgspec.structs.replace(given, recompute=mode) for mode in ("none", "blocks"))
    kept = [plan_memory(one, LLAMA)[0].activations for one in (blocks, mixed, none)]
    assert kept == sorted(kept)
    assert kept[1] == pytest.approx((kept[0] + kept[2]) / 2, rel=0.01)
    steps = [estimate_step(one, LLAMA, A100).parts.compute for one in (none, mixed, blocks)]
    assert steps == sorted(steps)
    assert steps[1] == pytest.approx((steps[0] + steps[2]) / 2, rel=0.02)


@pytest.mark.parametrize("division", [{"pipeline": 1, "shard": 64}, {"pipeline": 2, "shard": 32, "schedule": "gpipe"}])
@pytest.mark.parametrize("shares", [0.4, 0.55, 0.7, 0.9])
def test_a_budget_is_kept_at_the_least_cost_of_all_choices(shares: float, division: dict[str, Any]) -> None:
    """Of a model of four layers on one rank, or two: all 81 choices. With GPipe all micro-batches are in flight."""
    shape = msgspec.structs.replace(LLAMA, layers=4)
    given = plan(micro_batch=4, batch_sequences=1024, recompute="budget", **division)
    whole = max(plan_memory(by_layer(given, shape, "none"), shape), key=lambda one: one.total)
    room = whole.total - whole.activations
    node = msgspec.structs.replace(A100, gpu_memory_bytes=round(room + shares * whole.activations), reserved_bytes=0)
    found = fit_recompute(given, shape, node)
    costs = [{one.name: one.seconds for one in layer_choices(given, shape, node, number, 1)} for number in range(4)]

    def cost(modes: Any) -> float:
        return sum(costs[number][mode] for number, mode in enumerate(modes))

    fitting = [
        cost(modes)
        for modes in itertools.product(MODES, repeat=4)
        if max(one.total for one in plan_memory(by_layer(given, shape, *modes), shape)) <= node.usable_bytes
    ]
    assert all(one.total <= node.usable_bytes for one in plan_memory(found, shape))
    assert cost(found.recompute) == pytest.approx(min(fitting))
    assert len(fitting) < 81


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zbv", "dualpipe", "dualpipev"])
def test_each_rank_fits_and_recomputes_less_with_more_memory(schedule: Any) -> None:
    given = plan(schedule=schedule, micro_batch=2, batch_sequences=512, recompute="budget")
    sizes = [msgspec.structs.replace(A100, gpu_memory_bytes=size << 30) for size in (40, 80, 400)]
    again = []
    for node in sizes:
        try:
            found = fit_recompute(given, LLAMA, node)
        except UsageError:  # a test of its own says what
            again.append(len(MODES) * LLAMA.layers)
            continue
        assert all(one.total <= node.usable_bytes for one in plan_memory(found, LLAMA))
        assert refusals(found, LLAMA, A100, 8) == []
        again.append(sum(MODES.index(mode) for mode in found.recompute))
    assert again == sorted(again, reverse=True)
    assert again[-1] == 0, "with room for everything nothing is computed again"


def test_stages_with_more_micro_batches_in_flight_recompute_more() -> None:
    given = plan(micro_batch=4, recompute="budget")
    found = fit_recompute(given, LLAMA, A100)
    counts = [sum(mode != "none" for mode in found.recompute[first : first + 10]) for first in (0, 10, 20, 30)]
    assert min(counts[:3]) > counts[-1]
    assert recompute_text(found).count(" x") >= 2


def test_a_list_of_another_length_and_a_budget_without_a_node_are_refused() -> None:
    (line,) = refusals(plan(recompute=("none", "blocks")), LLAMA, A100, 8)
    assert line == "recompute has 2 modes; give one for each of 40 layers and prediction modules"
    (line,) = refusals(plan(recompute="budget"), LLAMA, A100, 8)
    assert line.startswith("recompute = 'budget' depends on the memory of a GPU")


def test_where_nothing_fits_what_is_needed_is_said() -> None:
    small = msgspec.structs.replace(A100, gpu_memory_bytes=A100.reserved_bytes + (1 << 30))
    with pytest.raises(UsageError, match="recompute = 'budget', stage 0: activations need at least"):
        fit_recompute(plan(recompute="budget"), LLAMA, small)
