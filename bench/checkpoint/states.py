"""States of random tensors, told apart by their shape: `64x32MiB`."""

from __future__ import annotations

import gc
import weakref
from typing import Final, NamedTuple

import torch

from bench.checkpoint.program import State
from fireflyer.native import crc32c

__all__ = ["SHAPES", "Shape", "free", "random_state", "same", "sums_of", "touched_state"]


class Shape(NamedTuple):
    name: str
    tensors: int
    size_bytes: int
    """Of each tensor, fp32."""
    only_two: bool = False
    """Measured is ours beside the O_DIRECT program (on 3FS: the chunk client) alone, with the state and one image in
    memory and no more: for a state that has no room for a third copy."""

    @property
    def total_bytes(self) -> int:
        return self.tensors * self.size_bytes

    @property
    def large(self) -> bool:
        """Whether processor time is that of bytes, for which its target is, and not that of tensors."""
        return self.total_bytes >= 256 << 20

    @property
    def judged(self) -> bool:
        """Of less there are no targets: what is measured then is the number of fsyncs."""
        return self.large or self.tensors >= 10_000


SHAPES: Final = {
    "tiny": (Shape("8x64KiB", 8, 64 << 10), Shape("100x4KiB", 100, 4 << 10), Shape("4x96KiB", 4, 96 << 10, True)),
    "brief": (Shape("64x4MiB", 64, 4 << 20), Shape("2000x4KiB", 2_000, 4 << 10)),
    "full": (
        Shape("64x32MiB", 64, 32 << 20),
        Shape("10000x4KiB", 10_000, 4 << 10),
        Shape("64x128MiB", 64, 128 << 20, True),
    ),
}


def random_state(count: int, size_bytes: int) -> State:
    return {f"layer.{number}.weight": torch.rand(size_bytes // 4) for number in range(count)}


def touched_state(count: int, size_bytes: int) -> State:
    """Sooner there than a random one: for what does not depend on the values."""
    return {f"layer.{number}.weight": torch.full((size_bytes // 4,), float(number)) for number in range(count)}


def same(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def sums_of(state: State) -> list[int]:
    """Of each tensor in the order of names: what is compared where there is no room for a second state."""
    return [crc32c(state[name].numpy()) for name in sorted(state)]


def free(state: State) -> None:
    """Its memory, for what is loaded into new tensors. Raises `AssertionError` where somebody else has one of it."""
    tensors = [weakref.ref(tensor) for tensor in state.values()]
    state.clear()
    gc.collect()  # a closed manager of checkpoints is part of a cycle
    assert not [one for one in tensors if one() is not None], "tensors of the state are still referred to"
