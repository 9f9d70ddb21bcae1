"""Bytes of GPU memory that a rank of a plan needs: parameters, gradients, optimizer states, activations.

Parameters, gradients and states follow the ZeRO paper (Rajbhandari et al. 2020, 3): stage 1 divides states over the
shard group, 2 gradients too, 3 parameters too. Activations are counted as Korthikanti et al. (2022, 4) count them, for
attention without a stored score matrix and without dropout: the inputs of each matrix product and norm that backward
needs. For a GPT layer that is 32 bytes per token and hidden value (their 34 less the two dropout masks). Tensor with
sequence parallelism divides all of them but the inputs of attention and feed-forward, which `fireflyer.training.tensor`
gathers and keeps (they gather them again in backward), and the logits. Those of `kernels="eager"` are counted by
`fireflyer.codesign.parallel.eager`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

import msgspec

from fireflyer.codesign.model import ModelShape
from fireflyer.codesign.model.shape import LatentAttention
from fireflyer.codesign.parallel.eager import eager_memory, eager_values
from fireflyer.codesign.parallel.kept_gradients import ValueBytes, kept_gradients
from fireflyer.codesign.parallel.pipeline import held_at_once
from fireflyer.codesign.parallel.plan import FORMAT_BYTES, MatrixFormat, ParallelPlan, Recompute
from fireflyer.codesign.parallel.stages import Stage, balance_model, first_equal_stages, layer_groups

__all__ = [
    "Kernels",
    "RankMemory",
    "activation_bytes",
    "held_parameters",
    "peak_memory",
    "plan_memory",
    "static_memory",
]

Kernels = Literal["fused", "eager"]
"""How a rank computes: `fused` kernels of GPUs, or `eager` operators of PyTorch on the CPU."""

LOGIT_BYTES = 6
"""Of one value of the vocabulary: BF16 logits, and FP32 for the loss, whose gradient takes their place."""


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on one rank of a stage."""

    stage: int
    parameters: int
    gradients: int
    states: int
    activations: int
    """Activations of all micro-batches in flight, with the gradients that are kept for the pass for weights."""
    working: int
    """Memory beside the kept activations: what is computed again for a block or stage, logits, gathered parameters."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.states + self.activations + self.working


class LayerActivations(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes per token that forward keeps in one layer."""

    kept: float
    working: float
    """Of the layer while it is computed backward, where nothing or little is kept."""


@lru_cache(maxsize=256)
def activation_bytes(
    shape: ModelShape, has_experts: bool, recompute: Recompute, factors: MatrixFormat, tensor: int = 1
) -> LayerActivations:
    """Bytes per token of one layer on one of `tensor` ranks that divide it. `factors`: the format of kept inputs of
    matrix products."""
    gathered = _gathered(shape, has_experts, FORMAT_BYTES[factors])
    all_of_it = (_kept(shape, has_experts, FORMAT_BYTES[factors], operators=False) - gathered) / tensor + gathered
    if recompute == "none":
        return LayerActivations(kept=all_of_it, working=0)
    if recompute == "operators":
        kept = _kept(shape, has_experts, FORMAT_BYTES[factors], operators=True) / tensor
        return LayerActivations(kept=kept, working=all_of_it - kept)
    return LayerActivations(kept=2 * shape.hidden / tensor if recompute == "blocks" else 0, working=all_of_it)


def _gathered(shape: ModelShape, has_experts: bool, factor: int) -> int:
    """Of all that is kept, inputs that each rank of a tensor group has whole. Experts and latent attention are not
    divided."""
    attention = 0 if isinstance(shape.attention, LatentAttention) else 1
    return (attention + (not has_experts)) * shape.hidden * factor


def _kept(shape: ModelShape, has_experts: bool, factor: int, *, operators: bool) -> float:
    """The residual stream before both norms (BF16), and inputs of matrix products. With `operators` outputs of norms
    and activation functions, and projections from latents, are computed again."""
    h, attention = shape.hidden, shape.attention
    total = 2 * 2 * h  # inputs of both norms
    norm_outputs = h * factor
    queries = attention.heads * attention.score_dim
    values = attention.heads * attention.value_dim
    if isinstance(attention, LatentAttention):
        total += (attention.query_rank or 0) * factor + (attention.kv_rank + attention.rope_dim) * factor
        up = 2 * (2 * queries + values)  # attention is BF16
        if operators:
            up = 0 if attention.query_rank else 2 * queries
        total += up
    else:
        total += 2 * (queries + 2 * attention.kv_heads * attention.head_dim)
    total += values * factor  # input of the output projection
    if not operators:
        total += 2 * norm_outputs  # inputs of attention and of feed-forward
    experts = shape.experts
    if not has_experts or experts is None:
        return total + shape.feed_forward * _inner(shape.gated, factor, operators=operators)
    total += experts.per_token * h * factor  # tokens as the experts received them
    inner = experts.per_token * experts.feed_forward + experts.shared_feed_forward
    return total + inner * _inner(True, factor, operators=operators)


def _inner(gated: bool, factor: int, *, operators: bool) -> int:
    """Bytes per inner value of a feed-forward layer: outputs of gate and up projection, and their product."""
    outputs = (2 if gated else 1) * factor
    return outputs if operators else outputs + factor


def held_parameters(plan: ParallelPlan, shape: ModelShape, stage: int) -> tuple[float, float]:
    """Parameters on one rank of `stage` before ZeRO divides them: outside experts, and of experts. A rank that holds
    the first piece and the last has what they share once."""
    stages = balance_model(shape, plan.pieces, plan.sequence_tokens)
    held = [stages[piece] for piece in plan.pieces_of(stage)]
    twice = sum(one.copies for one in held) if any(one.embedding for one in held) else 0
    return (
        (sum(one.matrix for one in held) - twice) / plan.tensor + sum(one.vector for one in held),
        sum(one.routed for one in held) / plan.expert,
    )


def static_memory(plan: ParallelPlan, shape: ModelShape, stage: int) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer states on one rank of `stage`.

    FSDP keeps shards of parameters and of reduced gradients in FP32, and makes BF16 parameters of them as it gathers:
    with ZeRO 3 the shards are the parameters; with ZeRO 1 and 2 it has memory of its own for the whole ones beside
    them, and shards of BF16 parameters are the copy that counts among states. ZeRO 1 keeps whole gradients from one
    micro-batch to the next. Stages of a pipeline and divided experts are not of FSDP: shards are rows of whole
    parameters and gradients.
    """
    precision, zero = plan.precision, plan.zero
    parameter, gradient = FORMAT_BYTES[precision.parameters], FORMAT_BYTES[precision.gradients]
    state = precision.state_bytes
    if zero == 3 and precision.parameters == "bf16":
        parameter, state = FORMAT_BYTES["fp32"], state - FORMAT_BYTES["fp32"]
    beside = zero in (1, 2) and precision.parameters == "fp32" and not plan.rows_of_whole
    parameters = gradients = states = 0.0
    for count, shard in zip(held_parameters(plan, shape, stage), (plan.shard, plan.expert_shard), strict=True):
        parameters += count * parameter / (shard if zero == 3 else 1)
        parameters += count * parameter / shard if beside else 0
        gradients += count * (FORMAT_BYTES["fp32"] / shard if plan.reduces_shards else gradient)
        states += count * state / (shard if zero >= 1 else 1)
    return round(parameters), round(gradients), round(states)


def plan_memory(plan: ParallelPlan, shape: ModelShape, kernels: Kernels = "fused") -> tuple[RankMemory, ...]:
    """Memory of a rank of each stage. Raises `UsageError` for a schedule that the numbers of the plan do not allow."""
    kept = _kept_by_stage(_without_data(plan, kernels), shape, kernels)
    return tuple(_rank_memory(plan, shape, stage, kept[stage]) for stage in range(plan.pipeline))


def peak_memory(plan: ParallelPlan, shape: ModelShape, kernels: Kernels = "fused") -> RankMemory:
    """Memory of the rank that needs most. Raises as `plan_memory` does."""
    kept = _kept_by_stage(_without_data(plan, kernels), shape, kernels)
    fullest: dict[int, int] = {}  # of stages that are equal but for what their ranks have in flight
    for stage, first in enumerate(first_equal_stages(shape, plan)):
        if first not in fullest or kept[stage].activations > kept[fullest[first]].activations:
            fullest[first] = stage
    ranks = [_rank_memory(plan, shape, stage, kept[stage]) for stage in fullest.values()]
    return max(ranks, key=lambda one: one.total)


def _rank_memory(plan: ParallelPlan, shape: ModelShape, stage: int, kept: _Kept) -> RankMemory:
    parameters, gradients, states = static_memory(plan, shape, stage)
    return RankMemory(
        stage=stage,
        parameters=parameters,
        gradients=gradients,
        states=states,
        activations=kept.activations,
        working=kept.working + _gathered_bytes(plan, shape, stage),
    )


class _Kept(NamedTuple):
    """Bytes of the activations of a rank."""

    activations: int
    working: int


class _Piece(NamedTuple):
    """Bytes of one micro-batch of a piece."""

    activations: float
    gradients: float
    """Kept for the pass for weights, where the backward is split."""
    working: float


def _without_data(plan: ParallelPlan, kernels: Kernels) -> ParallelPlan:
    """The plan with the same activations that a search meets most often."""
    sequences = plan.micro_batches * plan.micro_batch
    expert = 1 if kernels == "fused" else plan.expert
    return msgspec.structs.replace(plan, replicate=1, shard=1, expert=expert, zero=0, batch_sequences=sequences)


@lru_cache(maxsize=1024)
def _kept_by_stage(plan: ParallelPlan, shape: ModelShape, kernels: Kernels) -> tuple[_Kept, ...]:
    count = _fused_piece if kernels == "fused" else _eager_piece
    pieces = [count(plan, shape, one) for one in balance_model(shape, plan.pieces, plan.sequence_tokens)]
    # Stages that are executed show no phases to pairs, so that B of a pair is done before its F.
    at_once = held_at_once(plan.schedule, plan.pipeline, plan.micro_batches, plan.chunks, overlapped=kernels == "fused")
    found = []
    for stage, states in enumerate(at_once):
        held = [pieces[number] for number in sorted(plan.pieces_of(stage))]
        activations, gradients = [one.activations for one in held], [one.gradients for one in held]
        most = max(one.size(activations, gradients) for one in states)
        found.append(_Kept(round(most), round(max(one.working for one in held))))
    return tuple(found)


def _eager_piece(plan: ParallelPlan, shape: ModelShape, piece: Stage) -> _Piece:
    activations, working = eager_memory(plan, shape, piece)
    return _Piece(activations, kept_gradients(plan, shape, piece, eager_values(plan.precision)), working)


def _fused_piece(plan: ParallelPlan, shape: ModelShape, piece: Stage) -> _Piece:
    tokens = plan.micro_batch_tokens
    kept, working = _piece_activations(plan, shape, piece)
    # A kept gradient is a factor of a matrix product as a kept input is.
    values = ValueBytes(stream=2, product=FORMAT_BYTES[plan.precision.activations])
    gradients = kept_gradients(plan, shape, piece, values)
    return _Piece(kept * tokens, gradients, (working + piece.heads * shape.vocabulary * LOGIT_BYTES) * tokens)


def _piece_activations(plan: ParallelPlan, shape: ModelShape, piece: Stage) -> tuple[float, float]:
    """Bytes per token of one piece: kept, with what it passes on, and beside them while it is computed backward."""
    between = 2.0 * shape.hidden / plan.tensor
    kept, working, whole = between if plan.pipeline > 1 and not piece.head else 0.0, 0.0, 0.0
    for count, has_experts, mode in layer_groups(plan.recompute, shape, piece):
        layer = activation_bytes(shape, has_experts, mode, plan.precision.activations, plan.tensor)
        kept += count * layer.kept
        whole += count * layer.working
        working = max(working, layer.working)
    if plan.recompute == "full":
        return kept + between, whole
    return kept, working


def _gathered_bytes(plan: ParallelPlan, shape: ModelShape, stage: int) -> int:
    """Two blocks of whole parameters and one of gradients, while ZeRO 3 gathers them; one of gradients with ZeRO 2, and
    with ZeRO 1 where no whole ones are kept."""
    if plan.zero < 1 or plan.rows_of_whole or (plan.zero == 1 and plan.micro_batches > 1):
        return 0
    stages = balance_model(shape, plan.pieces, plan.sequence_tokens)
    held = [stages[piece] for piece in plan.pieces_of(stage)]
    layers = sum(one.dense_layers + one.expert_layers for one in held)
    block = sum(one.matrix / plan.tensor + one.vector + one.routed / plan.expert for one in held) / max(1, layers)
    gathered = 2 * FORMAT_BYTES[plan.precision.parameters] if plan.zero == 3 else 0
    return round(block * (gathered + FORMAT_BYTES[plan.precision.gradients]))
