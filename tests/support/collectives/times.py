"""A discrete simulation of collectives between nodes, message by message; what the cost model is held against.

Each node has a network card (one message at a time in each direction), one thread (messages, additions, bytes through
sockets) and memory; what waits for one of them is served in the order of chunks. Bytes pass through sender's thread and
card, the links between zones, and receiver's card and thread while others of the same message follow; additions come
after. A chunk enters a node's lane when the one `window / 2` before has left it. Written from the algorithms, not from
the model's formulas.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fireflyer.base.units import SECOND
from fireflyer.collectives.planning.cost import Layout, Speeds
from fireflyer.collectives.planning.plan import HALVING_DOUBLING, LINE, RING, TREE
from fireflyer.collectives.planning.trees import double_binary_tree
from fireflyer.topology import zone_order, zone_trees

__all__ = ["Message", "messages_of", "simulate_ns"]


class Message(NamedTuple):
    source: int
    target: int
    share: float
    """Of the chunk."""
    adds: bool
    after: tuple[int, ...]
    """Indices of messages that must have been received at the source."""


def messages_of(kind: str, algorithm: str, zones: Sequence[int], lane: int) -> list[Message]:
    """Of one chunk. Their order is topological."""
    if algorithm == TREE:
        return _tree(zone_trees(zones, double_binary_tree)[lane], kind)
    if algorithm == RING:
        return _ring(zone_order(zones), kind)
    if algorithm == LINE:
        return _line(zone_order(zones), kind)
    assert algorithm == HALVING_DOUBLING
    return _halving(zone_order(zones))


def _tree(tree: Sequence[int], kind: str) -> list[Message]:
    messages: list[Message] = []
    root = tree.index(-1)
    order = [root]
    for node in order:
        order += [child for child, parent in enumerate(tree) if parent == node]
    into: dict[int, list[int]] = defaultdict(list)
    if kind != "broadcast":
        for node in reversed(order[1:]):
            messages.append(Message(node, tree[node], 1.0, True, tuple(into[node])))
            into[tree[node]].append(len(messages) - 1)
    if kind != "reduce":
        known = {root: tuple(into[root])}
        for node in order[1:]:
            messages.append(Message(tree[node], node, 1.0, False, known[tree[node]]))
            known[node] = (len(messages) - 1,)
    return messages


def _ring(order: Sequence[int], kind: str) -> list[Message]:
    nodes = len(order)
    messages: list[Message] = []
    rounds = {"reduce_scatter": [True], "allgather": [False], "allreduce": [True, False]}[kind]
    previous: dict[int, int] = {}
    for adds in rounds:
        for _ in range(nodes - 1):
            now = {}
            for place in range(nodes):
                after = (previous[place],) if place in previous else ()
                messages.append(Message(order[place], order[(place + 1) % nodes], 1 / nodes, adds, after))
                now[(place + 1) % nodes] = len(messages) - 1
            previous = now
    return messages


def _line(order: Sequence[int], kind: str) -> list[Message]:
    messages: list[Message] = []
    last: dict[int, list[int]] = defaultdict(list)
    share = 1 / len(order)

    def chain(nodes: Sequence[int], adds: bool, after: tuple[int, ...]) -> int:
        for source, target in itertools.pairwise(nodes):
            messages.append(Message(source, target, share, adds, after))
            after = (len(messages) - 1,)
        return len(messages) - 1

    ways = (tuple(order), tuple(reversed(order)))
    if kind != "allgather":
        for way in ways:
            for to in reversed(range(1, len(way))):
                last[way[to]].append(chain(way[: to + 1], True, ()))
    if kind != "reduce_scatter":
        for way in ways:
            for origin in reversed(range(len(way) - 1)):
                chain(way[origin:], False, tuple(last[way[origin]]))
    return messages


def _halving(order: Sequence[int]) -> list[Message]:
    nodes = len(order)
    power = 1 << (nodes.bit_length() - 1)
    pairs = [(order[2 * pair], order[2 * pair + 1]) for pair in range(nodes - power)]
    inside = [even for even, _ in pairs] + list(order[2 * len(pairs) :])
    messages: list[Message] = []
    last: dict[int, int] = {}

    def send(source: int, target: int, share: float, adds: bool) -> int:
        after = (last[source],) if source in last else ()
        messages.append(Message(source, target, share, adds, after))
        return len(messages) - 1

    def exchange(distance: int, share: float, adds: bool) -> None:
        pairs = [(inside[place], inside[place ^ distance]) for place in range(power)]
        last.update({target: send(source, target, share, adds) for source, target in pairs})

    for even, odd in pairs:
        last[even] = send(odd, even, 1.0, True)
    distance, share = power // 2, 0.5
    while distance:
        exchange(distance, share, True)
        distance, share = distance // 2, share / 2
    distance, share = 1, 1 / power
    while distance < power:
        exchange(distance, share, False)
        distance, share = distance * 2, share * 2
    for even, odd in pairs:
        send(even, odd, 1.0, False)
    return messages


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, delay: float, then: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._numbers), then))

    def run(self) -> float:
        while self._events:
            self.now, _, then = heapq.heappop(self._events)
            then()
        return self.now


class _Server:
    """Serves one customer at a time, the lowest chunk first."""

    def __init__(self, clock: _Clock) -> None:
        self._clock = clock
        self._waiting: list[tuple[int, int, float, Callable[[], None], Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._busy = False

    def serve(
        self, chunk: int, takes: float, then: Callable[[], None], *, begin: Callable[[], None] = lambda: None
    ) -> None:
        heapq.heappush(self._waiting, (chunk, next(self._numbers), takes, begin, then))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        self._busy = bool(self._waiting)
        if self._busy:
            _, _, takes, begin, then = heapq.heappop(self._waiting)
            self._clock.after(takes, lambda: self._end(then))
            begin()

    def _end(self, then: Callable[[], None]) -> None:
        then()
        self._next()


class _Run:
    def __init__(
        self, speeds: Speeds, layout: Layout, programs: Sequence[list[Message]], sizes: Sequence[float]
    ) -> None:
        self.speeds, self.layout, self.programs, self.sizes = speeds, layout, programs, sizes
        self.zones = layout.zone_of_node
        self.clock = _Clock()
        nodes = range(layout.nodes)
        self.thread, self.memory, self.sends, self.receives = ([_Server(self.clock) for _ in nodes] for _ in range(4))
        self.links: dict[tuple[int, int], _Server] = defaultdict(lambda: _Server(self.clock))
        self.later: list[list[list[int]]] = [[[] for _ in program] for program in programs]
        for lane, program in enumerate(programs):
            for index, message in enumerate(program):
                for before in message.after:
                    self.later[lane][before].append(index)
        each = [(chunk, index, m) for chunk in range(len(sizes)) for index, m in enumerate(programs[chunk % 2])]
        self.waits = {(chunk, index): len(message.after) + 1 for chunk, index, message in each}
        self.open = {(chunk, node): 1 for chunk in range(len(sizes)) for node in nodes}
        for chunk, _, message in each:
            self.open[chunk, message.source] += 2  # its thread and its card
            self.open[chunk, message.target] += 1
        self.memory_ns = layout.ranks_per_node * SECOND / speeds.memory_bytes_per_s

    def enter(self, chunk: int, node: int) -> None:
        def done() -> None:
            self.clock.after(self.speeds.local_latency_ns, lambda: self.entered(chunk, node))

        self.memory[node].serve(chunk, self.memory_ns * self.sizes[chunk], done)

    def entered(self, chunk: int, node: int) -> None:
        for index, message in enumerate(self.programs[chunk % 2]):
            if message.source == node:
                self.allow(chunk, index)
        self.close(chunk, node)

    def allow(self, chunk: int, index: int) -> None:
        self.waits[chunk, index] -= 1
        if self.waits[chunk, index] == 0:
            self.send(chunk, index)

    def send(self, chunk: int, index: int) -> None:
        message, size = self.programs[chunk % 2][index], self.sizes[chunk]
        source, target, nbytes = message.source, message.target, message.share * size
        speeds, far = self.speeds, self.zones[message.source] != self.zones[message.target]
        wire_ns = nbytes * SECOND / speeds.bytes_per_s
        copy_ns = nbytes * SECOND / speeds.both_ways_bytes_per_s
        latency_ns = (far and speeds.cross_latency_ns) or speeds.latency_ns
        crossing_ns = nbytes * SECOND / speeds.cross_bytes_per_s if far and speeds.cross_bytes_per_s else 0.0
        add_ns = 2 * nbytes * SECOND / speeds.add_bytes_per_s if message.adds else 0.0

        ends = itertools.count(1)

        def received() -> None:
            if next(ends) == 2:  # both the card and the thread have all of it
                self.thread[target].serve(chunk, add_ns, lambda: self.done(chunk, index))

        def copy() -> None:
            self.thread[target].serve(chunk, speeds.message_ns + copy_ns, received)

        def arrive() -> None:
            self.receives[target].serve(chunk, max(wire_ns, crossing_ns), received, begin=copy)

        def depart() -> None:
            self.clock.after(latency_ns, arrive)

        def cross() -> None:
            link = self.links[self.zones[source], self.zones[target]]
            link.serve(chunk, crossing_ns, lambda: None, begin=depart)

        def start() -> None:
            begin = cross if crossing_ns else depart
            self.sends[source].serve(chunk, wire_ns, lambda: self.close(chunk, source), begin=begin)

        def write() -> None:
            self.clock.after(speeds.message_ns, start)

        self.thread[source].serve(chunk, speeds.message_ns + copy_ns, lambda: self.close(chunk, source), begin=write)

    def done(self, chunk: int, index: int) -> None:
        for later in self.later[chunk % 2][index]:
            self.allow(chunk, later)
        self.close(chunk, self.programs[chunk % 2][index].target)

    def close(self, chunk: int, node: int) -> None:
        self.open[chunk, node] -= 1
        if self.open[chunk, node] == 0:
            self.memory[node].serve(chunk, self.memory_ns * self.sizes[chunk], lambda: self.left(chunk, node))

    def left(self, chunk: int, node: int) -> None:
        following = chunk + self.layout.window // 2 * 2
        if following < len(self.sizes):
            self.clock.after(self.speeds.local_latency_ns, lambda: self.enter(following, node))


def simulate_ns(speeds: Speeds, layout: Layout, kind: str, algorithm: str, nbytes: int, chunk_bytes: int) -> float:
    """When the last node has the whole result."""
    whole, tail = divmod(nbytes, chunk_bytes)
    sizes = [float(chunk_bytes)] * whole + ([float(tail)] if tail else [])
    programs = [messages_of(kind, algorithm, layout.zone_of_node, lane) for lane in (0, 1)]
    run = _Run(speeds, layout, programs, sizes)
    for chunk in range(min(len(sizes), layout.window // 2 * 2)):
        for node in range(layout.nodes):
            run.enter(chunk, node)
    return run.clock.run() + speeds.local_latency_ns
