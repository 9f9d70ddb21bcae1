"""Runs that leave because nodes of theirs close to everybody: maintenance.

A run is asked to leave `leave_ns` before the window begins, so that its nodes are free then; one that ends before, by
what it declared, is not. For the same time before the window, nothing that declared no time starts on these nodes.
Neither priority nor guarantee matters. A window that is set too late, or begins at once, asks at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fireflyer.base.errors import InvariantViolation
from fireflyer.base.units import format_duration
from fireflyer.cluster.core.scheduler.model import Interrupt, Task
from fireflyer.cluster.core.scheduler.node_sets import ClosedTime, NodeSets

__all__ = ["Asked", "asked_to_leave"]


class Asked(NamedTuple):
    """From when until when a run is asked to leave for a window."""

    at_ns: int
    closing: ClosedTime

    def interrupt(self, task: int, now_ns: int) -> Interrupt:
        ahead_ns = self.closing.begin_ns - now_ns
        begins = f"begins {format_duration(ahead_ns)} after it was asked" if ahead_ns > 0 else "has begun"
        return Interrupt(task, None, f"nodes of it close: {self.closing.name} {begins}")


def asked_to_leave(task: Task, nodes: int, sets: NodeSets, now_ns: int) -> Asked | None:
    """For which window a run on these nodes is asked first, of those that are not over; perhaps at once."""
    return min(_windows(task, nodes, sets, now_ns), key=lambda asked: (asked.at_ns, asked.closing), default=None)


def _windows(task: Task, nodes: int, sets: NodeSets, now_ns: int) -> Iterator[Asked]:
    run, request = task.run, task.request
    if run is None:
        raise InvariantViolation(f"task {task.id} does not run")
    for closing in sets.maintenance():
        if closing.nodes & nodes and now_ns < closing.until_ns:
            ends_ns = None if request.time_ns is None else run.started_ns + request.time_ns
            late = ends_ns is None or ends_ns > closing.begin_ns
            yield Asked(closing.begin_ns - request.leave_ns if late else closing.begin_ns, closing)
