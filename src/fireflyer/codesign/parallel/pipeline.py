"""Time and activations of pipeline schedules: the one place where a plan asks about its schedule.

Time is in closed form; what is in flight is counted in the rows of the schedule. Formulas: zero-bubble (Qi et al. 2024)
and DualPipe's README; with equal stages and F = 1, B = 2, W = 1 they give the cells that a simulation of the schedules
gives for p = 8, m = 32 (tested). Stages of unequal cost enter by the slowest for the steady state and by the mean for
the bubble.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from fireflyer.codesign.parallel.plan import Schedule
from fireflyer.codesign.schedule import InFlight, build_schedule, in_flight

__all__ = ["OVERLAPPING", "PipelineTime", "StageTimes", "held_at_once", "pipeline_time"]

OVERLAPPING = ("dualpipe", "dualpipev")
"""Schedules that run the forward of one micro-batch with the backward of another, so that the communication of one is
hidden behind the computation of the other."""


class StageTimes(msgspec.Struct, frozen=True):
    """Seconds that one rank needs for one micro-batch, over all its pieces."""

    forward: float
    backward: float
    """Whole backward: for inputs and weights."""
    weight: float
    """Its part for weights."""
    overlapped: float
    """Forward of one and backward of another micro-batch together."""


class PipelineTime(msgspec.Struct, frozen=True):
    """Seconds of the pipeline of one step."""

    busy: float
    """Work of the slowest rank."""
    bubble: float
    """Its idle time."""
    slowest: int
    """Stage of the slowest rank."""


def pipeline_time(schedule: Schedule, micro_batches: int, chunks: int, times: Sequence[StageTimes]) -> PipelineTime:
    """Time of `micro_batches` through as many stages as `times` has."""
    p, m = len(times), micro_batches
    pairs = _overlapped_pairs(schedule, p, m)
    work = [pairs * one.overlapped + (m - pairs) * (one.forward + one.backward) for one in times]
    slowest = max(range(p), key=work.__getitem__)
    f, b = sum(one.forward for one in times) / p, sum(one.backward for one in times) / p
    w, both = sum(one.weight for one in times) / p, sum(one.overlapped for one in times) / p
    bubble = {
        "gpipe": (p - 1) * (f + b),
        "1f1b": (p - 1) * (f + b),
        "interleaved": (p - 1) * (f + b) / chunks,
        "zb-h1": (p - 1) * (f + b - 2 * w),
        "zbv": (p - 1) * (f + b - 2 * w) / 2,
        "dualpipe": (p / 2 - 1) * (both + b - 3 * w),
        "dualpipev": (p - 1) * (both + b - 3 * w) / 2,
    }[schedule]
    return PipelineTime(work[slowest], max(0.0, bubble), slowest)


def _overlapped_pairs(schedule: Schedule, p: int, m: int) -> float:
    """Pairs of forward and backward that run together; the rest of the micro-batches fills and drains the pipeline."""
    if schedule == "dualpipe":
        return max(0.0, m - p - 1)
    return max(0.0, m - p - 0.5) if schedule == "dualpipev" else 0.0


@lru_cache(maxsize=1024)
def held_at_once(
    schedule: Schedule, stages: int, micro_batches: int, chunks: int, *, overlapped: bool = True
) -> tuple[tuple[InFlight, ...], ...]:
    """What the ranks of each stage have in flight at a time, by their pieces in ascending order: without what is less,
    in all of them, than at another time. `overlapped`: as in `fireflyer.codesign.schedule.in_flight`. Raises
    `UsageError` for numbers that the schedule does not allow."""
    if schedule == "gpipe":
        return ((InFlight((micro_batches,), (0,)),),) * stages
    # With two micro-batches a rank a schedule has reached all that it has with more (a test).
    built = build_schedule(schedule, stages, min(micro_batches, 2 * stages), chunks)
    return tuple(_most(states) for states in in_flight(built, overlapped=overlapped))


def _most(states: Sequence[InFlight]) -> tuple[InFlight, ...]:
    kept: list[InFlight] = []
    for one in states:
        if not any(_covers(other, one) for other in kept):
            kept = [other for other in kept if not _covers(one, other)]
            kept.append(one)
    return tuple(kept)


def _covers(one: InFlight, other: InFlight) -> bool:
    counts = one.activations + one.gradients
    return all(map(operator.ge, counts, other.activations + other.gradients))
