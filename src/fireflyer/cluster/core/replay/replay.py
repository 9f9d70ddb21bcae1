"""Replays a trace under a policy: submissions, runs, failures and repairs, one instant after the other.

At each instant: runs that are done, runs that have saved, what befalls nodes (`node_driver`; where no driver is given,
nodes fail and are repaired), tasks that are submitted; then the policy decides, and its decisions are checked and
performed. Failures do not depend on the policy.
The replay ends when every task has finished. Node-time is counted twice, by what nodes did (`Meter`) and by what runs
did (`life.cut`), and both must agree to the nanosecond.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Final

import msgspec

from fireflyer.base.errors import InvariantViolation, UsageError
from fireflyer.base.units import SECOND, format_duration
from fireflyer.cluster.core.replay.failures import FailAndRepair, Failures, FailureSettings
from fireflyer.cluster.core.replay.life import Costs, Parts, cut, run_ns
from fireflyer.cluster.core.replay.meter import Bucket, Meter, Totals
from fireflyer.cluster.core.replay.node_driver import NodeDriver, PlacedRun, RunEnd
from fireflyer.cluster.core.replay.policy import ClusterSettings, Interrupt, Policy, Start
from fireflyer.cluster.core.replay.trace import TraceTask

__all__ = ["Outcome", "Replay", "ReplaySettings", "TaskLife"]

MAX_DRAIN_NS: Final = 366 * 86400 * SECOND
FREE: Final = -1
_FINISHED, _SAVED = range(2)


class ReplaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """All that a replay depends on beside trace and policy."""

    cluster: ClusterSettings
    costs: Costs = Costs()
    failures: FailureSettings = FailureSettings()
    seed: int = 1
    """Of failures and repairs."""
    warm_up_ns: int = 0
    """What is told of the cluster begins then: the first runs find it empty. It ends with the last submission."""


class TaskLife:
    """What became of one task. Times are nanoseconds since the trace began."""

    __slots__ = (
        "ended_ns",
        "failures",
        "first_start_ns",
        "interrupts",
        "left_ns",
        "lost_ns",
        "queued_ns",
        "run",
        "waits_since_ns",
    )

    def __init__(self, work_ns: int, now_ns: int) -> None:
        self.left_ns = work_ns
        """Work that is in no checkpoint yet."""
        self.first_start_ns: int | None = None
        self.ended_ns: int | None = None
        self.waits_since_ns = now_ns
        self.queued_ns = 0
        """All its waits together."""
        self.lost_ns = 0
        self.interrupts = 0
        self.failures = 0
        """Runs that ended because a node failed."""
        self.run: _Run | None = None


class _Run:
    """Where a task runs now."""

    __slots__ = ("leaves_ns", "nodes", "number", "started_ns", "task")

    def __init__(self, number: int, task: int, nodes: tuple[int, ...], now_ns: int) -> None:
        self.number = number
        self.task = task
        self.nodes = nodes
        self.started_ns = now_ns
        self.leaves_ns: int | None = None
        """When it was told to."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Of one replay."""

    policy: str
    tasks: tuple[TraceTask, ...]
    lives: tuple[TaskLife, ...]
    window_ns: tuple[int, int]
    window: Totals
    whole: Totals
    hours: tuple[Bucket, ...]
    events: int
    """Of which the policy was told."""


class Replay:
    """One trace under one policy."""

    def __init__(
        self, tasks: Sequence[TraceTask], settings: ReplaySettings, policy: Policy, driver: NodeDriver | None = None
    ) -> None:
        _check(tasks, settings.cluster)
        self._tasks = tuple(tasks)
        self._settings, self._policy = settings, policy
        self._costs = settings.costs
        self._lives: list[TaskLife] = []
        self._runs: dict[int, _Run] = {}
        self._started = 0
        self._unfinished = len(self._tasks)
        self._holder = [FREE] * settings.cluster.nodes
        self._up = [True] * settings.cluster.nodes
        self._healthy, self._allocated = settings.cluster.nodes, 0
        nodes = settings.cluster.nodes
        self._driver = driver or FailAndRepair(Failures(settings.failures, nodes, settings.seed), nodes)
        self._agenda: list[tuple[int, int, int]] = []
        self._meter, self._parts, self._events = Meter(), Parts(), 0
        last_ns = self._tasks[-1].submit_ns
        begin_ns = min(settings.warm_up_ns, last_ns)
        self._window_ns = (begin_ns, last_ns)
        self._marks: list[int] = [last_ns, begin_ns]
        self._marked: list[Totals] = []

    def run(self) -> Outcome:
        """Until all tasks have finished. Raises `UsageError` where that takes years."""
        self._driver.begin(self)
        while self._unfinished:
            now_ns = self._next_ns()
            if now_ns > self._window_ns[1] + MAX_DRAIN_NS:
                raise UsageError(
                    f"{self._unfinished} tasks have not finished a year after the last submission under "
                    f"{self._policy.name}; give more nodes, fewer failures or less work"
                )
            self._advance(now_ns)
            self._happen(now_ns)
            while self._decide(now_ns):
                pass
        return self._outcome()

    def _next_ns(self) -> int:
        times = [] if not self._agenda else [self._agenda[0][0]]
        driven_ns = self._driver.next_ns()
        if driven_ns is not None:
            times.append(driven_ns)
        if len(self._lives) < len(self._tasks):
            times.append(self._tasks[len(self._lives)].submit_ns)
        woken_ns = self._policy.wake_ns()
        if woken_ns is not None:
            if woken_ns <= self._meter.at_ns:
                raise InvariantViolation(f"{self._policy.name} wants to be asked at {woken_ns} ns, which has passed")
            times.append(woken_ns)
        if not times:
            raise InvariantViolation(
                f"{self._unfinished} tasks wait under {self._policy.name}, and nothing will happen"
            )
        return min(times)

    def _advance(self, now_ns: int) -> None:
        while self._marks and self._marks[-1] <= now_ns:
            self._pass_time(self._marks[-1])
            self._marked.append(self._totals(self._marks.pop()))
        self._pass_time(now_ns)

    def _pass_time(self, now_ns: int) -> None:
        waiting = len(self._lives) - len(self._runs) - (len(self._tasks) - self._unfinished)
        self._meter.advance(now_ns, healthy=self._healthy, allocated=self._allocated, waiting=waiting)

    def _totals(self, now_ns: int) -> Totals:
        parts = self._parts
        for run in self._runs.values():
            parts = parts.plus(self._so_far(run, now_ns)[0], len(run.nodes))
        return Totals(healthy=self._meter.healthy, allocated=self._meter.allocated, parts=parts)

    def _happen(self, now_ns: int) -> None:
        agenda = self._agenda
        while agenda and agenda[0][0] == now_ns:
            _, kind, number = heapq.heappop(agenda)
            run = self._runs.get(number)
            if run is not None and (kind == _SAVED) == (run.leaves_ns is not None):
                self._end(run, now_ns, RunEnd.INTERRUPTED if kind == _SAVED else RunEnd.FINISHED, saved=True)
        self._driver.happen(now_ns)
        first = len(self._lives)
        while len(self._lives) < len(self._tasks) and self._tasks[len(self._lives)].submit_ns == now_ns:
            self._lives.append(TaskLife(self._tasks[len(self._lives)].work_ns, now_ns))
        if len(self._lives) > first:
            self._events += len(self._lives) - first
            self._policy.submitted(now_ns, range(first, len(self._lives)))

    # --- what the driver of the nodes may do ---

    def run_on(self, node: int) -> PlacedRun | None:
        holder = self._holder[node]
        return None if holder == FREE else self._lives[holder].run

    def close(self, now_ns: int, node: int) -> None:
        if not self._up[node]:
            raise InvariantViolation(f"node {node} was closed twice")
        self._up[node] = False
        self._healthy -= 1
        self._events += 1
        self._policy.node_down(now_ns, node)

    def open(self, now_ns: int, node: int) -> None:
        if self._up[node]:
            raise InvariantViolation(f"node {node} was opened twice")
        self._up[node] = True
        self._healthy += 1
        self._events += 1
        self._policy.node_up(now_ns, node)

    def fail_run(self, now_ns: int, node: int) -> None:
        holder = self._holder[node]
        if holder == FREE:
            return
        run = self._lives[holder].run
        if run is None:
            raise InvariantViolation(f"node {node} is held by task {holder}, which does not run")
        self._lives[holder].failures += 1
        self._end(run, now_ns, RunEnd.FAILED, saved=False)

    def _so_far(self, run: _Run, now_ns: int) -> tuple[Parts, int]:
        """Of a run that has not ended: its parts, and what would be lost if it ended now."""
        stopped_ns = now_ns if run.leaves_ns is None else run.leaves_ns
        parts, unsaved_ns = cut(stopped_ns - run.started_ns, self._lives[run.task].left_ns, self._costs)
        return parts._replace(save=now_ns - stopped_ns), unsaved_ns

    def _end(self, run: _Run, now_ns: int, end: RunEnd, *, saved: bool) -> None:
        """The run leaves its nodes: done, or with all of its work saved, or without what is in no checkpoint."""
        life = self._lives[run.task]
        parts, unsaved_ns = self._so_far(run, now_ns)
        if not saved:
            parts = parts._replace(productive=parts.productive - unsaved_ns, lost=unsaved_ns)
            life.lost_ns += unsaved_ns
        life.left_ns -= parts.productive
        if life.left_ns < 0:
            raise InvariantViolation(f"task {run.task} did {-life.left_ns} ns more than its work")
        life.run = None
        self._parts = self._parts.plus(parts, len(run.nodes))
        del self._runs[run.number]
        for node in run.nodes:
            self._holder[node] = FREE
        self._allocated -= len(run.nodes)
        self._events += 1
        if life.left_ns == 0:
            life.ended_ns = now_ns
            self._unfinished -= 1
            self._policy.finished(now_ns, run.task)
        else:
            life.waits_since_ns = now_ns
            self._policy.vacated(now_ns, run.task)
        self._driver.ended(now_ns, run, end)

    def _decide(self, now_ns: int) -> bool:
        """Whether something was killed, so that the policy must be asked again at once."""
        killed = False
        for decision in self._policy.decide(now_ns):
            if isinstance(decision, Start):
                self._start(decision, now_ns)
            else:
                killed |= not decision.saves
                self._interrupt(decision, now_ns)
        return killed

    def _start(self, start: Start, now_ns: int) -> None:
        task, nodes = start
        if not 0 <= task < len(self._lives) or self._lives[task].run is not None or self._lives[task].left_ns == 0:
            raise InvariantViolation(f"{self._policy.name} started task {task}, which does not wait")
        if len(nodes) != self._tasks[task].nodes or len(set(nodes)) != len(nodes):
            raise InvariantViolation(f"{self._policy.name} gave task {task} {len(nodes)} nodes, or a node twice")
        for node in nodes:
            if not self._up[node] or self._holder[node] != FREE:
                raise InvariantViolation(f"{self._policy.name} gave task {task} node {node}, which is down or not free")
            self._holder[node] = task
        life = self._lives[task]
        life.queued_ns += now_ns - life.waits_since_ns
        if life.first_start_ns is None:
            life.first_start_ns = now_ns
        run = _Run(self._started, task, nodes, now_ns)
        self._started += 1
        life.run = self._runs[run.number] = run
        self._allocated += len(nodes)
        heapq.heappush(self._agenda, (now_ns + run_ns(life.left_ns, self._costs), _FINISHED, run.number))
        self._driver.started(now_ns, run)

    def _interrupt(self, interrupt: Interrupt, now_ns: int) -> None:
        run = self._lives[interrupt.task].run
        if run is None or run.leaves_ns is not None:
            raise InvariantViolation(f"{self._policy.name} interrupted task {interrupt.task}, which does not run")
        self._lives[interrupt.task].interrupts += 1
        if interrupt.saves:
            run.leaves_ns = now_ns
            heapq.heappush(self._agenda, (now_ns + self._costs.save_ns, _SAVED, run.number))
        else:
            self._end(run, now_ns, RunEnd.INTERRUPTED, saved=False)

    def _outcome(self) -> Outcome:
        whole = self._totals(self._meter.at_ns)
        if sum(whole.parts) != whole.allocated:
            raise InvariantViolation(f"runs had {sum(whole.parts)} ns of nodes that gave {whole.allocated} ns")
        begin, end = self._marked
        return Outcome(
            policy=self._policy.name,
            tasks=self._tasks,
            lives=tuple(self._lives),
            window_ns=self._window_ns,
            window=end.since(begin),
            whole=whole,
            hours=tuple(self._meter.buckets),
            events=self._events,
        )


def _check(tasks: Sequence[TraceTask], cluster: ClusterSettings) -> None:
    if not tasks:
        raise UsageError("the trace has no task")
    zone = max(cluster.zone_nodes())
    for task in tasks:
        if task.nodes > cluster.nodes:
            raise UsageError(
                f"a task submitted after {format_duration(task.submit_ns)} asks for {task.nodes} nodes, and the "
                f"cluster has {cluster.nodes}; give it more nodes, or leave such tasks out of the trace"
            )
        if zone < task.nodes and (task.nodes < cluster.cross_zone_nodes or not cluster.cross_zone_tasks):
            raise UsageError(
                f"a task submitted after {format_duration(task.submit_ns)} asks for {task.nodes} nodes; a zone has "
                f"{zone}, and tasks of fewer than {cluster.cross_zone_nodes} nodes never run in two; give fewer zones"
            )
