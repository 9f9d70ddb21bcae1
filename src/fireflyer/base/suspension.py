"""How the ranks of a job agree on the point at which they leave it: a rank's cells of shared memory, and both sides.

A *suspend point* is a call of `should_suspend()`: each rank comes to the points 1, 2, 3, … (or gives the number of its
step), and all ranks come to the same points between their collectives. A *horizon* is the point at which all leave.

    supervisor                           rank, at each point
    ──────────                           ───────────────────
    word := WAITING        (all ranks)   point := n
    memory barrier                       word GO_ON    → goes on
    reads point            (all ranks)   word WAITING  → waits until it is another
    word := horizon                      word horizon  → leaves if n >= horizon, else goes on

The launcher collects the points of all nodes; the horizon is one above the highest. Why no rank goes on at the horizon
or above: a rank that goes on at n has read GO_ON after it wrote n, so it wrote n before WAITING was written, so the
supervisor has read n or a higher number, and the horizon is above n; or it has read the horizon, and n is below it. Why
all ranks reach the horizon: until then each takes part in every collective, since none has left; and a rank that waits
waits for supervisors and the launcher only, never for a rank.

The order of "writes n, then reads the word" is not kept by processors unless they are told: the supervisor's barrier
(membarrier(2)) does that for all of them, so that the rank pays nothing. Where the kernel has none, one write of each
rank may have been on its way: the point then counts as one higher.

`cells` is any sequence of integers: memory that is mapped, or a simulation's.
"""

from __future__ import annotations

import enum
from collections.abc import MutableSequence, Sequence

__all__ = [
    "CELLS",
    "MAX_POINT",
    "NEVER",
    "SUSPENDED_EXIT_CODE",
    "Answer",
    "NodeCells",
    "RankCells",
    "horizon_of",
]

SUSPENDED_EXIT_CODE = 85
"""Of a rank that left because it was asked to, and of a job whose ranks did (ERESTART in Linux)."""
CELLS = 8
"""Of 8 bytes each: a cache line for each rank."""
MAX_POINT = 1 << 40
NEVER = -1
"""The point of a rank that has not come to any."""

_WORD, _POINT, _LEFT, _OWNER, _ASKED = 0, 1, 2, 3, 4
_GO_ON, _WAITING = -1, -2


class Answer(enum.Enum):
    GO_ON = enum.auto()
    WAIT = enum.auto()
    """Look again until it is another answer."""
    LEAVE = enum.auto()


class RankCells:
    """A rank's side."""

    __slots__ = ("_cells", "_point")

    def __init__(self, cells: MutableSequence[int]) -> None:
        self._cells = cells
        self._point = 0

    def claim(self, process: int) -> bool:
        """Whether this process stands for the rank: the first one that comes does."""
        if not self._cells[_OWNER]:
            self._cells[_OWNER] = process
        return self._cells[_OWNER] == process

    def enter(self, step: int | None = None) -> Answer:
        """At the next point: first this rank's point, then the word; the proof needs this order."""
        point = self._point = self._point + 1 if step is None else step
        self._cells[_POINT] = point
        if self._cells[_WORD] == _GO_ON:
            return Answer.GO_ON
        return self.look()

    def look(self) -> Answer:
        """Again at the same point."""
        word = self._cells[_WORD]
        if word == _WAITING:
            return Answer.WAIT
        return Answer.LEAVE if 0 <= word <= self._point else Answer.GO_ON

    @property
    def asked_ns(self) -> int:
        """When this rank was asked to leave, by the machine's monotonic clock; 0: it was not."""
        return self._cells[_ASKED]

    def leave(self) -> None:
        """The exit code that follows is meant."""
        self._cells[_LEFT] = 1


class NodeCells:
    """The supervisor's side: the cells of all ranks of a node in one attempt. What ranks write is not trusted."""

    def __init__(self, ranks: Sequence[MutableSequence[int]]) -> None:
        self._ranks = ranks
        for cells in ranks:
            cells[_WORD], cells[_POINT] = _GO_ON, NEVER

    def hold(self, now_ns: int = 0) -> None:
        """A rank that comes to a point from now on waits there. A memory barrier must follow before `points`."""
        for cells in self._ranks:
            cells[_ASKED] = now_ns
        self._set(_WAITING, over=_GO_ON)

    def points(self, *, exact: bool) -> tuple[int, ...]:
        """The highest point at which each rank may have gone on. `exact`: there was a barrier after `hold`."""
        slack = 0 if exact else 1
        found = [cells[_POINT] for cells in self._ranks]
        return tuple(min(point + slack, MAX_POINT) if point >= 0 else NEVER for point in found)

    def asks(self) -> bool:
        """Whether any rank has come to a point."""
        return any(cells[_POINT] >= 0 for cells in self._ranks)

    def set_horizon(self, horizon: int) -> None:
        self._set(horizon, over=_WAITING)

    def release(self) -> None:
        """The ranks are being ended in another way: none of them waits any more."""
        self._set(_GO_ON, over=_WAITING)

    def has_left(self, local_rank: int) -> bool:
        return self._ranks[local_rank][_LEFT] == 1

    def _set(self, word: int, *, over: int) -> None:
        for cells in self._ranks:
            if cells[_WORD] == over:
                cells[_WORD] = word


def horizon_of(points: Sequence[int]) -> int:
    """The point at which all ranks leave, given the highest at which each may have gone on."""
    return max(points, default=NEVER) + 1
