"""Connections of the rendezvous: they wait in a queue until their rank is asked for.

Accepting and authenticating is the work of `fireflyer.runtime.accept_thread`: a silent client keeps nobody waiting.
"""

from __future__ import annotations

import queue
import socket
from collections.abc import Sequence
from typing import Final, Self

from fireflyer.base.units import SECOND
from fireflyer.identity.handshake import Accepts, Session
from fireflyer.identity.secrets import Secret
from fireflyer.runtime.accept_thread import AcceptThread

__all__ = ["Acceptor"]

MAX_WAITING: Final = 1024
"""More than a leader has ranks and neighbours; a rank that connects again and again is closed."""


class Acceptor:
    """Open from construction until `close`. Borrows the listening sockets."""

    def __init__(self, listeners: Sequence[socket.socket], secret: Secret, purpose: str, identity: str) -> None:
        """`identity` is this side's name in the handshake; `purpose` must be the peer's too. Raises `Busy` when the
        process may open no more files."""
        # Not a SimpleQueue: Python 3.11 may wait for ever in its `get` when the timeout passes at the wrong moment.
        self._accepted: queue.Queue[tuple[socket.socket, str]] = queue.Queue(MAX_WAITING)
        self._thread = AcceptThread(
            listeners, Accepts(secret), identity=identity, purpose=purpose, on_connection=self._put
        ).start()

    def next_peer(self, timeout_ns: int) -> tuple[socket.socket, str]:
        """The next one, and the identity that was proven; the socket is the caller's. Raises `TimeoutError`."""
        try:
            return self._accepted.get(timeout=timeout_ns / SECOND)
        except queue.Empty:
            raise TimeoutError from None

    def close(self) -> None:
        """Closes all that `next_peer` has not returned."""
        self._thread.close()
        while not self._accepted.empty():
            self._accepted.get()[0].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _put(self, sock: socket.socket, session: Session) -> None:
        sock.setblocking(True)
        try:
            self._accepted.put_nowait((sock, session.peer))
        except queue.Full:
            sock.close()
