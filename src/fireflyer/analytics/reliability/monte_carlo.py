"""Runs of a job drawn at random: the oracle beside which the formulas are tested, and a spread that no formula gives.

A run is a chain of attempts. Each waits q, starts up for u0, and then alternates productive periods Δt and stalls w
until it is done or an exponentially distributed failure ends it. What is productive counts once its checkpoint is
written.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from fireflyer.base.errors import UsageError

__all__ = ["MAX_DRAWS", "Simulated", "simulated_ettr", "simulated_long_run"]

MAX_DRAWS = 50_000_000
"""Attempts of all runs together; a run that never gets on is stopped there."""
MAX_ATTEMPTS = 100_000
"""Of one run: each takes a pass over all runs."""


class Simulated(msgspec.Struct, frozen=True):
    """Mean over runs, with its standard error."""

    ettr: float
    standard_error: float
    failures: float
    """Mean of a run."""


def simulated_ettr(
    *,
    seed: int,
    runs: int,
    failures_per_s: float,
    restart_s: float,
    period_s: float,
    stall_s: float,
    productive_s: float,
    queue_s: float = 0.0,
) -> Simulated:
    """Runs of `productive_s` each; queue times are exponential with mean `queue_s`. The same seed gives the same runs.
    Raises `UsageError` where a run needs more than `MAX_ATTEMPTS` or all runs more than `MAX_DRAWS`, before
    anything is drawn where the mean says so, and where an argument makes no sense."""
    _check(runs, period_s, failures_per_s, restart_s, stall_s, queue_s)
    if not 0 < productive_s < math.inf:
        raise UsageError(f"productive_s={productive_s} must be above 0 and finite")
    saved_s = _saved_s(failures_per_s, restart_s, period_s, stall_s)
    if productive_s > saved_s * min(MAX_ATTEMPTS, MAX_DRAWS / runs):
        raise UsageError(
            f"an attempt saves {saved_s:.3g} s in the mean, and a run needs {productive_s:.3g} s: too many to draw; "
            "give fewer nodes, a shorter period or a shorter run"
        )
    generator = np.random.default_rng(seed)
    cycle_s = period_s + stall_s
    left = np.full(runs, float(productive_s))
    wall = np.zeros(runs)
    failures = np.zeros(runs, dtype=np.int64)
    active = np.arange(runs)
    drawn = attempts = 0
    while active.size:
        drawn, attempts = drawn + active.size, attempts + 1
        if drawn > MAX_DRAWS or attempts > MAX_ATTEMPTS:
            raise UsageError(f"runs do not end: after {drawn:,} attempts some have not ended; shorten the period")
        rest = left[active]
        needed = restart_s + rest + (np.ceil(rest / period_s - 1e-9) - 1) * stall_s
        until = _until_failure(generator, failures_per_s, active.size)
        done = until >= needed
        saved = np.floor(np.maximum(until - restart_s, 0) / cycle_s) * period_s
        wall[active] += np.where(done, needed, until) + generator.exponential(queue_s, active.size)
        left[active] = np.where(done, 0.0, rest - np.minimum(saved, rest))
        failures[active] += ~done
        active = active[~done]
    ratios = productive_s / wall
    return Simulated(float(ratios.mean()), _standard_error(ratios), float(failures.mean()))


def simulated_long_run(
    *, seed: int, attempts: int, failures_per_s: float, restart_s: float, period_s: float, stall_s: float
) -> Simulated:
    """R → ∞ and q = 0: the ratio of what `attempts` independent attempts save to the time that they take. The error is
    that of a ratio of means, by its linearisation. Raises `UsageError` as above, and without failures."""
    _check(attempts, period_s, failures_per_s, restart_s, stall_s, 0.0)
    if not failures_per_s > 0:
        raise UsageError("without failures an attempt never ends: failures_per_s must be above 0")
    generator = np.random.default_rng(seed)
    until = _until_failure(generator, failures_per_s, attempts)
    saved = np.floor(np.maximum(until - restart_s, 0) / (period_s + stall_s)) * period_s
    ratio = float(saved.sum() / until.sum())
    residuals = (saved - ratio * until) / until.mean()
    return Simulated(ratio, _standard_error(residuals), float(attempts))


def _saved_s(failures_per_s: float, restart_s: float, period_s: float, stall_s: float) -> float:
    """By one attempt of a run without end, in the mean: Σ Δt · P(it lives for u0 + k · (Δt + w))."""
    if failures_per_s == 0:
        return math.inf
    cycles = failures_per_s * (period_s + stall_s)
    return period_s * math.exp(-failures_per_s * restart_s - cycles) / -math.expm1(-cycles)


def _until_failure(generator: np.random.Generator, failures_per_s: float, count: int) -> np.ndarray:
    if failures_per_s == 0:
        return np.full(count, np.inf)
    return generator.exponential(1 / failures_per_s, count)


def _standard_error(samples: np.ndarray) -> float:
    return float(samples.std(ddof=1) / math.sqrt(samples.size)) if samples.size > 1 else math.inf


def _check(count: int, period_s: float, *at_least_zero: float) -> None:
    if not 1 <= count <= MAX_DRAWS:
        raise UsageError(f"the number of runs or attempts is {count}; it must lie between 1 and {MAX_DRAWS:,}")
    if not 0 < period_s < math.inf:
        raise UsageError(f"period_s={period_s} must be above 0 and finite")
    if any(not 0 <= value < math.inf for value in at_least_zero):
        raise UsageError("rates and times must be finite numbers of at least 0")
