"""ETTR as the reliability paper computes it, against its own figures and against exact renewal theory."""

from __future__ import annotations

import math
import random

import pytest
from tests.support.jobs.job_logs import Break, JobScript, make_log

from fireflyer.analytics.accounting import account
from fireflyer.analytics.ettr import (
    daly_young_interval_s,
    ettr,
    expected_ettr,
    expected_ettr_long_run,
    failure_rate_per_s,
    measured_ettr,
    mttf_s,
    renewal_ettr,
)
from fireflyer.base.errors import UsageError
from fireflyer.base.events import JobFinished, JobStarted, Logged
from fireflyer.base.units import MS, SECOND

RSC1 = 6.5e-3
HOUR_S = 3600.0


@pytest.mark.parametrize(("gpus", "hours"), [(1024, 28.85), (16384, 1.80), (131072, 0.225)])
def test_mttf_of_the_paper_line(gpus: int, hours: float) -> None:
    assert mttf_s(gpus // 8, RSC1) / HOUR_S == pytest.approx(hours, rel=2e-3)


def test_mttf_without_failures_is_infinite() -> None:
    assert mttf_s(8, 0.0) == math.inf
    assert daly_young_interval_s(stall_s=1, failures_per_s=0) == math.inf


@pytest.mark.parametrize(
    ("rate", "stall_s", "expected"),
    [(6.5e-3, 300, 0.740), (6.5e-3, 60, 0.858), (6.5e-3, 10, 0.9205), (1e-3, 300, 0.898)],
)
def test_12000_gpus_with_the_daly_young_period(rate: float, stall_s: float, expected: float) -> None:
    failures_per_s = failure_rate_per_s(1500, rate)
    period_s = daly_young_interval_s(stall_s=stall_s, failures_per_s=failures_per_s)
    value = expected_ettr_long_run(failures_per_s=failures_per_s, restart_s=300, period_s=period_s, stall_s=stall_s)
    assert value == pytest.approx(expected, abs=6e-4)
    if stall_s == 10:
        assert period_s == pytest.approx(421, abs=0.5)
        exact = renewal_ettr(failures_per_s=failures_per_s, restart_s=300, period_s=period_s, stall_s=stall_s)
        assert exact == pytest.approx(0.9215, abs=5e-4)  # the Monte Carlo value is .922 ± .001


@pytest.mark.parametrize(("restart_s", "expected"), [(60, 0.947), (600, 0.888)])
def test_restart_overhead_matters_as_much_as_the_stall(restart_s: float, expected: float) -> None:
    failures_per_s = failure_rate_per_s(1500, RSC1)
    period_s = daly_young_interval_s(stall_s=10, failures_per_s=failures_per_s)
    value = expected_ettr_long_run(failures_per_s=failures_per_s, restart_s=restart_s, period_s=period_s, stall_s=10)
    assert value == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("stall_s", "expected"), [(0, 0.958), (1, 0.955), (5, 0.942)])
def test_a_fire_flyer_of_1250_nodes_that_saves_every_five_minutes(stall_s: float, expected: float) -> None:
    value = expected_ettr_long_run(
        failures_per_s=failure_rate_per_s(1250, RSC1), restart_s=300, period_s=300, stall_s=stall_s
    )
    assert value == pytest.approx(expected, abs=1e-3)


def test_formula_1_tends_to_formula_2_for_long_runs_and_is_below_it_for_short_ones() -> None:
    common = {"failures_per_s": 1e-5, "restart_s": 300.0, "period_s": 600.0, "stall_s": 10.0}
    long_run = expected_ettr_long_run(**common)
    assert expected_ettr(**common, productive_s=1e12) == pytest.approx(long_run, rel=1e-6)
    assert expected_ettr(**common, productive_s=3600) < long_run
    queued = expected_ettr(**common, productive_s=1e6, queue_s=600)
    by_hand = (1 - 1e-5 * 600) / (1 + 900 / 1e6 + 10 / 600 + 1e-5 * 600 * (1 + 10 / 600 - 600 / 2e6))
    assert queued == pytest.approx(by_hand, rel=1e-12)


def test_renewal_formula_agrees_with_a_simulation_where_formula_1_no_longer_does() -> None:
    failures_per_s, restart_s, period_s, stall_s = 1 / 60, 8.0, 10.0, 0.5
    exact = renewal_ettr(failures_per_s=failures_per_s, restart_s=restart_s, period_s=period_s, stall_s=stall_s)
    assert _simulate(failures_per_s, restart_s, period_s, stall_s) == pytest.approx(exact, rel=0.02)
    formula = expected_ettr_long_run(
        failures_per_s=failures_per_s, restart_s=restart_s, period_s=period_s, stall_s=stall_s
    )
    assert abs(formula - exact) > 0.005


def _simulate(failures_per_s: float, restart_s: float, period_s: float, stall_s: float) -> float:
    rng = random.Random(7)
    periods, wall_s = 0, 0.0
    for _ in range(20_000):
        life_s = rng.expovariate(failures_per_s)
        wall_s += life_s
        periods += max(0, int((life_s - restart_s) // (period_s + stall_s)))
    return periods * period_s / wall_s


def test_beyond_its_range_formula_1_says_zero_and_nonsense_is_refused() -> None:
    assert expected_ettr(failures_per_s=1.0, restart_s=10, period_s=10, stall_s=0) == 0.0
    assert renewal_ettr(failures_per_s=1.0, restart_s=1e4, period_s=10, stall_s=0) == 0.0
    with pytest.raises(UsageError, match="stall_s=-1"):
        expected_ettr(failures_per_s=0, restart_s=0, period_s=1, stall_s=-1)
    with pytest.raises(UsageError, match="period_s=0"):
        expected_ettr(failures_per_s=0, restart_s=0, period_s=0, stall_s=1)
    with pytest.raises(UsageError, match="nan"):
        failure_rate_per_s(1, math.nan)


def test_inputs_come_from_the_log() -> None:
    script = JobScript(steps=100, checkpoint_every=10, breaks=(Break(after_step=54),))
    log, expected = make_log(script)
    result = account(log)
    verdict = ettr(result)
    assert verdict.measured == expected["productive_ns"] / result.wall_ns == measured_ettr(result)
    assert verdict.inputs is not None
    assert verdict.inputs.failures == 1
    assert verdict.inputs.failures_per_s == pytest.approx(SECOND / result.wall_ns)
    assert verdict.inputs.restart_s == pytest.approx((expected["startup_ns"] + expected["restart_ns"]) / 2 / SECOND)
    assert verdict.inputs.period_s == pytest.approx(10 * script.step_ns / SECOND)
    assert verdict.inputs.stall_s == pytest.approx(12 * MS / SECOND)
    assert verdict.expected is not None
    assert 0 < verdict.expected < 1


def test_a_job_without_reports_or_without_checkpoints_says_why_nothing_is_computed() -> None:
    silent = [Logged(0, JobStarted("j", (), 1, 1, 0, 0.0)), Logged(SECOND, JobFinished(0, "done"))]
    assert ettr(account(silent)).measured is None
    assert ettr(account(silent)).note == "not computed: no step was reported"
    unsaved = ettr(account(make_log(JobScript(steps=5))[0]))
    assert unsaved.expected is None
    assert "no checkpoint" in unsaved.note
