"""Which recipes are executed, which steps are due, and which runs a comparison has."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.trainer.recipes import raw_recipe

from fireflyer.base.errors import UsageError
from fireflyer.codesign.model import count_parameters
from fireflyer.recipes.deepseek import PRESETS
from fireflyer.recipes.gpt import GPTConfig
from fireflyer.recipes.trainer.core.checks import check_recipe, check_restart, reasons, shape_of_gpt
from fireflyer.recipes.trainer.core.comparison import laid_over, planned_runs, technique_of
from fireflyer.recipes.trainer.core.course import evaluation_due, learning_rate, traced
from fireflyer.recipes.trainer.core.figures import rates
from fireflyer.recipes.trainer.core.parsing import recipe_of
from fireflyer.recipes.trainer.core.recipe import (
    EvaluationSettings,
    GptTable,
    OptimizerSettings,
    ProfileSettings,
    Recipe,
    resolved,
)

FP32 = {"parameters": "fp32", "compute": "fp32"}
SHAPE = shape_of_gpt(GptTable(vocabulary=64, layers=2, heads=2, width=16))


def planned(**plan: Any) -> Recipe:
    return recipe_of(raw_recipe(plan={"precision": FP32, **plan}))


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"replicate": 2},
        {"shard": 2, "zero": 1},
        {"shard": 2, "zero": 3, "replicate": 2, "precision": {"parameters": "bf16"}},
        {"tensor": 2},
        {"tensor": 2, "replicate": 2, "recompute": "operators"},
        {"replicate": 2, "precision": {"parameters": "fp32", "compute": "fp8"}},
        {"tensor": 2, "shard": 2, "zero": 3},
        {"pipeline": 2},
        {"pipeline": 2, "replicate": 2, "schedule": "1f1b", "recompute": "full"},
        {"pipeline": 2, "shard": 2, "zero": 1},
    ],
)
def test_these_plans_are_executed(plan: dict[str, Any]) -> None:
    check_recipe(planned(**plan), SHAPE)


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ({"expert": 2}, "expert = 2, but the model has no experts"),
        (
            {"pipeline": 2, "shard": 2, "zero": 2},
            "pipeline = 2 with zero = 2: the trainer has pipelines with zero = 1; use that",
        ),
        (
            {"pipeline": 2, "shard": 2, "zero": 1, "precision": {"parameters": "bf16"}},
            "precision.parameters = 'bf16' is for zero 1 to 3 without pipeline or expert",
        ),
        ({"pipeline": 2, "tensor": 2}, "pipeline = 2 with tensor = 2: the trainer has either"),
        (
            {"pipeline": 2, "schedule": "zb-h1", "recompute": "operators"},
            "recompute = 'operators' with schedule = 'zb-h1', which runs a backward pass in parts",
        ),
        ({"pipeline": 2, "schedule": "zb-h1", "recompute": "blocks"}, "use recompute = 'none', or schedule = '1f1b'"),
        ({"pipeline": 2, "schedule": "zbv", "recompute": "full"}, "recompute = 'full' with schedule = 'zbv'"),
        ({"pipeline": 4}, "2 layers and the output head do not give 4 stages one each"),
        ({"tensor": 4}, "2 attention heads do not divide into tensor = 4 parts"),
        ({"replicate": 3}, "8 sequences do not divide into micro-batches of 2 for 3 data-parallel ranks"),
        ({"shard": 2}, "shard = 2 divides nothing with zero = 0"),
        ({"precision": {"parameters": "bf16"}}, "precision.parameters = 'bf16' is for zero 1 to 3"),
        ({"precision": {**FP32, "moments": "bf16"}}, "precision.moments = 'bf16': moments are kept in FP32"),
        ({"precision": {**FP32, "dispatch": "fp8"}}, "precision.dispatch = 'fp8' with expert = 1: no token is sent"),
        ({"precision": {**FP32, "activations": "fp8"}}, "precision.activations = 'fp8': it is that of compute"),
        ({"tensor": 2, "precision": {"parameters": "fp32", "compute": "fp8"}}, "FP8 layers are not divided"),
        (
            {"shard": 2, "zero": 3, "precision": {"compute": "fp32"}},
            "precision.compute = 'fp32' with precision.parameters = 'bf16': products of BF16 parameters are BF16; use",
        ),
    ],
)
def test_what_is_not_executed_is_refused_with_the_reason(plan: dict[str, Any], reason: str) -> None:
    found = reasons(planned(**plan), SHAPE)
    assert any(one.startswith(reason) or reason in one for one in found), found
    with pytest.raises(UsageError, match="this recipe cannot be run"):
        check_recipe(planned(**plan), SHAPE)


def test_no_two_reasons_for_a_plan_want_different_degrees() -> None:
    found = reasons(planned(pipeline=2, shard=2, zero=3), SHAPE)
    assert len(found) == 2
    assert all("zero = 1" in one for one in found)


def test_limits_of_the_model_are_seen_before_any_rank_starts() -> None:
    long = planned(sequence_tokens=16)
    assert reasons(long, SHAPE, 16) == []
    assert reasons(long, SHAPE, 15) == ["sequence_tokens = 16 is longer than the context of the model; use at most 15"]
    tiny = PRESETS["tiny"].shape
    assert reasons(deepseek({"sequence_tokens": 1}), tiny) == [
        "sequence_tokens = 1 is too short for 1 prediction modules; use more"
    ]
    odd = msgspec.structs.replace(SHAPE, vocabulary=63)
    assert reasons(planned(tensor=2), odd) == ["a vocabulary of 63 does not divide into tensor = 2 parts; pad it to 64"]
    raw = raw_recipe(plan={"precision": FP32, "tensor": 2}) | {"model": {"kind": "huggingface", "config": "c.json"}}
    grouped = msgspec.structs.replace(SHAPE.attention, kv_heads=1)
    found = reasons(recipe_of(raw), msgspec.structs.replace(SHAPE, model_type="qwen2", attention=grouped))
    assert found == [
        "tensor = 2 with model_type = 'qwen2': of Hugging Face models llama is divided",
        "1 key-value heads do not divide into tensor = 2 parts",
    ]


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ({"replicate": 2, "expert": 2}, None),
        ({"pipeline": 2, "replicate": 2, "expert": 2}, None),
        ({"shard": 2, "zero": 1, "expert": 2}, None),
        ({"shard": 4, "zero": 1, "expert": 2, "micro_batch": 1}, None),
        ({"replicate": 2, "shard": 2, "zero": 1, "expert": 2, "micro_batch": 1}, None),
        ({"pipeline": 2, "shard": 2, "zero": 1, "expert": 2}, None),
        (
            {"shard": 2, "zero": 2, "expert": 2},
            "expert = 2 with zero = 2: the trainer has divided experts with zero = 1; use that",
        ),
        (
            {"replicate": 2, "shard": 4, "zero": 1, "expert": 2, "micro_batch": 1},
            "expert = 2 with zero = 1 and replicate = 2: the trainer divides states of experts over all ranks that "
            "have the same ones; use replicate = 1, and shard = 8",
        ),
        ({"pipeline": 2, "replicate": 2, "expert": 2, "schedule": "dualpipe", "micro_batch": 1}, None),
    ],
)
def test_experts_are_divided_over_replicas(plan: dict[str, Any], reason: str | None) -> None:
    shape = PRESETS["tiny"].shape
    found = reasons(deepseek(plan), shape)
    assert len(found) == (reason is not None)
    assert all(one.startswith(str(reason)) for one in found)
    guarded = reasons(deepseek({"replicate": 2, "expert": 2}, guard={"period_steps": 2}), shape)
    measured = deepseek({"replicate": 2}, experts={"placement": "measured"})
    assert reasons(measured, shape) == [
        "[experts] placement = 'measured' with expert = 1: all experts are on one rank; use placement = 'fixed'"
    ]
    assert guarded == ["[guard] compares replicas, and with expert = 2 they differ; use period_steps = 0"]


def deepseek(plan: dict[str, Any], **tables: Any) -> Recipe:
    model = {"kind": "deepseek", "preset": "tiny"}
    return recipe_of(raw_recipe(plan={"precision": FP32, **plan}, **tables) | {"model": model})


DIVISIONS: dict[str, dict[str, Any]] = {
    "replicate": {"replicate": 2},
    **{f"zero {zero}": {"shard": 2, "zero": zero} for zero in (1, 2, 3)},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
    "expert": {"expert": 2},
}
EXECUTED_TOGETHER = {
    *(frozenset({"replicate", one}) for one in ("zero 1", "zero 2", "zero 3", "tensor", "pipeline", "expert")),
    *(frozenset({"tensor", f"zero {zero}"}) for zero in (1, 2, 3)),
    frozenset({"pipeline", "zero 1"}),
    frozenset({"expert", "zero 1"}),
}
"""Of pairs; experts are divided over replicas, also those of a pipeline."""


@pytest.mark.parametrize(
    "names",
    [one for one in itertools.combinations(DIVISIONS, 2) if not all(name.startswith("zero") for name in one)],
    ids=" x ".join,
)
def test_each_pair_of_divisions_is_executed_or_refused_in_a_line_that_names_both(names: tuple[str, str]) -> None:
    plan = {key: value for name in names for key, value in DIVISIONS[name].items()}
    experts = "expert" in names
    if experts and set(names) == {"pipeline", "expert"}:
        plan["replicate"] = 2
    shape, recipe = (PRESETS["tiny"].shape, deepseek(plan)) if experts else (SHAPE, planned(**plan))
    found = reasons(recipe, shape)
    if frozenset(names) in EXECUTED_TOGETHER or set(names) == {"pipeline", "expert"}:
        assert found == []
        return
    told = [name.replace(" ", " = ") if " " in name else f"{name} = 2" for name in names]
    assert any(all(one in line for one in told) for line in found), found
    assert all("use " in line for line in found), "what to write instead"


@pytest.mark.parametrize(
    ("modes", "reason"),
    [
        (["blocks", "none"], None),
        (["blocks"], "recompute has 1 modes; give one for each of 2 layers"),
        ("budget", "recompute = 'budget' depends on the memory of a GPU"),
    ],
)
def test_layers_may_be_recomputed_each_in_its_way(modes: Any, reason: str | None) -> None:
    found = reasons(planned(recompute=modes), SHAPE)
    assert [one.startswith(str(reason)) for one in found] == [True] * (reason is not None)
    split = reasons(planned(recompute=["none", "blocks"], pipeline=2, schedule="zb-h1"), SHAPE)
    assert any(one.startswith("recompute = 'blocks' with schedule = 'zb-h1'") for one in split)
    assert reasons(planned(recompute=["none", "none"], pipeline=2, schedule="zb-h1"), SHAPE) == []


def test_models_of_hugging_face_are_not_cut() -> None:
    raw = raw_recipe(plan={"precision": FP32, "pipeline": 2}) | {"model": {"kind": "huggingface", "config": "c.json"}}
    assert "pipeline = 2: Hugging Face models are not divided so; use pipeline = 1" in reasons(recipe_of(raw), SHAPE)


def test_a_guard_needs_replicas_and_a_rewind_needs_checkpoints() -> None:
    guarded = recipe_of(raw_recipe(guard={"period_steps": 2}))
    assert "[guard] compares replicas, and replicate is 1; use period_steps = 0" in reasons(guarded, SHAPE)
    for period, refused in ((100, True), (8, True), (7, False)):  # of 8 steps
        rewinding = recipe_of(raw_recipe(policy={"on_spike": "rewind"}, checkpoint={"period_steps": period}))
        assert any("[policy] rewind needs checkpoints" in one for one in reasons(rewinding, SHAPE)) == refused


def test_settings_that_nothing_comes_of_are_refused() -> None:
    none: dict[str, Any] = {"evaluation": []}
    periodic = recipe_of(raw_recipe(evaluation={"period_steps": 4}, data=none))
    assert reasons(periodic, SHAPE) == [
        "[evaluation] period_steps = 4, and [data] evaluation has no source; give one, or leave it out"
    ]
    for first, refused in ((8, False), (9, True)):  # of 8 steps
        traced_late = recipe_of(raw_recipe(metrics={"profile": {"first_step": first, "last_step": 20}}))
        assert (
            any("first_step = 9 is after the last of 8 steps" in one for one in reasons(traced_late, SHAPE)) == refused
        )
    assert reasons(recipe_of(raw_recipe(data=none)), SHAPE) == [], "defaults"
    guarded = recipe_of(raw_recipe(plan={"replicate": 2}, guard={"period_steps": 100}))
    assert reasons(guarded, SHAPE) == [], "the guard looks before checkpoints"


def test_a_run_goes_on_with_other_replicas_and_shards_but_not_between_stacked_and_divided_matrices() -> None:
    check_restart(planned(replicate=2), {"pipeline": 1, "replicate": 1, "shard": 2, "tensor": 1})
    check_restart(planned(tensor=2), None)
    check_restart(planned(tensor=2), {"tensor": 4})
    with pytest.raises(UsageError, match="saved with tensor = 1, the plan has 2"):
        check_restart(planned(tensor=2), {"tensor": 1})


def test_the_shape_of_the_small_gpt_has_its_parameters() -> None:
    table = GptTable(vocabulary=100, layers=3, heads=4, width=32)
    config = GPTConfig(vocab_size=100, layers=3, heads=4, width=32)
    assert count_parameters(shape_of_gpt(table)).total == config.parameters


def test_the_learning_rate_rises_and_then_falls_by_half_a_cosine() -> None:
    settings = OptimizerSettings(
        steps=100, learning_rate=0.1, warm_up_steps=10, decay="cosine", decay_steps=50, final_share=0.2
    )
    assert [learning_rate(step, settings) for step in (1, 5, 10)] == pytest.approx([0.01, 0.05, 0.1])
    assert learning_rate(35, settings) == pytest.approx(0.06)
    assert learning_rate(60, settings) == learning_rate(90, settings) == pytest.approx(0.02)


@given(st.integers(1, 200), st.integers(1, 200), st.integers(0, 20))
def test_the_last_step_is_evaluated_and_every_multiple_of_the_period(step: int, last: int, period: int) -> None:
    due = evaluation_due(step, last, EvaluationSettings(period_steps=period))
    assert due == (step == last or (period > 0 and step % period == 0))


def test_a_trace_has_the_steps_of_its_range() -> None:
    profile = ProfileSettings(first_step=2, last_step=3)
    assert [step for step in range(6) if traced(step, profile)] == [2, 3]
    assert not traced(1, None)


def test_mfu_is_written_by_both_conventions() -> None:
    speed = rates(SHAPE, 16, 160, 2.0, 4, peak_flops=1e6)
    assert speed.tokens_per_s == 80
    assert speed.mfu_causal is not None
    assert speed.mfu_causal == pytest.approx(speed.flops_per_s_causal / 1e6)
    # Scores of the other triangle: 6 FLOPs for each of 16 / 2 keys, of 16 values for queries and keys each.
    more = 2 * 6 * 8 * 16 * SHAPE.layers * 80 / 4
    assert speed.flops_per_s_noncausal - speed.flops_per_s_causal == pytest.approx(more)
    assert rates(SHAPE, 16, 160, 2.0, 4, None).mfu_noncausal is None


def test_a_technique_is_laid_over_the_recipe_key_by_key() -> None:
    raw = raw_recipe() | {"technique": {"plan": {"precision": {"compute": "fp8"}}, "optimizer": {"epsilon": 1e-6}}}
    baseline, technique = technique_of(raw)
    assert (baseline.plan.precision.compute, technique.plan.precision.compute) == ("fp32", "fp8")
    assert technique.plan.precision.parameters == "fp32"
    assert technique.optimizer.epsilon == 1e-6
    assert technique.optimizer.steps == baseline.optimizer.steps
    assert laid_over({"a": {"b": 1, "c": 2}}, {"a": {"b": [3]}}) == {"a": {"b": [3], "c": 2}}


@pytest.mark.parametrize(
    ("technique", "reason"),
    [
        (None, "nothing to compare with"),
        ({"optimizer": {"epsilom": 1}}, r"with \[technique\] laid over it: \[optimizer\] has no key 'epsilom'"),
        ({"compare": {"bound": 1}}, r"\[technique.compare\] is not possible"),
        ({"evaluation": {"sequences": 3}}, "different held-out data"),
        ({"plan": {"sequence_tokens": 8}}, "different held-out data"),
        ({"data": {"evaluation": [{"name": "held", "path": "a"}]}}, "different held-out data"),
        ({"data": {"evaluation": []}}, "has no source"),
    ],
)
def test_a_comparison_that_shows_nothing_is_refused(technique: dict[str, Any] | None, reason: str) -> None:
    raw = raw_recipe() | ({} if technique is None else {"technique": technique})
    with pytest.raises(UsageError, match=reason):
        planned_runs(*technique_of(raw), "/out")


def test_held_out_data_of_two_recipes_is_the_same_where_its_places_are() -> None:
    def planned_from(path: str, base: str) -> None:
        raw = raw_recipe(data={"evaluation": [{"name": "held", "path": path}]})
        baseline, technique = technique_of(raw_recipe(), raw)
        planned_runs(resolved(baseline, "/one"), resolved(technique, base), "/out")

    planned_from("../one/held", "/two")
    planned_from("/one/held", "/two")
    with pytest.raises(UsageError, match="different held-out data"):
        planned_from("held", "/two")


def test_runs_of_a_pair_have_one_seed_and_share_no_file() -> None:
    raw = raw_recipe(compare={"seeds": [7, 9]}) | {"technique": {"optimizer": {"epsilon": 1e-6}}}
    runs = planned_runs(*technique_of(raw), "/out")
    assert [(one.arm, one.seed) for one in runs] == [
        ("baseline", 7), ("technique", 7), ("baseline", 9), ("technique", 9),
    ]  # fmt: skip
    for run in runs:
        assert (run.recipe.model.seed, run.recipe.data.seed) == (run.seed, run.seed)
    places = [one.recipe.metrics.file for one in runs] + [one.recipe.checkpoint.directory for one in runs]
    assert len(set(places)) == 8
