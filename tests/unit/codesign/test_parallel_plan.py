"""Plans: what is refused, which ranks are together, how layers are cut, and what a rank has to keep."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from tests.support.model_configs import DEEPSEEK_MOE_16B, DEEPSEEK_V3, GPT2_MEDIUM, LLAMA_13B

from fireflyer.base.errors import UsageError
from fireflyer.codesign.model import count_parameters, shape_from_config
from fireflyer.codesign.parallel import (
    ParallelPlan,
    Precision,
    balance_model,
    coordinates_of,
    gradient_adds,
    groups,
    load_node,
    mesh_dims,
    node_names,
    peak_memory,
    plan_memory,
    refusals,
)
from fireflyer.codesign.parallel.kept_gradients import ValueBytes, kept_gradients, layer_gradients
from fireflyer.codesign.parallel.memory import activation_bytes, held_parameters
from fireflyer.codesign.parallel.mesh import AXES
from fireflyer.codesign.parallel.pipeline import StageTimes, held_at_once, pipeline_time
from fireflyer.codesign.parallel.plan import SCHEDULES
from fireflyer.codesign.schedule import build_schedule, compile_schedule, peak_activations, simulate, uniform_costs

LLAMA, MOE, V3 = (shape_from_config(config) for config in (LLAMA_13B, DEEPSEEK_MOE_16B, DEEPSEEK_V3))
A100, H800 = load_node("pcie-a100"), load_node("h800")
V3_PLAN = ParallelPlan(
    pipeline=16,
    shard=128,
    expert=64,
    zero=1,
    sequence_tokens=4096,
    batch_sequences=15_360,
    schedule="dualpipe",
    recompute="operators",
    precision=Precision(moments="bf16", compute="fp8", activations="fp8", dispatch="fp8"),
)


def plan(**changes: Any) -> ParallelPlan:
    """LLaMa-13B of figure 9a on 64 GPUs."""
    base: dict[str, Any] = {"pipeline": 4, "shard": 16, "zero": 1, "sequence_tokens": 2048, "batch_sequences": 4096}
    return ParallelPlan(**base | changes)


def test_nodes_that_are_shipped_are_found_by_their_names_and_are_ones_that_can_be() -> None:
    assert node_names() == ("h800", "pcie-a100")
    for name in node_names():
        load_node(name).check()
    with pytest.raises(UsageError, match="no node 'dgx' is shipped; use h800, pcie-a100"):
        load_node("dgx")


def test_plans_of_the_papers_are_not_refused() -> None:
    assert refusals(plan(), LLAMA, A100, 8) == []
    assert refusals(V3_PLAN, V3, H800, 256) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline": 5}, "= 80 ranks, but 8 nodes of 8 GPUs are 64"),
        ({"batch_sequences": 4100}, "4100 sequences do not divide into micro-batches of 1 for 16 data-parallel ranks"),
        ({"shard": 1, "replicate": 16}, "zero = 1 divides states over shard = 1 ranks"),
        ({"zero": 0}, "shard = 16 divides nothing with zero = 0"),
        ({"zero": 3}, "zero = 3 with pipeline = 4 would gather or scatter in each of 256 micro-batches"),
        ({"tensor": 4, "shard": 4}, "tensor = 4 is more than the 2 GPUs that NVLink joins on pcie-a100"),
        ({"expert": 2}, "expert = 2, but the model has no experts"),
        ({"precision": Precision(compute="fp8")}, "compute = 'fp8' is not possible: GPUs of pcie-a100"),
        ({"chunks": 2}, "chunks = 2 is for the schedule interleaved"),
        ({"schedule": "interleaved"}, "interleaved needs chunks of 2 or more and pipeline of 2 or more, not 1 and 4"),
        ({"pipeline": 64, "shard": 1, "zero": 0}, "40 layers and the output head do not give 64 stages one each"),
        (
            {"schedule": "dualpipe", "batch_sequences": 16 * 7},
            "dualpipe needs an even pipeline and an even number of micro-batches of at least 8, not 4 and 7",
        ),
        ({"schedule": "dualpipev", "batch_sequences": 16 * 7}, "dualpipev needs at least 8 micro-batches, not 7"),
        ({"pipeline": 1, "shard": 64, "schedule": "zbv"}, "zbv is a schedule of several stages, pipeline is 1"),
    ],
)
def test_a_plan_that_cannot_be_run_is_one_line_with_the_numbers(changes: dict[str, Any], message: str) -> None:
    (line,) = refusals(plan(**changes), LLAMA, A100, 8)
    assert message in line
    assert "\n" not in line


def test_a_stage_fills_nodes_or_a_node_fills_stages() -> None:
    (line,) = refusals(plan(shard=12, pipeline=2, batch_sequences=48), LLAMA, A100, 3)
    assert line == "a stage has 12 ranks, which is neither a multiple nor a divisor of the 8 GPUs of a node"


@pytest.mark.parametrize(
    ("expert", "message"),
    [(6, "64 routed experts do not divide over expert = 6 ranks"), (64, "expert = 64 does not divide the 32 ranks")],
)
def test_experts_that_do_not_divide(expert: int, message: str) -> None:
    given = ParallelPlan(shard=32, expert=expert, zero=1, sequence_tokens=4096, batch_sequences=64)
    assert any(message in line for line in refusals(given, MOE, A100, 4))


@pytest.mark.parametrize("changes", [{"pipeline": 0}, {"zero": 4}, {"micro_batch": 0}, {"sequence_tokens": 0}])
def test_degrees_that_are_none_are_usage_errors(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(changes))):
        refusals(plan(**changes), LLAMA, A100, 8)


MESH = ParallelPlan(
    pipeline=2, replicate=2, shard=4, tensor=2, expert=4, zero=1, sequence_tokens=64, batch_sequences=64
)


@pytest.mark.parametrize("axis", AXES)
def test_every_rank_is_in_one_group_of_each_axis(axis: Any) -> None:
    found = list(groups(MESH, axis))
    assert sorted(itertools.chain(*found)) == list(range(MESH.world_size))
    varying = {"data": {"replicate", "shard"}}.get(axis, {axis})
    names = varying if "expert" in axis else varying & {"pipeline", "replicate", "shard", "tensor"}
    for group in found:
        places = [coordinates_of(MESH, rank) for rank in group]
        others = ("pipeline", "replicate", "shard", "tensor")
        if axis == "expert":
            assert len({(one.pipeline, one.expert_data) for one in places}) == 1
        elif axis == "expert_data":
            assert len({(one.pipeline, one.expert) for one in places}) == 1
        else:
            assert all(len({getattr(one, name) for one in places}) == 1 for name in others if name not in names)


def test_gpus_of_a_node_are_data_ranks_of_one_stage_and_pairs_are_tensor_groups() -> None:
    for first in range(0, MESH.world_size, 8):
        places = [coordinates_of(MESH, rank) for rank in range(first, first + 8)]
        assert len({one.pipeline for one in places}) == 1
        assert len({(one.replicate, one.shard) for one in places}) == 8 // MESH.tensor
    assert next(iter(groups(MESH, "tensor"))) == (0, 1)
    assert dict(mesh_dims(MESH)) == {"pipeline": 2, "replicate": 2, "shard": 4, "tensor": 2}


@pytest.mark.parametrize("given", [MESH, V3_PLAN, plan()], ids=["small", "v3", "llama"])
def test_a_node_adds_as_many_gradients_as_its_ranks_have_in_common(given: ParallelPlan) -> None:
    dense, expert = gradient_adds(given, 8)
    node = range(8)
    assert dense == max(len(set(node) & set(group)) for group in groups(given, "data"))
    assert expert == max(len(set(node) & set(group)) for group in groups(given, "expert_data"))
    assert dense == 8 // given.tensor


@pytest.mark.parametrize(("shape", "pieces"), [(V3, 16), (MOE, 10), (LLAMA, 4), (V3, 1), (MOE, 29)])
def test_stages_have_all_layers_and_parameters_once(shape: Any, pieces: int) -> None:
    stages = balance_model(shape, pieces, 4096)
    assert len(stages) == pieces
    assert [one.first for one in stages] == [sum(two.layers for two in stages[:i]) for i in range(pieces)]
    assert sum(one.layers for one in stages) == shape.layers
    assert (stages[0].embedding, stages[-1].head) == (True, True)
    count = count_parameters(shape)
    assert sum(one.matrix + one.vector + one.routed - one.copies for one in stages) == count.total + count.mtp


def test_61_layers_and_a_head_with_mtp_on_16_stages() -> None:
    stages = balance_model(V3, 16, 4096)
    assert [one.layers for one in stages] == [4] * 15 + [1]
    assert stages[-1].copies == V3.vocabulary * V3.hidden
    assert [one.layers for one in balance_model(MOE, 10, 4096)] == [3] * 9 + [1]


def test_a_tied_head_is_a_copy_only_where_it_is_not_with_the_embedding() -> None:
    shape = shape_from_config(GPT2_MEDIUM)
    assert balance_model(shape, 1, 1024)[0].copies == 0
    assert balance_model(shape, 2, 1024)[1].copies == 50_257 * 1024


def test_memory_of_states_by_zero_stage() -> None:
    """Figure 1 of the ZeRO paper: 2, 2 and 12 bytes per parameter over 64 ranks; but shards of FSDP are FP32: gradients
    of 4 bytes with stages 2 and 3, and no BF16 parameters beside their FP32 copy with stage 3."""
    shape, precision = LLAMA, Precision(gradients="bf16")
    parameters = count_parameters(shape).total
    for zero, per_parameter in ((0, 16), (1, 4 + 12 / 64), (2, 2 + (4 + 12) / 64), (3, (4 + 12) / 64)):
        given = plan(pipeline=1, shard=64 if zero else 1, replicate=1 if zero else 64, zero=zero, precision=precision)
        (memory,) = plan_memory(given, shape)
        found = memory.parameters + memory.gradients + memory.states
        assert found == pytest.approx(parameters * per_parameter, abs=3)
        if zero == 3:
            assert memory.parameters == memory.gradients == memory.states // 2


def test_zero_1_keeps_whole_gradients_between_micro_batches_and_fsdp_fp32_shards_beside_whole_parameters() -> None:
    parameters = count_parameters(LLAMA).total
    for sequences, gradient in ((128, 4.0), (64, 4 / 64)):
        precision = Precision(parameters="fp32", compute="fp32")
        given = plan(pipeline=1, shard=64, zero=1, batch_sequences=sequences, precision=precision)
        (memory,) = plan_memory(given, LLAMA)
        assert memory.gradients == pytest.approx(parameters * gradient, abs=1)
        assert memory.parameters == pytest.approx(parameters * (4 + 4 / 64), abs=1)
        assert memory.states == pytest.approx(parameters * 8 / 64, abs=1)


def test_states_of_an_expert_are_divided_over_ranks_with_the_same_experts() -> None:
    """Stage 2 of V3 on DualPipe: 8 layers, their experts over 64 ranks, of which 2 have the same ones."""
    memory = plan_memory(V3_PLAN, V3)[2]
    dense, routed = held_parameters(V3_PLAN, V3, 2)
    assert routed == 8 * 256 * 3 * 7168 * 2048 / 64
    assert memory.states == pytest.approx(8 * (routed / 2 + dense / 128), abs=1)


def test_activations_of_a_gpt_layer_are_those_of_korthikanti() -> None:
    """34 bytes per token and hidden value, less the masks of two dropouts of one byte each."""
    shape = shape_from_config(GPT2_MEDIUM)
    assert activation_bytes(shape, False, "none", "bf16").kept == 32 * 1024
    assert activation_bytes(shape, False, "blocks", "bf16").kept == 2 * 1024


def test_recomputation_trades_memory() -> None:
    totals = [peak_memory(plan(recompute=mode), LLAMA).activations for mode in ("none", "operators", "blocks", "full")]
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) == 4


def test_tensor_parallelism_halves_activations_but_what_it_gathers() -> None:
    """The BF16 inputs of attention and feed-forward, 4 bytes per token, layer and hidden value."""
    one, two = plan(shard=8), plan(shard=8, tensor=2)
    gathered = 4 * one.micro_batch_tokens * LLAMA.layers * LLAMA.hidden
    halved = peak_memory(two, LLAMA).activations - gathered
    assert halved * 2 == pytest.approx(peak_memory(one, LLAMA).activations - gathered, rel=1e-9)


def test_a_stage_keeps_what_it_has_passed_on() -> None:
    """The stream in BF16, of each micro-batch in flight; the last stage passes nothing on."""
    stream = 2 * LLAMA.hidden * plan().micro_batch_tokens
    kept = [one.activations for one in plan_memory(plan(recompute="full"), LLAMA)]
    assert kept == [4 * 2 * stream, 3 * 2 * stream, 2 * 2 * stream, stream]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_peak_is_that_of_all_stages(schedule: Any) -> None:
    given = plan(schedule=schedule, chunks=2 if schedule == "interleaved" else 1)
    assert peak_memory(given, LLAMA).total == max(one.total for one in plan_memory(given, LLAMA))


@pytest.mark.parametrize(
    ("schedule", "overlapped", "total"),
    [
        ("1f1b", 3, 117),
        ("interleaved", 3, 106.5),
        ("zb-h1", 3, 103),
        ("zbv", 3, 99.5),
        ("dualpipev", 3, 103),
        ("dualpipe", 3, 102),
        ("dualpipev", 2.5, 89.5),
        ("dualpipe", 2.5, 89),
    ],
)
def test_closed_forms_are_the_simulated_totals(schedule: Any, overlapped: float, total: float) -> None:
    """8 stages, 32 micro-batches, forward 1, backward 2 of which 1 for weights; ideal 96."""
    found = pipeline_time(schedule, 32, 2, [StageTimes(1, 2, 1, overlapped)] * 8)
    assert found.busy + found.bubble == total


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 8), (4, 16), (8, 32), (4, 64)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_closed_forms_are_near_a_simulation(schedule: Any, ranks: int, micro_batches: int) -> None:
    built = build_schedule(schedule, ranks, micro_batches, 2)
    costs = uniform_costs(built.placement, forward=1, backward=2, weights=1, pair=2.5)
    simulated = simulate(compile_schedule(built), costs).total_s
    found = pipeline_time(schedule, micro_batches, 2, [StageTimes(1, 2, 1, 2.5)] * ranks)
    assert found.busy + found.bubble == pytest.approx(simulated, rel=0.06)


@pytest.mark.parametrize("overlapped", [True, False])
@pytest.mark.parametrize(
    ("schedule", "micro_batches"),
    [(one, count) for one in SCHEDULES for count in (4, 8, 12, 40) if count > 4 or not one.startswith("dualpipe")],
)
def test_what_is_in_flight_at_once_is_that_of_the_whole_schedule(
    schedule: Any, micro_batches: int, overlapped: bool
) -> None:
    """Also of many micro-batches, of which only the first are looked at; with sizes that differ by stage."""
    ranks = 4
    built = build_schedule(schedule, ranks, micro_batches, 2)
    sizes = [3.0 + 7 * stage % 5 for stage in range(built.placement.stages)]
    ratios = [1.1 + stage % 3 for stage in range(built.placement.stages)]
    expected = peak_activations(built, sizes, kept_for_weights=ratios, overlapped=overlapped)
    at_once = held_at_once(schedule, ranks, micro_batches, 2, overlapped=overlapped)
    for rank in range(ranks):
        held = sorted({stage for _, stage in built.placement.stages_of(rank)})
        more = [(ratios[stage] - 1) * sizes[stage] for stage in held]
        found = max(one.size([sizes[stage] for stage in held], more) for one in at_once[rank])
        assert found == pytest.approx(expected[rank])
        assert len(at_once[rank]) < 70


def test_gradients_of_a_gpt_layer_that_are_kept_for_weights() -> None:
    """Of queries, keys and values, of both results that are added to the stream, of the inner values, and of both
    norms: 3 + 2 + 4 + 2 hidden values of a token."""
    shape = shape_from_config(GPT2_MEDIUM)
    assert layer_gradients(shape, False, ValueBytes(stream=2, product=2)) == 11 * 2 * 1024
    assert layer_gradients(shape, False, ValueBytes(stream=4, product=2)) == (9 * 2 + 2 * 4) * 1024
    assert layer_gradients(shape, False, ValueBytes(stream=2, product=2), tensor=2) == (9 / 2 + 2) * 2 * 1024


def test_gradients_of_an_expert_layer_that_are_kept_for_weights() -> None:
    """DeepSeek-V3: 8 of 256 experts, and one shared."""
    latents = 1536 + 128 * 192 + 512 + 64 + 128 * 256
    experts = 2 * 2048 + 8 * (2 * 2048 + 7168)
    norms = 2 * 7168 + 1536 + 512
    found = layer_gradients(V3, True, ValueBytes(stream=2, product=2))
    assert found == 2 * (latents + experts + norms + 2 * 7168) + 4 * 256


def test_a_schedule_that_splits_backward_keeps_gradients_on_all_but_the_first_stage() -> None:
    """ZB-H1 delays W by as many backwards as there are ranks before: as many micro-batches have gradients, and one."""
    whole, split = (plan_memory(plan(schedule=schedule), LLAMA) for schedule in ("1f1b", "zb-h1"))
    of_micro_batch = whole[3].activations
    passed_on = 2 * LLAMA.hidden * plan().micro_batch_tokens
    assert split[0].activations == whole[0].activations + passed_on  # W is all of its backward
    values = ValueBytes(stream=2, product=2)
    stages = balance_model(LLAMA, 4, 2048)
    for rank in (1, 2):
        kept = kept_gradients(plan(), LLAMA, stages[rank], values)
        layer = layer_gradients(LLAMA, False, values)
        assert kept == plan().micro_batch_tokens * stages[rank].layers * layer - passed_on
        unsplit = whole[rank].activations / (4 - rank)
        assert split[rank].activations == pytest.approx(4 * unsplit + (rank + 1) * kept)
    logits = plan().micro_batch_tokens * LLAMA.vocabulary * 2
    assert split[3].activations > 4 * (of_micro_batch + logits)
    assert peak_memory(plan(schedule="zb-h1"), LLAMA).stage == 3
