"""The suspension of a job: its ranks are asked to save and to leave at the same point (`base.suspension` says how they
agree). `Gang` holds one, tells it what happens, and does what it says.

    none ──begin──> COLLECTING ──points of all nodes──> LEAVING ──all ranks ended──> suspended
                         │                                 │
                         └────────── overdue ──────────────┴──> the ranks are stopped ──> suspended

In COLLECTING each supervisor makes its ranks wait at their next point and answers with the points at which they are, or
were when they ended. Supervisors answer without asking a rank, so this takes two messages, or the node counts as lost.
The answers name the *horizon*, which all supervisors are told.

What ends a suspension early: `grace_ns` is over; or all ranks that had asked by then have left, and the others, which
never ask, have had `settle_ns` (a script in which only rank 0 asks).

Verdict. A rank that exits with `SUSPENDED_EXIT_CODE` after `go_suspend()` has left. The job is suspended where a rank
has left, or where all had to be stopped; it has succeeded where all ranks ended with 0. A rank that fails before any
has left is judged as ever, except that no attempt follows: where one would have, the job is suspended. A rank that
fails when another has left fails because of that, and does not count.
"""

from __future__ import annotations

from collections.abc import Sequence

from fireflyer.base.rank_layout import RankLayout
from fireflyer.base.suspension import NEVER, horizon_of
from fireflyer.cluster.core.messages import AskPoints, Effect, NameHorizon, PointsCollected
from fireflyer.cluster.core.states import Node, NodeState

__all__ = ["Suspension"]

_ANSWERS = (NodeState.IDLE, NodeState.BUSY)
"""Of a node of a running attempt: its supervisor is up and knows the points of its ranks, which have ended if IDLE."""


class Suspension:
    """Of a job; it happens once. `begin`, then `advance` after each event."""

    def __init__(self, *, grace_ns: int, settle_ns: int) -> None:
        self._grace_ns, self._settle_ns = grace_ns, settle_ns
        self.asked = False
        self.asked_ranks = False
        """There were any to ask."""
        self.horizon: int | None = None
        self.any_left = False
        """A rank has left; all that will be saved has been."""
        self._collecting = False
        self._attempt = -1
        self._asked_ns = 0
        self._ended_ns = 0
        self._points: dict[int, tuple[int, ...]] = {}
        self._layout = RankLayout([1])

    def begin(self, now_ns: int, attempt: int, nodes: Sequence[Node], layout: RankLayout) -> list[Effect]:
        """`nodes` and `layout` are those of the running attempt. Where no rank runs, nobody is asked."""
        self.asked, self._attempt, self._layout = True, attempt, layout
        self._asked_ns = self._ended_ns = now_ns
        self._collecting = self.asked_ranks = any(node.state is NodeState.BUSY for node in nodes)
        if not self._collecting:
            return []
        return [AskPoints(node.number, node.incarnation, attempt) for node in nodes if node.state in _ANSWERS]

    def take(self, event: PointsCollected) -> None:
        if self._collecting and event.points.attempt == self._attempt:
            self._points[event.node] = event.points.points

    def rank_ended(self, now_ns: int, *, left: bool) -> None:
        self._ended_ns = now_ns
        self.any_left = self.any_left or left

    def gap(self, gap_ns: int) -> None:
        """The launcher slept so long: the ranks are given it back."""
        self._asked_ns += gap_ns
        self._ended_ns += gap_ns

    def advance(self, nodes: Sequence[Node]) -> list[Effect]:
        """Names the horizon when all have answered."""
        waited = [node for node in nodes if node.state in _ANSWERS and node.number not in self._points]
        if not self._collecting or waited:
            return []
        self._collecting = False
        busy = [node for node in nodes if node.state is NodeState.BUSY]
        self.horizon = horizon_of([point for points in self._points.values() for point in points])
        return [NameHorizon(node.number, node.incarnation, self._attempt, self.horizon) for node in busy]

    def overdue(self, now_ns: int, nodes: Sequence[Node]) -> bool:
        """Whether the ranks that are left are to be stopped."""
        if now_ns >= self._asked_ns + self._grace_ns:
            return True
        if not self.any_left or self._collecting or now_ns < self._ended_ns + self._settle_ns:
            return False
        return not any(self._asks(node) for node in nodes if node.state is NodeState.BUSY)

    def _asks(self, node: Node) -> bool:
        """Whether a rank of the node still runs that had come to a point."""
        points = self._points.get(node.number, ())
        ranks = self._layout.ranks(node.number)
        return any(point != NEVER and rank not in node.ends for rank, point in zip(ranks, points, strict=False))
