"""The interval of paired differences, and the verdict."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fireflyer.base.errors import UsageError
from fireflyer.recipes.trainer.core.paired import judge, paired_result, t_quantile

LOSSES = st.floats(min_value=0.5, max_value=10, allow_nan=False)
PAIRS = st.lists(st.tuples(LOSSES, LOSSES), min_size=2, max_size=12)


@given(st.floats(0.5, 0.9995), st.integers(1, 63))
def test_quantiles_are_those_of_student(probability: float, degrees: int) -> None:
    assert t_quantile(probability, degrees) == pytest.approx(stats.t.ppf(probability, degrees), rel=1e-7, abs=1e-7)


@given(PAIRS, st.sampled_from([0.9, 0.95, 0.99]))
def test_the_interval_is_that_of_a_t_test_of_the_differences(
    pairs: list[tuple[float, float]], confidence: float
) -> None:
    baseline, technique = zip(*pairs, strict=True)
    result = paired_result(baseline, technique, bound=0.0025, confidence=confidence)
    differences = [after / before - 1 for before, after in pairs]
    spread = stats.sem(differences)
    if spread > 1e-9:
        low, high = stats.t.interval(confidence, len(pairs) - 1, loc=result.mean, scale=spread)
        assert (result.low, result.high) == pytest.approx((low, high), rel=1e-6, abs=1e-9)
    assert result.low <= result.mean <= result.high
    assert result.mean == pytest.approx(sum(differences) / len(pairs), abs=1e-12)


@given(PAIRS, st.floats(0.1, 8))
def test_the_unit_of_the_loss_does_not_matter(pairs: list[tuple[float, float]], scale: float) -> None:
    baseline, technique = zip(*pairs, strict=True)
    result = paired_result(baseline, technique, bound=0.01)
    scaled = paired_result([one * scale for one in baseline], [one * scale for one in technique], bound=0.01)
    assert scaled.mean == pytest.approx(result.mean, abs=1e-9)
    assert scaled.high == pytest.approx(result.high, abs=1e-9 + 1e-9 * abs(result.high))


def test_what_the_seed_does_to_both_cancels() -> None:
    baseline = [2.0, 3.0, 4.0, 2.5]
    result = paired_result(baseline, [one * 0.99 for one in baseline], bound=0.0025)
    assert result.verdict == "better"
    assert result.high - result.low < 1e-12, "every pair differs by the same share"


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.002, 0.002, "within the bound"),
        (0.0001, 0.0002, "within the bound"),
        (-0.004, -0.001, "better"),
        (0.001, 0.004, "worse"),
        (-0.004, 0.001, "not decided"),
        (-0.1, 0.1, "not decided"),
    ],
)
def test_the_verdict_is_that_of_the_interval(low: float, high: float, verdict: str) -> None:
    assert judge(low, high, 0.0025) == verdict


@given(st.floats(-1, 1), st.floats(0, 1), st.floats(0, 0.5))
def test_better_and_worse_change_places_with_the_two_sides(low: float, width: float, bound: float) -> None:
    mirrored = {"better": "worse", "worse": "better"}
    verdict = judge(low, low + width, bound)
    assert judge(-low - width, -low, bound) == mirrored.get(verdict, verdict)


@pytest.mark.parametrize("losses", [[1.0], [1.0, math.nan], [1.0, math.inf], [1.0, 0.0]])
def test_a_run_that_diverged_and_a_single_pair_cannot_be_compared(losses: list[float]) -> None:
    with pytest.raises(UsageError, match=r"cannot be compared|at least two pairs"):
        paired_result(losses, losses, bound=0.0025)
