"""Buffers for the collectives of sharded training: lent again and again, so that their memory is constant.

An arena gives memory back to the system when an array is gone, so the next one is zeroed and mapped page by page. Here
a buffer stays, and the next request of about its size gets it. What FSDP asks for depends on its parameters only, not
on the batch, so after the first steps nothing new is made.

A buffer is lent until the tensor that was made of it, and all its views, are gone. They may go in any thread, also in
the middle of a garbage collection inside of `take`, so a return only appends to a queue.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["BufferPool", "PoolUse"]

_GRANULE_BYTES: Final = 4096
_MAX_WASTE: Final = 2
"""A free buffer of up to this many times the size is lent."""


class PoolUse(NamedTuple):
    """Memory of a pool."""

    held_bytes: int
    """Of all buffers."""
    lent_bytes: int
    """Of those in use now."""
    peak_lent_bytes: int
    buffers: int
    """How many were made; constant when the pool has what its users need."""


class BufferPool:
    """`make(size_bytes)` returns new memory, as `Communicator.empty` does, and raises where there is none left.

    Buffers are never given back: what is held is bounded by what was in use at one time, twice, and by what `make` has.
    One thread at a time may take.
    """

    def __init__(self, make: Callable[[int], npt.NDArray[np.uint8]]) -> None:
        self._make = make
        self._buffers: list[npt.NDArray[np.uint8]] = []
        self._free: list[tuple[int, int]] = []
        """Bytes and number of each free buffer, sorted."""
        self._returned: deque[int] = deque()
        self._held = self._lent = self._peak = 0

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor of `count` elements, of any content. Its memory is free when it and its views are gone."""
        self._collect()
        size_bytes = count * dtype.itemsize
        buffer, number = self._fitting(max(1, -(-size_bytes // _GRANULE_BYTES)) * _GRANULE_BYTES)
        self._lent += buffer.nbytes
        self._peak = max(self._peak, self._lent)
        lent = buffer[:size_bytes]
        finalizer: Any = weakref.finalize(lent, self._returned.append, number)  # the tensor's storage keeps `lent`
        finalizer.atexit = False
        return torch.from_numpy(lent).view(dtype)

    def use(self) -> PoolUse:
        """Memory now, and the most that was lent since construction."""
        self._collect()
        return PoolUse(self._held, self._lent, self._peak, len(self._buffers))

    def _fitting(self, needed: int) -> tuple[npt.NDArray[np.uint8], int]:
        at = bisect_left(self._free, (needed, -1))
        if at < len(self._free) and self._free[at][0] <= needed * _MAX_WASTE:
            number = self._free.pop(at)[1]
            return self._buffers[number], number
        buffer = self._make(needed)
        self._buffers.append(buffer)
        self._held += buffer.nbytes
        return buffer, len(self._buffers) - 1

    def _collect(self) -> None:
        while self._returned:
            number = self._returned.popleft()
            size_bytes = self._buffers[number].nbytes
            self._lent -= size_bytes
            insort(self._free, (size_bytes, number))
