"""The cheapest set of victims, beside all sets."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from fireflyer.cluster.core.scheduler.victims import Victim, cheapest


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), max_size=9), st.integers(0, 20))
def test_it_gains_enough_and_no_other_set_loses_less(losses_and_gains: list[tuple[int, int]], needed: int) -> None:
    victims = [Victim(number, loss, gains) for number, (loss, gains) in enumerate(losses_and_gains)]
    sets = [some for count in range(len(victims) + 1) for some in combinations(victims, count)]
    enough = [some for some in sets if sum(victim.gains for victim in some) >= needed]
    found = cheapest(victims, needed)
    if not enough:
        assert found is None
        return
    assert found is not None
    loss, tasks = found
    chosen = [victims[task] for task in tasks]
    assert sum(victim.gains for victim in chosen) >= needed
    assert sum(victim.loss for victim in chosen) == loss == min(sum(victim.loss for victim in some) for some in enough)
