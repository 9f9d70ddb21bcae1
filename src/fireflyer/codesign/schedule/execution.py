"""Messages between ranks, put into the rows of a schedule for an executor.

`with_messages` takes one order of all passes and messages that keeps every dependency, and gives each rank its part of
that order. So two ranks always agree on the order of the messages between them, and no circle of waiting ranks exists
even where a send blocks until its receive is posted: of all that is not yet done, the first in the common order can
always run.

An executor runs an instruction after the other on each rank. It holds the stages that `Placement.stages_of` names, uses
the loss in the forward of the last stage, frees the activations of a micro-batch after B or W of their stage, and may
start the data-parallel sum of a stage after the position that `lifetimes.last_gradients` gives.
"""

from __future__ import annotations

from typing import NamedTuple

from fireflyer.codesign.schedule.actions import Action, Kind, Pair, Schedule, passes
from fireflyer.codesign.schedule.costs import uniform_costs
from fireflyer.codesign.schedule.program import compile_schedule
from fireflyer.codesign.schedule.timing import simulate

__all__ = ["Instruction", "Message", "with_messages"]


class Message(NamedTuple):
    """A send or a receive of one rank. An activation goes from `stage` to `stage` + 1, the gradient of that activation
    from `stage` + 1 to `stage`: both ends name it by the same `gradient`, `stage` and `micro_batch`."""

    send: bool
    peer: int
    gradient: bool
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        what = f"{'gradient' if self.gradient else 'activation'} of stage {self.stage}, micro-batch {self.micro_batch}"
        return f"send {what} to {self.peer}" if self.send else f"receive {what} from {self.peer}"


Instruction = Action | Pair | Message


def with_messages(schedule: Schedule) -> tuple[tuple[Instruction, ...], ...]:
    """Rows with each send after the pass that computes it, and each receive before the pass that needs it: where the
    data can arrive if the stages are equal. Outputs for a stage of the same rank are not sent.

    Post a receive where it stands and wait for it before its pass. Raises `UsageError` where the rows deadlock.
    """
    program = compile_schedule(schedule)
    timeline = simulate(program, uniform_costs(schedule.placement, forward=1, backward=2, weights=1))
    # At one moment, messages of what has just ended come before the passes that begin.
    order: list[tuple[float, bool, int, Message | None]] = []
    entries: dict[int, Action | Pair] = {}
    for rank, (row, ids) in enumerate(zip(schedule.rows, program.rows, strict=True)):
        for entry, index in zip(row, ids, strict=True):
            entries[index] = entry
            order.append((timeline.begins_s[index], True, index, None))
            item = program.items[index]
            for action, need in zip(passes(entry), (item.need, item.other_need), strict=False):
                if need >= 0 and program.items[need].rank != rank:
                    gradient = action.kind is not Kind.FORWARD
                    boundary = action.stage if gradient else action.stage - 1
                    received = Message(False, program.items[need].rank, gradient, boundary, action.micro_batch)
                    order.append((timeline.ends_s[need], False, index, received))
    rows: list[list[Instruction]] = [[] for _ in schedule.rows]
    for _, _, index, message in sorted(order, key=lambda event: event[:3]):
        rank = program.items[index].rank
        if message is None:
            rows[rank].append(entries[index])
        else:
            rows[message.peer].append(message._replace(send=True, peer=rank))
            rows[rank].append(message)
    return tuple(map(tuple, rows))
