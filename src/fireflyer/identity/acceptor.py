"""Half-open connections of one listener, as a state machine without IO: who may try, for how long, and who goes first.

    opened --> hello --> proof --> HandOver                the client has proven itself
                 | |       ^ |
                 | +-> finding                             a user: `Find`, until `found` or `not_found`
                 |         | |
                 +---------+-+---> Refuse ----> Close      told why; what it still sends is read and dropped for a while
                 +---------+-+--------------->  Close      it left, or makes room for another one

The owner numbers connections (a descriptor will do), says what was read, and performs the effects in order.

Whose token it is lies in a store behind IO, so it is asked for with `Find`, which has a number of its own: that of a
connection may be another one's by the time the answer comes. Until then nothing is read of the connection; its time
goes on. An answer for a connection that is gone changes nothing.

Bytes: at most `wanted` are read at a time, one message is buffered. Time: each connection has `handshake_ns` to prove
itself and `refusal_ns` to read why it was refused, from `now_ns` of the call that began it; the owner calls `expire` at
`next_deadline_ns`. Number: at most `per_source` connections of one source and `total` of all are half-open.

Why strangers cannot keep others out. A newcomer is never turned away for the number of the others: one of those goes.
Over `per_source` it is the oldest of the same source; over `total` the oldest of the source that has most. An honest
peer needs milliseconds, so the oldest is most likely one that says nothing; and a source with few connections loses
none to a source with many. A source is what an attacker cannot have many of: an IPv4 address, an IPv6 network, a user
of the machine for a Unix socket; the owner names it.

Log lines are bounded too: `Report` comes as often as `base.report_limit` allows, with how many were left out.
None for a client that leaves without a byte: it has looked whether the port is reached, as hosts do before a job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from fireflyer.base.errors import Busy, FireflyerError, PermissionDenied, Timeout
from fireflyer.base.report_limit import ReportLimit
from fireflyer.base.units import KIB, MIB, SECOND, format_duration
from fireflyer.identity.conversation import ServerConversation
from fireflyer.identity.handshake import (
    NONCE_BYTES,
    Accepts,
    HandshakeRefused,
    Session,
    UserKey,
    pack_message,
    refusal_message,
)

__all__ = [
    "AcceptorEffect",
    "Close",
    "Find",
    "HandOver",
    "HandshakeAcceptor",
    "HandshakeLimits",
    "Refuse",
    "Report",
    "Send",
]

_DROPPED_AT_ONCE: Final = 64 * KIB


@dataclass(frozen=True, slots=True)
class HandshakeLimits:
    """Of one listener. A half-open connection costs its descriptor and a buffer of one message."""

    total: int = 256
    per_source: int = 128
    handshake_ns: int = 10 * SECOND
    refusal_ns: int = SECOND
    unread_bytes: int = MIB
    """So much is read of a refused client: closing before would destroy the message that says why."""


@dataclass(frozen=True, slots=True)
class Send:
    """`data` is at most one handshake message: a fresh connection takes it at once. Else call `lost`."""

    connection: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Refuse:
    """Send `data` and the end of the stream; the connection is read on until `Close`."""

    connection: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Find:
    """Find out whose token `token_id` is, and say it with `found`, or `not_found` where that cannot be known now.
    Nothing is read of the connection before the next `Send` or `Refuse`. `number`: of this search, never used again."""

    connection: int
    number: int
    token_id: str


@dataclass(frozen=True, slots=True)
class HandOver:
    """The connection is the owner's; the acceptor has forgotten it."""

    connection: int
    session: Session


@dataclass(frozen=True, slots=True)
class Close:
    """The acceptor has forgotten the connection."""

    connection: int


@dataclass(frozen=True, slots=True)
class Report:
    """For the log: why a client of `source` was not admitted. `left_out`: reports since the one before that were too
    many."""

    source: str
    reason: str
    left_out: int


AcceptorEffect = Send | Find | Refuse | HandOver | Close | Report


@dataclass(slots=True)
class _HalfOpen:
    source: str
    deadline_ns: int
    conversation: ServerConversation | None
    """None once it was refused."""
    unread_bytes: int
    has_spoken: bool = False
    search: int = 0
    """Number of its `Find` that was not answered; 0: none."""


class HandshakeAcceptor:
    """See the module's text. `random_bytes(count)` gives fresh random bytes. `full` says why this client is not
    served now, or None; it is asked when a client has proven itself: strangers do not use up what is for clients.
    Raises `UsageError` for a name that cannot be sent."""

    def __init__(
        self,
        accepts: Accepts,
        *,
        identity: str,
        purpose: str,
        random_bytes: Callable[[int], bytes],
        limits: HandshakeLimits | None = None,
        full: Callable[[Session], Busy | None] | None = None,
    ) -> None:
        self._accepts = accepts
        self._identity = identity
        self._purpose = purpose
        self._random_bytes = random_bytes
        self._limits = limits or HandshakeLimits()
        self._full = full
        self._decoy_key = random_bytes(32)
        self._half_open: dict[int, _HalfOpen] = {}  # oldest first
        self._by_source: dict[str, dict[int, None]] = {}  # likewise
        self._searches: dict[int, int] = {}  # number of a `Find` that was not answered, its connection
        self._last_search = 0
        self._reports = ReportLimit()
        self.refused = 0
        """Connections that were not admitted, but for those that left without a byte."""
        self._conversation()  # raises what is wrong with the names now, not when a client comes

    def __len__(self) -> int:
        """How many connections are half-open, those that were refused and are not closed yet among them."""
        return len(self._half_open)

    @property
    def next_deadline_ns(self) -> int | None:
        """When `expire` is due; None while nothing is half-open."""
        return min((one.deadline_ns for one in self._half_open.values()), default=None)

    def wanted(self, connection: int) -> int:
        """How many bytes of it may be read now, at most; 0 when there is no such connection."""
        one = self._half_open.get(connection)
        if one is None:
            return 0
        return min(_DROPPED_AT_ONCE, one.unread_bytes) if one.conversation is None else one.conversation.wanted

    def opened(self, now_ns: int, connection: int, source: str) -> list[AcceptorEffect]:
        """A client has connected."""
        effects: list[AcceptorEffect] = []
        if len(self._by_source.get(source, ())) >= self._limits.per_source:
            effects += self._evict(now_ns, source)
        elif len(self._half_open) >= self._limits.total:
            effects += self.evict(now_ns)
        deadline_ns = now_ns + self._limits.handshake_ns
        self._half_open[connection] = _HalfOpen(source, deadline_ns, self._conversation(), self._limits.unread_bytes)
        self._by_source.setdefault(source, {})[connection] = None
        return effects

    def evict(self, now_ns: int) -> list[AcceptorEffect]:
        """Closes the oldest connection of the source that has most, also where the owner has no more descriptors."""
        most = max(map(len, self._by_source.values()), default=0)
        for one in self._half_open.values():
            if len(self._by_source[one.source]) == most:
                return self._evict(now_ns, one.source)
        return []

    def received(self, now_ns: int, connection: int, data: bytes) -> list[AcceptorEffect]:
        """`data`: 1 to `wanted` bytes, or none at the end of the stream."""
        one = self._half_open[connection]
        if one.conversation is None:
            one.unread_bytes -= len(data)
            return [] if data and one.unread_bytes > 0 else [self._forget(connection)]
        if not data and not one.has_spoken:
            return [self._forget(connection)]
        one.has_spoken = True
        try:
            reply = one.conversation.receive(data)
            if one.conversation.asks_for:
                return [self._find(connection, one, one.conversation.asks_for)]
        except PermissionDenied as error:
            if data:
                return self._refuse(now_ns, connection, one, error, _told(error))
            return self.lost(now_ns, connection, error)
        except FireflyerError as error:
            return self.lost(now_ns, connection, error)
        session = one.conversation.proven
        if session is None:
            return [Send(connection, reply)] if reply else []
        busy = None if self._full is None else self._full(session)
        if busy is not None:
            return self._refuse(now_ns, connection, one, busy, _told(busy))
        verdict = one.conversation.verdict
        self._forget(connection)
        return [Send(connection, verdict), HandOver(connection, session)]

    def found(self, now_ns: int, number: int, user: UserKey | None) -> list[AcceptorEffect]:
        """The answer to `Find`: whose token it is, None where it counts for nothing. Nothing when the connection is
        gone, or was refused meanwhile."""
        connection = self._searched(number)
        one = None if connection is None else self._half_open[connection]
        if connection is None or one is None or one.conversation is None:
            return []
        try:
            return [Send(connection, one.conversation.found(user))]
        except PermissionDenied as error:
            return self._refuse(now_ns, connection, one, error, _told(error))

    def not_found(self, now_ns: int, number: int, reason: Exception) -> list[AcceptorEffect]:
        """Whose token it is cannot be known now. The client is told to try again, the log is told why: who asks is a
        stranger still."""
        connection = self._searched(number)
        if connection is None:
            return []
        one = self._half_open[connection]
        busy = Busy("whose token this is cannot be looked up at the moment; try again later")
        return self._refuse(now_ns, connection, one, reason, refusal_message(busy))

    def lost(self, now_ns: int, connection: int, reason: Exception) -> list[AcceptorEffect]:
        """It broke, or it does not read what it is sent. Nothing when it is forgotten already."""
        one = self._half_open.get(connection)
        if one is None:
            return []
        report = [] if one.conversation is None else self._report(now_ns, one.source, reason)
        return [self._forget(connection), *report]

    def expire(self, now_ns: int) -> list[AcceptorEffect]:
        """Ends those whose time is over."""
        effects: list[AcceptorEffect] = []
        for connection, one in list(self._half_open.items()):
            if one.deadline_ns > now_ns:
                continue
            if one.conversation is None:
                effects.append(self._forget(connection))
                continue
            limit = format_duration(self._limits.handshake_ns)
            late = Timeout(f"the client did not authenticate within {limit}")
            effects += self._refuse(now_ns, connection, one, late, _told(late))
        return effects

    def _conversation(self) -> ServerConversation:
        return ServerConversation(
            self._accepts,
            identity=self._identity,
            purpose=self._purpose,
            nonce=self._random_bytes(NONCE_BYTES),
            decoy_key=self._decoy_key,
        )

    def _find(self, connection: int, one: _HalfOpen, token_id: str) -> Find:
        self._last_search += 1
        one.search = self._last_search
        self._searches[one.search] = connection
        return Find(connection, one.search, token_id)

    def _searched(self, number: int) -> int | None:
        """Whose search it was, which has ended; None where nobody waits for it."""
        connection = self._searches.pop(number, None)
        if connection is not None:
            self._half_open[connection].search = 0
        return connection

    def _refuse(
        self, now_ns: int, connection: int, one: _HalfOpen, reason: Exception, reply: bytes
    ) -> list[AcceptorEffect]:
        """`reply`: what the client is told; `reason`: what the log is."""
        one.conversation = None
        self._searches.pop(one.search, None)
        one.deadline_ns = now_ns + self._limits.refusal_ns
        return [Refuse(connection, pack_message(reply)), *self._report(now_ns, one.source, reason)]

    def _evict(self, now_ns: int, source: str) -> list[AcceptorEffect]:
        oldest = next(iter(self._by_source[source]))
        return self.lost(now_ns, oldest, Busy("more connections are half-open than are allowed; this was the oldest"))

    def _forget(self, connection: int) -> Close:
        one = self._half_open.pop(connection)
        self._searches.pop(one.search, None)
        of_source = self._by_source[one.source]
        del of_source[connection]
        if not of_source:
            del self._by_source[one.source]
        return Close(connection)

    def _report(self, now_ns: int, source: str, reason: Exception) -> list[AcceptorEffect]:
        self.refused += 1
        left_out = self._reports.ask(now_ns)
        return [] if left_out is None else [Report(source, str(reason), left_out)]


def _told(error: FireflyerError) -> bytes:
    return error.reply if isinstance(error, HandshakeRefused) else refusal_message(error)
