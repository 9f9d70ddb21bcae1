"""The scheduler's machine as simply as can be: what happened is kept in dictionaries, and `schedule` decides."""

from __future__ import annotations

import msgspec

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
from fireflyer.cluster.core.scheduler.model import (
    Decision,
    Decisions,
    Interrupt,
    Limit,
    Node,
    Policy,
    Reservation,
    Run,
    Snapshot,
    Start,
    Task,
)
from fireflyer.cluster.core.scheduler.schedule import schedule
from fireflyer.cluster.core.scheduler.usage import UsageWindow

__all__ = ["ReferenceMachine"]


class ReferenceMachine:
    def __init__(self, policy: Policy) -> None:
        self.nodes: list[Node | None] = []
        self.tasks: dict[int, Task] = {}
        self.limits: tuple[Limit, ...] = ()
        self.reservations: tuple[Reservation, ...] = ()
        self.share: dict[str, float] = {}
        self.usage: dict[str, float] = {}
        self.policy = policy
        self._window = UsageWindow(policy.usage_half_life_ns)
        self._step = 0
        self._now_ns = 0

    def apply(self, event: Event, now_ns: int) -> None:
        self._pass_time(now_ns)
        match event:
            case NodeChanged(node):
                self._put_node(node)
            case NodeRemoved(name):
                self.nodes = [None if node is not None and node.name == name else node for node in self.nodes]
            case TasksSubmitted(tasks):
                for task in tasks:
                    self._put(task)
            case TaskChanged(task):
                self._put(task)
            case TaskEnded(number):
                self._put(msgspec.structs.replace(self.tasks[number], run=None))
                del self.tasks[number]
            case RunLeaving(number):
                self._leave(self.tasks[number])
            case RunEnded(number, not_before_ns, never):
                task = self.tasks[number]
                request = msgspec.structs.replace(task.request, never=task.request.never + never)
                queued_ns = now_ns - (task.run.started_ns - task.queued_ns if task.run is not None else 0)
                task = msgspec.structs.replace(task, request=request, run=None, queued_ns=queued_ns)
                self._put(msgspec.structs.replace(task, not_before_ns=not_before_ns))
            case CostChanged(number, cost_ns, since_ns):
                task = self.tasks[number]
                assert task.run is not None
                request = msgspec.structs.replace(task.request, interrupt_cost_ns=cost_ns)
                run = msgspec.structs.replace(task.run, unsaved_since_ns=since_ns)
                self.tasks[number] = msgspec.structs.replace(task, request=request, run=run)
            case _:
                self._change_site(event, now_ns)

    def _change_site(self, event: Event, now_ns: int) -> None:
        match event:
            case UsageSet(usage):
                self._window.set(usage, now_ns)
                self.usage = usage
            case SharesChanged(share):
                self.share = share
            case LimitsChanged(limits):
                self.limits = limits
            case ReservationsChanged(reservations):
                self.reservations = reservations
            case PolicyChanged(policy):
                self.policy = policy
                self._window.half_life(policy.usage_half_life_ns, now_ns)
                self._step = now_ns // policy.usage_step_ns

    def _put_node(self, node: Node) -> None:
        """In its place; a new one in the first that is empty."""
        names = [None if one is None else one.name for one in self.nodes]
        if node.name in names:
            self.nodes[names.index(node.name)] = node
        elif None in names:
            self.nodes[names.index(None)] = node
        else:
            self.nodes.append(node)

    def _put(self, task: Task) -> None:
        before = self.tasks.get(task.id)
        for one, sign in ((before, -1), (task, 1)):
            if one is not None and one.run is not None:
                self._window.change(one.request.user, sign * len(one.run.nodes), self._now_ns)
        self.tasks[task.id] = task

    def _leave(self, task: Task) -> None:
        if task.run is not None:
            self._put(msgspec.structs.replace(task, run=msgspec.structs.replace(task.run, leaving=True)))

    def _pass_time(self, now_ns: int) -> None:
        if now_ns // self.policy.usage_step_ns > self._step:
            self._step = now_ns // self.policy.usage_step_ns
            self.usage = self._window.sample(max(self._now_ns, self._step * self.policy.usage_step_ns))
        self._now_ns = now_ns

    def snapshot(self) -> Snapshot:
        return Snapshot(
            nodes=tuple(node for node in self.nodes if node is not None),
            tasks=tuple(self.tasks[number] for number in sorted(self.tasks)),
            limits=self.limits,
            reservations=self.reservations,
            usage=self.usage,
            share=self.share,
            policy=self.policy,
        )

    def all_decisions(self, now_ns: int) -> Decisions:
        self._pass_time(now_ns)
        return schedule(self.snapshot(), now_ns)

    def decide(self, now_ns: int) -> Decisions:
        told: list[Decision] = []
        for one in self.all_decisions(now_ns):
            task = self.tasks[one.task]
            if isinstance(one, Start):
                run = Run(nodes=one.nodes, started_ns=now_ns, backfilled=one.backfilled)
                self._put(msgspec.structs.replace(task, run=run, claim=()))
            elif isinstance(one, Interrupt):
                self._leave(task)
            elif one.claim != task.claim:
                self._put(msgspec.structs.replace(task, claim=one.claim))
            else:
                continue
            told.append(one)
        return tuple(told)
