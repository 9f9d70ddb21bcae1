"""A TCP proxy that does to connections what networks do to them: lets them freeze, swallows bytes, resets, closes."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
from collections.abc import Container
from typing import Final, Literal, NamedTuple, TypeAlias

__all__ = ["Blow", "End", "Proxy"]

Blow: TypeAlias = Literal["freeze", "swallow", "reset", "finish"]
"""Forward nothing more; take bytes and forward none; end both halves with an RST; or with a FIN."""
End: TypeAlias = Literal["client", "server"]
_ALL: Final = range(1 << 16)


class _InjectedFault(NamedTuple):
    blow: Blow
    numbers: Container[int]
    towards: End | None


class Proxy:
    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._target = 0
        self._strike: _InjectedFault | None = None
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
        self.inject("freeze", range(spare, _ALL.stop))

    def inject(self, blow: Blow, numbers: Container[int] = _ALL, towards: End | None = None) -> None:
        """Once: what befalls the connections of these numbers, in the order in which they were made. `towards`: only
        what goes to that end, for "freeze" and "swallow"."""
        self._strike = _InjectedFault(blow, numbers, towards)

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

    def _struck(self, number: int) -> _InjectedFault | None:
        inject = self._strike
        return inject if inject is not None and number in inject.numbers else None

    def _altered(self, number: int, towards: End, data: bytes) -> bytes:
        """What is forwarded instead of `data`."""
        del number, towards
        return data

    def _forward(self, number: int, client: socket.socket, server: socket.socket) -> None:
        other = {client: server, server: client}
        name: dict[socket.socket, End] = {client: "client", server: "server"}
        with selectors.DefaultSelector() as selector:
            for sock in other:
                selector.register(sock, selectors.EVENT_READ)
            while not self._stopping.is_set() and selector.get_map():
                ready = selector.select(0.1)
                inject = self._struck(number)
                if inject is not None and inject.blow in ("reset", "finish"):
                    _end(client, server, reset=inject.blow == "reset")
                    return
                for key, _ in ready:
                    source = key.fileobj
                    assert isinstance(source, socket.socket)
                    hit = inject is not None and inject.towards in (None, name[other[source]])
                    if hit and inject is not None and inject.blow == "freeze":
                        selector.unregister(source)
                        continue
                    try:
                        data = source.recv(1 << 16)
                        if not data:
                            selector.unregister(source)
                            other[source].shutdown(socket.SHUT_WR)
                        elif not hit:
                            other[source].sendall(self._altered(number, name[other[source]], data))
                    except OSError:
                        return


def _end(*ends: socket.socket, reset: bool) -> None:
    for sock in ends:
        if reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        else:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
