"""StepInBackward: parameters have the bits of `clip_grad_norm_` and torch's own step, or nothing has changed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fireflyer.base.errors import UsageError
from fireflyer.training.fsdp import StepInBackward

Make = Callable[[Any], torch.optim.Optimizer]

MAKERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "maximize": lambda p: torch.optim.AdamW(p, lr=0.01, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
}


class Pair:
    """The same model twice: stepped by torch after clipping, and in the backward pass."""

    def __init__(self, make: Make, dtype: torch.dtype = torch.float32, norm_type: float = 2.0) -> None:
        torch.manual_seed(1)
        self.norm_type = norm_type
        self.theirs = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)
        self.ours = copy.deepcopy(self.theirs)
        self.torch = make(self.theirs.parameters())
        self.optimizer = StepInBackward(make(self.ours.parameters()), norm_type=norm_type)
        self.optimizers = (self.torch, self.optimizer)

    def backward(self, step: int, scale: float = 1.0) -> None:
        inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        for model in (self.theirs, self.ours):
            model(inputs.to(next(model.parameters()).dtype)).square().sum().mul(scale).backward()

    def finish(self, max_norm: float) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.theirs.parameters(), max_norm, self.norm_type)
        self.torch.step()
        self.torch.zero_grad()
        self.optimizer.max_norm = max_norm
        self.optimizer.step()
        self.optimizer.zero_grad()
        assert self.optimizer.outcome is not None
        assert self.optimizer.outcome.norm == norm.item()

    def check(self) -> None:
        assert same(list(self.ours.parameters()), list(self.theirs.parameters()))
        assert same(states(self.optimizer, self.ours), states(self.torch, self.theirs))


def states(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[torch.Tensor]:
    found = [optimizer.state.get(p, {}) for p in model.parameters()]
    return [state[name] for state in found for name in sorted(state) if state[name] is not None]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def copies(pair: Pair) -> list[torch.Tensor]:
    return [t.detach().clone() for t in [*pair.ours.parameters(), *states(pair.optimizer, pair.ours)]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", MAKERS)
def test_each_optimizer_has_the_bits_of_torchs_own(name: str, dtype: torch.dtype) -> None:
    pair = Pair(MAKERS[name], dtype)
    for step, max_norm in enumerate([1e6, 1e-2, 1e6, 1e-2, 1e-2, 1e6]):
        pair.backward(step)
        pair.finish(max_norm)
        pair.check()


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_any_norm_of_torch_may_clip(norm_type: float) -> None:
    pair = Pair(MAKERS["adamw"], norm_type=norm_type)
    for step in range(3):
        pair.backward(step)
        pair.finish(0.5)
        pair.check()


def reload(pair: Pair, _: int) -> None:
    for optimizer in pair.optimizers:
        saved = copy.deepcopy(optimizer.state_dict())
        for state in saved["state"].values():
            for value in state.values():
                value.mul_(0.5)
        optimizer.load_state_dict(saved)


def overflow(pair: Pair, step: int) -> None:
    before = copies(pair)
    pair.backward(step, scale=math.inf)
    pair.optimizer.step()
    assert pair.optimizer.outcome is not None
    assert not pair.optimizer.outcome.committed
    assert same(copies(pair), before)
    zero(pair, 0)


def zero(pair: Pair, step: int) -> None:
    for optimizer in pair.optimizers:
        optimizer.zero_grad(set_to_none=step % 2 == 0)


def edit(pair: Pair, _: int) -> None:
    with torch.no_grad():
        for model in (pair.ours, pair.theirs):
            next(model.parameters()).mul_(1.25)


def halve(setting: str) -> Callable[[Pair, int], None]:
    def change(pair: Pair, _: int) -> None:
        for optimizer in pair.optimizers:
            for group in optimizer.param_groups:
                group[setting] *= 0.5

    return change


EVENTS: dict[str, Callable[[Pair, int], None]] = {
    "backward": lambda pair, step: pair.backward(step),
    "clip": lambda pair, _: pair.finish(1e-2),
    "commit": lambda pair, _: pair.finish(1e6),
    "lr": halve("lr"),
    "decay": halve("weight_decay"),
    "reload": reload,
    "zero": zero,
    "overflow": overflow,
    "edit": edit,
}


@given(name=st.sampled_from(["adamw", "momentum", "amsgrad"]), events=st.lists(st.sampled_from([*EVENTS]), max_size=14))
@settings(deadline=None, max_examples=40)
def test_whatever_happens_between_backward_and_step_the_bits_are_those_of_torch(name: str, events: list[str]) -> None:
    """Accumulation, settings, a loaded state, parameters edited by hand: all of it counts as it is at `step`."""
    pair = Pair(MAKERS[name])
    for step, event in enumerate(events):
        EVENTS[event](pair, step)
        pair.check()


def test_nothing_is_visible_before_the_step() -> None:
    pair = Pair(MAKERS["adamw"])
    pair.backward(0)
    pair.finish(1e6)
    before = copies(pair)
    pair.backward(1)
    assert same(copies(pair), before)
    assert all(parameter.grad is None for parameter in pair.ours.parameters()), "the reduction's memory is kept"
    pair.optimizer.step()
    assert not same(copies(pair), before)


def test_a_norm_that_is_not_finite_leaves_everything_as_it_was() -> None:
    pair = Pair(MAKERS["adamw"])
    pair.backward(0)
    pair.finish(1e6)
    before = copies(pair)
    for scale in (math.inf, math.nan):
        pair.backward(1, scale)
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        pair.torch.zero_grad()
        assert pair.optimizer.outcome is not None
        assert not pair.optimizer.outcome.committed
        assert math.isnan(pair.optimizer.outcome.coefficient)
        assert same(copies(pair), before)
    pair.backward(2)
    pair.finish(1e-2)
    pair.check()
    assert pair.optimizer.cost().dropped == 2


def test_a_step_is_computed_again_only_where_something_changed() -> None:
    pair = Pair(MAKERS["adamw"])
    parameters = len(list(pair.ours.parameters()))

    def redone(max_norm: float = 1e6) -> int:
        pair.finish(max_norm)
        assert pair.optimizer.outcome is not None
        return pair.optimizer.outcome.redone

    pair.backward(0)
    assert redone() == 0
    pair.backward(1)
    assert redone(1e-2) == parameters
    pair.backward(2)
    for optimizer in pair.optimizers:
        optimizer.param_groups[0]["lr"] *= 0.1
    assert redone() == parameters
    pair.check()
    cost = pair.optimizer.cost()
    assert (cost.steps, cost.redone) == (3 * parameters, 2 * parameters)
    assert cost.redone_share == pytest.approx(2 / 3)
    elements = sum(parameter.numel() for parameter in pair.ours.parameters())
    assert cost.gradient_bytes == 4 * elements
    assert cost.shadow_bytes == 12 * elements + 4 * parameters, "parameter, two moments, and a counter for each"
    assert "12.5 bytes of shadows and 4.0 of gradient" in str(cost)
    assert "66.7% of 12 steps done twice" in str(cost)


def test_micro_batches_before_the_last_are_only_added() -> None:
    pair = Pair(MAKERS["adamw"])
    steps = 0
    run = pair.optimizer._slots[next(iter(pair.ours.parameters()))][1]
    with pair.optimizer.accumulating():
        pair.backward(0)
        pair.backward(1)
        steps += run.has_run
    assert steps == 0
    pair.backward(2)
    assert run.has_run
    pair.finish(1e-2)
    pair.check()


def test_a_tied_parameter_steps_with_all_its_contributions() -> None:
    def tied() -> nn.Embedding:
        torch.manual_seed(0)
        return nn.Embedding(5, 3)

    def loss(embedding: nn.Embedding) -> torch.Tensor:
        hidden: torch.Tensor = embedding(torch.arange(5))
        return (hidden @ embedding.weight.T).square().sum()

    theirs, ours = tied(), tied()
    stock = torch.optim.AdamW(theirs.parameters())
    optimizer = StepInBackward(torch.optim.AdamW(ours.parameters()), max_norm=0.1)
    for _ in range(3):
        for model in (theirs, ours):
            loss(model).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
        stock.step()
        stock.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(ours.weight, theirs.weight)


def test_parameters_of_several_types_are_clipped_as_torch_groups_them() -> None:
    def make() -> nn.ModuleList:
        torch.manual_seed(0)
        types = [torch.float32, torch.bfloat16, torch.float32]
        return nn.ModuleList([nn.Linear(3, 3).to(dtype) for dtype in types])

    theirs, ours = make(), make()
    stock = torch.optim.AdamW(theirs.parameters())
    optimizer = StepInBackward(torch.optim.AdamW(ours.parameters()), max_norm=0.1)
    for model in (theirs, ours):
        hidden = torch.ones(2, 3)
        for layer in model:
            hidden = layer(hidden.to(cast("nn.Linear", layer).weight.dtype)).float()
        hidden.square().sum().backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
    stock.step()
    optimizer.step()
    assert same(list(ours.parameters()), list(theirs.parameters()))


def test_unused_and_frozen_parameters_stay_as_they_are() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model[0].bias.requires_grad_(False)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = StepInBackward(torch.optim.AdamW(model.parameters(), lr=0.1))
    optimizer.step()
    assert optimizer.outcome is not None
    assert optimizer.outcome.parameters == 0
    model[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert changed == [True, False, False, False]


def test_a_parameter_that_is_unfrozen_later_is_trained_from_then_on() -> None:
    """As in gradual unfreezing: first the head alone."""
    torch.manual_seed(1)
    theirs = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    theirs[0].requires_grad_(False)
    ours = copy.deepcopy(theirs)
    torchs = MAKERS["adamw"](theirs.parameters())
    optimizer = StepInBackward(MAKERS["adamw"](ours.parameters()), max_norm=0.5)
    for step in range(6):
        if step == 2:
            theirs[0].requires_grad_(True)
            ours[0].requires_grad_(True)
        inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        for model in (theirs, ours):
            model(inputs).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        for each in (torchs, optimizer):
            each.step()
            each.zero_grad()
        assert same(list(ours.parameters()), list(theirs.parameters())), step
        assert same(states(optimizer, ours), states(torchs, theirs)), step


def test_state_dicts_of_torchs_optimizer_and_this_one_fit_each_other() -> None:
    pair = Pair(MAKERS["adamw"])
    pair.backward(0)
    pair.finish(1e6)
    saved = copy.deepcopy(pair.torch.state_dict())
    mine = copy.deepcopy(pair.optimizer.state_dict())
    assert mine["param_groups"] == saved["param_groups"]
    pair.torch.load_state_dict(mine)
    pair.optimizer.load_state_dict(saved)
    pair.backward(1)
    pair.finish(1e-2)
    pair.check()


def test_a_scheduler_and_more_parameters_work_as_with_torch() -> None:
    pair = Pair(MAKERS["adamw"])
    extra = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    pair.torch.add_param_group({"params": [extra[0]], "lr": 0.5})
    pair.optimizer.add_param_group({"params": [extra[1]], "lr": 0.5})
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, gamma=0.5) for each in pair.optimizers]
    for step in range(3):
        pair.backward(step)
        for one in extra:
            one.square().sum().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_([*pair.theirs.parameters(), extra[0]], 0.3)
        pair.torch.step()
        pair.optimizer.max_norm = 0.3
        pair.optimizer.step()
        for optimizer, scheduler in zip(pair.optimizers, schedulers, strict=True):
            optimizer.zero_grad()
            scheduler.step()
        pair.check()
        assert torch.equal(extra[0], extra[1])


def test_the_kept_gradient_is_the_clipped_one_after_a_step() -> None:
    pair = Pair(MAKERS["sgd"])
    pair.backward(0)
    torch.nn.utils.clip_grad_norm_(pair.theirs.parameters(), 0.1)
    pair.optimizer.max_norm = 0.1
    pair.optimizer.step()
    for mine, theirs in zip(pair.ours.parameters(), pair.theirs.parameters(), strict=True):
        gradient = pair.optimizer.gradient_of(mine)
        assert gradient is not None
        assert theirs.grad is not None
        assert torch.equal(gradient, theirs.grad)
    with pytest.raises(UsageError, match="not a parameter"):
        pair.optimizer.gradient_of(torch.ones(1))


def test_after_close_gradients_stay_where_torch_puts_them() -> None:
    pair = Pair(MAKERS["sgd"])
    pair.optimizer.close()
    pair.optimizer.close()
    pair.backward(0)
    assert all(parameter.grad is not None for parameter in pair.ours.parameters())


def test_what_cannot_be_stepped_is_refused() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    with pytest.raises(UsageError, match="RMSprop in backward; use torch's Adam, AdamW, SGD"):
        StepInBackward(torch.optim.RMSprop(parameters))
    with pytest.raises(UsageError, match="group 0 has differentiable=True"):
        StepInBackward(torch.optim.AdamW(parameters, differentiable=True))
    with pytest.raises(UsageError, match="max_norm 0 must be positive"):
        StepInBackward(torch.optim.AdamW(parameters), max_norm=0)
    embedding = nn.Embedding(4, 2, sparse=True)
    StepInBackward(torch.optim.SGD(embedding.parameters()))
    with pytest.raises(UsageError, match="sparse ones are not supported"):
        embedding(torch.arange(2)).sum().backward()
