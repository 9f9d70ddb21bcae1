"""What the health machine is told, and what it asks for."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from fireflyer.cluster.core.health.findings import Finding
from fireflyer.cluster.core.health.records import RepairState
from fireflyer.cluster.core.health.remedies import Remedy

__all__ = [
    "Effect",
    "Event",
    "Moved",
    "Probed",
    "Rebooted",
    "Removed",
    "Repaired",
    "Reported",
    "Requeue",
    "ReturnAsked",
    "RunFailed",
    "Said",
    "Tell",
    "TimePassed",
]


class Said(msgspec.Struct, frozen=True):
    """One report of the checks of a node."""

    node: str
    events: tuple[Finding, ...]
    asked: int = 0
    """`HealthReport.asked`."""


class Probed(msgspec.Struct, frozen=True):
    """The report to the probe `number` (`NodeHealth.asked`)."""

    node: str
    number: int
    events: tuple[Finding, ...]
    asked: int = 0
    """`HealthReport.asked`."""


class Reported(msgspec.Struct, frozen=True):
    """A fault that an operator has measured, beside the checks of the node."""

    node: str
    fault: Finding


class Repaired(msgspec.Struct, frozen=True):
    """A person has done this. Raises `UsageError` for a node that is not out."""

    node: str
    remedy: Remedy
    words: str
    by: str


class ReturnAsked(msgspec.Struct, frozen=True):
    """A person wants the node back without a repair: it is tested. Raises `UsageError` for a node that is not out."""

    node: str
    words: str
    by: str


class Rebooted(msgspec.Struct, frozen=True):
    """Its agent reports another boot than before."""

    node: str


class RunFailed(msgspec.Struct, frozen=True):
    """A run has ended by a failure, which a fault of any of its nodes may have caused. Of those that have no other run
    since."""

    nodes: tuple[str, ...]
    corrupt: tuple[str, ...] = ()
    """Of these, nodes whose ranks differed from the majority of the replicas of their state; a user's program says
    it."""


class Removed(msgspec.Struct, frozen=True):
    """The node is none of the cluster any more."""

    node: str
    by: str


class TimePassed(msgspec.Struct, frozen=True):
    pass


Event: TypeAlias = Said | Probed | Reported | Repaired | ReturnAsked | Rebooted | RunFailed | Removed | TimePassed


class Requeue(msgspec.Struct, frozen=True):
    """The run of the node is to leave it at once, and to be started elsewhere; not counted against its task: the
    evidence is none that its user can have made."""

    node: str
    reason: str


class Moved(msgspec.Struct, frozen=True):
    """The node is in another state: for the history, and for who places tasks."""

    node: str
    state: RepairState
    reason: str
    fault: Finding | None = None
    """Why, where a fault is known."""
    ticket: int = 0


class Tell(msgspec.Struct, frozen=True):
    """A person is to know this."""

    node: str
    words: str
    fault: Finding | None = None
    """What it is about, where that is a finding."""


Effect: TypeAlias = Requeue | Moved | Tell
