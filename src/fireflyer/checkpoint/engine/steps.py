"""Sequences of operations as generators that yield between two of them.

The real shell runs one to its end in a background thread and stops at the next yield when the save is given up; the
simulation lets other ranks run in between, and kills the rank at every operation in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

from fireflyer.base.errors import Aborted

__all__ = ["Steps", "run_steps"]

T = TypeVar("T")
Steps = Generator[None, None, T]


def run_steps(steps: Steps[T], stopped: Callable[[], bool] = lambda: False) -> T:
    """Runs to the end. Raises `Aborted` between two operations when `stopped` says so."""
    while True:
        if stopped():
            steps.close()
            raise Aborted("the save was given up because a newer one began")
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
