"""How often values fell below each of some bounds. Pure; times come from outside."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

__all__ = ["Histogram"]


class Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: ascending; a value counts below the first one that is not smaller than it."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """Each bound, at last infinity, with the number of values that were not larger."""
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            yield bound, total
