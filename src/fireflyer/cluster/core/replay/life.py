"""What a run does with its time: it starts, then computes and saves in turn, and when it is ended early, what was not
saved is lost.

    start | interval | checkpoint | interval | checkpoint | … | rest          finished after the rest
                                                     interrupted: … | save    saves first, loses nothing
                                                     killed, or a node failed: loses what follows the last checkpoint
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND

__all__ = ["Costs", "Parts", "cut", "run_ns"]


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """What does not compute. The same for all tasks of a replay."""

    start_ns: int = 120 * SECOND
    """From the moment when a run has its nodes until its first step; of each run, the first one too."""
    interval_ns: int = 300 * SECOND
    """Computing between two checkpoints."""
    checkpoint_ns: int = 2 * SECOND
    """For which a checkpoint stops the computing."""
    save_ns: int = 10 * SECOND
    """From the interruption until the nodes are free."""

    def __post_init__(self) -> None:
        for name in ("start_ns", "checkpoint_ns", "save_ns"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} must not be negative, is {getattr(self, name)}")
        if self.interval_ns < SECOND:
            raise UsageError(f"interval_ns must be a second or more, is {self.interval_ns}")


class Parts(NamedTuple):
    """Where time went, in nanoseconds of a run, or in node-nanoseconds of a cluster."""

    start: int = 0
    productive: int = 0
    checkpoint: int = 0
    save: int = 0
    lost: int = 0

    def plus(self, other: Parts, times: int = 1) -> Parts:
        return Parts(*(mine + times * its for mine, its in zip(self, other, strict=True)))


def run_ns(work_ns: int, costs: Costs) -> int:
    """How long a run takes that is not ended early. Nothing is saved after the last step."""
    return costs.start_ns + work_ns + (work_ns - 1) // costs.interval_ns * costs.checkpoint_ns


def cut(elapsed_ns: int, work_ns: int, costs: Costs) -> tuple[Parts, int]:
    """What a run did in its first `elapsed_ns`, at most its length, with `work_ns` to do; and how much of the
    productive time is in no checkpoint."""
    computing_ns = elapsed_ns - costs.start_ns
    if computing_ns <= 0:
        return Parts(start=elapsed_ns), 0
    rounds, rest_ns = divmod(computing_ns, costs.interval_ns + costs.checkpoint_ns)
    saved_ns = rounds * costs.interval_ns
    rest_productive_ns = min(rest_ns, costs.interval_ns)
    productive_ns = min(saved_ns + rest_productive_ns, work_ns)
    parts = Parts(start=costs.start_ns, productive=productive_ns, checkpoint=computing_ns - productive_ns)
    return parts, productive_ns - min(saved_ns, productive_ns)
