"""Overlap: the part of the time of communication in which the backward pass was computing beside it.

Pure: intervals in, figures out. An interval is (start, end) in nanoseconds of one clock. What counts is the time in
which at least one operation was under way, so operations that run side by side count once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fireflyer.base.errors import UsageError
from fireflyer.collectives.flight import Record

__all__ = ["Interval", "Overlap", "intervals_of", "measure_overlap", "overlap_of"]

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Overlap:
    communication_ns: int
    """Time with at least one operation under way."""
    hidden_ns: int
    """Time with at least one operation under way in which there was computing too."""
    computing_ns: int

    @property
    def exposed_ns(self) -> int:
        return self.communication_ns - self.hidden_ns

    @property
    def hidden_share(self) -> float:
        """Share of the communication that was hidden, from 0 to 1; 1 where there was none."""
        return 1.0 if self.communication_ns == 0 else self.hidden_ns / self.communication_ns


def measure_overlap(communication: Iterable[Interval], computing: Iterable[Interval]) -> Overlap:
    """The share of `communication` under `computing`.

    >>> measure_overlap([(0, 10), (5, 20)], [(0, 15)]).hidden_share
    0.75

    Raises `UsageError` for an interval that ends before it starts.
    """
    first, second = _union(communication), _union(computing)
    return Overlap(_length(first), _length(_common(first, second)), _length(second))


def overlap_of(records: Iterable[Record], backward: Iterable[Interval], *, since_ns: int = 0) -> Overlap:
    """The share of the allreduces of a communicator under its backward passes.

    `records` are those of `Communicator.records()`; counted are allreduces that ended well and were asked for at
    `since_ns` or later. `backward` holds (start, last gradient ready) of each pass, on the same clock
    (`time.monotonic_ns`): `DistributedDataParallel.last_pass` after each `backward()`. An allreduce counts from when
    this rank entered it until it ended, so waiting for a slower rank is communication too. Raises `UsageError` as
    `measure_overlap`.
    """
    done = [r for r in records if r.kind == "allreduce" and r.state == "done" and r.submitted_ns >= since_ns]
    return measure_overlap([(record.started_ns, record.finished_ns) for record in done], backward)


def intervals_of(records: Sequence[Mapping[str, Any]], *, start: str, end: str) -> list[Interval]:
    """The intervals between two timestamps of records that have both (an operation under way has no end yet)."""
    return [(int(record[start]), int(record[end])) for record in records if record.get(start) and record.get(end)]


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint and ascending."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end < start:
            raise UsageError(f"an interval ends at {end}, before it starts at {start}")
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _common(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Where both are; each is disjoint and ascending."""
    found: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            found.append((start, end))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return found


def _length(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in intervals)
