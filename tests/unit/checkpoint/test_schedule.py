"""When a save is due: by steps, by time, and by what saves cost and how often the job fails."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.checkpoints.ranks import Ranks
from tests.support.checkpoints.states import Gate, manager, state_of

from fireflyer.analytics.ettr import daly_young_interval_s, renewal_ettr
from fireflyer.base.errors import NoSpace, UsageError
from fireflyer.base.units import MS, SECOND
from fireflyer.checkpoint import CheckpointManager
from fireflyer.checkpoint.core.schedule import (
    DEFAULT_PERIOD_NS,
    Periods,
    Schedule,
    choose_period,
    periods_of,
)
from fireflyer.runtime import RealDisk

HOUR = 3600 * SECOND


class HandClock:
    """Time passes where a test says so."""

    def __init__(self, now_ns: int = 0) -> None:
        self.time_ns = now_ns

    def now_ns(self) -> int:
        return self.time_ns


def chosen_ns(schedule: Schedule) -> int:
    assert schedule.chosen is not None
    return schedule.chosen.period_ns


# The formula.


@given(
    mttf_s=st.floats(30, 3e7), stall_ns=st.integers(0, 100 * SECOND), duration_ns=st.integers(0, 1000 * SECOND),
    factor=st.floats(0.02, 50),
)  # fmt: skip
def test_no_period_that_is_long_enough_for_a_save_loses_less_than_the_chosen_one(
    mttf_s: float, stall_ns: int, duration_ns: int, factor: float
) -> None:
    chosen = choose_period(round(mttf_s * SECOND), stall_ns, duration_ns).period_ns
    least_ns = max(2 * duration_ns, SECOND)
    assert chosen >= least_ns
    assert chosen > stall_ns, "some of it is training"

    def lost(period_ns: float) -> float:
        training_s = (period_ns - stall_ns) / SECOND
        inputs = {"failures_per_s": 1 / mttf_s, "restart_s": 0.0, "stall_s": stall_ns / SECOND}
        return 1 - renewal_ettr(**inputs, period_s=training_s)

    other = max(float(least_ns), stall_ns + 1.0, chosen * factor)
    assert lost(chosen) <= lost(other) + 1e-9


@pytest.mark.parametrize("mttf_s", [30, 300, 10_000])
@pytest.mark.parametrize("stall_s", [1, 10, 60])
def test_a_little_more_or_less_than_the_chosen_period_loses_more(mttf_s: int, stall_s: int) -> None:
    """A period is from the beginning of a save to that of the next: what is left of it is training."""
    chosen_s = choose_period(mttf_s * SECOND, stall_s * SECOND, 0).period_ns / SECOND
    lost = [
        1 - renewal_ettr(failures_per_s=1 / mttf_s, restart_s=0.0, period_s=period_s - stall_s, stall_s=stall_s)
        for period_s in (0.99 * chosen_s, chosen_s, 1.01 * chosen_s)
    ]
    assert lost[1] < min(lost[0], lost[2])


@given(stall_ns=st.integers(MS, 10 * SECOND))
def test_where_failures_are_rare_the_chosen_period_is_that_of_daly_and_young(stall_ns: int) -> None:
    chosen = choose_period(10_000 * HOUR, stall_ns, 0)
    expected = daly_young_interval_s(stall_s=stall_ns / SECOND, failures_per_s=SECOND / (10_000 * HOUR))
    assert chosen.period_ns == pytest.approx(expected * SECOND, rel=2e-3)


def test_a_save_that_takes_long_makes_the_period_longer_and_the_reason_says_so() -> None:
    chosen = choose_period(HOUR, 10 * MS, 60 * SECOND)
    assert chosen.period_ns == 120 * SECOND
    assert chosen.reason == (
        "a save stalls training for 10 ms, and the job fails every 1 h 00 min: "
        "8.5 s would lose least, but a save takes 1 min 00 s"
    )
    assert choose_period(HOUR, 0, 0).period_ns == SECOND


# The schedule.


def test_steps_and_times_are_both_kept() -> None:
    schedule = Schedule(Periods(5, 100), start_ns=0)
    assert [step for step in range(1, 12) if schedule.due(step, 0)] == [5, 10]
    assert schedule.due(3, 100)
    schedule.began(3, 100)
    assert not schedule.due(3, 500), "a step that was saved is not due again"
    assert not schedule.due(4, 199)
    assert schedule.due(4, 200)


def test_before_a_save_was_measured_the_first_is_due_soon() -> None:
    assert chosen_ns(Schedule(Periods(mttf_ns=8 * HOUR), start_ns=0)) == pytest.approx(240 * SECOND, rel=0.01)
    assert chosen_ns(Schedule(Periods(mttf_ns=1000 * HOUR), start_ns=0)) == DEFAULT_PERIOD_NS
    assert chosen_ns(Schedule(Periods(mttf_ns=8 * SECOND), start_ns=0)) < 5 * SECOND


def test_one_slow_save_does_not_change_the_period_and_slow_ones_do() -> None:
    schedule = Schedule(Periods(mttf_ns=8 * HOUR), start_ns=0)
    for _ in range(3):
        schedule.measured(stall_ns=500 * MS, duration_ns=2 * SECOND)
    usual = chosen_ns(schedule)
    assert usual == choose_period(8 * HOUR, 500 * MS, 2 * SECOND).period_ns
    schedule.measured(stall_ns=90 * SECOND, duration_ns=900 * SECOND)
    assert chosen_ns(schedule) == usual
    for _ in range(15):
        schedule.measured(stall_ns=2000 * MS, duration_ns=8 * SECOND)
    assert chosen_ns(schedule) == choose_period(8 * HOUR, 2 * SECOND, 8 * SECOND).period_ns


def test_a_given_period_is_not_changed_by_what_saves_cost() -> None:
    schedule = Schedule(Periods(None, 100), start_ns=0)
    schedule.measured(stall_ns=SECOND, duration_ns=SECOND)
    assert schedule.chosen is None
    assert schedule.due(1, 100)


# What people write.


@pytest.mark.parametrize(
    ("given", "periods", "text"),
    [
        ((None, None, None), Periods(None, 300 * SECOND), "every 5 min 00 s"),
        ((100, None, None), Periods(100), "every 100 steps"),
        ((None, "90s", None), Periods(None, 90 * SECOND), "every 1 min 30 s"),
        ((7, "10m", None), Periods(7, 600 * SECOND), "every 7 steps, and every 10 min 00 s"),
        ((None, "auto", "8h"), Periods(None, None, 8 * HOUR),
         "as often as loses least with a failure every 8 h 00 min"),
    ],
)  # fmt: skip
def test_what_is_given_says_how_often(given: tuple[Any, Any, Any], periods: Periods, text: str) -> None:
    assert periods_of(*given) == periods
    assert str(periods) == text


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ((None, "auto", None), 'period="auto" needs mttf="8h" or so'),
        ((None, "automatic", None), "duration 'automatic' is not understood"),
        ((None, None, "8h"), "mttf='8h' is for period=\"auto\"; period is None"),
        ((None, "5m", "8h"), "mttf='8h' is for period=\"auto\"; period is '5m'"),
        ((None, "auto", "0s"), "mttf_ns=0 is no time between failures"),
        ((None, "auto", "eight"), "duration 'eight' is not understood"),
        ((0, None, None), "period_steps=0 is not a period"),
        ((None, "0s", None), "period_ns=0 is not a period"),
    ],
)
def test_what_makes_no_sense_is_one_line(given: tuple[Any, Any, Any], line: str) -> None:
    with pytest.raises(UsageError) as error:
        periods_of(*given)
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)


def test_a_period_in_time_and_one_to_be_chosen_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="and not both"):
        Schedule(Periods(None, 5, 5), start_ns=0)


# The manager measures.


def save_slowly(
    ours: CheckpointManager, clock: HandClock, disk: Gate, step: int, *, stall_ns: int, more_ns: int
) -> None:
    """A save that is due now, for which training waits `stall_ns`, and that is written in `more_ns` after that."""
    disk.reached.clear()
    disk.open_gate.clear()
    assert ours.due(step, clock.now_ns())
    clock.time_ns += stall_ns  # collects the state, which training waits for
    handle = ours.save(step, state_of(step))
    assert disk.reached.wait(60)
    clock.time_ns += more_ns
    disk.open_gate.set()
    handle.result()
    ours.wait()


def test_a_manager_chooses_the_period_by_what_its_saves_have_cost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock, disk = HandClock(), Gate()
    with caplog.at_level(logging.INFO), manager(tmp_path, disk=disk, clock=clock, mttf_ns=8 * HOUR) as ours:
        assert not ours.due(1, clock.now_ns())
        clock.time_ns = 400 * SECOND
        save_slowly(ours, clock, disk, 2, stall_ns=3 * SECOND, more_ns=20 * SECOND)
        expected = choose_period(8 * HOUR, 3 * SECOND, 23 * SECOND)
        began_ns = 403 * SECOND
        assert not ours.due(3, began_ns + expected.period_ns - 1)
        assert ours.due(3, began_ns + expected.period_ns)
        assert f"reason={expected.reason}" in caplog.text
        clock.time_ns = 2000 * SECOND
        save_slowly(ours, clock, disk, 4, stall_ns=3 * SECOND, more_ns=1000 * SECOND)
        longer_ns = 2 * (23 + 1003) // 2 * SECOND
        assert not ours.due(5, 2003 * SECOND + longer_ns - 1), "twice the median duration of a save"
        assert ours.due(5, 2003 * SECOND + longer_ns)


class Full(RealDisk):
    """A disk without room for another directory of a checkpoint."""

    def mkdir(self, path: str) -> None:
        if "/.tmp-" in path:
            raise NoSpace("no space left on the device")
        super().mkdir(path)


def test_a_save_that_blocks_or_fails_measures_nothing(tmp_path: Path) -> None:
    clock = HandClock()
    for disk, blocking in ((RealDisk(), True), (Full(), False)):
        with manager(tmp_path, disk=disk, clock=clock, mttf_ns=8 * HOUR) as ours:
            before = ours._schedule.chosen
            ours.save(1, state_of(1), blocking=blocking).wait()
            ours.wait()
            ours.due(2, clock.now_ns())
            assert ours._schedule.chosen == before


def test_rank_0_decides_for_all_whatever_the_others_have_measured(tmp_path: Path) -> None:
    clock, disk = HandClock(400 * SECOND), Gate()
    disk.open_gate.set()
    ranks = Ranks(str(tmp_path), 2, disk, clock=clock, mttf_ns=8 * HOUR)
    clock.time_ns = 800 * SECOND
    asked_ns = (800 * SECOND, 780 * SECOND)  # rank 1 finds that it has waited for 20 s
    assert ranks.together(lambda ours: ours.due(1, asked_ns[ours.rank])) == [True, True]
    ranks.together(lambda ours: ours.save(1, state_of(1)).result())
    ranks.together(lambda ours: ours.wait())
    early_ns, late_ns = 800 * SECOND, 802 * SECOND
    assert ranks.together(lambda ours: ours.due(2, early_ns + ours.rank * HOUR)) == [False, False]
    assert ranks.together(lambda ours: ours.due(2, late_ns)) == [True, True]
    assert not ranks.managers[1].due_here(2, late_ns), "by what it has measured itself"
    ranks.close()
