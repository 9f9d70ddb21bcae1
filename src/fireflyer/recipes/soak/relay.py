"""A link that can be cut: a TCP relay between the services of a node and a manager.

Cut as a cable is: nothing arrives any more, in either direction, and nobody is told. Connections stay open, new ones
are accepted and say nothing; what was sent meanwhile arrives when the link is whole again, as TCP has it. All services
of `ff up` are on the loopback address of one machine, where a firewall would have to tell them apart by ports that
change with each connection, and would need root.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Final

from fireflyer.runtime.address import Address

__all__ = ["Relay"]

_BYTES: Final = 64 << 10
_HERE: Final = "127.0.0.1"
_CONNECT_S: Final = 10.0


class Relay:
    """Listens at `address`; forwards to `target`, `host:port`, from `start` to `close`."""

    def __init__(self, target: str) -> None:
        self._target = Address.parse(target)
        self._listener = socket.create_server((_HERE, 0))
        self.address = f"{_HERE}:{self._listener.getsockname()[1]}"
        self._whole = threading.Event()
        self._whole.set()
        self._closing = False
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()

    def start(self) -> None:
        self._thread(self._accept)

    @property
    def connections(self) -> int:
        with self._lock:
            return len(self._sockets) // 2

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        self._whole.set()

    def close(self) -> None:
        """Ends all connections."""
        self._closing = True
        self._whole.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for one in self._sockets:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def _thread(self, work: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=work, args=arguments, name="ff-soak-relay", daemon=True).start()

    def _accept(self) -> None:
        while not self._closing:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._thread(self._connect, client)

    def _connect(self, client: socket.socket) -> None:
        self._whole.wait()
        try:
            server = socket.create_connection((self._target.host, self._target.port), timeout=_CONNECT_S)
        except OSError:
            client.close()
            return
        server.settimeout(None)
        for one in (client, server):
            with contextlib.suppress(OSError):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._sockets |= {client, server}
        other = threading.Thread(target=self._pump, args=(server, client), name="ff-soak-relay", daemon=True)
        other.start()
        self._pump(client, server)
        other.join()
        with self._lock:
            self._sockets -= {client, server}
        client.close()
        server.close()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        """One direction. What has arrived waits while the link is cut, the end of the connection too."""
        try:
            while data := source.recv(_BYTES):
                self._whole.wait()
                sink.sendall(data)
        except OSError:
            pass
        self._whole.wait()
        for one, how in ((sink, socket.SHUT_WR), (source, socket.SHUT_RD)):
            with contextlib.suppress(OSError):
                one.shutdown(how)
