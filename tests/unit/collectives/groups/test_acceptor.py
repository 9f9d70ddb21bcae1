"""Silent, garbled and wrong callers do not keep the right ones waiting."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from fireflyer.base.errors import FireflyerError
from fireflyer.base.units import SECOND
from fireflyer.collectives.p2p import acceptor
from fireflyer.collectives.p2p.acceptor import Acceptor
from fireflyer.identity.handshake import pack_message
from fireflyer.identity.secrets import Secret, new_secret
from fireflyer.runtime.sockets import authenticate_client

PURPOSE = "test/link"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=256) as sock:
        yield sock


def caller(listener: socket.socket) -> socket.socket:
    return socket.create_connection(listener.getsockname(), timeout=30)


def introduce(sock: socket.socket, secret: Secret, name: str) -> None:
    assert authenticate_client(sock, secret, name, PURPOSE, 30 * SECOND) == "host"


def test_guests_are_let_in_though_strangers_say_nothing_or_nonsense(listener: socket.socket) -> None:
    secret = new_secret()
    with Acceptor(listener, secret, PURPOSE, "host") as accepting:
        silent = [caller(listener) for _ in range(30)]
        noisy = caller(listener)
        noisy.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        begun = time.monotonic()
        with caller(listener) as next_peer:
            introduce(next_peer, secret, "node 3 link 0.0")
            sock, identity = accepting.next_peer(30 * SECOND)
            sock.sendall(b"welcome")
            assert next_peer.recv(7) == b"welcome"
        assert identity == "node 3 link 0.0"
        assert time.monotonic() - begun < acceptor.HANDSHAKE_TIMEOUT_NS / SECOND
        sock.close()
    for stranger in [*silent, noisy]:
        stranger.close()


def test_a_peer_whose_hello_cannot_be_decoded_or_breaks_us_is_disconnected(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, deep = new_secret(), pack_message(b"\x82\xa7version\x01\xa1x" + b"\x91" * 1010)
    with Acceptor(listener, secret, PURPOSE, "host") as accepting:
        with caller(listener) as stranger:
            stranger.sendall(deep)
            assert stranger.recv(1) == b""
        with monkeypatch.context() as patched, caller(listener) as stranger:
            patched.setattr(acceptor, "authenticate_server", lambda *_, **__: 1 // 0)
            assert stranger.recv(1) == b""
        with caller(listener) as next_peer:
            introduce(next_peer, secret, "node 3")
            sock, identity = accepting.next_peer(30 * SECOND)
            sock.close()
        assert identity == "node 3"


def test_another_secret_is_turned_away(listener: socket.socket) -> None:
    with Acceptor(listener, new_secret(), PURPOSE, "host") as accepting, caller(listener) as stranger:
        with pytest.raises(FireflyerError):
            authenticate_client(stranger, new_secret(), "node 3", PURPOSE, 30 * SECOND)
        with pytest.raises(TimeoutError):
            accepting.next_peer(1)


def test_of_too_many_strangers_the_oldest_leaves(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "MAX_HANDSHAKES", 3)
    secret = new_secret()
    with Acceptor(listener, secret, PURPOSE, "host") as accepting:
        strangers = [caller(listener) for _ in range(3)]
        with caller(listener) as next_peer:
            introduce(next_peer, secret, "late")
            sock, identity = accepting.next_peer(30 * SECOND)
            sock.close()
        assert identity == "late"
        assert strangers[0].recv(1) == b""
        for stranger in strangers:
            stranger.close()


def test_closing_ends_every_handshake_and_guests_that_nobody_asked_for(listener: socket.socket) -> None:
    secret = new_secret()
    accepting = Acceptor(listener, secret, PURPOSE, "host")
    stranger, next_peer = caller(listener), caller(listener)
    introduce(next_peer, secret, "node 1")
    begun = time.monotonic()
    accepting.close()
    assert time.monotonic() - begun < 5
    assert next_peer.recv(1) == b""
    stranger.close()
    next_peer.close()
