"""What the scheduler is compared with: FIFO, FIFO with EASY backfill, and priorities with preemption.

*FIFO*: whoever was submitted first and waits starts first; nobody passes. *Backfill* (EASY; Lifka 1995, as Slurm's
`sched/backfill` for one task): the first that does not fit gets a reservation, at the time when by the declared times
enough runs have ended; others may start before it if they end by then, or use nodes that it leaves over. *Preemption*
(Slurm's `preempt/partition_prio` with requeue): order by priority, then submission; who does not fit kills runs of
lower priority that have had their guaranteed time, if then it fits, with backfill behind it. What is killed loses the
work since its last checkpoint and waits in its old place. Undeclared runs are taken to be as long as the longest
allowed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Final, NamedTuple

from fireflyer.base.units import SECOND
from fireflyer.cluster.core.replay.policy import ClusterSettings, Decision, Interrupt, Start
from fireflyer.cluster.core.replay.rooms import Rooms, Shape, fit
from fireflyer.cluster.core.replay.trace import TraceTask
from fireflyer.cluster.core.replay.waiting import LONGEST, Waiting

__all__ = ["QueuePolicy", "backfill", "fifo", "preemption"]

UNDECLARED_NS: Final = 7 * 86400 * SECOND
ASKED_AGAIN_NS: Final = 60 * SECOND
"""With preemption, while a task waits: a guarantee may have ended."""


class _Running(NamedTuple):
    task: int
    nodes: tuple[int, ...]
    shape: Shape
    started_ns: int
    ends_ns: int
    """By what was declared."""


class QueuePolicy:
    """A queue whose order never changes."""

    def __init__(
        self,
        name: str,
        tasks: Sequence[TraceTask],
        cluster: ClusterSettings,
        *,
        by_priority: bool = False,
        backfills: bool = False,
        preempts: bool = False,
    ) -> None:
        self._name, self._tasks, self._cluster = name, tasks, cluster
        self._backfills, self._preempts = backfills, preempts
        self._lengths = [UNDECLARED_NS if task.time_ns is None else task.time_ns for task in tasks]
        keys = [-task.priority if by_priority else 0 for task in tasks]
        self._waiting = Waiting([task.nodes for task in tasks], self._lengths, keys)
        self._rooms = Rooms(cluster)
        self._running: dict[int, _Running] = {}
        self._ends: list[tuple[int, int]] = []
        self._wake_ns: int | None = None

    @property
    def name(self) -> str:
        return self._name

    def submitted(self, now_ns: int, tasks: Sequence[int]) -> None:  # noqa: ARG002
        for task in tasks:
            self._waiting.add(task)

    def finished(self, now_ns: int, task: int) -> None:  # noqa: ARG002
        run = self._running.pop(task)
        del self._ends[bisect_left(self._ends, (run.ends_ns, task))]
        self._rooms.give_back(run.nodes, run.shape)

    def vacated(self, now_ns: int, task: int) -> None:
        self.finished(now_ns, task)
        self._waiting.add(task)

    def node_down(self, now_ns: int, node: int) -> None:  # noqa: ARG002
        self._rooms.node_down(node)

    def node_up(self, now_ns: int, node: int) -> None:  # noqa: ARG002
        self._rooms.node_up(node)

    def wake_ns(self) -> int | None:
        return self._wake_ns

    def decide(self, now_ns: int) -> Sequence[Decision]:
        made: list[Decision] = []
        while (head := self._waiting.head()) is not None:
            shape = self._fits(head, self._rooms.counts, self._rooms.crossing)
            if shape is None:
                break
            made.append(self._start(head, shape, now_ns))
        self._wake_ns = now_ns + ASKED_AGAIN_NS if self._preempts and head is not None else None
        if head is None:
            return made
        victims = self._victims(head, now_ns) if self._preempts else []
        if victims:
            return [*made, *(Interrupt(victim, saves=False) for victim in victims)]
        if self._backfills and self._rooms.total:
            self._backfill(head, now_ns, made)
        return made

    def _fits(self, task: int, rooms: Sequence[int], crossing: int) -> Shape | None:
        return fit(self._tasks[task].nodes, rooms, self._cluster, crossing)

    def _start(self, task: int, shape: Shape, now_ns: int) -> Start:
        self._waiting.remove(task)
        nodes = self._rooms.take(shape)
        run = _Running(task, nodes, shape, now_ns, now_ns + self._lengths[task])
        self._running[task] = run
        insort(self._ends, (run.ends_ns, task))
        return Start(task, nodes)

    def _backfill(self, head: int, now_ns: int, made: list[Decision]) -> None:
        rooms = self._rooms
        while any(
            self._fits(task, rooms.counts, rooms.crossing)
            for _, task in self._waiting.first_by_size(rooms.total, LONGEST)
        ):
            shadow_ns, spare, crossing = self._reservation(head, now_ns)
            found = [
                (key, task, shape)
                for longest, limits, limit in (
                    (shadow_ns - now_ns, rooms.counts, rooms.crossing),
                    (LONGEST, spare, crossing),
                )
                for key, task in self._waiting.first_by_size(sum(limits), longest)
                if (shape := self._fits(task, limits, limit)) is not None and task != head
            ]
            if not found:
                return
            _, task, shape = min(found)
            made.append(self._start(task, shape, now_ns))

    def _reservation(self, head: int, now_ns: int) -> tuple[int, list[int], int]:
        """When the head starts if every run takes as long as declared, how many of the free nodes of each zone it does
        not need then, and what counts as crossing for those who use these."""
        rooms, crossing = list(self._rooms.counts), self._rooms.crossing
        for ends_ns, task in self._ends:
            shape = self._running[task].shape
            for zone, nodes in shape:
                rooms[zone] += nodes
            crossing -= len(shape) > 1
            needed = self._fits(head, rooms, crossing)
            if needed is None:
                continue
            for zone, nodes in needed:
                rooms[zone] -= nodes
            spare = [min(left, free) for left, free in zip(rooms, self._rooms.counts, strict=True)]
            crosses = len(needed) > 1
            return max(ends_ns, now_ns), spare, self._cluster.cross_zone_tasks if crosses else self._rooms.crossing
        return LONGEST, [0] * len(rooms), crossing

    def _victims(self, head: int, now_ns: int) -> list[int]:
        """Of the lowest priority first, then those that began last; in one zone where that is enough."""
        priority, started_ns = self._tasks[head].priority, now_ns - self._cluster.guaranteed_ns
        others = [
            run
            for run in self._running.values()
            if run.started_ns <= started_ns and self._tasks[run.task].priority < priority
        ]
        needed, rooms = self._tasks[head].nodes, self._rooms
        if rooms.total + sum(len(run.nodes) for run in others) < needed:
            return []
        others.sort(key=lambda run: (self._tasks[run.task].priority, -run.started_ns, run.task))
        scopes: list[tuple[int, ...]] = [(zone,) for zone in range(self._cluster.zones)]
        if needed >= self._cluster.cross_zone_nodes and rooms.crossing < self._cluster.cross_zone_tasks:
            scopes.append(tuple(range(self._cluster.zones)))
        found = [chosen for scope in scopes if (chosen := self._enough(needed, scope, others))]
        return [run.task for run in min(found, key=lambda runs: sum(len(run.nodes) for run in runs))] if found else []

    def _enough(self, needed: int, scope: tuple[int, ...], others: Sequence[_Running]) -> list[_Running]:
        room = sum(self._rooms.counts[zone] for zone in scope)
        chosen: list[tuple[int, _Running]] = []
        for run in others:
            if room >= needed:
                break
            gain = sum(nodes for zone, nodes in run.shape if zone in scope)
            if gain:
                chosen.append((gain, run))
                room += gain
        if room < needed:
            return []
        kept = []
        for gain, run in chosen:
            if room - gain >= needed:
                room -= gain
            else:
                kept.append(run)
        return kept


def fifo(tasks: Sequence[TraceTask], cluster: ClusterSettings) -> QueuePolicy:
    return QueuePolicy("FIFO", tasks, cluster)


def backfill(tasks: Sequence[TraceTask], cluster: ClusterSettings) -> QueuePolicy:
    return QueuePolicy("FIFO with backfill", tasks, cluster, backfills=True)


def preemption(tasks: Sequence[TraceTask], cluster: ClusterSettings) -> QueuePolicy:
    return QueuePolicy("priority preemption", tasks, cluster, by_priority=True, backfills=True, preempts=True)
