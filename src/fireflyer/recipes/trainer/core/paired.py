"""What paired runs show: the mean difference, its interval by Student's t distribution, and a verdict.

Two runs of a pair have the same seed, so what the seed does to the loss is in both and cancels in their difference.
Differences of n pairs have the mean m and the standard deviation s; with the quantile t of n - 1 degrees of freedom
the interval is m ± t·s/√n (Student, "The probable error of a mean", 1908).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from fireflyer.base.errors import UsageError

__all__ = ["PairedResult", "Verdict", "judge", "paired_result", "t_quantile"]

Verdict = Literal["better", "worse", "within the bound", "not decided"]


class PairedResult(msgspec.Struct, frozen=True, kw_only=True):
    """Of n pairs, relative to the baseline: negative is a lower loss with the technique."""

    differences: tuple[float, ...]
    """technique / baseline - 1, pair by pair."""
    mean: float
    low: float
    high: float
    """Ends of the interval of the mean."""
    confidence: float
    bound: float
    verdict: Verdict


def paired_result(
    baseline: Sequence[float], technique: Sequence[float], *, bound: float, confidence: float = 0.95
) -> PairedResult:
    """Of held-out losses, pair by pair. Raises `UsageError` for fewer than two pairs, and for losses that are not
    finite and positive, as those of a run that diverged."""
    if len(baseline) != len(technique) or len(baseline) < 2:
        raise UsageError(f"{len(baseline)} and {len(technique)} losses; give at least two pairs")
    for loss in (*baseline, *technique):
        if not (math.isfinite(loss) and loss > 0):
            raise UsageError(f"a held-out loss is {loss}; a run that diverged cannot be compared")
    differences = tuple(after / before - 1 for before, after in zip(baseline, technique, strict=True))
    count = len(differences)
    mean = math.fsum(differences) / count
    variance = math.fsum((one - mean) ** 2 for one in differences) / (count - 1)
    half = t_quantile(0.5 + confidence / 2, count - 1) * math.sqrt(variance / count)
    low, high = mean - half, mean + half
    return PairedResult(
        differences=differences,
        mean=mean,
        low=low,
        high=high,
        confidence=confidence,
        bound=bound,
        verdict=judge(low, high, bound),
    )


def judge(low: float, high: float, bound: float) -> Verdict:
    """Of the interval of the mean difference. `within the bound` comes first: a difference that is certain and does not
    matter is neither better nor worse."""
    if -bound <= low and high <= bound:
        return "within the bound"
    if high < 0:
        return "better"
    return "worse" if low > 0 else "not decided"


def t_quantile(probability: float, degrees: int) -> float:
    """The value that Student's t with so many degrees of freedom is below with `probability`, 0.5 to below 1.

    >>> round(t_quantile(0.975, 4), 3)
    2.776
    """
    if not 0.5 <= probability < 1 or degrees < 1:
        raise UsageError(
            f"probability {probability} and {degrees} degrees of freedom; use 0.5 to below 1, and 1 or more"
        )
    high = 1.0
    while _t_below(high, degrees) < probability:
        high *= 2
    low = 0.0
    for _ in range(200):
        middle = (low + high) / 2
        if _t_below(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _t_below(value: float, degrees: int) -> float:
    """P(T <= value) for value >= 0, by the finite series of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(value / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = 0.0
    for k in range(1 if odd else 0, degrees - 1, 2):
        total += term
        term *= cosine * cosine * (k + 1) / (k + 2)
    central = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return 0.5 + central / 2
