"""What users and operators ask for, beside submitting: who may is a table in `access`."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.health.findings import Finding
from fireflyer.cluster.core.health.remedies import Remedy
from fireflyer.cluster.core.scheduler.model import Limit, LimitKind, Policy, Reservation

__all__ = [
    "AddReservation",
    "Command",
    "DrainNode",
    "LabelNode",
    "MoveNode",
    "PriorityBound",
    "RecordRepair",
    "RemoveLimit",
    "RemoveNode",
    "RemoveReservation",
    "ReportFault",
    "ResumeNode",
    "ResumeTask",
    "ReturnNode",
    "SetLimit",
    "SetLimits",
    "SetPolicy",
    "SetPriority",
    "SetPriorityBounds",
    "SetShare",
    "SetShares",
    "StopTask",
    "SuspendTask",
]

_Task = Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]
_Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")]
_Place = Annotated[str, msgspec.Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,79})?$")]
_Reason = Annotated[str, msgspec.Meta(max_length=400)]


class StopTask(msgspec.Struct, frozen=True, tag="StopTask"):
    """Ends it for good, as `stopped`."""

    task: _Task
    reason: _Reason = ""


class SuspendTask(msgspec.Struct, frozen=True, tag="SuspendTask"):
    """It saves and leaves its nodes, and does not run until it is resumed. One that waits is held."""

    task: _Task


class ResumeTask(msgspec.Struct, frozen=True, tag="ResumeTask"):
    task: _Task


class SetPriority(msgspec.Struct, frozen=True, tag="SetPriority"):
    task: _Task
    priority: Annotated[int, msgspec.Meta(ge=0, le=50)]


class DrainNode(msgspec.Struct, frozen=True, tag="DrainNode"):
    """It gets no new run; what runs there goes on."""

    node: _Name
    reason: _Reason


class ResumeNode(msgspec.Struct, frozen=True, tag="ResumeNode"):
    node: _Name


class ReportFault(msgspec.Struct, frozen=True, tag="ReportFault"):
    """A fault that was measured on it, as by `ff validate nodes`: its health takes it out, with a ticket. Where its
    health is not checked, or nothing there validates it before it returns, it is drained as by `DrainNode`."""

    node: _Name
    fault: Finding


class RecordRepair(msgspec.Struct, frozen=True, tag="RecordRepair"):
    """Of a node that its checks have taken out: this was done. It is tested then."""

    node: _Name
    remedy: Remedy
    words: _Reason = ""


class ReturnNode(msgspec.Struct, frozen=True, tag="ReturnNode"):
    """A node that its checks have taken out is tested without a repair, and returns when it passes."""

    node: _Name
    words: _Reason = ""


class LabelNode(msgspec.Struct, frozen=True, tag="LabelNode"):
    """Its labels are these from now on."""

    node: _Name
    labels: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=64)]


class MoveNode(msgspec.Struct, frozen=True, tag="MoveNode"):
    """Where it stands, and to which group of nodes it belongs."""

    node: _Name
    zone: _Place = ""
    leaf: _Place = ""
    group: _Name = "default"


class RemoveNode(msgspec.Struct, frozen=True, tag="RemoveNode"):
    """Forgets a node that is silent and has no run; it is new if it comes again."""

    node: _Name


class SetLimits(msgspec.Struct, frozen=True, tag="SetLimits"):
    """All limits, in the place of those before."""

    limits: Annotated[tuple[Limit, ...], msgspec.Meta(max_length=1000)]


class SetLimit(msgspec.Struct, frozen=True, tag="SetLimit"):
    """One limit, in the place of one for the same nodes, priority and users."""

    limit: Limit


class RemoveLimit(msgspec.Struct, frozen=True, tag="RemoveLimit"):
    kind: LimitKind
    name: _Place = ""
    node_group: _Name = "default"
    priority: Annotated[int, msgspec.Meta(ge=0, le=50)] | None = None


class SetShare(msgspec.Struct, frozen=True, tag="SetShare"):
    """How many nodes one user may expect; None: as who has no share."""

    user: _Name
    nodes: Annotated[float, msgspec.Meta(ge=0, lt=1e9)] | None


class SetShares(msgspec.Struct, frozen=True, tag="SetShares"):
    """Nodes that users may expect, in the place of those before."""

    shares: Annotated[dict[_Name, float], msgspec.Meta(max_length=10_000)]


class SetPolicy(msgspec.Struct, frozen=True, tag="SetPolicy"):
    policy: Policy
    guaranteed_ns: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] = 7200 * 10**9
    """How long a run is not interrupted."""

    def __post_init__(self) -> None:
        for name in ("age_step_ns", "usage_step_ns", "usage_half_life_ns"):
            if getattr(self.policy, name) < SECOND:
                raise UsageError(f"{name} must be a second at least, {SECOND}, not {getattr(self.policy, name)}")


class PriorityBound(msgspec.Struct, frozen=True, kw_only=True):
    """The highest priority that a user may ask for; an empty name: each user without one of their own."""

    user: _Place = ""
    priority: Annotated[int, msgspec.Meta(ge=0, le=50)]


class SetPriorityBounds(msgspec.Struct, frozen=True, tag="SetPriorityBounds"):
    bounds: Annotated[tuple[PriorityBound, ...], msgspec.Meta(max_length=10_000)]


class AddReservation(msgspec.Struct, frozen=True, tag="AddReservation"):
    """In the place of one of the same name. Without users, groups and tasks it is a maintenance window."""

    reservation: Reservation


class RemoveReservation(msgspec.Struct, frozen=True, tag="RemoveReservation"):
    name: _Name


Command: TypeAlias = (
    StopTask
    | SuspendTask
    | ResumeTask
    | SetPriority
    | DrainNode
    | ResumeNode
    | ReportFault
    | RecordRepair
    | ReturnNode
    | LabelNode
    | MoveNode
    | RemoveNode
    | SetLimit
    | RemoveLimit
    | SetLimits
    | SetShare
    | SetShares
    | SetPolicy
    | SetPriorityBounds
    | AddReservation
    | RemoveReservation
)
