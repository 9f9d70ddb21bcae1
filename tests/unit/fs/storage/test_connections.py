"""Who gets a connection to a storage process when they become few: real sockets, which nobody reads."""

from __future__ import annotations

import socket

from fireflyer.fs.schema import data
from fireflyer.fs.service.storage.connections import USERS_SHARE, DataConnections
from fireflyer.identity.handshake import Role, Session
from fireflyer.identity.secrets import Secret
from fireflyer.native import ChunkNode
from fireflyer.runtime.raw_connections import RawConnection
from fireflyer.runtime.rpc import Address

MOST = 40
FOR_USERS = int(MOST * USERS_SHARE)


class Bench:
    def __init__(self) -> None:
        self.node = ChunkNode(io_threads=1, job_threads=1, buffer_bytes=1 << 20)
        self.links = DataConnections(self.node, 1, Secret(b"s" * 32), lambda _: None, MOST)
        self._mine: list[socket.socket] = []

    def connect(self, role: Role, peer: str, times: int = 1) -> int:
        """How many of so many are accepted."""
        before = len(self.links)
        for _ in range(times):
            mine, theirs = socket.socketpair()
            self._mine.append(mine)
            session = Session(role, peer, data.PURPOSE, b"k" * 32)
            self.links.accept(RawConnection(theirs, session, Address("127.0.0.1", 1)))
        return len(self.links) - before

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
    bench.close()
