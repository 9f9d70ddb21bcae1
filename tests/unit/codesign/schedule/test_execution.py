"""Rows with messages run on ranks whose sends block, and every pass finds its input there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.codesign.schedule import SCHEDULES, Kind, Message, Schedule, build_schedule, with_messages
from fireflyer.codesign.schedule.actions import passes
from fireflyer.codesign.schedule.execution import Instruction


def run_with_blocking_messages(schedule: Schedule, rows: tuple[tuple[Instruction, ...], ...]) -> None:
    """Each rank runs its row in order; a send and its receive run only together. Fails where all ranks wait, where a
    message is not that which the other side expects, and where a pass misses its input."""
    at = [0] * len(rows)
    there: list[set[tuple[bool, int, int]]] = [set() for _ in rows]
    """By rank: outputs of its own and received, as (gradient, stage that made it, micro-batch)."""
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                one = row[at[rank]]
                if isinstance(one, Message):
                    if not meets(one, rank, rows, at):
                        break
                    made = one.stage + 1 if one.gradient else one.stage
                    sender, receiver = (rank, one.peer) if one.send else (one.peer, rank)
                    assert (one.gradient, made, one.micro_batch) in there[sender]
                    there[receiver].add((one.gradient, made, one.micro_batch))
                    at[one.peer] += 1
                else:
                    for action in passes(one):
                        assert_ready(schedule, action.kind, action.stage, action.micro_batch, there[rank])
                    for action in passes(one):
                        if action.kind is not Kind.WEIGHT:
                            there[rank].add((action.kind is not Kind.FORWARD, action.stage, action.micro_batch))
                at[rank] += 1
                moved = True
    assert at == [len(row) for row in rows], "all ranks wait"


def meets(message: Message, rank: int, rows: tuple[tuple[Instruction, ...], ...], at: list[int]) -> bool:
    peer = message.peer
    return at[peer] < len(rows[peer]) and rows[peer][at[peer]] == message._replace(send=not message.send, peer=rank)


def assert_ready(
    schedule: Schedule, kind: Kind, stage: int, micro_batch: int, there: set[tuple[bool, int, int]]
) -> None:
    if kind is Kind.FORWARD:
        assert stage == 0 or (False, stage - 1, micro_batch) in there
    elif kind is not Kind.WEIGHT:
        assert (False, stage, micro_batch) in there
        assert stage == schedule.placement.stages - 1 or (True, stage + 1, micro_batch) in there


@given(name=st.sampled_from(sorted(SCHEDULES)), ranks=st.integers(1, 5), more=st.integers(0, 6))
def test_every_schedule_runs_with_blocking_sends(name: str, ranks: int, more: int) -> None:
    ranks = 2 * ranks if name == "dualpipe" else ranks
    micro_batches = 2 * (ranks + more) if name.startswith("dual") else 1 + more
    schedule = build_schedule(name, ranks, micro_batches)
    run_with_blocking_messages(schedule, with_messages(schedule))


def test_passes_keep_their_order_and_each_boundary_is_crossed_once_each_way() -> None:
    schedule = build_schedule("zbv", 3, 6)
    rows = with_messages(schedule)
    for row, plain in zip(rows, schedule.rows, strict=True):
        assert tuple(one for one in row if not isinstance(one, Message)) == plain
    sends = [one for row in rows for one in row if isinstance(one, Message) and one.send]
    assert len(sends) == len(set(sends)) == 2 * 6 * (6 - 1 - 1)  # stages 2 and 3 are on one rank


def test_a_rank_receives_while_it_computes_the_pass_before() -> None:
    """The second activation is posted when it is made, not when it is needed."""
    rows = with_messages(build_schedule("gpipe", 2, 3))
    assert [str(one) for one in rows[1][:4]] == [
        "receive activation of stage 0, micro-batch 0 from 0",
        "1F0",
        "receive activation of stage 0, micro-batch 1 from 0",
        "1F1",
    ]
    assert [str(one) for one in rows[0][:2]] == ["0F0", "send activation of stage 0, micro-batch 0 to 1"]


def test_the_check_of_this_file_finds_a_circle() -> None:
    schedule = build_schedule("1f1b", 2, 2)
    first, second = with_messages(schedule)
    at = next(index for index, one in enumerate(first) if isinstance(one, Message) and not one.send)
    swapped = (*first[: at - 1], first[at], first[at - 1], *first[at + 1 :])
    with pytest.raises(AssertionError):
        run_with_blocking_messages(schedule, (swapped, second))
