"""How much of a server each peer may use."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.runtime.rpc.shares import SMALL_BYTES, Peer, Shares

PEERS: tuple[Peer, ...] = (("user", "alice"), ("user", "bob"), ("node", "alice"))


def shares(connections: int = 10, per_peer: int | None = 3, count: int = 100, of_users: int = 1_000_000_000) -> Shares:
    return Shares(connections=connections, connections_per_peer=per_peer, bytes_per_peer=count, bytes_of_users=of_users)


def test_users_cannot_take_the_places_of_nodes() -> None:
    these = shares(connections=4, per_peer=None)
    for _ in range(4):
        assert these.full(("user", "alice")) is None
        these.connected(("user", "alice"))
    assert these.full(("user", "bob")) is not None
    assert these.full(("node", "1")) is None


def test_a_peer_is_full_before_the_server_is() -> None:
    these = shares()
    for _ in range(3):
        these.connected(("user", "alice"))
    busy = these.full(("user", "alice"))
    assert busy is not None
    assert "user alice has its 3 connections" in str(busy)
    assert these.refused == {"connections_of_peer": 1}
    assert these.full(("user", "bob")) is None
    these.disconnected(("user", "alice"))
    assert these.full(("user", "alice")) is None


def test_users_share_connections_however_many_they_are() -> None:
    these, left = shares(connections=100, per_peer=80), 100
    for name in ("alice", "bob", "carol", "dave"):
        taken = 0
        while these.full(("user", name)) is None:
            these.connected(("user", name))
            taken += 1
        assert taken == left // 2 + left % 2
        left -= taken
    busy = these.full(("user", "alice"))
    assert busy is not None
    assert str(busy) == "user alice has 50 connections and only 6 of 100 are free; close some of them"
    assert these.full(("user", "erin")) is None
    assert these.full(("node", "1")) is None


@pytest.mark.parametrize("size", [1, 100, 10_000])
def test_one_message_fits_always(size: int) -> None:
    these = shares()
    assert these.take(("user", "alice"), size) is None
    assert these.take(("user", "alice"), 100) is not None
    assert these.take(("user", "bob"), size) is None


def test_users_share_the_bytes_that_wait_and_nodes_have_their_own() -> None:
    mib = 1 << 20
    these = shares(count=100 * mib, of_users=64 * mib)
    for name, most in (("alice", 32), ("bob", 16), ("carol", 8)):
        while these.take(("user", name), mib) is None:
            pass
        assert these.waiting_bytes(("user", name)) == most * mib
    busy = these.take(("user", "alice"), mib)
    assert busy is not None
    assert "only 8388608 of the 67108864 bytes of all users are free" in str(busy)
    assert these.take(("user", "dave"), 8 * mib) is None, "who has nothing gets what there is"
    assert these.take(("user", "erin"), SMALL_BYTES + 1) is not None
    assert these.take(("user", "erin"), SMALL_BYTES) is None, "a small message fits always"
    assert these.take(("node", "1"), 80 * mib) is None
    assert these.bytes_of_roles == {"user": 64 * mib + SMALL_BYTES, "node": 80 * mib}
    assert these.refused == {"bytes_of_users": 5}


@given(st.lists(st.tuples(st.sampled_from(PEERS), st.integers(1, 60)), max_size=60), st.randoms())
def test_what_waits_stays_within_the_bound_and_nothing_is_kept_of_who_has_gone(
    asked: list[tuple[Peer, int]], random: Random
) -> None:
    these = shares()
    held: list[tuple[Peer, int]] = []
    for peer, size in asked:
        of_peer = sum(count for one, count in held if one == peer)
        assert these.waiting_bytes(peer) == of_peer
        assert (these.take(peer, size) is None) is (not of_peer or of_peer + size <= 100)
        if not of_peer or of_peer + size <= 100:
            held.append((peer, size))
        if held and size % 3 == 0:
            these.give_back(*held.pop(random.randrange(len(held))))
    for peer, size in held:
        these.give_back(peer, size)
    assert not these._uses
    assert these.bytes_of_roles == {"node": 0, "user": 0}
