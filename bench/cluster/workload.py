"""A large cluster with a long queue, and what happens to it: drawn by a seed, in the mix of a research cluster."""

from __future__ import annotations

import random
from typing import Final

import msgspec

from fireflyer.base.units import SECOND
from fireflyer.cluster.core.scheduler.events import (
    Event,
    NodeChanged,
    RunEnded,
    SharesChanged,
    TaskChanged,
    TaskEnded,
    TasksSubmitted,
    UsageSet,
)
from fireflyer.cluster.core.scheduler.machine import SchedulerMachine
from fireflyer.cluster.core.scheduler.model import Decisions, Interrupt, Node, Policy, Request, Start, Task

__all__ = ["Cluster"]

HOUR: Final = 3600 * SECOND
START_NS: Final = 1_000_000 * SECOND
ZONES: Final = 4
LEAF_NODES: Final = 20
SUSPEND: Final = 60 * SECOND
ARRAY: Final = 1000
KINDS: Final = ("submit", "end", "node", "requeue")
SHARE_OF_KIND: Final = (0.46, 0.42, 0.06, 0.06)
USERS: Final = 200
SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128)
"""Nodes of 8 GPUs; most tasks are small, most node-seconds are in large ones."""
SHARE_OF_SIZE: Final = (0.55, 0.13, 0.11, 0.09, 0.06, 0.03, 0.02, 0.01)


class Cluster:
    """Nodes, users and tasks, and the machine that decides; `now_ns` goes on with each event."""

    def __init__(self, nodes: int, queued: int, seed: int = 1) -> None:
        self.rng = random.Random(seed)
        self.now_ns = START_NS
        self.machine = SchedulerMachine(Policy())
        self._ids = 0
        self.running: list[int] = []
        self._place: dict[int, int] = {}
        self.leaving: list[tuple[int, int]] = []
        """(when, task): what was interrupted needs `SUSPEND` to leave its nodes."""
        per_zone = -(-nodes // ZONES)
        self.nodes = [
            Node(name=f"n{at:05d}", zone=f"z{at // per_zone}", leaf=f"l{at // LEAF_NODES}") for at in range(nodes)
        ]
        for node in self.nodes:
            self.machine.apply(NodeChanged(node), self.now_ns)
        shares = {f"u{user}": nodes / USERS for user in range(USERS)}
        self.machine.apply(SharesChanged(shares), self.now_ns)
        self._fill(nodes, queued)

    def _fill(self, nodes: int, queued: int) -> None:
        """Tasks until all nodes are taken, then those that wait, submitted over the last 8 hours."""
        taken = 0
        while taken < nodes:
            task = self.task(age_ns=self.rng.randrange(8 * HOUR))
            taken += task.request.least_nodes
            self.machine.apply(TasksSubmitted((task,)), self.now_ns)
        self.decide()
        self.now_ns += 4 * HOUR
        for number in self.running:
            task = self.machine.task(number)
            if task.run is not None:
                run = msgspec.structs.replace(task.run, started_ns=self.now_ns - self.rng.randrange(4 * HOUR))
                self.machine.apply(TaskChanged(msgspec.structs.replace(task, run=run)), self.now_ns)
        self.machine.apply(UsageSet(self._usage()), self.now_ns)
        self.machine.apply(
            TasksSubmitted(tuple(self.task(age_ns=self.rng.randrange(8 * HOUR)) for _ in range(queued))), self.now_ns
        )
        self.decide()

    def _usage(self) -> dict[str, float]:
        """As if all had run like this, more or less, for a day."""
        used: dict[str, float] = {}
        for number in self.running:
            request = self.machine.task(number).request
            day_s = self.rng.uniform(0.5, 1.5) * 24 * 3600
            used[request.user] = used.get(request.user, 0.0) + request.least_nodes * day_s
        return used

    def task(self, age_ns: int = 0) -> Task:
        rng = self.rng
        self._ids += 1
        user = int(USERS * rng.random() ** 2)
        least = rng.choices(SIZES, SHARE_OF_SIZE)[0]
        request = Request(
            user=f"u{user}",
            user_group=f"g{user % 10}",
            priority=rng.choice([10, 10, 10, 20]),
            least_nodes=least,
            most_nodes=least,
            time_ns=rng.choice([None, rng.randrange(HOUR, 48 * HOUR)]),
        )
        at_ns = self.now_ns - age_ns
        return Task(id=self._ids, request=request, submitted_ns=at_ns, queued_ns=at_ns)

    def decide(self) -> Decisions:
        decisions = self.machine.decide(self.now_ns)
        self.carry_out(decisions)
        return decisions

    def carry_out(self, decisions: Decisions) -> None:
        for one in decisions:
            if isinstance(one, Start):
                self._place[one.task] = len(self.running)
                self.running.append(one.task)
            elif isinstance(one, Interrupt):
                self._stopped(one.task)
                self.leaving.append((self.now_ns + SUSPEND, one.task))

    def withdraw(self, event: Event) -> None:
        """What waits of those that were submitted."""
        for task in event.tasks if isinstance(event, TasksSubmitted) else ():
            if self.machine.task(task.id).run is None:
                self.machine.apply(TaskEnded(task.id), self.now_ns)

    def _stopped(self, task: int) -> None:
        at = self._place.pop(task)
        last = self.running.pop()
        if last != task:
            self.running[at] = last
            self._place[last] = at

    def next_kind(self) -> str:
        """In the long run as many end as are submitted; what was interrupted leaves after a while."""
        if self.leaving and self.leaving[0][0] <= self.now_ns:
            return "leave"
        return self.rng.choices(KINDS, SHARE_OF_KIND)[0]

    def event(self, kind: str) -> Event:
        """The next event of this kind, some seconds later."""
        rng = self.rng
        self.now_ns += rng.randrange(1, SECOND // 4 if kind == "leave" else 8 * SECOND)
        if kind == "submit":
            return TasksSubmitted((self.task(),))
        if kind == "array":
            first = self.task()
            self._ids += ARRAY
            return TasksSubmitted(
                tuple(
                    msgspec.structs.replace(first, id=number) for number in range(self._ids - ARRAY + 1, self._ids + 1)
                )
            )
        if kind == "leave":
            return RunEnded(self.leaving.pop(0)[1])
        if kind == "node":
            at = rng.randrange(len(self.nodes))
            self.nodes[at] = msgspec.structs.replace(self.nodes[at], usable=not self.nodes[at].usable)
            return NodeChanged(self.nodes[at])
        task = rng.choice(self.running)
        self._stopped(task)
        return RunEnded(task) if kind == "requeue" else TaskEnded(task)
