"""What the soak saw. Pure data: checks and report are computed from it, and tests plant differences in it.

Times are nanoseconds since tasks could be submitted, of one monotonic clock, unless they say otherwise.
"""

from __future__ import annotations

import msgspec

from fireflyer.recipes.testbed.facts import FileFact, Reference, StorageSample, TaskFacts
from fireflyer.recipes.testbed.plan import TaskPlan

__all__ = ["FaultFact", "SoakFacts", "WriterFacts"]


class FaultFact(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    kind: str
    """Name of a kind of `faults.KINDS`."""
    target: str
    """Storage node, compute node or task; empty where there is one only."""
    at_ns: int
    reached: int = 0
    """Processes that were signalled, connections that were cut, bytes that filled a disk."""
    released_ns: int | None = None
    """When it was taken back; None: it was not."""
    recovered_ns: int | None = None
    allowed_ns: int = 0
    """For the recovery, on a machine as busy as it was then."""
    task: str = ""
    """That has the node, or that was suspended."""
    step: int = 0
    """The last one of this task that was heard of."""
    failed: bool = False
    """Of a storage node: it was seen to count as failed."""


class WriterFacts(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    acknowledged: int
    """Operations."""
    bytes: int
    """That these stored."""
    repeated: int
    """Tries that failed with an error, and were made again."""
    errors: tuple[str, ...]
    """Of these, each different one, at most 20."""
    longest_ns: int
    """From the first try of an operation to its acknowledgement."""
    reads: int
    wrong_reads: tuple[str, ...]
    """Reads that did not give what was acknowledged last."""
    stuck: str = ""
    """What it could not do in time."""


class SoakFacts(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    faults: tuple[FaultFact, ...]
    left_out: tuple[str, ...]
    """Kinds of faults that were not possible here, with the reason."""
    plans: tuple[TaskPlan, ...]
    """Tasks that were submitted."""
    tasks: tuple[TaskFacts, ...]
    """Tasks that the platform has at the end."""
    references: dict[str, Reference]
    """By the name of the task."""
    shards: dict[str, dict[str, str]]
    """Of the last checkpoint of each task."""
    writers: tuple[WriterFacts, ...]
    stored: tuple[FileFact, ...]
    """All files that are in the file system at the end, but those of checkpoints."""
    twins: tuple[FileFact, ...]
    """All files that must be there."""
    storage: StorageSample | None
    """At the end."""
    fsck: tuple[str, ...]
    """What `ff fs fsck` printed."""
    fsck_code: int | None
    """Its exit code; None: it did not end."""
    begin_ns: int
    """When faults could begin."""
    end_ns: int
    trouble: tuple[str, ...] = ()
    """What kept the soak from going on."""
