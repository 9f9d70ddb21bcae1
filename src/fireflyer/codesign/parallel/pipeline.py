"""Time and activations of pipeline schedules, in closed form: the one place where a plan asks about its schedule.

Formulas: zero-bubble (Qi et al. 2024) and DualPipe's README; with equal stages and F = 1, B = 2, W = 1 they give the
cells that a simulation of the schedules gives for p = 8, m = 32 (tested). Stages of unequal cost enter by the slowest
for the steady state and by the mean for the bubble.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fireflyer.codesign.parallel.plan import Schedule

__all__ = ["OVERLAPPING", "PipelineTime", "StageTimes", "micro_batches_in_flight", "pipeline_time"]

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


def micro_batches_in_flight(schedule: Schedule, stages: int, micro_batches: int, chunks: int, stage: int) -> float:
    """Micro-batches whose activations a rank of `stage` keeps at its peak, each of one of its pieces."""
    p, m = stages, micro_batches
    if schedule == "gpipe":
        return m
    if p == 1 or schedule == "1f1b":
        return min(m, p - stage)
    return {
        "interleaved": min(m * chunks, 2 * (p - stage - 1) + (chunks - 1) * p + 1),
        "zb-h1": min(m, p),
        "zbv": min(2 * m, 2 * p),
        "dualpipe": min(m, p + 1),
        "dualpipev": min(2 * m, 2 * p + 1),
    }[schedule]
