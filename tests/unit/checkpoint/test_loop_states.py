"""`TrainingLoop` with objects beside the model: what they keep comes back as it was."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer, lr_scheduler
from torch.optim.lr_scheduler import ConstantLR, ExponentialLR, LRScheduler
from torch.optim.swa_utils import SWALR

from fireflyer.base.errors import UsageError
from fireflyer.base.launch import RankEnvironment
from fireflyer.checkpoint import TrainingLoop

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda it: lr_scheduler.LambdaLR(it, lambda epoch: 0.95**epoch),
    "MultiplicativeLR": lambda it: lr_scheduler.MultiplicativeLR(it, lambda _: 0.9),
    "StepLR": lambda it: lr_scheduler.StepLR(it, 2, 0.5),
    "MultiStepLR": lambda it: lr_scheduler.MultiStepLR(it, [2, 5, 5, 7], 0.5),
    "ConstantLR": lambda it: ConstantLR(it, total_iters=6),
    "LinearLR": lambda it: lr_scheduler.LinearLR(it, total_iters=7),
    "ExponentialLR": lambda it: ExponentialLR(it, 0.9),
    "SequentialLR": lambda it: lr_scheduler.SequentialLR(it, [ConstantLR(it), ExponentialLR(it, 0.9)], [5]),
    "PolynomialLR": lambda it: lr_scheduler.PolynomialLR(it, 8, 2.0),
    "CosineAnnealingLR": lambda it: lr_scheduler.CosineAnnealingLR(it, 6),
    "ChainedScheduler": lambda it: lr_scheduler.ChainedScheduler(
        [ConstantLR(it, total_iters=6), ExponentialLR(it, 0.9)]
    ),
    "ReduceLROnPlateau": lambda it: lr_scheduler.ReduceLROnPlateau(it, patience=1),
    "CyclicLR": lambda it: lr_scheduler.CyclicLR(it, 0.01, 0.1, step_size_up=3),
    "OneCycleLR": lambda it: lr_scheduler.OneCycleLR(it, 0.2, total_steps=20),
    "CosineAnnealingWarmRestarts": lambda it: lr_scheduler.CosineAnnealingWarmRestarts(it, 3),
    "SWALR": lambda it: SWALR(it, 0.05, anneal_epochs=7),
}


def test_each_scheduler_of_torch_is_here() -> None:
    public = {name: getattr(lr_scheduler, name) for name in lr_scheduler.__all__}
    assert {name for name, one in public.items() if isinstance(one, type) and issubclass(one, LRScheduler)} - {
        "LRScheduler"
    } == {*SCHEDULERS} - {"SWALR"}


def train(directory: Path, last: int) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """The learning rates of the steps that are taken here, and the schedulers. Each has an optimizer of its own."""
    optimizers = {name: SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9) for name in SCHEDULERS}
    with warnings.catch_warnings():  # of torch about itself
        warnings.simplefilter("ignore", UserWarning)
        schedulers = {name: make(optimizers[name]) for name, make in SCHEDULERS.items()}
    stateful: dict[str, Any] = {**schedulers, **{f"optimizer of {name}": one for name, one in optimizers.items()}}
    rates: dict[str, list[float]] = {name: [] for name in SCHEDULERS}
    loop = TrainingLoop(
        directory,
        torch.nn.Linear(1, 1),
        stateful=stateful,
        values={"best": math.inf, "by_epoch": {0: math.nan}},
        period_steps=2,
        env=RankEnvironment(),
    )
    with loop, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert loop.values["best"] == math.inf
        assert math.isnan(loop.values["by_epoch"][0])
        for _ in loop.steps(last):
            for name, one in schedulers.items():
                optimizers[name].step()
                one.step(1.0) if name == "ReduceLROnPlateau" else one.step()
                rates[name].append(optimizers[name].param_groups[0]["lr"])
            loop.manager.wait()  # steps are faster than saves here, and none is to be skipped
    return rates, schedulers


def test_a_run_that_died_goes_on_with_the_learning_rates_of_one_that_did_not(tmp_path: Path) -> None:
    expected, undisturbed = train(tmp_path / "one", 10)
    first, _ = train(tmp_path / "two", 4)
    second, schedulers = train(tmp_path / "two", 10)
    assert {name: first[name] + rates for name, rates in second.items()} == expected
    assert all(len({*rates}) > 1 for rates in expected.values()), "there is something to go on with"
    assert schedulers["MultiStepLR"].milestones == Counter([2, 5, 5, 7])
    assert type(schedulers["MultiStepLR"].milestones) is Counter
    ours, theirs = schedulers["ReduceLROnPlateau"].state_dict(), undisturbed["ReduceLROnPlateau"].state_dict()
    assert ours == theirs
    assert ours["mode_worse"] == math.inf


class Odd:
    def state_dict(self) -> dict[str, Any]:
        return {"seen": [1, {2, 3}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def test_what_cannot_be_stored_is_named_after_the_first_step(tmp_path: Path) -> None:
    """And not when the first checkpoint is due, minutes later."""
    loop = TrainingLoop(tmp_path, torch.nn.Linear(1, 1), stateful={"sampler": Odd()}, env=RankEnvironment())
    with loop:
        steps = loop.steps(100)
        assert next(steps) == 1
        with pytest.raises(UsageError, match=r"values\['stateful'\]\['sampler'\]\['seen'\]\[1\] is set"):
            next(steps)
