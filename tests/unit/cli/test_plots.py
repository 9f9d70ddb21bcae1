"""Curves as lines of text: where a value is, how high it is, and where there is none."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.cli.plots import heads_line, plot_line, resampled


def line(points: list[tuple[float, float]], cells: int, low: float = 0, high: float = 7) -> str:
    return plot_line(points, begin=0, end=cells, low=low, high=high, cells=cells)


def test_each_height_has_its_character() -> None:
    assert line([(number + 0.5, float(number)) for number in range(8)], 8) == "▁▂▃▄▅▆▇█"
    assert line([(0.5, -9.0), (1.5, 99.0)], 2) == "▁█", "what is outside of the scale is at its end"
    assert line([(0.5, 3.0), (1.5, 3.0)], 2, low=3, high=3) == "▁▁", "a curve without heights"


def test_a_cell_has_the_mean_of_its_points_and_of_a_step_that_was_done_twice_the_last_loss() -> None:
    assert resampled([(0.2, 1.0), (0.7, 3.0), (1.5, 9.0)], 0, 2, 2) == [2.0, 9.0]
    assert resampled([(0.5, 1.0), (1.5, 2.0), (0.5, math.nan), (1.5, 5.0)], 0, 2, 2) == [1.0, 5.0]


def test_between_two_points_lies_a_line_and_outside_of_them_nothing() -> None:
    assert resampled([(1.5, 1.0), (4.5, 4.0)], 0, 6, 6) == [None, 1.0, 2.0, 3.0, 4.0, None]
    assert line([(2.5, 7.0)], 5) == "  █  "
    assert line([], 3) == "   "


@given(points=st.lists(st.tuples(st.floats(0, 50), st.floats(-1e6, 1e6)), min_size=1), cells=st.integers(1, 90))
def test_no_cell_is_above_or_below_all_points(points: list[tuple[float, float]], cells: int) -> None:
    found = [value for value in resampled(points, 0, 50, cells) if value is not None]
    assert found
    values = [y for _, y in points]
    slack = 1e-9 * max(1.0, *map(abs, values))
    assert min(values) - slack <= min(found) <= max(found) <= max(values) + slack
    assert len(plot_line(points, begin=0, end=50, low=0, high=1, cells=cells)) == cells


@pytest.mark.parametrize(("at", "cell"), [(0.0, 0), (9.9, 9), (10.0, 9), (55.0, 9), (4.5, 4)])
def test_a_mark_is_above_its_cell(at: float, cell: int) -> None:
    assert heads_line([(at, "1")], begin=0, end=10, cells=10).index("1") == cell
