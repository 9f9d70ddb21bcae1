"""Numbers that look like chance and are the same on every machine, Python and NumPy: what a seed decides stays so.

The generator is splitmix64 (Steele, Lea, Flood, OOPSLA 2014): output i of seed s is mix(s + (i + 1)·γ) mod 2^64. A
number below n is the upper 64 bits of (output · n); the shuffle is that of Durstenfeld from the last place to the
second. All of it is integer arithmetic. Standard libraries leave their shuffles open, and have changed them.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import Final, TypeVar

import numpy as np

__all__ = ["SeededRandom", "Words"]

T = TypeVar("T")
Words = np.ndarray[tuple[int], np.dtype[np.uint64]]

_MASK: Final = (1 << 64) - 1
_GAMMA: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB


class SeededRandom:
    """A stream of numbers that its seed decides. `seed`: any integer, taken modulo 2^64."""

    __slots__ = ("_state",)

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def word(self) -> int:
        """The next 64 bits."""
        self._state = (self._state + _GAMMA) & _MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * _MIX_1) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * _MIX_2) & _MASK
        return mixed ^ (mixed >> 31)

    def words(self, count: int) -> Words:
        """The next `count` words, uint64 of shape (count,): the same as so many calls of `word`."""
        steps = np.arange(1, count + 1, dtype=np.uint64)
        mixed: Words = steps * np.uint64(_GAMMA) + np.uint64(self._state)
        self._state = (self._state + count * _GAMMA) & _MASK
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_MIX_1)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_MIX_2)
        return mixed ^ (mixed >> np.uint64(31))

    def below(self, bound: int) -> int:
        """From 0 to `bound` - 1. Uneven by less than bound / 2^64."""
        return (self.word() * bound) >> 64

    def shuffle(self, items: MutableSequence[T]) -> None:
        """In place."""
        for last in range(len(items) - 1, 0, -1):
            other = self.below(last + 1)
            items[last], items[other] = items[other], items[last]
