"""The kinds of faults, and the seeded order in which they come. Pure.

Kinds are in two lanes, each of which has at most one fault at a time: so no two replicas of a chain are ever lost at
once, and no manager is lost while a node that it must take back is away; a fault of storage and one of the platform do
come together.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from fireflyer.base.units import MS, SECOND

__all__ = ["KINDS", "Hold", "Kind", "Lane", "PlannedFault", "Target", "kind_named", "schedule"]

MIN_PAUSE_NS: Final = 500 * MS
MAX_PAUSE_NS: Final = 3 * SECOND


class Lane(enum.Enum):
    STORAGE = "storage"
    PLATFORM = "platform"


class Target(enum.Enum):
    """What a fault is injected into; it is chosen when the fault comes."""

    STORAGE_NODE = "storage node"
    MARKED_STORAGE_NODE = "the storage node with a relay and a small disk"
    FILE_MANAGER = "manager of the file system"
    MANAGER = "manager of the platform"
    AGENT = "agent"
    MARKED_AGENT = "the agent with a small disk"
    TASK_NODE = "node of a task that trains"
    TASK = "task that trains"


class Hold(enum.Enum):
    """How long a fault lasts before it is taken back."""

    NONE = "it is over at once"
    TIME = "a time that the seed gives"
    FAILED = "until the manager counts the node as failed; what is started again meanwhile dies again"
    SUSPENDED = "until the task has left its nodes"


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    lane: Lane
    target: Target
    text: str
    hold: Hold = Hold.NONE
    most_hold_ns: int = 10 * SECOND
    limit_ns: int = 120 * SECOND
    """From when it is taken back until it must have been recovered from, on a machine with two processors that does
    nothing else."""
    mounts: bool = False
    """Only where small file systems can be mounted."""
    excludes: tuple[str, ...] = ()
    """Kinds of the other lane with which it never comes together."""


KINDS: Final = (
    Kind(name="storage-kill", lane=Lane.STORAGE, target=Target.STORAGE_NODE, text="storage process gets SIGKILL"),
    Kind(
        name="storage-away",
        lane=Lane.STORAGE,
        target=Target.STORAGE_NODE,
        text="storage process gets SIGKILL until it counts as failed",
        hold=Hold.FAILED,
    ),
    Kind(
        name="storage-pause",
        lane=Lane.STORAGE,
        target=Target.STORAGE_NODE,
        text="storage process stands still (SIGSTOP)",
        hold=Hold.TIME,
    ),
    Kind(
        name="storage-cut",
        lane=Lane.STORAGE,
        target=Target.MARKED_STORAGE_NODE,
        text="link of a storage node to its manager is cut",
        hold=Hold.TIME,
        most_hold_ns=15 * SECOND,
    ),
    Kind(
        name="storage-full",
        lane=Lane.STORAGE,
        target=Target.MARKED_STORAGE_NODE,
        text="disk of a storage node is full",
        hold=Hold.TIME,
        most_hold_ns=5 * SECOND,
        mounts=True,
        # A task that leaves or ends must save, and nothing makes up for that save.
        excludes=("task-suspend",),
    ),
    Kind(
        name="files-kill",
        lane=Lane.STORAGE,
        target=Target.FILE_MANAGER,
        text="manager and meta service of the file system get SIGKILL",
    ),
    Kind(
        name="files-pause",
        lane=Lane.STORAGE,
        target=Target.FILE_MANAGER,
        text="manager and meta service of the file system stand still (SIGSTOP)",
        hold=Hold.TIME,
    ),
    Kind(name="manager-kill", lane=Lane.PLATFORM, target=Target.MANAGER, text="manager of the platform gets SIGKILL"),
    Kind(
        name="manager-pause",
        lane=Lane.PLATFORM,
        target=Target.MANAGER,
        text="manager of the platform stands still (SIGSTOP)",
        hold=Hold.TIME,
    ),
    Kind(
        name="manager-cut",
        lane=Lane.PLATFORM,
        target=Target.MANAGER,
        text="link of all agents to the manager of the platform is cut",
        hold=Hold.TIME,
    ),
    Kind(name="agent-kill", lane=Lane.PLATFORM, target=Target.AGENT, text="agent gets SIGKILL; its guards stay"),
    Kind(
        name="agent-pause",
        lane=Lane.PLATFORM,
        target=Target.AGENT,
        text="agent stands still (SIGSTOP)",
        hold=Hold.TIME,
    ),
    Kind(
        name="agent-full",
        lane=Lane.PLATFORM,
        target=Target.MARKED_AGENT,
        text="disk with the directory of an agent is full",
        hold=Hold.TIME,
        most_hold_ns=5 * SECOND,
        mounts=True,
    ),
    Kind(name="rank-kill", lane=Lane.PLATFORM, target=Target.TASK_NODE, text="rank of a task gets SIGKILL"),
    Kind(name="guard-kill", lane=Lane.PLATFORM, target=Target.TASK_NODE, text="guard of a run gets SIGKILL"),
    Kind(
        name="node-kill",
        lane=Lane.PLATFORM,
        target=Target.TASK_NODE,
        text="compute node loses power: agent, guards and ranks get SIGKILL",
    ),
    Kind(
        name="task-suspend",
        lane=Lane.PLATFORM,
        target=Target.TASK,
        text="task is suspended, and resumed when it has left",
        hold=Hold.SUSPENDED,
        excludes=("storage-full",),
    ),
)


def kind_named(name: str) -> Kind:
    return next(kind for kind in KINDS if kind.name == name)


class PlannedFault(msgspec.Struct, frozen=True):
    kind: Kind
    pause_ns: int
    """From the recovery from the fault before it."""
    hold_ns: int
    """For `Hold.TIME`."""
    choice: float
    """In [0, 1): which of the targets."""


def schedule(seed: int, lane: Lane, kinds: Sequence[Kind]) -> Iterator[PlannedFault]:
    """Without end: all kinds of the lane once in an order that the seed gives, then all again in another one."""
    rng = random.Random(f"{seed} {lane.value}")
    mine = [kind for kind in kinds if kind.lane is lane]
    while mine:
        for kind in rng.sample(mine, len(mine)):
            yield PlannedFault(
                kind=kind,
                pause_ns=rng.randrange(MIN_PAUSE_NS, MAX_PAUSE_NS),
                hold_ns=rng.randrange(SECOND, kind.most_hold_ns),
                choice=rng.random(),
            )
