"""What a stage may show of its inside, so that the passes of an overlapped pair really run beside each other.

A stage is a module: `module(*inputs)` gives a tensor or several. One that has a method `phases` is instead run phase by
phase; the outputs of one are the inputs of the next. For each micro-batch `phases` is called once, so what phases of
one micro-batch share (a routing) may lie in a closure. A block of experts has, for example,

    def phases(self):
        return [
            Compute("attention", self.attention),
            Transfer("dispatch", self.start_dispatch, self.start_dispatch_backward),
            Compute("experts", self.experts),
            Transfer("combine", self.start_combine, self.start_combine_backward),
        ]

A transfer is started, and something else is computed before it is waited for. In an overlapped pair the two
micro-batches take turns (`take_turns`): each waits for its transfer, computes, and starts its next one, under which the
other computes. With the phases above, where a backward has the same in reverse:

    backward   start combine |                 | experts, start dispatch |               | attention
    forward                  | attention, start dispatch |               | experts, start combine | wait

which is the order of the DeepSeek-V3 report (2024), section 3.2.1.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch

__all__ = ["Compute", "Gradients", "Pending", "Phase", "Phased", "Tensors", "Transfer", "take_turns"]

Tensors = tuple[torch.Tensor, ...]
Gradients = tuple[torch.Tensor | None, ...]
"""One for each tensor; None where it has none."""
_First = TypeVar("_First")
_Second = TypeVar("_Second")


class Compute(NamedTuple):
    """A phase that computes, with autograd: `run(*inputs)` gives a tensor or a sequence of tensors."""

    name: str
    run: Callable[..., torch.Tensor | Sequence[torch.Tensor]]


class Pending(Protocol):
    """A transfer that was started."""

    def wait(self) -> Sequence[Any]:
        """Wait for its outputs; of a backward one gradient for each input, None where there is none."""


class Transfer(NamedTuple):
    """A phase that moves data. Autograd does not see it.

    `start(*inputs)` gives what is pending, and anything that the backward needs. `start_backward(saved, gradients)`
    gets that, and a gradient or None for each output.
    """

    name: str
    start: Callable[..., tuple[Pending, Any]]
    start_backward: Callable[[Any, Gradients], Pending]


Phase = Compute | Transfer


@runtime_checkable
class Phased(Protocol):
    """A stage that is run phase by phase."""

    def phases(self) -> Sequence[Phase]:
        """Phases of one micro-batch, in the order of the forward."""


def take_turns(first: Generator[None, None, _First], second: Generator[None, None, _Second]) -> tuple[_First, _Second]:
    """Runs two passes, each of which yields when it has started a transfer, in turns until both have ended."""
    ended: dict[int, Any] = {}
    while len(ended) < 2:
        for index, one in enumerate((first, second)):
            if index not in ended:
                try:
                    next(one)
                except StopIteration as stop:
                    ended[index] = stop.value
    return ended[0], ended[1]
