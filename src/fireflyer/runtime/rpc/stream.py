"""A stream of sealed messages over asyncio, on an authenticated connection."""

from __future__ import annotations

import asyncio

from fireflyer.base.errors import Unreachable
from fireflyer.identity.handshake import Session
from fireflyer.runtime.framing import HEADER_BYTES, FrameOpener, FrameSealer, frame_keys
from fireflyer.runtime.raw_connections import RawConnection

__all__ = ["PURPOSE", "MessageStream", "open_stream"]

PURPOSE = "rpc"
_CLOSE_TIMEOUT_S = 1.0


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
    ) -> None:
        to_server, to_client = frame_keys(session.key)
        self.session = session
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

    async def receive(self) -> memoryview | None:
        """The next message, None at the orderly end. Raises `Unreachable` when the connection breaks in the middle,
        `DataCorruption` when the peer does not keep the protocol."""
        try:
            header = await self._reader.readexactly(HEADER_BYTES)
            body = await self._reader.readexactly(self._opener.body_bytes(header))
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


async def open_stream(connection: RawConnection, *, is_client: bool, max_frame_bytes: int) -> MessageStream:
    """Goes on with an authenticated connection, of which the stream is the owner now."""
    try:
        reader, writer = await asyncio.open_connection(sock=connection.socket)
    except BaseException:
        connection.socket.close()
        raise
    return MessageStream(reader, writer, connection.session, is_client=is_client, max_frame_bytes=max_frame_bytes)
