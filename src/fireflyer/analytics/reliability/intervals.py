"""Intervals of rates: k failures in an exposure, with quantiles of Gamma distributions (paper, figure 7: 90 %)."""

from __future__ import annotations

import math
from typing import Final

import msgspec

from fireflyer.base.errors import UsageError

__all__ = ["Rate", "gamma_quantile", "rate_of"]

CONFIDENCE: Final = 0.90
_STEPS: Final = 400


class Rate(msgspec.Struct, frozen=True):
    """Failures over an exposure in node-days; `low` and `high` bound the true rate with 90 % confidence."""

    failures: int
    node_days: float
    per_node_day: float
    low: float
    high: float


def rate_of(failures: int, node_days: float) -> Rate:
    """The exact interval of a Poisson count: quantile 5 % of Gamma(k) to 95 % of Gamma(k + 1), over the exposure.
    Raises `UsageError` for a negative count or an exposure that is not above 0."""
    if failures < 0 or not node_days > 0:
        raise UsageError(f"failures={failures} must be at least 0 and node_days={node_days} above 0")
    tail = (1 - CONFIDENCE) / 2
    low = gamma_quantile(tail, failures) if failures else 0.0
    high = gamma_quantile(1 - tail, failures + 1)
    return Rate(failures, node_days, failures / node_days, low / node_days, high / node_days)


def gamma_quantile(probability: float, shape: float) -> float:
    """x at which a Gamma variable of this shape and scale 1 is below x with `probability`, by bisection."""
    low, high = 0.0, shape + 40 * math.sqrt(shape) + 40
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if _lower_gamma(shape, middle) < probability else (low, middle)
    return (low + high) / 2


def _lower_gamma(shape: float, x: float) -> float:
    """The regularised lower incomplete gamma function: its series below the mean, above it the continued fraction of
    the upper one (Lentz)."""
    if x <= 0:
        return 0.0
    front = math.exp(shape * math.log(x) - x - math.lgamma(shape))
    terms = 200 + round(20 * math.sqrt(shape))
    if x < shape + 1:
        term = total = 1 / shape
        for k in range(1, terms):
            term *= x / (shape + k)
            total += term
        return front * total
    b = x + 1 - shape
    c, d = 1e300, 1 / b
    fraction = d
    for k in range(1, terms):
        a = k * (shape - k)
        b += 2
        d = 1 / (a * d + b)
        c = b + a / c
        fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return 1 - front * fraction
