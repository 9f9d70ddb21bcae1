"""What an optimizer in backward keeps of one parameter: its gradient, and the result of a step that may be undone.

A *slot* is in one of three states.

- empty: no gradient since `clear`.
- holding: `add` has copied the reduced gradient, or added to it. More contributions may follow.
- stepped: `run` has computed new parameter and state into the shadow buffers from the old ones, which are untouched.

`commit` makes the result valid; `add` and `run` may come again before it, each time from the same old values, so that
nothing need be known about which contribution is the last. `is_current` says whether what was computed is what would be
computed now: it compares all inputs (gradient, parameter, state, settings), so a learning rate, a state or a parameter
that was changed in between leads to another run and never to a wrong result.

The parameter is copied, because FSDP gathers from its memory. State tensors are exchanged for the shadows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fireflyer.base.errors import UsageError
from fireflyer.training.fsdp.kernels import Settings, State, UpdateRule

__all__ = ["Slot", "local"]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of this rank's shard, or of the tensor if it is not sharded. Call it without recording gradients."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True, slots=True)
class _Inputs:
    """All that a step depends on. Tensors are kept, so that their identity says something."""

    contributions: int
    versions: tuple[int, ...]
    """Of the parameter, then of the state's tensors: torch counts changes in place."""
    state: tuple[tuple[str, torch.Tensor], ...]
    settings: tuple[Any, ...]

    def same(self, other: _Inputs) -> bool:
        return (
            (self.contributions, self.versions, self.settings) == (other.contributions, other.versions, other.settings)
            and len(self.state) == len(other.state)
            and all(a[0] == b[0] and a[1] is b[1] for a, b in zip(self.state, other.state, strict=True))
        )


class Slot:
    """The gradient and shadows of one parameter. All methods are called under `torch.no_grad`."""

    def __init__(self, name: str, parameter: torch.Tensor, rule: UpdateRule) -> None:
        self.name = name
        self.parameter = parameter
        self.norm: torch.Tensor | None = None
        """Of the gradient; None until it is asked for after the last contribution."""
        self._rule = rule
        self._gradient: torch.Tensor | None = None
        self._holds = False
        self._contributions = 0
        self._new_parameter: torch.Tensor | None = None
        self._new_state: State = {}
        self._stepped: _Inputs | None = None

    @property
    def gradient(self) -> torch.Tensor | None:
        """The sum of the contributions since `clear`, sharded as the parameter; None without any."""
        return self._gradient if self._holds else None

    def add(self, gradient: torch.Tensor) -> None:
        """Copies the first contribution and adds later ones in the gradient's dtype, as FSDP does. Raises
        `UsageError` for a sparse gradient."""
        if gradient.layout != torch.strided:
            raise UsageError(f"the gradient of {self.name} has layout {gradient.layout}; sparse ones are not supported")
        if self._gradient is None or self._gradient.dtype != gradient.dtype:
            self._gradient = torch.empty_like(gradient, memory_format=torch.preserve_format)
        kept = local(self._gradient)
        if self._holds:
            kept += local(gradient)
        else:
            kept.copy_(local(gradient))
        self._changed()
        self._holds = True

    def scale(self, coefficient: torch.Tensor) -> None:
        """Multiplies the gradient in its own dtype, as `clip_grad_norm_` does."""
        assert self._gradient is not None  # noqa: S101 - only slots with a gradient are clipped
        local(self._gradient).mul_(local(coefficient))
        self._changed()

    def clear(self, *, keep_zeros: bool = False) -> None:
        """Forgets the gradient; with `keep_zeros` one that is there becomes zero. Buffers stay for the next step."""
        self._changed()
        if keep_zeros and self._holds and self._gradient is not None:
            local(self._gradient).zero_()
        else:
            self._holds = False

    def run(self, old: State, settings: Settings) -> None:
        """Computes new parameter and state from `old` and the gradient; changes neither parameter nor `old`."""
        assert self._gradient is not None  # noqa: S101 - only slots with a gradient are stepped
        inputs = self._inputs(old, settings)
        if self._new_parameter is None:
            self._new_parameter = torch.empty_like(self.parameter, memory_format=torch.preserve_format)
        new = local(self._new_parameter)
        new.copy_(local(self.parameter))
        before = old or self._rule.fresh(self.parameter, settings)
        shadows = {name: _like(self._new_state.get(name), value) for name, value in before.items()}
        values = {name: local(shadow) for name, shadow in shadows.items()}
        for name, value in before.items():
            values[name].copy_(local(value))
        self._rule.apply(new, local(self._gradient), values, settings)
        for name in values.keys() - shadows.keys():  # the first momentum is made by the step
            shadows[name] = _like(self._new_state.get(name), self.parameter)
            local(shadows[name]).copy_(values[name])
        self._new_state = shadows
        self._stepped = inputs

    def is_current(self, old: State, settings: Settings) -> bool:
        """Whether `run` was called with what the inputs are now."""
        return self._stepped is not None and self._stepped.same(self._inputs(old, settings))

    @property
    def has_run(self) -> bool:
        """Whether there is a result, even one that is no longer current."""
        return self._stepped is not None

    def commit(self, old: State) -> State:
        """Makes the result of `run` valid and returns the new state. `old` becomes the next shadow."""
        assert self._new_parameter is not None  # noqa: S101 - committed after a run
        local(self.parameter).copy_(local(self._new_parameter))
        new, self._new_state = self._new_state, dict(old)
        self._stepped = None
        return new

    def forget_step(self) -> None:
        """Drops the result of `run`; the old parameter and state were never changed."""
        self._stepped = None

    @property
    def shadow_bytes(self) -> int:
        """Memory of the new parameter and the new state."""
        new = [] if self._new_parameter is None else [self._new_parameter]
        return sum(_bytes(tensor) for tensor in [*new, *self._new_state.values()])

    @property
    def gradient_bytes(self) -> int:
        """Memory of the kept gradient."""
        return 0 if self._gradient is None else _bytes(self._gradient)

    def _changed(self) -> None:
        self._contributions += 1
        self.norm = None

    def _inputs(self, old: State, settings: Settings) -> _Inputs:
        state = tuple(sorted(old.items()))
        tensors = [self.parameter, *(tensor for _, tensor in state)]
        return _Inputs(
            self._contributions,
            tuple(local(tensor)._version for tensor in tensors),  # noqa: SLF001 - torch's count of changes in place
            state,
            tuple(_plain(settings[name]) for name in self._rule.settings),
        )


def _like(shadow: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
    """`shadow`, if it can take `value`; else memory that can."""
    if shadow is not None and (shadow.dtype, shadow.shape, shadow.device) == (value.dtype, value.shape, value.device):
        return shadow
    return torch.empty_like(value, memory_format=torch.preserve_format)


def _bytes(tensor: torch.Tensor) -> int:
    shard = local(tensor)
    return shard.numel() * shard.element_size()


def _plain(setting: Any) -> Any:
    """A setting as a number, so that one that is a tensor is compared by its value."""
    if isinstance(setting, torch.Tensor):
        return setting.item()
    if isinstance(setting, tuple | list):
        return tuple(_plain(each) for each in setting)
    return setting
