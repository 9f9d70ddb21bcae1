"""The calling end on asyncio: many calls in flight on one connection, matched by their ids.

A client does not reconnect by itself: when the connection is lost, every call in flight and every later one raises
`Unreachable`, and its owner decides whether the operation may be repeated.
"""

from __future__ import annotations

import asyncio
import itertools
import logging

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS
from fireflyer.base.errors import (
    Aborted,
    Busy,
    DataCorruption,
    FireflyerError,
    Timeout,
    TransientError,
    Unreachable,
    UsageError,
    error_from_wire,
)
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.units import SECOND, format_duration
from fireflyer.identity.handshake import Credential
from fireflyer.runtime.address import Address
from fireflyer.runtime.framing import DEFAULT_MAX_FRAME_BYTES
from fireflyer.runtime.pauses import spread
from fireflyer.runtime.raw_connections import open_raw
from fireflyer.runtime.rpc.messages import (
    Call,
    Cancel,
    Failure,
    Method,
    Notification,
    Req,
    Resp,
    check_timeout,
    encode,
    from_server_decoder,
)
from fireflyer.runtime.rpc.stream import PURPOSE, MessageStream, open_stream

__all__ = ["MAX_CALLS_IN_FLIGHT", "RpcClient"]

_log = logging.getLogger(__name__)
MAX_CALLS_IN_FLIGHT = 1024
_NOTIFICATION_TIMEOUT_NS = 30 * SECOND
_BUSY_PAUSE_S = 0.05
_BUSY_PAUSE_MAX_S = 1.0


class RpcClient:
    """A connection to one server; made by `connect`."""

    def __init__(self, stream: MessageStream, address: Address) -> None:
        self.address = address
        self._stream = stream
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._lost: asyncio.Future[FireflyerError] = asyncio.get_running_loop().create_future()
        self._receiver = asyncio.get_running_loop().create_task(self._receive_all())

    @classmethod
    async def connect(
        cls,
        address: Address | str,
        credential: Credential,
        timeout_ns: int,
        *,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
    ) -> RpcClient:
        """Connects and authenticates both ends. A server that is full is asked again until `timeout_ns` is over: when
        all ranks of a large job come at once, some have to wait. Raises `Unreachable`, `Timeout`, `PermissionDenied`,
        `Busy`, each naming the address."""
        target = Address.parse(address) if isinstance(address, str) else Address(*address)
        try:
            until_s = asyncio.get_running_loop().time() + check_timeout(timeout_ns) / SECOND
            return cls(await _open_until(until_s, target, credential, max_frame_bytes), target)
        except FireflyerError as error:
            raise type(error)(f"connect to {target}: {error}") from error
        except TimeoutError:
            limit = format_duration(timeout_ns)
            raise Timeout(f"connect to {target}: no connection within {limit}; is the server running?") from None
        except OSError as error:
            translated = translate_os_error(error, f"connect to {target}")
            if isinstance(translated, TransientError):
                raise translated from error
            raise Unreachable(translated.message) from error

    @property
    def server_identity(self) -> str:
        """The name that the server has proven."""
        return self._stream.session.peer

    async def call(self, method: Method[Req, Resp], request: Req, timeout_ns: int) -> Resp:
        """The method's response, or the error that its handler raised. Raises `Timeout` after `timeout_ns` (the server
        gives up as well), `Unreachable` when the connection is lost: then the method may or may not have run."""
        check_timeout(timeout_ns)
        if len(self._pending) >= MAX_CALLS_IN_FLIGHT:
            raise Busy(f"{method.name}: {MAX_CALLS_IN_FLIGHT} calls to {self.address} are in flight already")
        call_id = next(self._ids)
        answer: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        message = encode(Call(call_id, method.name, timeout_ns, msgspec.Raw(encode(request))))
        self._pending[call_id] = answer
        scope = asyncio.timeout(timeout_ns / SECOND)
        try:
            async with scope:
                await self._send(method.name, message)
                body = await answer
        except FireflyerError:
            raise
        except TimeoutError:
            limit = format_duration(timeout_ns)
            raise Timeout(f"{method.name} at {self.address} did not answer within {limit}") from None
        finally:
            del self._pending[call_id]
            if answer.cancelled() or not answer.done():
                self._give_up(call_id)
            elif not answer.cancelled():
                answer.exception()  # seen, also when the call ends for another reason
        try:
            return method.decode_response(body)
        except DECODE_ERRORS as error:
            raise DataCorruption(f"{method.name} at {self.address}: bad response: {error}") from None

    async def notify(self, method: Method[Req, Resp], request: Req) -> None:
        """Sends the request without waiting for it to be handled; nobody hears of an error but the server's log."""
        body = msgspec.Raw(encode(request))
        await self._send(method.name, encode(Notification(method.name, _NOTIFICATION_TIMEOUT_NS, body)))

    async def wait_lost(self) -> FireflyerError:
        """Waits until the connection is lost or closed, and says why."""
        return await asyncio.shield(self._lost)

    @property
    def lost(self) -> FireflyerError | None:
        """Reason why this connection cannot be used any more, None while it can."""
        return self._lost.result() if self._lost.done() else None

    async def close(self) -> None:
        """Calls in flight raise `Aborted`."""
        ending = self._lost.done()
        self._lose(Aborted(f"the client of {self.address} was closed"))
        if not ending:  # else it closes the stream, for a second at most: cancelled there, it would take the rest along
            self._receiver.cancel()
        await asyncio.wait([self._receiver])
        await self._stream.close()

    async def _send(self, name: str, message: bytes) -> None:
        if self._lost.done():
            raise _again(self._lost.result(), name)
        try:
            await self._stream.send(message)
        except Unreachable as error:
            raise Unreachable(f"{name} at {self.address}: {error}") from error
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from None

    def _give_up(self, call_id: int) -> None:
        if not self._lost.done():
            try:
                self._stream.send_soon(encode(Cancel(call_id)))
            except Unreachable:
                pass

    async def _receive_all(self) -> None:
        reason: FireflyerError = Unreachable(f"{self.address} closed the connection")
        try:
            while (message := await self._stream.receive()) is not None:
                self._on_message(message)
        except FireflyerError as error:
            _log.warning("connection lost address=%s reason=%s", self.address, error)
            reason = Unreachable(f"connection to {self.address} lost: {error}")
        except Exception as error:
            _log.exception("connection lost on an unexpected error address=%s", self.address)
            reason = Unreachable(f"connection to {self.address} lost: {error}")
        finally:
            self._lose(reason)
        await self._stream.close()

    def _on_message(self, message: memoryview) -> None:
        try:
            decoded = from_server_decoder.decode(message)
        except DECODE_ERRORS as error:
            raise DataCorruption(f"malformed RPC message: {error}") from None
        answer = self._pending.get(decoded.id)
        if answer is None or answer.done():
            return  # given up in the meantime
        if isinstance(decoded, Failure):
            answer.set_exception(error_from_wire(decoded.code, decoded.message))
        else:
            answer.set_result(decoded.body)

    def _lose(self, reason: FireflyerError) -> None:
        if self._lost.done():
            return
        self._lost.set_result(reason)
        for answer in self._pending.values():
            if not answer.done():
                in_doubt = "a call was in flight, the server may or may not have executed it"
                answer.set_exception(type(reason)(f"{reason}; {in_doubt}"))


async def _open_until(until_s: float, address: Address, credential: Credential, max_frame_bytes: int) -> MessageStream:
    clock = asyncio.get_running_loop().time
    pause_s = _BUSY_PAUSE_S
    busy: Busy | None = None
    while True:
        try:
            async with asyncio.timeout_at(until_s):
                return await _open(address, credential, max_frame_bytes)
        except Busy as error:
            if clock() + pause_s >= until_s:
                raise
            busy = error
        except FireflyerError:
            raise
        except TimeoutError:
            if busy is None:
                raise
            raise busy from None  # the time was over in another try: what the server has said is why
        await asyncio.sleep(spread(pause_s))
        pause_s = min(2 * pause_s, _BUSY_PAUSE_MAX_S)


async def _open(address: Address, credential: Credential, max_frame_bytes: int) -> MessageStream:
    connection = await open_raw(address, credential, purpose=PURPOSE)
    return await open_stream(connection, is_client=True, max_frame_bytes=max_frame_bytes)


def _again(reason: FireflyerError, name: str) -> FireflyerError:
    return type(reason)(f"{name}: {reason}")
