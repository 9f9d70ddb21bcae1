"""What the nodes do in one operation, step by step, and a simulator of it. Pure.

`expand` gives every node of a tree up to four kinds of streams, as the native executor has them (cpp/src/tree_run.cpp):
receive from a child, add and deliver, send to the parent or to a child, receive from the parent. The steps of a stream
happen in order, chunk by chunk; streams wait for each other only through the numbers of chunks that they have done.
Streams of one node share the node's slots: a chunk enters the ring only when the chunk a window before has left it.

`simulate` lets a caller choose which stream goes next, keeps at most `in_transit` frames on a connection, and follows
every contribution as a multiset. It ends when all streams have ended, and raises `InvariantViolation` when none can go
on, when a frame meets the wrong receive, or when a result is not every contribution exactly once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Final, Literal, NamedTuple

from fireflyer.base.errors import InvariantViolation, UsageError
from fireflyer.collectives.plan import Orientation, Plan, chunk_tree, orient

__all__ = ["Action", "Kind", "Step", "Stream", "expand", "simulate", "streams_of_node"]

Kind = Literal["allreduce", "reduce", "broadcast"]
NOBODY: Final = -1


class Action(Enum):
    SEND_UP = "send up"
    RECEIVE_UP = "receive up"
    ADD = "add"
    SEND_DOWN = "send down"
    RECEIVE_DOWN = "receive down"
    DELIVER = "deliver"


class Step(NamedTuple):
    action: Action
    chunk: int
    """Of the operation, from 0."""
    peer: int
    """The other node of a send or receive, else -1."""


class Stream(NamedTuple):
    """Steps of one node in one tree that happen in this order."""

    node: int
    tree: int
    steps: tuple[Step, ...]


def expand(plan: Plan, kind: Kind, chunks: int, root: int | None = None) -> list[Stream]:
    """All streams of an operation over `chunks` chunks; `root` is the root's node, None for an allreduce."""
    if (root is None) != (kind == "allreduce"):
        raise UsageError(f"{kind} {'has no' if kind == 'allreduce' else 'needs a'} root")
    streams = []
    for tree, parents in enumerate(plan.trees):
        mine = [chunk for chunk in range(chunks) if chunk_tree(chunk) == tree]
        top = parents.index(-1) if root is None else root
        for node, view in enumerate(orient(parents, top)):
            streams += [Stream(node, tree, steps) for steps in streams_of_node(kind, view, mine) if steps]
    return streams


def streams_of_node(kind: Kind, view: Orientation, chunks: Iterable[int]) -> list[tuple[Step, ...]]:
    """The streams of a node with this view of a tree that carries these chunks."""
    chunks = tuple(chunks)

    def each(action: Action, peer: int = NOBODY) -> tuple[Step, ...]:
        return tuple(Step(action, chunk, peer) for chunk in chunks)

    streams = []
    if kind != "broadcast":
        streams += [each(Action.RECEIVE_UP, child) for child in view.children]
        streams.append(each(Action.ADD))
        if view.parent >= 0:
            streams.append(each(Action.SEND_UP, view.parent))
    if kind != "reduce":
        if view.parent >= 0:
            streams.append(each(Action.RECEIVE_DOWN, view.parent))
        streams += [each(Action.SEND_DOWN, child) for child in view.children]
    if kind != "reduce" or view.parent < 0:
        streams.append(each(Action.DELIVER))
    return streams


Frame = tuple[int, "Counter[int]"]


class _Node:
    """What a node holds of one tree."""

    def __init__(self, node: int, kind: Kind, view: Orientation) -> None:
        self.node = node
        self.kind = kind
        self.view = view
        self.from_child: dict[tuple[int, int], Counter[int]] = {}
        self.sums: dict[int, Counter[int]] = {}
        self.results: dict[int, Counter[int]] = {}
        self.done: Counter[tuple[Action, int]] = Counter()
        """Steps done of each stream, by action and peer."""

    def added(self) -> int:
        return self.done[Action.ADD, NOBODY]

    def ready(self) -> int:
        """Chunks whose result is here."""
        if self.view.parent >= 0:
            return self.done[Action.RECEIVE_DOWN, self.view.parent]
        return self.added() if self.kind == "allreduce" else 1 << 60

    def left(self) -> int:
        """Chunks that nothing on this node needs any longer: their slots are free."""
        waits = []
        if self.kind != "broadcast":
            waits.append(self.done[Action.SEND_UP, self.view.parent] if self.view.parent >= 0 else self.added())
        if self.kind != "reduce":
            waits += [self.done[Action.SEND_DOWN, child] for child in self.view.children]
        if self.kind != "reduce" or self.view.parent < 0:
            waits.append(self.done[Action.DELIVER, NOBODY])
        return min(waits)


class _World:
    def __init__(self, plan: Plan, kind: Kind, streams: list[Stream], root: int | None, in_transit: int) -> None:
        self.slots = plan.window // 2  # of each tree
        self.in_transit = in_transit
        self.kind = kind
        self.root = root
        self.nodes: dict[tuple[int, int], _Node] = {}
        for tree, parents in enumerate(plan.trees):
            top = parents.index(-1) if root is None else root
            for node, view in enumerate(orient(parents, top)):
                self.nodes[tree, node] = _Node(node, kind, view)
        self.wires: dict[tuple[int, int, int], deque[Frame]] = {}
        self.next_step = [0] * len(streams)
        self.streams = streams

    def wire(self, tree: int, source: int, target: int) -> deque[Frame]:
        return self.wires.setdefault((tree, source, target), deque())

    def able(self, index: int) -> bool:
        """May the next step of this stream happen now?"""
        stream = self.streams[index]
        done = self.next_step[index]
        if done == len(stream.steps):
            return False
        step, node = stream.steps[done], self.nodes[stream.tree, stream.node]
        if step.action is Action.RECEIVE_UP:
            room = done < node.added() + self.slots
            return room and bool(self.wire(stream.tree, step.peer, stream.node))
        if step.action is Action.ADD:
            arrived = all(node.done[Action.RECEIVE_UP, child] > done for child in node.view.children)
            return arrived and done < node.left() + self.slots
        if step.action is Action.RECEIVE_DOWN:
            sent = node.done[Action.SEND_UP, node.view.parent] > done
            room = sent if self.kind == "allreduce" else done < node.left() + self.slots
            return room and bool(self.wire(stream.tree, step.peer, stream.node))
        if step.action is Action.DELIVER:
            return (node.added() if self.kind == "reduce" else node.ready()) > done
        has = node.added() if step.action is Action.SEND_UP else node.ready()
        return has > done and len(self.wire(stream.tree, stream.node, step.peer)) < self.in_transit

    def perform(self, index: int) -> None:
        stream = self.streams[index]
        step = stream.steps[self.next_step[index]]
        node = self.nodes[stream.tree, stream.node]
        if step.action in (Action.RECEIVE_UP, Action.RECEIVE_DOWN):
            chunk, value = self.wire(stream.tree, step.peer, stream.node).popleft()
            if chunk != step.chunk:
                raise InvariantViolation(f"node {stream.node} received chunk {chunk} for {step}")
            if step.action is Action.RECEIVE_UP:
                node.from_child[step.peer, chunk] = value
            else:
                node.results[chunk] = value
        elif step.action is Action.ADD:
            parts = [node.from_child.pop((child, step.chunk)) for child in node.view.children]
            node.sums[step.chunk] = sum(parts, Counter([stream.node]))
            if node.view.parent < 0:
                node.results[step.chunk] = node.sums[step.chunk]
        elif step.action is Action.SEND_UP:
            self.wire(stream.tree, stream.node, step.peer).append((step.chunk, node.sums[step.chunk]))
        elif step.action is Action.SEND_DOWN:
            self.wire(stream.tree, stream.node, step.peer).append((step.chunk, self._result(node, step.chunk)))
        else:
            self._check_result(node, step.chunk)
        node.done[step.action, step.peer] += 1
        self.next_step[index] += 1

    def _result(self, node: _Node, chunk: int) -> Counter[int]:
        if self.kind == "broadcast" and node.view.parent < 0:
            return Counter([node.node])
        return node.results[chunk]

    def _check_result(self, node: _Node, chunk: int) -> None:
        everybody = sorted({where for _, where in self.nodes})
        expected = Counter(everybody) if self.root is None or self.kind == "reduce" else Counter([self.root])
        if self._result(node, chunk) != expected:
            raise InvariantViolation(f"node {node.node} ends chunk {chunk} with {self._result(node, chunk)}")


def simulate(
    plan: Plan,
    kind: Kind,
    chunks: int,
    choose: Callable[[int], int],
    *,
    root: int | None = None,
    in_transit: int = 1,
) -> int:
    """Runs the operation; `choose(n)` picks one of n streams that could go on. Returns the number of steps."""
    world = _World(plan, kind, expand(plan, kind, chunks, root), root, in_transit)
    steps = 0
    while True:
        ready = [index for index in range(len(world.streams)) if world.able(index)]
        if not ready:
            break
        world.perform(ready[choose(len(ready))])
        steps += 1
    stuck = [stream for stream, done in zip(world.streams, world.next_step, strict=True) if done < len(stream.steps)]
    if stuck:
        raise InvariantViolation(f"no stream can go on, {len(stuck)} have not ended, the first: {stuck[0]}")
    if any(world.wires.values()):
        raise InvariantViolation("frames were sent that nobody receives")
    return steps
