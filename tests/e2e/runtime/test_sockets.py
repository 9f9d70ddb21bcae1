"""Raw sockets are authenticated on both ends and handed on with not a byte missing."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from fireflyer.base.errors import PermissionDenied, Timeout, Unreachable, UsageError
from fireflyer.base.units import MS, SECOND
from fireflyer.identity.conversation import ServerConversation
from fireflyer.identity.handshake import MAX_IDENTITY_BYTES, Accepts, HandshakeRefused, pack_message
from fireflyer.identity.secrets import Secret, new_secret
from fireflyer.runtime.sockets import authenticate_client

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


@pytest.fixture(params=["unix", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    if request.param == "unix":
        ends = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            client = socket.create_connection(listener.getsockname())
            ends = (client, listener.accept()[0])
    with ends[0], ends[1]:
        yield ends


def _serve(pool: ThreadPoolExecutor, sock: socket.socket, secret: Secret, purpose: str = "allreduce") -> Future[str]:
    return pool.submit(_served, sock, secret, purpose)


def _served(sock: socket.socket, secret: Secret, purpose: str) -> str:
    """The accepting end on a socket that waits; returns the name that the client has proven."""
    conversation = ServerConversation(
        Accepts(secret), identity="rank 1", purpose=purpose, nonce=bytes(32), decoy_key=bytes(32)
    )
    while conversation.proven is None:
        try:
            sock.sendall(conversation.receive(sock.recv(conversation.wanted)))
        except HandshakeRefused as refusal:
            sock.sendall(pack_message(refusal.reply))
            raise
    sock.sendall(conversation.verdict)
    return conversation.proven.peer


def test_both_ends_learn_each_others_name(pair: Pair, pool: ThreadPoolExecutor) -> None:
    secret = new_secret()
    served = _serve(pool, pair[1], secret)
    assert authenticate_client(pair[0], secret, "rank 0", "allreduce", 10 * SECOND) == "rank 1"
    assert served.result(10) == "rank 0"


def test_bytes_sent_right_behind_the_handshake_stay_in_the_socket(pair: Pair, pool: ThreadPoolExecutor) -> None:
    secret = new_secret()
    pair[1].settimeout(7.5)
    served = _serve(pool, pair[1], secret)
    authenticate_client(pair[0], secret, "rank 0", "allreduce", 10 * SECOND)
    pair[0].sendall(b"the first bytes of the collective")
    served.result(10)
    assert pair[1].gettimeout() == 7.5
    assert pair[0].gettimeout() is None
    assert pair[1].recv(100) == b"the first bytes of the collective"


def test_a_stranger_is_refused_and_learns_it(pair: Pair, pool: ThreadPoolExecutor) -> None:
    served = _serve(pool, pair[1], new_secret())
    with pytest.raises(PermissionDenied, match="has another node secret"):
        authenticate_client(pair[0], new_secret(), "rank 0", "allreduce", 10 * SECOND)
    pair[0].close()
    with pytest.raises(PermissionDenied, match="closed the connection during the handshake"):
        served.result(10)


def test_a_connection_for_another_purpose_is_refused_by_name(pair: Pair, pool: ThreadPoolExecutor) -> None:
    secret = new_secret()
    served = _serve(pool, pair[1], secret, "broadcast")
    with pytest.raises(PermissionDenied, match="this port serves 'broadcast', and the client asked for 'allreduce'"):
        authenticate_client(pair[0], secret, "rank 0", "allreduce", 10 * SECOND)
    with pytest.raises(PermissionDenied, match="broadcast"):
        served.result(10)


@pytest.mark.parametrize("sent", [b"", b"\x00", b"\x00\x20abc"], ids=["nothing", "half a length", "half a message"])
def test_a_silent_peer_costs_the_stated_time_and_no_more(pair: Pair, sent: bytes) -> None:
    pair[1].sendall(sent)
    with pytest.raises(Timeout, match="did not authenticate within 50 ms"):
        authenticate_client(pair[0], new_secret(), "rank 0", "allreduce", 50 * MS)


def test_a_server_that_ends_during_the_handshake_has_refused_nobody(pair: Pair) -> None:
    pair[1].shutdown(socket.SHUT_WR)
    with pytest.raises(Unreachable, match="closed the connection during the handshake"):
        authenticate_client(pair[0], new_secret(), "rank 0", "allreduce", 10 * SECOND)


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", struct.pack(">H", 3) + b"\xff\xff\xff", bytes(64)])
def test_a_peer_that_speaks_something_else_is_refused_at_once(pair: Pair, sent: bytes) -> None:
    pair[1].sendall(sent)
    with pytest.raises(PermissionDenied, match="does not speak this protocol"):
        authenticate_client(pair[0], new_secret(), "rank 0", "allreduce", 10 * SECOND)


def test_a_peer_that_trickles_does_not_stretch_the_deadline(pair: Pair, pool: ThreadPoolExecutor) -> None:
    waiting = pool.submit(authenticate_client, pair[0], new_secret(), "rank 0", "allreduce", 100 * MS)
    pair[1].sendall(struct.pack(">H", 1000))
    while not waiting.done():
        pair[1].send(b"x")
        try:
            waiting.exception(0.02)
        except TimeoutError:
            pass
    with pytest.raises(Timeout, match="100 ms"):
        waiting.result(10)


def test_names_are_bounded(pair: Pair) -> None:
    with pytest.raises(UsageError, match="at most 256 bytes"):
        authenticate_client(pair[0], new_secret(), "x" * (MAX_IDENTITY_BYTES + 1), "allreduce", SECOND)
    with pytest.raises(UsageError, match="printable"):
        authenticate_client(pair[0], new_secret(), "rank\n0", "allreduce", SECOND)
