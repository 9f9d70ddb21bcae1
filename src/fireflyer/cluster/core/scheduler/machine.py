"""The scheduler's machine: events in, decisions out. It decides as `schedule` does, without looking at every task.

    machine = SchedulerMachine(policy)
    machine.apply(NodeChanged(node), now_ns)             what happened; decides nothing
    machine.apply(TasksSubmitted(tasks), now_ns)
    for decision in machine.decide(now_ns): ...          starts, interruptions, and claims that changed
    machine.why(task, now_ns)                            what one that waits is told, computed when it is asked for

What it decides it takes as done: a task that starts runs from then on, one that is interrupted leaves until RunEnded or
TaskEnded says that it has left. So whoever uses it carries every decision out, or tells it that the run ended.

Time is given with each call, and never goes back: an earlier time counts as the latest that was given. Usage is summed
up from the runs, at multiples of the policy's `usage_step_ns`; between them decisions read the last sums.

Equal to the definition means: `decide(now_ns)` is `schedule(machine.snapshot(), now_ns)` without those waits that leave
a task's claim as it is, and `why(task, now_ns)` is what `schedule` says to that task.
"""

from __future__ import annotations

import msgspec

from fireflyer.base.errors import UsageError
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
from fireflyer.cluster.core.scheduler.incremental.queue import Queue
from fireflyer.cluster.core.scheduler.incremental.running import GroupRuns
from fireflyer.cluster.core.scheduler.incremental.search import Search
from fireflyer.cluster.core.scheduler.limits import Limits
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
from fireflyer.cluster.core.scheduler.node_sets import NodeSets
from fireflyer.cluster.core.scheduler.order import queue_key, waits_since_ns
from fireflyer.cluster.core.scheduler.rules import Outcome, Turns
from fireflyer.cluster.core.scheduler.schedule import schedule
from fireflyer.cluster.core.scheduler.usage import UsageWindow

__all__ = ["SchedulerMachine"]


class _Standing:
    """What the order depends on; shared by all parts."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.usage: dict[str, float] = {}
        self.share: dict[str, float] = {}


class _Group:
    """What belongs to one group of nodes."""

    def __init__(self, tasks: dict[int, Task], sets: NodeSets, standing: _Standing) -> None:
        self.queue = Queue(tasks, sets, standing)
        self.runs = GroupRuns(sets, standing)


class SchedulerMachine:
    def __init__(self, policy: Policy) -> None:
        self._standing = _Standing(policy)
        self._sets = NodeSets()
        self._occupied = 0
        self._run_on: dict[str, int] = {}
        """Name of a node → the task that runs there."""
        self._tasks: dict[int, Task] = {}
        self._groups: dict[str, _Group] = {}
        self._limits = Limits(())
        self._reservations: tuple[Reservation, ...] = ()
        self._window = UsageWindow(policy.usage_half_life_ns)
        self._sampled = 0
        """The step of usage that was sampled last."""
        self._edge_ns: int | None = None
        self._now_ns = 0

    # Events.

    def apply(self, event: Event, now_ns: int) -> None:
        self._pass_time(now_ns)
        match event:
            case NodeChanged(node):
                self._change_node(node.name, node)
            case NodeRemoved(name):
                if self._sets.node(name) is not None:
                    self._change_node(name, None)
            case TasksSubmitted(tasks):
                for task in tasks:
                    self._put(task)
            case TaskChanged(task):
                self._put(task)
            case TaskEnded(number):
                self._drop(self.task(number))
            case RunLeaving(number):
                self._leave(self.task(number))
            case RunEnded(number, not_before_ns, never):
                self._requeue(self.task(number), not_before_ns, never)
            case CostChanged():
                self._change_cost(self.task(event.task), event)
            case _:
                self._change_site(event)

    def _change_site(self, event: Event) -> None:
        match event:
            case UsageSet(usage):
                self._window.set(usage, self._now_ns)
                self._standing.usage = dict(usage)
                self._resort()
            case SharesChanged(share):
                self._standing.share = dict(share)
                self._resort()
            case LimitsChanged(limits):
                self._change_limits(limits)
            case ReservationsChanged(reservations):
                self._change_reservations(reservations)
            case PolicyChanged(policy):
                self._change_policy(policy)

    def _put(self, task: Task) -> None:
        for name in task.run.nodes if task.run is not None else ():
            if self._run_on.get(name, task.id) != task.id:
                raise UsageError(
                    f"task {self._run_on[name]} runs on node {name}: end it before task {task.id} runs there"
                )
        if task.id in self._tasks:
            self._drop(self._tasks[task.id])
        self._tasks[task.id] = task
        group = self._groups.get(task.request.node_group)
        if group is None:
            group = self._groups[task.request.node_group] = _Group(self._tasks, self._sets, self._standing)
        if task.run is None:
            group.queue.add(task, self._sets.admitting(task), self._now_ns)
        else:
            self._window.change(task.request.user, len(task.run.nodes), self._now_ns)
            self._put_run(task, task.run)

    def _drop(self, task: Task) -> None:
        group = self._groups[task.request.node_group]
        if task.run is None:
            group.queue.remove(task, self._now_ns)
        else:
            self._window.change(task.request.user, -len(task.run.nodes), self._now_ns)
            self._drop_run(task, task.run)
        del self._tasks[task.id]

    def _put_run(self, task: Task, run: Run) -> None:
        nodes = self._sets.named(run.nodes)
        self._occupied |= nodes
        for name in run.nodes:
            self._run_on[name] = task.id
        self._limits.take(task.request, nodes.bit_count())
        self._groups[task.request.node_group].runs.add(task, nodes)

    def _drop_run(self, task: Task, run: Run) -> None:
        group = self._groups[task.request.node_group]
        nodes = group.runs.nodes_of(task.id)
        group.runs.remove(task)
        self._occupied &= ~nodes
        for name in run.nodes:
            self._run_on.pop(name, None)
        self._limits.take(task.request, -nodes.bit_count())
        for key in self._limits.applying(task.request):
            group.queue.unpark(key, self._limits, self._now_ns)

    def _leave(self, task: Task) -> None:
        if task.run is not None:
            self._put(msgspec.structs.replace(task, run=msgspec.structs.replace(task.run, leaving=True)))

    def _requeue(self, task: Task, not_before_ns: int, never: tuple[str, ...]) -> None:
        if task.run is None:
            raise UsageError(f"task {task.id} does not run: only a run can end")
        request = task.request
        if never:
            request = msgspec.structs.replace(request, never=(*request.never, *never))
        since_ns = waits_since_ns(task.queued_ns, task.run.started_ns, self._now_ns)
        self._put(
            msgspec.structs.replace(task, request=request, run=None, queued_ns=since_ns, not_before_ns=not_before_ns)
        )

    def _change_cost(self, task: Task, event: CostChanged) -> None:
        """Nothing else of the run is looked at again: there may be many of these."""
        if task.run is None:
            raise UsageError(f"task {task.id} does not run: only a run has costs")
        request = msgspec.structs.replace(task.request, interrupt_cost_ns=event.interrupt_cost_ns)
        run = msgspec.structs.replace(task.run, unsaved_since_ns=event.unsaved_since_ns)
        task = self._tasks[task.id] = msgspec.structs.replace(task, request=request, run=run)
        self._groups[request.node_group].runs.change_cost(task)

    def _change_node(self, name: str, node: Node | None) -> None:
        """A run on it is put anew: how many nodes it has, and in how many zones, may be others."""
        layout = self._sets.layout
        number = self._run_on.get(name)
        task = None if number is None else self._tasks[number]
        if task is not None and task.run is not None:
            self._drop_run(task, task.run)
        if node is None:
            self._sets.remove(name)
        else:
            self._sets.put(node)
        if task is not None and task.run is not None:
            self._put_run(task, task.run)
        if self._sets.layout != layout:
            for group in self._groups.values():
                group.queue.name_claims()
        self._unpark_all()

    def _change_limits(self, limits: tuple[Limit, ...]) -> None:
        self._limits = Limits(limits)
        for task in self._tasks.values():
            if task.run is not None:
                nodes = self._groups[task.request.node_group].runs.nodes_of(task.id)
                self._limits.take(task.request, nodes.bit_count())
        self._queue_anew()

    def _change_reservations(self, reservations: tuple[Reservation, ...]) -> None:
        self._reservations = reservations
        self._sets.reserve(reservations)
        self._queue_anew()
        for group in self._groups.values():
            group.runs.windows_changed(self._now_ns)

    def _change_policy(self, policy: Policy) -> None:
        self._standing.policy = policy
        self._window.half_life(policy.usage_half_life_ns, self._now_ns)
        self._sampled = self._now_ns // policy.usage_step_ns
        self._queue_anew()

    def _queue_anew(self) -> None:
        for group in self._groups.values():
            group.queue = Queue(self._tasks, self._sets, self._standing)
            group.runs.forget()
        for task in self._tasks.values():
            if task.run is None:
                queue = self._groups[task.request.node_group].queue
                queue.add(task, self._sets.admitting(task), self._now_ns)
        self._edge_ns = self._sets.next_edge_ns(self._now_ns)

    def _resort(self) -> None:
        for group in self._groups.values():
            group.queue.resort()
            group.runs.forget()

    def _unpark_all(self) -> None:
        """Nodes are open that were not, or will be."""
        for group in self._groups.values():
            group.queue.unpark(None, self._limits, self._now_ns)
        self._edge_ns = self._sets.next_edge_ns(self._now_ns)

    def _pass_time(self, now_ns: int) -> None:
        step_ns = self._standing.policy.usage_step_ns
        if now_ns // step_ns > self._sampled:
            self._sampled = now_ns // step_ns
            self._standing.usage = self._window.sample(max(self._now_ns, self._sampled * step_ns))
            self._resort()
        self._now_ns = max(self._now_ns, now_ns)
        if self._edge_ns is not None and self._now_ns >= self._edge_ns:
            self._unpark_all()

    # Answers.

    def decide(self, now_ns: int) -> Decisions:
        self._pass_time(now_ns)
        told: list[Decision] = []
        for name in sorted(self._groups):
            group = self._groups[name]
            told += [one for one in group.runs.for_maintenance(self._now_ns) if self._carry_out(one)]
            if len(group.queue):
                told += self._decide_group(group)
            elif not len(group.runs):
                del self._groups[name]
        return tuple(told)

    def _decide_group(self, group: _Group) -> list[Decision]:
        search, turns = self._search(group)
        search.run(self._tasks)
        turns.undo_limits()
        told = [decision for decision in search.decisions if self._carry_out(decision)]
        for its in search.stuck:
            if its.level is not None:
                task = its.at(0)
                if self._limits.room(task.request)[0] < task.request.least_nodes:
                    group.queue.park(its, self._limits.applying(task.request))
                elif turns.open_at_all(task).bit_count() < task.request.least_nodes:
                    group.queue.park(its, ())
        return told

    def _search(self, group: _Group) -> tuple[Search, Turns]:
        group.queue.advance(self._now_ns)
        free = self._sets.every & ~self._occupied
        claims = group.queue.claimants
        turns = Turns(group.runs, free, self._sets, self._standing, self._limits, claims, self._now_ns)
        return Search(group.queue, turns, self._sets, self._standing, self._now_ns), turns

    def _carry_out(self, decision: Decision) -> bool:
        """Whether there is anything to tell."""
        task = self._tasks[decision.task]
        if isinstance(decision, Start):
            run = Run(nodes=decision.nodes, started_ns=self._now_ns, backfilled=decision.backfilled)
            self._put(msgspec.structs.replace(task, run=run, claim=()))
        elif isinstance(decision, Interrupt):
            self._leave(task)
        elif decision.claim == task.claim:
            return False
        else:
            self._put(msgspec.structs.replace(task, claim=decision.claim))
        return True

    def why(self, task: int, now_ns: int) -> Decision:
        """What a task that waits is told now; a Start, if the next `decide` starts it. Nothing changes."""
        self._pass_time(now_ns)
        asked = self.task(task)
        if asked.run is not None:
            raise UsageError(f"task {task} runs; only a task that waits can be asked why")
        group = self._groups[asked.request.node_group]
        if group.runs.for_maintenance(self._now_ns):  # rare, and over with the next `decide`
            return next(one for one in schedule(self.snapshot(), self._now_ns) if _is_about(one, task))
        search, turns = self._search(group)
        search.run(self._tasks, until=queue_key(asked, self._now_ns, self._standing))
        verdict = turns.one(asked)
        turns.undo_limits()
        if verdict.outcome is Outcome.HEAD:
            return turns.head_waits()
        return verdict.decisions[-1]

    def before(self, task: int, now_ns: int) -> int:
        """How many tasks for the same group of nodes come before one that waits; without those that are held or paused.
        Nothing changes."""
        self._pass_time(now_ns)
        asked = self.task(task)
        if asked.run is not None:
            raise UsageError(f"task {task} runs; only a task that waits has a place in the queue")
        queue = self._groups[asked.request.node_group].queue
        queue.advance(self._now_ns)
        return queue.before(asked, self._now_ns)

    def wake_ns(self) -> int | None:
        """When time alone may change what is decided; None: never, since nothing waits, and no nodes that runs have
        are about to close."""
        times = [group.runs.next_maintenance_ns() for group in self._groups.values()]
        waiting = [group for group in self._groups.values() if len(group.queue)]
        if waiting:
            step_ns = self._standing.policy.usage_step_ns
            times += [(self._now_ns // step_ns + 1) * step_ns, self._edge_ns]
            times += [group.queue.next_pause_ns() for group in waiting]
        return min((at_ns for at_ns in times if at_ns is not None and at_ns > self._now_ns), default=None)

    def snapshot(self) -> Snapshot:
        return Snapshot(
            nodes=self._sets.nodes(),
            tasks=tuple(self._tasks.values()),
            limits=self._limits.limits,
            reservations=self._reservations,
            usage=self._standing.usage,
            share=self._standing.share,
            policy=self._standing.policy,
        )

    def task(self, task: int) -> Task:
        """As it is known now."""
        known = self._tasks.get(task)
        if known is None:
            raise UsageError(f"no task {task}: submit it first")
        return known


def _is_about(decision: Decision, task: int) -> bool:
    """Tells a task that waits."""
    return decision.task == task and not isinstance(decision, Interrupt)
