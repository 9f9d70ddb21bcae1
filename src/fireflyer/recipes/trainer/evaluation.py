"""Held-out losses: of each source in the order of the recipe, the same at any number of data-parallel ranks (with
experts on several of them, but for rounding).

Batches do not depend on the number of ranks: batch k goes to rank k mod ranks, and sums are added in the order of
batches. Ranks that have no batch in a round compute one that another has, and do not count it, because a sharded model
needs all of them in each forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from fireflyer.base.errors import DataCorruption, UsageError
from fireflyer.recipes.trainer.core.figures import SourceLoss
from fireflyer.recipes.trainer.sources import HeldOut

__all__ = ["HELD_OUT", "evaluate", "note_held_out"]

HELD_OUT: Final = "held_out"
"""Name among the values of a checkpoint: digest of each held-out source, by its name."""


def note_held_out(values: dict[str, Any], sources: Sequence[HeldOut]) -> None:
    """Puts the digests of `sources` among the `values` of checkpoints, which may have those of a run that goes on.
    Sources may be added or left out. Raises `UsageError` where one has other records, `DataCorruption` for what are no
    digests."""
    saved = values.get(HELD_OUT, {})
    if not isinstance(saved, dict) or not all(isinstance(one, str) for one in saved.values()):
        raise DataCorruption(f"{HELD_OUT} of the checkpoint is no table of digests; go on from an older checkpoint")
    for one in sources:
        if saved.get(one.name, one.identity) != one.identity:
            raise UsageError(
                f"held-out source {one.name!r} has other records than when the run was saved; give it the same data, "
                "or give the changed data another name"
            )
    values[HELD_OUT] = {one.name: one.identity for one in sources}


def evaluate(
    sources: Sequence[HeldOut],
    loss_of: Callable[[Tensor, Tensor], float],
    *,
    batch: int,
    group: dist.ProcessGroup,
) -> tuple[SourceLoss, ...]:
    """`loss_of(inputs, targets)` sums the loss over tokens. `group`: the data-parallel ranks. Collective over it."""
    return tuple(_evaluate(source, loss_of, batch, group) for source in sources)


def _evaluate(
    source: HeldOut, loss_of: Callable[[Tensor, Tensor], float], batch: int, group: dist.ProcessGroup
) -> SourceLoss:
    batches = [sequences for _, sequences in source.batches(batch)]
    rank, ranks = group.rank(), group.size()
    sums = torch.zeros(len(batches), dtype=torch.float64)
    for first in range(0, len(batches), ranks):
        number = min(first + rank, len(batches) - 1)
        summed = loss_of(*source.read(batches[number]))
        if number == first + rank:
            sums[number] = summed
    dist.all_reduce(sums, group=group)  # one addend of each is not 0: exact in any order
    tokens = source.sequences * source.windows.length
    loss = math.fsum(sums.tolist()) / tokens if bool(sums.isfinite().all()) else None
    return SourceLoss(name=source.name, loss=loss, tokens=tokens)
