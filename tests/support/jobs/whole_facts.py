"""Facts of a whole demonstration that never ran, in which every check holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fireflyer.base.events import (
    AttemptFailed,
    AttemptStarted,
    CheckpointReport,
    JobEvent,
    JobFinished,
    JobStarted,
    Logged,
    NodeLost,
    ResumeReport,
    StepReport,
    Suspended,
    SuspendRequested,
)
from fireflyer.base.units import MIB, MS, SECOND
from fireflyer.recipes.testbed.facts import FileFact, Reference, RunFacts, StorageSample, TaskFacts
from fireflyer.recipes.testbed.plan import BEN, TaskPlan
from fireflyer.recipes.whole.facts import Facts, Fault, NodeSpan, Operation
from fireflyer.recipes.whole.plan import WholePlan

__all__ = ["PLAN", "RunLog", "good_facts", "run_of"]

PLAN: Final = WholePlan(
    tasks=(TaskPlan(name="first", user="ada", steps=60, seed=1), TaskPlan(name="second", user=BEN, steps=60, seed=2)),
    urgent=TaskPlan(name="urgent", user=BEN, steps=20, seed=3, priority=30),
)
SHARDS: Final = {"shard-00000-of-00002.safetensors": "a" * 64, "shard-00001-of-00002.safetensors": "b" * 64}
STEP_NS: Final = 100 * MS
START_NS: Final = 2 * SECOND
_REQUEUED, _SUSPENDED, _DONE = "lost", "suspended", "succeeded"


def loss_at(task: TaskPlan, step: int) -> float:
    return 6.0 / (1 + 0.01 * task.seed * step)


class RunLog:
    """Of one run."""

    def __init__(self, task: TaskPlan) -> None:
        self.entries: list[Logged] = []
        self.now_ns = 0
        self._task = task
        self.log(JobStarted(task.name, ("train_gpt",), 2, 1, 3, 1.7e9))

    def log(self, *events: JobEvent) -> None:
        self.entries += [Logged(self.now_ns, event) for event in events]

    def attempt(self, number: int, first: int, last: int) -> None:
        """Steps `first + 1` to `last`."""
        self.log(AttemptStarted(number))
        self.now_ns += START_NS
        name = f"step-{first:08d}" if first else None
        self.log(*(ResumeReport(rank, number, first, name, (), 20 * MS) for rank in (0, 1)))
        for step in range(first + 1, last + 1):
            self.now_ns += STEP_NS
            self.log(*(self._step(rank, number, step) for rank in (0, 1)))
            if step % PLAN.checkpoint_every == 0:
                self.save(number, step)

    def save(self, attempt: int, step: int) -> None:
        self.log(CheckpointReport(0, attempt, step, 16 * MIB, 0, 50 * MS))

    def _step(self, rank: int, attempt: int, step: int) -> StepReport:
        loss = loss_at(self._task, step)
        return StepReport(rank, attempt, step, 4, 512, loss, STEP_NS, 0, MIB, MS)


def run_of(number: int, nodes: tuple[str, ...], begin_ns: int, log: RunLog, cause: str) -> RunFacts:
    return RunFacts(
        number=number,
        nodes=nodes,
        scheduled_ns=begin_ns,
        log_begins_ns=begin_ns + 100 * MS,
        over_ns=begin_ns + 100 * MS + log.now_ns,
        cause=cause,
        end_reason="all ranks exited with code 0" if cause == _DONE else "",
        leave_reason="for task 3" if cause == _SUSPENDED else "",
        log=tuple(log.entries),
    )


def _task(wanted: TaskPlan, number: int, submitted_ns: int, runs: Sequence[RunFacts]) -> TaskFacts:
    ended_ns = runs[-1].over_ns
    return TaskFacts(
        name=wanted.name,
        user=wanted.user,
        priority=wanted.priority,
        task=number,
        submitted_ns=submitted_ns,
        ended_ns=ended_ns,
        state="finished",
        outcome="succeeded",
        reason="all ranks exited with code 0",
        account={"queue_ns": SECOND, "productive_ns": ended_ns - submitted_ns - SECOND},
        runs=tuple(runs),
    )


def _first() -> tuple[TaskFacts, int]:
    """It lost a node in step 36 and went on from step 30. And when the node was killed."""
    log = RunLog(PLAN.tasks[0])
    log.attempt(0, 0, 35)
    killed_ns = 100 * MS + log.now_ns + 20 * MS
    log.now_ns += 500 * MS
    log.log(NodeLost(1, 0, "its supervisor was killed"), AttemptFailed(0, "node 1 lost", True))
    log.attempt(1, 30, 60)
    log.log(JobFinished(0, "all ranks exited with 0"))
    return _task(PLAN.tasks[0], 1, 0, [run_of(0, ("agent-1", "agent-2"), 0, log, _DONE)]), killed_ns


def _second_and_urgent() -> tuple[TaskFacts, TaskFacts]:
    """The second left after step 25, and went on when the urgent one was over."""
    nodes = ("agent-3", "agent-4")
    log = RunLog(PLAN.tasks[1])
    log.attempt(0, 0, 25)
    log.save(0, 25)
    log.log(SuspendRequested(0), Suspended(0, 25), JobFinished(85, "suspended"))
    before = run_of(0, nodes, 0, log, _SUSPENDED)
    short = RunLog(PLAN.urgent)
    short.attempt(0, 0, 20)
    short.log(JobFinished(0, "all ranks exited with 0"))
    urgent = run_of(0, nodes, before.over_ns + 10 * MS, short, _DONE)
    log = RunLog(PLAN.tasks[1])
    log.attempt(0, 25, 60)
    log.log(JobFinished(0, "all ranks exited with 0"))
    after = run_of(1, nodes, urgent.over_ns + 10 * MS, log, _DONE)
    return _task(PLAN.tasks[1], 2, 0, [before, after]), _task(PLAN.urgent, 3, before.over_ns - SECOND, [urgent])


def good_facts() -> Facts:
    first, killed_ns = _first()
    second, urgent = _second_and_urgent()
    fault_ns, failed_ns, over_ns, whole_ns = 2 * SECOND, 8 * SECOND, 10 * SECOND, 11 * SECOND
    end_ns = 20 * SECOND
    samples = []
    for at_ns in range(0, end_ns, SECOND // 2):
        away, degraded = failed_ns <= at_ns < over_ns, failed_ns <= at_ns < whole_ns
        samples.append(
            StorageSample(
                at_ns=at_ns,
                alive=(1, 3) if away else (1, 2, 3),
                incarnations=(1, 9 if at_ns >= over_ns else 1, 1),
                chains=6,
                whole=2 if degraded else 6,
                serving=6,
            )
        )
    operations = [
        Operation(kind=kind, begin_ns=at_ns, end_ns=at_ns + 50 * MS, bytes=MIB)
        for at_ns in range(0, end_ns, 250 * MS)
        for kind in ("write", "read")
        if not fault_ns <= at_ns < failed_ns
    ]
    files = tuple(FileFact(path=f"/traffic/{n}", bytes=MIB, digest=f"{n:064d}") for n in range(3))
    return Facts(
        faults=(
            Fault(kind="storage", at_ns=fault_ns, what="2", killed=4, failed_ns=failed_ns, over_ns=over_ns,
                  whole_ns=whole_ns),
            Fault(kind="node", at_ns=killed_ns, what="agent-2", killed=5, task="first", step=35, over_ns=9 * SECOND),
            Fault(kind="urgent", at_ns=urgent.submitted_ns, what="urgent"),
        ),
        tasks=(first, second, urgent),
        references={
            task.name: Reference(
                losses={n: loss_at(task, n) for n in range(1, task.steps + 1)}, shards=SHARDS, cached=False
            )
            for task in PLAN.all_tasks
        },
        nodes=(NodeSpan("agent-1", 0, end_ns, "busy", "first"), NodeSpan("agent-2", 0, end_ns, "down", "first")),
        storage=tuple(samples),
        operations=tuple(operations),
        stored=files,
        twins=files,
        shards={task.name: SHARDS for task in PLAN.all_tasks},
        end_ns=end_ns,
    )  # fmt: skip
