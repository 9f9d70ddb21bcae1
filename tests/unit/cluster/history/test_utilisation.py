"""Node-time in steps: what the steps have adds up to what the counters and the runs say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.platform.reports import MAX_STEPS, RunSpan, Span, utilisation
from fireflyer.cluster.core.platform.store.history import ClusterTotals


def totals(at_s: int, healthy: int, allocated: int, productive: int = 0) -> ClusterTotals:
    return ClusterTotals(at_s * SECOND, 0, healthy * SECOND, allocated * SECOND, productive * SECOND)


def test_counters_between_readings_grow_evenly_and_stand_still_outside() -> None:
    readings = [totals(10, 0, 0), totals(20, 40, 20), totals(30, 80, 20)]
    report = utilisation(Span.of(0, 40 * SECOND, 8), readings, [])
    assert [step.healthy for step in report.steps] == [0, 0, 20, 20, 20, 20, 0, 0]
    assert [step.allocated for step in report.steps] == [0, 0, 10, 10, 0, 0, 0, 0]
    assert [step.start_ns for step in report.steps] == [5 * SECOND * step for step in range(8)]


def test_counters_of_a_restored_store_are_never_counted_as_negative() -> None:
    report = utilisation(Span.of(0, 20 * SECOND, 2), [totals(0, 100, 90), totals(10, 50, 40), totals(20, 60, 40)], [])
    assert [step.healthy for step in report.steps] == [0, 10]


def test_too_many_runs_count_when_they_ended() -> None:
    readings = [totals(0, 0, 0, 0), totals(10, 0, 0, 0), totals(20, 0, 0, 30)]
    assert [step.productive for step in utilisation(Span.of(0, 20 * SECOND, 2), readings, None).steps] == [0, 30]


@given(
    st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 2000), st.floats(0, 1e6)), max_size=20),
    st.integers(1, 60),
    st.integers(100, 1900),
)
def test_the_productive_time_of_runs_is_spread_over_the_steps_that_they_cover(
    drawn: list[tuple[int, int, float]], steps: int, start: int
) -> None:
    runs = [RunSpan(begin, begin + length, amount) for begin, length, amount in drawn]
    report = utilisation(Span.of(start, start + 1000, steps), [], runs)
    inside = sum(
        run.productive * max(0, min(run.end_ns, start + 1000) - max(run.begin_ns, start)) / (run.end_ns - run.begin_ns)
        for run in runs
    )
    assert sum(step.productive for step in report.steps) == pytest.approx(inside, rel=1e-9, abs=1e-6)
    bounds = Span.of(start, start + 1000, steps).bounds()
    for step, begin, end in zip(report.steps, bounds[:-1], bounds[1:], strict=True):
        expected = sum(
            run.productive * max(0, min(run.end_ns, end) - max(run.begin_ns, begin)) / (run.end_ns - run.begin_ns)
            for run in runs
        )
        assert step.productive == pytest.approx(expected, rel=1e-9, abs=1e-6)


@pytest.mark.parametrize(("start", "end", "steps"), [(10, 10, 1), (20, 10, 1), (0, 10, 0), (0, 10**9, MAX_STEPS + 1)])
def test_a_span_that_is_none_is_refused(start: int, end: int, steps: int) -> None:
    with pytest.raises(UsageError):
        Span.of(start, end, steps)
