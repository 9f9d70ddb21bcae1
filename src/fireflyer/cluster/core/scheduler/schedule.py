"""What runs where, of everything that is known at an instant: the definition. The incremental machine must agree.

Groups of nodes are decided one after the other, each like this. Runs on nodes that are about to close leave
(`maintenance`). Then tasks that wait are looked at in the order of the queue (`order`). One that fits on free nodes
starts. For one that does not: if it fits with the nodes that runs are leaving, these are kept for it, its *claim*; if
it fits when others are interrupted, they are. A claim holds until its task starts, unless a node of it is lost or a
task that comes before finds no others. The first one that nothing helps is the *head*. Whoever comes behind it is
*backfilled*: starts on what is free, but yields to those before it at any time, unless it is certain by declared times
that it is gone before the head can start, or the head may not use those nodes.
"""

from __future__ import annotations

import msgspec

from fireflyer.cluster.core.scheduler.limits import Limits
from fireflyer.cluster.core.scheduler.maintenance import asked_to_leave
from fireflyer.cluster.core.scheduler.model import Decision, Decisions, Snapshot, Task
from fireflyer.cluster.core.scheduler.node_sets import NodeSets, union
from fireflyer.cluster.core.scheduler.order import may_interrupt, queue_key
from fireflyer.cluster.core.scheduler.rules import Candidates, Outcome, RunCost, Turns

__all__ = ["schedule"]


def schedule(snapshot: Snapshot, now_ns: int) -> Decisions:
    """One decision for each task that waits, and the interruptions that follow; in the order in which they are made."""
    sets = NodeSets(snapshot.nodes, snapshot.reservations)
    made: list[Decision] = []
    for group in sorted({task.request.node_group for task in snapshot.tasks}):
        made += _of_group(group, snapshot, sets, now_ns)
    return tuple(made)


def _of_group(group: str, snapshot: Snapshot, sets: NodeSets, now_ns: int) -> list[Decision]:
    tasks = [task for task in snapshot.tasks if task.request.node_group == group]
    waiting = [task for task in tasks if task.run is None]
    waiting.sort(key=lambda task: queue_key(task, now_ns, snapshot))
    running, made = _for_maintenance([task for task in tasks if task.run is not None], sets, now_ns)
    runs = _RunsOfSnapshot(running, snapshot, sets)
    limits = Limits(snapshot.limits)
    for task in runs.tasks:
        limits.take(task.request, runs.nodes_of(task.id).bit_count())
    free = ~union(sets.named(task.run.nodes) for task in snapshot.tasks if task.run is not None)
    claims = {task.id: sets.named(task.claim) for task in waiting}
    turns = Turns(runs, free, sets, snapshot, limits, claims, now_ns)
    for task in waiting:
        verdict = turns.one(task)
        made += (turns.head_waits(),) if verdict.outcome is Outcome.HEAD else verdict.decisions
    return made


def _for_maintenance(running: list[Task], sets: NodeSets, now_ns: int) -> tuple[list[Task], list[Decision]]:
    """Those that run, where those leave whose nodes close; and that they are asked to."""
    found: list[Task] = []
    made: list[Decision] = []
    for task in sorted(running, key=lambda task: task.id):
        if task.run is not None and not task.run.leaving:
            asked = asked_to_leave(task, sets.named(task.run.nodes), sets, now_ns)
            if asked is not None and asked.at_ns <= now_ns:
                made.append(asked.interrupt(task.id, now_ns))
                task = msgspec.structs.replace(task, run=msgspec.structs.replace(task.run, leaving=True))
        found.append(task)
    return found, made


class _RunsOfSnapshot:
    """`rules.Runs`, all of it computed anew."""

    def __init__(self, tasks: list[Task], snapshot: Snapshot, sets: NodeSets) -> None:
        self.tasks, self._snapshot, self._sets = tasks, snapshot, sets
        self._nodes = {task.id: sets.named(task.run.nodes) for task in tasks if task.run is not None}
        self.leaving = union(self._nodes[task.id] for task in tasks if task.run is not None and task.run.leaving)
        self._spread = {task.id: RunCost.of(task, self._nodes[task.id], sets) for task in tasks}
        self.crossing = sum(1 for spread in self._spread.values() if len(spread.zones) > 1)

    def nodes_of(self, task: int) -> int:
        return self._nodes[task]

    def spreads(self) -> dict[int, RunCost]:
        return self._spread

    def candidates(self, task: Task, now_ns: int) -> Candidates:
        found = {
            other.id: other
            for other in self.tasks
            if may_interrupt(task, other, now_ns, self._snapshot) or self._overstays(other, task, now_ns)
        }
        return Candidates(found, union(self._nodes[other] for other in found))

    def _overstays(self, running: Task, waiting: Task, now_ns: int) -> bool:
        leaving = running.run is None or running.run.leaving
        return not leaving and bool(self._nodes[running.id] & self._sets.reserved_for(waiting, running, now_ns))

    def declared_ends(self) -> list[tuple[int, int]]:
        return sorted(
            (task.run.started_ns + task.request.time_ns, task.id)
            for task in self.tasks
            if task.run is not None and task.request.time_ns is not None
        )
