"""Collectives of tensor and sequence parallelism in one step, as `fireflyer.training.tensor` calls them.

In a layer, attention and feed-forward each have an allgather before them and a reduce-scatter behind, and backward the
reverse. The embedding adds its parts by a reduce-scatter, the head gathers its input, and each has the other collective
in backward. The loss, on logits divided by vocabulary, adds three values of each token: largest logit, sum of
exponentials (FP32), and the loss itself (BF16). Gradients of norms are added once in a step.

What backward computes again repeats collectives: `operators` the allgathers; `blocks` all of a layer's forward but its
last reduce-scatter, whose result backward does not need; `full` all of the stage's, but that last one unless the head
is behind it.
"""

from __future__ import annotations

from typing import Final

import msgspec

from fireflyer.codesign.model import ModelShape
from fireflyer.codesign.parallel.plan import FORMAT_BYTES, ParallelPlan
from fireflyer.codesign.parallel.stages import balance_model, held_share

__all__ = ["TensorCollectives", "tensor_collectives"]

HIDDEN_BYTES: Final = 2
"""Of one value of the residual stream: BF16."""
LOSS_BYTES: Final = 4 + 4 + 2


class TensorCollectives(msgspec.Struct, frozen=True, kw_only=True):
    """Of one rank in one step, without those of embedding, experts and pipeline on other axes."""

    allgathers: float
    reduce_scatters: float
    """Calls, each of the residual stream of one micro-batch. Halves are of DualPipe, whose stages have two ranks."""
    hidden_bytes: float
    """That a rank sends in each of them, in a ring."""
    allreduce_bytes: float
    """That a rank sends for losses and gradients of norms."""

    @property
    def sent_bytes(self) -> float:
        """All that one rank sends."""
        return (self.allgathers + self.reduce_scatters) * self.hidden_bytes + self.allreduce_bytes


def tensor_collectives(plan: ParallelPlan, shape: ModelShape, stage: int) -> TensorCollectives:
    """Those of a rank of `stage`; none without tensor parallelism."""
    if plan.tensor == 1:
        return TensorCollectives(allgathers=0, reduce_scatters=0, hidden_bytes=0, allreduce_bytes=0)
    stages = balance_model(shape, plan.pieces, plan.sequence_tokens)
    held = [stages[piece] for piece in plan.pieces_of(stage)]
    layers = sum(one.dense_layers + one.expert_layers for one in held)
    embeddings, heads = sum(one.embedding for one in held), sum(one.heads for one in held)
    gathers, scatters, losses = 4 * layers + embeddings + heads, 4 * layers + embeddings + heads, heads
    if plan.recompute in ("operators", "blocks"):
        gathers += 2 * layers
        scatters += layers if plan.recompute == "blocks" else 0
    if plan.recompute == "full":
        gathers += 2 * layers + heads
        scatters += 2 * layers + embeddings - sum(not one.heads for one in held)
        losses += heads
    share = (plan.tensor - 1) / plan.tensor
    passes = held_share(plan) * plan.micro_batches
    tokens = plan.micro_batch_tokens
    norms = sum(one.vector for one in held) * FORMAT_BYTES[plan.precision.gradients]
    return TensorCollectives(
        allgathers=gathers * passes,
        reduce_scatters=scatters * passes,
        hidden_bytes=share * tokens * shape.hidden * HIDDEN_BYTES,
        allreduce_bytes=2 * share * (losses * passes * tokens * LOSS_BYTES + norms),
    )
