"""Accepts whoever proves to hold the job's secret, many at a time: a silent peer keeps nobody waiting.

A thread accepts; every connection gets a short-lived thread for its handshake, at most `MAX_HANDSHAKES` at once (then
the oldest, most likely a silent one, is turned away) and for at most `HANDSHAKE_TIMEOUT_NS`. Those who have proven who
they are wait in a queue.
"""

from __future__ import annotations

import logging
import queue
import select
import socket
import threading
import time
from typing import Final, Self

from fireflyer.base.errors import FireflyerError
from fireflyer.base.units import SECOND
from fireflyer.identity.secrets import Secret
from fireflyer.runtime.sockets import authenticate_server

__all__ = ["ACCEPT_PAUSE_S", "Acceptor"]

HANDSHAKE_TIMEOUT_NS: Final = 10 * SECOND
MAX_HANDSHAKES: Final = 128
ACCEPT_PAUSE_S: Final = 0.001
"""A connection that cannot be accepted stays queued, and `poll` returns at once: this keeps a thread from spinning."""


_log = logging.getLogger(__name__)


class Acceptor:
    """Open from construction until `close`. Borrows the listening socket."""

    def __init__(self, listener: socket.socket, secret: Secret, purpose: str, identity: str) -> None:
        """`identity` is this side's name in the handshake; `purpose` must be the peer's too."""
        self._listener = listener
        self._secret = secret
        self._purpose = purpose
        self._identity = identity
        # Not a SimpleQueue: Python 3.11 may wait for ever in its `get` when the timeout passes at the wrong moment.
        self._accepted: queue.Queue[tuple[socket.socket, str]] = queue.Queue()
        self._lock = threading.Lock()
        self._closed = False
        self._handshakes: dict[socket.socket, threading.Thread] = {}
        self._awake, self._alarm = socket.socketpair()
        listener.setblocking(False)
        self._acceptor = threading.Thread(target=self._accept, name="ff-acceptor")
        self._acceptor.start()

    def next_peer(self, timeout_ns: int) -> tuple[socket.socket, str]:
        """The next one, and the identity that was proven; the socket is the caller's. Raises `TimeoutError`."""
        try:
            return self._accepted.get(timeout=timeout_ns / SECOND)
        except queue.Empty:
            raise TimeoutError from None

    def close(self) -> None:
        """Turns away all that `next_peer` has not returned."""
        self._alarm.close()
        self._acceptor.join()
        with self._lock:
            self._closed = True
            threads = dict(self._handshakes)
            for sock in threads:
                _hang_up(sock)
        for thread in threads.values():
            thread.join()
        while not self._accepted.empty():
            self._accepted.get()[0].close()
        self._awake.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        poll, listener = select.poll(), self._listener.fileno()  # select() knows no descriptors beyond 1023
        poll.register(listener, select.POLLIN)
        poll.register(self._awake, select.POLLIN)
        while [fd for fd, _ in poll.poll()] == [listener]:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # it has gone again, or there are no descriptors left
                time.sleep(ACCEPT_PAUSE_S)  # the listener stays readable while there are none: no spinning
                continue
            sock.setblocking(True)
            thread = threading.Thread(target=self._shake_hands, args=(sock,), name="ff-handshake")
            with self._lock:
                if len(self._handshakes) >= MAX_HANDSHAKES:
                    _hang_up(next(iter(self._handshakes)))
                self._handshakes[sock] = thread
                thread.start()

    def _shake_hands(self, sock: socket.socket) -> None:
        identity: str | None = None
        try:
            identity = authenticate_server(
                sock, self._secret, self._purpose, HANDSHAKE_TIMEOUT_NS, identity=self._identity
            )
        except FireflyerError:
            pass  # a peer without the secret
        except Exception:  # a fault of ours: without this the socket would never be closed
            _log.exception("handshake failed on an unexpected error identity=%s", self._identity)
        with self._lock:
            del self._handshakes[sock]
            if identity is not None and not self._closed:
                self._accepted.put((sock, identity))
                return
        sock.close()


def _hang_up(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it is over already
