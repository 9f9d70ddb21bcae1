"""Node-time over a span, in steps of equal length: from counters that only grow, and from runs that have ended."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.platform.store.history import ClusterTotals
from fireflyer.cluster.schema.api import UtilisationReport, UtilisationStep

__all__ = ["MAX_STEPS", "RunSpan", "Span", "utilisation"]

MAX_STEPS: Final = 500


class RunSpan(NamedTuple):
    """A run that has ended, and how many node-seconds of it were productive."""

    begin_ns: int
    end_ns: int
    productive: float


class Span(NamedTuple):
    start_ns: int
    end_ns: int
    steps: int

    @staticmethod
    def of(start_ns: int, end_ns: int, steps: int) -> Span:
        """Raises `UsageError`."""
        if not 1 <= steps <= MAX_STEPS:
            raise UsageError(f"steps {steps}: 1 to {MAX_STEPS}")
        if end_ns - start_ns < steps:
            raise UsageError("the span ends before it begins; give start_ns below end_ns, Unix time in nanoseconds")
        return Span(start_ns, end_ns, steps)

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.start_ns

    def bounds(self) -> list[int]:
        """Of the steps, one more than there are."""
        return [self.start_ns + self.length_ns * step // self.steps for step in range(self.steps + 1)]


def utilisation(span: Span, totals: Iterable[ClusterTotals], runs: Iterable[RunSpan] | None) -> UtilisationReport:
    """`totals`: readings of the counters, at least those next to the bounds of the steps. `runs`: all that overlap the
    span; None: too many to read, then productive time counts when its run ended."""
    bounds = span.bounds()
    readings = sorted(totals, key=lambda reading: reading.at_ns)
    healthy = _growth([(one.at_ns, one.healthy_ns) for one in readings], bounds)
    allocated = _growth([(one.at_ns, one.allocated_ns) for one in readings], bounds)
    if runs is None:
        productive = _growth([(one.at_ns, one.productive_ns) for one in readings], bounds)
    else:
        productive = _spread(runs, bounds)
    steps = tuple(
        UtilisationStep(start_ns=start_ns, allocated=of_runs, healthy=heard, productive=useful)
        for start_ns, of_runs, heard, useful in zip(bounds[:-1], allocated, healthy, productive, strict=True)
    )
    return UtilisationReport(start_ns=span.start_ns, end_ns=span.end_ns, steps=steps)


def _growth(readings: Sequence[tuple[int, int]], bounds: Sequence[int]) -> list[float]:
    """In seconds, between the bounds. Never negative: counters of a restored store begin at an older value."""
    values = [_at(readings, bound) for bound in bounds]
    return [max(0.0, after - before) for before, after in pairwise(values)]


def _at(readings: Sequence[tuple[int, int]], at_ns: int) -> float:
    """Between two readings the counter grows evenly; outside of all of them it stands still."""
    if not readings:
        return 0.0
    place = bisect_right(readings, at_ns, key=lambda reading: reading[0])
    if place == 0:
        return readings[0][1] / SECOND
    before_ns, before = readings[place - 1]
    if place == len(readings):
        return before / SECOND
    after_ns, after = readings[place]
    return (before + (after - before) * ((at_ns - before_ns) / (after_ns - before_ns))) / SECOND


def _spread(runs: Iterable[RunSpan], bounds: Sequence[int]) -> list[float]:
    """Each run's amount over the steps, by how much of its time lies in each: whole steps by a difference array, so
    that a run costs the same however many steps it covers."""
    count = len(bounds) - 1
    sums, rates = [0.0] * count, [0.0] * (count + 1)
    for run in runs:
        begin_ns, end_ns = max(run.begin_ns, bounds[0]), min(run.end_ns, bounds[-1])
        if end_ns <= begin_ns:
            continue
        rate = run.productive / (run.end_ns - run.begin_ns)
        first, last = bisect_right(bounds, begin_ns) - 1, bisect_right(bounds, end_ns - 1) - 1
        if first == last:
            sums[first] += rate * (end_ns - begin_ns)
            continue
        sums[first] += rate * (bounds[first + 1] - begin_ns)
        sums[last] += rate * (end_ns - bounds[last])
        rates[first + 1] += rate
        rates[last] -= rate
    running = 0.0
    for step in range(count):
        running += rates[step]
        sums[step] += running * (bounds[step + 1] - bounds[step])
    return [max(0.0, value) for value in sums]
