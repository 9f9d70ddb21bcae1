"""When a save is due: after so many steps, after so much time, or after the time that loses least.

A job that fails every `mttf` in the mean, and that each save holds up for a *stall*, loses least with the period of
`analytics.reliability.planning.optimal_period_s`: the exact form of Daly and Young's √(2·stall·mttf). The stall is the
median of what the newest saves of this process have cost. What bounds the period from below is their duration, from
the snapshot to the end: a save that is in flight all the time competes with training, and the next one is skipped.

    nothing measured   the period for a stall of 1 s, at most the default of 5 minutes: the first save measures
    after each save    the period for the median stall, at least twice the median duration, and at least 1 s

Who calls what: `due` after each step; `began` or `skip` when a save was to begin; `measured` when one has ended that
training went on beside. Only rank 0 need be told what was measured: where a period is in time the others follow it.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import Final

import msgspec

from fireflyer.analytics.reliability.planning import optimal_period_s
from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND, format_duration, parse_duration

__all__ = ["AUTO", "DEFAULT_PERIOD_NS", "ChosenPeriod", "Periods", "Schedule", "choose_period", "periods_of"]

AUTO: Final = "auto"
"""In place of a period in time: the one that loses least."""
DEFAULT_PERIOD_NS: Final = 300 * SECOND
"""Where neither steps nor a time are given (that of the Fire-Flyer paper)."""
UNKNOWN_STALL_NS: Final = SECOND
LEAST_NS: Final = SECOND
LEAST_DURATIONS: Final = 2
"""A chosen period is at least so many durations of a save: for half of the time none is in flight."""
_SAMPLES: Final = 15
"""Saves whose median counts: conditions of storage and network change."""


class Periods(msgspec.Struct, frozen=True):
    """How often to save. With `mttf_ns`, the mean time to failure of the job, the period in time is chosen."""

    steps: int | None = None
    time_ns: int | None = None
    mttf_ns: int | None = None

    @property
    def by_time(self) -> bool:
        """Clocks decide, and no two ranks have the same one."""
        return self.time_ns is not None or self.mttf_ns is not None

    def __str__(self) -> str:
        parts = [] if self.steps is None else [f"every {self.steps} steps"]
        if self.time_ns is not None:
            parts.append(f"every {format_duration(self.time_ns)}")
        if self.mttf_ns is not None:
            parts.append(f"as often as loses least with a failure every {format_duration(self.mttf_ns)}")
        return ", and ".join(parts)


def periods_of(period_steps: int | None, period: str | None, mttf: str | None) -> Periods:
    """How often to save, of what people give: steps, a time ("10m") or "auto", and the mean time to failure ("8h") that
    "auto" needs. With neither steps nor a time: 5 minutes. Raises `UsageError`."""
    if period == AUTO and mttf is None:
        raise UsageError(
            'period="auto" needs mttf="8h" or so, the mean time until one of the job\'s nodes fails; '
            "`ff reliability mttf --gpus 1024` prints it for a failure rate"
        )
    if mttf is not None:
        if period != AUTO:
            raise UsageError(f'mttf={mttf!r} is for period="auto"; period is {period!r}')
        periods = Periods(period_steps, None, parse_duration(mttf))
    elif period is not None:
        periods = Periods(period_steps, parse_duration(period))
    else:
        periods = Periods(period_steps, DEFAULT_PERIOD_NS if period_steps is None else None)
    _check(periods)
    return periods


def _check(periods: Periods) -> None:
    for name, value in (("period_steps", periods.steps), ("period_ns", periods.time_ns)):
        if value is not None and value <= 0:
            raise UsageError(f"{name}={value} is not a period; give a positive number, or None for no such period")
    if periods.mttf_ns is not None and periods.mttf_ns <= 0:
        raise UsageError(f"mttf_ns={periods.mttf_ns} is no time between failures; it must be above 0")
    if periods.time_ns is not None and periods.mttf_ns is not None:
        raise UsageError("give a period in time, or the mean time to failure by which to choose it, and not both")


class ChosenPeriod(msgspec.Struct, frozen=True):
    """A period in time, and why it is this one."""

    period_ns: int
    """From the beginning of a save to that of the next: training, and the stall."""
    reason: str


def choose_period(mttf_ns: int, stall_ns: int, duration_ns: int) -> ChosenPeriod:
    """The period that loses least where a save stalls training for `stall_ns` and takes `duration_ns`."""
    best_s = optimal_period_s(stall_s=stall_ns / SECOND, failures_per_s=SECOND / mttf_ns)
    best_ns = round(best_s * SECOND) + stall_ns
    least_ns = max(LEAST_DURATIONS * duration_ns, LEAST_NS)
    stall, mttf = format_duration(stall_ns), format_duration(mttf_ns)
    reason = f"a save stalls training for {stall}, and the job fails every {mttf}"
    if best_ns >= least_ns:
        return ChosenPeriod(best_ns, reason)
    return ChosenPeriod(
        least_ns,
        f"{reason}: {format_duration(best_ns)} would lose least, but a save takes {format_duration(duration_ns)}",
    )


class Schedule:
    """When a save is due: at multiples of `periods.steps`, or when the period in time has passed since the last one
    began. With neither, saves happen only when asked for."""

    def __init__(self, periods: Periods, *, start_ns: int) -> None:
        _check(periods)
        self._periods = periods
        self._last_ns = start_ns
        self._last_step = 0
        self._due: tuple[int, int] | None = None
        """The step that was last due, and when."""
        self._stalls_ns: deque[int] = deque(maxlen=_SAMPLES)
        self._durations_ns: deque[int] = deque(maxlen=_SAMPLES)
        self._chosen = None if periods.mttf_ns is None else _before_the_first(periods.mttf_ns)
        self.skipped = 0

    @property
    def by_time(self) -> bool:
        return self._periods.by_time

    @property
    def periodic(self) -> bool:
        return self.by_time or self._periods.steps is not None

    @property
    def chosen(self) -> ChosenPeriod | None:
        """None: the period is not to be chosen."""
        return self._chosen

    def due(self, step: int, now_ns: int) -> bool:
        """After `step` steps are done. A step that was saved (or restored) is not due again."""
        if step <= self._last_step:
            return False
        by_steps = self._periods.steps is not None and step % self._periods.steps == 0
        period_ns = self._periods.time_ns if self._chosen is None else self._chosen.period_ns
        due = by_steps or (period_ns is not None and now_ns - self._last_ns >= period_ns)
        if due:
            self._due = step, now_ns
        return due

    def due_since_ns(self, step: int, now_ns: int) -> int:
        """When training began to wait for the save of a step that begins now: as it was said to be due, else now."""
        return self._due[1] if self._due is not None and self._due[0] == step and self._due[1] <= now_ns else now_ns

    def began(self, step: int, now_ns: int) -> None:
        self._last_step, self._last_ns = step, now_ns

    def skip(self, step: int) -> None:
        """A due save found another in flight: it is left out, and with a period in time tried at the next step."""
        self._last_step = step
        self.skipped += 1

    def measured(self, *, stall_ns: int, duration_ns: int) -> None:
        """A save has been committed that held training up for `stall_ns`, and took `duration_ns`."""
        if self._periods.mttf_ns is None:
            return
        self._stalls_ns.append(stall_ns)
        self._durations_ns.append(duration_ns)
        stall, duration = statistics.median(self._stalls_ns), statistics.median(self._durations_ns)
        self._chosen = choose_period(self._periods.mttf_ns, round(stall), round(duration))


def _before_the_first(mttf_ns: int) -> ChosenPeriod:
    guess = choose_period(mttf_ns, UNKNOWN_STALL_NS, 0)
    return ChosenPeriod(min(guess.period_ns, DEFAULT_PERIOD_NS), "no save has been measured yet")
