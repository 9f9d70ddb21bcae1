"""What the demonstration does, as data: the tasks, and what is broken. Pure."""

from __future__ import annotations

from fireflyer.base.errors import UsageError
from fireflyer.recipes.testbed.plan import ADA, BEN, ClusterPlan, TaskPlan

__all__ = ["WholePlan"]


class WholePlan(ClusterPlan, frozen=True, kw_only=True):
    """Raises `UsageError` for a plan in which a disturbance would find nothing to disturb."""

    tasks: tuple[TaskPlan, ...] = (
        TaskPlan(name="first", user=ADA, steps=150, seed=1),
        TaskPlan(name="second", user=BEN, steps=150, seed=2),
    )
    """Submitted at the beginning; together they fill all nodes."""
    urgent: TaskPlan = TaskPlan(name="urgent", user=BEN, steps=40, seed=3, priority=30)
    """Submitted later; it finds no free nodes."""
    storage_victim: int = 2
    """Number of the storage node that gets SIGKILL."""
    storage_step: int = 15
    """Not before all tasks have done so many steps."""
    node_step: int = 5
    """When the urgent task has done so many steps, the last node of a task that runs beside it gets SIGKILL."""

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
