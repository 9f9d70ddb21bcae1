"""Bytes of gradients that a rank keeps between the two parts of a split backward.

The part for inputs (I) keeps the gradient that arrives wherever a parameter is used, until the part for weights (W) has
read it (`fireflyer.training.pipeline.split_backward`). These are gradients of results: of each matrix product, each
norm and the gate. They are there beside the activations, which stay until W too, and whatever is computed again:
recomputation changes no result. Two of them that are one tensor count once: what is added to the residual stream has
the gradient of the stream.

Of a tensor group, a rank has the gradients of its part of the heads, inner values and normed tokens; those of sums over
the group are whole on each rank.

Nothing leads from the first stage to an input that needs a gradient: its I does nothing, and W is its whole backward,
which needs the gradient of its output alone. The other stages free their output after I.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from fireflyer.codesign.model import ModelShape
from fireflyer.codesign.model.shape import LatentAttention
from fireflyer.codesign.parallel.plan import ParallelPlan
from fireflyer.codesign.parallel.stages import Stage

__all__ = ["ValueBytes", "kept_gradients", "layer_gradients"]


class ValueBytes(NamedTuple):
    """Bytes of values whose gradients have the same format."""

    stream: int
    """Of the residual stream and of norms."""
    product: int
    """Of results of matrix products."""
    gate: int = 4
    """Of scores of experts, which are FP32."""


@lru_cache(maxsize=256)
def layer_gradients(shape: ModelShape, has_experts: bool, values: ValueBytes, tensor: int = 1) -> float:
    """Bytes per token of one layer on one of `tensor` ranks that divide it."""
    h, attention = shape.hidden, shape.attention
    norms = 2 * h * values.stream
    added = 2 * h * values.product  # of attention and of feed-forward, to the residual stream
    if isinstance(attention, LatentAttention):
        results = attention.heads * (attention.score_dim + attention.nope_dim + attention.value_dim)
        results += attention.kv_rank + attention.rope_dim
        norms += (attention.kv_rank + (attention.query_rank or 0)) * values.stream
        results += attention.query_rank or 0
    else:
        results = (attention.heads + 2 * attention.kv_heads) * attention.head_dim
    experts = shape.experts if has_experts else None
    if experts is None:
        results += (2 if shape.gated else 1) * shape.feed_forward
        return (norms + results * values.product) / tensor + added
    results += 2 * experts.shared_feed_forward
    if not experts.shared_feed_forward:
        added -= h * values.product
    results += experts.per_token * (2 * experts.feed_forward + h)
    return (norms + results * values.product + experts.routed * values.gate) / tensor + added


def kept_gradients(plan: ParallelPlan, shape: ModelShape, piece: Stage, values: ValueBytes) -> float:
    """Bytes of one micro-batch of a piece, less what I frees."""
    tokens, h = plan.micro_batch_tokens, shape.hidden
    passed_on = h * values.stream / plan.tensor
    if piece.embedding:
        return 0.0 if piece.head else tokens * passed_on
    kept = sum(
        count * layer_gradients(shape, has_experts, values, plan.tensor)
        for count, has_experts in ((piece.dense_layers, False), (piece.expert_layers, True))
        if count
    )
    if not piece.head:
        return tokens * (kept - passed_on)
    logits = shape.vocabulary * values.product
    kept += h * values.stream / plan.tensor + logits
    # Of a module: the norm of what came before, both norms side by side, the projection, the last norm.
    module = 4 * h * values.stream / plan.tensor + h * values.product + logits
    return tokens * (kept + (piece.heads - 1) * module)
