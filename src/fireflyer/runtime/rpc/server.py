"""The serving end: one task per connection reads, one task per call in flight runs its handler.

Everything is bounded: connections, handshakes under way and their time, calls in flight per connection and the bytes of
their requests, frames. A call over a bound is answered with `Busy`; a connection that does not keep the protocol is
closed alone, with the reason in the log. Handshakes are `RawListener`'s; the server goes on with its sockets. A handler
is cancelled at its call's deadline, when the client gives the call up, and when the connection ends. Handlers begin in
the order in which their messages came; notifications that came before the end of a connection get a moment to be
handled, so that a process may notify and exit.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS
from fireflyer.base.errors import Busy, FireflyerError, Timeout, Unreachable, UsageError, error_to_wire
from fireflyer.base.port_range import PortRange
from fireflyer.base.units import MIB, SECOND, format_duration
from fireflyer.identity.acceptor import HandshakeLimits
from fireflyer.identity.handshake import Accepts, Role
from fireflyer.runtime.address import Address
from fireflyer.runtime.framing import DEFAULT_MAX_FRAME_BYTES
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
from fireflyer.runtime.rpc.stream import PURPOSE, MessageStream, open_stream

__all__ = ["Caller", "RpcServer", "ServerLimits"]

_log = logging.getLogger(__name__)
_LAST_NOTIFICATIONS_S = 1.0


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, as the handshake has proven it. `connection` numbers the connections of this server from 1."""

    role: Role
    identity: str
    address: str
    connection: int


@dataclass(frozen=True, slots=True)
class ServerLimits:
    connections: int = 1024
    handshakes: int = 128
    """Under way at once from one address; from all addresses twice as many."""
    handshake_ns: int = 10 * SECOND
    calls_per_connection: int = 1024
    request_bytes_per_connection: int = 64 * MIB
    frame_bytes: int = DEFAULT_MAX_FRAME_BYTES


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
    ) -> None:
        self._limits = limits or ServerLimits()
        self._on_disconnect = on_disconnect
        self._entries: dict[str, _Entry] = {}
        self._tasks: set[asyncio.Task[None]] = set()
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
            full=self._full,
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
        return await self._listener.start(host, port, ports)

    async def start_everywhere(self, port: int, ports: PortRange | None = None) -> Address:
        """Listens at all addresses of this machine, IPv4 and, where it has it, IPv6. Raises `UsageError`."""
        return await self._listener.start("", port, ports)

    async def close(self) -> None:
        """Stops listening, cancels the handlers, closes the connections."""
        await self._listener.close()
        for task in self._tasks:
            task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)

    @property
    def connections(self) -> int:
        """Authenticated connections that are open."""
        return len(self._tasks)

    def _full(self) -> Busy | None:
        most = self._limits.connections
        if len(self._tasks) < most:
            return None
        return Busy(f"the server has its {most} connections already; try again later")

    def _take(self, connection: RawConnection) -> None:
        unopened = ExitStack()
        unopened.callback(connection.socket.close)
        task = asyncio.get_running_loop().create_task(self._serve(connection, unopened))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: unopened.close())  # where it was cancelled before it began

    async def _serve(self, connection: RawConnection, unopened: ExitStack) -> None:
        stream: MessageStream | None = None
        unopened.pop_all()
        try:
            stream = await open_stream(connection, is_client=False, max_frame_bytes=self._limits.frame_bytes)
            session = connection.session
            caller = Caller(session.role, session.peer, str(connection.address), next(self._numbers))
            try:
                await _Connection(stream, caller, self._entries, self._limits).run()
            finally:
                if self._on_disconnect is not None:
                    self._on_disconnect(caller)
        except Unreachable as error:
            _log.info("connection lost peer=%s reason=%s", connection.address, error)
        except (FireflyerError, OSError) as error:
            _log.warning("connection closed peer=%s reason=%s", connection.address, error)
        except Exception:
            _log.exception("connection closed on an unexpected error peer=%s", connection.address)
        finally:
            if stream is not None:
                await stream.close()


class _Connection:
    """One authenticated connection."""

    def __init__(self, stream: MessageStream, caller: Caller, entries: dict[str, _Entry], limits: ServerLimits) -> None:
        self._stream = stream
        self._caller = caller
        self._entries = entries
        self._limits = limits
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._notifications: set[asyncio.Task[None]] = set()
        self._request_bytes = 0

    async def run(self) -> None:
        try:
            while (message := await self._stream.receive()) is not None:
                await self._handle(message)
        finally:
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
            await self._stream.send(_failure(decoded.id, busy))
        else:
            _log.warning("notification dropped method=%s peer=%s reason=%s", decoded.method, self._caller, busy)

    def _full(self, message_bytes: int) -> Busy | None:
        calls = len(self._calls) + len(self._notifications)
        if calls >= self._limits.calls_per_connection:
            return Busy(f"{calls} calls are in flight on this connection already; wait for some of them")
        if calls and self._request_bytes + message_bytes > self._limits.request_bytes_per_connection:
            return Busy(f"{self._request_bytes} bytes of requests are in flight already; wait for some of them")
        return None

    def _start(self, call: Call | Notification, message_bytes: int) -> None:
        self._request_bytes += message_bytes
        task = asyncio.get_running_loop().create_task(self._run_call(call))
        if isinstance(call, Call):
            self._calls[call.id] = task
        else:
            self._notifications.add(task)

        def done(_: asyncio.Task[None]) -> None:
            self._request_bytes -= message_bytes
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
                _log.warning("notification failed method=%s peer=%s reason=%s", call.method, self._caller, error)
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
        try:
            await self._stream.send(message)
        except UsageError as error:
            if call is not None:
                await self._answer(_failure(call.id, UsageError(f"response of {call.method}: {error}")))
        except Unreachable:
            pass  # the reading task sees it as well and ends the connection


def _failure(call_id: int, error: Exception) -> bytes:
    code, message = error_to_wire(error)
    return encode(Failure(call_id, code, message[:MAX_ERROR_CHARS]))
