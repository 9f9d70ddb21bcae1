"""The supervisor's side of its lease: it asks the launcher, and tells its guard until when it may run."""

from __future__ import annotations

import os
import time

from fireflyer.base.units import SECOND
from fireflyer.runtime.processes.guard import LEASE_FD

__all__ = ["Lease"]

_TRIES = 10
"""Renewals are asked for so often in the time of one lease."""


class Lease:
    """`lease_ns` 0: without limit. Times are of CLOCK_BOOTTIME, as the guard counts them."""

    def __init__(self, lease_ns: int) -> None:
        descriptor = os.environ.pop(LEASE_FD, "")  # ranks inherit the environment, and are not to renew it
        self._fd = int(descriptor) if descriptor.isdigit() else -1
        if self._fd >= 0:
            os.set_inheritable(self._fd, False)
        self._lease_ns = lease_ns

    @property
    def limited(self) -> bool:
        return self._lease_ns > 0 and self._fd >= 0

    @property
    def period_s(self) -> float:
        return self._lease_ns / SECOND / _TRIES

    def now_ns(self) -> int:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def granted(self, asked_ns: int) -> None:
        """The launcher has answered what was asked at `asked_ns`: from then on the lease counts."""
        if self.limited:
            os.write(self._fd, b"%d\n" % (asked_ns + self._lease_ns))
