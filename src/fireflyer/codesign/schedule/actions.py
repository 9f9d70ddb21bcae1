"""Pipeline schedules as data: which rank runs which pass of which stage on which micro-batch, in which order.

A model is cut into stages of consecutive layers. A rank holds one stage or several (its placement). Each micro-batch
passes forward through stages 0, 1, ... and backward through them in reverse. A schedule gives each rank a row of
actions; a rank runs its row in order, and waits before an action until the input of that action is there:

- forward (F) of stage s needs F of stage s - 1;
- backward (B), or its part for the input (I), of the last stage needs F of the same stage, which computes the loss; of
  another stage s it needs B or I of stage s + 1;
- the part of the backward for the weights (W) needs I of the same stage;
- a pair runs F of one micro-batch and B of another at once, so that each hides the communication of the other.

Nothing else orders actions of different ranks. `validity.check` says whether a schedule is complete and free of
deadlocks; `execution` derives what an executor needs; `timing` says how long it takes.

Where a placement has two directions (DualPipe), the first half of the micro-batches goes in direction 0 and the second
half in direction 1; each direction has a replica of every stage.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec

__all__ = ["Action", "Kind", "Pair", "Placement", "Row", "Schedule", "bidirectional", "looped", "passes", "v_shaped"]


class Kind(enum.StrEnum):
    """Pass of one stage on one micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"
    """Backward for the input and the weights, in one."""
    INPUT = "I"
    """Backward for the input only; the stage before waits for no more than this."""
    WEIGHT = "W"
    """Backward for the weights only, some time after I."""


class Action(NamedTuple):
    """One pass of `stage` on `micro_batch`, both from 0. `str` gives it as `3F17`: stage, kind, micro-batch."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


class Pair(NamedTuple):
    """A forward and a backward (B) of different micro-batches that one rank runs at once."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"{self.forward}&{self.backward}"


Row = tuple[Action | Pair, ...]
"""What one rank runs, in order."""


class Placement(msgspec.Struct, frozen=True):
    """Ranks that hold the stages: `rank_of[direction][stage]`."""

    rank_of: tuple[tuple[int, ...], ...]

    @property
    def directions(self) -> int:
        """1, or 2 where every stage has a replica for micro-batches that go the other way."""
        return len(self.rank_of)

    @property
    def stages(self) -> int:
        return len(self.rank_of[0])

    @property
    def ranks(self) -> int:
        return 1 + max(self.rank_of[0])

    def stages_of(self, rank: int) -> tuple[tuple[int, int], ...]:
        """(direction, stage) of each replica of a stage on `rank`: what it keeps parameters of."""
        return tuple(
            (direction, stage)
            for direction, ranks in enumerate(self.rank_of)
            for stage, holder in enumerate(ranks)
            if holder == rank
        )


def looped(ranks: int, stages_per_rank: int = 1) -> Placement:
    """Stage s on rank s mod `ranks`."""
    return Placement((tuple(range(ranks)) * stages_per_rank,))


def v_shaped(ranks: int) -> Placement:
    """Two stages a rank: down the ranks and back, so that rank 0 holds the first stage and the last."""
    return Placement(((*range(ranks), *reversed(range(ranks))),))


def bidirectional(ranks: int) -> Placement:
    """Stage s on rank s for direction 0, and on rank `ranks` - 1 - s for direction 1."""
    return Placement((tuple(range(ranks)), tuple(reversed(range(ranks)))))


class Schedule(msgspec.Struct, frozen=True):
    """The rows of all ranks for one step of `micro_batches` micro-batches."""

    name: str
    placement: Placement
    micro_batches: int
    rows: tuple[Row, ...]
    """Actions of each rank in their order; `rows[r]` is the row of rank r."""

    def direction(self, micro_batch: int) -> int:
        """Direction in which a micro-batch passes the stages."""
        return micro_batch * self.placement.directions // self.micro_batches

    def rank_of(self, stage: int, micro_batch: int) -> int:
        """The rank that runs all passes of `stage` on `micro_batch`."""
        return self.placement.rank_of[self.direction(micro_batch)][stage]

    def actions(self) -> int:
        """Number of passes; a pair counts as two."""
        return sum(2 if isinstance(item, Pair) else 1 for row in self.rows for item in row)


def passes(item: Action | Pair) -> tuple[Action, ...]:
    """The one or two passes of an item of a row, the forward of a pair first."""
    return (item.forward, item.backward) if isinstance(item, Pair) else (item,)
