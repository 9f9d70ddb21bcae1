"""Sets of nodes as integers, bit i for node i: ten thousand nodes are one number, and a set operation a microsecond."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

from fireflyer.base.errors import InvariantViolation
from fireflyer.cluster.core.scheduler.model import Node, Request, Reservation, Task

__all__ = ["ClosedTime", "NodeSets", "each_bit", "union"]

_Window: TypeAlias = tuple[int, int]
_Key = TypeVar("_Key")


def each_bit(of: int) -> Iterator[int]:
    """Ascending."""
    while of:
        low = of & -of
        yield low.bit_length() - 1
        of ^= low


def union(sets: Iterable[int]) -> int:
    found = 0
    for one in sets:
        found |= one
    return found


class ClosedTime(NamedTuple):
    """A time in which these nodes are given to nobody."""

    begin_ns: int
    until_ns: int
    name: str
    nodes: int


class NodeSets:
    """The nodes of a cluster, and the sets of them that requests name. Nodes are numbered in the order given; the
    number of a node that was removed goes to the next new one."""

    def __init__(self, nodes: Sequence[Node] = (), reservations: Sequence[Reservation] = ()) -> None:
        self._nodes: list[Node | None] = []
        self._unused: list[int] = []
        self.number: dict[str, int] = {}
        self._groups: dict[str, int] = {}
        self._labels: dict[str, int] = {}
        self._usable = 0
        self._closed: dict[_Window, int] = {}
        self._reservations: tuple[Reservation, ...] = ()
        self._reserved: tuple[int, ...] = ()
        self.zones: dict[str, dict[str, int]] = {}
        """Zone → leaf → nodes."""
        self.of_zone: dict[str, int] = {}
        """In the order of their names."""
        self.every = 0
        self.layout = 0
        """Counts changes other than of `usable` and `closed`."""
        for node in nodes:
            self.put(node)
        self.reserve(reservations)

    def put(self, node: Node) -> None:
        """A new node, or another state of one."""
        number = self.number.get(node.name)
        if number is None or _where(node) != _where(self._at(number)):
            self.layout += 1
        if number is not None:
            self._mark(number, self._at(number), present=False)
            self._nodes[number] = node
        elif self._unused:
            number = heapq.heappop(self._unused)
            self._nodes[number] = node
        else:
            number = len(self._nodes)
            self._nodes.append(node)
        new = node.name not in self.number
        self.number[node.name] = number
        self._mark(number, node, present=True)
        if new and self._reservations:
            self.reserve(self._reservations)

    def remove(self, name: str) -> None:
        number = self.number.pop(name)
        self._mark(number, self._at(number), present=False)
        self._nodes[number] = None
        self.layout += 1
        heapq.heappush(self._unused, number)
        self.reserve(self._reservations)

    def reserve(self, reservations: Sequence[Reservation]) -> None:
        """To be called with all of them."""
        self._reservations = tuple(reservations)
        self._reserved = tuple(self.named(one.nodes) for one in self._reservations)

    def _at(self, number: int) -> Node:
        node = self._nodes[number]
        if node is None:
            raise InvariantViolation(f"no node has the number {number}")
        return node

    def _mark(self, number: int, node: Node, present: bool) -> None:
        bit = 1 << number
        self.every ^= bit
        _put(self._groups, node.group, bit, present)
        for label in set(node.labels):
            _put(self._labels, label, bit, present)
        for window in set(node.closed):
            _put(self._closed, window, bit, present)
        if node.usable:
            self._usable ^= bit
        leaves = self.zones.setdefault(node.zone, {})
        _put(leaves, node.leaf, bit, present)
        if not leaves:
            del self.zones[node.zone]
        new = node.zone not in self.of_zone
        _put(self.of_zone, node.zone, bit, present)
        if new:
            self.of_zone = {zone: self.of_zone[zone] for zone in sorted(self.of_zone)}

    def nodes(self) -> tuple[Node, ...]:
        """In the order of their numbers."""
        return tuple(node for node in self._nodes if node is not None)

    def node(self, name: str) -> Node | None:
        number = self.number.get(name)
        return None if number is None else self._at(number)

    def named(self, names: Iterable[str]) -> int:
        """Without those that are no nodes."""
        found = 0
        for name in names:
            number = self.number.get(name)
            if number is not None:
                found |= 1 << number
        return found

    def leaf_of(self, number: int) -> str:
        return self._at(number).leaf

    def names(self, numbers: Iterable[int]) -> tuple[str, ...]:
        return tuple(self._at(number).name for number in numbers)

    def by_zone(self, nodes: int) -> tuple[tuple[str, int], ...]:
        """Zone → those of these nodes that lie in it."""
        return tuple((zone, here) for zone, those in self.of_zone.items() if (here := those & nodes))

    def zones_of(self, nodes: int) -> int:
        """How many zones these nodes lie in."""
        found = 0
        for zone in self.of_zone.values():
            if zone & nodes:
                if not nodes & ~zone:
                    return 1
                found += 1
        return found

    def eligible(self, request: Request) -> int:
        """The nodes that it may use, whoever has them."""
        found = self._groups.get(request.node_group, 0)
        for label in request.labels:
            found &= self._labels.get(label, 0)
        if request.only:
            found &= self.named(request.only)
        return found & ~self.named(request.never) if request.never else found

    def unknown(self, request: Request) -> tuple[str, ...]:
        """What it asks for by name, and no node is or has."""
        group = () if request.node_group in self._groups else (f"node in group {request.node_group}",)
        labels = (f"node with the label {label}" for label in request.labels if label not in self._labels)
        return (*group, *labels, *(f"node {name}" for name in request.only if name not in self.number))

    def admitting(self, task: Task) -> tuple[int, ...]:
        """Numbers of the reservations that the task may use."""
        if not self._reservations:
            return ()
        return tuple(number for number, one in enumerate(self._reservations) if one.admits(task))

    def has_windows(self, now_ns: int) -> bool:
        """Whether how long a run takes may matter to which nodes it gets."""
        return any(now_ns < until_ns for _, until_ns in self._windows())

    def has_reservations(self) -> bool:
        return bool(self._reservations)

    def next_edge_ns(self, now_ns: int) -> int | None:
        """When the next time begins or ends in which nodes are closed."""
        return min((edge_ns for window in self._windows() for edge_ns in window if edge_ns > now_ns), default=None)

    def _windows(self) -> Iterator[_Window]:
        yield from self._closed
        for one in self._reservations:
            yield one.begin_ns, one.until_ns

    def maintenance(self) -> Iterator[ClosedTime]:
        for (begin_ns, until_ns), nodes in self._closed.items():
            yield ClosedTime(begin_ns, until_ns, "maintenance", nodes)
        for one, nodes in zip(self._reservations, self._reserved, strict=True):
            if one.maintenance:
                yield ClosedTime(one.begin_ns, one.until_ns, f"maintenance {one.name}", nodes)

    def open_for(self, span_ns: int, now_ns: int, admitted: Sequence[int] = ()) -> int:
        """Nodes that are usable now and not closed for so long. A run of unknown length needs them for as long as it
        takes to leave: it goes on until they are about to close."""
        end_ns = now_ns + span_ns
        found = self._usable
        for (begin_ns, until_ns), nodes in self._closed.items():
            if begin_ns <= end_ns and now_ns < until_ns:
                found &= ~nodes
        if not self._reservations:
            return found
        for number, one in enumerate(self._reservations):
            if one.begin_ns <= end_ns and now_ns < one.until_ns and number not in admitted:
                found &= ~self._reserved[number]
        return found

    def closing(self, nodes: int, span_ns: int, now_ns: int, admitted: Sequence[int]) -> list[Reservation]:
        """The reservations for which `open_for` leaves out some of these nodes."""
        end_ns = now_ns + span_ns
        return [
            one
            for number, one in enumerate(self._reservations)
            if number not in admitted
            and one.begin_ns <= end_ns
            and now_ns < one.until_ns
            and self._reserved[number] & nodes
        ]

    def reserved_for(self, waiting: Task, running: Task, now_ns: int) -> int:
        """Nodes that are reserved now for a task that waits, and not for one that runs."""
        return union(
            nodes
            for one, nodes in zip(self._reservations, self._reserved, strict=True)
            if one.begin_ns <= now_ns < one.until_ns and one.admits(waiting) and not one.admits(running)
        )


def _where(node: Node) -> tuple[object, ...]:
    return node.group, node.zone, node.leaf, node.labels


def _put(sets: dict[_Key, int], key: _Key, bit: int, present: bool) -> None:
    now = sets.get(key, 0) | bit if present else sets[key] & ~bit
    if now:
        sets[key] = now
    else:
        del sets[key]
