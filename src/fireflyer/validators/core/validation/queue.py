"""Which validations begin next: on idle nodes, and never on two nodes that something needs to be apart."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from fireflyer.fs.schema.routing import Routing
from fireflyer.validators.core.validation.records import NodeRecord

__all__ = ["MAX_INTERRUPTIONS", "ValidationQueue", "due_nodes", "exclusion_groups", "host_groups", "host_of"]

MAX_INTERRUPTIONS: Final = 5
"""Of one validation by tasks that need its nodes; then it is left for another day."""


def host_of(address: str) -> str:
    """Of HOST:PORT or [HOST]:PORT."""
    return address.rpartition(":")[0].strip("[]")


def host_groups(host_of_node: Mapping[str, str]) -> tuple[frozenset[str], ...]:
    """Nodes of one machine: their validations would take each other's processors."""
    groups: dict[str, set[str]] = {}
    for node, host in host_of_node.items():
        groups.setdefault(host, set()).add(node)
    return tuple(frozenset(group) for group in groups.values() if len(group) > 1)


def exclusion_groups(routing: Routing, host_of_node: Mapping[str, str]) -> tuple[frozenset[str], ...]:
    """Nodes whose storage processes hold replicas of one chain: with two of them loaded, or out because they failed,
    the chain has lost more than the one replica that it can do without. Storage nodes are those of the same host."""
    on_host: dict[str, set[str]] = {}
    for node, host in host_of_node.items():
        on_host.setdefault(host, set()).add(node)
    nodes_at = {storage.id: on_host.get(host_of(storage.address), set()) for storage in routing.nodes}
    groups = {
        frozenset(name for member in chain.members for name in nodes_at.get(member.node, ()))
        for chain in routing.chains
    }
    return tuple(sorted((group for group in groups if len(group) > 1), key=sorted))


def due_nodes(nodes: Iterable[str], records: Sequence[NodeRecord], now_ns: int, every_ns: int) -> list[str]:
    """Nodes that were not validated for `every_ns`, those that wait longest in front. A record of the future, of a
    clock that was wrong, counts as none."""
    last = dict.fromkeys(nodes, -1)
    for record in records:
        if record.node in last and record.seen_ns <= now_ns:
            last[record.node] = max(last[record.node], record.seen_ns)
    due = [(seen_ns, node) for node, seen_ns in last.items() if seen_ns < 0 or now_ns - seen_ns >= every_ns]
    return [node for _, node in sorted(due)]


class _Validation(msgspec.Struct):
    nodes: tuple[str, ...]
    running: bool = False
    interruptions: int = 0


class ValidationQueue:
    """Validations that are to be done once, each on one node or on two. Decides, without IO: `begin` says which may
    begin now, and is told by `ended` and `interrupted` what became of them."""

    def __init__(
        self,
        validations: Iterable[tuple[str, ...]],
        apart: Collection[frozenset[str]] = (),
        *,
        most_nodes: int = 1 << 30,
    ) -> None:
        """`apart`: exclusion groups, of each one validation at a time. `most_nodes`: nodes that are under validation at
        a time, but always those of one validation."""
        self._all = {nodes: _Validation(nodes) for nodes in validations}
        self._apart: dict[str, list[frozenset[str]]] = {}
        for group in apart:
            for node in group:
                self._apart.setdefault(node, []).append(group)
        self._most_nodes = most_nodes

    @property
    def waiting(self) -> list[tuple[str, ...]]:
        """Validations that have not begun, or were interrupted and are to begin again."""
        return [one.nodes for one in self._all.values() if not one.running]

    @property
    def done(self) -> bool:
        return not self._all

    def begin(self, idle: Collection[str]) -> list[tuple[str, ...]]:
        """Validations that begin now, in their order; a later one goes first where the nodes of an earlier one are not
        idle, or are kept free of it by one that runs."""
        taken = {node for one in self._all.values() if one.running for node in one.nodes}
        begun = []
        for one in self._all.values():
            if one.running or not all(node in idle and self._free(node, taken) for node in one.nodes):
                continue
            if taken and len(taken) + len(one.nodes) > self._most_nodes:
                continue
            one.running = True
            taken.update(one.nodes)
            begun.append(one.nodes)
        return begun

    def ended(self, nodes: tuple[str, ...]) -> None:
        del self._all[nodes]

    def interrupted(self, nodes: tuple[str, ...]) -> bool:
        """A task needs its nodes: it is to begin again, behind the others. False: it was interrupted too often, and is
        given up."""
        one = self._all.pop(nodes)
        one.running, one.interruptions = False, one.interruptions + 1
        if one.interruptions >= MAX_INTERRUPTIONS:
            return False
        self._all[nodes] = one
        return True

    def put_back(self, nodes: tuple[str, ...]) -> None:
        """It has not begun after all."""
        self._all[nodes].running = False

    def _free(self, node: str, taken: Collection[str]) -> bool:
        return node not in taken and not any(other in taken for group in self._apart.get(node, ()) for other in group)
