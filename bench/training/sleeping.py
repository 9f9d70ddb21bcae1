"""A stage whose passes sleep: forward, backward for the input, and backward for the weights take `SLEEP_S` each."""

from __future__ import annotations

import time
from typing import Any, Final

import torch
from torch import Tensor, nn

from fireflyer.codesign.schedule import Costs

__all__ = ["SLEEP_S", "SleepingStage", "sleeping_costs"]

SLEEP_S: Final = 0.02


class _Sleep(torch.autograd.Function):
    """The tensor itself; its backward pass sleeps."""

    @staticmethod
    def forward(_: Any, given: Tensor) -> Tensor:
        return given.clone()

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Tensor:
        time.sleep(SLEEP_S)
        gradient: Tensor = gradients[0]
        return gradient


class SleepingStage(nn.Module):
    """Adds a weight to its input, of any shape."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, given: Tensor) -> Tensor:
        time.sleep(SLEEP_S)
        if not given.requires_grad and torch.is_grad_enabled():  # of the first stage: its backward pass is as long
            given = given.clone().requires_grad_()
        summed: Tensor = _sleep(given) + _sleep(self.weight)
        return summed


def _sleep(given: Tensor) -> Tensor:
    slept: Tensor = _Sleep.apply(given)  # type: ignore[no-untyped-call]
    return slept


def sleeping_costs(stages: int) -> Costs:
    """Costs of passes that sleep no longer than they ask for. The first stage has no input that needs a gradient, so W
    is all of its backward pass."""
    later = (SLEEP_S,) * (stages - 1)
    return Costs(
        forward_s=(SLEEP_S,) * stages,
        backward_s=(2 * SLEEP_S,) * stages,
        input_s=(0.0, *later),
        weights_s=(2 * SLEEP_S, *later),
    )
