"""What a launcher asks an agent for, decision by decision; how it fares under faults: `tests/sim/test_platform.py`."""

from __future__ import annotations

from fireflyer.base.units import SECOND
from fireflyer.cluster.core.guard_calls import (
    START_NS,
    Answered,
    Ask,
    Begin,
    Ended,
    GaveUp,
    GuardCalls,
    KillWanted,
    NotAnswered,
    Pause,
    PauseOver,
    Refused,
)
from fireflyer.cluster.schema.agent import GuardStatus

RUNNING = GuardStatus(token="0a.0.1", job="job", node=0, incarnation=1, state="running", age_ns=0)
STOPPING = GuardStatus(token="0a.0.1", job="job", node=0, incarnation=1, state="stopping", age_ns=0)
ENDED = GuardStatus(token="0a.0.1", job="job", node=0, incarnation=1, state="ended", age_ns=0, clean=True)


def begun() -> GuardCalls:
    calls = GuardCalls()
    assert calls.handle(0, Begin()) == [Ask("start")]
    return calls


def waiting() -> GuardCalls:
    calls = begun()
    assert calls.handle(0, Answered("start")) == [Ask("wait")]
    return calls


def test_a_guard_is_started_waited_for_and_forgotten() -> None:
    calls = waiting()
    assert calls.handle(0, Answered("wait", RUNNING)) == [Ask("wait")]
    assert calls.handle(0, Answered("wait", ENDED)) == [Ask("forget"), Ended(ENDED)]
    assert calls.handle(0, KillWanted()) == []


def test_a_start_is_asked_for_again_until_the_agent_has_been_away_for_too_long() -> None:
    calls = begun()
    assert calls.handle(START_NS - 1, NotAnswered("start", "away")) == [Pause("start")]
    assert calls.handle(START_NS - 1, PauseOver("start")) == [Ask("start")]
    assert calls.handle(START_NS, NotAnswered("start", "away")) == [GaveUp("away")]


def test_an_agent_that_is_away_meanwhile_is_waited_for_without_limit() -> None:
    calls = waiting()
    assert calls.handle(3600 * SECOND, NotAnswered("wait", "away")) == [Pause("wait")]
    assert calls.handle(3600 * SECOND, PauseOver("wait")) == [Ask("wait")]


def test_what_is_refused_for_good_is_given_up() -> None:
    assert begun().handle(0, Refused("start", "the run was stopped there")) == [GaveUp("the run was stopped there")]
    assert waiting().handle(0, Refused("wait", "no guard of it is known")) == [GaveUp("no guard of it is known")]


def test_one_that_is_to_be_killed_before_it_was_started_is_not_started_again() -> None:
    calls = begun()
    assert calls.handle(0, KillWanted()) == [Ask("stop")]
    assert calls.handle(0, NotAnswered("start", "lost")) == [Ask("wait")]
    assert calls.handle(0, Answered("stop")) == []
    assert calls.handle(0, Answered("wait", ENDED)) == [Ask("forget"), Ended(ENDED)]


def test_a_kill_during_the_pause_before_a_start_prevents_it() -> None:
    calls = begun()
    assert calls.handle(0, NotAnswered("start", "away")) == [Pause("start")]
    assert calls.handle(0, KillWanted()) == [Ask("stop")]
    assert calls.handle(0, PauseOver("start")) == [Ask("wait")]


def test_a_stop_is_asked_for_until_it_is_answered_and_again_where_the_agent_has_forgotten_it() -> None:
    calls = waiting()
    assert calls.handle(0, KillWanted()) == [Ask("stop")]
    assert calls.handle(0, KillWanted()) == []
    assert calls.handle(0, NotAnswered("stop", "away")) == [Pause("stop")]
    assert calls.stopping is True
    assert calls.handle(0, PauseOver("stop")) == [Ask("stop")]
    assert calls.handle(0, Answered("stop")) == []
    assert calls.handle(0, Answered("wait", STOPPING)) == [Ask("wait")]
    assert calls.handle(0, Answered("wait", RUNNING)) == [Ask("stop"), Ask("wait")]


def test_a_stop_that_is_under_way_at_the_end_is_still_answered() -> None:
    calls = waiting()
    calls.handle(0, KillWanted())
    calls.handle(0, Answered("wait", ENDED))
    assert calls.handle(0, NotAnswered("stop", "away")) == [Pause("stop")]
    assert calls.handle(0, PauseOver("stop")) == [Ask("stop")]
