"""A thread that accepts: strangers are refused, nobody waits for them, and nothing is left of them. Real sockets."""

from __future__ import annotations

import itertools
import os
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.support.descriptors import only_free, open_descriptors

from fireflyer.base.errors import Busy, FireflyerError, UsageError
from fireflyer.base.units import MS, SECOND
from fireflyer.identity.acceptor import HandshakeLimits
from fireflyer.identity.handshake import Accepts, ServerHandshake, Session, UserKey, pack_message
from fireflyer.identity.secrets import new_secret
from fireflyer.runtime.accept_thread import AcceptThread
from fireflyer.runtime.handshake_sockets import source_of
from fireflyer.runtime.sockets import authenticate_client

SECRET = new_secret()
DEEP = pack_message(b"\x82\xa7version\x01\xa1x" + b"\x91" * 1010)
"""A hello with a field of arrays in arrays: to skip it, the decoder would have to go deeper than it may."""


class Listening:
    def __init__(self, limits: HandshakeLimits | None) -> None:
        self.tcp = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.admitted: queue.Queue[tuple[socket.socket, Session]] = queue.Queue()
        self.thread = AcceptThread(
            [self.tcp],
            Accepts(SECRET),
            identity="rank 0",
            purpose="test/rank",
            on_connection=lambda sock, session: self.admitted.put((sock, session)),
            limits=limits,
        )

    def stranger(self, said: bytes = b"") -> socket.socket:
        sock = socket.create_connection(self.tcp.getsockname(), timeout=30)
        try:
            sock.sendall(said)
        except OSError:
            pass  # it was refused already
        return sock

    def admits(self, name: str = "rank 1") -> bool:
        with self.stranger() as sock:
            authenticate_client(sock, SECRET, name, "test/rank", 30 * SECOND)
            theirs, session = self.admitted.get(timeout=30)
            theirs.close()
            return session.peer == name


@contextmanager
def listening(limits: HandshakeLimits | None = None) -> Iterator[Listening]:
    made = Listening(limits)
    with made.tcp, made.thread:
        yield made


@pytest.mark.parametrize(
    "noise", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 70_000, b"\x00\x00", b"\x00\x05hello", DEEP]
)
def test_strangers_keep_nobody_waiting(noise: bytes) -> None:
    with listening() as made:
        strangers = [made.stranger(noise) for _ in range(20)]
        assert made.admits()
        for stranger in strangers:
            stranger.close()


def heard_by(stranger: socket.socket) -> bytes:
    heard = b""
    try:
        while piece := stranger.recv(4096):
            heard += piece
    except ConnectionResetError:
        pass
    return heard


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n" * 1000, DEEP])
def test_a_stranger_is_told_why_before_it_is_closed(noise: bytes) -> None:
    with listening() as made, made.stranger(noise) as stranger:
        stranger.shutdown(socket.SHUT_WR)
        assert b"does not speak this protocol" in heard_by(stranger)


def test_of_too_many_strangers_the_oldest_goes() -> None:
    with listening(HandshakeLimits(total=3, per_source=3)) as made:
        strangers = [made.stranger() for _ in range(4)]
        assert strangers[0].recv(1) == b""
        assert made.admits()
        for stranger in strangers:
            stranger.close()


def test_silent_strangers_are_refused_in_time() -> None:
    with listening(HandshakeLimits(handshake_ns=50 * MS)) as made, made.stranger() as stranger:
        assert b"did not authenticate within 50 ms" in heard_by(stranger)


def test_no_exception_for_one_client_ends_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, calls = ServerHandshake.on_hello, itertools.count()

    def broken_once(self: ServerHandshake, data: bytes) -> bytes | None:
        if next(calls) == 0:
            raise ZeroDivisionError
        return usual(self, data)

    monkeypatch.setattr(ServerHandshake, "on_hello", broken_once)
    with listening() as made:
        with pytest.raises(FireflyerError):
            made.admits()
        assert made.admits()


def test_half_open_connections_give_their_descriptors_to_newcomers() -> None:
    with listening() as made:
        strangers = [made.stranger() for _ in range(10)]
        assert made.admits()  # so the strangers were accepted
        client = socket.socket()
        client.settimeout(30)
        with client, only_free(0):
            client.connect(made.tcp.getsockname())
            assert heard_by(strangers[0]) == b""
            authenticate_client(client, SECRET, "rank 2", "test/rank", 30 * SECOND)
        made.admitted.get(timeout=30)[0].close()
        for stranger in strangers:
            stranger.close()


def test_no_thread_and_no_descriptor_is_left() -> None:
    before = (set(threading.enumerate()), open_descriptors())
    with listening() as made:
        strangers = [made.stranger() for _ in range(5)]
        assert made.admits()
    for stranger in strangers:
        stranger.close()
    made.thread.close()
    assert (set(threading.enumerate()), open_descriptors()) == before


def test_without_a_descriptor_it_is_not_made() -> None:
    with only_free(0), pytest.raises(Busy, match="ulimit -n"):
        AcceptThread([], Accepts(SECRET), identity="a", purpose="b", on_connection=lambda sock, _: sock.close())


def test_a_source_is_an_address_a_network_or_a_user() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert source_of(ours) == f"uid {os.getuid()}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.create_connection(tcp.getsockname()) as client:
        assert source_of(client) == "127.0.0.1"
    try:
        six = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with six, socket.create_connection(six.getsockname()[:2]) as client:
        assert source_of(client) == "::/64"


def test_it_lets_nodes_in_alone_since_it_has_no_loop_to_look_users_up_in() -> None:
    async def find(_: str) -> UserKey | None:
        return None

    with pytest.raises(UsageError, match="cannot look tokens up; let it accept the node secret alone"):
        AcceptThread([], Accepts(SECRET, find), identity="a", purpose="b", on_connection=lambda sock, _: sock.close())
