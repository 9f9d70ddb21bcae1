"""What happens to a cluster, as the scheduler's machine is told: nodes, tasks, runs, and what a site sets."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from fireflyer.cluster.core.scheduler.model import Limit, Node, Policy, Reservation, Task

__all__ = [
    "CostChanged",
    "Event",
    "LimitsChanged",
    "NodeChanged",
    "NodeRemoved",
    "PolicyChanged",
    "ReservationsChanged",
    "RunEnded",
    "RunLeaving",
    "SharesChanged",
    "TaskChanged",
    "TaskEnded",
    "TasksSubmitted",
    "UsageSet",
]


class NodeChanged(msgspec.Struct, frozen=True, tag="NodeChanged"):
    """A new node, or all that is now known of one: up, down, drained, moved, its labels and windows."""

    node: Node


class NodeRemoved(msgspec.Struct, frozen=True, tag="NodeRemoved"):
    """It is no longer part of the cluster. A run on it goes on until RunEnded or TaskEnded."""

    name: str


class TasksSubmitted(msgspec.Struct, frozen=True, tag="TasksSubmitted"):
    """New tasks, such as all elements of an array; also those with runs and claims that a new manager loads."""

    tasks: tuple[Task, ...]


class TaskChanged(msgspec.Struct, frozen=True, tag="TaskChanged"):
    """All that is now known of a task: another priority, held or no longer, nodes that its run lost."""

    task: Task


class TaskEnded(msgspec.Struct, frozen=True, tag="TaskEnded"):
    """Succeeded, failed for good or stopped. Its nodes, if it ran, are free."""

    task: int


class RunLeaving(msgspec.Struct, frozen=True, tag="RunLeaving"):
    """Somebody else than the scheduler told its run to suspend or to stop."""

    task: int


class RunEnded(msgspec.Struct, frozen=True, tag="RunEnded"):
    """Its run has left its nodes, and the task waits again: suspended, or failed and restarted after a pause."""

    task: int
    not_before_ns: int = 0
    never: tuple[str, ...] = ()
    """Nodes that it must not use from now on, beside those of its request."""


class CostChanged(msgspec.Struct, frozen=True, tag="CostChanged"):
    """What an interruption of its run costs from now on, such as after a checkpoint. Only whom a task interrupts
    depends on it, never whether one is, so nothing needs to be decided because of it."""

    task: int
    interrupt_cost_ns: int
    unsaved_since_ns: int | None


class UsageSet(msgspec.Struct, frozen=True, tag="UsageSet"):
    """Node-seconds of the window at this moment, such as a new manager loads them. The machine goes on from there."""

    usage: dict[str, float]


class SharesChanged(msgspec.Struct, frozen=True, tag="SharesChanged"):
    share: dict[str, float]


class LimitsChanged(msgspec.Struct, frozen=True, tag="LimitsChanged"):
    limits: tuple[Limit, ...]


class ReservationsChanged(msgspec.Struct, frozen=True, tag="ReservationsChanged"):
    reservations: tuple[Reservation, ...]


class PolicyChanged(msgspec.Struct, frozen=True, tag="PolicyChanged"):
    policy: Policy


Event: TypeAlias = (
    NodeChanged
    | NodeRemoved
    | TasksSubmitted
    | TaskChanged
    | TaskEnded
    | RunLeaving
    | RunEnded
    | CostChanged
    | UsageSet
    | SharesChanged
    | LimitsChanged
    | ReservationsChanged
    | PolicyChanged
)
