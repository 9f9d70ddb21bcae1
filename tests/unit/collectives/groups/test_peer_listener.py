"""The listeners of a rank: strangers are refused, nobody waits for them, and nothing is left of them."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fireflyer.base.errors import FireflyerError, PermissionDenied, UsageError
from fireflyer.base.units import SECOND
from fireflyer.collectives.p2p import peer_listener as listener_module
from fireflyer.collectives.p2p.peer_listener import PeerListener
from fireflyer.identity.handshake import pack_message
from fireflyer.identity.secrets import Secret, new_secret
from fireflyer.runtime.sockets import authenticate_client
from fireflyer.runtime.store import LocalStore

SECRET = new_secret()


class Visitors:
    def __init__(self) -> None:
        self.admitted: list[int] = []
        self.changed = threading.Condition()

    def admit(self, rank: int, fd: int) -> None:
        socket.socket(fileno=fd).close()
        with self.changed:
            self.admitted.append(rank)
            self.changed.notify_all()

    def wait_for(self, count: int) -> list[int]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.admitted) >= count, 20)
            return list(self.admitted)


@contextmanager
def two_ranks(secret_of_peer: Secret = SECRET) -> Iterator[tuple[PeerListener, PeerListener, Visitors]]:
    """Rank 0, which accepts, and rank 1, which only dials."""
    store, visitors = LocalStore(), Visitors()
    host = PeerListener(rank=0, world_size=2, host="127.0.0.1", secret=SECRET, prefix="group")
    peer = PeerListener(rank=1, world_size=2, host="127.0.0.1", secret=secret_of_peer, prefix="group")
    try:
        for listener in (host, peer):
            listener.publish(store)
        host.open(store, visitors.admit, SECOND)
        peer.open(store, lambda rank, fd: os.close(fd), SECOND)
        yield host, peer, visitors
    finally:
        host.close()
        peer.close()


@pytest.mark.parametrize("local", [True, False])
def test_a_rank_is_admitted(local: bool) -> None:
    with two_ranks() as (_, peer, visitors):
        os.close(peer.dial(0, local=local, timeout_ns=10 * SECOND))
        assert visitors.wait_for(1) == [1]


@pytest.mark.parametrize("local", [True, False])
def test_another_secret_is_refused(local: bool) -> None:
    with two_ranks(new_secret()) as (_, peer, visitors):
        with pytest.raises(PermissionDenied):
            peer.dial(0, local=local, timeout_ns=10 * SECOND)
        assert visitors.admitted == []


@pytest.mark.parametrize("name", ["rank 0", "rank 2", "rank -1", "rank 1x", "node 1", "rank 99999999999", ""])
def test_only_other_ranks_of_the_group_are_admitted(name: str) -> None:
    with two_ranks() as (host, peer, visitors):
        with socket.create_connection((host.own.host, host.own.port)) as sock:
            authenticate_client(sock, SECRET, name, "group/rank", 10 * SECOND)
            sock.settimeout(10)
            assert sock.recv(1) == b""
        os.close(peer.dial(0, local=True, timeout_ns=10 * SECOND))
        assert visitors.wait_for(1) == [1]


def test_another_purpose_is_refused() -> None:
    with two_ranks() as (host, _, visitors):
        with socket.create_connection((host.own.host, host.own.port)) as sock, pytest.raises(PermissionDenied):
            authenticate_client(sock, SECRET, "rank 1", "other/rank", 10 * SECOND)
        assert visitors.admitted == []


DEEP = pack_message(b"\x82\xa7version\x01\xa1x" + b"\x91" * 1010)
"""A hello with a field of arrays in arrays: to skip it, the decoder would have to go deeper than it may."""


@pytest.mark.parametrize(
    "noise", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 70_000, b"\x00\x00", b"\x00\x05hello", DEEP]
)
def test_strangers_keep_nobody_waiting(noise: bytes) -> None:
    with two_ranks() as (host, peer, visitors):
        strangers = [socket.create_connection((host.own.host, host.own.port)) for _ in range(20)]
        for stranger in strangers:
            try:
                stranger.sendall(noise)
            except OSError:
                pass  # it was turned away already
        os.close(peer.dial(0, local=False, timeout_ns=10 * SECOND))
        assert visitors.wait_for(1) == [1]
        for stranger in strangers:
            stranger.close()


def test_a_rank_that_does_not_answer_is_waited_for_only_so_long() -> None:
    with two_ranks() as (host, peer, _):
        silent = socket.create_server(("127.0.0.1", 0))
        peer._addresses[0] = listener_module.ListenAddress("127.0.0.1", silent.getsockname()[1], host.own.unix)
        with pytest.raises(FireflyerError, match="did not authenticate within"):
            peer.dial(0, local=False, timeout_ns=SECOND // 5)
        silent.close()


def test_a_foreign_host_is_told() -> None:
    with pytest.raises(UsageError, match=r"cannot listen on host '192\.0\.2\.1'"):
        PeerListener(rank=0, world_size=2, host="192.0.2.1", secret=SECRET, prefix="group")


def test_no_thread_and_no_descriptor_is_left() -> None:
    before = (set(threading.enumerate()), len(os.listdir("/proc/self/fd")))
    with two_ranks() as (host, peer, visitors):
        strangers = [socket.create_connection((host.own.host, host.own.port)) for _ in range(5)]
        os.close(peer.dial(0, local=True, timeout_ns=10 * SECOND))
        visitors.wait_for(1)
    for stranger in strangers:
        stranger.close()
    host.close()
    assert (set(threading.enumerate()), len(os.listdir("/proc/self/fd"))) == before
