"""Whether a recipe can be executed: every reason why not, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from fireflyer.base.errors import UsageError
from fireflyer.codesign.model import Attention, ModelShape
from fireflyer.codesign.parallel import ParallelPlan, Precision, shape_refusals
from fireflyer.recipes.trainer.core.recipe import DeepseekTable, GptTable, HuggingFaceTable, Recipe

__all__ = ["check_recipe", "check_restart", "plan_reasons", "reasons", "shape_of_gpt"]

_SPLIT: Final = ("zb-h1", "zbv", "dualpipe", "dualpipev")
"""Schedules that run backward passes in two parts."""
_OFF: Final = {"tensor": "tensor = 1", "zero": "zero = 0"}


def check_recipe(recipe: Recipe, shape: ModelShape, context: int | None = None) -> None:
    """Raises `UsageError` with every reason why the recipe, whose model has this shape and takes sequences of at most
    `context` tokens, is not executed."""
    found = reasons(recipe, shape, context)
    if found:
        raise UsageError(f"this recipe cannot be run: {'; '.join(found)}")


def reasons(recipe: Recipe, shape: ModelShape, context: int | None = None) -> list[str]:
    """What is impossible (`shape_refusals`), and what the trainer does not do; empty where it can be run. Raises
    `UsageError` for degrees that are no numbers of ranks."""
    plan = recipe.plan
    impossible = shape_refusals(plan, shape)
    limits = [*_sequences(plan, shape, context), *_divided_matrices(recipe, shape)]
    return [*impossible, *limits, *_kinds(recipe), *plan_reasons(plan), *_combinations(recipe)]


def plan_reasons(plan: ParallelPlan) -> list[str]:
    """Why the trainer does not execute the plan, whatever its model is; empty where it may."""
    return [*_degrees(plan), *_precision(plan)]


def check_restart(recipe: Recipe, saved_mesh: Mapping[str, int] | None) -> None:
    """Raises `UsageError` where the newest checkpoint, of a plan with this mesh (None: there is none), does not fit the
    plan. Other degrees of replicas, shards and ZeRO do: checkpoints are divided anew."""
    tensor = recipe.plan.tensor
    before = tensor if saved_mesh is None else saved_mesh.get("tensor", 1)
    if isinstance(recipe.model, GptTable) and (before > 1) != (tensor > 1):
        raise UsageError(
            f"the checkpoints were saved with tensor = {before}, the plan has {tensor}: the small GPT then has other "
            "matrices (a stacked one is divided by its parts); keep tensor parallelism on or off, or begin in a fresh "
            "[checkpoint] directory"
        )


def _sequences(plan: ParallelPlan, shape: ModelShape, context: int | None) -> Iterator[str]:
    tokens = plan.sequence_tokens
    if context is not None and tokens > context:
        yield f"sequence_tokens = {tokens} is longer than the context of the model; use at most {context}"
    if tokens <= shape.mtp_layers:
        yield f"sequence_tokens = {tokens} is too short for {shape.mtp_layers} prediction modules; use more"


def _divided_matrices(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """What `training.tensor` divides beside the matrices that `shape_refusals` looks at."""
    tensor, vocabulary, attention = recipe.plan.tensor, shape.vocabulary, shape.attention
    if tensor == 1:
        return
    if isinstance(recipe.model, HuggingFaceTable) and shape.model_type != "llama":
        yield f"tensor = {tensor} with model_type = {shape.model_type!r}: of Hugging Face models llama is divided"
    if vocabulary % tensor:
        wanted = vocabulary + -vocabulary % tensor
        yield f"a vocabulary of {vocabulary} does not divide into tensor = {tensor} parts; pad it to {wanted}"
    if isinstance(attention, Attention) and attention.kv_heads % tensor and attention.kv_heads != attention.heads:
        yield f"{attention.kv_heads} key-value heads do not divide into tensor = {tensor} parts"


def _kinds(recipe: Recipe) -> Iterator[str]:
    """Kinds of models that are not divided so."""
    plan = recipe.plan
    for name in ("pipeline", "expert"):
        value = getattr(plan, name)
        if value > 1 and isinstance(recipe.model, HuggingFaceTable):
            yield f"{name} = {value}: Hugging Face models are not divided so; use {name} = 1"
    if plan.tensor > 1 and isinstance(recipe.model, DeepseekTable):
        yield f"tensor = {plan.tensor}: the DeepSeek model has no tensor parallelism; use tensor = 1"


def _degrees(plan: ParallelPlan) -> Iterator[str]:
    others = {name: getattr(plan, name) for name in ("tensor", "zero") if getattr(plan, name) > (name == "tensor")}
    for name in ("pipeline", "expert"):
        value = getattr(plan, name)
        if value == 1:
            continue
        for other, degree in others.items():
            if other == "zero" and plan.tensor == 1:
                if degree > 1:
                    whole = "pipelines" if name == "pipeline" else "divided experts"
                    yield f"{name} = {value} with zero = {degree}: the trainer has {whole} with zero = 1; use that"
                continue
            yield f"{name} = {value} with {other} = {degree}: the trainer has either; use replicate, and {_OFF[other]}"
    if plan.zero == 1 and plan.expert_shard > 1 and plan.expert > 1 and plan.replicate > 1:
        yield (
            f"expert = {plan.expert} with zero = 1 and replicate = {plan.replicate}: the trainer divides states of "
            f"experts over all ranks that have the same ones; use replicate = 1, and shard = {plan.data}"
        )
    again = plan.recompute if isinstance(plan.recompute, str) else ", ".join(sorted({*plan.recompute} - {"none"}))
    if again not in ("none", "") and plan.pipeline > 1 and plan.schedule in _SPLIT:
        yield (
            f"recompute = {again!r} with schedule = {plan.schedule!r}, which runs a backward pass in parts, "
            "each of which computes again; use recompute = 'none', or schedule = '1f1b'"
        )


def _precision(plan: ParallelPlan) -> Iterator[str]:
    """FP32 shards and moments are what the optimizers keep; BF16 parameters are those that FSDP gathers."""
    precision = plan.precision
    whole = not plan.zero or plan.rows_of_whole
    where = "zero 1 to 3 without pipeline or expert"
    if precision.parameters == "bf16" and whole:
        yield f"precision.parameters = 'bf16' is for {where}, which keep FP32 shards; use 'fp32', with any compute"
    if precision.gradients == "bf16" and whole:
        yield f"precision.gradients = 'bf16' is for {where}; use 'fp32'"
    if precision.parameters == "bf16" and precision.compute == "fp32" and not whole:
        yield (
            "precision.compute = 'fp32' with precision.parameters = 'bf16': products of BF16 parameters are BF16; use "
            "compute = 'bf16', or parameters = 'fp32'"
        )
    if precision.moments != "fp32":
        yield f"precision.moments = {precision.moments!r}: moments are kept in FP32; use 'fp32'"
    if precision.compute == "fp8" and plan.tensor > 1:
        yield f"precision.compute = 'fp8' with tensor = {plan.tensor}: FP8 layers are not divided; use tensor = 1"
    if precision.activations not in (Precision().activations, precision.compute):
        yield (
            f"precision.activations = {precision.activations!r}: it is that of compute, {precision.compute!r}, or left "
            "out"
        )
    for name in ("dispatch", "combine"):
        value = getattr(precision, name)
        if value is not None and plan.expert == 1:
            yield f"precision.{name} = {value!r} with expert = 1: no token is sent to another rank; leave it out"


def _combinations(recipe: Recipe) -> Iterator[str]:
    plan, optimizer, policy, checkpoint = recipe.plan, recipe.optimizer, recipe.policy, recipe.checkpoint
    if recipe.guard.period_steps and plan.replicate == 1:
        yield "[guard] compares replicas, and replicate is 1; use period_steps = 0"
    if recipe.guard.period_steps and plan.expert > 1:
        yield f"[guard] compares replicas, and with expert = {plan.expert} they differ; use period_steps = 0"
    if recipe.experts.placement == "measured" and plan.expert == 1:
        yield "[experts] placement = 'measured' with expert = 1: all experts are on one rank; use placement = 'fixed'"
    yield from _without_effect(recipe)
    rewinds = "rewind" in (policy.on_spike, policy.on_not_finite)
    if rewinds and checkpoint.period is None and (checkpoint.period_steps or 0) >= optimizer.steps:
        yield (
            f"[policy] rewind needs checkpoints, and with period_steps = {checkpoint.period_steps} none is saved "
            f"before the last of {optimizer.steps} steps; use a smaller period_steps in [checkpoint]"
        )


def _without_effect(recipe: Recipe) -> Iterator[str]:
    """Settings that nothing comes of. A guard whose period is longer than the run looks before checkpoints."""
    steps, period, profile = recipe.optimizer.steps, recipe.evaluation.period_steps, recipe.metrics.profile
    if period and not recipe.data.evaluation:
        yield f"[evaluation] period_steps = {period}, and [data] evaluation has no source; give one, or leave it out"
    if profile is not None and profile.first_step > steps:
        yield f"[metrics.profile] first_step = {profile.first_step} is after the last of {steps} steps; use one of them"


def shape_of_gpt(table: GptTable) -> ModelShape:
    """Dimensions of the small GPT: tied head, rotary positions, no biases. Raises `UsageError`."""
    for name in ("vocabulary", "layers", "heads", "width"):
        if getattr(table, name) < 1:
            raise UsageError(f"[model] {name} is {getattr(table, name)}; allowed: 1 or more")
    if table.width % (2 * table.heads):
        raise UsageError(f"[model] width {table.width} must be a multiple of twice the heads ({table.heads})")
    heads = Attention(heads=table.heads, kv_heads=table.heads, head_dim=table.width // table.heads)
    return ModelShape(
        model_type="gpt",
        layers=table.layers,
        hidden=table.width,
        vocabulary=table.vocabulary,
        feed_forward=4 * table.width,
        attention=heads,
        gated=False,
        tied_embeddings=True,
    )
