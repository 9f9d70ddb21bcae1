"""What the demonstration saw. Pure data: checks and report are computed from it, and tests plant differences in it.

Times are nanoseconds since the demonstration's tasks could be submitted, of one monotonic clock, unless they say
otherwise.
"""

from __future__ import annotations

import msgspec

from fireflyer.base.events import Logged

__all__ = [
    "Facts",
    "Fault",
    "FileFact",
    "NodeSpan",
    "Operation",
    "Reference",
    "RunFacts",
    "StorageSample",
    "TaskFacts",
]


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What was done to the cluster."""

    kind: str
    """`storage`, `node` or `urgent`."""
    at_ns: int
    what: str
    """The storage node, the compute node, or the urgent task."""
    killed: int = 0
    """Processes that got SIGKILL."""
    task: str = ""
    """Whose run was on the compute node."""
    step: int = 0
    """The last one that this task had reported."""
    failed_ns: int | None = None
    """Of a storage node: when the manager was seen to count it as failed."""
    over_ns: int | None = None
    """When it was seen to be back."""
    whole_ns: int | None = None
    """Of a storage node: when every chain was fully replicated again."""


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a task."""

    number: int
    nodes: tuple[str, ...]
    scheduled_ns: int
    log_begins_ns: int | None
    """Where 0 of its event log is; None where it has none."""
    over_ns: int
    cause: str
    end_reason: str
    leave_reason: str
    log: tuple[Logged, ...]


class TaskFacts(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    user: str
    priority: int
    task: int
    """Its number."""
    submitted_ns: int
    ended_ns: int | None
    state: str
    outcome: str
    reason: str
    account: dict[str, int]
    """Where its life went, by the platform; nanoseconds."""
    runs: tuple[RunFacts, ...]


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """The undisturbed run of the same task."""

    losses: dict[int, float]
    """Of each step, as all ranks reported it."""
    shards: dict[str, str]
    """Files of its last checkpoint that hold tensors and the states of ranks: name -> SHA-256."""
    cached: bool


class NodeSpan(msgspec.Struct, frozen=True):
    """What a compute node did: `idle`, `busy` (with `task`), `leaving`, `down`, ..."""

    node: str
    begin_ns: int
    end_ns: int
    state: str
    task: str


class StorageSample(msgspec.Struct, frozen=True, kw_only=True):
    """What the manager of the file system said at one moment."""

    at_ns: int
    alive: tuple[int, ...]
    """Numbers of the nodes that live."""
    incarnations: tuple[int, ...]
    """Of all nodes, by number."""
    chains: int
    whole: int
    serving: int
    """Chains with a replica that serves."""


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One write or read of the demonstration's own traffic."""

    kind: str
    """`write` or `read`."""
    begin_ns: int
    end_ns: int
    bytes: int
    error: str = ""
    """Also where a read gave other bytes than were written."""


class FileFact(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the file system, or its twin on the local disk."""

    path: str
    bytes: int
    digest: str


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    faults: tuple[Fault, ...]
    tasks: tuple[TaskFacts, ...]
    references: dict[str, Reference]
    nodes: tuple[NodeSpan, ...]
    storage: tuple[StorageSample, ...]
    operations: tuple[Operation, ...]
    stored: tuple[FileFact, ...]
    """All files that are in the file system at the end, but those of checkpoints."""
    twins: tuple[FileFact, ...]
    """All files that must be there."""
    shards: dict[str, dict[str, str]]
    """Of each task what `Reference.shards` is of its undisturbed run."""
    end_ns: int
    trouble: tuple[str, ...] = ()
    """What kept the demonstration from going on."""
