"""Gradients of a dtype lie side by side in flat buckets, so that few large sums replace many small ones."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from itertools import accumulate
from typing import Final

import torch

from fireflyer.base.errors import UsageError
from fireflyer.collectives.torch.tensors import tensor_in
from fireflyer.training.bucket_work import MeanInFlight
from fireflyer.training.communication import Communicator

__all__ = ["Bucket", "dense_strides", "plan_buckets", "tensor_for_sums"]

_PARTS: Final = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def plan_buckets(parameters: Sequence[tuple[str, int]], bucket_bytes: int) -> list[list[int]]:
    """Which parameters share a bucket: lists of indices into `parameters`, which are (dtype name, bytes).

    Goes backwards, since gradients appear about in the reverse of the order of use. A bucket has one dtype and is
    closed when the next parameter would bring it above `bucket_bytes`; a larger parameter gets one to itself. Buckets
    are ordered by the parameter that comes last to them: the one that can be full first comes first.
    """
    closed: list[list[int]] = []
    open_buckets: dict[str, tuple[list[int], int]] = {}
    for index in reversed(range(len(parameters))):
        dtype, size = parameters[index]
        members, used = open_buckets.get(dtype, ([], 0))
        if members and used + size > bucket_bytes:
            closed.append(members)
            members, used = [], 0
        open_buckets[dtype] = ([*members, index], used + size)
    closed.extend(members for members, _ in open_buckets.values())
    return sorted(closed, key=lambda members: -members[-1])


def dense_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Those of the parameter, or row-major ones where it has gaps or overlaps itself."""
    return torch.empty_like(parameter, device="meta").stride()


def tensor_for_sums(
    comm: Communicator, elements: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat memory of the communicator for so many elements: as operations take it, complex numbers as pairs, and as
    elements of `dtype`. Raises `UsageError`."""
    if not dtype.is_complex:
        flat = tensor_in(comm, elements, dtype, device)
        return flat, flat
    pairs = tensor_in(comm, 2 * elements, _PARTS[dtype], device)
    return pairs, torch.view_as_complex(pairs.view(-1, 2))


class Bucket:
    """The gradients of some parameters of one dtype in one flat tensor, and how far they have come in this pass.

    A gradient is complete when the hook of its parameter has fired as often as `expected` says: once, or where the
    graph is static as often as in the first pass (0: it is not used).
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        *,
        spare: int = 0,
        as_views: bool = True,
        comm: Communicator,
    ) -> None:
        """`spare` elements follow the gradients. `as_views`: the bucket's memory, that of the communicator, becomes
        that of `grad`; else the means are copied there."""
        self.names = tuple(names)
        self.parameters = tuple(parameters)
        self._ends = list(accumulate(parameter.numel() for parameter in parameters))
        self._as_views = as_views
        elements = self._ends[-1]
        dtype = parameters[0].dtype
        parts = 2 if dtype.is_complex else 1
        self.summed, _ = tensor_for_sums(comm, elements + spare, dtype, parameters[0].device)
        self.summed.zero_()
        """All of it, as it is summed: flat, complex numbers as pairs."""
        self.summed_gradients = self.summed[: elements * parts]
        """Without the spare elements."""
        self.views = self.views_in(self.gradients_in(self.summed))
        self.used = [False] * len(self.names)
        """Whether this rank has computed a gradient since the last pass that was summed."""
        self.expected = [1] * len(self.names)
        self.fired = [0] * len(self.names)
        self.missing = len(self.names)
        self.work: MeanInFlight | None = None
        self._grad_before: dict[int, torch.Tensor | None] = {}

    def gradients_in(self, summed: torch.Tensor) -> torch.Tensor:
        """The gradients in `summed`, as large as the attribute of that name: flat, in the parameters' dtype."""
        gradients = summed[: self.summed_gradients.numel()]
        return torch.view_as_complex(gradients.view(-1, 2)) if self.parameters[0].is_complex() else gradients

    def views_in(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The parts of `flat`, flat gradients, in the shapes of the parameters.

        They have the parameter's memory format: fused optimizers walk through it and its gradient side by side."""
        begins = [0, *self._ends]
        return tuple(
            flat[begin:end].as_strided(parameter.shape, dense_strides(parameter))
            for begin, end, parameter in zip(begins, self._ends, self.parameters, strict=False)
        )

    def reset(self) -> None:
        """Before a pass: nothing is being summed, and only what is not expected has arrived."""
        self.fired = [0] * len(self.names)
        self.missing = sum(expected > 0 for expected in self.expected)
        self.work = None
        self._grad_before.clear()

    @property
    def size_bytes(self) -> int:
        return self.summed.numel() * self.summed.element_size()

    def missing_slots(self) -> list[int]:
        """Whose gradients have not arrived, though expected."""
        return [slot for slot, fired in enumerate(self.fired) if fired < self.expected[slot]]

    def missing_names(self) -> list[str]:
        return [self.names[slot] for slot in self.missing_slots()]

    def fire(self, slot: int) -> None:
        """The hook of a parameter fired; `missing` falls if that was the last time."""
        self.collect(slot)
        self.used[slot] = True
        self.fired[slot] += 1
        if self.fired[slot] == self.expected[slot]:
            self.missing -= 1

    def collect(self, slot: int) -> None:
        """Sees to it that the flat tensor holds the parameter's gradient: zeros if it has none."""
        parameter, view = self.parameters[slot], self.views[slot]
        gradient = parameter.grad
        if gradient is None:
            view.zero_()
        elif gradient.layout != torch.strided:
            raise UsageError(f"parameter {self.names[slot]!r} has a sparse gradient; only dense ones can be summed")
        elif gradient is not view:
            view.copy_(gradient)
        if self._as_views:
            parameter.grad = view

    def collect_missing(self) -> None:
        """Fills in for the gradients that did not come in this pass."""
        for slot, fired in enumerate(self.fired):
            if fired == 0 and self.expected[slot] > 0:
                self._grad_before[slot] = self.parameters[slot].grad
                self.collect(slot)

    def collect_unexpected(self) -> None:
        """At the begin of a pass, the same for those that are not expected."""
        for slot, expected in enumerate(self.expected):
            if expected == 0:
                self._grad_before[slot] = self.parameters[slot].grad
                self.collect(slot)

    def deliver(self, unused: AbstractSet[int] = frozenset()) -> None:
        """After the sum: what is in the flat tensor is the gradient, but not of the slots that no rank has used."""
        for slot, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            if slot in unused:
                parameter.grad = self._grad_before.get(slot)
            elif not self._as_views:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(view)
                parameter.grad.copy_(view)
        self.used = [False] * len(self.names)
