"""Batches whose loss or gradient is not finite on one rank, in a run that is otherwise real."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch

from fireflyer.recipes.trainer import run as trainer
from fireflyer.recipes.trainer.models import LossModel

__all__ = ["BadBatch", "spoil"]


class BadBatch(NamedTuple):
    """Of the batch that ends at `position` of the stream, rank `rank` computes a loss or a gradient that is NaN."""

    position: int
    rank: int = 0
    what: Literal["loss", "gradient"] = "loss"


def spoil(batches: Sequence[BadBatch], put: Callable[[Any, str, Any], None] = setattr) -> None:
    """For all runs of this process. `put` replaces an attribute, as `MonkeyPatch.setattr` does."""
    take_step, forward = trainer._take_step, LossModel.forward
    now: list[BadBatch] = []

    def take(run: Any, loop: Any, step: int) -> None:
        ends = run.data.position + run.recipe.plan.batch_sequences
        now[:] = [one for one in batches if (one.position, one.rank) == (ends, run.env.rank)]
        take_step(run, loop, step)

    def spoiled(self: LossModel, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = forward(self, tokens, targets)
        if self.training and now:
            if now[0].what == "loss":
                return loss * math.nan
            loss.register_hook(lambda gradient: gradient * math.nan)  # type: ignore[no-untyped-call]
        return loss

    put(trainer, "_take_step", take)
    put(LossModel, "forward", spoiled)
