"""Authenticated TCP connections that are handed on as file descriptors, under asyncio.

    listener = RawListener(accepts, identity="node 3", purpose="fs data", on_connection=take)      # take(RawConnection)
    address = await listener.start("10.0.0.3", 7100)

    connection = await connect_raw(address, NodeCredential(secret, "node 1"), purpose="fs data", timeout_ns=5 * SECOND)
    fd = connection.socket.detach()

The handshake of `fireflyer.identity.handshake` is done on a plain non-blocking socket. It reads exactly its own bytes
and not one more, so that native code can go on with the descriptor. For threads there are
`fireflyer.runtime.accept_thread` and `fireflyer.runtime.sockets`.

A client that does not prove itself gets one message that says so, and nothing else. What bounds its time, its bytes and
the number of such clients: `fireflyer.identity.acceptor`.

The handshake proves who is at the other end. It does not protect what is sent later: isolate or tunnel a network on
whose path somebody may sit.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from fireflyer.base.errors import Busy, FireflyerError, Timeout, Unreachable, UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.port_range import PortRange
from fireflyer.base.units import SECOND, format_duration
from fireflyer.identity.acceptor import HandshakeLimits
from fireflyer.identity.conversation import ClientConversation
from fireflyer.identity.handshake import NONCE_BYTES, Accepts, Credential, Session, UserKey
from fireflyer.runtime.address import Address
from fireflyer.runtime.handshake_sockets import ACCEPT_PAUSE_NS, HandshakeSockets
from fireflyer.runtime.port_search import listen_in_range

__all__ = ["RawConnection", "RawListener", "connect_raw", "open_raw"]

_log = logging.getLogger(__name__)
_CONNECT_NS: Final = 10 * SECOND
_BACKLOG: Final = 512
_ACCEPTS_PER_TURN: Final = 64
"""Then other sockets of the loop have their turn."""
_TIMER_S: Final = 0.001
"""Timers of loops are as coarse: not before the deadline, lest they find nothing to do."""
_KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


@dataclass(frozen=True, slots=True)
class RawConnection:
    """A connected, non-blocking socket (or `socket.detach()` it), and whom the other end has proven to be."""

    socket: socket.socket
    session: Session
    address: Address
    """Of the other end."""


async def connect_raw(
    address: Address | str, credential: Credential, *, purpose: str, timeout_ns: int = _CONNECT_NS
) -> RawConnection:
    """Connects and authenticates both ends. Raises `Unreachable`, `Timeout`, `PermissionDenied`, `Busy`, which name
    the address."""
    target = Address.parse(address) if isinstance(address, str) else Address(*address)
    try:
        async with asyncio.timeout(timeout_ns / SECOND):
            return await open_raw(target, credential, purpose=purpose)
    except FireflyerError as error:
        raise type(error)(f"connect to {target}: {error}") from error
    except TimeoutError:
        limit = format_duration(timeout_ns)
        raise Timeout(f"connect to {target}: no connection within {limit}; is the server running?") from None
    except OSError as error:
        raise Unreachable(translate_os_error(error, f"connect to {target}").message) from error


async def open_raw(address: Address, credential: Credential, *, purpose: str) -> RawConnection:
    """As `connect_raw`, without a limit on the time. Raises `PermissionDenied`, `Busy`, `Unreachable`, `OSError`."""
    conversation = ClientConversation(credential, purpose=purpose, nonce=secrets.token_bytes(NONCE_BYTES))
    loop = asyncio.get_running_loop()
    sock = await _connect(address)
    try:
        await loop.sock_sendall(sock, conversation.hello())
        while conversation.session is None:
            reply = conversation.receive(await loop.sock_recv(sock, conversation.wanted))
            if reply:
                await loop.sock_sendall(sock, reply)
        return RawConnection(sock, conversation.session, address)
    except BaseException:
        sock.close()
        raise


class RawListener:
    """Takes connections on one port. `on_connection` is called in the loop, must not block, and owns what it gets.
    `full` says why no more clients can be served, or None."""

    def __init__(
        self,
        accepts: Accepts,
        *,
        identity: str,
        purpose: str,
        on_connection: Callable[[RawConnection], None],
        limits: HandshakeLimits | None = None,
        full: Callable[[Session], Busy | None] | None = None,
    ) -> None:
        self._on_connection = on_connection
        self._accepts = accepts
        self._listening: list[socket.socket] = []
        self._timer: asyncio.TimerHandle | None = None
        self._paused: asyncio.TimerHandle | None = None
        self._sockets = HandshakeSockets(
            accepts,
            identity=identity,
            purpose=purpose,
            watch=self._watch,
            unwatch=self._unwatch,
            on_connection=self._take,
            limits=limits,
            full=full,
            find=self._find,
        )

    async def start(self, host: str, port: int, ports: PortRange | None = None) -> Address:
        """Listens at every address of `host`, or of the machine where it is empty; port 0 takes a free one, of the
        range where there is one. Raises `UsageError`, `Unreachable`, `Busy` when it cannot."""
        if not 0 <= port < 65536:
            raise UsageError(f"port {port} is out of range; choose one from 1 to 65535, or 0 for any free one")
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            addresses = list(dict.fromkeys((family, str(where[0])) for family, *_, where in found))
            if port:
                self._listening = _listen(addresses, port)
            else:
                self._listening = listen_in_range(ports, lambda chosen: _listen(addresses, chosen))
        except OSError as error:
            raise translate_os_error(error, f"listen on {Address(host, port)}") from error
        self._resume()
        return Address(host, self._listening[0].getsockname()[1])

    @property
    def refused(self) -> int:
        """Connections that were not handed on, ever."""
        return self._sockets.refused

    async def close(self) -> None:
        """Stops listening and gives up the handshakes under way. Connections that were handed on stay. Idempotent."""
        for timer in (self._timer, self._paused):
            if timer is not None:
                timer.cancel()
        self._timer = self._paused = None
        self._sockets.close()
        for sock in self._listening:
            self._unwatch(sock.fileno())
            sock.close()
        self._listening.clear()

    def _take(self, sock: socket.socket, session: Session) -> None:
        try:
            _keep_alive(sock)
            peer = sock.getpeername()
        except OSError:  # it was reset meanwhile
            sock.close()
            return
        self._on_connection(RawConnection(sock, session, Address(str(peer[0]), int(peer[1]))))

    # --- in the loop ---

    def _find(self, search: int, token_id: str) -> asyncio.Task[UserKey | None]:
        task = asyncio.get_running_loop().create_task(self._user_of(token_id))
        task.add_done_callback(lambda done: self._found(search, done))
        return task

    async def _user_of(self, token_id: str) -> UserKey | None:
        return None if self._accepts.find_user is None else await self._accepts.find_user(token_id)

    def _found(self, search: int, done: asyncio.Task[UserKey | None]) -> None:
        if done.cancelled() or not self._listening:
            return
        reason = done.exception()
        if reason is None:
            self._sockets.found(search, done.result())
        else:
            if not isinstance(reason, FireflyerError | OSError):
                _log.error("looking a token up failed on an unexpected error", exc_info=reason)
            self._sockets.not_found(search, reason if isinstance(reason, Exception) else Unreachable(str(reason)))
        self._set_timer()

    def _watch(self, fd: int) -> None:
        asyncio.get_running_loop().add_reader(fd, self._readable, fd)

    def _unwatch(self, fd: int) -> None:
        asyncio.get_running_loop().remove_reader(fd)

    def _resume(self) -> None:
        self._paused = None
        for sock in self._listening:
            asyncio.get_running_loop().add_reader(sock.fileno(), self._accept, sock)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            state = self._sockets.accept(listening)
            if state is None:
                break
            if not state:
                for sock in self._listening:
                    asyncio.get_running_loop().remove_reader(sock.fileno())
                self._paused = asyncio.get_running_loop().call_later(ACCEPT_PAUSE_NS / SECOND, self._resume)
                break
        self._set_timer()

    def _readable(self, connection: int) -> None:
        self._sockets.readable(connection)
        self._set_timer()

    def _expire(self) -> None:
        self._timer = None
        self._sockets.expire()
        self._set_timer()

    def _set_timer(self) -> None:
        """The timer is due at the next deadline, or earlier."""
        due_ns = self._sockets.next_deadline_ns
        if due_ns is None:
            return
        loop = asyncio.get_running_loop()
        due_s = loop.time() + max(0, due_ns - time.monotonic_ns()) / SECOND + _TIMER_S
        if self._timer is not None:
            if self._timer.when() <= due_s:
                return
            self._timer.cancel()
        self._timer = loop.call_at(due_s, self._expire)


def _listen(addresses: Sequence[tuple[socket.AddressFamily, str]], port: int) -> list[socket.socket]:
    """One socket for each address that this machine has, all with the same port. Raises `OSError`."""
    listening: list[socket.socket] = []
    lacking = OSError("the host name resolves to no address")
    try:
        for family, address in addresses:
            try:
                sock = socket.create_server((address, port), family=family, backlog=_BACKLOG)
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                lacking = error  # a host's file may name ::1 where there is no IPv6
                continue
            listening.append(sock)
            sock.setblocking(False)
            port = int(sock.getsockname()[1])
        if not listening:
            raise lacking
        return listening
    except BaseException:
        for sock in listening:
            sock.close()
        raise


async def _connect(address: Address) -> socket.socket:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    last: OSError = OSError("the host name resolves to no address")
    for family, kind, protocol, _, where in found:
        sock = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
        try:
            await loop.sock_connect(sock, where)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _keep_alive(sock)
            return sock
        except OSError as error:
            sock.close()
            last = error
        except BaseException:
            sock.close()
            raise
    raise last


def _keep_alive(sock: socket.socket) -> None:
    """A peer that vanished without a word is noticed after 25 s even by an end that only waits."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
