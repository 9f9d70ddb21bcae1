"""A pass over those tasks that may not just wait, in the order of the queue.

Before there is a head, every class that is not parked is asked. The first task of it that cannot start is the head, so
this ends soon. Behind the head only what fits on free nodes matters: a family that wants more than are free is dropped
at once, with all of its tasks, and so is a class of which one did not fit. Free nodes only get fewer from then on, with
two exceptions, after which the search begins anew behind the task that it has reached: nodes that one claimed that did
not take them, and another choice of nodes for those that would have kept what the head needs.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from fireflyer.cluster.core.scheduler.incremental.queue import Entry, EqualTasks, Family, Queue
from fireflyer.cluster.core.scheduler.model import Decision, Task
from fireflyer.cluster.core.scheduler.node_sets import NodeSets
from fireflyer.cluster.core.scheduler.order import QueueKey, Standing, queue_key
from fireflyer.cluster.core.scheduler.rules import Outcome, Turns

__all__ = ["Search"]


class _Next(NamedTuple):
    """The next task of a class, or one with a claim. The key ends with its number."""

    key: QueueKey
    its: EqualTasks | None
    position: int
    others: Iterator[Entry] | None = None
    """Where it was found as the first of its class: the classes of its family that come next."""


class Search:
    def __init__(self, queue: Queue, turns: Turns, sets: NodeSets, standing: Standing, now_ns: int) -> None:
        self._queue, self._turns, self._sets, self._standing, self._now_ns = queue, turns, sets, standing, now_ns
        self._windows = sets.has_windows(now_ns)
        self._heap: list[_Next] = []
        self._live: dict[EqualTasks, int] = {}
        """Which task of a class is the next, of those not found at the front of a family."""
        self._yielding: dict[EqualTasks, None] = {}
        self._fits: dict[tuple[object, ...], tuple[int, int]] = {}
        self.stuck: list[EqualTasks] = []
        """Classes that limits or too few nodes keep from starting."""
        self.decisions: list[Decision] = []

    def run(self, tasks: dict[int, Task], until: QueueKey | None = None) -> None:
        """`until`: only those that come before."""
        self._begin(tasks)
        while self._heap:
            if until is not None and self._heap[0].key >= until:
                return
            found = heapq.heappop(self._heap)
            if found.its is None:
                self._claimant(tasks[found.key[3]], found.key)
            elif found.others is not None or self._live.get(found.its) == found.position:
                self._of_class(found, found.its)

    def _begin(self, tasks: dict[int, Task]) -> None:
        for family in self._queue.families():
            self._next_class(self._queue.in_order(family))
        for number in self._queue.claimants:
            heapq.heappush(self._heap, _Next(self._key(tasks[number]), None, 0))

    def _next_class(self, others: Iterator[Entry]) -> None:
        for key, its in others:
            heapq.heappush(self._heap, _Next(key, its, 0, others))
            return

    def _key(self, task: Task) -> QueueKey:
        return queue_key(task, self._now_ns, self._standing)

    def _claimant(self, task: Task, key: QueueKey) -> None:
        had_head = self._turns.has_head
        before = self._turns.unclaimed() if had_head else 0
        outcome = self._ask(task)
        if outcome is Outcome.HEAD:
            self._drop_large()
        elif had_head:
            if self._turns.unclaimed() & ~before:
                self._begin_behind(key)
            elif outcome in (Outcome.STARTS, Outcome.KEEPS):
                self._ask_yielding_again(key)

    def _of_class(self, found: _Next, its: EqualTasks) -> None:
        if self._turns.has_head and not self._may_fit(its.family):
            return
        self._live.pop(its, None)
        if found.others is not None:
            self._next_class(found.others)
        task = its.at(found.position)
        had_head = self._turns.has_head
        outcome = self._ask(task)
        next_one = found.position + 1
        if outcome is Outcome.STARTS:
            self._go_on(its, next_one)
            if had_head:
                self._ask_yielding_again(found.key)
        elif outcome is Outcome.KEEPS:
            self._go_on(its, next_one)
        elif outcome is Outcome.YIELDS:
            self._yielding[its] = None
            self._after_yielding(its, next_one)
        elif outcome is not Outcome.LIMIT:
            if outcome is Outcome.HEAD:
                self._drop_large()
            if self._windows and task.request.span_ns > 0:
                self._go_on(its, its.shorter(next_one, task.request.span_ns - 1))
        if outcome in (Outcome.LIMIT, Outcome.TOO_FEW):
            self.stuck.append(its)

    def _ask(self, task: Task) -> Outcome:
        verdict = self._turns.one(task)
        if verdict.outcome is Outcome.HEAD:
            if task.claim:
                self.decisions.append(self._turns.head_waits())
        elif verdict.outcome in (Outcome.STARTS, Outcome.KEEPS) or task.claim:
            self.decisions.extend(verdict.decisions)
        if verdict.outcome in (Outcome.STARTS, Outcome.KEEPS):
            self._fits.clear()
        return verdict.outcome

    def _go_on(self, its: EqualTasks, position: int) -> None:
        if position < len(its):
            self._live[its] = position
            heapq.heappush(self._heap, _Next(self._key(its.at(position)), its, position))

    def _after_yielding(self, its: EqualTasks, position: int) -> None:
        """Those that are gone before the head can start need not yield."""
        if self._windows:
            self._go_on(its, position)
        else:
            starts_ns = self._turns.head_starts_ns()
            if starts_ns is not None:
                self._go_on(its, its.declared_shorter(position, starts_ns - self._now_ns))

    def _ask_yielding_again(self, key: QueueKey) -> None:
        """They may be given other nodes than before."""
        for its in self._yielding:
            self._go_on(its, its.after(key, self._now_ns, self._standing))
        self._yielding.clear()

    def _begin_behind(self, key: QueueKey) -> None:
        self._heap = [found for found in self._heap if found.its is None]
        heapq.heapify(self._heap)
        self._live.clear()
        self._yielding.clear()
        self._fits.clear()
        for family in self._queue.families():
            if self._may_fit(family):
                for aged, level in family.levels.items():
                    if aged >= -key[0]:
                        for its in level.classes:
                            self._go_on(its, its.after(key, self._now_ns, self._standing))
                self._next_class(self._queue.in_order(family, below=-key[0]))

    def _drop_large(self) -> None:
        """What wants more than is free, now that there is a head."""
        self._fits.clear()
        self._heap = [found for found in self._heap if found.its is None or self._may_fit(found.its.family)]
        heapq.heapify(self._heap)

    def _may_fit(self, family: Family) -> bool:
        """Whether a gang of the family fits on what is free and not claimed, if no time closes more nodes to it."""
        room, total = self._room(family)
        if room >= family.least:
            return True
        policy = self._standing.policy
        crosses = family.least >= policy.cross_zone_nodes and self._turns.crossing < policy.cross_zone_tasks
        return crosses and total >= family.least

    def _room(self, family: Family) -> tuple[int, int]:
        """In one zone, and in all."""
        nodes = family.key[1]
        found = self._fits.get(nodes)
        if found is None:
            free = self._turns.unclaimed()
            if free:
                free &= self.eligible(family) & self._sets.open_for(0, self._now_ns, family.admitted)
            total = free.bit_count()
            room = max((free & zone).bit_count() for zone in self._sets.of_zone.values()) if total else 0
            found = self._fits[nodes] = room, total
        return found

    def eligible(self, family: Family) -> int:
        if family.layout != self._sets.layout:
            family.layout, family.eligible = self._sets.layout, self._sets.eligible(family.request)
        return family.eligible
