"""Authenticated TCP connections that are handed on as file descriptors, under asyncio.

    listener = RawListener(accepts, identity="node 3", purpose="fs data", on_connection=take)      # take(RawConnection)
    address = await listener.start("10.0.0.3", 7100)

    connection = await connect_raw(address, NodeCredential(secret, "node 1"), purpose="fs data", timeout_ns=5 * SECOND)
    fd = connection.socket.detach()

The handshake of `fireflyer.identity.handshake` is done on a plain non-blocking socket. It reads exactly its own bytes
and not one more, so that native code can go on with the descriptor. `fireflyer.runtime.sockets` does the same for
threads that may block.

A peer that does not prove itself gets one message that says so, and nothing else. Everything is bounded: the time of a
handshake, its bytes, how many are under way at once (the oldest gives way: an honest peer needs milliseconds, and
strangers must not keep the others out).

The handshake proves who is at the other end. It does not protect what is sent later: isolate or tunnel a network on
whose path somebody may sit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from fireflyer.base.errors import FireflyerError, PermissionDenied, Timeout, Unreachable, UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.units import SECOND, format_duration
from fireflyer.identity.handshake import (
    LENGTH_BYTES,
    NONCE_BYTES,
    Accepts,
    ClientHandshake,
    Credential,
    ServerHandshake,
    Session,
    message_length,
    pack_message,
    refusal_message,
)
from fireflyer.runtime.address import Address

__all__ = ["RawConnection", "RawListener", "connect_raw"]

_log = logging.getLogger(__name__)
MAX_HANDSHAKES: Final = 128
"""Under way at once at one listener."""
HANDSHAKE_NS: Final = 10 * SECOND
_BACKLOG: Final = 512
_REFUSE_S: Final = 1.0
_MAX_UNREAD_BYTES: Final = 64 << 10
"""So much is read of a peer that was refused: closing before would destroy the message that says why."""
_ACCEPT_AGAIN_S: Final = 0.1
_KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


@dataclass(frozen=True, slots=True)
class RawConnection:
    """A connected, non-blocking socket (or `socket.detach()` it), and whom the other end has proven to be."""

    socket: socket.socket
    session: Session
    address: Address
    """Of the other end."""


async def connect_raw(
    address: Address | str, credential: Credential, *, purpose: str, timeout_ns: int = HANDSHAKE_NS
) -> RawConnection:
    """Connects and authenticates both ends. Raises `Unreachable`, `Timeout`, `PermissionDenied`, `Busy`, which name
    the address."""
    target = Address.parse(address) if isinstance(address, str) else Address(*address)
    sock: socket.socket | None = None
    try:
        async with asyncio.timeout(timeout_ns / SECOND):
            sock = await _connect(target)
            session = await _prove(sock, ClientHandshake(credential, purpose=purpose, nonce=_nonce()))
    except BaseException as error:
        if sock is not None:
            sock.close()
        if isinstance(error, FireflyerError):
            raise type(error)(f"connect to {target}: {error}") from error
        if isinstance(error, TimeoutError):
            limit = format_duration(timeout_ns)
            raise Timeout(f"connect to {target}: no connection within {limit}; is the server running?") from None
        if isinstance(error, OSError):
            raise Unreachable(translate_os_error(error, f"connect to {target}").message) from error
        raise
    return RawConnection(sock, session, target)


class RawListener:
    """Takes connections on one port. `on_connection` is called in the loop, must not block, and owns what it gets."""

    def __init__(
        self,
        accepts: Accepts,
        *,
        identity: str,
        purpose: str,
        on_connection: Callable[[RawConnection], None],
        handshake_ns: int = HANDSHAKE_NS,
    ) -> None:
        self._accepts = accepts
        self._identity, self._purpose = identity, purpose
        self._on_connection = on_connection
        self._handshake_ns = handshake_ns
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._handshakes: dict[asyncio.Task[None], None] = {}  # oldest first

    async def start(self, host: str, port: int) -> Address:
        """Listens; port 0 takes a free one. Raises `UsageError`, `Unreachable` when it cannot."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, kind, protocol, _, where = found[0]
            sock = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
        except OSError as error:
            raise translate_os_error(error, f"listen on {Address(host, port)}") from error
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
            sock.listen(_BACKLOG)
        except (OSError, OverflowError) as error:
            sock.close()
            if isinstance(error, OverflowError):
                raise UsageError(f"port {port} is out of range; choose one from 1 to 65535, or 0 for any") from None
            raise translate_os_error(error, f"listen on {Address(host, port)}") from error
        self._socket = sock
        self._accepting = loop.create_task(self._accept_all(sock))
        return Address(host, sock.getsockname()[1])

    async def close(self) -> None:
        """Stops listening and gives up the handshakes under way. Connections that were handed on stay."""
        tasks = [*self._handshakes]
        if self._accepting is not None:
            tasks.append(self._accepting)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def _accept_all(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, peer = await loop.sock_accept(listening)
            except OSError as error:
                # Out of descriptors or memory, mostly: what is open goes on, and the next ones wait.
                _log.warning("accept failed, retrying reason=%s", translate_os_error(error, "accept"))
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            if len(self._handshakes) >= MAX_HANDSHAKES:
                oldest = next(iter(self._handshakes))
                del self._handshakes[oldest]
                oldest.cancel()
            task = loop.create_task(self._serve(sock, Address(str(peer[0]), int(peer[1]))))
            self._handshakes[task] = None
            task.add_done_callback(lambda done: self._handshakes.pop(done, None))
            # Also where it was cancelled before it began; what was handed on has no descriptor here any more.
            task.add_done_callback(lambda done, sock=sock: None if _handed_on(done) else sock.close())  # type: ignore[misc]

    async def _serve(self, sock: socket.socket, peer: Address) -> None:
        handshake = ServerHandshake(
            self._accepts,
            identity=self._identity,
            purpose=self._purpose,
            nonce=_nonce(),
            decoy_key=secrets.token_bytes(32),
        )
        try:
            session = await self._check(sock, handshake)
            _set_options(sock)
        except (FireflyerError, OSError) as error:
            _log.warning("connection refused peer=%s reason=%s", peer, error)
            if isinstance(error, PermissionDenied | Timeout):
                await _refuse(sock, getattr(error, "reply", None) or refusal_message(error))
            raise
        self._on_connection(RawConnection(sock, session, peer))

    async def _check(self, sock: socket.socket, handshake: ServerHandshake) -> Session:
        try:
            async with asyncio.timeout(self._handshake_ns / SECOND):
                left = Unreachable("the client closed the connection during the handshake")
                await _send(sock, handshake.on_hello(await _receive(sock, left)))
                session, verdict = handshake.on_proof(await _receive(sock, left))
                await _send(sock, verdict)
                return session
        except FireflyerError:
            raise
        except TimeoutError:
            limit = format_duration(self._handshake_ns)
            raise Timeout(f"the client did not authenticate within {limit}") from None


def _handed_on(task: asyncio.Task[None]) -> bool:
    if task.cancelled():
        return False
    error = task.exception()
    if error is not None and not isinstance(error, FireflyerError | OSError):
        _log.error("connection lost on an unexpected error", exc_info=error)
    return error is None


def _nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


async def _connect(address: Address) -> socket.socket:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    last: OSError = OSError("the host name resolves to no address")
    for family, kind, protocol, _, where in found:
        sock = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
        try:
            await loop.sock_connect(sock, where)
            _set_options(sock)
            return sock
        except OSError as error:
            sock.close()
            last = error
        except BaseException:
            sock.close()
            raise
    raise last


def _set_options(sock: socket.socket) -> None:
    """A peer that vanished without a word is noticed after 25 s even by an end that only waits."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


async def _prove(sock: socket.socket, handshake: ClientHandshake) -> Session:
    left = Unreachable(
        "the server closed the connection during the handshake; it has ended, or is not a Fire-Flyer server"
    )
    await _send(sock, handshake.hello())
    await _send(sock, handshake.on_challenge(await _receive(sock, left)))
    return handshake.on_verdict(await _receive(sock, left))


async def _send(sock: socket.socket, message: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, pack_message(message))


async def _receive(sock: socket.socket, left: FireflyerError) -> bytes:
    return await _exactly(sock, message_length(await _exactly(sock, LENGTH_BYTES, left)), left)


async def _exactly(sock: socket.socket, count: int, left: FireflyerError) -> bytes:
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < count:
        piece = await loop.sock_recv(sock, count - len(data))
        if not piece:
            raise left
        data += piece
    return data


async def _refuse(sock: socket.socket, reply: bytes) -> None:
    """One message that says why, for at most a second."""
    loop, unread = asyncio.get_running_loop(), _MAX_UNREAD_BYTES
    with contextlib.suppress(OSError):
        async with asyncio.timeout(_REFUSE_S):
            await loop.sock_sendall(sock, pack_message(reply))
            sock.shutdown(socket.SHUT_WR)
            while unread > 0 and (data := await loop.sock_recv(sock, 4096)):
                unread -= len(data)
