"""What the machine of a client's requests hears, what it asks for, and its bounds.

The driver performs the effects of one `handle` in their order before it gives the machine the next event, and wakes it
with `Tick` when `due_ns` has come.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from fireflyer.base.units import MIB, MS, SECOND
from fireflyer.fs.schema.chunks import Change, Done, Found, Missing, Query, QueryKind, QueryReply, Update, UpdateReply
from fireflyer.fs.schema.ids import MAX_CHUNK_BYTES, ChainId, ChunkId, ClientId, ContentId, NodeId, TargetId
from fireflyer.fs.schema.routing import Routing

__all__ = [
    "AskRouting",
    "Begin",
    "CancelOperation",
    "ConnectionLost",
    "DataArrived",
    "Effect",
    "End",
    "Event",
    "Failed",
    "Finish",
    "Limits",
    "NewSession",
    "QuerySpec",
    "ReplyReceived",
    "RoutingConfirmed",
    "RoutingLearned",
    "SendCorruptionHint",
    "SendRequest",
    "SessionOpened",
    "SessionOver",
    "Tick",
    "Withdraw",
]


class Limits(msgspec.Struct, frozen=True):
    """Bounds of one client session."""

    requests: int = 1 << 16
    """Most requests that are begun and not finished; beyond, `Busy`."""
    channels: int = 1024
    """Most updates under way or with an unknown outcome."""
    unknown: int = 768
    """Most updates with an unknown outcome; with so many no update begins until the session was exchanged for another
    one."""
    node_asks: int = 256
    """Most requests under way to one storage process."""
    node_bytes: int = 64 * MIB
    """Most bytes of data under way to and from one storage process; one request may always be under way."""
    senders: int = 0
    """Request-to-send: how many nodes at a time may owe large replies; 0: any number."""
    large_bytes: int = 128 << 10
    """A reply from this size on needs the permission."""
    grant_bytes: int = 8 * MIB
    """Bytes that a node is asked for with one permission, while others wait for it."""
    grant_ns: int = 250 * MS
    """Time without any answer, beside that which what is under way may take, after which a node loses the
    permission."""
    attempt_ns: int = 5 * SECOND
    """Time without an answer after which another replica is asked; it doubles with each further attempt, to 8 times."""
    least_bytes_per_s: int = 16 * MIB
    """A node may take longer by what is under way to and from it, at this rate."""
    pause_ns: int = 2 * MS
    """Pause after a refusal; it doubles with each further one, up to `max_pause_ns`."""
    max_pause_ns: int = 500 * MS
    suspect_ns: int = SECOND
    """Time for which a node that did not answer is asked only where there is no other."""
    routing_ns: int = 50 * MS
    """The least time between two requests for routing."""
    damaged: int = 3
    """Answers of each serving replica, on average, that its data are damaged, until that is believed."""


class QuerySpec(msgspec.Struct, frozen=True):
    """A `Query` before it is decided whom to ask. Fields as there."""

    kind: QueryKind
    offset: int = 0
    length: int = MAX_CHUNK_BYTES


class DataArrived(msgspec.Struct, frozen=True):
    """A read's data lie in the caller's memory, verified. Fewer than asked for where the chunk ends."""

    length: int
    id: ContentId
    chunk_length: int
    crc32c: int
    """Of these bytes."""


# --- events ---


class Begin(msgspec.Struct, frozen=True):
    """`operation`: the driver's number, never used twice."""

    operation: int
    deadline_ns: int
    chain: ChainId
    chunk: ChunkId
    what: Change | QuerySpec
    session: ClientId = 0
    """Of an update: by which session alone it may be sent. 0: by whichever there is."""


class CancelOperation(msgspec.Struct, frozen=True):
    """Nobody waits for this operation any more. There will be no `Finish`."""

    operation: int


class ReplyReceived(msgspec.Struct, frozen=True):
    """The answer to an `SendRequest`. Those that come later than a `Withdraw`, or twice, are ignored."""

    ask: int
    reply: UpdateReply | QueryReply | DataArrived


class ConnectionLost(msgspec.Struct, frozen=True):
    """There is no connection with the node, and its asks will not be answered. `sent` False: none of them has left."""

    node: NodeId
    sent: bool = True
    reason: str = "the connection was lost"


class RoutingLearned(msgspec.Struct, frozen=True):
    """Older than what is known already: ignored."""

    routing: Routing


class RoutingConfirmed(msgspec.Struct, frozen=True):
    """The primary, when it was asked at `asked_ns` or later, had no newer routing than what has been learned."""

    asked_ns: int


class SessionOver(msgspec.Struct, frozen=True):
    """The manager knows no session of this client any more: it was silent for too long, or somebody has ended it."""

    client: ClientId


class SessionOpened(msgspec.Struct, frozen=True):
    """What `NewSession` asked for."""

    client: ClientId


class Tick(msgspec.Struct, frozen=True):
    """`due_ns` has come."""


class End(msgspec.Struct, frozen=True):
    """The session is over: all fails, now and later, with this reason."""

    reason: str


Event: TypeAlias = (
    Begin
    | CancelOperation
    | ReplyReceived
    | ConnectionLost
    | RoutingLearned
    | RoutingConfirmed
    | SessionOver
    | SessionOpened
    | Tick
    | End
)

# --- effects ---


class SendRequest(msgspec.Struct, frozen=True):
    """To the node, at most once; over a connection that is made if there is none. The data are the operation's."""

    ask: int
    operation: int
    node: NodeId
    target: TargetId
    body: Update | Query


class Withdraw(msgspec.Struct, frozen=True):
    """The answer to this look is not wanted any more; from now on it must not touch the operation's memory."""

    ask: int


class Failed(msgspec.Struct, frozen=True):
    """`code` as in `fireflyer.base.errors`. An update was not done and never will be by this client, unless `code` is
    that of `Timeout`: then nobody knows."""

    code: str
    message: str


class Finish(msgspec.Struct, frozen=True):
    operation: int
    result: Done | Found | Missing | DataArrived | Failed


class AskRouting(msgspec.Struct, frozen=True):
    """Of a manager. No more often than `Limits.routing_ns`; if it fails it is asked for again when it is wanted."""


class NewSession(msgspec.Struct, frozen=True):
    """End the session of this client; when the manager says that it is over, and not before, open another one."""

    client: ClientId


class SendCorruptionHint(msgspec.Struct, frozen=True):
    """Tell the replica that its chunk did not match its checksums."""

    node: NodeId
    target: TargetId
    chain: ChainId
    chunk: ChunkId


Effect: TypeAlias = SendRequest | Withdraw | Finish | AskRouting | NewSession | SendCorruptionHint
