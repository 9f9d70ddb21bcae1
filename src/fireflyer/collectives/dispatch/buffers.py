"""Memory that a dispatcher uses again: a page that was written before costs no fault and no clearing.

`StepBuffers` are for what lives as long as one operation, `ResultBuffers` for what the caller gets, whose memory comes
back when nobody refers to it any more.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["ResultBuffers", "StepBuffers"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

_GROWTH: Final = 1.25
_MAX_UNUSED: Final = 4
_LEAST_BYTES: Final = 1 << 16
"""Smaller results come from the allocator, which keeps their pages."""


class StepBuffers:
    """One buffer for each name. Of one thread."""

    def __init__(self) -> None:
        self._buffers: dict[str, Bytes] = {}

    def take(self, name: str, size: int) -> Bytes:
        """(size,) bytes, valid until `name` is taken again. Not initialised."""
        found = self._buffers.get(name)
        if found is None or found.size < size:
            found = self._buffers[name] = np.empty(int(size * _GROWTH), np.uint8)
        return found[:size]


class ResultBuffers:
    """Arrays of which up to four are kept when their users are done. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._unused: list[Bytes] = []

    def take(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> Array:
        """Not initialised. Its memory is used again when the array and all its views are gone."""
        size = shape[0] * shape[1] * dtype.itemsize
        if size < _LEAST_BYTES:
            return np.empty(shape, dtype)
        memory = self._fitting(size)
        lent = _Lent(memory)
        weakref.finalize(lent, self._give_back, memory).atexit = False
        return np.asarray(lent)[:size].view(dtype).reshape(shape)

    def _fitting(self, size: int) -> Bytes:
        """The smallest unused one that is not much too large."""
        with self._lock:
            fitting = [one for one in self._unused if size <= one.size <= 2 * size]
            if fitting:
                chosen = min(fitting, key=lambda one: one.size)
                self._unused = [one for one in self._unused if one is not chosen]
                return chosen
        return np.empty(int(size * _GROWTH), np.uint8)

    def _give_back(self, memory: Bytes) -> None:
        with self._lock:
            self._unused = [*self._unused, memory][-_MAX_UNUSED:]


class _Lent:
    """What arrays refer to as their base."""

    def __init__(self, memory: Bytes) -> None:
        self.__array_interface__ = memory.__array_interface__
        self._memory = memory
