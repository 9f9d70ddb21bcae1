"""A schedule resolved for execution by machine: one order of all items that keeps every row and every dependency.

Made once for a schedule and timed many times, as a search over plans does. `compile_schedule` is also the check for
deadlocks: it runs the rows with everything available as soon as it is computed, which is the most that any executor
can do; where this stops, the rows wait for each other in a circle.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.codesign.schedule.actions import Action, Kind, Pair, Schedule, passes

__all__ = ["Item", "Program", "compile_schedule"]

NOTHING = -1


class Item(NamedTuple):
    """One action or pair, with what it waits for: the ids of up to two items, and over which boundary that output comes
    (`stages` - 1 for an output of the same rank, which costs nothing). `work` is an index into `Program.works`."""

    rank: int
    work: int
    need: int
    boundary: int
    other_need: int
    other_boundary: int


class Program(msgspec.Struct, frozen=True):
    """`items` in an order in which each comes after all that it needs; ids are indices into it."""

    schedule: Schedule
    items: tuple[Item, ...]
    works: tuple[tuple[Kind, int] | tuple[int, int], ...]
    """Kinds of work that items do: (kind, stage), or for a pair the stages of its forward and its backward."""
    rows: tuple[tuple[int, ...], ...]
    """Ids of each rank's items, in the order of its row."""


def compile_schedule(schedule: Schedule) -> Program:
    """Raises `UsageError` where the rows deadlock; it says which rank waits for what."""
    return _Compiler(schedule).run()


class _Compiler:
    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._stages = schedule.placement.stages
        self._micro_batches = schedule.micro_batches
        self._made: dict[int, int] = {}
        """Id of the item that made an output."""
        self._waiting: dict[int, list[int]] = {}
        self._works: dict[tuple[Kind, int] | tuple[int, int], int] = {}
        self._items: list[Item] = []
        self._rows: list[list[int]] = [[] for _ in schedule.rows]

    def run(self) -> Program:
        runnable = list(reversed(range(len(self._schedule.rows))))
        while runnable:
            self._advance(runnable.pop(), runnable)
        for rank, (row, done) in enumerate(zip(self._schedule.rows, self._rows, strict=True)):
            if len(done) < len(row):
                raise UsageError(
                    f"schedule {self._schedule.name!r} deadlocks: rank {rank} waits before {row[len(done)]} "
                    "for an output that no rank can compute first"
                )
        return Program(self._schedule, tuple(self._items), tuple(self._works), tuple(map(tuple, self._rows)))

    def _advance(self, rank: int, runnable: list[int]) -> None:
        """Appends items of a rank until one has to wait."""
        row, ids = self._schedule.rows[rank], self._rows[rank]
        while len(ids) < len(row):
            entry = row[len(ids)]
            if isinstance(entry, Pair):
                needs = (self._need(entry.forward), self._need(entry.backward))
                work: tuple[Kind, int] | tuple[int, int] = (entry.forward.stage, entry.backward.stage)
            else:
                needs = (self._need(entry), (NOTHING, NOTHING))
                work = (entry.kind, entry.stage)
            found = []
            for key, boundary in needs:
                made = NOTHING if key == NOTHING else self._made.get(key)
                if made is None:
                    self._waiting.setdefault(key, []).append(rank)
                    return
                local = made == NOTHING or self._items[made].rank == rank
                found += [made, self._stages - 1 if local else boundary]
            ids.append(len(self._items))
            self._items.append(Item(rank, self._works.setdefault(work, len(self._works)), *found))
            for action in passes(entry):
                if action.kind is not Kind.WEIGHT:
                    key = self._key(action.kind is not Kind.FORWARD, action.stage, action.micro_batch)
                    self._made[key] = ids[-1]
                    runnable += self._waiting.pop(key, ())

    def _need(self, action: Action) -> tuple[int, int]:
        """Key of the output that an action needs from another stage, and the boundary that it crosses."""
        if action.kind is Kind.FORWARD and action.stage > 0:
            return self._key(False, action.stage - 1, action.micro_batch), action.stage - 1
        if action.kind in (Kind.BACKWARD, Kind.INPUT) and action.stage < self._stages - 1:
            return self._key(True, action.stage + 1, action.micro_batch), action.stage
        return NOTHING, NOTHING

    def _key(self, gradient: bool, stage: int, micro_batch: int) -> int:
        return ((self._stages if gradient else 0) + stage) * self._micro_batches + micro_batch
