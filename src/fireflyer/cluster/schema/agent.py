"""What a launcher asks of the agents of machines, and what a machine says when it joins.

Calls of an agent go over a connection on which both ends have proven that they have the machine's credential;
`JOIN_MACHINE` over one on which they have proven that they have the join token. Connections hide nothing, so no secret
is in a message: the job's is sealed (`identity.derived`).
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from fireflyer.cluster.schema.hosts import HostFacts, HostQuestion, NodeOrders
from fireflyer.cluster.schema.wire import Done
from fireflyer.runtime.rpc import Method

__all__ = [
    "ASK_AGENT",
    "FORGET_GUARD",
    "JOIN_MACHINE",
    "LIST_GUARDS",
    "MAX_STATUSES",
    "REVOKE_MACHINE",
    "START_GUARD",
    "STOP_GUARD",
    "WAIT_GUARD",
    "Admitted",
    "GuardName",
    "GuardOrder",
    "GuardStatus",
    "GuardStatuses",
    "JoinMachine",
]

MAX_STATUSES = 512

_Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Text = Annotated[str, msgspec.Meta(max_length=1024)]
_Bytes32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_Token = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{8,64}\.[0-9]{1,9}\.[0-9]{1,9}$")]
"""Of a job, a node and an incarnation: the name of a directory on the machine."""


class JoinMachine(msgspec.Struct, frozen=True, kw_only=True):
    """From a machine that has a join token."""

    token_id: _Text
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    """Of its agent."""
    address: Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Za-z._:-]{0,253}$")] = ""
    """At which its agent is reached; empty: that from which this connection comes."""
    node: Annotated[str, msgspec.Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$")] = ""
    """Of a job of a batch system, whose token lets each of its nodes join once; empty: the token names the machine."""


class Admitted(msgspec.Struct, frozen=True, kw_only=True):
    """The join token is used up. From `nonce` and the token both ends compute the machine's credential."""

    machine: _Text
    token_id: _Text
    """The public part of the credential."""
    nonce: _Bytes32
    managers: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=16)] = ()
    """`host:port` of the managers of a platform, where the issuer is one: the agent reports to them and follows their
    orders. Empty: launchers of users ask the agent."""


class GuardOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Start the guard of one node of a job. Its token is that of `orders`."""

    job: _Text
    token: _Token
    orders: NodeOrders
    """Without the secret."""
    sealed: bytes = b""
    """The job's secret; empty where the machine finds the file in the run directory."""
    nonce: bytes = b""
    sealed_user_token: Annotated[bytes, msgspec.Meta(max_length=256)] = b""
    """See `NodeOrders.user_token`."""


class GuardName(msgspec.Struct, frozen=True):
    token: _Token


class GuardStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`state` `ended`: `clean`, `exit_code` and `reason` say how."""

    token: _Text
    job: _Text
    node: _Number
    incarnation: _Number
    state: Literal["starting", "running", "stopping", "ended"]
    age_ns: _Number
    """For how long it has been in this state."""
    clean: bool = False
    exit_code: Annotated[int, msgspec.Meta(ge=0, le=255)] | None = None
    reason: _Text = ""


class GuardStatuses(msgspec.Struct, frozen=True):
    guards: Annotated[tuple[GuardStatus, ...], msgspec.Meta(max_length=MAX_STATUSES)]


JOIN_MACHINE = Method("agent.join_machine", JoinMachine, Admitted)
ASK_AGENT = Method("agent.ask", HostQuestion, HostFacts)
START_GUARD = Method("agent.start_guard", GuardOrder, GuardStatus)
WAIT_GUARD = Method("agent.wait_guard", GuardName, GuardStatus)
STOP_GUARD = Method("agent.stop_guard", GuardName, GuardStatus)
FORGET_GUARD = Method("agent.forget_guard", GuardName, Done)
LIST_GUARDS = Method("agent.list_guards", Done, GuardStatuses)
REVOKE_MACHINE = Method("agent.revoke_machine", Done, Done)
