"""Sequences of operations as generators that yield between two of them.

The real shell runs one to its end in a background thread and stops at the next yield when the save is given up; the
simulation lets other ranks run in between, and kills the rank at every operation in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Final, TypeVar

from fireflyer.base.errors import Aborted

__all__ = ["GIVEN_UP", "Steps", "run_steps"]

GIVEN_UP: Final = "the save was given up: a newer one began, or there was no time left"

T = TypeVar("T")
Steps = Generator[None, None, T]


def run_steps(steps: Steps[T], stopped: Callable[[], bool] = lambda: False) -> T:
    """Runs to the end. Raises `Aborted` between two operations when `stopped` says so."""
    while True:
        if stopped():
            steps.close()
            raise Aborted(GIVEN_UP)
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
