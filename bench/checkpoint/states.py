"""States of random tensors, told apart by their shape: `64x32MiB`."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from bench.checkpoint.program import State

__all__ = ["SHAPES", "Shape", "random_state", "same"]


class Shape(NamedTuple):
    name: str
    tensors: int
    size_bytes: int
    """Of each tensor, fp32."""

    @property
    def total_bytes(self) -> int:
        return self.tensors * self.size_bytes

    @property
    def judged(self) -> bool:
        """Of less there are no targets: what is measured then is the number of fsyncs, or of tensors."""
        return self.total_bytes >= 256 << 20


SHAPES: Final = {
    "tiny": (Shape("8x64KiB", 8, 64 << 10), Shape("100x4KiB", 100, 4 << 10)),
    "brief": (Shape("64x4MiB", 64, 4 << 20), Shape("2000x4KiB", 2_000, 4 << 10)),
    "full": (Shape("64x32MiB", 64, 32 << 20), Shape("10000x4KiB", 10_000, 4 << 10)),
}


def random_state(count: int, size_bytes: int) -> State:
    return {f"layer.{number}.weight": torch.rand(size_bytes // 4) for number in range(count)}


def same(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
