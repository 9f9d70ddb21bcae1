"""Notices that sums of fp8 numbers did not fit: one warning of a process, and reports to the job.

The native side counts what this rank rounded and could not hold (`Stats.saturated`); how many values there were is
counted here, as the operations are called. It is looked at when the next such operation is called, at most ten times a
second, and when the communicator is closed: a sum is not made slower by it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from fireflyer.base.units import MS

__all__ = ["SATURATING", "Once", "SaturationWatch"]

logger = logging.getLogger(__name__)

SATURATING: Final = ("f8e4m3", "f8e5m2")
_PERIOD_NS: Final = 100 * MS

Tell = Callable[[int, int], None]
"""Saturated values, and values of all fp8 sums so far."""


class Once:
    """One warning of a process, however many communicators it has."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = False

    def first(self) -> bool:
        with self._lock:
            first, self._done = not self._done, True
            return first


_warning = Once()


class SaturationWatch:
    """Of one communicator. Thread-safe."""

    def __init__(
        self,
        rank: int,
        saturated: Callable[[], int],
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        warning: Once = _warning,
    ) -> None:
        self._rank = rank
        self._saturated = saturated
        self._clock_ns = clock_ns
        self._warning = warning
        self._lock = threading.Lock()
        self._values = 0
        self._looked_ns = 0
        self._told = (0, 0)
        self._tell: Tell | None = None

    def tell(self, tell: Tell) -> None:
        """Calls `tell` when it is noticed first, and with the last counts at the end. It neither blocks nor raises."""
        self._tell = tell

    def called(self, values: int) -> None:
        """A sum of so many values, over all ranks, is about to be started."""
        with self._lock:
            now_ns = self._clock_ns()
            if self._values and not self._told[0] and now_ns - self._looked_ns >= _PERIOD_NS:
                self._looked_ns = now_ns
                self._look()
            self._values += values

    def end(self) -> None:
        """All operations have ended. May be called again."""
        with self._lock:
            if self._values:
                self._look()

    def _look(self) -> None:
        saturated = self._saturated()
        counts = saturated, self._values
        if not saturated or counts == self._told:
            return
        if self._warning.first():
            logger.warning(
                "fp8_saturation=%d values=%d rank=%d: so many results of fp8 sums did not fit and were clipped or made "
                "infinite; scale the numbers down before the sum, or sum them in bf16",
                saturated,
                self._values,
                self._rank,
            )
        self._told = counts
        if self._tell is not None:
            self._tell(*counts)
