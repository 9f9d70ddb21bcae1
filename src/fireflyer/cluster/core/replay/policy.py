"""What a replay asks of a policy: it is told what happens, and says what starts and what is interrupted.

Tasks and nodes are numbers: tasks by their place in the trace, nodes from 0. A policy takes what it decided as done. It
is told the rest: `vacated` when a run has left its nodes and its task waits again, whether it was interrupted or a node
failed; `finished` when a task is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND

__all__ = ["ClusterSettings", "Decision", "Interrupt", "Policy", "Start"]


class ClusterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes, and the rules that hold for every policy."""

    nodes: int
    zones: int = 1
    leaf_nodes: int = 20
    """Nodes of a leaf switch."""
    cross_zone_nodes: int = 16
    """Tasks of fewer nodes never run in two zones."""
    cross_zone_tasks: int = 1
    """So many tasks at a time run in two zones."""
    guaranteed_ns: int = 7200 * SECOND
    """A run is not interrupted before."""

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= 100_000:
            raise UsageError(f"nodes must be between 1 and 100,000, not {self.nodes}")
        if not 1 <= self.zones <= self.nodes:
            raise UsageError(f"zones must be between 1 and the {self.nodes} nodes, not {self.zones}")
        if self.leaf_nodes < 1:
            raise UsageError(f"leaf_nodes must be 1 or more, not {self.leaf_nodes}")

    def zone(self, node: int) -> int:
        return node * self.zones // self.nodes

    def zone_nodes(self) -> list[int]:
        """How many nodes each zone has."""
        found = [0] * self.zones
        for node in range(self.nodes):
            found[self.zone(node)] += 1
        return found


class Start(NamedTuple):
    task: int
    nodes: tuple[int, ...]


class Interrupt(NamedTuple):
    task: int
    saves: bool
    """It is told, saves and leaves; otherwise it is killed, and what it has not saved is lost."""


Decision: TypeAlias = Start | Interrupt


class Policy(Protocol):
    """Who runs where."""

    @property
    def name(self) -> str: ...

    def submitted(self, now_ns: int, tasks: Sequence[int]) -> None: ...

    def finished(self, now_ns: int, task: int) -> None: ...

    def vacated(self, now_ns: int, task: int) -> None: ...

    def node_down(self, now_ns: int, node: int) -> None:
        """Before `vacated` of the task that ran on it."""

    def node_up(self, now_ns: int, node: int) -> None: ...

    def decide(self, now_ns: int) -> Sequence[Decision]: ...

    def wake_ns(self) -> int | None:
        """When it wants to be asked although nothing happened; later than now."""
