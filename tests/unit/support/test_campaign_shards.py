"""The campaigns of one commit take a bounded time, those of enough commits are all that fit; slow files take turns."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.campaigns.late import patience_s
from tests.support.campaigns.shards import in_turn, parts
from tests.support.campaigns.slow_files import can_have_slow_tests

TESTS: Final = Path(__file__).parents[2]


def test_parts_are_consecutive_and_leave_out_what_is_too_long() -> None:
    assert parts([30, 30, 500, 50, 20, 90], 100) == [[0, 1], [3, 4], [5]]


def test_without_campaigns_there_is_no_part() -> None:
    assert parts([], 100) == []


@given(st.lists(st.floats(0.1, 300), max_size=50))
def test_each_campaign_that_fits_is_in_one_part(costs_s: list[float]) -> None:
    found = parts(costs_s, 100)
    assert [position for part in found for position in part] == [p for p, cost in enumerate(costs_s) if cost <= 100]
    assert all(0 < sum(costs_s[position] for position in part) <= 100 + 1e-9 for part in found)


@given(st.text(min_size=1, max_size=30), st.integers(0, 10_000), st.integers(1, 5))
def test_each_file_is_in_turn_with_one_of_so_many_commits_as_there_are_parts(path: str, first: int, turns: int) -> None:
    assert sum(in_turn(path, number, turns) for number in range(first, first + turns)) == 1


def test_the_turns_of_the_slow_files_are_of_like_size() -> None:
    slow = [path for path in TESTS.rglob("test_*.py") if can_have_slow_tests(path, TESTS)]
    names = [path.relative_to(TESTS.parent).as_posix() for path in slow]
    counts = [sum(in_turn(name, number, 3) for name in names) for number in range(3)]
    assert sum(counts) == len(names)
    assert min(counts) > len(names) / 5, counts


def test_what_changed_lately_may_begin_later_and_what_is_fast_at_any_time(request: pytest.FixtureRequest) -> None:
    item = request.node
    name = item.path.relative_to(TESTS.parent).as_posix()
    assert patience_s(item, frozenset()) == math.inf
    item.add_marker(pytest.mark.slow)
    assert patience_s(item, frozenset({"tests/another.py"})) == 0
    assert 0 < patience_s(item, frozenset({name})) < math.inf
