"""Runs of one group of nodes, kept so that a pass need not look at all of them.

Most runs are within their guaranteed time, so nobody may interrupt them: they come into question when that has passed.
Whom of the others the head may interrupt is remembered for as long as the same task is head and counts the same.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence

from fireflyer.base.errors import InvariantViolation
from fireflyer.cluster.core.scheduler.maintenance import asked_to_leave
from fireflyer.cluster.core.scheduler.model import Interrupt, Task
from fireflyer.cluster.core.scheduler.node_sets import NodeSets
from fireflyer.cluster.core.scheduler.order import (
    Standing,
    aged_priority,
    ages_next_ns,
    counts_as,
    may_interrupt,
    usage_over_share,
)
from fireflyer.cluster.core.scheduler.rules import Candidates, RunCost

__all__ = ["GroupRuns"]

_FOREVER_NS = 1 << 200


class _Remembered:
    """Whom one task may interrupt."""

    def __init__(self, task: Task, aged: int) -> None:
        self.task, self.aged = task, aged
        self.tasks: dict[int, Task] = {}
        self.nodes = 0
        self.new: list[Task] = []
        """Runs that came into question since."""
        self.until_ns = _FOREVER_NS
        """A run counts otherwise from then on."""


class GroupRuns:
    """`rules.Runs`, kept up to date by each event."""

    def __init__(self, sets: NodeSets, standing: Standing) -> None:
        self._sets, self._standing = sets, standing
        self._tasks: dict[int, Task] = {}
        self._nodes: dict[int, int] = {}
        self._spread: dict[int, RunCost] = {}
        self._now_ns = 0
        self.leaving = 0
        self.crossing = 0
        self._ends: list[tuple[int, int]] = []
        self._guarantees: list[tuple[int, int]] = []
        self._leave_times: list[tuple[int, int]] = []
        """When runs are asked to leave because nodes of theirs close; also of runs that are no more."""
        self._in_question: dict[int, Task] = {}
        """Past their guaranteed time, or backfilled."""
        self._remembered: _Remembered | None = None
        self._ratios: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, task: Task, nodes: int) -> None:
        run = task.run
        if run is None:
            raise InvariantViolation(f"task {task.id} does not run")
        self._tasks[task.id] = task
        self._nodes[task.id] = nodes
        self._spread[task.id] = RunCost.of(task, nodes, self._sets)
        self.crossing += len(self._spread[task.id].zones) > 1
        if task.request.time_ns is not None:
            insort(self._ends, (run.started_ns + task.request.time_ns, task.id))
        if not run.leaving:
            self._time_to_leave(task)
        if run.leaving:
            self.leaving |= nodes
        elif run.backfilled:
            self._question(task)
        else:
            heapq.heappush(self._guarantees, (run.started_ns + task.request.guaranteed_ns, task.id))

    def remove(self, task: Task) -> None:
        run = task.run
        if run is None:
            raise InvariantViolation(f"task {task.id} does not run")
        del self._tasks[task.id]
        nodes = self._nodes.pop(task.id)
        self.crossing -= len(self._spread.pop(task.id).zones) > 1
        self.leaving &= ~nodes
        if task.request.time_ns is not None:
            del self._ends[bisect_left(self._ends, (run.started_ns + task.request.time_ns, task.id))]
        self._in_question.pop(task.id, None)
        remembered = self._remembered
        if remembered is not None and remembered.tasks.pop(task.id, None) is not None:
            remembered.nodes &= ~nodes

    def change_cost(self, task: Task) -> None:
        """The same run, whose interruption costs something else. Who may interrupt it does not depend on that, so it is
        in question as before."""
        self._tasks[task.id] = task
        self._spread[task.id] = self._spread[task.id].as_of(task)

    def _time_to_leave(self, task: Task) -> None:
        asked = asked_to_leave(task, self._nodes[task.id], self._sets, self._now_ns)
        if asked is not None:
            heapq.heappush(self._leave_times, (asked.at_ns, task.id))

    def windows_changed(self, now_ns: int) -> None:
        self._now_ns = now_ns
        self._leave_times.clear()
        for task in self._tasks.values():
            if task.run is not None and not task.run.leaving:
                self._time_to_leave(task)

    def for_maintenance(self, now_ns: int) -> list[Interrupt]:
        """Runs that are to be asked now; the same again, until they leave."""
        self._now_ns = now_ns
        found: dict[int, Interrupt] = {}
        while self._leave_times and self._leave_times[0][0] <= now_ns:
            _, number = heapq.heappop(self._leave_times)
            task = self._tasks.get(number)
            if task is None or task.run is None or task.run.leaving or number in found:
                continue
            asked = asked_to_leave(task, self._nodes[number], self._sets, now_ns)
            if asked is not None and asked.at_ns <= now_ns:
                found[number] = asked.interrupt(number, now_ns)
            elif asked is not None:
                heapq.heappush(self._leave_times, (asked.at_ns, number))
        for number in found:
            heapq.heappush(self._leave_times, (now_ns, number))
        return [found[number] for number in sorted(found)]

    def next_maintenance_ns(self) -> int | None:
        return self._leave_times[0][0] if self._leave_times else None

    def forget(self) -> None:
        """Usage, shares, the policy or reservations are others now."""
        self._ratios.clear()
        self._remembered = None

    def nodes_of(self, task: int) -> int:
        return self._nodes[task]

    def spreads(self) -> Mapping[int, RunCost]:
        return self._spread

    def declared_ends(self) -> Sequence[tuple[int, int]]:
        return self._ends

    def candidates(self, task: Task, now_ns: int) -> Candidates:
        self._end_guarantees(now_ns)
        if self._sets.has_reservations():
            return self._all_candidates(task, now_ns)
        aged = aged_priority(task, now_ns, self._standing.policy)
        known = self._remembered
        if known is None or known.task is not task or known.aged != aged or now_ns >= known.until_ns:
            known = self._remembered = _Remembered(task, aged)
            known.new.extend(self._in_question.values())
        if known.new:
            self._consider(known, now_ns)
        return Candidates(known.tasks, known.nodes)

    def _consider(self, known: _Remembered, now_ns: int) -> None:
        """Those that came into question. The same as `may_interrupt`, with what is the same for all taken out."""
        standing, aged, asked = self._standing, known.aged, known.task.request
        mine = standing.policy.usage_margin * self._ratio(asked.user)
        for other in known.new:
            if self._in_question.get(other.id) is not other or other.run is None:
                continue
            if other.run.backfilled:
                known.until_ns = min(known.until_ns, ages_next_ns(other, now_ns, standing.policy))
                may = may_interrupt(known.task, other, now_ns, standing)
            elif asked.priority > other.request.priority:
                may = True
            elif asked.user == other.request.user:
                may = False
            else:
                its, until_ns = counts_as(other, now_ns, standing.policy)
                if until_ns is not None and until_ns < known.until_ns:
                    known.until_ns = until_ns
                may = aged > its or (aged == its and self._ratio(other.request.user) > mine)
            if may:
                known.tasks[other.id] = other
                known.nodes |= self._nodes[other.id]
        known.new.clear()

    def _ratio(self, user: str) -> float:
        ratio = self._ratios.get(user)
        if ratio is None:
            ratio = self._ratios[user] = usage_over_share(user, self._standing.usage, self._standing.share)
        return ratio

    def _all_candidates(self, task: Task, now_ns: int) -> Candidates:
        """What is reserved now has no guaranteed time."""
        found: dict[int, Task] = {}
        nodes = 0
        for other in self._tasks.values():
            leaving = other.run is None or other.run.leaving
            its = self._nodes[other.id]
            if may_interrupt(task, other, now_ns, self._standing) or (
                not leaving and its & self._sets.reserved_for(task, other, now_ns)
            ):
                found[other.id] = other
                nodes |= its
        return Candidates(found, nodes)

    def _end_guarantees(self, now_ns: int) -> None:
        while self._guarantees and self._guarantees[0][0] <= now_ns:
            end_ns, number = heapq.heappop(self._guarantees)
            task = self._tasks.get(number)
            if task is None or task.run is None or task.run.leaving or task.run.backfilled:
                continue
            if end_ns == task.run.started_ns + task.request.guaranteed_ns:
                self._question(task)

    def _question(self, task: Task) -> None:
        self._in_question[task.id] = task
        if self._remembered is not None:
            self._remembered.new.append(task)
            if len(self._remembered.new) > len(self._tasks):
                self._remembered = None
