"""How much of a server each peer may use."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.runtime.rpc.shares import Peer, Shares

PEERS: tuple[Peer, ...] = (("user", "alice"), ("user", "bob"), ("node", "alice"))


def shares(connections: int = 4, per_peer: int | None = 3, count: int = 100) -> Shares:
    return Shares(connections=connections, connections_per_peer=per_peer, bytes_per_peer=count)


def test_users_cannot_take_the_places_of_nodes() -> None:
    these = shares(per_peer=None)
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
    assert these.full(("user", "bob")) is None
    these.disconnected(("user", "alice"))
    assert these.full(("user", "alice")) is None


@pytest.mark.parametrize("size", [1, 100, 10_000])
def test_one_message_fits_always(size: int) -> None:
    these = shares()
    assert these.take(("user", "alice"), size)
    assert not these.take(("user", "alice"), 100)
    assert these.take(("user", "bob"), size)


@given(st.lists(st.tuples(st.sampled_from(PEERS), st.integers(1, 60)), max_size=60), st.randoms())
def test_what_waits_stays_within_the_bound_and_nothing_is_kept_of_who_has_gone(
    asked: list[tuple[Peer, int]], random: Random
) -> None:
    these = shares()
    held: list[tuple[Peer, int]] = []
    for peer, size in asked:
        of_peer = sum(count for one, count in held if one == peer)
        assert these.waiting_bytes(peer) == of_peer
        assert these.take(peer, size) is (not of_peer or of_peer + size <= 100)
        if not of_peer or of_peer + size <= 100:
            held.append((peer, size))
        if held and size % 3 == 0:
            these.give_back(*held.pop(random.randrange(len(held))))
    for peer, size in held:
        these.give_back(peer, size)
    assert not these._uses
