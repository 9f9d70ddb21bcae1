"""How much a client has under way at each storage process, who may send large replies now, and whom to ask.

A request is *queued* at the node that was chosen for it and *leaves* when the node's bounds allow. Of the replicas that
may answer a look, the one is chosen whose node has least of this client queued and under way; equals take turns.

Request-to-send: large replies from many nodes at once overflow the last switch queue before the client, and what is
dropped there costs a retransmission timeout. So at most `senders` nodes have the permission to owe large replies. A
node keeps it while it has some under way and nobody else waits, or up to `grant_bytes`; then what is under way runs
dry, and the one that has waited longest gets it. Small replies and updates do not need it. A node that has it and does
not send, while others wait, loses it: what is queued there goes elsewhere, and it gets nothing large to do
until it owes nothing. If it sends after all, it sends beside another one, for once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from fireflyer.base.units import SECOND
from fireflyer.fs.core.requests.effects import Limits
from fireflyer.fs.schema.ids import NodeId, TargetId
from fireflyer.fs.schema.routing import Member

__all__ = ["Load", "Nodes"]


@dataclass(slots=True, frozen=True)
class Load:
    """What one request is for a node: bytes of data in either direction, and whether its reply is a large one."""

    data_bytes: int
    large: bool


@dataclass(slots=True)
class _Node:
    asks: int = 0
    data_bytes: int = 0
    large: int = 0
    """Large replies that it owes."""
    heard_ns: int = 0
    """When it last answered, or began to owe a large reply."""
    overdue: bool = False
    """It owes large replies, and has lost the permission to send them."""
    queued_bytes: int = 0
    suspect_until_ns: int = 0
    small_queue: dict[int, Load] = field(default_factory=dict)
    """By operation, in the order in which they came."""
    large_queue: dict[int, Load] = field(default_factory=dict)

    @property
    def load(self) -> tuple[int, int]:
        asks = self.asks + len(self.small_queue) + len(self.large_queue)
        return self.data_bytes + self.queued_bytes, asks


class Nodes:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._nodes: dict[NodeId, _Node] = {}
        self._now_ns = 0
        self._turn = 0
        self._ready: dict[NodeId, None] = {}
        """Nodes where something was queued, or ended."""
        self._granted: dict[NodeId, int] = {}
        """Who may owe large replies, and for how many bytes it may still be asked."""
        self._waiting: dict[NodeId, None] = {}
        """Who has large requests queued and no permission, in the order in which they came."""

    def choose(self, now_ns: int, members: Sequence[Member], avoid: dict[TargetId, None]) -> Member | None:
        """Whom to ask of these; None if there is nobody."""
        self._turn += 1
        best: tuple[bool, bool, tuple[int, int]] | None = None
        chosen: Member | None = None
        for step in range(len(members)):
            member = members[(self._turn + step) % len(members)]
            node = self._node(member.node)
            rank = (member.target in avoid, node.suspect_until_ns > now_ns, node.load)
            if best is None or rank < best:
                best, chosen = rank, member
        return chosen

    def suspect(self, node: NodeId, until_ns: int) -> None:
        self._node(node).suspect_until_ns = until_ns

    def trust(self, node_id: NodeId, now_ns: int) -> None:
        """It has answered."""
        node = self._node(node_id)
        node.suspect_until_ns, node.heard_ns = 0, now_ns

    def suspected(self, now_ns: int, node: NodeId) -> bool:
        return self._node(node).suspect_until_ns > now_ns

    def queue(self, node_id: NodeId, operation: int, load: Load) -> None:
        node = self._node(node_id)
        self._ready[node_id] = None
        node.queued_bytes += load.data_bytes
        if load.large and self._limits.senders > 0:
            node.large_queue[operation] = load
            if node_id not in self._granted and not node.overdue:
                self._waiting[node_id] = None
        else:
            node.small_queue[operation] = load

    def drop(self, node_id: NodeId, operation: int) -> None:
        """It shall not leave."""
        node = self._node(node_id)
        load = node.small_queue.pop(operation, None) or node.large_queue.pop(operation, None)
        if load is not None:
            node.queued_bytes -= load.data_bytes

    @property
    def due_ns(self) -> int | None:
        """When a node loses its permission, if nothing else happens."""
        if not any(self._nodes[one].large_queue for one in self._waiting):
            return None
        owing = [self._nodes[one] for one in self._granted if self._nodes[one].large]
        return min((self._patient_until_ns(one) for one in owing), default=None)

    def _patient_until_ns(self, node: _Node) -> int:
        bound = self._limits
        return node.heard_ns + bound.grant_ns + node.data_bytes * SECOND // bound.least_bytes_per_s

    def _take_back(self, now_ns: int) -> list[int]:
        """Takes the permission from nodes that do not use it. Returns what was queued there, and is not any more."""
        due_ns, moved = self.due_ns, list[int]()
        if due_ns is None or now_ns < due_ns:
            return moved
        for node_id in list(self._granted):
            node = self._nodes[node_id]
            if node.large and now_ns >= self._patient_until_ns(node):
                del self._granted[node_id]
                node.overdue = True
                node.suspect_until_ns = max(node.suspect_until_ns, now_ns + self._limits.suspect_ns)
                node.queued_bytes -= sum(one.data_bytes for one in node.large_queue.values())
                moved += node.large_queue
                node.large_queue.clear()
        return moved

    def leaving(self, now_ns: int, place: Callable[[int], None]) -> Iterator[tuple[NodeId, int, Load]]:
        """Requests whose time has come. The caller says `sent` of each before it takes the next. `place` queues one at
        another node: its own does not send."""
        self._now_ns = now_ns
        while moved := self._take_back(now_ns):
            for operation in moved:
                place(operation)
        ready, self._ready = self._ready, {}
        for node_id in ready:
            yield from self._leaving(node_id, self._nodes[node_id].small_queue)
        self._grant()
        for node_id in list(self._granted):
            yield from self._leaving(node_id, self._nodes[node_id].large_queue, granted=True)

    def sent(self, node_id: NodeId, load: Load) -> None:
        node = self._node(node_id)
        node.asks += 1
        node.data_bytes += load.data_bytes
        if load.large:
            node.heard_ns = node.heard_ns if node.large else self._now_ns
            node.large += 1
            if node_id in self._granted:
                self._granted[node_id] -= load.data_bytes

    def ended(self, node_id: NodeId, load: Load) -> None:
        """It was answered, or will not be."""
        node = self._node(node_id)
        self._ready[node_id] = None
        node.asks -= 1
        node.data_bytes -= load.data_bytes
        node.large -= load.large
        if node.overdue and not node.large:
            node.overdue = False
            if node.large_queue:
                self._waiting[node_id] = None

    def under_way_bytes(self, node: NodeId) -> int:
        return self._node(node).data_bytes

    @property
    def senders(self) -> int:
        """Nodes that owe large replies now, by a permission."""
        return sum(1 for node in self._nodes.values() if node.large and not node.overdue)

    def _node(self, node_id: NodeId) -> _Node:
        node = self._nodes.get(node_id)
        if node is None:
            node = self._nodes[node_id] = _Node()
        return node

    def _fits(self, node: _Node, load: Load) -> bool:
        bound = self._limits
        return node.asks < bound.node_asks and (node.asks == 0 or node.data_bytes + load.data_bytes <= bound.node_bytes)

    def _leaving(
        self, node_id: NodeId, queue: dict[int, Load], *, granted: bool = False
    ) -> Iterator[tuple[NodeId, int, Load]]:
        node = self._nodes[node_id]
        while queue and not (granted and self._granted[node_id] <= 0):
            operation, load = next(iter(queue.items()))
            if not self._fits(node, load):
                return
            del queue[operation]
            node.queued_bytes -= load.data_bytes
            yield node_id, operation, load

    def _grant(self) -> None:
        for node_id, left in list(self._granted.items()):
            node = self._nodes[node_id]
            if left <= 0 and node.large_queue and not self._waiting:
                self._granted[node_id] = self._limits.grant_bytes
            elif not node.large and (left <= 0 or not node.large_queue):
                del self._granted[node_id]
                if node.large_queue:
                    self._waiting[node_id] = None
        while self._waiting and len(self._granted) < self._limits.senders:
            node_id = next(iter(self._waiting))
            del self._waiting[node_id]
            if self._nodes[node_id].large_queue:
                self._granted[node_id] = self._limits.grant_bytes
