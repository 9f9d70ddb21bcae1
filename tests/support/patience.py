"""How long something may take on this machine, as busy as it is now.

Limits in tests are for a machine with a processor for everybody who wants one. Where there are twice as many, all of
them get there in twice the time, which says nothing of what is tested. And where the machine as a whole stands still
for a moment, as virtual ones do, everything takes so much longer: a thread notices, since it wakes up late.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from time import monotonic, sleep  # a test that replaces `time.sleep` does not mean this thread
from typing import Final

__all__ = ["allowed_s", "notice_stalls"]

NAP_S: Final = 0.02
STALL_S: Final = 0.1
"""Whoever wakes up so much too late did not get a processor."""
MOST_STALLS: Final = 1000

_stalls: deque[tuple[float, float]] = deque(maxlen=MOST_STALLS)
"""When each ended (monotonic), and how long it took."""
_awake_s: float | None = None
"""When the thread that notices them woke up last."""


def notice_stalls() -> None:
    """From now on, in this process."""
    threading.Thread(target=_notice, name="stalls", daemon=True).start()


def _notice() -> None:
    global _awake_s
    while True:
        now_s = monotonic()
        late_s = _late_s(now_s)
        if late_s > STALL_S:
            _stalls.append((now_s, late_s))
        _awake_s = now_s
        sleep(NAP_S)


def _late_s(now_s: float) -> float:
    return 0.0 if _awake_s is None else now_s - _awake_s - NAP_S


def allowed_s(limit_s: float) -> float:
    """The limit of what has just taken place, or begins now: longer by as much as more tasks want a processor than
    there are, and by the time in which this process stood still meanwhile."""
    now_s = monotonic()
    late_s = _late_s(now_s)  # who asks may have woken up before the thread
    busy_s = limit_s * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))
    stood_s = sum(took_s for ended_s, took_s in list(_stalls) if ended_s > now_s - 2 * busy_s)
    return busy_s + stood_s + (late_s if late_s > STALL_S else 0.0)
