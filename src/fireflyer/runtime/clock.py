"""The real clock."""

from __future__ import annotations

import time

from fireflyer.base.ports import Clock

__all__ = ["MonotonicClock"]


class MonotonicClock(Clock):
    """Nanoseconds of CLOCK_MONOTONIC: never goes back; its zero is arbitrary and differs between machines."""

    def now_ns(self) -> int:
        return time.monotonic_ns()
