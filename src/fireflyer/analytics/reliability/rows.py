"""Rows of the two tables that everything is computed from: what nodes reported, and what jobs did.

Instants are nanoseconds since 1970. What a source does not say is empty, 0 or None.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from fireflyer.base.health_event import Severity

__all__ = [
    "ABSENT_EXIT",
    "FAILED_STATES",
    "MAX_NAME",
    "MAX_NODES_OF_A_JOB",
    "MAX_WORDS",
    "STATES",
    "TICKET",
    "EventRow",
    "JobRow",
]

MAX_NAME: Final = 128
"""Characters of the name of a node, part, user or job."""
MAX_WORDS: Final = 400
MAX_NODES_OF_A_JOB: Final = 100_000
ABSENT_EXIT: Final = -1
TICKET: Final = "ticket"
"""Source of an event that says that a repair of a node has a ticket; its part is the number."""

STATES: Final = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "COMPLETING", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PENDING",
    "PREEMPTED", "REQUEUED", "RESIZING", "REVOKED", "RUNNING", "SUSPENDED", "TIMEOUT",
)  # fmt: skip
"""Of a job, by Slurm's names. `FAILED` and `REQUEUED` count as failures of the cluster only where a node reported
something, `BOOT_FAIL` not: no job had begun on the node."""
FAILED_STATES: Final = ("FAILED", "NODE_FAIL", "REQUEUED")


class EventRow(NamedTuple):
    time_ns: int
    node: str
    symptom: str
    """Key in `taxonomy.SYMPTOMS`."""
    cause: str
    """Class of the fault, as `xid_79`; empty where the symptom has only one."""
    severity: Severity
    source: str
    """kernel, journal, health, run, platform or `TICKET`."""
    check: str
    """That wrote it; empty for logs."""
    part: str
    job: str
    """Empty: not known."""
    user_made: bool
    """A program can produce it."""
    words: str


class JobRow(NamedTuple):
    job: str
    """The same for every attempt of a job that was queued again; other sources may have it for other jobs."""
    user: str
    state: str
    nodes: int
    gpus: int | None
    """None: the source does not count them; 0: the job had none."""
    submit_ns: int | None
    start_ns: int | None
    """None: it never ran."""
    end_ns: int | None
    """None: it still runs."""
    exit_code: int
    """`ABSENT_EXIT`: not known."""
    signal: int
    node_list: str
    """As Slurm writes it: `gpu[001-004,7],login1`."""
    excluded: str
    """Nodes that the user excluded, in the same notation."""
    unsaved_ns: int | None = None
    """From its last checkpoint, or its start, to its end; None: the source does not say."""
    overhead_ns: int | None = None
    """From its start until its ranks were ready; None: the source does not say."""
    source: str = ""
    """slurm, platform or run: each numbers its jobs by itself."""
    known_ns: int | None = None
    """Without an end: until when the source knows that it ran; None: as long as its source tells anything."""
