"""The half-open sockets of a listener: performs what a `HandshakeAcceptor` decides. It waits for nothing itself.

`AcceptThread` (a thread that polls) and `RawListener` (asyncio) say when a socket is readable or a deadline has passed.
Whose token it is, is found out by `find`, which returns at once and calls `found` or `not_found` later; while it looks,
the socket is not watched. A connection is numbered by its descriptor. Not for use by two threads at once.
"""

from __future__ import annotations

import errno
import logging
import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import Final, Protocol

from fireflyer.base.errors import Busy, Unreachable, UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.identity.acceptor import (
    AcceptorEffect,
    Find,
    HandOver,
    HandshakeAcceptor,
    HandshakeLimits,
    Refuse,
    Report,
    Send,
)
from fireflyer.identity.handshake import Accepts, Session, UserKey

__all__ = ["ACCEPT_PAUSE_NS", "HandshakeSockets", "source_of"]

_log = logging.getLogger(__name__)
ACCEPT_PAUSE_NS: Final = 100_000_000
"""Until a listener that cannot accept is tried again: it stays readable, so polling it would spin."""
_UCRED: Final = struct.Struct("3i")
_NETWORK_BYTES: Final = 8
_NO_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE)


class Search(Protocol):
    """That is under way."""

    def cancel(self) -> object:
        """Nobody waits for its answer any more. Nothing when it has ended."""


class HandshakeSockets:
    """`watch` and `unwatch` are called with descriptors of sockets to be read. `find`: of a listener that lets users
    in; it is given the number of a search and of a token. `on_connection` owns the non-blocking
    socket that it gets; it gets what the client has proven to be, and where it comes from, for people."""

    def __init__(
        self,
        accepts: Accepts,
        *,
        identity: str,
        purpose: str,
        watch: Callable[[int], None],
        unwatch: Callable[[int], None],
        on_connection: Callable[[socket.socket, Session], None],
        limits: HandshakeLimits | None = None,
        full: Callable[[Session], Busy | None] | None = None,
        find: Callable[[int, str], Search] | None = None,
    ) -> None:
        """Raises `UsageError` where users are accepted and nobody finds them."""
        if accepts.find_user is not None and find is None:
            raise UsageError("this listener cannot look tokens up; let it accept the node secret alone")
        self._find = find
        self._searches: dict[int, Search] = {}
        self._acceptor = HandshakeAcceptor(
            accepts,
            identity=identity,
            purpose=purpose,
            random_bytes=secrets.token_bytes,
            limits=limits,
            full=full,
        )
        self._identity, self._purpose = identity, purpose
        self._watch, self._unwatch = watch, unwatch
        self._on_connection = on_connection
        self._sockets: dict[int, socket.socket] = {}

    @property
    def next_deadline_ns(self) -> int | None:
        """When `expire` is due, by CLOCK_MONOTONIC."""
        return self._acceptor.next_deadline_ns

    @property
    def refused(self) -> int:
        """Connections that were not admitted, ever."""
        return self._acceptor.refused

    def accept(self, listener: socket.socket) -> bool | None:
        """Accepts a connection. None when there is none, False when listeners are to be left alone for
        `ACCEPT_PAUSE_NS`."""
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None  # it has gone again
        except OSError as error:
            # A half-open connection gives its descriptor to the next one, else strangers could use up all of them.
            if error.errno in _NO_DESCRIPTORS and self._sockets:
                self._perform(self._acceptor.evict(time.monotonic_ns()))
                return True
            _log.warning("accept failed, retrying reason=%s", translate_os_error(error, "accept"))
            return False
        try:
            sock.setblocking(False)
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            source = source_of(sock)
        except OSError:  # it was reset meanwhile
            sock.close()
            return True
        connection = sock.fileno()
        evicted = self._acceptor.opened(time.monotonic_ns(), connection, source)
        self._sockets[connection] = sock
        self._watch(connection)
        self._perform(evicted)
        return True

    def readable(self, connection: int) -> None:
        """Reads what has come and answers it."""
        while (sock := self._sockets.get(connection)) is not None and connection not in self._searches:
            try:
                data = sock.recv(self._acceptor.wanted(connection))
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._lost(connection, error)
                return
            try:
                effects = self._acceptor.received(time.monotonic_ns(), connection, data)
            except Exception as error:  # a fault of ours: without this nobody could connect any more
                _log.exception("handshake failed on an unexpected error identity=%s", self._identity)
                self._lost(connection, error)
                return
            self._perform(effects)

    def found(self, search: int, user: UserKey | None) -> None:
        """Whose token it is. Not called by `find` itself."""
        self._perform(self._acceptor.found(time.monotonic_ns(), search, user))

    def not_found(self, search: int, reason: Exception) -> None:
        """Nobody can say at the moment whose token it is."""
        self._perform(self._acceptor.not_found(time.monotonic_ns(), search, reason))

    def expire(self) -> None:
        """Ends those whose time is over."""
        self._perform(self._acceptor.expire(time.monotonic_ns()))

    def close(self) -> None:
        """Closes what is half-open. Idempotent."""
        for connection in list(self._sockets):
            self._forget(connection)

    def abandon(self) -> None:
        """Closes the descriptors and nothing else, in the child of a fork."""
        for sock in list(self._sockets.values()):
            sock.close()
        self._sockets.clear()
        self._searches.clear()

    def _perform(self, effects: list[AcceptorEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Report):
                self._report(effect)
                continue
            sock = self._sockets.get(effect.connection)
            if sock is None:
                continue  # an effect before this one found it broken
            if isinstance(effect, Find):
                self._search(effect)
            elif isinstance(effect, Send):
                self._send(effect.connection, sock, effect.data)
            elif isinstance(effect, Refuse):
                self._send(effect.connection, sock, effect.data, last=True)
            elif isinstance(effect, HandOver):
                self._admit(effect.connection, effect.session)
            else:
                self._forget(effect.connection)

    def _search(self, wanted: Find) -> None:
        self._unwatch(wanted.connection)
        if self._find is not None:
            self._searches[wanted.connection] = self._find(wanted.number, wanted.token_id)

    def _send(self, connection: int, sock: socket.socket, data: bytes, *, last: bool = False) -> None:
        search = self._searches.pop(connection, None)
        if search is not None:
            search.cancel()
            self._watch(connection)
        try:
            if sock.send(data) != len(data):
                raise Unreachable("the client does not read the messages of the handshake")
            if last:
                sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            self._lost(connection, error)

    def _admit(self, connection: int, session: Session) -> None:
        self._unwatch(connection)
        sock = self._sockets.pop(connection)
        try:
            self._on_connection(sock, session)
        except Exception:  # a fault of who takes this connection must not end the listener of all others
            _log.exception("connection lost on an unexpected error peer=%s", session.peer)
            sock.close()

    def _lost(self, connection: int, reason: Exception) -> None:
        effects = self._acceptor.lost(time.monotonic_ns(), connection, reason)
        self._forget(connection)
        self._perform(effects)

    def _forget(self, connection: int) -> None:
        sock = self._sockets.pop(connection, None)
        search = self._searches.pop(connection, None)
        if search is not None:
            search.cancel()
        if sock is not None:
            if search is None:
                self._unwatch(connection)
            sock.close()

    def _report(self, report: Report) -> None:
        _log.warning(
            "connection refused peer=%s purpose=%s left_out=%d reason=%s",
            report.source,
            self._purpose,
            report.left_out,
            report.reason,
        )


def source_of(sock: socket.socket) -> str:
    """Whom a connection is counted for: its IPv4 address, its IPv6 network of 64 bits (one machine may have all
    addresses in it), or for a Unix socket the user of the process at the other end. Raises `OSError`."""
    if sock.family == socket.AF_UNIX:
        _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        return f"uid {uid}"
    host = str(sock.getpeername()[0])
    if sock.family != socket.AF_INET6 or host.startswith("::ffff:"):
        return host
    network = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])[:_NETWORK_BYTES]
    return socket.inet_ntop(socket.AF_INET6, network + bytes(16 - _NETWORK_BYTES)) + "/64"
