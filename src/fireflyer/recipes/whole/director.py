"""Decides what is done next in the demonstration. Pure: `Director.handle(now_ns, seen) -> actions`.

    SUBMIT ──> TRAIN ── all tasks train ──> kill a storage node ──> FAILED ── the manager counts it as failed
      ──> WHOLE ── it is back, and every chain is whole ──> submit the urgent task
      ──> URGENT ── it trains, on nodes of another one ──> kill a node of a task that runs beside it
      ──> FINISH ── all tasks have finished, every chain is whole ──> DONE

`ff up` starts a storage process again at once. It is killed again until the manager has counted it as failed: so the
file system is seen to go on without it. What is waited for is always something that was seen, never a time; `LIMIT_NS`
bounds each wait, so that a demonstration that cannot go on says what it waited for.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final, TypeAlias

import msgspec

from fireflyer.base.units import SECOND
from fireflyer.recipes.testbed.facts import StorageSample
from fireflyer.recipes.whole.plan import WholePlan

__all__ = [
    "LIMIT_NS",
    "Action",
    "Director",
    "GiveUp",
    "KillNode",
    "KillStorage",
    "Phase",
    "Seen",
    "Submit",
    "TaskSeen",
    "how_far",
]

LIMIT_NS: Final = 600 * SECOND
"""Of one phase. On an idle machine each takes some seconds; on one that many share, minutes."""


class TaskSeen(msgspec.Struct, frozen=True):
    state: str
    step: int
    """The newest that any run of it has reported; 0: none."""
    nodes: tuple[str, ...]
    """Of its run, in the order of ranks."""


class Seen(msgspec.Struct, frozen=True):
    """What can be seen at one moment."""

    tasks: Mapping[str, TaskSeen]
    storage_whole: bool
    """All storage nodes live and every chain is fully replicated."""
    storage_failed: bool = False
    """The manager has counted the storage node that was killed as failed."""
    storage_back: bool = False
    """It has registered again since."""


class Submit(msgspec.Struct, frozen=True):
    tasks: tuple[str, ...]


class KillStorage(msgspec.Struct, frozen=True):
    """All that there is of it at the moment: nothing, where it was not started again yet."""

    node: int


class KillNode(msgspec.Struct, frozen=True):
    node: str
    task: str


class GiveUp(msgspec.Struct, frozen=True):
    reason: str


Action: TypeAlias = Submit | KillStorage | KillNode | GiveUp


class Phase(enum.Enum):
    """The value says what is waited for."""

    SUBMIT = "the platform to be up"
    TRAIN = "all tasks to train"
    FAILED = "the storage node to count as failed"
    WHOLE = "the storage node to come back and every chain to be whole"
    URGENT = "the urgent task to train beside another one"
    FINISH = "all tasks to finish and every chain to be whole"
    DONE = "nothing"


class Director:
    def __init__(self, plan: WholePlan) -> None:
        self.phase = Phase.SUBMIT
        self._plan = plan
        self._since_ns: int | None = None

    def handle(self, now_ns: int, seen: Seen) -> list[Action]:
        """`now_ns`: monotonic."""
        if self._since_ns is None:
            self._since_ns = now_ns
        before = self.phase
        actions = self._act(seen)
        if self.phase is not before:
            self._since_ns = now_ns
        elif self.phase is not Phase.DONE and now_ns - self._since_ns > LIMIT_NS:
            self.phase = Phase.DONE
            return [GiveUp(f"waited {LIMIT_NS // SECOND} s for {before.value}")]
        return actions

    def _act(self, seen: Seen) -> list[Action]:
        plan = self._plan
        match self.phase:
            case Phase.SUBMIT:
                self.phase = Phase.TRAIN
                return [Submit(tuple(task.name for task in plan.tasks))]
            case Phase.TRAIN if all(_trains(seen, task.name, plan.storage_step) for task in plan.tasks):
                self.phase = Phase.FAILED
                return [KillStorage(plan.storage_victim)]
            case Phase.FAILED if seen.storage_failed:
                self.phase = Phase.WHOLE
            case Phase.FAILED:
                return [KillStorage(plan.storage_victim)]
            case Phase.WHOLE if seen.storage_back and seen.storage_whole:
                self.phase = Phase.URGENT
                return [Submit((plan.urgent.name,))]
            case Phase.URGENT if _trains(seen, plan.urgent.name, plan.node_step):
                beside = [task.name for task in plan.tasks if _trains(seen, task.name, plan.checkpoint_every)]
                if beside:
                    self.phase = Phase.FINISH
                    return [KillNode(seen.tasks[beside[0]].nodes[-1], beside[0])]
            case Phase.FINISH if seen.storage_whole and _all_finished(plan, seen):
                self.phase = Phase.DONE
        return self._ended_too_soon(seen)

    def _ended_too_soon(self, seen: Seen) -> list[Action]:
        if self.phase in (Phase.SUBMIT, Phase.FINISH, Phase.DONE):
            return []
        ended = [name for name, task in seen.tasks.items() if task.state == "finished"]
        if not ended:
            return []
        waited_for, self.phase = self.phase.value, Phase.DONE
        return [GiveUp(f"task {ended[0]!r} finished while the demonstration waited for {waited_for}")]


def _trains(seen: Seen, name: str, step: int) -> bool:
    task = seen.tasks.get(name)
    return task is not None and task.state == "running" and task.step >= step


def _all_finished(plan: WholePlan, seen: Seen) -> bool:
    found = [seen.tasks.get(task.name) for task in plan.all_tasks]
    return all(task is not None and task.state == "finished" for task in found)


def how_far(plan: WholePlan, seen: Seen, storage: StorageSample | None) -> str:
    """A line for who watches: the state of each task, the step of those that run, and the storage as it was last."""
    steps = {task.name: task.steps for task in plan.all_tasks}
    parts = [
        f"{name} {task.state}" + (f" {task.step}/{steps[name]}" if task.state == "running" else "")
        for name, task in seen.tasks.items()
    ]
    if storage is not None:
        parts.append(f"storage {len(storage.alive)}/{plan.storage_nodes}, {storage.whole}/{storage.chains} whole")
    return " · ".join(parts)
