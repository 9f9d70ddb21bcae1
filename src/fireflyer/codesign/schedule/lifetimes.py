"""When a rank is done with what it keeps: activations of micro-batches, and gradients that still grow."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

from fireflyer.base.errors import UsageError
from fireflyer.codesign.schedule.actions import Kind, Schedule, passes

__all__ = ["InFlight", "held_stages", "in_flight", "last_gradients", "peak_activations"]


class InFlight(NamedTuple):
    """Micro-batches of a rank at one time, by the stages that it holds."""

    activations: tuple[int, ...]
    """Number of micro-batches, by stage, whose activations are kept: F has begun, and B or W has not ended."""
    gradients: tuple[int, ...]
    """Number of those, by stage, for which gradients are kept: I has begun, and W has not ended."""

    def size(self, activations: Sequence[float], gradients: Sequence[float]) -> float:
        """Size of all of it, where one micro-batch has these sizes by stage."""
        kept = math.fsum(map(operator.mul, self.activations, activations))
        return kept + math.fsum(map(operator.mul, self.gradients, gradients))


def held_stages(schedule: Schedule, rank: int) -> tuple[int, ...]:
    """Stages whose passes a rank runs, in ascending order: the order of `InFlight`."""
    return tuple(sorted({stage for _, stage in schedule.placement.stages_of(rank)}))


def in_flight(schedule: Schedule, *, overlapped: bool = True) -> tuple[tuple[InFlight, ...], ...]:
    """States of the ranks: what each has in flight at the times of a step, all that differ, in order.

    `overlapped`: in a pair F has its activations before B frees others; else B runs before F.
    """
    found = []
    for rank, row in enumerate(schedule.rows):
        stages = held_stages(schedule, rank)
        place = {stage: at for at, stage in enumerate(stages)}
        counts, waiting = [0] * len(stages), [0] * len(stages)
        seen: dict[InFlight, None] = {}
        for item in row:
            for action in passes(item) if overlapped else reversed(passes(item)):
                at = place[action.stage]
                if action.kind is Kind.FORWARD:
                    counts[at] += 1
                elif action.kind is Kind.INPUT:
                    waiting[at] += 1
                else:
                    counts[at] -= 1
                    waiting[at] -= action.kind is Kind.WEIGHT
                seen[InFlight(tuple(counts), tuple(waiting))] = None
        found.append(tuple(seen))
    return tuple(found)


def peak_activations(
    schedule: Schedule,
    sizes: Sequence[float] | None = None,
    *,
    kept_for_weights: float | Sequence[float] = 1.0,
    overlapped: bool = True,
) -> tuple[float, ...]:
    """Largest size, by rank, that the activations of micro-batches in flight have at once.

    `sizes` are those of one micro-batch by stage, in bytes; by default the unit is the activations of one micro-batch
    on all layers of a P-th of the model. They are there from the begin of F to the end of B or W; `kept_for_weights`,
    one number or one for each stage, is how much there is between I and W, in parts of them: less than 1 where I frees
    some, more where it keeps gradients. `overlapped`: as in `in_flight`.
    """
    stages = schedule.placement.stages
    if sizes is None:
        sizes = (schedule.placement.ranks / stages,) * stages
    if isinstance(kept_for_weights, int | float):
        kept_for_weights = (kept_for_weights,) * stages
    for given in (sizes, kept_for_weights):
        if len(given) != stages:
            raise UsageError(
                f"{len(given)} sizes of activations are given for {stages} stages; give one for each stage"
            )
    peaks = []
    for rank, states in enumerate(in_flight(schedule, overlapped=overlapped)):
        held = held_stages(schedule, rank)
        whole = [sizes[stage] for stage in held]
        more = [(kept_for_weights[stage] - 1.0) * sizes[stage] for stage in held]
        peaks.append(max(one.size(whole, more) for one in states))
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
