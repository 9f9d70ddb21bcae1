"""What a job of a size must have to reach an effective training time ratio: the formulas solved for their inputs.

All follow from the exact renewal form (`renewal_ettr`): failures are exponential with rate λ while the job is
scheduled, and R → ∞. With τ = Δt + w it is λ·Δt·e^(−λ·u0)/((e^(λτ) − 1)·(1 + λ·q)). Its maximum over Δt, x = λ·Δt*,
satisfies

    x + ln(1 − x) = −λ·w,        so that        max ETTR = (1 − x)·e^(−λ·u0)/(1 + λ·q).

Daly and Young's √(2·w/λ) is the first term of x/λ for small λ·w; u0 and q do not move the optimum. Times are seconds,
rates per second.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from fireflyer.analytics.ettr import failure_rate_per_s, renewal_ettr
from fireflyer.base.errors import UsageError

__all__ = [
    "BlastRadius",
    "Requirements",
    "best_ettr",
    "blast_radius",
    "optimal_period_s",
    "requirements",
    "unhealthy_probability",
]

_STEPS: Final = 200
"""Of a bisection: more than a float has bits."""


def optimal_period_s(*, stall_s: float, failures_per_s: float, least_s: float = 0.0) -> float:
    """The checkpoint period that maximises `renewal_ettr`, at least `least_s`, as the time of a step; infinite without
    failures. Raises `UsageError` for negative arguments."""
    _check(stall_s=stall_s, failures_per_s=failures_per_s, least_s=least_s)
    if failures_per_s == 0:
        return math.inf
    return max(least_s, _optimal_share(failures_per_s * stall_s) / failures_per_s)


def best_ettr(*, failures_per_s: float, restart_s: float, stall_s: float, queue_s: float = 0.0) -> float:
    """`renewal_ettr` at the optimal period: (1 − λ·Δt*)·e^(−λ·u0)/(1 + λ·q). 1 without failures."""
    _check(stall_s=stall_s, failures_per_s=failures_per_s, restart_s=restart_s, queue_s=queue_s)
    running = math.exp(-_optimal_logarithm(failures_per_s * stall_s) - failures_per_s * restart_s)
    return running / (1 + failures_per_s * queue_s)


class Requirements(msgspec.Struct, frozen=True, kw_only=True):
    """What each input may be at most, the others as they are, for the ratio that is wanted, of a long job. None: no
    value suffices."""

    ettr: float
    """Wanted."""
    best: float
    """Reached with the inputs as they are and the optimal period."""
    optimal_period_s: float
    at_period_s: float | None = None
    """Checkpoint period that all but `period_s` hold for; None: the one that is optimal with the value."""
    failures_per_node_day: float
    """0: no rate suffices; infinite where neither a stall, a restart nor a wait costs anything."""
    stall_s: float | None
    restart_s: float | None
    queue_s: float | None = None
    nodes: int | None
    """0: none suffices; None: any number, since failures cost nothing."""
    period_s: tuple[float, float] | None
    """Shortest and longest checkpoint period that reach it; None where the optimal one does not."""


def requirements(
    *, ettr: float, nodes: int, failures_per_node_day: float, restart_s: float, stall_s: float, queue_s: float = 0.0,
    period_s: float | None = None,
) -> Requirements:  # fmt: skip
    """The inputs that give `ettr` at `nodes`, each alone, with checkpoints every `period_s` where that is given. Raises
    `UsageError` for a ratio outside ]0, 1[, for nodes, a rate or a period that are not above 0, and for negative
    times."""
    if not 0 < ettr < 1:
        raise UsageError(f"ettr={ettr} must lie between 0 and 1")
    if nodes < 1 or not failures_per_node_day > 0:
        raise UsageError(f"nodes={nodes} and failures_per_node_day={failures_per_node_day} must be above 0")
    _check(restart_s=restart_s, stall_s=stall_s, queue_s=queue_s, period_s=period_s or 0.0)
    given = _Given(ettr, failure_rate_per_s(nodes, failures_per_node_day), restart_s, stall_s, queue_s, period_s)
    rate, most = given.rate, _largest_rate(given)
    per_node = failure_rate_per_s(1, failures_per_node_day)
    best = best_ettr(failures_per_s=rate, restart_s=restart_s, stall_s=stall_s, queue_s=queue_s)
    optimal_s = optimal_period_s(stall_s=stall_s, failures_per_s=rate)
    return Requirements(
        ettr=ettr,
        best=best,
        optimal_period_s=optimal_s,
        at_period_s=period_s,
        failures_per_node_day=failures_per_node_day * most / rate,
        stall_s=_largest_stall_s(given),
        restart_s=_largest_restart_s(given),
        queue_s=_at_least_zero((given.reached(queue_s=0.0) / ettr - 1) / rate),
        nodes=None if math.isinf(most) else math.floor(most / per_node),
        period_s=None if best < ettr else _periods_s(given, optimal_s),
    )


class _Given(NamedTuple):
    """What the requirements are solved for; `rate`: of the job, per second."""

    ettr: float
    rate: float
    restart_s: float
    stall_s: float
    queue_s: float
    period_s: float | None

    def reached(self, **changed: float) -> float:
        """The ratio, with some inputs changed: at the period, or at the one that is optimal then."""
        one = self._replace(**changed)
        inputs = {
            "failures_per_s": one.rate, "restart_s": one.restart_s, "stall_s": one.stall_s, "queue_s": one.queue_s,
        }  # fmt: skip
        return best_ettr(**inputs) if one.period_s is None else renewal_ettr(**inputs, period_s=one.period_s)


class BlastRadius(msgspec.Struct, frozen=True, kw_only=True):
    """What one failing node costs a job of many: all of its nodes lose their work since the last checkpoint."""

    nodes: int
    failures_per_day: float
    lost_s_per_failure: float
    """Of each node: work since the last checkpoint, and the restart."""
    lost_node_hours_per_failure: float
    lost_node_hours_per_day: float
    """Grows with the square of the number of nodes."""


def blast_radius(
    *, nodes: int, failures_per_node_day: float, restart_s: float, period_s: float, stall_s: float = 0.0
) -> BlastRadius:
    """The mean time since the last checkpoint is exact for exponential failures: 1/λ − τ/(e^(λτ) − 1), which tends to
    τ/2 where failures are rare. Raises `UsageError` for negative arguments or a period of zero."""
    if nodes < 1 or not period_s > 0:
        raise UsageError(f"nodes={nodes} and period_s={period_s} must be above 0")
    _check(failures_per_node_day=failures_per_node_day, restart_s=restart_s, stall_s=stall_s)
    rate = failure_rate_per_s(nodes, failures_per_node_day)
    cycle_s = period_s + stall_s
    exposure = rate * cycle_s
    # The difference of two nearly equal terms loses its digits below.
    since_s = cycle_s / 2 if exposure < 1e-4 else 1 / rate - cycle_s / math.expm1(min(exposure, 700.0))
    lost_s = since_s + restart_s
    per_failure = nodes * lost_s / 3600
    return BlastRadius(
        nodes=nodes,
        failures_per_day=rate * 86_400,
        lost_s_per_failure=lost_s,
        lost_node_hours_per_failure=per_failure,
        lost_node_hours_per_day=per_failure * rate * 86_400,
    )


def unhealthy_probability(nodes: int, unhealthy_share: float) -> float:
    """The probability that a job of `nodes` has an unhealthy one among them, where `unhealthy_share` of the fleet is
    (paper, observation 2): 1 − (1 − p)^n. Raises `UsageError` for a share outside [0, 1] or negative nodes."""
    if nodes < 0 or not 0 <= unhealthy_share <= 1:
        raise UsageError(f"nodes={nodes} must be at least 0 and unhealthy_share={unhealthy_share} between 0 and 1")
    return 1.0 if unhealthy_share == 1 and nodes else -math.expm1(nodes * math.log1p(-min(unhealthy_share, 1 - 1e-16)))


def _optimal_share(exposure: float) -> float:
    """x of x + ln(1 − x) = −exposure, between 0 and 1."""
    return -math.expm1(-_optimal_logarithm(exposure))


def _optimal_logarithm(exposure: float) -> float:
    """y = −ln(1 − x), the root of e^(−y) + y − 1 = exposure: convex and increasing, so that Newton's steps from above
    never pass it."""
    first = math.sqrt(2 * exposure)
    if exposure < 1e-9:  # the terms below would cancel each other
        return first + first**2 / 6 + first**3 / 36
    y = exposure + min(1.0, first)
    for _ in range(_STEPS):
        step = (math.expm1(-y) + y - exposure) / -math.expm1(-y)
        y -= step
        if abs(step) <= 1e-15 * y:
            break
    return y


def _largest_rate(given: _Given) -> float:
    """Infinite where failures cost nothing; 0 where the stalls alone cost more than the ratio leaves."""
    if given.period_s is None and given.restart_s == given.stall_s == given.queue_s == 0:
        return math.inf
    if given.period_s is not None and given.period_s < given.ettr * (given.period_s + given.stall_s):
        return 0.0
    return _largest(lambda rate: given.reached(rate=rate) >= given.ettr, given.rate)


def _largest_stall_s(given: _Given) -> float | None:
    """Of the optimal period, where e^(−λu0)·(1 − x)/(1 + λq) is the ratio; at a period from e^(λτ) − 1."""
    rate, period_s = given.rate, given.period_s
    kept = given.ettr * math.exp(min(rate * given.restart_s, 700.0)) * (1 + rate * given.queue_s)
    if period_s is not None:
        return _at_least_zero(math.log1p(rate * period_s / kept) / rate - period_s)
    return None if kept > 1 else (-(1 - kept) - math.log(kept)) / rate


def _largest_restart_s(given: _Given) -> float | None:
    without = given.reached(restart_s=0.0)
    return None if without < given.ettr else math.log(without / given.ettr) / given.rate


def _periods_s(given: _Given, optimal_s: float) -> tuple[float, float]:
    def reached(period: float) -> bool:
        return given.reached(period_s=period) >= given.ettr

    longest = _largest(reached, max(optimal_s, 1e-9))
    if given.stall_s == 0:
        return 0.0, longest
    shortest = 1 / _largest(lambda inverse: reached(1 / inverse), 1 / optimal_s)
    return shortest, longest


def _largest(holds: Callable[[float], bool], start: float) -> float:
    """The largest value above 0 for which a condition holds that holds up to a value and not beyond; `start`: where the
    search begins."""
    low, high = 0.0, start
    for _ in range(_STEPS):
        if not holds(high):
            break
        low, high = high, 2 * high
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _at_least_zero(value: float) -> float | None:
    return value if value >= 0 else None


def _check(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0 or math.isinf(value):
            raise UsageError(f"{name}={value} must be a finite number of at least 0")
