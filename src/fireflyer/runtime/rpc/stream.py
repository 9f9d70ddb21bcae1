"""An authenticated stream of messages over asyncio: the handshake, then sealed frames."""

from __future__ import annotations

import asyncio
import secrets
import socket

from fireflyer.base.errors import FireflyerError, PermissionDenied, Unreachable
from fireflyer.identity.handshake import (
    LENGTH_BYTES,
    NONCE_BYTES,
    Accepts,
    ClientHandshake,
    Credential,
    HandshakeRefused,
    ServerHandshake,
    Session,
    message_length,
    pack_message,
)
from fireflyer.runtime.framing import HEADER_BYTES, FrameOpener, FrameSealer, frame_keys

__all__ = ["PURPOSE", "MessageStream", "accept_stream", "close_writer", "open_stream"]

PURPOSE = "rpc"
_CLOSE_TIMEOUT_S = 1.0
_SERVER_LEFT = (
    "the server closed the connection during the handshake; it has ended, is overloaded, or is not a Fire-Flyer server"
)
_CLIENT_LEFT = "the client closed the connection during the handshake; does it use the same secret file or token?"
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


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
        _keep_alive(writer)

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
        """Sends what is queued, for at most a second, and closes."""
        await close_writer(self._writer)


async def open_stream(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, credential: Credential, *, max_frame_bytes: int
) -> MessageStream:
    """The client's side of the handshake. Raises `PermissionDenied`, `Busy`, `Unreachable`."""
    handshake = ClientHandshake(credential, purpose=PURPOSE, nonce=secrets.token_bytes(NONCE_BYTES))
    _write(writer, handshake.hello())
    _write(writer, handshake.on_challenge(await _read(reader, Unreachable(_SERVER_LEFT))))
    session = handshake.on_verdict(await _read(reader, Unreachable(_SERVER_LEFT)))
    return MessageStream(reader, writer, session, is_client=True, max_frame_bytes=max_frame_bytes)


async def accept_stream(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, accepts: Accepts, *, identity: str, max_frame_bytes: int
) -> MessageStream:
    """The server's side of the handshake. Raises `PermissionDenied`, `Unreachable`."""
    handshake = ServerHandshake(
        accepts,
        identity=identity,
        purpose=PURPOSE,
        nonce=secrets.token_bytes(NONCE_BYTES),
        decoy_key=secrets.token_bytes(32),
    )
    try:
        _write(writer, handshake.on_hello(await _read(reader, PermissionDenied(_CLIENT_LEFT))))
        session, verdict = handshake.on_proof(await _read(reader, PermissionDenied(_CLIENT_LEFT)))
    except HandshakeRefused as refusal:
        _write(writer, refusal.reply)
        raise
    _write(writer, verdict)
    return MessageStream(reader, writer, session, is_client=False, max_frame_bytes=max_frame_bytes)


def _write(writer: asyncio.StreamWriter, message: bytes) -> None:
    writer.write(pack_message(message))


async def _read(reader: asyncio.StreamReader, left: FireflyerError) -> bytes:
    try:
        return await reader.readexactly(message_length(await reader.readexactly(LENGTH_BYTES)))
    except asyncio.IncompleteReadError:
        raise left from None
    except OSError as error:
        if isinstance(error, PermissionDenied):
            raise
        raise Unreachable(f"the connection was lost during the handshake ({error})") from error


async def close_writer(writer: asyncio.StreamWriter) -> None:
    """Closes; whoever does not take what is queued within a second is cut off."""
    writer.close()
    try:
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await writer.wait_closed()
    except OSError:
        writer.transport.abort()


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    """A peer that vanished without a word is noticed after 25 s even by an end that only waits."""
    sock = writer.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
