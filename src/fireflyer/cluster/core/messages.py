"""What the gang machine is told (events) and what it asks for (effects).

`incarnation` counts the agents that were started for a node, `attempt` the gangs: whatever carries an older number is
a message from the past and changes nothing.
"""

from __future__ import annotations

import msgspec

from fireflyer.base.events import JobEvent, Report
from fireflyer.cluster.schema.job import Culprit, Fault

__all__ = [
    "AgentGone",
    "AgentHeartbeat",
    "AgentLost",
    "AgentUp",
    "AttemptPrepared",
    "Begin",
    "Effect",
    "Event",
    "Finish",
    "Inject",
    "KillNode",
    "Log",
    "PrepareAttempt",
    "PrepareFailed",
    "RankEnd",
    "RankExited",
    "RankReported",
    "RanksGone",
    "ShutDownAgent",
    "StartAgent",
    "StartRanks",
    "StopRanks",
    "StopRequested",
    "StorageFailed",
    "Tick",
]


# -- events ------------------------------------------------------------------------------------------------------------


class Begin(msgspec.Struct, frozen=True):
    """First event of all."""

    wall_time_s: float


class AgentUp(msgspec.Struct, frozen=True):
    """The agent has connected and can start ranks."""

    node: int
    incarnation: int


class AgentHeartbeat(msgspec.Struct, frozen=True):
    """Any sign of life of the agent."""

    node: int
    incarnation: int


class AgentLost(msgspec.Struct, frozen=True):
    """The agent died or its connection broke; its ranks may still run."""

    node: int
    incarnation: int
    reason: str


class AgentGone(msgspec.Struct, frozen=True):
    """The agent and every process that it started are gone: nothing of this incarnation is left on the node."""

    node: int
    incarnation: int
    reason: str


class AttemptPrepared(msgspec.Struct, frozen=True):
    """There is a port and a clean store for the attempt."""

    attempt: int


class PrepareFailed(msgspec.Struct, frozen=True):
    attempt: int
    reason: str


class RankEnd(msgspec.Struct, frozen=True):
    """How a rank ended."""

    rank: int
    exit_code: int
    """As the shell says it: 128 + n for signal n."""
    told: bool
    """It had been asked to stop: its end says nothing about who failed."""
    note: str = ""
    """Why it could not be started, when it could not."""


class RankExited(msgspec.Struct, frozen=True):
    node: int
    incarnation: int
    attempt: int
    end: RankEnd


class RanksGone(msgspec.Struct, frozen=True):
    """All ranks of the node ended, and nothing that they started is left there."""

    node: int
    incarnation: int
    attempt: int
    ends: tuple[RankEnd, ...]
    """Every rank of the node once more, so that a lost or late `RankExited` does no harm."""
    port_taken: bool = False
    """MASTER_PORT is held by a process that is not ours."""


class RankReported(msgspec.Struct, frozen=True):
    report: Report


class StopRequested(msgspec.Struct, frozen=True):
    signal: int


class StorageFailed(msgspec.Struct, frozen=True):
    """The run directory cannot be written any more."""

    reason: str


class Tick(msgspec.Struct, frozen=True):
    """Time has passed; comes at least every `TICK_NS`."""


Event = (
    Begin
    | AgentUp
    | AgentHeartbeat
    | AgentLost
    | AgentGone
    | AttemptPrepared
    | PrepareFailed
    | RankExited
    | RanksGone
    | RankReported
    | StopRequested
    | StorageFailed
    | Tick
)


# -- effects -----------------------------------------------------------------------------------------------------------


class StartAgent(msgspec.Struct, frozen=True):
    """Answered by `AgentUp`, or by `AgentGone`."""

    node: int
    incarnation: int


class PrepareAttempt(msgspec.Struct, frozen=True):
    """Find a port, drop what earlier attempts left in the store. Answered by `AttemptPrepared` or `PrepareFailed`."""

    attempt: int


class StartRanks(msgspec.Struct, frozen=True):
    """Answered by a `RankExited` for each in time, then `RanksGone`."""

    node: int
    incarnation: int
    attempt: int


class StopRanks(msgspec.Struct, frozen=True):
    """`signal` to every rank that has not ended by itself within `settle_ns`, SIGKILL `grace_ns` later. Answered by
    `RanksGone`."""

    node: int
    incarnation: int
    attempt: int
    signal: int
    settle_ns: int
    grace_ns: int


class KillNode(msgspec.Struct, frozen=True):
    """SIGKILL to the agent and to everything that it started. Answered by `AgentGone`."""

    node: int
    incarnation: int


class ShutDownAgent(msgspec.Struct, frozen=True):
    """No more work: the agent ends by itself. Answered by `AgentGone`."""

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


Effect = StartAgent | PrepareAttempt | StartRanks | StopRanks | KillNode | ShutDownAgent | Inject | Log | Finish
