"""What a user submits, the states that a task goes through, and what is known of each of its runs."""

from __future__ import annotations

import enum
from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND
from fireflyer.cluster.schema.job import MAX_NODES

__all__ = [
    "FINISHED",
    "MAX_ARRAY",
    "After",
    "Cause",
    "Outcome",
    "Program",
    "RunParts",
    "TaskId",
    "TaskSpec",
    "TaskState",
]

MAX_ARRAY: Final = 10_000
"""Tasks of one submission."""

TaskId: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")]
"""Of a task, a node, a label, a user or a group."""
_Argument = Annotated[str, msgspec.Meta(max_length=4096)]
_Path = Annotated[str, msgspec.Meta(max_length=4096)]
_Hash = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?$")]
_Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_NODES)]
_Ns = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_Names = Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_NODES)]
WholeLife = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""The integer that a task keeps across its runs; its program gives it a meaning, such as a step."""


class TaskState(enum.Enum):
    QUEUED = "queued"
    """It waits for nodes, for another task, or for a pause to end."""
    SCHEDULED = "scheduled"
    """Nodes are given to a run of it that has not said yet that it started."""
    RUNNING = "running"
    SUSPENDING = "suspending"
    """It was told to save and to go; its nodes are not free yet."""
    SUSPENDED = "suspended"
    """It saved and left its nodes, and waits for others; or its user suspended it, and it waits for them."""
    FINISHED = "finished"


FINISHED: Final = TaskState.FINISHED


class Outcome(enum.Enum):
    """How a task ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    """By its user or an operator."""


class Cause(enum.Enum):
    """Why a run ended; the launcher's verdict where it could give one."""

    SUCCEEDED = "succeeded"
    PROGRAM = "program"
    """The user's error: the task ends."""
    INFRASTRUCTURE = "infrastructure"
    """A node, a link, memory: the task is queued again, on other nodes."""
    SUSPENDED = "suspended"
    """It saved and left when it was asked to."""
    INTERRUPTED = "interrupted"
    """It was asked to leave and was killed after its grace period: the task is queued again."""
    STOPPED = "stopped"
    TIME_LIMIT = "time_limit"
    """It took longer than it declared: the task ends."""
    HUNG = "hung"
    """It printed and reported nothing for the time of its watchdog: the task ends."""


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """Program that runs on each node, as `ff run` takes it."""

    script: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    """A Python file in the task's directory, the name of a module, or the path of a program, as `kind` says."""
    args: Annotated[tuple[_Argument, ...], msgspec.Meta(max_length=4096)] = ()
    kind: Literal["script", "module", "program"] = "script"
    ranks_per_node: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    wrap: Annotated[tuple[_Argument, ...], msgspec.Meta(max_length=64)] = ()
    """A command that is put before each rank's, such as that of a container."""
    snapshot: _Hash = ""
    """Hash of the directory that travels with the task; empty: `workdir` is there on every node."""
    workdir: _Path = ""
    python: _Path = ""
    """Path of a Python that is there on every node; empty: the agent's own, or that of `environment`."""
    environment: _Hash = ""
    """Hash of the lock file, a file of the snapshot, from which each node builds the environment of the ranks; empty:
    none."""
    env: Annotated[dict[str, str], msgspec.Meta(max_length=256)] = {}


class After(msgspec.Struct, frozen=True):
    """The task waits until `task` has finished; `ok`: with success, else it ends without having run."""

    task: TaskId
    ok: bool = False


class TaskSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One submission. Raises `UsageError` for numbers that contradict each other."""

    name: Name
    program: Program
    kind: Literal["batch", "interactive"] = "batch"
    """interactive: a shell and one forwarded port; it is never interrupted by suspension, and ends by its time."""
    least_nodes: _Count = 1
    most_nodes: _Count = 1
    node_group: Name = "default"
    priority: Annotated[int, msgspec.Meta(ge=0, le=50)] = 10
    time_ns: _Ns | None = None
    labels: _Names = ()
    only: _Names = ()
    never: _Names = ()
    after: Annotated[tuple[After, ...], msgspec.Meta(max_length=64)] = ()
    array: Annotated[int, msgspec.Meta(ge=1, le=MAX_ARRAY)] | None = None
    """Number of tasks to make, each with its index in FF_ARRAY_INDEX and this number in FF_ARRAY_SIZE. None: one
    task."""
    max_restarts: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 3
    """Most restarts by the launcher inside one run."""
    max_requeues: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 10
    """Most times that the platform queues the task again after infrastructure causes; interruptions are not counted."""
    grace_ns: Annotated[int, msgspec.Meta(ge=0, le=3600 * SECOND)] = 300 * SECOND
    """Time from the request to suspend until SIGTERM."""
    watchdog_ns: _Ns = 0
    """A run that says nothing for so long is ended. 0: never."""
    whole_life: WholeLife = 0
    """Whole-life state, an integer of the user, with which the first run begins."""
    notify: Annotated[str, msgspec.Meta(max_length=2048)] = ""
    """URL that is told of each change of state; empty: none."""

    def __post_init__(self) -> None:
        if self.least_nodes > self.most_nodes:
            raise UsageError(
                f"a task asks for its least number of nodes first, not {self.least_nodes}:{self.most_nodes}"
            )


class RunParts(msgspec.Struct, frozen=True, kw_only=True):
    """Where the wall time of one run went, nanoseconds of the launcher's clock; the sum is the run's time there."""

    start_ns: _Ns = 0
    productive_ns: _Ns = 0
    checkpoint_ns: _Ns = 0
    lost_ns: _Ns = 0
    restart_ns: _Ns = 0
    other_ns: _Ns = 0
    unknown_ns: _Ns = 0
    """Ranks ran and reported nothing."""

    @property
    def total_ns(self) -> int:
        return sum(getattr(self, name) for name in self.__struct_fields__)
