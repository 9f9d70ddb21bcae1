"""The client's end of an exec session: a WebSocket to the manager that accepted it, on asyncio.

    async with ExecStream.open(connection, manager, accepted) as stream:
        await stream.send(b"input")           # waits for what the other end has granted
        async for frame in stream.frames():   # `taken` says what has been written somewhere
            ...

Nothing is sent before the certificate is the right one. The manager answers pings and sends its own, so a connection
over which nothing comes for `SILENT_S` is dead.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final
from urllib.parse import urlsplit

import wsproto
from wsproto import events
from wsproto.utilities import ProtocolError

from fireflyer.base.decoding import DECODE_ERRORS
from fireflyer.base.errors import PermissionDenied, Unreachable
from fireflyer.cluster.core.exec_session import ExecEnd, ExecSide
from fireflyer.cluster.manager_requests import ManagerAddress, check_certificate, tls_of
from fireflyer.cluster.schema.api import API
from fireflyer.cluster.schema.execs import (
    MAX_DATA_BYTES,
    MAX_FRAME_BYTES,
    ExecAccepted,
    Frame,
    Resize,
    Signal,
    decode_frame,
    encode_frame,
)

__all__ = ["ExecStream"]

CONNECT_S: Final = 15.0
SILENT_S: Final = 60.0
_READ_BYTES: Final = 64 << 10


class ExecStream:
    """Made by `open`. One task reads `frames`; others may send."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.end = ExecEnd(ExecSide.CLIENT)
        self._reader, self._writer = reader, writer
        self._socket = wsproto.WSConnection(wsproto.ConnectionType.CLIENT)
        self._granted = asyncio.Event()
        self._message = b""

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, manager: ManagerAddress, token: str, accepted: ExecAccepted) -> AsyncIterator[ExecStream]:
        """Raises `Unreachable`, `PermissionDenied`."""
        parts = urlsplit(manager.url)
        host = parts.hostname or ""
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(host, port, ssl=tls_of(manager) if secure else None)
        except (OSError, TimeoutError) as error:
            raise Unreachable(f"{manager.url} cannot be reached: {error}") from None
        try:
            if secure:
                check_certificate(manager, writer.get_extra_info("ssl_object").getpeercert(binary_form=True))
            stream = cls(reader, writer)
            async with asyncio.timeout(CONNECT_S):
                await stream._shake_hands(parts.netloc, f"{API}/execs/{accepted.id}", token)
            yield stream
        except (OSError, TimeoutError) as error:
            raise Unreachable(f"the connection to {manager.url} broke: {error}") from None
        finally:
            writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(1):
                    await writer.wait_closed()

    async def _shake_hands(self, host: str, target: str, token: str) -> None:
        headers = [(b"authorization", f"Bearer {token}".encode())]
        self._writer.write(self._socket.send(events.Request(host=host, target=target, extra_headers=headers)))
        async for event in self._events():
            if isinstance(event, events.AcceptConnection):
                return
            if isinstance(event, events.RejectConnection):
                break
        raise PermissionDenied("the manager refused the session; it may have ended already: try again")

    async def _events(self) -> AsyncIterator[events.Event]:
        """Until the connection ends. Raises `Unreachable`."""
        while True:
            try:
                for event in self._socket.events():
                    yield event
                async with asyncio.timeout(SILENT_S):
                    data = await self._reader.read(_READ_BYTES)
                if not data:
                    return
                self._socket.receive_data(data)
            except TimeoutError:
                raise Unreachable(f"nothing came from the manager for {SILENT_S:.0f} s") from None
            except (OSError, ProtocolError) as error:
                raise Unreachable(f"the connection to the manager broke: {error}") from None

    # --- what comes ---

    async def frames(self) -> AsyncIterator[Frame]:
        """Until the session is over: then `end` says how. Raises `Unreachable` where the connection broke before."""
        async for event in self._events():
            match event:
                case events.Ping():
                    self._writer.write(self._socket.send(event.response()))
                case events.BytesMessage(data=data, message_finished=finished):
                    self._message += data
                    if len(self._message) > MAX_FRAME_BYTES:
                        raise Unreachable("the manager sent a frame that is too long")
                    if finished:
                        frame = self._heard(self._message)
                        self._message = b""
                        yield frame
                case events.CloseConnection():
                    break
                case _:
                    pass
            if self.end.over:
                return
        if not self.end.over:
            raise Unreachable("the manager ended the connection; its log says why")

    def _heard(self, message: bytes) -> Frame:
        try:
            frame = decode_frame(message)
        except DECODE_ERRORS:
            raise Unreachable("the manager sent something that is no frame; is it of another release?") from None
        self._put(self.end.hear(frame))
        self._granted.set()
        return frame

    def taken(self, size_bytes: int) -> None:
        """So much of the data that came has been written somewhere."""
        self._put(self.end.take(size_bytes))

    # --- what is sent ---

    async def send(self, data: bytes) -> None:
        """Waits for its turn. Nothing where the session is over."""
        view = memoryview(data)
        while view and not self.end.over:
            if not self.end.may_send:
                self._granted.clear()
                await self._granted.wait()
                continue
            piece = bytes(view[: min(self.end.may_send, MAX_DATA_BYTES)])
            view = view[len(piece) :]
            self._put(self.end.send(0, piece))
            await self._writer.drain()

    def end_input(self) -> None:
        self._put(self.end.end_stream(0))

    def control(self, frame: Resize | Signal) -> None:
        self._put(self.end.control(frame))

    def close(self, reason: str) -> None:
        self._put(self.end.close(reason))

    def _put(self, frames: list[Frame]) -> None:
        with contextlib.suppress(ProtocolError, OSError):
            for frame in frames:
                self._writer.write(self._socket.send(events.BytesMessage(data=encode_frame(frame))))
