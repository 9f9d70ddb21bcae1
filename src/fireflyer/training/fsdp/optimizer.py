"""An optimizer that steps each parameter in the backward pass, with gradient clipping and accumulation.

>>> optimizer = StepInBackward(torch.optim.AdamW(model.parameters(), lr=3e-4), max_norm=1.0)
>>> loss(model(batch)).backward()  # each parameter steps as soon as its reduced gradient is there
>>> optimizer.step()               # commits, or steps again with the clipped gradient
>>> optimizer.zero_grad()

The norm of all gradients is known last, so a step in the backward pass is optimistic: it assumes that nothing will be
clipped, and writes new parameter and state into shadow buffers. `step()` computes the norm and then either commits
(coefficient 1), or scales the kept gradients and steps again from the old state, or, if the norm is infinite or NaN,
drops everything. The result has the bits of `clip_grad_norm_` followed by torch's own step.

On FSDP2 torch calls the hook of a sharded parameter after each reduce-scatter; a parameter that is used twice (tied, or
in a module that runs twice) is stepped after each contribution, from the old state, so the last one counts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch.distributed.tensor import DTensor

from fireflyer.base.errors import UsageError
from fireflyer.training.fsdp.kernels import State, rule_of
from fireflyer.training.fsdp.shadows import Slot, local

__all__ = ["StepCost", "StepInBackward", "StepOutcome"]

_EPSILON: Final = 1e-6
"""Added to the norm by `torch.nn.utils.clip_grad_norm_`."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Result of a call of `step`."""

    norm: float
    """Norm of all gradients before clipping, over all ranks; 0.0 without gradients."""
    coefficient: float
    """Factor by which gradients were multiplied, at most 1.0; NaN where nothing was committed."""
    committed: bool
    """False if the norm is infinite or NaN: then parameters, moments and step counters are as before."""
    parameters: int
    """Number of parameters with a gradient."""
    redone: int
    """Steps of the backward pass that were computed again."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Costs of stepping in the backward pass on this rank."""

    elements: int
    """Number of elements in the shards of the parameters."""
    shadow_bytes: int
    """New parameters and new state."""
    gradient_bytes: int
    """Kept gradients; without stepping in backward `grad` has as much."""
    steps: int
    """Steps of single parameters that were committed."""
    redone: int
    """Steps of single parameters that were computed again after the norm was known."""
    dropped: int
    """Calls of `step` that committed nothing."""

    @property
    def shadow_bytes_per_element(self) -> float:
        """12 with AdamW in float32, 8 with SGD and momentum."""
        return self.shadow_bytes / self.elements if self.elements else 0.0

    @property
    def redone_share(self) -> float:
        """Share of the committed steps that were computed twice."""
        return self.redone / self.steps if self.steps else 0.0

    def __str__(self) -> str:
        gradient = self.gradient_bytes / self.elements if self.elements else 0.0
        return (
            f"step in backward: {self.shadow_bytes_per_element:.1f} bytes of shadows and {gradient:.1f} of gradient "
            f"for each of {self.elements:,} sharded elements; {self.redone_share:.1%} of {self.steps:,} steps done "
            f"twice; {self.dropped} dropped"
        )


class StepInBackward(torch.optim.Optimizer):
    """Takes the place of `optimizer` (torch's AdamW, Adam or SGD), whose parameter groups and state it takes over.

    It has the `state_dict` of that optimizer, so checkpoints of `torch.distributed.checkpoint` fit either. Settings are
    read when a step is computed and compared when it is committed: a learning rate that a scheduler changes between
    `backward()` and `step()` leads to another computation, never to a step with the old one.

    Gradients are taken out of `grad` into memory of this class (`gradient_of`), so buffers of the reduction can be used
    again at once. They accumulate until `zero_grad`. A `grad` that is set by hand counts as a contribution.

    `max_norm` is that of `clip_grad_norm_`; `math.inf` never clips, and still drops steps with a norm that is infinite
    or NaN. Norms are combined in the order of the parameter groups, so pass `model.parameters()` where the bits must be
    those of `clip_grad_norm_(model.parameters())`. `is_last` says whether a contribution is the last of this step, if
    that is known: those before are only added. It changes no result.

    `step()` returns the closure's loss, as torch's; what it did is in `outcome`. `state_dict()` holds references to
    tensors, as torch's does; here a later step exchanges them, so copy what must last.

    Raises `UsageError` for other optimizers, and for `capturable` and `differentiable`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        max_norm: float = math.inf,
        norm_type: float = 2.0,
        is_last: Callable[[], bool] | None = None,
    ) -> None:
        if not max_norm > 0:
            raise UsageError(f"max_norm {max_norm} must be positive; math.inf never clips")
        self._rule = rule_of(optimizer)
        self.state_of = type(optimizer).__name__
        """Class whose state this has: checkpoints go from one to the other."""
        self._slots: dict[torch.Tensor, tuple[int, Slot]] = {}
        self._handles: list[Any] = []
        self._is_last = is_last
        self._accumulating = False
        self._steps = self._redone = self._dropped = 0
        self.max_norm = float(max_norm)
        self.norm_type = float(norm_type)
        self.outcome: StepOutcome | None = None
        """Of the last call of `step`; None before."""
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.state = optimizer.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own, as torch's does."""
        super().add_param_group(param_group)
        number = len(self.param_groups) - 1
        for place, parameter in enumerate(self.param_groups[number]["params"]):
            if parameter.requires_grad:
                self._watch(number, place, parameter)

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Backward passes inside add gradients without stepping: more micro-batches follow. It saves time only."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Commits the steps of the backward pass, or computes them again, or drops them: see `outcome`.

        Collective over the ranks that share the parameters. Raises what its collectives raise; nothing is committed
        then, because the norm comes first.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._watch_unfrozen()
        for _, slot in self._slots.values():
            self._take(slot)
        slots = [found for found in self._in_order() if found[1].gradient is not None]
        if not slots:
            self.outcome = StepOutcome(0.0, 1.0, True, 0, 0)
            return loss
        total = self._total_norm([slot for _, slot in slots])
        norm = float(_whole(total))
        if not math.isfinite(norm):
            for _, slot in slots:
                slot.forget_step()
            self._dropped += 1
            self.outcome = StepOutcome(norm, math.nan, False, len(slots), 0)
            return loss
        coefficient = _whole(_clip_coefficient(self.max_norm, total))
        redone = sum(self._finish(number, slot, coefficient) for number, slot in slots)
        self._steps += len(slots)
        self._redone += redone
        self.outcome = StepOutcome(norm, float(coefficient), True, len(slots), redone)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients as torch's does, those that are kept here, too."""
        super().zero_grad(set_to_none)
        with torch.no_grad():
            for _, slot in self._slots.values():
                slot.clear(keep_zeros=not set_to_none)

    def gradient_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The gradient that is kept of a parameter, sharded as it is: after `step` the clipped one. None without any.
        Do not change it. Raises `UsageError` for a parameter that is not optimized here."""
        found = self._slots.get(parameter)
        if found is None:
            raise UsageError(f"the tensor of shape {tuple(parameter.shape)} is not a parameter of this optimizer")
        return found[1].gradient

    def cost(self) -> StepCost:
        """Memory now, and steps since construction."""
        slots = [slot for _, slot in self._slots.values()]
        with torch.no_grad():
            return StepCost(
                elements=sum(local(slot.parameter).numel() for slot in slots),
                shadow_bytes=sum(slot.shadow_bytes for slot in slots),
                gradient_bytes=sum(slot.gradient_bytes for slot in slots),
                steps=self._steps,
                redone=self._redone,
                dropped=self._dropped,
            )

    def close(self) -> None:
        """Removes the hooks: gradients stay in `grad` again. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # --- inside ---

    def _watch(self, number: int, place: int, parameter: Any) -> None:
        name = f"parameter {place} of group {number}, shape {tuple(parameter.shape)}"
        self._slots[parameter] = (number, Slot(name, parameter, self._rule))
        self._handles.append(parameter.register_post_accumulate_grad_hook(self._on_gradient))

    def _watch_unfrozen(self) -> None:
        """Parameters that were frozen until now, and have a gradient: they step in the next backward pass on."""
        for number, group in enumerate(self.param_groups):
            for place, parameter in enumerate(group["params"]):
                if parameter.grad is not None and parameter.requires_grad and parameter not in self._slots:
                    self._watch(number, place, parameter)

    def _in_order(self) -> list[tuple[int, Slot]]:
        """Of the parameter groups, in which `clip_grad_norm_` adds norms."""
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        return [self._slots[parameter] for parameter in parameters if parameter in self._slots]

    @torch.no_grad()
    def _on_gradient(self, parameter: torch.Tensor) -> None:
        number, slot = self._slots[parameter]
        self._take(slot)
        if self._accumulating or (self._is_last is not None and not self._is_last()):
            return
        if self._norms_are_single([slot]):
            slot.norm = self._norm_of(slot)
        slot.run(self._old(slot), self.param_groups[number])

    def _take(self, slot: Slot) -> None:
        gradient = slot.parameter.grad
        if gradient is not None:
            slot.parameter.grad = None
            slot.add(gradient)

    def _finish(self, number: int, slot: Slot, coefficient: torch.Tensor) -> bool:
        """Commits the step of one parameter. Returns whether it had to be computed again."""
        old, settings = self._old(slot), self.param_groups[number]
        had_run = slot.has_run
        if float(coefficient) != 1.0:
            slot.scale(coefficient)
        again = not slot.is_current(old, settings)
        if again:
            slot.run(old, settings)
        new = slot.commit(old)
        if new:
            self.state[slot.parameter] = new
        return again and had_run

    def _old(self, slot: Slot) -> State:
        return cast("State", self.state.get(slot.parameter, {}))  # not by [], which would make an entry

    def _norm_of(self, slot: Slot) -> torch.Tensor:
        return cast("torch.Tensor", torch.linalg.vector_norm(slot.gradient, self.norm_type))

    def _norms_are_single(self, slots: list[Slot]) -> bool:
        """Whether `clip_grad_norm_` computes each norm by itself and in the order of the parameters: on the CPU, if all
        have one dtype. Otherwise it groups them, and the sum has another order."""
        gradients = [cast("torch.Tensor", slot.gradient) for slot in slots]
        return len({each.dtype for each in gradients}) == 1 and all(each.device.type == "cpu" for each in gradients)

    def _total_norm(self, slots: list[Slot]) -> torch.Tensor:
        if not self._norms_are_single(slots):
            gradients = [cast("torch.Tensor", slot.gradient) for slot in slots]
            return torch.nn.utils.get_total_norm(gradients, self.norm_type)
        norms = [self._norm_of(slot) if slot.norm is None else slot.norm for slot in slots]
        return cast("torch.Tensor", torch.linalg.vector_norm(torch.stack(norms), self.norm_type))


def _clip_coefficient(max_norm: float, total_norm: torch.Tensor) -> torch.Tensor:
    """The expression of `torch.nn.utils.clip_grads_with_norm_`, in the dtype of the norm."""
    return torch.clamp(max_norm / (total_norm + _EPSILON), max=1.0)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
