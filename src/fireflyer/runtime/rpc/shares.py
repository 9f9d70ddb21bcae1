"""How much of a server each peer may use: connections, and the bytes of requests and answers that it makes wait.

A peer is whom the handshake has proven; all its connections count together. The places of a server are there for
nodes, which hold the secret of the cluster, and again for users, who cannot take the last one from a storage node.

What users have in common is shared by one rule: a user gets more while they have less than is free. One takes half at
the most, the next half of the rest, and nobody has to know how many there are.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from fireflyer.base.errors import Busy
from fireflyer.base.units import KIB
from fireflyer.identity.handshake import Role

__all__ = ["SMALL_BYTES", "Peer", "Shares"]

Peer = tuple[Role, str]
"""Role and name."""
SMALL_BYTES: Final = 64 * KIB
"""One message of so few bytes fits always, for a peer that makes nothing else wait."""


@dataclass(slots=True)
class _Use:
    connections: int = 0
    waiting_bytes: int = 0


class Shares:
    """`connections`: of all peers of a role. Without `connections_per_peer` one peer may have all of them; with it,
    users share them by the rule. `bytes_of_users`: of all of them together."""

    def __init__(
        self, *, connections: int, connections_per_peer: int | None, bytes_per_peer: int, bytes_of_users: int
    ) -> None:
        self._most, self._per_peer = connections, connections_per_peer
        self._bytes_per_peer, self._bytes_of_users = bytes_per_peer, bytes_of_users
        self._uses: dict[Peer, _Use] = {}
        self._of_role: dict[Role, int] = {"node": 0, "user": 0}
        self._bytes_of_role: dict[Role, int] = {"node": 0, "user": 0}
        self.refused: Counter[str] = Counter()
        """How often, by the bound that did it."""

    def full(self, peer: Peer) -> Busy | None:
        """Why this peer gets no further connection."""
        role, name = peer
        use = self._uses.get(peer)
        own, free = 0 if use is None else use.connections, self._most - self._of_role[role]
        if free <= 0:
            return self._over("connections", f"the server has its {self._most} connections already; try again later")
        if self._per_peer is None:
            return None
        if own >= self._per_peer:
            text = f"{role} {name} has its {self._per_peer} connections already; close some of them"
            return self._over("connections_of_peer", text)
        if role == "user" and own >= free:
            text = f"user {name} has {own} connections and only {free} of {self._most} are free; close some of them"
            return self._over("connections", text)
        return None

    def connected(self, peer: Peer) -> None:
        self._uses.setdefault(peer, _Use()).connections += 1
        self._of_role[peer[0]] += 1

    def disconnected(self, peer: Peer) -> None:
        self._uses[peer].connections -= 1
        self._of_role[peer[0]] -= 1
        self._forget(peer)

    def take(self, peer: Peer, count: int) -> Busy | None:
        """The peer makes `count` more bytes wait; or why it may not. Of a node one message fits always, whatever its
        size."""
        role, name = peer
        use = self._uses.get(peer)
        waiting = 0 if use is None else use.waiting_bytes
        if waiting and waiting + count > self._bytes_per_peer:
            text = f"{role} {name} makes {waiting} bytes wait already, of {self._bytes_per_peer}, and {count} more come"
            return self._over("bytes_of_peer", text)
        free = self._bytes_of_users - self._bytes_of_role["user"]
        if role == "user" and waiting + count > free and (waiting or count > SMALL_BYTES):
            text = (
                f"user {name} makes {waiting} bytes wait already and {count} more come, while only {max(free, 0)} of "
                f"the {self._bytes_of_users} bytes of all users are free"
            )
            return self._over("bytes_of_users", text)
        self._uses.setdefault(peer, _Use()).waiting_bytes += count
        self._bytes_of_role[role] += count
        return None

    def give_back(self, peer: Peer, count: int) -> None:
        self._uses[peer].waiting_bytes -= count
        self._bytes_of_role[peer[0]] -= count
        self._forget(peer)

    @property
    def bytes_of_roles(self) -> dict[Role, int]:
        """What nodes and users make wait now."""
        return dict(self._bytes_of_role)

    @property
    def connections_of_roles(self) -> dict[Role, int]:
        return dict(self._of_role)

    def waiting_bytes(self, peer: Peer) -> int:
        use = self._uses.get(peer)
        return 0 if use is None else use.waiting_bytes

    def _over(self, bound: str, text: str) -> Busy:
        self.refused[bound] += 1
        return Busy(text)

    def _forget(self, peer: Peer) -> None:
        use = self._uses[peer]
        if not use.connections and not use.waiting_bytes:
            del self._uses[peer]
