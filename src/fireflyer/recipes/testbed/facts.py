"""What was seen of tasks, runs, files and storage. Pure data.

Times are nanoseconds since tasks could be submitted, of one monotonic clock, unless they say otherwise.
"""

from __future__ import annotations

import msgspec

from fireflyer.base.events import Logged

__all__ = ["FileFact", "Reference", "RunFacts", "StorageSample", "TaskFacts"]


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


class FileFact(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the file system, or its twin on the local disk."""

    path: str
    bytes: int
    digest: str
