"""Cutting operations into pieces, and passing pieces through slots: nothing is lost, nothing overtakes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.base.errors import InvariantViolation, UsageError
from fireflyer.collectives.devices.pieces import IN_PLACE, Move, cut
from fireflyer.collectives.devices.stages import Stages, Step

KINDS = [*IN_PLACE, "reduce_scatter", "allgather"]


def bytes_of(moves: Sequence[Move], side: int) -> list[tuple[int, int]]:
    return sorted((move[side], move[side] + move.size) for move in moves)


def covers(ranges: Sequence[tuple[int, int]], size: int) -> bool:
    """Every byte once."""
    at = 0
    for begin, end in ranges:
        if begin != at:
            return False
        at = end
    return at == size


@given(
    kind=st.sampled_from(KINDS),
    elements=st.integers(0, 20_000),
    item=st.sampled_from([1, 2, 4, 8]),
    world=st.integers(1, 9),
    slot_bytes=st.integers(80, 40_000),
)
def test_pieces_are_all_of_the_arrays_and_fit_into_slots(
    kind: str, elements: int, item: int, world: int, slot_bytes: int
) -> None:
    pieces = cut(kind, elements, item, world, slot_bytes)
    factor_in = world if kind == "reduce_scatter" else 1
    factor_out = world if kind == "allgather" else 1
    assert covers(bytes_of([move for piece in pieces for move in piece.device_to_host], 0), elements * item * factor_in)
    assert covers(
        bytes_of([move for piece in pieces for move in piece.host_to_device], 0), elements * item * factor_out
    )
    for piece in pieces:
        assert covers(
            [(b - piece.source[0], e - piece.source[0]) for b, e in bytes_of(piece.device_to_host, 1)], piece.source[1]
        )
        assert covers(
            [(b - piece.target[0], e - piece.target[0]) for b, e in bytes_of(piece.host_to_device, 1)], piece.target[1]
        )
        assert max(sum(piece.source), sum(piece.target)) <= slot_bytes
        if kind in IN_PLACE:
            assert piece.source == piece.target
        else:
            assert piece.source[1] == 0 or sum(piece.source) == piece.target[0]


def test_pieces_are_in_order_and_several() -> None:
    pieces = cut("allreduce", 1 << 22, 4, 8, 8 << 20)
    starts = [piece.device_to_host[0].device for piece in pieces]
    assert starts == sorted(starts)
    assert len(pieces) == 8


def test_an_operation_without_elements_is_one_piece_that_moves_nothing() -> None:
    (piece,) = cut("reduce_scatter", 0, 4, 2, 1000)
    assert (piece.device_to_host, piece.host_to_device) == ((), ())


def test_who_has_no_input_or_no_result_copies_none() -> None:
    pieces = cut("broadcast", 1000, 4, 2, 1024, reads=False)
    assert not any(piece.device_to_host for piece in pieces)
    assert all(piece.host_to_device for piece in pieces)


def test_a_slot_that_holds_no_element_is_refused() -> None:
    with pytest.raises(UsageError, match="slot_bytes="):
        cut("allgather", 10, 8, 9, 79)


@given(
    slots=st.integers(1, 5),
    jobs=st.lists(st.integers(1, 7), max_size=6),
    choices=st.lists(st.integers(0, 3), min_size=200, max_size=200),
)
def test_stages_keep_the_order_and_never_share_a_slot(slots: int, jobs: list[int], choices: list[int]) -> None:
    """Whoever takes steps in whatever turns: jobs added late, stages that wait."""
    stages: Stages[int] = Stages(slots)
    to_add = list(enumerate(jobs))
    seen: dict[str, list[Step[int]]] = {"copy_to_host": [], "submit": [], "copy_to_device": []}
    holders: dict[int, Step[int]] = {}
    for choice in [*choices, *([0, 1, 2, 3] * 60)]:
        if choice == 3 and to_add:
            stages.add(*to_add.pop(0))
        elif choice == 0 and (step := stages.next_to_host()) is not None:
            assert step.slot not in holders
            holders[step.slot] = step
            stages.copy_to_host()
            seen["copy_to_host"].append(step)
        elif choice == 1 and (step := stages.next_to_submit()) is not None:
            assert holders[step.slot] == step
            stages.submit()
            seen["submit"].append(step)
        elif choice == 2 and (step := stages.next_to_device()) is not None:
            assert holders.pop(step.slot) == step
            stages.copy_to_device()
            seen["copy_to_device"].append(step)
        assert stages.copied_to_device <= stages.submitted <= stages.copied_to_host
        assert stages.copied_to_host <= stages.copied_to_device + slots
    assert stages.idle
    assert stages.all_submitted
    expected = [(job, piece) for job, pieces in enumerate(jobs) for piece in range(pieces)]
    for steps in seen.values():
        assert [(step.job, step.piece) for step in steps] == expected
    assert [step.last for step in seen["copy_to_device"]] == [piece == jobs[job] - 1 for job, piece in expected]


def test_a_stage_without_a_piece_cannot_be_passed() -> None:
    stages: Stages[str] = Stages(1)
    for step in (stages.copy_to_host, stages.submit, stages.copy_to_device):
        with pytest.raises(InvariantViolation):
            step()
    with pytest.raises(InvariantViolation):
        stages.add("empty", 0)
