"""What each rank does in one step, in order: passes, messages and sums, compiled from a schedule. Pure.

A program is a row of the schedule with three things put in:

- a receive is *posted* where its message may come, one pass before the pass that `codesign.schedule.execution` gives,
  so that the message travels beside that pass; the rank waits for it only in the pass that needs it;
- a send follows the pass that computes what it sends;
- the gradients of a stage may be summed over replicas after the last pass that adds to them (`Reduce`).

No program can deadlock. All ranks take their messages from one order that keeps every dependency; receives are posted
earlier than there, and posting does not wait. So of all that is not yet done, the first in that order can always run,
even where a send blocks until its receive is posted.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from fireflyer.codesign.schedule.actions import Action, Kind, Pair, Schedule, passes
from fireflyer.codesign.schedule.execution import Message, with_messages
from fireflyer.codesign.schedule.lifetimes import last_gradients

__all__ = ["POSTED_AHEAD", "Instruction", "Key", "Reduce", "compile_programs", "forward_only", "key_of", "needs"]

POSTED_AHEAD: Final = 1
"""Passes by which a receive is posted before the place of its message. Each costs the memory of one more message."""


class Reduce(NamedTuple):
    """The gradients of this stage, in this direction, are complete on this rank."""

    direction: int
    stage: int

    def __str__(self) -> str:
        return f"reduce gradients of stage {self.stage}, direction {self.direction}"


Instruction = Action | Pair | Message | Reduce
Key = tuple[bool, int, int]
"""Names what crosses a boundary: whether it is a gradient, the stage before the boundary, the micro-batch."""

_RECEIVE, _SEND, _REDUCE, _PASS = range(4)


def compile_programs(schedule: Schedule, *, ahead: int = POSTED_AHEAD) -> tuple[tuple[Instruction, ...], ...]:
    """Make the program of each rank. Raises `UsageError` where the rows deadlock."""
    programs = []
    for rank, row in enumerate(with_messages(schedule)):
        placed: list[tuple[int, int, Instruction]] = []
        slot = 0  # number of passes before
        for instruction in row:
            if isinstance(instruction, Message):
                place = (slot, _SEND) if instruction.send else (max(0, slot - ahead), _RECEIVE)
                placed.append((*place, instruction))
            else:
                placed.append((slot, _PASS, instruction))
                slot += 1
        for (direction, stage), position in last_gradients(schedule, rank).items():
            placed.append((position + 1, _REDUCE, Reduce(direction, stage)))
        placed.sort(key=lambda one: one[:2])  # stable: messages of one kind keep their order
        programs.append(tuple(instruction for _, _, instruction in placed))
    return tuple(programs)


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of a schedule in their order, to evaluate with: what they need is among them."""
    rows = tuple(
        tuple(action for item in row for action in passes(item) if action.kind is Kind.FORWARD) for row in schedule.rows
    )
    return Schedule(f"{schedule.name} forward", schedule.placement, schedule.micro_batches, rows)


def key_of(message: Message) -> Key:
    return message.gradient, message.stage, message.micro_batch


def needs(action: Action, stages: int) -> Key | None:
    """What an action takes from another stage; None for the input of the model, the loss, and W."""
    if action.kind is Kind.FORWARD:
        return (False, action.stage - 1, action.micro_batch) if action.stage else None
    if action.kind is Kind.WEIGHT or action.stage == stages - 1:
        return None
    return True, action.stage, action.micro_batch
