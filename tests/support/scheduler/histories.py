"""What may happen to a small cluster, drawn by a seed: events for the scheduler's machine, one after the other."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Final

import msgspec
from tests.support.scheduler.snapshots import NOW_NS, USERS, nodes_of

from fireflyer.base.units import SECOND
from fireflyer.cluster.core.scheduler.events import (
    CostChanged,
    Event,
    LimitsChanged,
    NodeChanged,
    NodeRemoved,
    PolicyChanged,
    ReservationsChanged,
    RunEnded,
    RunLeaving,
    SharesChanged,
    TaskChanged,
    TaskEnded,
    TasksSubmitted,
    UsageSet,
)
from fireflyer.cluster.core.scheduler.model import Limit, LimitKind, Node, Policy, Request, Reservation, Task

__all__ = ["History"]

_TIMES_NS: Final = (None, 30 * SECOND, 120 * SECOND, 300 * SECOND)
_STEPS_S: Final = (0, 0, 0, 1, 1, 7, 13, 40, 61, 150)


class History:
    """Draws the next event from what the cluster has come to; `now_ns` goes on."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        rng = self.rng
        self.now_ns = NOW_NS
        self.policy = self._policy()
        self.nodes = {
            node.name: self._state(node) for node in nodes_of(*(rng.randint(2, 6) for _ in range(rng.randint(1, 3))))
        }
        self._next_task = 0
        self._windows = rng.random() < 0.3
        """Whether nodes are closed at times in this history."""
        self._limited = rng.random() < 0.5
        self._load = rng.choice([0.2, 0.35, 0.5])
        self._tight = rng.random() < 0.4
        """One user, with a limit, has most of the tasks: large ones that keep small ones from starting."""

    def begin(self) -> list[Event]:
        events: list[Event] = [NodeChanged(node) for node in self.nodes.values()]
        if self._tight:
            limit = self.rng.randint(len(self.nodes) // 2, len(self.nodes))
            events.append(LimitsChanged((Limit(kind=LimitKind.USER, name="ann", nodes=limit),)))
        return events

    def next(self, tasks: Mapping[int, Task]) -> Event:
        rng = self.rng
        self.now_ns += rng.choice(_STEPS_S) * SECOND + rng.choice([0, 0, 1])
        running = [number for number in sorted(tasks) if tasks[number].run is not None]
        waiting = [number for number in sorted(tasks) if tasks[number].run is None]
        if rng.random() < self._load or not tasks:
            return TasksSubmitted(self._array())
        if running and rng.random() < 0.6:
            number = rng.choice(running)
            if rng.random() < 0.3:
                return self._cost(number)
            leaving = [number for number in running if (run := tasks[number].run) is not None and run.leaving]
            if leaving and rng.random() < 0.7:
                return self._left(rng.choice(leaving))
            return rng.choice([TaskEnded(number), TaskEnded(number), self._left(number), RunLeaving(number)])
        if waiting and rng.random() < 0.3:
            number = rng.choice(waiting)
            return TaskEnded(number) if rng.random() < 0.5 else TaskChanged(self._other(tasks[number]))
        return self._of_site()

    def _cost(self, number: int) -> Event:
        rng = self.rng
        since_ns = rng.choice([None, self.now_ns - rng.randint(-5, 300) * SECOND])
        return CostChanged(number, interrupt_cost_ns=rng.randint(1, 90) * SECOND, unsaved_since_ns=since_ns)

    def _left(self, number: int) -> Event:
        rng = self.rng
        if rng.random() < 0.2:
            return TaskEnded(number)
        failed = rng.random() < 0.3
        return RunEnded(
            number,
            not_before_ns=self.now_ns + rng.choice([5, 100]) * SECOND if failed else 0,
            never=(rng.choice(list(self.nodes)),) if failed and self.nodes else (),
        )

    def _other(self, task: Task) -> Task:
        rng = self.rng
        request = msgspec.structs.replace(task.request, priority=rng.choice([0, 10, 11]))
        task = msgspec.structs.replace(task, held=rng.choice(["", "task 99 must end first"]))
        return msgspec.structs.replace(task, request=request)

    def _of_site(self) -> Event:
        rng = self.rng
        draw = rng.random()
        if self._tight and draw < 0.7:
            return NodeChanged(rng.choice(list(self.nodes.values())))  # nothing but time
        if draw < 0.5:
            return self._node_event()
        if draw < 0.6:
            return UsageSet({user: rng.choice([0.0, 10.0, 1000.0]) for user in USERS})
        if draw < 0.7:
            return SharesChanged({"ann": rng.choice([1.0, 2.0, 4.0])})
        if draw < 0.8 and self._limited:
            return LimitsChanged(tuple(self._limit() for _ in range(rng.choice([0, 1, 3]))))
        if draw < 0.9 and self._windows:
            return ReservationsChanged(tuple(self._reservation(at) for at in range(rng.choice([0, 1, 2]))))
        if draw < 0.95:
            self.policy = self._policy()
            return PolicyChanged(self.policy)
        return self._node_event()

    def _node_event(self) -> Event:
        rng = self.rng
        draw = rng.random()
        if draw < 0.15 and len(self.nodes) > 2:
            name = rng.choice(list(self.nodes))
            del self.nodes[name]
            return NodeRemoved(name)
        if draw < 0.35:
            node = rng.choice(nodes_of(7, 7, 7))
            self.nodes[node.name] = self._state(node)
        else:
            node = self.nodes[rng.choice(list(self.nodes))]
            usable = not node.usable or rng.random() < 0.5
            self.nodes[node.name] = msgspec.structs.replace(node, usable=usable, closed=self._closed())
        return NodeChanged(self.nodes[node.name])

    def _policy(self) -> Policy:
        rng = self.rng
        return Policy(
            age_step_ns=rng.choice([37, 100]) * SECOND,
            gang_age_ns=rng.choice([0, 20, 150]) * SECOND,
            cross_zone_nodes=4,
            cross_zone_tasks=rng.choice([1, 1, 2]),
            usage_step_ns=rng.choice([1, 60, 100_000]) * SECOND,
            usage_half_life_ns=rng.choice([100, 10_000]) * SECOND,
        )

    def _state(self, node: Node) -> Node:
        rng = self.rng
        return msgspec.structs.replace(
            node,
            usable=rng.random() < 0.95,
            labels=("big",) if rng.random() < 0.7 else (),
            group="other" if rng.random() < 0.1 else "default",
        )

    def _closed(self) -> tuple[tuple[int, int], ...]:
        if not self._windows or self.rng.random() < 0.5:
            return ()
        begin_ns = self.now_ns + self.rng.choice([-5, 20, 100]) * SECOND
        return ((begin_ns, begin_ns + self.rng.choice([50, 300]) * SECOND),)

    def _limit(self) -> Limit:
        rng = self.rng
        return Limit(
            kind=rng.choice([LimitKind.USER, LimitKind.EACH, LimitKind.GROUP]),
            name=rng.choice(["ann", "bob", "lab"]),
            priority=rng.choice([None, 10]),
            nodes=rng.randint(1, 12),
        )

    def _reservation(self, number: int) -> Reservation:
        rng = self.rng
        begin_ns = self.now_ns + rng.choice([-5, 20, 100]) * SECOND
        return Reservation(
            name=f"r{number}",
            nodes=tuple(rng.sample(sorted(self.nodes), min(len(self.nodes), rng.randint(1, 6)))),
            begin_ns=begin_ns,
            until_ns=begin_ns + rng.choice([50, 300]) * SECOND,
            users=("ann",) if rng.random() < 0.5 else (),
            user_groups=("lab",) if rng.random() < 0.3 else (),
            tasks=(rng.randint(0, 20),) if rng.random() < 0.3 else (),
        )

    def _array(self) -> tuple[Task, ...]:
        """Mostly of one element; earlier than now where a requeued one is submitted anew."""
        rng = self.rng
        least = rng.choice([1, 1, 1, 2, 4, 5, 7] if self._tight else [1, 1, 1, 2, 2, 3, 4, 5, 7])
        large = self._tight and least > 3
        request = Request(
            user="ann" if self._tight and rng.random() < 0.8 else rng.choice(USERS),
            user_group=rng.choice(["", "lab"]),
            priority=rng.choice([0, 10, 10, 10, 11, 30]),
            node_group="other" if rng.random() < 0.1 else "default",
            least_nodes=least,
            most_nodes=least + rng.choice([0, 0, 0, 2]),
            labels=("big",) if rng.random() < (0.7 if large else 0.2) else (),
            never=(rng.choice(list(self.nodes)),) if rng.random() < 0.1 else (),
            only=tuple(rng.sample(sorted(self.nodes), min(len(self.nodes), 5))) if rng.random() < 0.1 else (),
            guaranteed_ns=rng.choice([0, 60, 200]) * SECOND,
            interrupt_cost_ns=rng.randint(1, 5) * SECOND,
        )
        tasks = []
        for _ in range(rng.choice([1, 1, 2, 6])):
            submitted_ns = self.now_ns - rng.choice([0, 0, 0, 90]) * SECOND
            queued_ns = min(self.now_ns, submitted_ns + rng.choice([0, 0, 40]) * SECOND)
            leave_ns = rng.choice([0, 0, 15, 70]) * SECOND
            asked = msgspec.structs.replace(request, time_ns=rng.choice(_TIMES_NS), leave_ns=leave_ns)
            tasks.append(Task(id=self._next_task, request=asked, submitted_ns=submitted_ns, queued_ns=queued_ns))
            self._next_task += 1
        return tuple(tasks)
