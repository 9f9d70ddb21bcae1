"""Node-time of a replay adds up to the nanosecond, whatever the trace, the failures and the policy; every task
finishes, and nothing runs on a node that is down or that another has."""

from __future__ import annotations

import random

import pytest
from tests.support.replay.checked import POLICIES, check, random_settings, random_trace, replayed
from tests.support.replay.mutants import MUTANTS

from fireflyer.base.errors import InvariantViolation, UsageError
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.replay import replay

SEEDS = {"sharing": 20, "fifo": 60, "backfill": 60, "preemption": 60}


@pytest.mark.parametrize("policy", POLICIES)
def test_the_books_agree_with_what_an_observer_saw(policy: str) -> None:
    for seed in range(SEEDS[policy]):
        try:
            check(policy, seed)
        except BaseException as error:
            error.add_note(f"check({policy!r}, {seed})")
            raise


def test_all_policies_meet_the_same_failures() -> None:
    for seed in range(10):
        rng = random.Random(seed)
        settings = random_settings(rng)
        tasks = random_trace(rng, settings.cluster.nodes, settings.cluster.zones)
        met = [replayed(policy, tasks, settings)[1].failures for policy in ("fifo", "preemption", "sharing")]
        shared = min(len(one) for one in met)
        assert met[0][:shared] == met[1][:shared] == met[2][:shared]


def test_with_fifo_nobody_starts_before_one_that_waits_and_was_submitted_earlier() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        settings = random_settings(rng)
        tasks = random_trace(rng, settings.cluster.nodes, settings.cluster.zones)
        outcome, _ = replayed("fifo", tasks, settings)
        firsts = [life.first_start_ns or 0 for life in outcome.lives]
        assert firsts == sorted(firsts)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_planted_fault_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, plant = MUTANTS[mutant]
    plant(monkeypatch)
    monkeypatch.setattr(replay, "MAX_DRAIN_NS", 20 * 86400 * SECOND)
    with pytest.raises((AssertionError, InvariantViolation, UsageError)):
        check_all(policy)


def check_all(policy: str) -> None:
    for seed in range(60):
        check(policy, seed)
