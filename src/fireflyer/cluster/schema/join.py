"""What a machine says that joins a job by itself (torchrun's way), and what it is told to do there.

All calls go to the launcher, over a connection on which both have proven that they know the job's secret. Commands are
fetched one by one, as supervisors fetch theirs.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from fireflyer.cluster.schema.hosts import HostFacts, HostQuestion
from fireflyer.cluster.schema.wire import Done, Next, SupervisorConfig
from fireflyer.runtime.rpc import Method

__all__ = [
    "ASK",
    "HOST_NEWS",
    "HOST_NEXT",
    "JOIN",
    "GuardEnded",
    "HostCommand",
    "JobEnded",
    "JoinRequest",
    "Joined",
    "KillGuard",
    "NumberedHostCommand",
    "StartGuard",
]

_Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Text = Annotated[str, msgspec.Meta(max_length=4096)]


class JoinRequest(msgspec.Struct, frozen=True):
    node_rank: Annotated[int, msgspec.Meta(ge=-1, le=1 << 20)]
    """Number of the host, from 1; -1: any that is free."""
    nodes: _Number
    """As its command line says it, to be compared; 0: it says nothing."""
    facts: HostFacts
    ranks_per_node: _Number = 0
    """Likewise."""
    min_nodes: _Number = 0
    """As its command line says it; 0: no range."""


class Joined(msgspec.Struct, frozen=True):
    host: _Number
    job: _Text


class StartGuard(msgspec.Struct, frozen=True, tag="start_guard"):
    config: SupervisorConfig
    token: _Text
    first_lease_ns: _Number


class KillGuard(msgspec.Struct, frozen=True, tag="kill_guard"):
    node: _Number
    incarnation: _Number


class JobEnded(msgspec.Struct, frozen=True, tag="job_ended"):
    exit_code: Annotated[int, msgspec.Meta(ge=0, le=255)]
    reason: _Text


HostCommand = StartGuard | KillGuard | JobEnded


class NumberedHostCommand(msgspec.Struct, frozen=True):
    number: _Number
    command: HostCommand | None
    """None: nothing yet, ask again."""


class GuardEnded(msgspec.Struct, frozen=True):
    """`clean`: nothing of this incarnation is left on the machine; otherwise only its supervisor has ended, for
    `reason`."""

    node: _Number
    incarnation: _Number
    clean: bool
    reason: _Text


ASK = Method("cluster.host_question", Done, HostQuestion)
JOIN = Method("cluster.host_join", JoinRequest, Joined)
HOST_NEXT = Method("cluster.host_next", Next, NumberedHostCommand)
HOST_NEWS = Method("cluster.host_guard_ended", GuardEnded, Done)
