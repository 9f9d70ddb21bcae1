"""Cuts a model into stages of unequal numbers of layers, balanced by cost.

The cost of a stage is the forward FLOPs of a token in it. The embedding costs none and is with the first layer; the
output head, with the modules of multi-token prediction and their heads, is one unit behind the last layer. Of all cuts
into contiguous stages, one whose most expensive stage is cheapest is taken (`fireflyer.codesign.schedule.balance`).
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

import msgspec

from fireflyer.codesign.model import ModelShape
from fireflyer.codesign.model.flops import attention_flops
from fireflyer.codesign.model.parameters import layer_parameters, mtp_parameters, outer_vectors
from fireflyer.codesign.model.shape import LatentAttention
from fireflyer.codesign.parallel.plan import ParallelPlan, PlanRecompute, Recompute
from fireflyer.codesign.schedule import balance

__all__ = [
    "LayerGroup",
    "Stage",
    "again_flops",
    "balance_model",
    "first_equal_stages",
    "held_share",
    "layer_again_flops",
    "layer_groups",
    "layers_of",
    "layers_with",
]


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """A contiguous part of a model, with its costs and parameters on one GPU without any division."""

    first: int
    """Number of the stage's first layer; for the head alone, the number of layers of the model."""
    layers: int
    dense_layers: int
    """Layers without experts; with those of multi-token prediction."""
    expert_layers: int
    """Layers with experts; with those of multi-token prediction."""
    embedding: bool
    head: bool
    matrix_flops: float
    """Forward, per token, in matrix products."""
    score_flops: float
    """Forward, per token, in attention scores and weighted sums; causal."""
    matrix: int
    """Parameters that tensor parallelism divides; embedding, head and copies of either included."""
    vector: int
    """Parameters that each tensor rank has whole: norms, biases, routers."""
    routed: int
    """Parameters of routed experts."""
    copies: int
    """Parameters of the embedding that this stage has beside the first one: a tied head, or the input of multi-token
    prediction. Their gradients are added over both stages."""
    heads: int
    """Output heads that are computed: 1, and one for each module of multi-token prediction."""

    @property
    def forward_flops(self) -> float:
        """FLOPs of a token, forward."""
        return self.matrix_flops + self.score_flops


class LayerGroup(NamedTuple):
    """Layers of a piece that are alike."""

    layers: int
    has_experts: bool
    recompute: Recompute


@lru_cache(maxsize=1024)
def balance_model(shape: ModelShape, pieces: int, sequence_tokens: int) -> tuple[Stage, ...]:
    """Stages of the model, in the order in which a token passes them. Raises `UsageError` for more stages than layers
    and a head."""
    head = _head_flops(shape, sequence_tokens)
    units = [_layer_flops(shape, layer, sequence_tokens) for layer in range(shape.layers)]
    costs = [matrix + score for matrix, score in units]
    stages, first = [], 0
    for length in balance([*costs, sum(head)], pieces).sizes:
        stages.append(_stage(shape, first, length, units, head, last=first + length > shape.layers))
        first += length
    return tuple(stages)


def first_equal_stages(shape: ModelShape, plan: ParallelPlan) -> tuple[int, ...]:
    """Number of the first stage whose ranks have the same work, parameters and messages as those of each stage: what is
    computed for it holds for all of them."""
    modes = plan.recompute if isinstance(plan.recompute, tuple) else "none"
    return _first_equal(shape, plan.pieces, plan.sequence_tokens, modes, *_held(plan))


def layer_groups(recompute: PlanRecompute, shape: ModelShape, piece: Stage) -> tuple[LayerGroup, ...]:
    """Layers of a piece, with those of multi-token prediction, by what they are and what backward computes again."""
    if isinstance(recompute, tuple):
        last = shape.layers - 1
        found = Counter((shape.has_experts(min(one, last)), recompute[one]) for one in layers_of(shape, piece))
        return tuple(LayerGroup(count, *key) for key, count in sorted(found.items()))
    mode: Recompute = "none" if recompute == "budget" else recompute
    both = ((piece.dense_layers, False), (piece.expert_layers, True))
    return tuple(LayerGroup(count, has_experts, mode) for count, has_experts in both if count)


def layers_with(recompute: PlanRecompute, shape: ModelShape, piece: Stage, *modes: Recompute) -> int:
    """Layers of a piece that have one of `modes`."""
    return sum(one.layers for one in layer_groups(recompute, shape, piece) if one.recompute in modes)


def again_flops(plan: ParallelPlan, shape: ModelShape, piece: Stage) -> tuple[float, float]:
    """FLOPs of a token that backward computes again in a piece: in matrix products, and in attention scores."""
    if plan.recompute in ("blocks", "full"):  # the head's logits are used at once
        return piece.matrix_flops - 2.0 * piece.heads * shape.vocabulary * shape.hidden, piece.score_flops
    if isinstance(plan.recompute, str):
        matrix, scores = layer_again_flops(shape, 0, plan.recompute, plan.sequence_tokens)
        return matrix * (piece.dense_layers + piece.expert_layers), scores
    matrix = scores = 0.0
    for layer in layers_of(shape, piece):
        products, one = layer_again_flops(shape, layer, plan.recompute[layer], plan.sequence_tokens)
        matrix, scores = matrix + products, scores + one
    return matrix, scores


def layer_again_flops(shape: ModelShape, layer: int, mode: str, sequence_tokens: int) -> tuple[float, float]:
    """Of one layer, or a module of multi-token prediction behind the last one, with a mode of its own. Of `operators`
    they are projections from latents."""
    attention = shape.attention
    if mode == "operators" and isinstance(attention, LatentAttention):
        up = attention.kv_rank * attention.heads * (attention.nope_dim + attention.value_dim)
        up += (attention.query_rank or 0) * attention.heads * attention.score_dim
        return 2.0 * up, 0.0
    if mode != "blocks":
        return 0.0, 0.0
    products, scores = _layer_flops(shape, min(layer, shape.layers - 1), sequence_tokens)
    return products + (4.0 * shape.hidden * shape.hidden if layer >= shape.layers else 0.0), scores


def layers_of(shape: ModelShape, piece: Stage) -> list[int]:
    """Numbers of its layers; modules of multi-token prediction follow the last one."""
    modules = range(shape.layers, shape.layers + shape.mtp_layers) if piece.head else range(0)
    return [*range(piece.first, piece.first + piece.layers), *modules]


def held_share(plan: ParallelPlan) -> float:
    """Share of the micro-batches that pass a piece on one of the ranks that hold it: DualPipe has two of each piece."""
    return 0.5 if plan.schedule == "dualpipe" and plan.pipeline > 1 else 1.0


def _held(plan: ParallelPlan) -> tuple[tuple[int, ...], ...]:
    return tuple(plan.pieces_of(stage) for stage in range(plan.pipeline))


@lru_cache(maxsize=1024)
def _first_equal(
    shape: ModelShape, pieces: int, sequence_tokens: int, recompute: PlanRecompute, *held: tuple[int, ...]
) -> tuple[int, ...]:
    stages = balance_model(shape, pieces, sequence_tokens)
    # The turn of a V has both its pieces on one rank, and sends less.
    keys = [
        (
            len(held) - 1 == stage and len(mine) == 2 and mine[1] - mine[0] == 1,
            *(msgspec.structs.replace(stages[piece], first=0) for piece in mine),
            *(layer_groups(recompute, shape, stages[piece]) for piece in mine),
        )
        for stage, mine in enumerate(held)
    ]
    return tuple(keys.index(key) for key in keys)


def _layer_flops(shape: ModelShape, layer: int, sequence_tokens: int) -> tuple[float, float]:
    return 2.0 * layer_parameters(shape, layer).active_matrix, attention_flops(shape, layer, sequence_tokens)


def _head_flops(shape: ModelShape, sequence_tokens: int) -> tuple[float, float]:
    """Matrix products and scores of the head and of all modules of multi-token prediction."""
    logits = 2.0 * shape.vocabulary * shape.hidden
    layer, score = _layer_flops(shape, shape.layers - 1, sequence_tokens)
    projection = 4.0 * shape.hidden * shape.hidden
    return logits + shape.mtp_layers * (layer + projection + logits), shape.mtp_layers * score


def _stage(
    shape: ModelShape,
    first: int,
    units: int,
    layer_flops: list[tuple[float, float]],
    head_flops: tuple[float, float],
    *,
    last: bool,
) -> Stage:
    layers = range(first, min(first + units, shape.layers))
    counts = [layer_parameters(shape, layer) for layer in layers]
    dense = sum(not shape.has_experts(layer) for layer in layers)
    experts = len(layers) - dense
    matrix, vector = sum(one.matrix for one in counts), sum(one.vector + one.router for one in counts)
    routed, copies = sum(one.routed for one in counts), 0
    embedding, heads = shape.vocabulary * shape.hidden, 0
    if first == 0:
        matrix += embedding + shape.learned_positions * shape.hidden
        vector += outer_vectors(shape)[0]
    if last:
        heads = 1 + shape.mtp_layers
        extra = layer_parameters(shape, shape.layers - 1)
        matrix += shape.mtp_layers * (extra.matrix + 2 * shape.hidden * shape.hidden)
        routed += shape.mtp_layers * extra.routed
        vector += shape.mtp_layers * (mtp_parameters(shape) - extra.matrix - extra.routed - 2 * shape.hidden**2)
        vector += outer_vectors(shape)[1]
        if shape.has_experts(shape.layers - 1):
            experts += shape.mtp_layers
        else:
            dense += shape.mtp_layers
        if shape.tied_embeddings or shape.mtp_layers:
            copies = embedding if first > 0 else 0
        matrix += copies if shape.tied_embeddings else embedding + copies
    return Stage(
        first=first,
        layers=len(layers),
        dense_layers=dense,
        expert_layers=experts,
        embedding=first == 0,
        head=last,
        matrix_flops=sum(layer_flops[layer][0] for layer in layers) + (head_flops[0] if last else 0.0),
        score_flops=sum(layer_flops[layer][1] for layer in layers) + (head_flops[1] if last else 0.0),
        matrix=matrix,
        vector=vector,
        routed=routed,
        copies=copies,
        heads=heads,
    )
