"""What runs where, of everything that is known at an instant: the definition. The incremental machine must agree.

Groups of nodes are decided one after the other, each like this. Tasks that wait are looked at in the order of the queue
(`order`). One that fits on free nodes starts. For one that does not: if it fits with the nodes that runs are leaving,
these are kept for it, its *claim*; if it fits when others are interrupted, they are. A claim holds until its task
starts, unless a node of it is lost or a task that comes before finds no others. The first one that nothing helps is the
*head*. Whoever comes behind it is *backfilled*: starts on what is free, but yields to those before it at any time,
unless it is certain by declared times that it is gone before the head can start, or the head may not use those nodes.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from fireflyer.base.errors import InvariantViolation
from fireflyer.cluster.core.scheduler.limits import Limits
from fireflyer.cluster.core.scheduler.model import Decision, Decisions, Interrupt, Request, Snapshot, Start, Task, Wait
from fireflyer.cluster.core.scheduler.node_sets import NodeSets, each_bit
from fireflyer.cluster.core.scheduler.order import may_interrupt, queue_key
from fireflyer.cluster.core.scheduler.placement import place, zones_of
from fireflyer.cluster.core.scheduler.victims import Victim, cheapest

__all__ = ["schedule"]


def schedule(snapshot: Snapshot, now_ns: int) -> Decisions:
    """One decision for each task that waits, and the interruptions that follow; in the order in which they are made."""
    sets = NodeSets(snapshot.nodes)
    made: list[Decision] = []
    for group in sorted({task.request.node_group for task in snapshot.tasks}):
        made += _GroupPass(group, snapshot, sets, now_ns).decide()
    return tuple(made)


class _GroupPass:
    """One group of nodes at one instant."""

    def __init__(self, group: str, snapshot: Snapshot, sets: NodeSets, now_ns: int) -> None:
        self._snapshot, self._sets, self._now_ns = snapshot, sets, now_ns
        tasks = [task for task in snapshot.tasks if task.request.node_group == group]
        self._running = [task for task in tasks if task.run is not None]
        self._waiting = sorted((task for task in tasks if task.run is None), key=self._key)
        self._nodes = {task.id: sets.named(task.run.nodes) for task in self._running if task.run is not None}
        self._free = ~_union(sets.named(task.run.nodes) for task in snapshot.tasks if task.run is not None)
        self._leaving = _union(
            self._nodes[task.id] for task in self._running if task.run is not None and task.run.leaving
        )
        self._crossing = sum(1 for task in self._running if self._crosses(task))
        self._limits = Limits(snapshot.limits)
        for task in self._running:
            self._limits.take(task.request, self._nodes[task.id].bit_count())
        claims = {task.id: sets.named(task.claim) for task in self._waiting}
        self._claims = {task: nodes for task, nodes in claims.items() if nodes}
        self._interrupted: set[int] = set()
        self._head: Task | None = None
        self._head_starts_ns: int | None = None

    def _key(self, task: Task) -> tuple[int, float, int, int]:
        return queue_key(task, self._now_ns, self._snapshot)

    def _crosses(self, task: Task) -> bool:
        return zones_of(tuple(each_bit(self._nodes[task.id])), self._sets) > 1

    def decide(self) -> list[Decision]:
        return [decision for task in self._waiting for decision in self._one(task)]

    def _one(self, task: Task) -> list[Decision]:
        request = task.request
        claim = self._claims.pop(task.id, 0)
        if task.held:
            return [Wait(task.id, task.held)]
        if self._now_ns < task.not_before_ns:
            return [Wait(task.id, "it failed and is started again after a pause", task.not_before_ns)]
        room, words = self._limits.room(request)
        if room < request.least_nodes:
            return [Wait(task.id, words)]
        eligible = self._sets.eligible(request) & self._sets.open_for(request.time_ns, self._now_ns)
        wanted = msgspec.structs.replace(request, most_nodes=min(request.most_nodes, room))
        if eligible.bit_count() < request.least_nodes:
            return [Wait(task.id, self._too_few(request, eligible))]
        if claim and not claim & ~((self._free | self._leaving) & eligible):
            chosen = self._place(wanted, claim)
            if chosen is not None and claim & ~self._free:
                return self._keep(task, chosen, "the tasks on its nodes are leaving")
        else:
            chosen = self._place_kindly(wanted, self._free & eligible)
        if chosen is not None:
            return self._start(task, chosen)
        if self._head is not None:
            return [Wait(task.id, f"task {self._head.id} comes first and does not fit either")]
        return self._make_room(task, eligible)

    def _place(self, request: Request, free: int) -> tuple[int, ...] | None:
        return place(request, free, self._sets, self._snapshot.policy, self._crossing)

    def _place_kindly(self, request: Request, free: int) -> tuple[int, ...] | None:
        """Without what is claimed by those who come later, where that is enough; the head, too, goes before them."""
        later = _union(self._claims.values())
        kind = self._place(request, free & ~later)
        return kind if kind is not None or not later or self._head is not None else self._place(request, free)

    def _keep(self, task: Task, chosen: tuple[int, ...], reason: str) -> list[Decision]:
        self._take(task, chosen)
        return [Wait(task.id, reason, claim=self._sets.names(chosen))]

    def _start(self, task: Task, chosen: tuple[int, ...]) -> list[Decision]:
        head, nodes = self._head, _of(chosen)
        backfilled = head is not None and not self._gone_before_head(task, nodes)
        self._take(task, chosen)
        if backfilled and head is not None:
            room, _ = self._limits.room(head.request)
            if room < head.request.least_nodes or zones_of(chosen, self._sets) > 1:
                self._give_back(task, chosen)
                return [Wait(task.id, f"it would keep what task {head.id} needs, which comes first")]
        reason = f"backfilled: task {head.id} does not fit" if backfilled and head is not None else "it is its turn"
        return [Start(task.id, self._sets.names(chosen), backfilled, reason)]

    def _gone_before_head(self, task: Task, nodes: int) -> bool:
        """Whether a run on these nodes is nothing to the head."""
        if self._head is None or not nodes & self._sets.eligible(self._head.request):
            return True
        time_ns, starts_ns = task.request.time_ns, self._head_starts_ns
        return time_ns is not None and starts_ns is not None and self._now_ns + time_ns <= starts_ns

    def _take(self, task: Task, chosen: tuple[int, ...]) -> None:
        nodes = _of(chosen)
        self._free &= ~nodes
        self._leaving &= ~nodes
        self._limits.take(task.request, len(chosen))
        self._crossing += zones_of(chosen, self._sets) > 1

    def _give_back(self, task: Task, chosen: tuple[int, ...]) -> None:
        self._free |= _of(chosen)
        self._limits.take(task.request, -len(chosen))
        self._crossing -= zones_of(chosen, self._sets) > 1

    def _make_room(self, task: Task, eligible: int) -> list[Decision]:
        least = msgspec.structs.replace(task.request, most_nodes=task.request.least_nodes)
        soon = (self._free | self._leaving) & eligible
        chosen = self._place_kindly(least, soon)
        if chosen is not None:
            return self._keep(task, chosen, "the tasks on its nodes are leaving")
        victims = self._victims(task, eligible, soon)
        if victims is not None:
            freed = _union(self._nodes[victim] for victim in victims)
            self._interrupted.update(victims)
            self._leaving |= freed
            chosen = self._place(least, (soon | freed) & eligible)
            if chosen is None:
                raise InvariantViolation(f"task {task.id} does not fit on what was freed for it")
            interrupts = [Interrupt(victim, task.id, f"task {task.id} comes first") for victim in victims]
            return [*interrupts, *self._keep(task, chosen, f"it interrupts {', '.join(map(str, victims))}")]
        self._head, self._head_starts_ns = task, self._earliest_ns(least, eligible, soon)
        free = (self._free & eligible).bit_count()
        needs = f"needs {least.least_nodes} of {eligible.bit_count()} nodes that it may use; {free} are free"
        return [Wait(task.id, needs, self._head_starts_ns)]

    def _victims(self, task: Task, eligible: int, soon: int) -> tuple[int, ...] | None:
        """The cheapest set in one zone, or in all."""
        others = [
            other
            for other in sorted(self._running, key=self._key, reverse=True)
            if other.id not in self._interrupted and may_interrupt(task, other, self._now_ns, self._snapshot)
        ]
        scopes = list(self._sets.of_zone.values())
        policy, least = self._snapshot.policy, task.request.least_nodes
        if least >= policy.cross_zone_nodes and self._crossing < policy.cross_zone_tasks:
            scopes.append(_union(scopes))
        found = []
        for number, scope in enumerate(scopes):
            candidates = [
                Victim(
                    other.id,
                    self._nodes[other.id].bit_count() * other.request.interrupt_cost_ns,
                    (self._nodes[other.id] & eligible & scope).bit_count(),
                )
                for other in others
            ]
            cheapest_here = cheapest(candidates, least - (soon & scope).bit_count())
            if cheapest_here is not None:
                found.append((cheapest_here[0], number, cheapest_here[1]))
        return min(found)[2] if found else None

    def _earliest_ns(self, request: Request, eligible: int, soon: int) -> int | None:
        """When it fits, if every run takes as long as was declared."""
        ends = sorted(
            (task.run.started_ns + task.request.time_ns, task.id)
            for task in self._running
            if task.run is not None and task.request.time_ns is not None
        )
        for end_ns, ended in ends:
            soon |= self._nodes[ended] & eligible
            if self._place(request, soon) is not None:
                return max(end_ns, self._now_ns)
        return None

    def _too_few(self, request: Request, eligible: int) -> str:
        may = self._sets.eligible(request).bit_count()
        now = eligible.bit_count()
        closed = "" if may == now else f", of which {may - now} are down, drained or closed"
        return f"needs {request.least_nodes} nodes of {request.node_group}; {may} have what it asks for{closed}"


def _of(numbers: Iterable[int]) -> int:
    return _union(1 << number for number in numbers)


def _union(sets: Iterable[int]) -> int:
    found = 0
    for one in sets:
        found |= one
    return found
