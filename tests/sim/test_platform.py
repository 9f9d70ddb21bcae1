"""The platform under faults: no node runs two gangs, no task is lost or runs twice, and in the end all have ended.

What must never be is checked after everything that happens: see `tests.support.platform.oracle`.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest
from tests.support.campaigns.known_seeds import search
from tests.support.campaigns.seeds import more_seeds
from tests.support.platform.chaos import chaos, copied_late, flooded, lost_slowly, unheard
from tests.support.platform.mutants import MUTANTS

from fireflyer.base.errors import FireflyerError

SEEDS = range(5)
MUTANT_SEEDS = 400
"""In which each mutant must be found."""


@pytest.mark.parametrize("seeds", [SEEDS, *more_seeds(5, 25, blocks=1, wide=4000, seed_s=0.75)])
def test_any_faults_leave_one_gang_on_each_node_and_end_with_all_tasks_ended(seeds: range) -> None:
    launched = preempted = 0
    for seed in seeds:
        try:
            oracle = chaos(seed).oracle
        except (AssertionError, FireflyerError) as error:
            raise AssertionError(f"chaos({seed}) of tests.support.platform.chaos: {error}") from error
        launched += len(oracle.launched)
        preempted += oracle.preempted
    assert launched > 5 * len(seeds), "the faults are too heavy to show anything"
    assert preempted > len(seeds) // 2, "nothing is interrupted"


def test_a_task_that_might_run_on_fewer_nodes_of_a_zone_is_not_passed() -> None:
    """Found by a campaign: the elastic task yielded to the head with nodes of two zones, and one behind it started."""
    assert chaos(2292).oracle.launched


def test_what_runs_on_without_its_agent_ends_before_the_task_runs_again() -> None:
    for seed in range(3):
        for lose in (lost_slowly, unheard):
            assert len(lose(seed).oracle.launched) > 1, "the task was not run again"


def test_rows_that_arrive_late_change_nothing_in_the_tables() -> None:
    for seed in range(2):
        assert copied_late(seed).oracle.takeovers > 5


def test_nobody_waits_for_longer_than_the_bound_whatever_comes() -> None:
    starvation = flooded(0).oracle.starvation
    assert starvation.passed > 2, "no task has waited for long enough"
    assert starvation.longest_turn_ns > 0, "nobody came before all others"


def attempt(seed: int) -> str | None:
    try:
        if seed < 3:
            lost_slowly(seed)
            unheard(seed)
            copied_late(seed)
            flooded(seed)
        chaos(seed)
    except (AssertionError, FireflyerError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    print(name, *search("platform", name, MUTANT_SEEDS, attempt))


def history(seed: int) -> str:
    return hashlib.sha256(chaos(seed).world.trace.to_bytes()).hexdigest()


@pytest.mark.slow
def test_a_seed_has_one_history_whatever_the_hashes_of_python() -> None:
    code = "from tests.sim.test_platform import history; print(history(5))"
    outputs = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
