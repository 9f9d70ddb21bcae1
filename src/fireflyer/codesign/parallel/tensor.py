"""Collectives of tensor and sequence parallelism in one step, as `fireflyer.training.tensor` calls them.

In a layer, attention and feed-forward each have an allgather before them and a reduce-scatter behind, and backward the
reverse. The embedding adds its parts by a reduce-scatter, the head gathers its input, and each has the other collective
in backward. Logits are gathered for the loss, which each rank computes. Gradients of norms are added once in a step,
with ZeRO 2 and 3 in each micro-batch.

What backward computes again repeats collectives: `operators` the allgathers; `blocks` all of a layer's forward but its
last reduce-scatter, whose result backward does not need; `full` all of the stage's, but that last one unless the head
is behind it, and logits.

Under autocast results of matrix products are BF16, and the residual stream, which is normed and gathered, FP32.
"""

from __future__ import annotations

import msgspec

from fireflyer.codesign.model import ModelShape
from fireflyer.codesign.parallel.plan import FORMAT_BYTES, ParallelPlan
from fireflyer.codesign.parallel.stages import balance_model, held_share, layers_with

__all__ = ["TensorCollectives", "tensor_collectives"]


class TensorCollectives(msgspec.Struct, frozen=True, kw_only=True):
    """Of one rank in one step, without those of embedding, experts and pipeline on other axes."""

    allgathers: float
    reduce_scatters: float
    """Calls. Halves are of DualPipe, whose stages have two ranks."""
    allgather_bytes: float
    """That a rank sends in all of them, in a ring."""
    reduce_scatter_bytes: float
    allreduce_bytes: float
    """That a rank sends for gradients of norms."""

    @property
    def sent_bytes(self) -> float:
        """All that one rank sends."""
        return self.allgather_bytes + self.reduce_scatter_bytes + self.allreduce_bytes


def tensor_collectives(plan: ParallelPlan, shape: ModelShape, stage: int) -> TensorCollectives:
    """Those of a rank of `stage`; none without tensor parallelism."""
    if plan.tensor == 1:
        return TensorCollectives(
            allgathers=0, reduce_scatters=0, allgather_bytes=0, reduce_scatter_bytes=0, allreduce_bytes=0
        )
    stages = balance_model(shape, plan.pieces, plan.sequence_tokens)
    held = [stages[piece] for piece in plan.pieces_of(stage)]
    layers = sum(one.dense_layers + one.expert_layers for one in held)
    embeddings, heads = sum(one.embedding for one in held), sum(one.heads for one in held)
    # Of values of the stream: before layers and head, and backward behind them and the embedding. Of results of
    # products: behind layers, and backward before them.
    gathered, scattered = 2 * layers + embeddings + heads, 2 * layers + embeddings + heads
    products_gathered, products_scattered = 2 * layers, 2 * layers
    gathered += 2 * sum(layers_with(plan.recompute, shape, one, "operators", "blocks") for one in held)
    products_scattered += sum(layers_with(plan.recompute, shape, one, "blocks") for one in held)
    if plan.recompute == "full":
        gathered += 2 * layers + heads
        scattered += embeddings
        products_scattered += 2 * layers - sum(not one.heads for one in held)
    share = (plan.tensor - 1) / plan.tensor
    passes = held_share(plan) * plan.micro_batches
    hidden, logits = (share * passes * plan.micro_batch_tokens * width for width in (shape.hidden, shape.vocabulary))
    stream, product = plan.precision.stream_bytes, plan.precision.product_bytes
    norms = sum(one.vector for one in held) * FORMAT_BYTES[plan.precision.gradients]
    norms *= plan.micro_batches if plan.zero >= 2 else 1  # FSDP adds them as it reduces
    return TensorCollectives(
        allgathers=(gathered + products_gathered + heads) * passes,
        reduce_scatters=(scattered + products_scattered) * passes,
        allgather_bytes=hidden * (gathered * stream + products_gathered * product) + logits * heads * product,
        reduce_scatter_bytes=hidden * (scattered * stream + products_scattered * product),
        allreduce_bytes=2 * share * norms,
    )
