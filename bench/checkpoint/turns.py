"""What one save or load took."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Turn", "timed"]


class Turn(NamedTuple):
    elapsed_s: float
    processor_s: float
    """Of this process, with the kernel's in its threads."""
    stall_s: float = 0.0


def timed(work: Callable[[], object]) -> Turn:
    """A number that `work` returns is for how many seconds it held its caller up."""
    begin, used = time.perf_counter(), time.process_time()
    stall_s = work()
    elapsed_s, processor_s = time.perf_counter() - begin, time.process_time() - used
    return Turn(elapsed_s, processor_s, stall_s if isinstance(stall_s, float) else 0.0)
