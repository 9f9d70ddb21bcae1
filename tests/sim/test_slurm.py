"""The platform on Slurm under faults: no job is submitted twice, no task is lost or runs twice, nothing is left over.

Slurm is a model of slurmctld and its nodes (`tests.support.platform.slurm`), asked by the product's own loop, with the
commands and the output that it reads. What must never be is checked after everything that happens.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest
from tests.support.campaigns.known_seeds import search
from tests.support.campaigns.seeds import more_seeds
from tests.support.platform.slurm.chaos import came_back, led_on, lost_job, lost_node, slurm_chaos
from tests.support.platform.slurm.mutants import SLURM_MUTANTS

from fireflyer.base.errors import FireflyerError

SEEDS = range(1)
MUTANT_SEEDS = 200
"""In which each mutant must be found."""
LED_ON_SEEDS = 40
"""That history is short, and few of them have the second `sbatch` before the first is carried out."""


@pytest.mark.parametrize("seeds", [SEEDS, *more_seeds(1, 11, blocks=1, wide=2000, seed_s=1.2)])
def test_any_faults_end_with_all_tasks_ended_and_nothing_left_in_slurm(seeds: range) -> None:
    launched = preempted = stopped = 0
    for seed in seeds:
        try:
            oracle = slurm_chaos(seed).oracle
        except (AssertionError, FireflyerError) as error:
            raise AssertionError(f"slurm_chaos({seed}) of tests.support.platform.slurm.chaos: {error}") from error
        launched += len(oracle.launched)
        preempted += oracle.preempted
        stopped += oracle.stopped_in_slurm
    assert launched > 5 * len(seeds), "the faults are too heavy to show anything"
    assert len(seeds) < 10 or min(preempted, stopped) > 0, "nothing is preempted, or cancelled by its user"


def test_what_lives_on_where_slurm_does_not_see_it_ends_before_the_task_runs_again() -> None:
    for lose in (lost_node, lost_job):
        assert len(lose(0).oracle.launched) == 2, "the task was not run again"


def test_an_agent_whose_job_has_ended_is_told_to_go_when_it_is_heard_again() -> None:
    _, told = came_back(0)
    assert told, "it is refused in silence"


def test_a_manager_that_leads_on_does_not_submit_again_what_it_may_have_submitted() -> None:
    assert len(led_on(0).oracle.launched) == 1


def attempt(seed: int) -> str | None:
    try:
        if seed < 2:
            lost_node(seed)
            lost_job(seed)
        if seed < LED_ON_SEEDS:
            led_on(seed)
        slurm_chaos(seed)
    except (AssertionError, FireflyerError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SLURM_MUTANTS)
def test_a_mutant_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    SLURM_MUTANTS[name](monkeypatch)
    print(name, *search("slurm", name, MUTANT_SEEDS, attempt))


def history(seed: int) -> str:
    return hashlib.sha256(slurm_chaos(seed).world.trace.to_bytes()).hexdigest()


@pytest.mark.slow
def test_a_seed_has_one_history_whatever_the_hashes_of_python() -> None:
    code = "from tests.sim.test_slurm import history; print(history(1))"
    outputs = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
