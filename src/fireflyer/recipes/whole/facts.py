"""What the demonstration saw. Pure data: checks and report are computed from it, and tests plant differences in it.

Times are nanoseconds since the demonstration's tasks could be submitted, of one monotonic clock, unless they say
otherwise.
"""

from __future__ import annotations

import msgspec

from fireflyer.recipes.testbed.facts import FileFact, Reference, StorageSample, TaskFacts

__all__ = ["Facts", "Fault", "NodeSpan", "Operation"]


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


class NodeSpan(msgspec.Struct, frozen=True):
    """What a compute node did: `idle`, `busy` (with `task`), `leaving`, `down`, ..."""

    node: str
    begin_ns: int
    end_ns: int
    state: str
    task: str


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One write or read of the demonstration's own traffic."""

    kind: str
    """`write` or `read`."""
    begin_ns: int
    end_ns: int
    bytes: int
    error: str = ""
    """Also where a read gave other bytes than were written."""


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
