"""The relay of the soak: a link that is cut carries nothing and tells nobody, and loses nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from fireflyer.recipes.soak.relay import Relay

SILENT_S = 0.2


@pytest.fixture
def service() -> Iterator[str]:
    """Sends back what it gets, and at the end of it a full stop."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer(sock: socket.socket) -> None:
            with sock:
                while data := sock.recv(4096):
                    sock.sendall(data)
                sock.sendall(b".")

        def accept() -> None:
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(sock,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def connected(relay: Relay) -> socket.socket:
    host, _, port = relay.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def silent(sock: socket.socket) -> bool:
    sock.settimeout(SILENT_S)
    try:
        sock.recv(1)
    except TimeoutError:
        return True
    finally:
        sock.settimeout(30)
    return False


def test_a_link_that_is_cut_carries_nothing_until_it_is_mended(service: str) -> None:
    relay = Relay(service)
    relay.start()
    try:
        with connected(relay) as old:
            old.sendall(b"one")
            assert old.recv(3) == b"one"
            assert relay.connections == 1
            relay.cut()
            old.sendall(b"two")
            with connected(relay) as new:
                new.sendall(b"new")
                assert silent(old)
                assert silent(new)
                relay.mend()
                assert old.recv(3) == b"two"
                assert new.recv(3) == b"new"
    finally:
        relay.close()


def test_the_end_of_a_connection_is_not_heard_through_a_link_that_is_cut(service: str) -> None:
    relay = Relay(service)
    relay.start()
    try:
        with connected(relay) as sock:
            sock.sendall(b"x")
            assert sock.recv(1) == b"x"
            relay.cut()
            sock.shutdown(socket.SHUT_WR)
            assert silent(sock)
            relay.mend()
            assert sock.recv(2) == b"."
            assert sock.recv(1) == b""
    finally:
        relay.close()


def test_a_relay_that_is_closed_ends_its_connections(service: str) -> None:
    relay = Relay(service)
    relay.start()
    with connected(relay) as sock:
        sock.sendall(b"x")
        assert sock.recv(1) == b"x"
        relay.cut()
        relay.close()
        sock.settimeout(30)
        assert sock.recv(1) in (b"", b".")
