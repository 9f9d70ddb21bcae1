"""What the demonstration does, as data: the tasks, and what is broken. Pure."""

from __future__ import annotations

import msgspec

from fireflyer.base.errors import UsageError

__all__ = ["ADA", "BEN", "TaskPlan", "WholePlan", "train_arguments"]

ADA, BEN = "ada", "ben"


class TaskPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One task: a run of `fireflyer.recipes.train_gpt` with one rank on each node."""

    name: str
    user: str
    steps: int
    seed: int
    priority: int = 10
    nodes: int = 2


class WholePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Raises `UsageError` for a plan in which a disturbance would find nothing to disturb."""

    tasks: tuple[TaskPlan, ...] = (
        TaskPlan(name="first", user=ADA, steps=150, seed=1),
        TaskPlan(name="second", user=BEN, steps=150, seed=2),
    )
    """Submitted at the beginning; together they fill all nodes."""
    urgent: TaskPlan = TaskPlan(name="urgent", user=BEN, steps=40, seed=3, priority=30)
    """Submitted later; it finds no free nodes."""
    nodes: int = 4
    storage_nodes: int = 3
    replicas: int = 2
    checkpoint_every: int = 10
    storage_victim: int = 2
    """Number of the storage node that gets SIGKILL."""
    storage_step: int = 15
    """Not before all tasks have done so many steps."""
    node_step: int = 5
    """When the urgent task has done so many steps, the last node of a task that runs beside it gets SIGKILL."""
    global_batch: int = 8
    sequence_length: int = 128
    corpus_bytes: int = 2_000_000
    least_step: str = "200ms"
    """Tasks wait after a step that took less: a storage node counts as failed after 6 s on every machine, and on a fast
    one they would have ended by then."""

    def __post_init__(self) -> None:
        if sum(task.nodes for task in self.tasks) != self.nodes:
            raise UsageError(f"the tasks fill {sum(task.nodes for task in self.tasks)} nodes, not all {self.nodes}")
        if not self.checkpoint_every < self.storage_step:
            raise UsageError("disturbances come after the first checkpoint")
        if any(task.steps <= self.storage_step for task in self.tasks) or self.urgent.steps <= self.node_step:
            raise UsageError("a task ends before the disturbance that it is to survive")
        if not 1 <= self.storage_victim <= self.storage_nodes or self.replicas < 2:
            raise UsageError("what is lost must have another replica")
        if len(self.tasks) < 2 or self.urgent.nodes > min(task.nodes for task in self.tasks):
            raise UsageError("the urgent task takes the nodes of one task, and another one goes on beside it")
        if self.urgent.priority <= max(task.priority for task in self.tasks):
            raise UsageError("the urgent task needs the highest priority")

    @property
    def all_tasks(self) -> tuple[TaskPlan, ...]:
        return *self.tasks, self.urgent


def train_arguments(plan: WholePlan, task: TaskPlan, *, corpus: str, checkpoints: str) -> tuple[str, ...]:
    """Of `train_gpt`. The losses depend on all of these but the two places."""
    options: dict[str, object] = {
        "--steps": task.steps,
        "--seed": task.seed,
        "--global-batch": plan.global_batch,
        "--sequence-length": plan.sequence_length,
        "--checkpoint-every": plan.checkpoint_every,
        "--corpus-dir": corpus,
        "--checkpoint-dir": checkpoints,
    }
    return tuple(str(part) for pair in options.items() for part in pair)
