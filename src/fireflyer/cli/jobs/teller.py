"""Lines of progress of a recipe that several threads tell."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from fireflyer.base.units import SECOND

__all__ = ["teller"]


def teller(began_ns: int, *, quiet: bool) -> Callable[[str], None]:
    """Prints a line with the time since `began_ns` of the monotonic clock; nothing where `quiet`."""
    lock = threading.Lock()

    def say(line: str) -> None:
        if not quiet:
            with lock:
                print(f"{(time.monotonic_ns() - began_ns) / SECOND:6.1f} s  {line}", flush=True)

    return say
