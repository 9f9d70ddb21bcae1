"""Sets of nodes as integers, bit i for node i: ten thousand nodes are one number, and a set operation a microsecond."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from fireflyer.cluster.core.scheduler.model import Node, Request

__all__ = ["NodeSets", "each_bit"]


def each_bit(of: int) -> Iterator[int]:
    """Ascending."""
    while of:
        low = of & -of
        yield low.bit_length() - 1
        of ^= low


class NodeSets:
    """The nodes of a cluster, and the sets of them that requests name. Nodes are numbered in the order given."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = tuple(nodes)
        self.number = {node.name: number for number, node in enumerate(self.nodes)}
        self._groups = self._by(lambda node: (node.group,))
        self._labels = self._by(lambda node: node.labels)
        self._usable = sum(1 << number for number, node in enumerate(self.nodes) if node.usable)
        self._closed = [(*window, 1 << number) for number, node in enumerate(self.nodes) for window in node.closed]
        self.zones: dict[str, dict[str, int]] = {}
        """Zone → leaf → nodes, in the order of the nodes."""
        for number, node in enumerate(self.nodes):
            leaves = self.zones.setdefault(node.zone, {})
            leaves[node.leaf] = leaves.get(node.leaf, 0) | 1 << number
        self.of_zone = {zone: sum(leaves.values()) for zone, leaves in self.zones.items()}

    def _by(self, keys: Callable[[Node], Iterable[str]]) -> dict[str, int]:
        found: dict[str, int] = {}
        for number, node in enumerate(self.nodes):
            for key in keys(node):
                found[key] = found.get(key, 0) | 1 << number
        return found

    def named(self, names: Iterable[str]) -> int:
        """Without those that are no nodes."""
        found = 0
        for name in names:
            number = self.number.get(name)
            if number is not None:
                found |= 1 << number
        return found

    def names(self, numbers: Iterable[int]) -> tuple[str, ...]:
        return tuple(self.nodes[number].name for number in numbers)

    def eligible(self, request: Request) -> int:
        """The nodes that it may use, whoever has them."""
        found = self._groups.get(request.node_group, 0)
        for label in request.labels:
            found &= self._labels.get(label, 0)
        if request.only:
            found &= self.named(request.only)
        return found & ~self.named(request.never)

    def open_for(self, time_ns: int | None, now_ns: int) -> int:
        """Nodes that are usable now and, as long as a run may take, not closed. A run of unknown length may meet every
        time that they are closed, and is then ended in its turn as any other: only those closed now are left out."""
        end_ns = now_ns if time_ns is None else now_ns + time_ns
        found = self._usable
        for begin_ns, until_ns, node in self._closed:
            if begin_ns <= end_ns and now_ns < until_ns:
                found &= ~node
        return found
