"""Sessions of clients: what they say to the manager, and what storage processes are told of who lives.

A client opens a session before its first update, and says now and then that it lives. Its id is given once and never
again. When its session is over (it ended it, an administrator did, or it was silent for its lifetime), none of its
updates is admitted anywhere any more, and what replicas remembered of them is forgotten: see `core.manager.sessions`.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from fireflyer.fs.schema.ids import ClientId, RoutingVersion
from fireflyer.fs.schema.routing import RoutingDelta

__all__ = [
    "MAX_SESSIONS",
    "CapabilityAnswer",
    "ClientAnswer",
    "ClientRequest",
    "EndSession",
    "GetCapability",
    "GetSessions",
    "KeepSession",
    "OpenSession",
    "Session",
    "SessionKept",
    "SessionList",
    "SessionOver",
    "SessionStatus",
    "SessionsDelta",
    "SessionsVersion",
]

MAX_SESSIONS: Final = 1 << 16
"""Of one cluster at one time."""

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
_U63 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
SessionsVersion: TypeAlias = _U63
"""Of the list of living sessions: one more with each change of it that was committed. 0: the empty one."""


class SessionsDelta(msgspec.Struct, frozen=True):
    """What changed after version `base` of the list; from 0 it is all of it."""

    base: SessionsVersion
    version: SessionsVersion
    next_client: ClientId
    """Ids below this one have been given: who is not in the list is over."""
    opened: tuple[ClientId, ...] = ()
    ended: tuple[ClientId, ...] = ()


# --- clients ---


class OpenSession(msgspec.Struct, frozen=True, tag="OpenSession"):
    """Answered by `Session`. `nonce`: random, drawn once, so that the same request again gets the same session."""

    nonce: _Name
    name: Annotated[str, msgspec.Meta(max_length=128)] = ""
    """For people: a host and a process."""


class Session(msgspec.Struct, frozen=True, tag="Session"):
    """It lives until nothing is heard of it for `lifetime_ns`."""

    client: ClientId
    lifetime_ns: _U63


class KeepSession(msgspec.Struct, frozen=True, tag="KeepSession"):
    """I live; and what is new since this routing? Answered by `SessionKept` or `SessionOver`."""

    client: ClientId
    known: RoutingVersion = 0


class SessionKept(msgspec.Struct, frozen=True, tag="SessionKept"):
    routing: RoutingDelta | None
    """None: unchanged."""


class SessionOver(msgspec.Struct, frozen=True, tag="SessionOver"):
    """There is no such session any more: no update of it that is still unanswered will be answered."""

    client: ClientId


class EndSession(msgspec.Struct, frozen=True, tag="EndSession"):
    """Answered by `Done`, also when it was over already."""

    client: ClientId


class GetCapability(msgspec.Struct, frozen=True, tag="GetCapability"):
    """The right of this session's user to files `first_file` to `last_file`. Administrators alone may ask for it."""

    client: ClientId
    first_file: _U63
    last_file: _U63
    rights: Annotated[int, msgspec.Meta(ge=1, le=3)]
    """As in `core.capability`."""


class CapabilityAnswer(msgspec.Struct, frozen=True, tag="CapabilityAnswer"):
    capability: bytes
    expires_unix_s: _U63


class GetSessions(msgspec.Struct, frozen=True, tag="GetSessions"):
    pass


class SessionStatus(msgspec.Struct, frozen=True):
    client: ClientId
    user: str
    name: str
    silent_ns: int


class SessionList(msgspec.Struct, frozen=True, tag="SessionList"):
    sessions: tuple[SessionStatus, ...]


ClientRequest: TypeAlias = OpenSession | KeepSession | EndSession | GetSessions | GetCapability
ClientAnswer: TypeAlias = Session | SessionKept | SessionOver | SessionList | CapabilityAnswer
