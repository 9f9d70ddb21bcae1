"""The history of the platform as rows of the two tables. Pure.

A run becomes an attempt of its task: from when it got its nodes until its launcher had ended, in the words of Slurm.
What happened to a node becomes an event: what took it out has the severity of its fault, what people did and what only
was suspected is a warning, what is well again is `ok`. A repair is told once more, as the ticket that it has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from fireflyer.analytics.reliability.health_symptoms import symptom_of_event
from fireflyer.analytics.reliability.local_times import EARLIEST_NS, Clock
from fireflyer.analytics.reliability.log_lines import Rejected, printable
from fireflyer.analytics.reliability.rows import (
    ABSENT_EXIT,
    MAX_NAME,
    MAX_NODES_OF_A_JOB,
    TICKET,
    EventRow,
    JobRow,
)

if TYPE_CHECKING:
    from fireflyer.base.health_event import HealthEvent, Severity
    from fireflyer.cluster.core.platform.history_pages import NodeEntry, RunEntry

__all__ = ["attempt_of", "events_of"]

_NODE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
_OUT_OF_RANGE: Final = "its time is out of range, before 2000 or in the future"
_NO_NAME: Final = "its node has no name that a node may have"
_STATES: Final = {
    "succeeded": "COMPLETED",
    "program": "FAILED",
    "hung": "FAILED",
    "infrastructure": "NODE_FAIL",
    "time_limit": "TIMEOUT",
}
_OF_WISHES: Final = {
    "node_fault": "NODE_FAIL",
    "no_start": "BOOT_FAIL",
    "interrupt": "PREEMPTED",
    "user_suspend": "SUSPENDED",
    "user_stop": "CANCELLED",
    "time_limit": "TIMEOUT",
    "lost": "NODE_FAIL",
}
_OF_CAUSES: Final = {"stopped": "CANCELLED", "suspended": "SUSPENDED", "interrupted": "SUSPENDED"}
"""Where nobody noted what it was told, as in old rows: a preemption would be counted as another job's doing."""
_EXIT_OF_SLURM: Final = 1
"""Of a run that was interrupted as Slurm took its nodes for others; agents note signals."""
_OUT: Final = ("drained", "reset", "reboot", "field diagnosis", "rma")
"""States of repair; `drained` without a fault is what an operator did."""
_SUSPECT: Final = ("suspect", "warned")


def attempt_of(run: RunEntry, gpus_of: Mapping[str, int], clock: Clock) -> JobRow | Rejected:
    """`gpus_of`: GPUs of nodes, where they are known."""
    ended_ns = run.ended_ns
    if not all(EARLIEST_NS <= time_ns <= clock.latest_ns for time_ns in (run.submitted_ns, run.scheduled_ns)):
        return Rejected(_OUT_OF_RANGE)
    if ended_ns is not None and not run.scheduled_ns <= ended_ns <= clock.latest_ns:
        return Rejected(_OUT_OF_RANGE)
    if not 0 < len(run.nodes) <= MAX_NODES_OF_A_JOB or not all(map(_NODE.fullmatch, run.nodes)):
        return Rejected(_NO_NAME)
    known = [gpus_of[name] for name in run.nodes if name in gpus_of]
    code = ABSENT_EXIT if run.exit_code is None else run.exit_code
    unsaved_ns = None
    if ended_ns is not None and run.saved_ns is not None:
        unsaved_ns = max(0, ended_ns - max(run.saved_ns, run.scheduled_ns))
    return JobRow(
        str(run.task), printable(run.user, MAX_NAME), _state(run), len(run.nodes),
        sum(known) if len(known) == len(run.nodes) else None, run.submitted_ns, run.scheduled_ns, ended_ns, code,
        code - 128 if 128 < code < 192 else 0, ",".join(run.nodes), "", unsaved_ns,
        max(0, run.overhead_ns if run.ready_ns is None else run.ready_ns) if ended_ns is not None else None,
        "platform",
    )  # fmt: skip


def _state(run: RunEntry) -> str:
    """What it was told to do explains its end, unless it had come to an end of its own."""
    if run.ended_ns is None:
        return "RUNNING"
    if run.cause == "succeeded":
        return "COMPLETED"
    asked = _OF_WISHES.get(run.wish)
    if asked == "BOOT_FAIL" and run.started_ns is not None:
        asked = "NODE_FAIL"
    if run.cause is None:
        return asked or "NODE_FAIL"
    if run.cause in _OF_CAUSES:
        return asked or _untold(run, run.cause)
    if asked == "NODE_FAIL" and run.wish != "lost":
        return asked
    return _STATES.get(run.cause, "FAILED")


def _untold(run: RunEntry, cause: str) -> str:
    """It left though nothing told it to, or nobody noted what did."""
    if not run.wish:
        return _OF_CAUSES[cause]
    by_slurm = cause == "interrupted" and run.exit_code == _EXIT_OF_SLURM and run.started_ns is not None
    return "PREEMPTED" if by_slurm or cause == "suspended" else "NODE_FAIL"


def events_of(entry: NodeEntry, clock: Clock) -> list[EventRow | Rejected]:
    if not EARLIEST_NS <= entry.at_ns <= clock.latest_ns:
        return [Rejected(_OUT_OF_RANGE)]
    if not _NODE.fullmatch(entry.node):
        return [Rejected(_NO_NAME)]
    fault = entry.fault
    event = _event(entry, fault, _severity(entry, fault))
    if entry.state != "drained" or not entry.ticket:
        return [event]
    return [event, event._replace(severity="ok", source=TICKET, check="", part=str(entry.ticket))]


def _severity(entry: NodeEntry, fault: HealthEvent | None) -> Severity:
    if entry.state == "lost":
        return "high"
    if entry.state == "drained":
        return "warn" if fault is None else fault.severity
    if entry.state in _SUSPECT:
        return "warn"
    return "ok"  # a remedy, a test or a return tells of no new fault


def _event(entry: NodeEntry, fault: HealthEvent | None, severity: Severity) -> EventRow:
    is_fault = fault is not None and (entry.state in _OUT or entry.state in _SUSPECT)
    symptom = "node_lost" if entry.state == "lost" else "other"
    cause = entry.state
    check = part = ""
    if fault is not None and is_fault:
        symptom, cause = symptom_of_event(fault), printable(fault.cause)
        check, part = fault.check, printable(fault.part)
    words = f"{entry.state}: {entry.reason}" if entry.reason else entry.state
    user_made = fault is not None and is_fault and fault.user_made
    return EventRow(
        entry.at_ns, entry.node, symptom, cause, severity, "platform", check, part, "", user_made, printable(words)
    )
