"""A thread that accepts and authenticates connections, for processes that have no asyncio loop: the ranks.

    with AcceptThread([listener], Accepts(secret), identity="rank 0", purpose="g/rank", on_connection=take): ...

It waits for no single client (`fireflyer.identity.acceptor` says what is bounded), and works while the program
computes.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Self

from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.units import MS
from fireflyer.identity.acceptor import HandshakeLimits
from fireflyer.identity.handshake import Accepts, Session
from fireflyer.runtime.handshake_sockets import ACCEPT_PAUSE_NS, HandshakeSockets

__all__ = ["AcceptThread"]


class AcceptThread:
    """`on_connection(sock, session)` is called in the thread, must not wait for clients, and owns the non-blocking
    socket. Borrows the listening sockets. `start`, then `close`."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        accepts: Accepts,
        *,
        identity: str,
        purpose: str,
        on_connection: Callable[[socket.socket, Session], None],
        limits: HandshakeLimits | None = None,
    ) -> None:
        """Raises `Busy` when the process may open no more files, `UsageError` where `accepts` lets users in: whose
        token it is, coroutines find out."""
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._poll = select.poll()  # select() knows no descriptors beyond 1023
        self._sockets = HandshakeSockets(
            accepts,
            identity=identity,
            purpose=purpose,
            watch=lambda connection: self._poll.register(connection, select.POLLIN),
            unwatch=self._poll.unregister,
            on_connection=on_connection,
            limits=limits,
        )
        self._paused_until_ns: int | None = None
        self._closing = False
        self._working = threading.Lock()
        try:
            self._alarm = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as error:
            raise translate_os_error(error, f"accept connections as {identity}") from error
        for listener in listeners:
            listener.setblocking(False)
        # A daemon, because the interpreter joins other threads before it runs what closes a forgotten owner.
        self._thread = threading.Thread(target=self._run, name="ff-accept", daemon=True)

    def start(self) -> Self:
        self._thread.start()
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def settle(self) -> None:
        """Returns when every client that was told that it is admitted has been given to `on_connection`."""
        with self._working:
            pass

    def close(self) -> None:
        """Ends the thread and closes what is half-open. Idempotent."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._alarm, 1)
        if self._thread.ident is not None:
            self._thread.join()
        self.abandon()

    def abandon(self) -> None:
        """Gives up this process's descriptors; in the child of a fork, where the thread does not exist. Idempotent, and
        may find them closed half: the parent may have been closing them when it forked."""
        self._closing = True
        self._sockets.abandon()
        # forgotten first: a number that was closed may be somebody else's by now
        alarm, self._alarm = self._alarm, -1
        if alarm >= 0:
            os.close(alarm)

    # --- the thread ---

    def _run(self) -> None:
        self._poll.register(self._alarm, select.POLLIN)
        for listener in self._listeners:
            self._poll.register(listener, select.POLLIN)
        while True:
            ready = self._poll.poll(self._patience_ms())
            if self._closing:
                return
            with self._working:
                for fd, _ in ready:
                    if fd in self._listeners:
                        self._accept(self._listeners[fd])
                    else:
                        self._sockets.readable(fd)
                self._sockets.expire()
                self._resume()

    def _accept(self, listener: socket.socket) -> None:
        if self._sockets.accept(listener) is False and self._paused_until_ns is None:
            self._paused_until_ns = time.monotonic_ns() + ACCEPT_PAUSE_NS
            for fd in self._listeners:
                self._poll.unregister(fd)

    def _resume(self) -> None:
        if self._paused_until_ns is not None and time.monotonic_ns() >= self._paused_until_ns:
            self._paused_until_ns = None
            for fd in self._listeners:
                self._poll.register(fd, select.POLLIN)

    def _patience_ms(self) -> int | None:
        due = [due_ns for due_ns in (self._sockets.next_deadline_ns, self._paused_until_ns) if due_ns is not None]
        return max(1, (min(due) - time.monotonic_ns()) // MS + 1) if due else None
