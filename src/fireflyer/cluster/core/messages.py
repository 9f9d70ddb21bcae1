"""What the gang machine is told (events) and what it asks for (effects).

`incarnation` counts the supervisors that were started for a node, `attempt` the gangs: whatever carries an older number
is a message from the past and changes nothing.
"""

from __future__ import annotations

import msgspec

from fireflyer.base.events import JobEvent, Report
from fireflyer.cluster.core.blame import Failure
from fireflyer.cluster.schema.job import Culprit, Fault
from fireflyer.cluster.schema.wire import Checked, Points, RankEnd, Stop

__all__ = [
    "AskPoints",
    "AttemptPrepared",
    "Begin",
    "CheckNode",
    "Effect",
    "Event",
    "Finish",
    "Inject",
    "KillNode",
    "LeaseRenewed",
    "Log",
    "NameHorizon",
    "NodeAnswered",
    "PointsCollected",
    "PrepareAttempt",
    "PrepareFailed",
    "RankEnded",
    "RankReported",
    "RanksGone",
    "RanksPrinted",
    "ShutDownSupervisor",
    "StartRanks",
    "StartSupervisor",
    "StopRanks",
    "StopRequested",
    "StorageFailed",
    "SupervisorEvent",
    "SupervisorGone",
    "SupervisorHeartbeat",
    "SupervisorLost",
    "SupervisorUp",
    "SuspendAsked",
    "Tick",
    "WatchdogSet",
]


# -- events ------------------------------------------------------------------------------------------------------------


class Begin(msgspec.Struct, frozen=True):
    """First event of all."""

    wall_time_s: float


class SupervisorUp(msgspec.Struct, frozen=True):
    """The supervisor has connected and can start ranks."""

    node: int
    incarnation: int


class SupervisorHeartbeat(msgspec.Struct, frozen=True):
    """Any sign of life of the supervisor."""

    node: int
    incarnation: int


class LeaseRenewed(msgspec.Struct, frozen=True):
    """The supervisor asked for its next lease, and is given one from now on unless the node counts as lost."""

    node: int
    incarnation: int


class SupervisorLost(msgspec.Struct, frozen=True):
    """The supervisor died or its connection broke; its ranks may still run."""

    node: int
    incarnation: int
    reason: str


class SupervisorGone(msgspec.Struct, frozen=True):
    """The supervisor and every process that it started are gone: nothing of this incarnation is left on the node."""

    node: int
    incarnation: int
    reason: str


class AttemptPrepared(msgspec.Struct, frozen=True):
    """There is a port and a clean store for the attempt."""

    attempt: int


class PrepareFailed(msgspec.Struct, frozen=True):
    attempt: int
    reason: str


class RankEnded(msgspec.Struct, frozen=True):
    node: int
    incarnation: int
    end: RankEnd


class RanksGone(msgspec.Struct, frozen=True):
    """All ranks of the node ended, and nothing that they started is left there."""

    node: int
    incarnation: int
    attempt: int
    ends: tuple[RankEnd, ...]
    """Every rank of the node once more, so that a lost or late `RankEnded` does no harm."""
    port_taken: bool = False
    """MASTER_PORT is held by a process that is not ours."""


class RankReported(msgspec.Struct, frozen=True):
    report: Report


class RanksPrinted(msgspec.Struct, frozen=True):
    """A rank of any node printed something: a sign of life for the watchdog."""


class NodeAnswered(msgspec.Struct, frozen=True):
    """The program of `CheckNode` has ended."""

    node: int
    incarnation: int
    checked: Checked


class StopRequested(msgspec.Struct, frozen=True):
    signal: int


class SuspendAsked(msgspec.Struct, frozen=True):
    """Somebody wants the nodes: the ranks are to save and to leave."""


class PointsCollected(msgspec.Struct, frozen=True):
    """At which suspend points the ranks of a node are; those that come to one wait there."""

    node: int
    incarnation: int
    points: Points


class WatchdogSet(msgspec.Struct, frozen=True):
    """A rank has set the time of the watchdog. 0: none."""

    limit_ns: int


class StorageFailed(msgspec.Struct, frozen=True):
    """The run directory cannot be written any more."""

    reason: str


class Tick(msgspec.Struct, frozen=True):
    """Time has passed; comes at least every `TICK_NS`."""


SupervisorEvent = SupervisorUp | SupervisorHeartbeat | LeaseRenewed | SupervisorLost | SupervisorGone

Event = (
    Begin
    | SupervisorEvent
    | AttemptPrepared
    | PrepareFailed
    | RankEnded
    | RanksGone
    | RankReported
    | RanksPrinted
    | NodeAnswered
    | StopRequested
    | SuspendAsked
    | PointsCollected
    | WatchdogSet
    | StorageFailed
    | Tick
)


# -- effects -----------------------------------------------------------------------------------------------------------


class StartSupervisor(msgspec.Struct, frozen=True):
    """On the host of that number, counted in `JobSpec.hosts` (without hosts: on this machine). Answered by
    `SupervisorUp`, or by `SupervisorGone`."""

    node: int
    incarnation: int
    host: int


class PrepareAttempt(msgspec.Struct, frozen=True):
    """Find a port, drop what earlier attempts left in the store. Answered by `AttemptPrepared` or `PrepareFailed`."""

    attempt: int


class StartRanks(msgspec.Struct, frozen=True):
    """Answered by a `RankEnded` for each in time, then `RanksGone`."""

    node: int
    incarnation: int
    attempt: int


class StopRanks(msgspec.Struct, frozen=True):
    """Answered by `RanksGone`."""

    node: int
    incarnation: int
    stop: Stop


class AskPoints(msgspec.Struct, frozen=True):
    """Ranks wait at their next suspend point. Answered by `PointsCollected`."""

    node: int
    incarnation: int
    attempt: int


class NameHorizon(msgspec.Struct, frozen=True):
    """The ranks leave at this point."""

    node: int
    incarnation: int
    attempt: int
    horizon: int


class CheckNode(msgspec.Struct, frozen=True):
    """Run the program of `--on-failure` on a node whose ranks are gone. Answered by `NodeAnswered`."""

    node: int
    incarnation: int
    attempt: int
    failure: Failure


class KillNode(msgspec.Struct, frozen=True):
    """SIGKILL to the supervisor and to everything that it started. Answered by `SupervisorGone`."""

    node: int
    incarnation: int


class ShutDownSupervisor(msgspec.Struct, frozen=True):
    """No more work: the supervisor ends by itself. Answered by `SupervisorGone`."""

    node: int
    incarnation: int


class Inject(msgspec.Struct, frozen=True):
    """Break it. The machine takes no notice of having asked: it must find out as it would of a real fault."""

    fault: Fault


class Log(msgspec.Struct, frozen=True):
    event: JobEvent


class Finish(msgspec.Struct, frozen=True):
    """Last effect of all."""

    exit_code: int
    reason: str
    culprit: Culprit | None
    signal: int | None = None
    """That stopped the job, if one did."""
    suspended: bool = False


Effect = (
    StartSupervisor
    | PrepareAttempt
    | StartRanks
    | StopRanks
    | AskPoints
    | NameHorizon
    | CheckNode
    | KillNode
    | ShutDownSupervisor
    | Inject
    | Log
    | Finish
)
