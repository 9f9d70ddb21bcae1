"""Those who come to the rendezvous wait until they are asked for, and are closed if nobody does."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from fireflyer.base.errors import FireflyerError
from fireflyer.base.units import SECOND
from fireflyer.collectives.p2p import acceptor
from fireflyer.collectives.p2p.acceptor import Acceptor
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


def test_a_peer_is_handed_over_with_its_name_and_a_socket_that_may_wait(listener: socket.socket) -> None:
    secret = new_secret()
    with Acceptor([listener], secret, PURPOSE, "host") as accepting, caller(listener) as next_peer:
        introduce(next_peer, secret, "node 3 link 0.0")
        sock, identity = accepting.next_peer(30 * SECOND)
        with sock:
            assert (identity, sock.gettimeout()) == ("node 3 link 0.0", None)
            sock.sendall(b"welcome")
            assert next_peer.recv(7) == b"welcome"


def test_another_secret_is_refused(listener: socket.socket) -> None:
    with Acceptor([listener], new_secret(), PURPOSE, "host") as accepting, caller(listener) as stranger:
        with pytest.raises(FireflyerError):
            authenticate_client(stranger, new_secret(), "node 3", PURPOSE, 30 * SECOND)
        with pytest.raises(TimeoutError):
            accepting.next_peer(1)


def test_a_rank_that_comes_again_and_again_is_closed(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "MAX_WAITING", 2)
    secret = new_secret()
    with Acceptor([listener], secret, PURPOSE, "host") as accepting:
        comers = [caller(listener) for _ in range(3)]
        for number, comer in enumerate(comers):
            introduce(comer, secret, f"node {number}")
        assert comers[2].recv(1) == b""
        for number in range(2):
            sock, identity = accepting.next_peer(30 * SECOND)
            sock.close()
            assert identity == f"node {number}"
        for comer in comers:
            comer.close()


def test_closing_ends_handshakes_and_peers_that_nobody_asked_for(listener: socket.socket) -> None:
    secret = new_secret()
    accepting = Acceptor([listener], secret, PURPOSE, "host")
    with caller(listener) as stranger, caller(listener) as next_peer:
        introduce(next_peer, secret, "node 1")
        accepting.close()
        assert next_peer.recv(1) == b""
        assert stranger.recv(1) == b""
