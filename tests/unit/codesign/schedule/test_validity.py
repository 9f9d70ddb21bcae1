"""Every generator gives complete schedules without deadlocks; a damaged schedule is refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.base.errors import UsageError
from fireflyer.codesign.schedule import SCHEDULES, Action, Kind, Pair, Schedule, build_schedule, check, compile_schedule
from fireflyer.codesign.schedule.actions import looped, passes


@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    ranks=st.integers(1, 9),
    micro_batches=st.integers(1, 24),
    stages_per_rank=st.integers(1, 4),
)
def test_every_generator_gives_a_complete_schedule_without_deadlock(
    name: str, ranks: int, micro_batches: int, stages_per_rank: int
) -> None:
    if name == "dualpipe":
        ranks, micro_batches = 2 * ranks, 2 * (2 * ranks + micro_batches)
    if name == "dualpipev":
        micro_batches += 2 * ranks
    check(build_schedule(name, ranks, micro_batches, stages_per_rank))


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_program_keeps_rows_and_dependencies(name: str) -> None:
    program = compile_schedule(build_schedule(name, 4, 9 if name != "dualpipe" else 10))
    for row in program.rows:
        assert list(row) == sorted(row)
    for index, item in enumerate(program.items):
        assert max(item.need, item.other_need) < index


@pytest.mark.parametrize(
    ("ranks", "micro_batches"), [(3, 12), (4, 7), (4, 6), (5, 9)], ids=["odd P", "odd m", "m < 2 P", "all of them"]
)
def test_dual_pipe_says_in_one_error_what_it_needs(ranks: int, micro_batches: int) -> None:
    with pytest.raises(UsageError, match=r"an even number of ranks P, and .* micro-batches, at least 2 P; not P ="):
        build_schedule("dualpipe", ranks, micro_batches)


def test_dual_pipe_v_needs_two_micro_batches_a_rank() -> None:
    with pytest.raises(UsageError, match="at least two micro-batches a rank; not 7 on 4 ranks"):
        build_schedule("dualpipev", 4, 7)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("2f2b", 2, 2), "there is no schedule '2f2b'; use gpipe, 1f1b"),
        (("1f1b", 0, 2), "ranks 0 of a schedule is not a positive number"),
        (("interleaved", 1, 2, 0), "stages_per_rank 0"),
        (("zbv", 1024, 1 << 16), "has 402653184 passes, more than 2097152"),
    ],
)
def test_what_cannot_be_built_is_refused(arguments: tuple[str, int, int], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        build_schedule(*arguments)


def changed(schedule: Schedule, rank: int, row: tuple[Action | Pair, ...]) -> Schedule:
    rows = [*schedule.rows]
    rows[rank] = row
    return msgspec.structs.replace(schedule, rows=tuple(rows))


@given(st.data())
def test_a_schedule_with_a_pass_that_is_missing_doubled_or_elsewhere_is_refused(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(("1f1b", "zbv", "interleaved-zb", "dualpipe")))
    schedule = build_schedule(name, 2, 4)
    rank = data.draw(st.integers(0, 1))
    row = schedule.rows[rank]
    position = data.draw(st.integers(0, len(row) - 1))
    without = row[:position] + row[position + 1 :]
    where = data.draw(st.sampled_from(("missing", "doubled", "other rank")))
    damaged = changed(schedule, rank, without)
    if where == "doubled":
        damaged = changed(schedule, rank, (*row, row[position]))
    elif where == "other rank":
        damaged = changed(damaged, 1 - rank, (*schedule.rows[1 - rank], row[position]))
    with pytest.raises(UsageError):
        check(damaged)


def test_rows_that_wait_for_each_other_are_refused() -> None:
    forward, backward = Kind.FORWARD, Kind.BACKWARD
    rows = (
        (Action(forward, 0, 0), Action(backward, 0, 0), Action(forward, 0, 1), Action(backward, 0, 1)),
        (Action(forward, 1, 0), Action(forward, 1, 1), Action(backward, 1, 0), Action(backward, 1, 1)),
    )
    with pytest.raises(UsageError, match="'mine' deadlocks: rank 0 waits before 0B0"):
        check(Schedule("mine", looped(2), 2, rows))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ((Action(Kind.BACKWARD, 0, 0), Action(Kind.FORWARD, 0, 0)), "0B0: it comes before 0F0"),
        ((Action(Kind.FORWARD, 0, 0), Action(Kind.INPUT, 0, 0)), "has F, I of micro-batch 0"),
        ((Action(Kind.FORWARD, 0, 1),), "no such stage or micro-batch"),
        ((Pair(Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0)),), "are of one micro-batch"),
        ((Pair(Action(Kind.FORWARD, 0, 0), Action(Kind.INPUT, 0, 0)),), "is not a pair of F and B"),
    ],
)
def test_faults_of_a_row_are_named(row: tuple[Action | Pair, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check(Schedule("mine", looped(1), 1, (row,)))


def test_the_dual_pipe_halves_the_micro_batches_between_its_directions() -> None:
    schedule = build_schedule("dualpipe", 4, 8)
    assert [schedule.direction(one) for one in range(8)] == [0] * 4 + [1] * 4
    assert [schedule.placement.stages_of(rank) for rank in (0, 3)] == [((0, 0), (1, 3)), ((0, 3), (1, 0))]
    on_rank_0 = {(one.stage, one.micro_batch) for item in schedule.rows[0] for one in passes(item)}
    assert on_rank_0 == {(0, one) for one in range(4)} | {(3, one) for one in range(4, 8)}
