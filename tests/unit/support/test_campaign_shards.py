"""The campaigns of one commit take a bounded time, and those of enough commits are all that fit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.support.campaigns.shards import parts


def test_parts_are_consecutive_and_leave_out_what_is_too_long() -> None:
    assert parts([30, 30, 500, 50, 20, 90], 100) == [[0, 1], [3, 4], [5]]


def test_without_campaigns_there_is_no_part() -> None:
    assert parts([], 100) == []


@given(st.lists(st.floats(0.1, 300), max_size=50))
def test_each_campaign_that_fits_is_in_one_part(costs_s: list[float]) -> None:
    found = parts(costs_s, 100)
    assert [position for part in found for position in part] == [p for p, cost in enumerate(costs_s) if cost <= 100]
    assert all(0 < sum(costs_s[position] for position in part) <= 100 + 1e-9 for part in found)
