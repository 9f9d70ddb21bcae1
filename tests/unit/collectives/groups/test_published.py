"""A rank that publishes garbage in the rendezvous store is named to the others."""

from __future__ import annotations

import pytest

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND
from fireflyer.collectives import Communicator
from fireflyer.collectives.p2p.peer_listener import PeerListener
from fireflyer.identity.secrets import new_secret
from fireflyer.runtime.store import LocalStore

PREFIX = "attempt-0/collectives/world/1"
GARBAGE = [b"", b"\xff\xfe", b"null", b"[]", b'{"node":-1}', b'{"x":' + b"[" * 5000, b"9" * 5000]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_a_description_of_itself_that_is_none(garbage: bytes) -> None:
    store = LocalStore()
    store.set(f"{PREFIX}/rank/1", garbage)
    with pytest.raises(UsageError, match="rank 1 published data that cannot be decoded") as caught:
        Communicator.create(
            rank=0,
            world_size=2,
            node=0,
            store=store,
            secret=new_secret(),
            timeout_ns=10 * SECOND,
            join_timeout_ns=30 * SECOND,
        )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_an_address_that_is_none(garbage: bytes) -> None:
    store = LocalStore()
    listener = PeerListener(rank=0, world_size=2, host="127.0.0.1", secret=new_secret(), prefix="g")
    try:
        listener.publish(store)
        store.set("g/door/1", garbage)
        with pytest.raises(UsageError, match="rank 1 published data that cannot be decoded"):
            listener.open(store, lambda rank, fd: None, 30 * SECOND)
    finally:
        listener.close()
