"""Between rows and the scheduler: rows that have changed become its events, its decisions become runs.

The scheduler takes for done what it decides; when a draft is dropped, it is made anew from what is committed.
"""

from __future__ import annotations

from typing import Final

import msgspec

from fireflyer.base.units import SECOND
from fireflyer.cluster.core.platform.heard import Heard
from fireflyer.cluster.core.platform.life.costs import UNKNOWN_NS, Cost
from fireflyer.cluster.core.platform.life.tasks import Tasks
from fireflyer.cluster.core.platform.messages import Settings
from fireflyer.cluster.core.platform.store.ledger import Ledger
from fireflyer.cluster.core.platform.store.rows import NodeRow, RunState, TaskRow, UsageRow, Wish
from fireflyer.cluster.core.scheduler.events import (
    CostChanged,
    LimitsChanged,
    NodeChanged,
    NodeRemoved,
    PolicyChanged,
    ReservationsChanged,
    SharesChanged,
    TaskChanged,
    TaskEnded,
    TasksSubmitted,
    UsageSet,
)
from fireflyer.cluster.core.scheduler.forecast import Forecast, forecast
from fireflyer.cluster.core.scheduler.machine import SchedulerMachine
from fireflyer.cluster.core.scheduler.model import Decision, Interrupt, Node, Request, Run, Start, Task, Wait
from fireflyer.cluster.schema.tasks import FINISHED, TaskSpec

__all__ = ["Planner"]

NEVER_NS: Final = 1 << 61
MOST_PASSES: Final = 100
LEAVE_SLACK_NS: Final = 15 * SECOND
"""Until a run that does not leave by itself is killed after its grace period, and the manager knows."""
FORECAST_TASKS: Final = 4000
"""Of all passes of a forecast together: a manager does nothing else meanwhile."""


class Planner:
    def __init__(self, ledger: Ledger, heard: Heard, tasks: Tasks, settings: Settings) -> None:
        self._ledger, self._heard, self._tasks, self._settings = ledger, heard, tasks, settings
        self._machine = SchedulerMachine(ledger.config.policy)
        self._told: dict[int, Task] = {}
        self._nodes: dict[str, Node] = {}
        self._due = True
        self._wake_ns: int | None = None
        """When it is due next without an event, as the last decision left it: who is asked why passes time as well."""
        self._usage_step = 0

    # --- what the scheduler knows ---

    def rebuild(self, time_ns: int, now_ns: int) -> None:
        """From what is committed."""
        config = self._ledger.config
        self._machine = SchedulerMachine(config.policy)
        self._told, self._nodes, self._due = {}, {}, True
        self._settings_to_machine(time_ns)
        usage = {
            row.name: row.node_seconds * 2.0 ** (-(time_ns - row.at_ns) / config.policy.usage_half_life_ns)
            for row in self._ledger.usage.committed.values()
        }
        self._machine.apply(UsageSet(usage), time_ns)
        for name in self._ledger.nodes.committed:
            self.node(name, time_ns, now_ns)
        tasks = [self._model(row) for row in self._ledger.tasks.committed.values() if self._counts(row)]
        self._told = {task.id: task for task in tasks}
        if tasks:
            self._machine.apply(TasksSubmitted(tuple(tasks)), time_ns)

    def settings_changed(self, time_ns: int) -> None:
        self._settings_to_machine(time_ns)
        self._tasks.touched.update(self._ledger.index.unfinished)

    def _settings_to_machine(self, time_ns: int) -> None:
        config = self._ledger.settings
        self._machine.apply(PolicyChanged(config.policy), time_ns)
        self._machine.apply(LimitsChanged(config.limits), time_ns)
        self._machine.apply(SharesChanged(dict(config.shares)), time_ns)
        self._machine.apply(ReservationsChanged(config.reservations), time_ns)
        self._due = True

    def node(self, name: str, time_ns: int, now_ns: int) -> None:
        """One of which something is known anew."""
        row = self._ledger.nodes.get(name)
        if row is None:
            if self._nodes.pop(name, None) is not None:
                self._machine.apply(NodeRemoved(name), time_ns)
                self._due = True
            return
        node = Node(
            name=name,
            group=row.group,
            zone=row.zone,
            leaf=row.leaf,
            labels=row.labels,
            usable=self._usable(row, now_ns),
        )
        if self._nodes.get(name) != node:
            self._nodes[name] = node
            self._machine.apply(NodeChanged(node), time_ns)
            self._due = True

    def _usable(self, row: NodeRow, now_ns: int) -> bool:
        """Up, drained neither by people nor by its health, and nothing lives there that should not."""
        checked = self._settings.checking.order_of(row.group) is not None
        health = self._ledger.health.get(row.name) if checked else None
        if health is not None and not health.takes_tasks:
            return False
        if row.drained or not self._heard.is_up(row.name, now_ns, self._settings.lost_ns):
            return False
        sync, place = self._heard.sync(row.name), self._ledger.places.get(row.name)
        own = self._ledger.runs.known((place.task, place.run)).token if place is not None else ""
        return sync is None or all(run.state == "gone" or run.token == own for run in sync.runs)

    def _counts(self, row: TaskRow) -> bool:
        """Unfinished, or with a run that still has nodes."""
        return row.state is not FINISHED or self._ledger.index.open_run(row) is not None

    def told(self, time_ns: int) -> None:
        """Hands over all tasks that were touched."""
        new: list[Task] = []
        for task_id in self._tasks.touched:
            row = self._ledger.tasks.get(task_id)
            known = self._told.get(task_id)
            if row is None or not self._counts(row):
                if known is not None:
                    del self._told[task_id]
                    self._machine.apply(TaskEnded(task_id), time_ns)
                    self._due = True
                continue
            task = self._model(row)
            if known is None:
                new.append(task)
            elif (before := self._machine.task(task_id)) != task:
                change = _change(before, task)
                self._machine.apply(change, time_ns)
                self._due = self._due or isinstance(change, TaskChanged)
            self._told[task_id] = task
        if new:
            self._machine.apply(TasksSubmitted(tuple(new)), time_ns)
            self._due = True
        self._tasks.touched.clear()

    def _model(self, row: TaskRow) -> Task:
        spec = self._tasks.spec(row)
        run = self._run(row, interactive=spec.kind == "interactive")
        return self._task(row, spec, run)

    def _task(self, row: TaskRow, spec: TaskSpec, run: Run | None) -> Task:
        interactive = spec.kind == "interactive"
        request = Request(
            user=row.user,
            user_group=row.group,
            priority=row.priority,
            node_group=spec.node_group,
            least_nodes=spec.least_nodes,
            most_nodes=spec.most_nodes,
            time_ns=spec.time_ns,
            labels=spec.labels,
            only=spec.only,
            never=(*spec.never, *row.excluded),
            guaranteed_ns=NEVER_NS if interactive else self._ledger.settings.guaranteed_ns,
            interrupt_cost_ns=self._cost(row).interrupt_cost_ns if run is not None else UNKNOWN_NS,
            leave_ns=LEAVE_SLACK_NS + (0 if interactive else spec.grace_ns),
        )
        return Task(
            id=row.id,
            request=request,
            submitted_ns=row.submitted_ns,
            queued_ns=row.queued_ns,
            run=run,
            claim=row.claim if run is None else (),
            held=self._tasks.held_words(row, spec) if run is None else "",
            not_before_ns=row.not_before_ns,
        )

    def _run(self, row: TaskRow, *, interactive: bool) -> Run | None:
        key = self._ledger.index.open_run(row)
        if key is None:
            return None
        run = self._ledger.runs.known(key)
        has = self._ledger.index.places.get(key, {})
        return Run(
            nodes=tuple(name for name in run.nodes if name in has),
            started_ns=run.scheduled_ns,
            backfilled=run.backfilled and not interactive,
            leaving=run.wanted != "run" or run.state is RunState.ENDED,
            unsaved_since_ns=self._heard.costs.of(run).unsaved_since_ns,
        )

    def _cost(self, row: TaskRow) -> Cost:
        """Of its last run, which is open."""
        return self._heard.costs.of(self._ledger.runs.known((row.id, row.runs - 1)))

    # --- deciding ---

    def is_due(self, time_ns: int) -> bool:
        return self._due or (self._wake_ns is not None and time_ns >= self._wake_ns)

    def decide(self, time_ns: int) -> None:
        """Into the draft."""
        self._due = False
        for one in self._machine.decide(time_ns):
            match one:
                case Start(task, nodes, backfilled, reason):
                    self._tasks.begin(task, nodes, reason, backfilled=backfilled)
                case Interrupt(task, _, reason):
                    row = self._ledger.tasks.known(task)
                    key = self._ledger.index.open_run(row)
                    if key is not None:
                        # An interactive task is interrupted for maintenance alone, and ends with its run.
                        ends = self._tasks.spec(row).kind == "interactive"
                        run = self._ledger.runs.known(key)
                        self._tasks.leave(run, "stop" if ends else "suspend", Wish.INTERRUPT, reason)
                case Wait(task=task, claim=claim):
                    row = self._ledger.tasks.known(task)
                    if row.claim != claim:
                        self._tasks.put_claim(row, claim)
        self._wake_ns = self._machine.wake_ns()

    def why(self, task: int, time_ns: int) -> Decision | None:
        """Of one that waits; None for one that the scheduler has just started or does not know yet."""
        return self._machine.why(task, time_ns) if self._waits(task) else None

    def before(self, task: int, time_ns: int) -> int | None:
        return self._machine.before(task, time_ns) if self._waits(task) else None

    def _waits(self, task: int) -> bool:
        """As far as the scheduler knows."""
        return task in self._told and self._machine.task(task).run is None

    def would_start(self, row: TaskRow, spec: TaskSpec, time_ns: int) -> Forecast:
        """What would become of a task that is not submitted, if it were now."""
        snapshot = self._machine.snapshot()
        task = self._task(row, spec, None)
        group = [one for one in snapshot.tasks if one.request.node_group == spec.node_group]
        snapshot = msgspec.structs.replace(snapshot, tasks=(*group, task))
        passes = max(1, min(MOST_PASSES, FORECAST_TASKS // len(snapshot.tasks)))
        return forecast(snapshot, row.id, time_ns, most_passes=passes)

    def usage(self) -> dict[str, float]:
        return dict(self._machine.snapshot().usage)

    def sample_usage(self, time_ns: int) -> None:
        """Once a step of the policy: what users have used, into the draft."""
        step = time_ns // self._ledger.settings.policy.usage_step_ns
        if step == self._usage_step:
            return
        self._usage_step = step
        usage = self.usage()
        for name, row in list(self._ledger.usage.rows()):
            if name not in usage:
                self._ledger.usage.put(row.name, None)
        for name, used in usage.items():
            known = self._ledger.usage.get(name)
            if known is None or known.node_seconds != used:
                self._ledger.usage.put(name, UsageRow(name=name, node_seconds=used, at_ns=time_ns))


def _change(before: Task, task: Task) -> TaskChanged | CostChanged:
    if before.run is None or task.run is None:
        return TaskChanged(task)
    cost_ns, since_ns = task.request.interrupt_cost_ns, task.run.unsaved_since_ns
    request = msgspec.structs.replace(before.request, interrupt_cost_ns=cost_ns)
    run = msgspec.structs.replace(before.run, unsaved_since_ns=since_ns)
    same = msgspec.structs.replace(before, request=request, run=run) == task
    return CostChanged(task.id, cost_ns, since_ns) if same else TaskChanged(task)
