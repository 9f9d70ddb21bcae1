"""Cuts a model into stages of unequal numbers of layers, balanced by cost.

The cost of a stage is the forward FLOPs of a token in it. The embedding costs none and is with the first layer; the
output head, with the modules of multi-token prediction and their heads, is one unit behind the last layer. Of all cuts
into contiguous stages, one whose most expensive stage is cheapest is taken (`fireflyer.codesign.schedule.balance`).
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from fireflyer.codesign.model import ModelShape
from fireflyer.codesign.model.flops import attention_flops
from fireflyer.codesign.model.parameters import layer_parameters, mtp_parameters, outer_vectors
from fireflyer.codesign.parallel.plan import ParallelPlan
from fireflyer.codesign.schedule import balance

__all__ = ["Stage", "balance_model", "first_equal_stages", "held_share"]


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
    return _first_equal(shape, plan.pieces, plan.sequence_tokens, *_held(plan))


def held_share(plan: ParallelPlan) -> float:
    """Share of the micro-batches that pass a piece on one of the ranks that hold it: DualPipe has two of each piece."""
    return 0.5 if plan.schedule == "dualpipe" and plan.pipeline > 1 else 1.0


def _held(plan: ParallelPlan) -> tuple[tuple[int, ...], ...]:
    return tuple(plan.pieces_of(stage) for stage in range(plan.pipeline))


@lru_cache(maxsize=1024)
def _first_equal(shape: ModelShape, pieces: int, sequence_tokens: int, *held: tuple[int, ...]) -> tuple[int, ...]:
    stages = balance_model(shape, pieces, sequence_tokens)
    # The turn of a V has both its pieces on one rank, and sends less.
    keys = [
        (
            len(held) - 1 == stage and len(mine) == 2 and mine[1] - mine[0] == 1,
            *(msgspec.structs.replace(stages[piece], first=0) for piece in mine),
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
