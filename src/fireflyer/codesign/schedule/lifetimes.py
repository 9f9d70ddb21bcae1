"""When a rank is done with what it keeps: activations of micro-batches, and gradients that still grow."""

from __future__ import annotations

from collections.abc import Sequence

from fireflyer.base.errors import UsageError
from fireflyer.codesign.schedule.actions import Kind, Schedule, passes

__all__ = ["last_gradients", "peak_activations"]


def peak_activations(
    schedule: Schedule, sizes: Sequence[float] | None = None, *, kept_for_weights: float = 1.0
) -> tuple[float, ...]:
    """Largest size, by rank, that the activations of micro-batches in flight have at once.

    `sizes` are those of one micro-batch by stage, in bytes; by default the unit is the activations of one micro-batch
    on all layers of a P-th of the model. They are there from the begin of F to the end of B or W; `kept_for_weights` is
    the part that is still there between I and W. In a pair, F has its activations before B frees others.
    """
    stages = schedule.placement.stages
    if sizes is None:
        sizes = (schedule.placement.ranks / stages,) * stages
    if len(sizes) != stages:
        raise UsageError(f"{len(sizes)} sizes of activations are given for {stages} stages; give one for each stage")
    freed = {Kind.FORWARD: -1.0, Kind.BACKWARD: 1.0, Kind.INPUT: 1.0 - kept_for_weights, Kind.WEIGHT: kept_for_weights}
    peaks = []
    for row in schedule.rows:
        held = peak = 0.0
        for item in row:
            for action in passes(item):
                held -= freed[action.kind] * sizes[action.stage]
                peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)


def last_gradients(schedule: Schedule, rank: int) -> dict[tuple[int, int], int]:
    """Position in a rank's row of the last pass that adds to the gradients of each (direction, stage) that it holds.
    After it the data-parallel sum of that stage may begin."""
    last: dict[tuple[int, int], int] = {}
    for position, item in enumerate(schedule.rows[rank]):
        for action in passes(item):
            if action.kind in (Kind.BACKWARD, Kind.WEIGHT):
                last[schedule.direction(action.micro_batch), action.stage] = position
    return last
