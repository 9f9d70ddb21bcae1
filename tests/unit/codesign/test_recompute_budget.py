"""What is computed again so that activations fit a budget: against all selections."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.base.errors import UsageError
from fireflyer.codesign.parallel import budget as module
from fireflyer.codesign.parallel.budget import RecomputeChoice, choose_recompute

CHOICES = st.lists(
    st.builds(
        RecomputeChoice,
        name=st.sampled_from(["none", "operators", "blocks"]),
        kept_bytes=st.integers(0, 30),
        working_bytes=st.integers(0, 12),
        seconds=st.integers(0, 8).map(float),
    ),
    min_size=1,
    max_size=3,
)


def needed(chosen: tuple[RecomputeChoice, ...]) -> int:
    return sum(one.kept_bytes for one in chosen) + max(one.working_bytes for one in chosen)


@given(st.lists(CHOICES, min_size=1, max_size=5), st.integers(0, 120))
def test_the_selection_costs_as_little_as_the_best_of_all_that_fit(
    items: list[list[RecomputeChoice]], budget: int
) -> None:
    fitting = [chosen for chosen in itertools.product(*items) if needed(chosen) <= budget]
    if not fitting:
        least = min(needed(chosen) for chosen in itertools.product(*items))
        with pytest.raises(UsageError, match=f"need at least {least} bytes"):
            choose_recompute(items, budget)
        return
    found = choose_recompute(items, budget)
    best = min((sum(one.seconds for one in chosen), needed(chosen)) for chosen in fitting)
    assert (found.seconds, found.total_bytes) == best
    assert found.exact
    assert len(found.names) == len(items)


@given(st.lists(CHOICES, min_size=2, max_size=5), st.integers(20, 120))
def test_with_too_many_pairs_it_still_fits_and_says_that_it_may_not_be_the_best(
    items: list[list[RecomputeChoice]], budget: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_PAIRS", 1)
        try:
            found = choose_recompute(items, budget)
        except UsageError:
            return  # everything rounded up does not fit
    assert found.total_bytes <= budget


def test_where_every_selection_is_worth_its_bytes_it_is_found_in_bounded_time_within_the_budget() -> None:
    sizes = [(1 << 20) + 7**layer % 65_537 for layer in range(24)]
    items = [
        [
            RecomputeChoice(name="none", kept_bytes=size),
            RecomputeChoice(name="blocks", kept_bytes=0, working_bytes=size, seconds=float(size)),
        ]
        for size in sizes
    ]
    found = choose_recompute(items, 12 << 20)
    assert not found.exact
    assert found.total_bytes <= 12 << 20
    assert found.seconds <= sum(sizes) - (12 << 20) + 2 * max(sizes) + 24 * (12 << 20) / module.MAX_PAIRS


def test_more_memory_never_costs_more() -> None:
    block = [
        RecomputeChoice(name="none", kept_bytes=34),
        RecomputeChoice(name="operators", kept_bytes=20, working_bytes=14, seconds=1),
        RecomputeChoice(name="blocks", kept_bytes=2, working_bytes=34, seconds=9),
    ]
    costs = [choose_recompute([block] * 8, budget).seconds for budget in range(50, 300)]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == 0


@pytest.mark.parametrize("figures", [{"kept_bytes": -1}, {"kept_bytes": 1, "seconds": float("nan")}])
def test_figures_that_cannot_be_are_refused(figures: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="item 0"):
        choose_recompute([[RecomputeChoice(name="none", **figures)]], 10)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="item 0 has no choice"):
        choose_recompute([[]], 10)
