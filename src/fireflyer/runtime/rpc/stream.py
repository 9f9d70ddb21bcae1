"""A stream of sealed messages over asyncio, on an authenticated connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from fireflyer.base.errors import Unreachable
from fireflyer.base.units import KIB, SECOND, format_duration
from fireflyer.identity.handshake import Session
from fireflyer.runtime.framing import HEADER_BYTES, FrameOpener, FrameSealer, frame_keys
from fireflyer.runtime.raw_connections import RawConnection

__all__ = ["FRAME_NS", "PURPOSE", "MessageStream", "open_stream"]

PURPOSE = "rpc"
_CLOSE_TIMEOUT_S = 1.0
FRAME_NS = 60 * SECOND
"""For the rest of a frame once its header is there: a peer that stops in the middle does not keep what it has sent."""
_UNTIMED_BYTES = 64 * KIB
"""A frame of so few bytes may stay incomplete: the connection itself costs more."""


class MessageStream:
    """Messages of at most `max_frame_bytes` both ways. One task receives; any may send."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        session: Session,
        *,
        is_client: bool,
        max_frame_bytes: int,
        frame_ns: int = FRAME_NS,
    ) -> None:
        to_server, to_client = frame_keys(session.key)
        self.session = session
        self.overdue = False
        """Whether the other end did not send, or did not read, in time."""
        self._frame_ns = frame_ns
        self._reader = reader
        self._writer = writer
        self._sealer = FrameSealer(to_server if is_client else to_client, max_frame_bytes)
        self._opener = FrameOpener(to_client if is_client else to_server, max_frame_bytes)

    def send_soon(self, message: bytes) -> None:
        """Queues one message. Raises `UsageError` when it is too long, `Unreachable` when the stream is closing."""
        if self._writer.is_closing():
            raise Unreachable("the connection is closed")
        self._writer.writelines(self._sealer.seal(message))

    async def send(self, message: bytes) -> None:
        """Queues one message and waits while too much is queued. Cancelling it never tears a frame."""
        self.send_soon(message)
        try:
            await self._writer.drain()
        except ConnectionError as error:
            raise Unreachable("the connection was lost") from error

    async def send_within(self, message: bytes, limit_ns: int) -> None:
        """As `send`; a peer that has not read enough by then is cut off, and the connection is lost."""
        if not self._writer.transport.get_write_buffer_size():
            await self.send(message)  # nothing was left unread: a timer for each message would cost as much again
            return
        try:
            async with asyncio.timeout(limit_ns / SECOND):
                await self.send(message)
        except TimeoutError:
            self.overdue = True
            self.cut()
            limit = format_duration(limit_ns)
            raise Unreachable(f"the other end has not read what it was sent for {limit}") from None

    def cut(self) -> None:
        """Ends the connection at once: what is queued is dropped, and `receive` raises `Unreachable` or ends."""
        self._writer.transport.abort()

    async def receive(self, admit: Callable[[int], None] | None = None) -> memoryview | None:
        """The next message, None at the orderly end. `admit` is told how many bytes the peer has announced, before they
        are read; what it raises goes out. Raises `Unreachable` when the connection breaks or stops in the middle,
        `DataCorruption` when the peer does not keep the protocol."""
        size = 0
        try:
            header = await self._reader.readexactly(HEADER_BYTES)
            size = self._opener.body_bytes(header)
            if admit is not None:
                admit(size)
            async with asyncio.timeout(self._frame_ns / SECOND) if size > _UNTIMED_BYTES else contextlib.nullcontext():
                body = await self._reader.readexactly(size)
        except TimeoutError:
            self.overdue = True
            raise Unreachable(
                f"{size} bytes of a message were announced and did not come within {format_duration(self._frame_ns)}"
            ) from None
        except asyncio.IncompleteReadError as error:
            if not error.partial and error.expected == HEADER_BYTES:
                return None
            raise Unreachable("the connection ended in the middle of a message") from None
        except OSError as error:
            raise Unreachable(f"the connection was lost ({error.strerror or type(error).__name__})") from error
        return self._opener.open(header, body)

    async def close(self) -> None:
        """Sends what is queued, and closes; whoever does not take it within a second is cut off."""
        self._writer.close()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._writer.wait_closed()
        except OSError:
            self._writer.transport.abort()


async def open_stream(
    connection: RawConnection, *, is_client: bool, max_frame_bytes: int, frame_ns: int = FRAME_NS
) -> MessageStream:
    """Goes on with an authenticated connection, of which the stream is the owner now."""
    try:
        reader, writer = await asyncio.open_connection(sock=connection.socket)
    except BaseException:
        connection.socket.close()
        raise
    return MessageStream(
        reader, writer, connection.session, is_client=is_client, max_frame_bytes=max_frame_bytes, frame_ns=frame_ns
    )
