"""What the soak does, as data. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND
from fireflyer.recipes.soak.faults import KINDS, Kind
from fireflyer.recipes.testbed.plan import ADA, BEN, ClusterPlan, TaskPlan

__all__ = ["SoakPlan"]


class SoakPlan(ClusterPlan, frozen=True, kw_only=True):
    """Raises `UsageError` for numbers with which nothing could be disturbed."""

    seed: int = 0
    minutes: Annotated[float, msgspec.Meta(gt=0, le=10_080)] = 20.0
    """In which faults begin; what runs then ends undisturbed."""
    targets_per_node: int = 2
    """Each reserves half a gigabyte."""
    steps: int = 60
    """Of each task."""
    shapes: int = 2
    """Kinds of tasks: those of one kind have the same losses."""
    room_steps: int = 20
    """A fault of a task comes no later than so many steps before its end, so that there is something to recover."""
    max_restarts: int = 50
    max_requeues: int = 200
    kinds: tuple[Kind, ...] = KINDS

    def __post_init__(self) -> None:
        if self.replicas < 2 or self.storage_nodes < self.replicas:
            raise UsageError("what is lost must have another replica")
        if self.steps <= self.room_steps + self.checkpoint_every:
            raise UsageError("tasks end before a fault could come after their first checkpoint")
        if not self.kinds:
            raise UsageError("there is no kind of fault")

    @property
    def duration_ns(self) -> int:
        return round(self.minutes * 60 * SECOND)

    @property
    def width(self) -> int:
        """Tasks at a time: they fill all nodes."""
        return self.nodes // 2

    def task(self, number: int) -> TaskPlan:
        """The `number`th that is submitted, from 1."""
        shape = (number - 1) % self.shapes
        return TaskPlan(
            name=f"task-{number:04d}", user=(ADA, BEN)[shape % 2], steps=self.steps, seed=self._seed_of(shape)
        )

    def shape_of(self, task: TaskPlan) -> str:
        return f"shape-{task.seed}"

    @property
    def undisturbed(self) -> tuple[TaskPlan, ...]:
        """One of each shape, by the name of the shape."""
        return tuple(
            TaskPlan(name=f"shape-{self._seed_of(shape)}", user=ADA, steps=self.steps, seed=self._seed_of(shape))
            for shape in range(self.shapes)
        )

    def _seed_of(self, shape: int) -> int:
        """The same in every soak, so that the undisturbed runs are found in the cache."""
        return shape + 1
