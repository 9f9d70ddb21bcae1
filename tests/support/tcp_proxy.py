"""A TCP proxy that can turn every connection through it into a half-open one: still there, but nothing arrives."""

from __future__ import annotations

import selectors
import socket
import threading

__all__ = ["Proxy"]


class Proxy:
    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._target = 0
        self._frozen = threading.Event()
        self._spared = 0
        self._stopping = threading.Event()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._acceptor: threading.Thread | None = None

    def begin(self, target_port: int) -> None:
        """Forwards to this port of the loopback address; connections made earlier have waited."""
        self._target = target_port
        self._acceptor = threading.Thread(target=self._accept)
        self._acceptor.start()

    def freeze(self, *, spare: int = 0) -> None:
        """From now on nothing is forwarded, but on the first `spare` connections; none is closed."""
        self._spared = spare
        self._frozen.set()

    def close(self) -> None:
        self._stopping.set()
        if self._acceptor is not None:
            self._acceptor.join()
        for thread in self._threads:
            thread.join()
        for sock in [*self._sockets, self._listener]:
            sock.close()

    def _accept(self) -> None:
        self._listener.settimeout(0.1)
        while not self._stopping.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            server = socket.create_connection(("127.0.0.1", self._target))
            self._sockets += [client, server]
            number = len(self._threads)
            thread = threading.Thread(target=self._forward, args=(number, client, server))
            thread.start()
            self._threads.append(thread)

    def _is_frozen(self, number: int) -> bool:
        return self._frozen.is_set() and number >= self._spared

    def _forward(self, number: int, client: socket.socket, server: socket.socket) -> None:
        other = {client: server, server: client}
        with selectors.DefaultSelector() as selector:
            for sock in other:
                selector.register(sock, selectors.EVENT_READ)
            while not self._stopping.is_set() and not self._is_frozen(number):
                for key, _ in selector.select(0.1):
                    source = key.fileobj
                    assert isinstance(source, socket.socket)
                    if self._is_frozen(number):
                        break
                    try:
                        data = source.recv(1 << 16)
                        if not data:
                            other[source].shutdown(socket.SHUT_WR)
                            selector.unregister(source)
                        else:
                            other[source].sendall(data)
                    except OSError:
                        return
