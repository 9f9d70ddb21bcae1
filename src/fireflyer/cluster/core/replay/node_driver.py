"""What a replay asks of whoever knows what befalls nodes: faults, repairs, checks, people who take nodes out.

A driver closes and opens nodes, which is told to the policy, and ends runs. It is told which runs start and end.
"""

from __future__ import annotations

import enum
from typing import Protocol

__all__ = ["NodeDriver", "Nodes", "PlacedRun", "RunEnd"]


class RunEnd(enum.Enum):
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    """By the policy."""
    FAILED = "failed"
    """By the driver."""


class PlacedRun(Protocol):
    """Where a task runs."""

    @property
    def number(self) -> int:
        """No other run of the replay has it."""

    @property
    def task(self) -> int: ...

    @property
    def nodes(self) -> tuple[int, ...]: ...


class Nodes(Protocol):
    """What a driver may do."""

    def run_on(self, node: int) -> PlacedRun | None: ...

    def close(self, now_ns: int, node: int) -> None:
        """It takes no task from now on; a run that it has goes on. Of a node that is open."""

    def open(self, now_ns: int, node: int) -> None:
        """Of a node that is closed."""

    def fail_run(self, now_ns: int, node: int) -> None:
        """The run of the node, if any, ends without what it has not saved; its task waits again."""


class NodeDriver(Protocol):
    def begin(self, nodes: Nodes) -> None:
        """Once, at time 0, when all nodes are open and free."""

    def next_ns(self) -> int | None:
        """When something happens next, if no run starts or ends before."""

    def happen(self, now_ns: int) -> None:
        """All that is due."""

    def started(self, now_ns: int, run: PlacedRun) -> None: ...

    def ended(self, now_ns: int, run: PlacedRun, end: RunEnd) -> None:
        """Its nodes are free."""
