"""`Amount`: a figure that is known between two bounds. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

from fireflyer.base.errors import UsageError

__all__ = ["Amount", "amount_of"]


class Amount(NamedTuple):
    """A value between `low` and `high`, both of 0 or more. Operations give the bounds of all results; they treat both
    sides as independent of each other."""

    low: float
    high: float

    def plus(self, other: Amount) -> Amount:
        return Amount(self.low + other.low, self.high + other.high)

    def times(self, other: Amount | float) -> Amount:
        low, high = other if isinstance(other, Amount) else (other, other)
        return Amount(self.low * low, self.high * high)

    def over(self, other: Amount | float) -> Amount:
        """Raises `UsageError` where the divisor may be 0."""
        low, high = other if isinstance(other, Amount) else (other, other)
        if low <= 0:
            raise UsageError("an amount is divided by one that may be 0; give a lower bound above 0")
        return Amount(self.low / high, self.high / low)

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    def __str__(self) -> str:
        if self.low < self.high == math.inf:
            return f"{Amount(self.low, self.low)} or more"
        if self.low == self.high:
            return f"{self.low:,.4g}" if self.low < 10_000 else f"{self.low:,.0f}"
        return f"{Amount(self.low, self.low)} to {Amount(self.high, self.high)}"


def amount_of(value: float | tuple[float, float], name: str) -> Amount:
    """Make the amount of a number, or of two that are its bounds. Raises `UsageError` that names it."""
    low, high = value if isinstance(value, tuple) else (value, value)
    if not (math.isfinite(low) and math.isfinite(high) and 0 <= low <= high):
        raise UsageError(f"{name} is {value}; write a number of 0 or more, or [low, high]")
    return Amount(float(low), float(high))
