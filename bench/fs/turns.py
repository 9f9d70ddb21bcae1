"""Ours and the bounds in turns, and the processor time of one operation, which load hardly changes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple

from bench.fs.bounds import Rate
from bench.fs.work import Work
from bench.report import Figure, figure

__all__ = ["Taken", "in_turns", "seconds_each", "times"]


class Taken(NamedTuple):
    """Operations per second."""

    ours: Figure
    others: dict[str, Figure]
    processor_s: dict[str, float]
    """For one operation, medians: of the client, of the storage processes, and of each of the others."""

    def ours_s(self) -> Figure:
        """For each operation."""
        return seconds_each(self.ours)

    def used(self) -> dict[str, float]:
        """Processor times, named as in results."""
        return {f"{name}_processor_s": seconds for name, seconds in self.processor_s.items()}


def in_turns(rounds: int, ours: Callable[[], Work], others: Mapping[str, Callable[[], Rate]]) -> Taken:
    """The first round warms up."""
    mine: list[Work] = []
    theirs: list[dict[str, Rate]] = []
    for _ in range(rounds + 1):
        mine.append(ours())
        theirs.append({name: measure() for name, measure in others.items()})
    mine, theirs = mine[1:], theirs[1:]
    used = {
        "client": statistics.median(work.client_s / work.done for work in mine),
        "storage": statistics.median(work.storage_s / work.done for work in mine),
    }
    for name in others:
        used[name] = statistics.median(one[name].processor_s for one in theirs)
    return Taken(
        figure([work.done / work.elapsed_s for work in mine]),
        {name: figure([one[name].per_s for one in theirs]) for name in others},
        {name: seconds for name, seconds in used.items() if seconds},
    )


def times(one: Figure, factor: float) -> Figure:
    """In another unit."""
    return Figure(one.median * factor, one.min * factor, one.max * factor, one.n)


def seconds_each(rates: Figure) -> Figure:
    return Figure(1 / rates.median, 1 / rates.max, 1 / rates.min, rates.n)
