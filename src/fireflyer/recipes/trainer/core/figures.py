"""Lines of the metrics file, and the figures in them.

A file has one JSON object in a line, each with a `kind`. A run that goes on after step s appends a `start` line with
that step: of lines of later steps before it, written by an attempt that ended, the later ones count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from fireflyer.codesign.model import ModelShape, model_flops_utilization, training_flops
from fireflyer.recipes.trainer.core.anomalies import Action

__all__ = [
    "AnomalyLine",
    "EvaluationLine",
    "ExchangeLine",
    "ExpertsLine",
    "LayerLoads",
    "MetricsLine",
    "PipelineLine",
    "QuantizationLine",
    "QuantizedOperand",
    "Rates",
    "SourceLoss",
    "StartLine",
    "StepLine",
    "evaluation_of",
    "held_out_of",
    "mean_loss",
    "rates",
]


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Speed of a step of the whole job, FLOPs by both conventions of DeepSeek-V3 (table 4)."""

    tokens_per_s: float
    flops_per_s_causal: float
    """Of one rank: attention scores of the lower triangle only, as FlashAttention computes them."""
    flops_per_s_noncausal: float
    """Of one rank: whole score matrices, as Megatron counts them."""
    mfu_causal: float | None = None
    """Where the recipe has `peak_flops`."""
    mfu_noncausal: float | None = None


class StartLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="start", forbid_unknown_fields=True):
    step: int
    """Steps that are done: 0 for a fresh start."""
    checkpoint: str | None
    """What it goes on from."""
    recipe: str
    """Digest of it."""
    world_size: int
    held_out: dict[str, str] | None = None
    """Digest of each held-out source, by its name, in the order of the recipe; None where an earlier release wrote the
    line."""


class StepLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="step", forbid_unknown_fields=True):
    step: int
    position: int
    """Samples that all ranks together have consumed."""
    loss: float | None
    """Mean over the tokens of the whole batch; None where it is not finite, which JSON cannot say."""
    norm: float | None
    """Of the gradients before clipping; None where the step was not taken."""
    learning_rate: float
    seconds: float
    rates: Rates


class AnomalyLine(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="anomaly", forbid_unknown_fields=True
):
    step: int
    action: Action
    reason: str


class SourceLoss(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    loss: float | None
    """Mean over its tokens; None where it is not finite, which JSON cannot say."""
    tokens: int


class EvaluationLine(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="evaluation", forbid_unknown_fields=True
):
    step: int
    loss: float | None
    """Mean over the tokens of all sources; None where that of one is not finite."""
    sources: tuple[SourceLoss, ...]
    """In the order of the recipe."""


class QuantizedOperand(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One operand of all FP8 products, over layers and ranks."""

    operand: str
    """`input`, `weight`, `gradient`, `input_of_wgrad` or `gradient_of_wgrad`."""
    elements: int
    underflowed: int
    """Not zero, but of code zero."""
    saturated: int
    """Overflowed: cut to the largest value."""
    nonfinite: int
    """NaN or infinite."""


class QuantizationLine(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="quantization", forbid_unknown_fields=True
):
    """What FP8 has lost in the steps since the line before, or since the start."""

    step: int
    operands: tuple[QuantizedOperand, ...]


class PipelineLine(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="pipeline", forbid_unknown_fields=True
):
    """The passes of one step of the pipeline of rank 0, from the first to the last, beside the simulation of its
    schedule with the median time of each kind of pass in this step. In seconds."""

    step: int
    measured_s: float
    predicted_s: float
    measured_bubble_s: float
    """Of the rank that waits longest."""
    predicted_bubble_s: float


class ExchangeLine(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="exchange", forbid_unknown_fields=True
):
    """Exchanges of tokens between experts in one step of a pipeline whose schedule overlaps passes. In seconds, means
    over all ranks."""

    step: int
    exchange_s: float
    """With at least one dispatch or combine under way, from its start to the end of the wait for it."""
    hidden_s: float
    """Of that, time in which the rank computed."""


class LayerLoads(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One layer with experts."""

    gate: str
    """Name in the model."""
    tokens: tuple[int, ...]
    """That each expert got, by its number before."""
    before: float
    """Load of the fullest rank over the mean."""
    after: float
    """As it would have been with the new numbers; the same where experts were left."""


class ExpertsLine(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="experts", forbid_unknown_fields=True
):
    """Experts were put on ranks by their loads, after this many steps."""

    step: int
    layers: tuple[LayerLoads, ...]


MetricsLine = (
    StartLine | StepLine | AnomalyLine | EvaluationLine | QuantizationLine | PipelineLine | ExchangeLine | ExpertsLine
)


def rates(
    shape: ModelShape, sequence_tokens: int, step_tokens: int, seconds: float, ranks: int, peak_flops: float | None
) -> Rates:
    """Of a step of `step_tokens` tokens on `ranks` ranks."""
    tokens_per_s = step_tokens / max(seconds, 1e-9)
    causal = training_flops(shape, sequence_tokens, causal=True)
    whole = training_flops(shape, sequence_tokens, causal=False)
    return Rates(
        tokens_per_s=tokens_per_s,
        flops_per_s_causal=causal * tokens_per_s / ranks,
        flops_per_s_noncausal=whole * tokens_per_s / ranks,
        mfu_causal=None if peak_flops is None else model_flops_utilization(causal, tokens_per_s, ranks, peak_flops),
        mfu_noncausal=None if peak_flops is None else model_flops_utilization(whole, tokens_per_s, ranks, peak_flops),
    )


def mean_loss(sources: Sequence[SourceLoss]) -> float | None:
    """Over the tokens of all sources; None where that of one is not finite."""
    losses = [math.nan if one.loss is None else one.loss for one in sources]
    tokens = [one.tokens for one in sources]
    mean = sum(loss * count for loss, count in zip(losses, tokens, strict=True)) / sum(tokens)
    return mean if math.isfinite(mean) else None


def evaluation_of(lines: Iterable[MetricsLine], step: int) -> EvaluationLine | None:
    """The last evaluation after step `step`; None where there was none."""
    found = None
    for line in lines:
        if isinstance(line, EvaluationLine) and line.step == step:
            found = line
    return found


def held_out_of(lines: Iterable[MetricsLine], step: int) -> tuple[str, ...] | None:
    """Digests of the sources of `evaluation_of`, in the order of the recipe; None where they were not written down."""
    now = found = None
    for line in lines:
        if isinstance(line, StartLine):
            now = line.held_out
        elif isinstance(line, EvaluationLine) and line.step == step:
            found = now
    return None if found is None else tuple(found.values())
