"""Who gets a connection to a storage process when they become few: real sockets, which nobody reads."""

from __future__ import annotations

import asyncio
import select
import socket

from tests.support.network.known_users import known
from tests.support.patience import allowed_s

from fireflyer.fs.schema import data
from fireflyer.fs.service.storage.connections import USERS_SHARE, DataConnections
from fireflyer.identity.handshake import Role, Session, UserKey
from fireflyer.identity.secrets import Secret
from fireflyer.native import ChunkNode
from fireflyer.runtime.raw_connections import RawConnection
from fireflyer.runtime.rpc import Address

MOST = 40
FOR_USERS = int(MOST * USERS_SHARE)


class Bench:
    def __init__(self) -> None:
        self.node = ChunkNode(io_threads=1, job_threads=1, buffer_bytes=1 << 20)
        self.tokens: dict[str, UserKey] = {}
        self.links = DataConnections(
            self.node, 1, Secret(b"s" * 32), lambda _: None, MOST, find_user=known(self.tokens)
        )
        self._mine: list[socket.socket] = []

    def connect(self, role: Role, peer: str, times: int = 1, token: str = "") -> int:
        """How many of so many are accepted."""
        before = len(self.links)
        for _ in range(times):
            mine, theirs = socket.socketpair()
            self._mine.append(mine)
            session = Session(role, peer, data.PURPOSE, b"k" * 32, token)
            self.links.accept(RawConnection(theirs, session, Address("127.0.0.1", 1)))
        return len(self.links) - before

    def lost(self) -> list[tuple[int, str]]:
        """Numbers and reasons of connections that have ended since, when there is one."""
        select.select([self.node.event_fd], [], [], allowed_s(10))
        return [(number, reason) for what, number, reason in self.node.take(100) if what == "lost"]

    def close(self) -> None:
        self.node.close()
        for one in self._mine:
            one.close()


def test_one_user_does_not_keep_others_out_and_users_do_not_keep_out_nodes() -> None:
    bench = Bench()
    left = FOR_USERS
    for user in ("ann", "bob", "eve"):
        accepted = bench.connect("user", user, MOST)
        assert left // 2 <= accepted <= (left + 1) // 2
        left -= accepted
    assert bench.connect("user", "ann", MOST) == 0
    assert bench.connect("user", "dan") == 1
    assert bench.connect("node", "node-2", MOST) == MOST - (FOR_USERS - left) - 1
    refused = bench.links.refused
    busy = bench.links.full(Session("user", "ann", data.PURPOSE, b"k" * 32))
    assert str(busy) == "user ann has 18 connections here and only 0 are free; close some of them"
    assert bench.links.refused == refused + 1
    bench.close()


def test_a_token_that_is_revoked_ends_its_connections_and_no_others() -> None:
    bench = Bench()
    for token in ("one", "two"):
        bench.tokens[token] = UserKey("ann", b"k" * 32)
        assert bench.connect("user", "ann", token=token) == 1
    assert bench.connect("node", "node-2") == 1
    asyncio.run(bench.links.tokens.look())
    del bench.tokens["one"]
    asyncio.run(bench.links.tokens.look())
    ((number, _),) = bench.lost()
    assert number == 1
    bench.links.lost(number, "it was closed")
    bench.tokens.clear()
    asyncio.run(bench.links.tokens.look())
    assert [number for number, _ in bench.lost()] == [2]
    bench.close()
