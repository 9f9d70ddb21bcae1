"""The inputs of a step: a batch cut into micro-batches, and layers cut into the stages of a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from fireflyer.base.errors import UsageError
from fireflyer.codesign.schedule.actions import Placement
from fireflyer.training.pipeline.phases import Tensors

__all__ = ["MicroBatch", "split_batch", "stages_of_layers", "tensors_of"]

MicroBatch = torch.Tensor | Sequence[torch.Tensor]
"""What the first stage gets, or the loss beside the outputs."""


def split_batch(batch: torch.Tensor, micro_batches: int) -> list[torch.Tensor]:
    """Equal parts along the first dimension, as views. Raises `UsageError` where it does not divide."""
    if micro_batches < 1:
        raise UsageError(f"{micro_batches} micro-batches: give at least 1")
    samples = batch.shape[0] if batch.ndim else 0
    if samples == 0 or samples % micro_batches:
        raise UsageError(
            f"a batch of {samples} samples does not divide into {micro_batches} micro-batches; use a number that "
            "divides it, or give the step a list of unequal micro-batches with their shares="
        )
    return list(batch.chunk(micro_batches))


def stages_of_layers(
    placement: Placement, rank: int, sizes: Sequence[int], build: Callable[[range], nn.Module]
) -> dict[tuple[int, int], nn.Module]:
    """The modules of a rank, as `Pipeline` takes them. `sizes[s]` consecutive layers form stage s, as
    `codesign.schedule.balance` gives them; `build(range(first, end))` makes those layers. Only those of this rank are
    made. Raises `UsageError` where `sizes` does not fit the placement."""
    if len(sizes) != placement.stages or min(sizes, default=0) < 1:
        raise UsageError(f"sizes {list(sizes)} do not fit {placement.stages} stages of at least one layer")
    begins = [sum(sizes[:stage]) for stage in range(len(sizes))]
    return {
        (direction, stage): build(range(begins[stage], begins[stage] + sizes[stage]))
        for direction, stage in placement.stages_of(rank)
    }


def tensors_of(given: MicroBatch, name: str) -> Tensors:
    """Raises `UsageError` where it is neither a tensor nor a sequence of tensors."""
    if isinstance(given, torch.Tensor):
        return (given,)
    if not isinstance(given, tuple | list) or not all(isinstance(one, torch.Tensor) for one in given):
        raise UsageError(f"a micro-batch of {name} is a {type(given).__name__}; give a tensor or a tuple of tensors")
    return tuple(given)
