"""As `trainer`, in float64, and with a gradient that is not finite.

`python -m tests.support.torch_ranks.trainer_plans JSON`"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import torch
from tests.support.torch_ranks.trainer import main

from fireflyer.recipes.trainer import arrangements, building, run

trainer: Any = run
making: Any = building


def add_in_float64() -> None:
    """FSDP adds gradients in float64 where the plan says FP32."""
    arrangements._DTYPES["fp32"] = torch.float64


def widen() -> None:
    """Models, and sums of gradients, are in float64, so that what plans differ in is more than rounding."""
    build = making.build_model
    add_in_float64()

    def wide(*args: Any, **kwargs: Any) -> Any:
        built = build(*args, **kwargs)
        built.loss.double()
        return built

    making.build_model = wide


def poison(rank: int, at: int) -> None:
    """The gradients of one parameter that `rank` computes in step `at` are not finite."""
    take_step = trainer._take_step

    def take(one: Any, loop: Any, step: int) -> None:
        if (one.env.rank, step) != (rank, at):
            take_step(one, loop, step)
            return
        parameter = next(one.arrangement.layers.parameters())  # checkpoints may hold rows of it alone
        handle = parameter.register_hook(lambda gradient: gradient * math.nan)
        take_step(one, loop, step)
        handle.remove()

    trainer._take_step = take


if __name__ == "__main__":
    widen()
    poisoned = json.loads(sys.argv[1]).get("poisoned")
    if poisoned:
        poison(*poisoned)
    sys.exit(main())
