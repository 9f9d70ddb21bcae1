"""The serving end: one task per connection reads, one task per call in flight runs its handler.

Everything is bounded: connections, of each peer and of all; handshakes under way and their time; calls in flight per
connection and the bytes of their requests; frames and the time that they take; the bytes of requests and unread answers
of each peer (`shares`). A call over a bound is answered with `Busy`. A connection that does not keep the protocol, does
not read its answers, or makes more bytes wait than its peer may, is closed alone, with the reason in the log.

Handshakes are `RawListener`'s; the server goes on with its sockets. A handler is cancelled at its call's deadline, when
the client gives the call up, and when the connection ends. Handlers begin in the order in which their messages came;
notifications that came before the end of a connection get a moment to be handled, so that a process may notify and
exit.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS
from fireflyer.base.errors import Busy, FireflyerError, Timeout, Unreachable, UsageError, error_to_wire
from fireflyer.base.port_range import PortRange
from fireflyer.base.units import MIB, SECOND, format_duration
from fireflyer.identity.acceptor import HandshakeLimits
from fireflyer.identity.account import Account, Scope
from fireflyer.identity.handshake import Accepts, Role
from fireflyer.runtime.address import Address
from fireflyer.runtime.framing import DEFAULT_MAX_FRAME_BYTES
from fireflyer.runtime.limited_log import LimitedLog
from fireflyer.runtime.metrics import Series
from fireflyer.runtime.raw_connections import RawConnection, RawListener
from fireflyer.runtime.rpc.messages import (
    MAX_ERROR_CHARS,
    Call,
    Cancel,
    Failure,
    Method,
    Notification,
    Reply,
    Req,
    Resp,
    encode,
    from_client_decoder,
)
from fireflyer.runtime.rpc.shares import Shares
from fireflyer.runtime.rpc.stream import FRAME_NS, PURPOSE, MessageStream, open_stream
from fireflyer.runtime.token_watch import TokenWatch

__all__ = ["Caller", "RpcServer", "ServerLimits"]

_log = logging.getLogger(__name__)
_BOUNDS: Final = (
    *("connections", "connections_of_peer", "bytes_of_peer", "bytes_of_users"),
    *("calls_of_connection", "bytes_of_connection", "time"),
)
_LAST_NOTIFICATIONS_S = 1.0


@dataclass(frozen=True, slots=True)
class Caller:
    """Caller, as the handshake has proven it. `connection` numbers the connections of this server from 1. Of a user
    of a store with accounts: who that is in a file system, and which roles the token carries."""

    role: Role
    identity: str
    address: str
    connection: int
    account: Account | None = None
    roles: tuple[str, ...] = ()
    scope: Scope = "user"


@dataclass(frozen=True, slots=True)
class ServerLimits:
    connections: int = 1024
    """Most connections of nodes, and as many of users."""
    connections_per_peer: int | None = None
    """Most connections of one peer; None: one peer may have all."""
    bytes_per_peer: int = 256 * MIB
    """Most bytes of requests in progress and of unread answers, on all connections of a peer."""
    bytes_of_users: int = 1024 * MIB
    """The same, of all users together, who share it."""
    frame_ns: int = FRAME_NS
    """Timeout for the rest of a frame that has begun."""
    unread_ns: int = 60 * SECOND
    """Time after which a peer that has not read its answers is cut off. Longer than a suspended laptop stops a
    client."""
    handshakes: int = 128
    """Most handshakes under way at once from one address; from all addresses twice as many."""
    handshake_ns: int = 10 * SECOND
    calls_per_connection: int = 1024
    request_bytes_per_connection: int = 64 * MIB
    frame_bytes: int = DEFAULT_MAX_FRAME_BYTES

    def shares(self) -> Shares:
        """Shares of a new server: nothing is in use."""
        return Shares(
            connections=self.connections,
            connections_per_peer=self.connections_per_peer,
            bytes_per_peer=self.bytes_per_peer,
            bytes_of_users=self.bytes_of_users,
        )


@dataclass(frozen=True, slots=True)
class _Entry:
    method: Method[Any, Any]
    handler: Callable[[Any, Caller], Awaitable[Any]]


class RpcServer:
    """Serves registered methods to whom `accepts` lets in. `identity` is the name that clients see.

    `on_disconnect` is called (in the loop, must not block) after the last handler of a connection has ended.
    """

    def __init__(
        self,
        accepts: Accepts,
        *,
        identity: str = "server",
        limits: ServerLimits | None = None,
        on_disconnect: Callable[[Caller], None] | None = None,
        recheck_tokens: bool = False,
    ) -> None:
        """`recheck_tokens`: a connection whose token is revoked or expires is closed within seconds (`token_watch`); so
        is one whose user gets other roles."""
        self._limits = limits or ServerLimits()
        self._on_disconnect = on_disconnect
        self._entries: dict[str, _Entry] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._shares = self._limits.shares()
        self._tokens = TokenWatch(accepts.find_user if recheck_tokens else None, MessageStream.cut)
        self._rechecks = recheck_tokens
        self._looking: asyncio.Task[None] | None = None
        self._said = LimitedLog(_log)
        """What peers may cause as often as they like."""
        self._numbers = itertools.count(1)
        self._listener = RawListener(
            accepts,
            identity=identity,
            purpose=PURPOSE,
            on_connection=self._take,
            limits=HandshakeLimits(
                total=2 * self._limits.handshakes,
                per_source=self._limits.handshakes,
                handshake_ns=self._limits.handshake_ns,
            ),
            full=lambda session: self._shares.full((session.role, session.peer)),
        )

    def on_disconnect(self, call: Callable[[Caller], None]) -> None:
        """`call` is called as well, from now on."""
        before = self._on_disconnect

        def both(caller: Caller) -> None:
            if before is not None:
                before(caller)
            call(caller)

        self._on_disconnect = both

    def register(self, method: Method[Req, Resp], handler: Callable[[Req, Caller], Awaitable[Resp]]) -> None:
        """Raises `UsageError` when the name is taken."""
        if method.name in self._entries:
            raise UsageError(f"RPC method {method.name!r} is registered already")
        self._entries[method.name] = _Entry(method, handler)

    async def start(self, host: str, port: int, ports: PortRange | None = None) -> Address:
        """Listens; port 0 takes a free one, of the range where there is one. Raises `UsageError` naming the port when
        it cannot."""
        return await self._started(host, port, ports)

    async def start_everywhere(self, port: int, ports: PortRange | None = None) -> Address:
        """Listens at all addresses of this machine, IPv4 and, where it has it, IPv6. Raises `UsageError`."""
        return await self._started("", port, ports)

    async def _started(self, host: str, port: int, ports: PortRange | None) -> Address:
        address = await self._listener.start(host, port, ports)
        if self._rechecks and self._looking is None:
            self._looking = asyncio.get_running_loop().create_task(self._tokens.run())
        return address

    async def close(self) -> None:
        """Stops listening, cancels the handlers, closes the connections."""
        await self._listener.close()
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
        for task in self._tasks:
            task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)

    @property
    def connections(self) -> int:
        """Authenticated connections that are open."""
        return len(self._tasks)

    def metrics(self) -> list[Series]:
        """Metrics: what peers use of the server, and how often which bound has refused them."""
        shares, refused = self._shares, self._shares.refused
        connections, waiting = shares.connections_of_roles.items(), shares.bytes_of_roles.items()
        return [
            Series(
                "fireflyer_rpc_connections",
                "gauge",
                "Connections",
                [({"role": role}, count) for role, count in connections],
            ),
            Series(
                "fireflyer_rpc_waiting_bytes",
                "gauge",
                "Bytes of requests and unread answers",
                [({"role": role}, count) for role, count in waiting],
            ),
            Series(
                "fireflyer_rpc_refused_total",
                "counter",
                "Connections and requests that a bound has refused or ended, by the bound",
                [({"bound": bound}, refused[bound]) for bound in _BOUNDS],
            ),
            Series.one(
                "fireflyer_rpc_strangers_total", "counter", "Connections without a handshake", self._listener.refused
            ),
        ]

    def _take(self, connection: RawConnection) -> None:
        unopened = ExitStack()
        unopened.callback(connection.socket.close)
        peer = (connection.session.role, connection.session.peer)
        self._shares.connected(peer)
        task = asyncio.get_running_loop().create_task(self._serve(connection, unopened))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._shares.disconnected(peer))
        task.add_done_callback(lambda _: unopened.close())  # where it was cancelled before it began

    async def _serve(self, connection: RawConnection, unopened: ExitStack) -> None:
        stream: MessageStream | None = None
        unopened.pop_all()
        try:
            limits, session = self._limits, connection.session
            stream = await open_stream(
                connection, is_client=False, max_frame_bytes=limits.frame_bytes, frame_ns=limits.frame_ns
            )
            self._tokens.add(session, stream)
            caller = Caller(
                session.role,
                session.peer,
                str(connection.address),
                next(self._numbers),
                session.account,
                session.roles,
                session.scope,
            )
            try:
                await _Connection(stream, caller, self._entries, limits, self._shares, self._said).run()
            finally:
                if self._on_disconnect is not None:
                    self._on_disconnect(caller)
        except Unreachable as error:
            self._said.info("connection lost peer=%s reason=%s", connection.address, error)
        except (FireflyerError, OSError) as error:
            self._said.warning("connection closed peer=%s reason=%s", connection.address, error)
        except Exception:
            _log.exception("connection closed on an unexpected error peer=%s", connection.address)
        finally:
            if stream is not None:
                self._shares.refused["time"] += stream.overdue
                self._tokens.remove(connection.session.token_id, stream)
                await stream.close()


class _Connection:
    """One authenticated connection."""

    def __init__(
        self,
        stream: MessageStream,
        caller: Caller,
        entries: dict[str, _Entry],
        limits: ServerLimits,
        shares: Shares,
        said: LimitedLog,
    ) -> None:
        self._said = said
        self._stream = stream
        self._caller = caller
        self._entries = entries
        self._limits = limits
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._notifications: set[asyncio.Task[None]] = set()
        self._request_bytes = 0
        self._shares = shares
        self._peer = (caller.role, caller.identity)
        self._coming_bytes = 0

    async def run(self) -> None:
        try:
            while (message := await self._stream.receive(self._admit)) is not None:
                await self._handle(message)
                self._end_coming()
        finally:
            self._end_coming()
            for task in self._calls.values():
                task.cancel()
            try:
                if self._notifications:
                    await asyncio.wait(self._notifications, timeout=_LAST_NOTIFICATIONS_S)
            finally:
                tasks = [*self._calls.values(), *self._notifications]
                for task in tasks:
                    task.cancel()
                if tasks:
                    await asyncio.wait(tasks)

    def _admit(self, size: int) -> None:
        """A message has been announced. Raises `Busy`, which closes the connection."""
        if (busy := self._shares.take(self._peer, size)) is not None:
            raise busy
        self._coming_bytes = size

    def _end_coming(self) -> None:
        """The message that was announced is of no use, or was answered, or a call has taken its bytes over."""
        coming, self._coming_bytes = self._coming_bytes, 0
        if coming:
            self._shares.give_back(self._peer, coming)

    async def _handle(self, message: memoryview) -> None:
        try:
            decoded = from_client_decoder.decode(message)
        except DECODE_ERRORS as error:
            raise UsageError(f"malformed RPC message of {len(message)} bytes: {error}") from None
        if isinstance(decoded, Cancel):
            task = self._calls.get(decoded.id)
            if task is not None:
                task.cancel()
            return
        if isinstance(decoded, Call) and decoded.id in self._calls:
            raise UsageError(f"call id {decoded.id} is in flight already")
        busy = self._full(len(message))
        if busy is None:
            self._start(decoded, len(message))
        elif isinstance(decoded, Call):
            await self._stream.send_within(_failure(decoded.id, busy), self._limits.unread_ns)
        else:
            self._said.warning("notification dropped method=%s peer=%s reason=%s", decoded.method, self._caller, busy)

    def _full(self, message_bytes: int) -> Busy | None:
        calls = len(self._calls) + len(self._notifications)
        if calls >= self._limits.calls_per_connection:
            self._shares.refused["calls_of_connection"] += 1
            return Busy(f"{calls} calls are in flight on this connection already; wait for some of them")
        if calls and self._request_bytes + message_bytes > self._limits.request_bytes_per_connection:
            self._shares.refused["bytes_of_connection"] += 1
            return Busy(f"{self._request_bytes} bytes of requests are in flight already; wait for some of them")
        return None

    def _start(self, call: Call | Notification, message_bytes: int) -> None:
        self._request_bytes += message_bytes
        held, self._coming_bytes = self._coming_bytes, 0  # given back when the call has ended
        task = asyncio.get_running_loop().create_task(self._run_call(call))
        if isinstance(call, Call):
            self._calls[call.id] = task
        else:
            self._notifications.add(task)

        def done(_: asyncio.Task[None]) -> None:
            self._request_bytes -= message_bytes
            if held:
                self._shares.give_back(self._peer, held)
            if isinstance(call, Call):
                del self._calls[call.id]
            else:
                self._notifications.discard(task)

        task.add_done_callback(done)

    async def _run_call(self, call: Call | Notification) -> None:
        try:
            body = await self._perform(call)
        except Exception as error:
            if not isinstance(error, FireflyerError):
                _log.exception("handler failed method=%s peer=%s", call.method, self._caller)
            if isinstance(call, Call):
                await self._answer(_failure(call.id, error))
            else:
                self._said.warning("notification failed method=%s peer=%s reason=%s", call.method, self._caller, error)
            return
        if isinstance(call, Call):
            await self._answer(encode(Reply(call.id, msgspec.Raw(body))), call)

    async def _perform(self, call: Call | Notification) -> bytes:
        entry = self._entries.get(call.method)
        if entry is None:
            raise UsageError(f"the server has no RPC method {call.method!r}; are both sides of the same release?")
        try:
            request = entry.method.decode_request(call.body)
        except DECODE_ERRORS as error:
            raise UsageError(f"{call.method}: bad request: {error}") from None
        scope = asyncio.timeout(call.timeout_ns / SECOND)
        try:
            async with scope:
                return encode(await entry.handler(request, self._caller))
        except FireflyerError:
            raise
        except TimeoutError:
            if not scope.expired():
                raise
            raise Timeout(f"{call.method} did not finish within {format_duration(call.timeout_ns)}") from None

    async def _answer(self, message: bytes, call: Call | None = None) -> None:
        size = len(message)
        if (busy := self._shares.take(self._peer, size)) is not None:
            self._said.warning("connection closed, it does not read its answers peer=%s reason=%s", self._caller, busy)
            self._stream.cut()
            return
        try:
            await self._stream.send_within(message, self._limits.unread_ns)
        except UsageError as error:
            if call is not None:
                await self._answer(_failure(call.id, UsageError(f"response of {call.method}: {error}")))
        except Unreachable as error:
            _log.debug("answer not sent peer=%s reason=%s", self._caller, error)  # the reading task ends the connection
        finally:
            self._shares.give_back(self._peer, size)


def _failure(call_id: int, error: Exception) -> bytes:
    code, message = error_to_wire(error)
    return encode(Failure(call_id, code, message[:MAX_ERROR_CHARS]))
