"""How long something may take on this machine, as busy as it is now.

Limits in tests are for a machine with a processor for everybody who wants one. Where there are twice as many, all of
them get there in twice the time, which says nothing of what is tested.
"""

from __future__ import annotations

import os

__all__ = ["allowed_s"]


def allowed_s(limit_s: float) -> float:
    """The limit, longer by as much as more tasks want a processor than there are."""
    return limit_s * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))
