"""Gradients of a dtype lie side by side in flat buckets, so that few large sums replace many small ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from fireflyer.base.errors import UsageError
from fireflyer.training.bucket_work import BucketWork

__all__ = ["Bucket", "dense_strides", "plan_buckets"]


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


class Bucket:
    """The gradients of some parameters of one dtype in one flat tensor, and how far they have come in this pass."""

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        *,
        spare: int = 0,
        allocate: Callable[[int, torch.dtype], torch.Tensor],
    ) -> None:
        """`spare` elements follow the gradients. `allocate(elements, dtype)` gives the memory."""
        self.names = tuple(names)
        self.parameters = tuple(parameters)
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = allocate(sum(sizes) + spare, parameters[0].dtype).zero_()
        self.gradients = self.flat[: sum(sizes)]
        ends = list(accumulate(sizes))
        # In the parameter's memory format: fused optimizers walk through it and its gradient side by side.
        self.views = tuple(
            self.flat[end - size : end].as_strided(parameter.shape, dense_strides(parameter))
            for end, size, parameter in zip(ends, sizes, parameters, strict=True)
        )
        self.arrived = [False] * len(sizes)
        self.missing = len(sizes)
        self.work: BucketWork | None = None

    def reset(self) -> None:
        """Before a pass: nothing has arrived, nothing is being summed."""
        self.arrived = [False] * len(self.names)
        self.missing = len(self.names)
        self.work = None

    @property
    def size_bytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()

    def missing_names(self) -> list[str]:
        return [name for name, arrived in zip(self.names, self.arrived, strict=True) if not arrived]

    def arrive(self, slot: int) -> None:
        self.collect(slot)
        self.arrived[slot] = True
        self.missing -= 1

    def collect(self, slot: int) -> None:
        """Sees to it that the flat tensor holds the parameter's gradient (zeros if it has none) and is its `grad`."""
        parameter, view = self.parameters[slot], self.views[slot]
        gradient = parameter.grad
        if gradient is None:
            view.zero_()
        elif gradient.layout != torch.strided:
            raise UsageError(f"parameter {self.names[slot]!r} has a sparse gradient; only dense ones can be summed")
        elif gradient is not view:
            view.copy_(gradient)
        parameter.grad = view
