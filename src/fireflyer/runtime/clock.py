"""The real clock."""

from __future__ import annotations

import time

from fireflyer.base.ports import Clock

__all__ = ["BootClock", "MonotonicClock"]


class MonotonicClock(Clock):
    """Nanoseconds of CLOCK_MONOTONIC: never goes back; its zero is arbitrary and differs between machines."""

    def now_ns(self) -> int:
        return time.monotonic_ns()


class BootClock(Clock):
    """Nanoseconds of CLOCK_BOOTTIME: as `MonotonicClock`, but it goes on while the machine is suspended. For promises
    to other machines, whose clocks go on meanwhile."""

    def now_ns(self) -> int:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
