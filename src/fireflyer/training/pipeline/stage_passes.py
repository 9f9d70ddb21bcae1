"""The passes of one stage on its micro-batches: forward, backward, and its two parts.

The outputs of each phase are cut from their graph and enter the next one as leaves, so that backward passes run phase
by phase too. What a forward leaves for its backward is kept by micro-batch, and dropped after B or W.

Passes are generators: they yield whenever a transfer has been started, and return their outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from fireflyer.base.errors import UsageError
from fireflyer.training.pipeline.phases import Compute, Gradients, Phase, Phased, Tensors, Transfer
from fireflyer.training.pipeline.split_backward import Deferred, backward_for_inputs, backward_whole

__all__ = ["OnPhase", "StagePasses", "finish", "leaf"]

OnPhase = Callable[[str, int, str, bool], None]
"""Told of every phase: the pass ("F", "B", "I"), the micro-batch, the phase, and whether it begins or has ended."""
_T = TypeVar("_T")


class _Segment:
    """What one phase leaves for its backward."""

    __slots__ = ("deferred", "inputs", "name", "outputs", "saved", "transfer")

    def __init__(self, name: str, inputs: Tensors, outputs: Tensors, transfer: Transfer | None, saved: Any) -> None:
        self.name = name
        self.inputs = inputs
        self.outputs = outputs
        self.transfer = transfer
        self.saved = saved
        self.deferred: Deferred | None = None


class StagePasses:
    """Of one stage. `name` is for messages."""

    def __init__(self, name: str, module: nn.Module, on_phase: OnPhase | None = None) -> None:
        self.module = module
        self._name = name
        self._on_phase = on_phase
        self._kept: dict[int, list[_Segment]] = {}

    @property
    def in_flight(self) -> int:
        """Micro-batches whose activations are kept."""
        return len(self._kept)

    def clear(self) -> None:
        """Drops what micro-batches of a step that failed have left."""
        self._kept.clear()

    def forward(
        self, micro_batch: int, inputs: Tensors, loss: Callable[..., torch.Tensor] | None = None
    ) -> Generator[None, None, Tensors]:
        """The outputs; with `loss`, that of the last stage: `loss(*outputs)`, a scalar."""
        keeps = torch.is_grad_enabled()
        segments: list[_Segment] = []
        values = inputs
        for phase in self._phases(loss):
            values = tuple(map(leaf, values)) if segments else values
            self._tell("F", micro_batch, phase.name, True)
            if isinstance(phase, Compute):
                outputs, saved = self._tensors(phase.run(*values), phase.name), None
                segments.append(_Segment(phase.name, values, outputs, None, None))
            else:
                with torch.no_grad():
                    pending, saved = phase.start(*values)
                    yield
                    outputs = self._tensors(pending.wait(), phase.name)
                if keeps and any(tensor.requires_grad for tensor in values):
                    outputs = tuple(one.requires_grad_() if one.is_floating_point() else one for one in outputs)
                segments.append(_Segment(phase.name, values, outputs, phase, saved))
            self._tell("F", micro_batch, phase.name, False)
            values = outputs
        if keeps:
            self._kept[micro_batch] = segments
        return values

    def backward(self, micro_batch: int, gradients: Gradients) -> Generator[None, None, Gradients]:
        """B. Adds to `grad` of the parameters; the gradients of the inputs."""
        segments = self._kept.pop(micro_batch)
        self._check(segments[-1], gradients)
        while segments:
            segment = segments.pop()
            self._tell("B", micro_batch, segment.name, True)
            if segment.transfer is None:
                gradients = backward_whole(segment.outputs, gradients, segment.inputs)
            else:
                pending = segment.transfer.start_backward(segment.saved, gradients)
                yield
                gradients = tuple(pending.wait())
            self._tell("B", micro_batch, segment.name, False)
        return gradients

    def backward_input(self, micro_batch: int, gradients: Gradients) -> Generator[None, None, Gradients]:
        """I: the gradients of the inputs."""
        segments = self._kept[micro_batch]
        self._check(segments[-1], gradients)
        for segment in reversed(segments):
            self._tell("I", micro_batch, segment.name, True)
            if segment.transfer is None:
                gradients, segment.deferred = backward_for_inputs(segment.outputs, gradients, segment.inputs)
            else:
                pending = segment.transfer.start_backward(segment.saved, gradients)
                yield
                gradients = tuple(pending.wait())
            segment.inputs = segment.outputs = ()
            segment.saved = None
            self._tell("I", micro_batch, segment.name, False)
        return gradients

    def backward_weights(self, micro_batch: int) -> None:
        """W. Adds to `grad` of the parameters."""
        for segment in reversed(self._kept.pop(micro_batch)):
            if segment.deferred is not None:
                segment.deferred.run()

    def _phases(self, loss: Callable[..., torch.Tensor] | None) -> Sequence[Phase]:
        if isinstance(self.module, Phased):
            phases = [*self.module.phases()]
            return phases if loss is None else [*phases, Compute("loss", loss)]
        module = self.module
        if loss is None:
            return (Compute("stage", module),)
        return (Compute("stage", lambda *inputs: loss(*self._tensors(module(*inputs), "stage"))),)

    def _tensors(self, given: Any, phase: str) -> Tensors:
        if isinstance(given, torch.Tensor):
            return (given,)
        if isinstance(given, tuple | list) and all(isinstance(one, torch.Tensor) for one in given):
            return tuple(given)
        raise UsageError(
            f"{self._name}, phase {phase!r}, gives {type(given).__name__}; a stage gives a tensor or a tuple of tensors"
        )

    def _check(self, segment: _Segment, gradients: Gradients) -> None:
        if len(segment.outputs) != len(gradients):
            raise UsageError(f"{self._name} has {len(segment.outputs)} outputs, but got {len(gradients)} gradients")
        for output, gradient in zip(segment.outputs, gradients, strict=True):
            if gradient is not None and output.shape != gradient.shape:
                raise UsageError(
                    f"{self._name} got a gradient of shape {tuple(gradient.shape)} for an output of shape "
                    f"{tuple(output.shape)}"
                )

    def _tell(self, kind: str, micro_batch: int, phase: str, begins: bool) -> None:
        if self._on_phase is not None:
            self._on_phase(kind, micro_batch, phase, begins)


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Cut from its graph; it gets a gradient if it had one before."""
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor


def finish(generator: Generator[None, None, _T]) -> _T:
    """Runs a pass alone: it waits for its transfers as soon as they are started."""
    while True:
        try:
            next(generator)
        except StopIteration as stop:
            result: _T = stop.value
            return result
