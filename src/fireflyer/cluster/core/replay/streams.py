"""Random numbers from a seed: SplitMix64 (Steele, Lea and Flood 2014), the same on every machine and version.

Streams of one seed with different numbers are independent: every node has its own, so that what one does never changes
when another is asked more often.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

__all__ = ["Stream", "cumulated"]

_MASK: Final = (1 << 64) - 1
_GAMMA: Final = 0x9E3779B97F4A7C15


def _mixed(state: int) -> int:
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def cumulated(weights: Sequence[float]) -> tuple[float, ...]:
    """For `Stream.index`; the last is 1."""
    total = sum(weights)
    sums = [each / total for each in accumulate(weights)]
    return (*sums[:-1], 1.0)


class Stream:
    """An endless sequence of numbers."""

    def __init__(self, seed: int, number: int = 0) -> None:
        self._state = _mixed((seed * _GAMMA + _mixed(number + 1)) & _MASK)

    def bits(self) -> int:
        """64 of them."""
        self._state = (self._state + _GAMMA) & _MASK
        return _mixed(self._state)

    def uniform(self) -> float:
        """In [0, 1)."""
        return (self.bits() >> 11) * (1.0 / (1 << 53))

    def exponential(self, mean: float) -> float:
        return -math.log(1.0 - self.uniform()) * mean

    def normal(self) -> float:
        """Mean 0, standard deviation 1 (Box and Muller)."""
        return math.sqrt(self.exponential(2.0)) * math.cos(2.0 * math.pi * self.uniform())

    def lognormal(self, median: float, sigma: float) -> float:
        return median * math.exp(sigma * self.normal())

    def index(self, cumulative: Sequence[float]) -> int:
        """A place in `cumulated` weights."""
        drawn = self.uniform()
        low, high = 0, len(cumulative) - 1
        while low < high:
            middle = (low + high) // 2
            if drawn < cumulative[middle]:
                high = middle
            else:
                low = middle + 1
        return low
