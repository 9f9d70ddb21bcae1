"""The programs of ranks, run on channels without torch: every message is received in order, nothing waits for ever."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fireflyer.base.errors import UsageError
from fireflyer.codesign.schedule import Action, Kind, Message, Pair, Schedule, build_schedule, last_gradients
from fireflyer.codesign.schedule.actions import passes
from fireflyer.training.pipeline.programs import (
    Instruction,
    Key,
    Reduce,
    compile_programs,
    forward_only,
    key_of,
    needs,
)

NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "interleaved-zb", "zbv", "dualpipev", "dualpipe")


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(NAMES))
    ranks = draw(st.integers(1, 6))
    micro_batches = draw(st.integers(1, 16))
    if name == "dualpipe":
        ranks = 2 * draw(st.integers(1, 3))
        micro_batches = 2 * ranks + 2 * draw(st.integers(0, 3))
    elif name == "dualpipev":
        micro_batches += 2 * ranks
    return build_schedule(name, ranks, micro_batches, draw(st.integers(1, 3)))


class Ranks:
    """Runs programs. A send blocks until its receive is posted; the order in which ranks go on is `turns`'."""

    def __init__(self, schedule: Schedule, programs: Sequence[Sequence[Instruction]]) -> None:
        self.schedule = schedule
        self.programs = programs
        self.at = [0] * len(programs)
        self.posted: dict[tuple[int, int], deque[Key]] = {}
        """Receives from a rank on a rank, in the order of posts, that nothing was sent to yet."""
        self.here: list[set[Key]] = [set() for _ in programs]
        """Messages that have come, and outputs of the rank itself."""
        self.made: list[set[Key]] = [set() for _ in programs]

    def run(self, turns: Sequence[int]) -> None:
        index = 0
        while any(at < len(program) for at, program in zip(self.at, self.programs, strict=True)):
            first = turns[index % len(turns)]
            index += 1
            order = [(first + offset) % len(self.programs) for offset in range(len(self.programs))]
            if not any(self.advance(rank) for rank in order):
                waiting = [str(p[a]) if a < len(p) else "end" for a, p in zip(self.at, self.programs, strict=True)]
                raise AssertionError(f"deadlock: {waiting}")

    def advance(self, rank: int) -> bool:
        if self.at[rank] == len(self.programs[rank]):
            return False
        instruction = self.programs[rank][self.at[rank]]
        if isinstance(instruction, Message):
            key = key_of(instruction)
            if not instruction.send:
                self.posted.setdefault((instruction.peer, rank), deque()).append(key)
            else:
                posted = self.posted.get((rank, instruction.peer), deque())
                assert key in self.made[rank], f"{instruction} before its pass"
                if not posted:
                    return False
                assert posted.popleft() == key, f"{instruction}: another receive was posted first"
                self.here[instruction.peer].add(key)
        elif not isinstance(instruction, Reduce):
            wanted = [needs(action, self.schedule.placement.stages) for action in passes(instruction)]
            if any(key is not None and key not in self.here[rank] for key in wanted):
                return False
            for action in passes(instruction):
                self.make(rank, action)
        self.at[rank] += 1
        return True

    def make(self, rank: int, action: Action) -> None:
        if action.kind is Kind.WEIGHT:
            return
        forward = action.kind is Kind.FORWARD
        key = (not forward, action.stage if forward else action.stage - 1, action.micro_batch)
        self.made[rank].add(key)
        receiver = action.stage + 1 if forward else action.stage - 1
        exists = 0 <= receiver < self.schedule.placement.stages
        if exists and self.schedule.rank_of(receiver, action.micro_batch) == rank:
            self.here[rank].add(key)


@settings(max_examples=50, deadline=None)
@given(schedules(), st.integers(0, 3), st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_no_program_deadlocks_even_where_sends_block_and_messages_keep_their_order(
    schedule: Schedule, ahead: int, turns: list[int]
) -> None:
    programs = compile_programs(schedule, ahead=ahead)
    Ranks(schedule, programs).run([turn % len(programs) for turn in turns])


@settings(max_examples=25, deadline=None)
@given(schedules())
def test_every_send_has_one_receive_and_passes_keep_the_order_of_their_row(schedule: Schedule) -> None:
    programs = compile_programs(schedule)
    sends: Counter[tuple[int, int, Key]] = Counter()
    receives: Counter[tuple[int, int, Key]] = Counter()
    for rank, program in enumerate(programs):
        assert tuple(one for one in program if isinstance(one, Action | Pair)) == schedule.rows[rank]
        for one in program:
            if isinstance(one, Message):
                assert one.peer != rank
                if one.send:
                    sends[rank, one.peer, key_of(one)] += 1
                else:
                    receives[one.peer, rank, key_of(one)] += 1
    assert sends == receives
    assert set(sends.values()) <= {1}


@settings(max_examples=25, deadline=None)
@given(schedules())
def test_gradients_of_a_stage_are_reduced_once_after_its_last_pass(schedule: Schedule) -> None:
    for rank, program in enumerate(compile_programs(schedule)):
        passes_before = 0
        reduced: dict[tuple[int, int], int] = {}
        for one in program:
            if isinstance(one, Reduce):
                assert (one.direction, one.stage) not in reduced
                reduced[one.direction, one.stage] = passes_before - 1
            elif not isinstance(one, Message):
                passes_before += 1
        assert reduced == last_gradients(schedule, rank)


@settings(max_examples=25, deadline=None)
@given(schedules(), st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_evaluation_runs_the_forwards_alone(schedule: Schedule, turns: list[int]) -> None:
    forwards = forward_only(schedule)
    kinds = {one.kind for row in forwards.rows for one in row if isinstance(one, Action)}
    assert kinds == {Kind.FORWARD}
    assert sum(map(len, forwards.rows)) == schedule.placement.stages * schedule.micro_batches
    programs = compile_programs(forwards)
    Ranks(forwards, programs).run([turn % len(programs) for turn in turns])


def test_a_receive_is_posted_before_the_pass_ahead_of_its_own() -> None:
    program = compile_programs(build_schedule("1f1b", 2, 3))[1]
    assert [str(one) for one in program[:4]] == [
        "receive activation of stage 0, micro-batch 0 from 0",
        "receive activation of stage 0, micro-batch 1 from 0",
        "1F0",
        "1B0",
    ]


def test_the_model_of_channels_finds_a_deadlock() -> None:
    schedule = build_schedule("1f1b", 2, 2)
    first, second = compile_programs(schedule)
    late = [one for one in second if isinstance(one, Action)] + [one for one in second if isinstance(one, Message)]
    with pytest.raises(AssertionError, match="deadlock"):
        Ranks(schedule, (first, late)).run([0, 1])


def test_rows_that_deadlock_are_refused() -> None:
    schedule = build_schedule("1f1b", 2, 2)
    rows = (schedule.rows[0], tuple(reversed(schedule.rows[1])))
    with pytest.raises(UsageError, match="deadlock"):
        compile_programs(Schedule("odd", schedule.placement, 2, (tuple(reversed(rows[0])), rows[1])))
