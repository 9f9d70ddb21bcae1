"""The schedules by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from fireflyer.base.errors import UsageError
from fireflyer.codesign.schedule.actions import Schedule
from fireflyer.codesign.schedule.dual_pipe import dual_pipe, dual_pipe_v
from fireflyer.codesign.schedule.orders import (
    gpipe,
    interleaved,
    interleaved_zero_bubble,
    one_f_one_b,
    zb_h1,
    zb_h2,
    zbv,
)
from fireflyer.codesign.schedule.program import Program, compile_schedule

__all__ = ["MAX_ACTIONS", "SCHEDULES", "ScheduleKind", "build_schedule", "compiled"]

MAX_ACTIONS: Final = 1 << 21
"""Passes of one schedule: some seconds of one processor and a gigabyte."""


class ScheduleKind(NamedTuple):
    """A family of schedules. `build(ranks, micro_batches, stages_per_rank)`; `stages_per_rank` is only for those that
    leave it open."""

    build: Callable[[int, int, int], Schedule]
    stages_per_rank: int | None
    """None: any number."""
    replicas: int
    """TokenCopies of the parameters that a pipeline keeps."""
    summary: str


def _plain(build: Callable[[int, int], Schedule]) -> Callable[[int, int, int], Schedule]:
    return lambda ranks, micro_batches, _: build(ranks, micro_batches)


SCHEDULES: Final[Mapping[str, ScheduleKind]] = {
    "gpipe": ScheduleKind(_plain(gpipe), 1, 1, "all forwards, then all backwards"),
    "1f1b": ScheduleKind(_plain(one_f_one_b), 1, 1, "forwards and backwards alternate"),
    "interleaved": ScheduleKind(interleaved, None, 1, "1F1B over several stages a rank"),
    "zb-h1": ScheduleKind(_plain(zb_h1), 1, 1, "1F1B with a split backward, memory of 1F1B (ZB1P)"),
    "zb-h2": ScheduleKind(_plain(zb_h2), 1, 1, "split backward, twice the memory of 1F1B (ZB2P)"),
    "interleaved-zb": ScheduleKind(interleaved_zero_bubble, None, 1, "interleaved with a split backward"),
    "zbv": ScheduleKind(_plain(zbv), 2, 1, "split backward, two stages a rank in a V"),
    "dualpipev": ScheduleKind(_plain(dual_pipe_v), 2, 1, "overlapped pairs, two stages a rank in a V"),
    "dualpipe": ScheduleKind(_plain(dual_pipe), 1, 2, "overlapped pairs, micro-batches in both directions"),
}


def build_schedule(name: str, ranks: int, micro_batches: int, stages_per_rank: int = 2) -> Schedule:
    """The schedule of that name. `stages_per_rank` counts for `interleaved` and `interleaved-zb` only.

    Raises `UsageError` for an unknown name, numbers below 1, more than `MAX_ACTIONS` passes, and numbers that the
    schedule does not allow.
    """
    kind = SCHEDULES.get(name)
    if kind is None:
        raise UsageError(f"there is no schedule {name!r}; use {', '.join(SCHEDULES)}")
    for what, number in (("ranks", ranks), ("micro_batches", micro_batches), ("stages_per_rank", stages_per_rank)):
        if number < 1:
            raise UsageError(f"{what} {number} of a schedule is not a positive number")
    actions = 3 * ranks * micro_batches * (kind.stages_per_rank or stages_per_rank)
    if actions > MAX_ACTIONS:
        raise UsageError(
            f"{name} of {ranks} ranks and {micro_batches} micro-batches has {actions} passes, more than {MAX_ACTIONS}; "
            "use fewer micro-batches: the bubble does not depend on their number"
        )
    return kind.build(ranks, micro_batches, stages_per_rank)


@functools.lru_cache(maxsize=32)
def compiled(name: str, ranks: int, micro_batches: int, stages_per_rank: int = 2) -> Program:
    """`build_schedule`, compiled and kept: to time one schedule with many costs. Raises as `build_schedule` does."""
    return compile_schedule(build_schedule(name, ranks, micro_batches, stages_per_rank))
