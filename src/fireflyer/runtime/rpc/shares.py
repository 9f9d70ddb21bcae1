"""How much of a server each peer may use: connections, and the bytes of requests and answers that it makes wait.

A peer is whom the handshake has proven; all its connections count together. The places of a server are there for
nodes, which hold the secret of the cluster, and again for users, who cannot take the last one from a storage node.
"""

from __future__ import annotations

from dataclasses import dataclass

from fireflyer.base.errors import Busy
from fireflyer.identity.handshake import Role

__all__ = ["Peer", "Shares"]

Peer = tuple[Role, str]
"""Role and name."""


@dataclass(slots=True)
class _Use:
    connections: int = 0
    waiting_bytes: int = 0


class Shares:
    """`connections`: of all peers. Without `connections_per_peer` one peer may have all of them."""

    def __init__(self, *, connections: int, connections_per_peer: int | None, bytes_per_peer: int) -> None:
        self._most, self._per_peer = connections, connections_per_peer or connections
        self._bytes_per_peer = bytes_per_peer
        self._uses: dict[Peer, _Use] = {}
        self._of_role: dict[Role, int] = {"node": 0, "user": 0}

    def full(self, peer: Peer) -> Busy | None:
        """Why this peer gets no further connection."""
        if self._of_role[peer[0]] >= self._most:
            return Busy(f"the server has its {self._most} connections already; try again later")
        use = self._uses.get(peer)
        if use is not None and use.connections >= self._per_peer:
            return Busy(f"{peer[0]} {peer[1]} has its {self._per_peer} connections already; close some of them")
        return None

    def connected(self, peer: Peer) -> None:
        self._uses.setdefault(peer, _Use()).connections += 1
        self._of_role[peer[0]] += 1

    def disconnected(self, peer: Peer) -> None:
        self._uses[peer].connections -= 1
        self._of_role[peer[0]] -= 1
        self._forget(peer)

    def take(self, peer: Peer, count: int) -> bool:
        """Whether the peer may make `count` more bytes wait. One message fits always, whatever its size."""
        use = self._uses.setdefault(peer, _Use())
        if use.waiting_bytes and use.waiting_bytes + count > self._bytes_per_peer:
            return False
        use.waiting_bytes += count
        return True

    def give_back(self, peer: Peer, count: int) -> None:
        self._uses[peer].waiting_bytes -= count
        self._forget(peer)

    def waiting_bytes(self, peer: Peer) -> int:
        use = self._uses.get(peer)
        return 0 if use is None else use.waiting_bytes

    def _forget(self, peer: Peer) -> None:
        use = self._uses[peer]
        if not use.connections and not use.waiting_bytes:
            del self._uses[peer]
