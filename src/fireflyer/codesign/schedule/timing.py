"""Time of a schedule where messages take a fixed time: exact for unequal stages.

An item begins when its rank is free and its inputs are there, so its end is a longest path; one pass over the items of
a program finds all of them. Where several pipelines share a NIC, see `contention`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.codesign.schedule.actions import Action, Kind, Pair
from fireflyer.codesign.schedule.costs import Costs
from fireflyer.codesign.schedule.lifetimes import last_gradients
from fireflyer.codesign.schedule.program import Program

__all__ = ["Parts", "Timeline", "durations_s", "simulate"]


class Parts(NamedTuple):
    """Parts of the step time of one rank, in seconds; they add up to it."""

    forward: float
    backward: float
    """B, not split."""
    input: float
    weights: float
    pairs: float
    tail: float
    """Time after the last pass: gradient sums that did not end before it, and the optimizer."""
    bubble: float
    """Everything else: the rank waits."""


class Timeline(msgspec.Struct, frozen=True):
    """Begin and end of each item of a program, in seconds from the begin of the step."""

    program: Program
    costs: Costs
    begins_s: Sequence[float]
    ends_s: Sequence[float]
    tails_s: Sequence[float]
    """Time of each rank from its last pass to the end of its optimizer step, by rank."""

    @property
    def total_s(self) -> float:
        """Time until every rank has ended."""
        return max(self._end_s(rank) for rank in range(len(self.tails_s)))

    @property
    def period_s(self) -> float:
        """Time from one step to the next where no rank waits for another between steps: the longest that a rank needs
        from its first pass to its own end. ZBV has no bubble in this measure only."""
        return max(self._end_s(rank) - self.begins_s[row[0]] for rank, row in enumerate(self.program.rows))

    @property
    def ideal_s(self) -> float:
        """Step time of a pipeline without bubbles, messages and tails, whose ranks have equal work and hide nothing."""
        works = _durations_s(self.program, self.costs, 1.0)
        return math.fsum(works[item.work] for item in self.program.items) / len(self.program.rows)

    @property
    def bubble_s(self) -> float:
        """Waiting time of the rank that waits longest."""
        return max(self.parts(rank).bubble for rank in range(len(self.tails_s)))

    def spans(self, rank: int) -> Iterator[tuple[float, float, Action | Pair]]:
        """Begin, end and action of each item of a rank, in order."""
        for index, item in zip(self.program.rows[rank], self.program.schedule.rows[rank], strict=True):
            yield self.begins_s[index], self.ends_s[index], item

    def parts(self, rank: int) -> Parts:
        spent = dict.fromkeys(("F", "B", "I", "W", "&"), 0.0)
        for begin, end, item in self.spans(rank):
            spent["&" if isinstance(item, Pair) else item.kind.value] += end - begin
        tail = self.tails_s[rank]
        bubble = self.total_s - sum(spent.values()) - tail
        return Parts(spent["F"], spent["B"], spent["I"], spent["W"], spent["&"], tail, bubble)

    def _end_s(self, rank: int) -> float:
        return self.ends_s[self.program.rows[rank][-1]] + self.tails_s[rank]


def simulate(program: Program, costs: Costs, *, taken_s: Sequence[float] | None = None) -> Timeline:
    """Runs the schedule. `taken_s`: of each item of the program, where they do not take what `costs` says. Raises
    `UsageError` where `costs` is for another number of stages, or `taken_s` for another number of items."""
    works = durations_s(program, costs)
    if taken_s is None:
        taken_s = [works[item.work] for item in program.items]
    if len(taken_s) != len(program.items):
        raise UsageError(f"{len(taken_s)} times are given for {len(program.items)} passes of {program.schedule.name!r}")
    delays = costs.delays_s()
    free = [0.0] * len(program.rows)
    begins: list[float] = []
    ends: list[float] = []
    for taken, (rank, _, need, boundary, other_need, other_boundary) in zip(taken_s, program.items, strict=True):
        begin = free[rank]
        if need >= 0:
            ready = ends[need] + delays[boundary]
            begin = max(begin, ready)
        if other_need >= 0:
            ready = ends[other_need] + delays[other_boundary]
            begin = max(begin, ready)
        end = free[rank] = begin + taken
        begins.append(begin)
        ends.append(end)
    return Timeline(program, costs, begins, ends, tails_s(program, costs, ends))


def durations_s(program: Program, costs: Costs) -> list[float]:
    """Of each of `program.works`. Raises `UsageError` where `costs` is for another number of stages."""
    stages = program.schedule.placement.stages
    if len(costs.forward_s) != stages:
        raise UsageError(
            f"costs are for {len(costs.forward_s)} stages; schedule {program.schedule.name!r} has {stages}"
        )
    return _durations_s(program, costs, costs.pair_ratio)


def _durations_s(program: Program, costs: Costs, pair_ratio: float) -> list[float]:
    of = {
        Kind.FORWARD: costs.forward_s,
        Kind.BACKWARD: costs.backward_s,
        Kind.INPUT: costs.input_s,
        Kind.WEIGHT: costs.weights_s,
    }
    return [
        of[first][second]
        if isinstance(first, Kind)
        else pair_ratio * (costs.forward_s[first] + costs.backward_s[second])
        for first, second in program.works
    ]


def tails_s(program: Program, costs: Costs, ends_s: Sequence[float]) -> list[float]:
    """By rank: how long after its last pass its gradient sums and its optimizer step end."""
    if not costs.reduce_s and not costs.optimizer_s:
        return [0.0] * len(program.rows)
    tails = []
    placement = program.schedule.placement
    for rank, row in enumerate(program.rows):
        held = placement.stages_of(rank)
        last = ends_s[row[-1]]
        ready = sorted(
            (ends_s[row[position]], costs.reduce_s[stage] if costs.reduce_s else 0.0)
            for (_, stage), position in last_gradients(program.schedule, rank).items()
        )
        reduced = 0.0
        for begin, duration in ready:
            reduced = max(reduced, begin) + duration
        optimizer = sum(costs.optimizer_s[stage] for _, stage in held) if costs.optimizer_s else 0.0
        tails.append(max(reduced, last) - last + optimizer)
    return tails
