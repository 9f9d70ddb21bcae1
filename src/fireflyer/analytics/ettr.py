"""Effective training time ratio: what a job achieved, and what its failure rate and overheads let one expect.

ETTR is productive time over wall time. The expectation is that of Kokolis, Kuchnik et al., *Revisiting Reliability in
Large-Scale Machine Learning Research Clusters* (section II-D, equations 1 to 3 and appendix A):

    E[ETTR] ≳ (1 − λ·(u0 + Δt/2)) / (1 + (u0+q)/R + w/Δt + λ·q·(1 + w/Δt − Δt/(2R)))                          (1)

with the job's failure rate λ = nodes · r_f = 1/MTTF, restart overhead u0, checkpoint period Δt, stall per checkpoint w,
queue time q before each start and productive time R. It holds where u0 + Δt/2 is much smaller than the MTTF: there it
is within about 2 % of a simulation and of `renewal_ettr`, which is exact for exponential failures and long runs.
Outside (a demonstration that fails once a minute) the two part ways, and 0 means only "beyond the formula's range".

Times are seconds and rates per second, as floats: these are estimates, unlike the account's exact nanoseconds.
"""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec

from fireflyer.analytics.accounting import JobAccount
from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND

__all__ = [
    "FORMULA",
    "Ettr",
    "EttrInputs",
    "daly_young_interval_s",
    "ettr",
    "ettr_inputs",
    "expected_ettr",
    "expected_ettr_long_run",
    "expected_failures",
    "expected_of",
    "failure_rate_per_s",
    "filled_formula",
    "measured_ettr",
    "mttf_s",
    "renewal_ettr",
]

FORMULA = "E[ETTR] ≳ (1 − N·r_f·(u0 + Δt/2)) / (1 + (u0 + q)/R + w/Δt + N·r_f·q·(1 + w/Δt − Δt/(2R)))"
"""Formula 1, as reports show it."""
DAY_S = 86_400.0
VALID_SHARE_OF_MTTF = 0.1
"""Formula 1 is called applicable while u0 + Δt/2 is at most this share of the MTTF."""


def failure_rate_per_s(nodes: int, failures_per_node_day: float) -> float:
    """The job's failure rate, nodes · r_f, per second. Raises `UsageError` for negative arguments."""
    _require("nodes", nodes, at_least=0)
    _require("failures_per_node_day", failures_per_node_day, at_least=0)
    return nodes * failures_per_node_day / DAY_S


def mttf_s(nodes: int, failures_per_node_day: float) -> float:
    """Mean time to failure of a job, (nodes · r_f)⁻¹, in seconds; infinite without failures (paper, section II-D).

    With r_f = 6.5 per 1000 node-days: 16384 GPUs in nodes of eight give 1.80 h and 131072 give 0.225 h, as the paper
    projects; 1024 give 28.8 h (its measured 7.9 h does not lie on that line).
    """
    rate = failure_rate_per_s(nodes, failures_per_node_day)
    return math.inf if rate == 0 else 1 / rate


def daly_young_interval_s(*, stall_s: float, failures_per_s: float) -> float:
    """Δt* = √(2·w/λ), the nearly optimal checkpoint period (equation 3); infinite without failures."""
    _require("stall_s", stall_s, at_least=0)
    _require("failures_per_s", failures_per_s, at_least=0)
    return math.inf if failures_per_s == 0 else math.sqrt(2 * stall_s / failures_per_s)


def expected_ettr(
    *,
    failures_per_s: float,
    restart_s: float,
    period_s: float,
    stall_s: float,
    productive_s: float = math.inf,
    queue_s: float = 0.0,
) -> float:
    """Formula 1. Between 0 and 1; 0 where λ·(u0 + Δt/2) ≥ 1, which is beyond its range.

    `restart_s` is u0, `period_s` Δt (productive time between checkpoints), `stall_s` w, `productive_s` R, `queue_s` q.
    Raises `UsageError` for negative times or a period or productive time of zero.
    """
    for name, value in (("failures_per_s", failures_per_s), ("restart_s", restart_s), ("stall_s", stall_s)):
        _require(name, value, at_least=0)
    _require("queue_s", queue_s, at_least=0)
    if not period_s > 0 or not productive_s > 0:
        raise UsageError(f"period_s={period_s} and productive_s={productive_s} must be above 0")
    numerator = 1 - failures_per_s * (restart_s + period_s / 2)
    if numerator <= 0:
        return 0.0
    stalls = stall_s / period_s
    queueing = failures_per_s * queue_s * (1 + stalls - period_s / (2 * productive_s))
    return numerator / (1 + (restart_s + queue_s) / productive_s + stalls + queueing)


def expected_failures(
    *, failures_per_s: float, restart_s: float, period_s: float, stall_s: float, productive_s: float
) -> float:
    """E[N_f] of a run of `productive_s` that never queues (equation 5). Infinite where λ·(u0 + Δt/2) ≥ 1, which is
    beyond its range. Raises `UsageError` as `expected_ettr` does."""
    inputs = {"failures_per_s": failures_per_s, "restart_s": restart_s, "period_s": period_s, "stall_s": stall_s}
    ratio = expected_ettr(**inputs, productive_s=productive_s)
    return math.inf if ratio == 0 else failures_per_s * productive_s / ratio


def expected_ettr_long_run(*, failures_per_s: float, restart_s: float, period_s: float, stall_s: float) -> float:
    """Formula 2: formula 1 for a long run that never queues (R → ∞, q = 0)."""
    return expected_ettr(failures_per_s=failures_per_s, restart_s=restart_s, period_s=period_s, stall_s=stall_s)


def renewal_ettr(
    *, failures_per_s: float, restart_s: float, period_s: float, stall_s: float, queue_s: float = 0.0
) -> float:
    """The exact long-run ratio for exponential failures: Δt·λ / ((1 − e^(−λτ))·e^(λ(u0+τ))·(1 + λq)), τ = Δt + w.

    From renewal theory: each period ends a cycle with probability e^(−λτ), and every try begins with u0 exposed to
    failures. A wait of q in the mean, in which nothing fails, lengthens each attempt, which lasts 1/λ, by q. Holds for
    any MTTF, so it is the check on formula 1. Raises `UsageError` as `expected_ettr` does.
    """
    for name, value in (("failures_per_s", failures_per_s), ("restart_s", restart_s), ("stall_s", stall_s)):
        _require(name, value, at_least=0)
    _require("queue_s", queue_s, at_least=0)
    if not period_s > 0:
        raise UsageError(f"period_s={period_s} must be above 0")
    cycle_s = period_s + stall_s
    if failures_per_s == 0:
        return period_s / cycle_s
    exposure = failures_per_s * (restart_s + cycle_s)
    if exposure > 700:  # e^x leaves the range of a float
        return 0.0
    waiting = 1 + failures_per_s * queue_s
    return period_s * failures_per_s / (-math.expm1(-failures_per_s * cycle_s) * math.exp(exposure) * waiting)


class EttrInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of formula 1, measured on one job. Seconds."""

    failures: int
    failures_per_s: float
    """Failures over the job's wall time: with none, 0."""
    restart_s: float
    """u0: mean of the first start and of the restarts."""
    period_s: float
    """Δt: mean productive time between checkpoints."""
    stall_s: float
    """w: mean stall of a checkpoint."""
    productive_s: float
    """R."""
    queue_s: float = 0.0
    """q: nothing queues under a launcher."""


class Ettr(msgspec.Struct, frozen=True, kw_only=True):
    """Effective training time ratio of one job: measured, and expected by formula 1."""

    measured: float | None
    """None where the ranks reported nothing."""
    expected: float | None
    """Formula 1 with `inputs`; None where an input is unknown."""
    inputs: EttrInputs | None
    note: str
    """Reason why there is no expectation, or how far it can be trusted; one sentence."""


def measured_ettr(account: JobAccount) -> float | None:
    """Productive time over wall time; None where the ranks reported nothing or the job has no length."""
    if not account.reported or account.wall_ns <= 0:
        return None
    return account.parts.productive_ns / account.wall_ns


def ettr_inputs(account: JobAccount) -> EttrInputs | str:
    """The inputs of formula 1 measured on this job, or one sentence that says what is missing."""
    if not account.reported:
        return "no step was reported"
    if account.parts.productive_ns <= 0 or account.steps <= 0:
        return "no completed step was reported"
    period_steps = _mean_period_steps(account)
    if period_steps is None:
        return "no checkpoint was committed, so the checkpoint period is unknown"
    committed = sum(checkpoint.error is None for checkpoint in account.checkpoints)
    failures = len(account.failures)
    starts = 1 + sum(failure.restart_ns is not None for failure in account.failures)
    wall_s = account.wall_ns / SECOND
    productive_s = account.parts.productive_ns / SECOND
    return EttrInputs(
        failures=failures,
        failures_per_s=failures / wall_s,
        restart_s=(account.parts.startup_ns + account.parts.restart_ns) / SECOND / starts,
        period_s=period_steps * productive_s / account.steps,
        stall_s=account.parts.checkpoint_ns / SECOND / committed,
        productive_s=productive_s,
    )


def ettr(account: JobAccount) -> Ettr:
    """Measured beside computed."""
    measured = measured_ettr(account)
    inputs = ettr_inputs(account)
    if isinstance(inputs, str):
        return Ettr(measured=measured, expected=None, inputs=None, note=f"not computed: {inputs}")
    expected = expected_of(inputs)
    share = inputs.failures_per_s * (inputs.restart_s + inputs.period_s / 2)
    if inputs.failures == 0:
        note = "there was no failure, so the computed value contains overheads only"
    elif share <= VALID_SHARE_OF_MTTF:
        note = f"u0 + Δt/2 is {share:.1%} of the time between failures: within the formula's range"
    else:
        note = (
            f"u0 + Δt/2 is {share:.0%} of the time between failures; the formula assumes much less, "
            "so measured and computed may differ on a job this short"
        )
    return Ettr(measured=measured, expected=expected, inputs=inputs, note=note)


def expected_of(inputs: EttrInputs) -> float:
    """Formula 1 with the inputs of a job."""
    return expected_ettr(
        failures_per_s=inputs.failures_per_s,
        restart_s=inputs.restart_s,
        period_s=inputs.period_s,
        stall_s=inputs.stall_s,
        productive_s=inputs.productive_s,
        queue_s=inputs.queue_s,
    )


def filled_formula(inputs: EttrInputs) -> str:
    """`FORMULA` with numbers, N·r_f per second and times in seconds, and its value."""
    rate, u0, dt = inputs.failures_per_s, inputs.restart_s, inputs.period_s
    w, q, r = inputs.stall_s, inputs.queue_s, inputs.productive_s
    return (
        f"(1 − {rate:.4f}·({u0:.1f} + {dt:.2f}/2)) / (1 + ({u0:.1f} + {q:.1f})/{r:.1f} + {w:.3f}/{dt:.2f} + "
        f"{rate:.4f}·{q:.1f}·(1 + {w:.3f}/{dt:.2f} − {dt:.2f}/(2·{r:.1f}))) = {expected_of(inputs):.3f}"
    )


def _mean_period_steps(account: JobAccount) -> float | None:
    """Mean distance of consecutive committed checkpoints of one attempt, in steps; the first counts from its attempt's
    first step where it is the only one."""
    distances: list[int] = []
    by_attempt: dict[int, list[int]] = {}
    for checkpoint in account.checkpoints:
        if checkpoint.error is None:
            by_attempt.setdefault(checkpoint.attempt, []).append(checkpoint.step)
    for steps in by_attempt.values():
        ordered = sorted(set(steps))
        distances += [later - earlier for earlier, later in pairwise(ordered)]
    if distances:
        return sum(distances) / len(distances)
    first = min((steps[0] - account.first_step for steps in by_attempt.values()), default=0)
    return float(first) if first > 0 else None


def _require(name: str, value: float, *, at_least: float) -> None:
    if not value >= at_least:
        raise UsageError(f"{name}={value} must be at least {at_least}")
