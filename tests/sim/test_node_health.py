"""The health loop under all faults of a platform: bad nodes are out or held, sound ones are not, and all comes back.

What must never be is checked at each commit: `tests.support.platform.health_chaos`.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.support.campaigns.known_seeds import search
from tests.support.campaigns.seeds import more_seeds
from tests.support.platform.health_chaos import dropped, health_chaos
from tests.support.platform.health_mutants import HEALTH_MUTANTS

from fireflyer.base.errors import FireflyerError

SEEDS = (1, 20)
MUTANT_SEEDS = 200
"""In which each mutant must be found."""


@pytest.mark.parametrize("seeds", [SEEDS, *more_seeds(3, 12, blocks=1, wide=1000, seed_s=2.5)])
def test_bad_nodes_are_taken_out_and_sound_ones_are_not_and_all_tasks_end(seeds: Sequence[int]) -> None:
    drained = held = refunded = 0
    for seed in seeds:
        try:
            oracle = health_chaos(seed).oracle
        except (AssertionError, FireflyerError) as error:
            raise AssertionError(f"health_chaos({seed}) of tests.support.platform.health_chaos: {error}") from error
        drained, held, refunded = drained + oracle.drained, held + oracle.held, refunded + oracle.refunded
    assert drained > 2, "hardly a node was drained"
    if seeds is SEEDS:
        assert held, "the breaker has held nobody"
        assert refunded, "no run had to leave a faulty node"


def test_what_a_check_says_once_is_not_lost_with_a_transaction() -> None:
    assert dropped(0).oracle.drained > 1


def attempt(seed: int) -> str | None:
    try:
        if seed < 3:
            dropped(seed)
        health_chaos(seed)
    except (AssertionError, FireflyerError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", HEALTH_MUTANTS)
def test_a_mutant_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    HEALTH_MUTANTS[name](monkeypatch)
    print(name, *search("health", name, MUTANT_SEEDS, attempt))
