"""The share of communication hidden under computing, from measured intervals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.base.errors import UsageError
from fireflyer.collectives.flight import Record
from fireflyer.collectives.flight.dump import State
from fireflyer.training.overlap import Interval, intervals_of, measure_overlap, overlap_of

INTERVALS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda pair: (pair[0], sum(pair))), max_size=8
)


@pytest.mark.parametrize(
    ("communication", "computing", "hidden", "exposed"),
    [
        ([], [(0, 10)], 0, 0),
        ([(0, 10)], [], 0, 10),
        ([(0, 10)], [(0, 10)], 10, 0),
        ([(0, 10), (5, 20)], [(0, 15)], 15, 5),  # side by side counts once
        ([(0, 10), (10, 20)], [(5, 8), (9, 12)], 6, 14),
        ([(3, 4)], [(0, 2), (5, 9)], 0, 1),
        ([(0, 100)], [(10, 20), (15, 30), (90, 200)], 30, 70),
    ],
)
def test_what_is_hidden(communication: list[Interval], computing: list[Interval], hidden: int, exposed: int) -> None:
    overlap = measure_overlap(communication, computing)
    assert (overlap.hidden_ns, overlap.exposed_ns) == (hidden, exposed)
    assert overlap.hidden_share == (1.0 if hidden == exposed == 0 else hidden / (hidden + exposed))


@given(INTERVALS, INTERVALS)
def test_it_counts_nanoseconds(communication: list[Interval], computing: list[Interval]) -> None:
    def covered(intervals: list[Interval]) -> set[int]:
        return {instant for start, end in intervals for instant in range(start, end)}

    overlap = measure_overlap(communication, computing)
    assert overlap.communication_ns == len(covered(communication))
    assert overlap.computing_ns == len(covered(computing))
    assert overlap.hidden_ns == len(covered(communication) & covered(computing))


def test_an_interval_that_ends_before_it_starts_is_refused() -> None:
    with pytest.raises(UsageError, match="ends at 3, before it starts at 5"):
        measure_overlap([(5, 3)], [])


def test_records_without_an_end_are_left_out() -> None:
    records: list[dict[str, int | None]] = [{"a": 3, "b": 9}, {"a": 5, "b": None}, {"a": 5}]
    assert intervals_of(records, start="a", end="b") == [(3, 9)]


def test_allreduces_that_ended_count_from_their_start() -> None:
    def record(kind: str, state: State, submitted: int, started: int, finished: int) -> Record:
        return Record(
            id=0, seq=0, kind=kind, dtype="f32", state=state, submitted_ns=submitted, started_ns=started,
            finished_ns=finished,
        )  # fmt: skip

    records = [
        record("allreduce", "done", 1, 2, 9),  # asked for too early
        record("allreduce", "done", 10, 12, 20),
        record("broadcast", "done", 12, 14, 40),
        record("allreduce", "failed", 12, 14, 40),
        record("allreduce", "running", 12, 14, 0),
    ]
    found = overlap_of(records, [(10, 16)], since_ns=10)
    assert (found.communication_ns, found.hidden_ns, found.computing_ns) == (8, 4, 6)
