"""Runs the programs of all nodes under any interleaving, as the native executor does, with nodes that die. Pure.

A caller chooses what happens next among all that could: a node's ranks put in their contribution, a frame starts on its
way, is taken off a connection, is added, a result is taken out, a death is noticed, an error spreads. A connection
holds at most `in_transit` frames; on different connections they travel at any relative speed. Each node has `depth`
slots of chunks for each lane, and room for `scratch` frames that wait for their addition on each connection.

Values are followed as the nested sums that they are, so a result shows what was added and in which order:
`((0, 1), 2)` is the sum of nodes 0 and 1, plus node 2.

A node that dies stops between two steps; what it had sent may be lost. Its neighbours notice at some later time, and
tell their neighbours. `run` returns each node's end; it raises `InvariantViolation` where a result is wrong, a frame
meets the wrong receive, nothing can happen though a living node has neither ended nor heard of a failure, or somebody
else than the dead is blamed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from fireflyer.base.errors import InvariantViolation
from fireflyer.collectives.planning.plan import PARTED, Plan, chunk_lane
from fireflyer.collectives.planning.programs import LANES, RECEIVES, SENDS, Action, Program, Step, build, stride_of

__all__ = ["Death", "End", "Value", "expected_sum", "leaves", "run"]

Value = int | tuple["Value", "Value"]
"""A node's contribution, or the sum of two values."""
Wire = tuple[int, int, int, int]
"""Lane, sender, receiver, socket."""
Event = tuple[str, int, Wire]
"""What happens, at which node, on which connection; where there is none, the lane or other node stands first."""


class Death(NamedTuple):
    node: int
    after_events: int
    """How many events happen on all nodes before."""


class End(NamedTuple):
    """How the operation ended on a node."""

    blamed: int | None
    """The node whose death was reported; None after success."""
    dead: bool
    delivered: int
    """Chunks whose results were taken out and were right."""


class _Frame(NamedTuple):
    chunk: int
    block: int
    span: int
    action: Action
    values: tuple[Value, ...]


def leaves(value: Value) -> list[int]:
    """The nodes whose contributions are in a value."""
    return [value] if isinstance(value, int) else [*leaves(value[0]), *leaves(value[1])]


def expected_sum(programs: tuple[Program, ...], block: int) -> Value:
    """The sum of a block, worked out from the programs without any interleaving."""

    def held(node: int, before: int) -> Value:
        """What node has in its accumulator after the steps below `before`, additions in the order of the program."""
        value: Value = node
        for step in programs[node].steps[:before]:
            if step.action is Action.RECEIVE_ADD and step.block <= block < step.block + step.span:
                theirs = next(
                    i
                    for i, s in enumerate(programs[step.peer].steps)
                    if (s.action, s.peer, s.round, s.block) == (Action.SEND_ACC, node, step.round, step.block)
                )
                value = (value, held(step.peer, _last(programs[step.peer].steps[theirs].after)))
        return value

    for node, program in enumerate(programs):
        for index, step in enumerate(program.steps):
            if step.action is Action.FINISH and step.block == block:
                return held(node, index)
    raise InvariantViolation(f"no node finishes block {block}")


def _last(after: tuple[int, ...]) -> int:
    return max(after, default=-1) + 1


class _Ordered:
    """The order of frames in one direction of one connection: the rule of `programs`, for both ends."""

    def __init__(self, steps: list[tuple[int, Step]], chunks: list[int], stride: int) -> None:
        keyed = [(i * stride + step.round, i, index) for i in chunks for index, step in steps]
        self.frames = deque((i, index) for _, i, index in sorted(keyed))

    def head(self) -> tuple[int, int] | None:
        """Position of the chunk in its lane, and index of the step."""
        return self.frames[0] if self.frames else None


class _Half:
    """One lane of one node."""

    def __init__(self, world: _World, node: int, lane: int, program: Program, total: int) -> None:
        self.world, self.node, self.lane, self.program, self.total = world, node, lane, program, total
        plan = world.plan
        self.done: list[set[int]] = [set() for _ in range(total)]
        self.filled = self.taken = self._left = 0
        self.takes: Final = world.takes(node)
        self._able: list[Event] | None = None
        self.acc: dict[tuple[int, int], Value] = {}
        self.result: dict[tuple[int, int], Value] = {}
        self.waiting: dict[Wire, deque[tuple[int, int, _Frame]]] = {}
        stride = stride_of(program.rounds, world.depth)
        self.outgoing: dict[Wire, _Ordered] = {}
        self.incoming: dict[Wire, _Ordered] = {}
        for peer in sorted({step.peer for step in program.steps} - {-1}):
            for socket in range(plan.sockets):
                mine = [i for i in range(total) if i % plan.sockets == socket]
                sends = [(k, s) for k, s in enumerate(program.steps) if s.peer == peer and s.action in SENDS]
                gets = [(k, s) for k, s in enumerate(program.steps) if s.peer == peer and s.action in RECEIVES]
                self.outgoing[lane, node, peer, socket] = _Ordered(sends, mine, stride)
                self.incoming[lane, peer, node, socket] = _Ordered(gets, mine, stride)

    def freed(self) -> int:
        """Chunks that have left their slots: all steps done and, where ranks take it, the result taken out."""
        if self.takes:
            return self.taken
        while self._left < self.total and self._complete(self._left):
            self._left += 1
        return self._left

    def _complete(self, i: int) -> bool:
        return i < self.filled and len(self.done[i]) == len(self.program.steps)

    def may(self, i: int, index: int) -> bool:
        """Do the steps before it and the slot allow this step?"""
        step = self.program.steps[index]
        result = step.action is Action.RECEIVE_RESULT
        there = i < self.freed() + self.world.depth if result else i < self.filled
        return there and self.done[i].issuperset(step.after)

    def events(self) -> list[Event]:
        """What could happen here; worked out again only after `changed`."""
        if self._able is None:
            self._able = list(self._events())
        return self._able

    def changed(self) -> None:
        """A step was made here, or a frame was put on or taken off one of the connections."""
        self._able = None

    def _events(self) -> Iterator[Event]:
        if self.filled < self.total and self.filled < self.freed() + self.world.depth:
            yield "fill", self.node, (self.lane, 0, 0, 0)
        for wire, order in self.outgoing.items():
            head = order.head()
            if head is not None and self.may(*head) and self.world.room(wire):
                yield "send", self.node, wire
        for wire, order in self.incoming.items():
            head = order.head()
            if head is not None and self.world.wires.get(wire) and self._can_receive(wire, *head):
                yield "receive", self.node, wire
        for wire, queue in self.waiting.items():
            if queue and self.may(*queue[0][:2]):
                yield "add", self.node, wire
        if self.takes and self.taken < self.total and self._complete(self.taken):
            yield "take", self.node, (self.lane, 0, 0, 0)

    def _can_receive(self, wire: Wire, i: int, index: int) -> bool:
        if self.program.steps[index].action is Action.RECEIVE_RESULT:
            return self.may(i, index)
        return len(self.waiting.get(wire, ())) < self.world.scratch

    def fill(self) -> None:
        i = self.filled
        self.filled += 1
        for block in range(self.program.blocks):
            if self.world.contributes(self.node, block):
                where = self.acc if self.world.sums else self.result
                where[i, block] = self.node
        self._finish(i)

    def send(self, wire: Wire) -> None:
        i, index = self.outgoing[wire].frames.popleft()
        step = self.program.steps[index]
        source = self.acc if step.action is Action.SEND_ACC else self.result
        values = tuple(source[i, block] for block in range(step.block, step.block + step.span))
        self.world.wires.setdefault(wire, deque()).append(_Frame(i, step.block, step.span, step.action, values))
        self._complete_step(i, index)

    def receive(self, wire: Wire) -> None:
        i, index = self.incoming[wire].frames.popleft()
        step = self.program.steps[index]
        frame = self.world.wires[wire].popleft()
        kind = Action.SEND_ACC if step.action is Action.RECEIVE_ADD else Action.SEND_RESULT
        if (frame.chunk, frame.block, frame.span, frame.action) != (i, step.block, step.span, kind):
            raise InvariantViolation(f"node {self.node} expects {step} of chunk {i} and receives {frame}")
        if step.action is Action.RECEIVE_ADD:
            self.waiting.setdefault(wire, deque()).append((i, index, frame))
            return
        for offset, value in enumerate(frame.values):
            self.result[i, step.block + offset] = value
            if self.world.sums:  # where both have the same element type they are the same memory
                self.acc[i, step.block + offset] = value
        self._complete_step(i, index)

    def add(self, wire: Wire) -> None:
        i, index, frame = self.waiting[wire].popleft()
        for offset, value in enumerate(frame.values):
            place = (i, frame.block + offset)
            self.acc[place] = (self.acc[place], value)
        self._complete_step(i, index)

    def take(self) -> None:
        i = self.taken
        self.taken += 1
        for block in range(self.program.blocks):
            if self.world.wants(self.node, block):
                self.world.check(self.lane, block, self.result[i, block], self.node)

    def over(self) -> bool:
        return self.freed() == self.total

    def _complete_step(self, i: int, index: int) -> None:
        self.done[i].add(index)
        self._finish(i)

    def _finish(self, i: int) -> None:
        for index, step in enumerate(self.program.steps):
            if step.action is Action.FINISH and index not in self.done[i] and self.may(i, index):
                self.result[i, step.block] = self.acc[i, step.block]
                self.done[i].add(index)


class _World:
    def __init__(
        self, plan: Plan, kind: str, algorithm: str, chunks: int, root: int | None, in_transit: int, scratch: int
    ) -> None:
        self.plan, self.kind, self.root = plan, kind, root
        self.depth, self.in_transit, self.scratch = plan.window // 2, in_transit, scratch
        self.sums = kind not in ("broadcast", "allgather")
        self.wires: dict[Wire, deque[_Frame]] = {}
        self.programs = {lane: build(plan, kind, algorithm, lane, root) for lane in LANES}
        self.halves = []
        for lane in LANES:
            total = sum(chunk_lane(chunk) == lane for chunk in range(chunks))
            self.halves += [_Half(self, node, lane, p, total) for node, p in enumerate(self.programs[lane])]
        self._half_of = {(half.node, half.lane): half for half in self.halves}
        self.sums_of = {
            (lane, block): expected_sum(self.programs[lane], block)
            for lane in LANES
            for block in range(self.programs[lane][0].blocks)
            if self.sums
        }
        near = {(half.node, step.peer) for half in self.halves for step in half.program.steps if step.peer >= 0}
        self.near = near | {(b, a) for a, b in near}
        self.dead: int | None = None
        self.blamed: dict[int, int] = {}

    def takes(self, node: int) -> bool:
        """Do ranks of the node take results out?"""
        return self.kind != "reduce" or node == self.root

    def contributes(self, node: int, block: int) -> bool:
        if self.kind == "broadcast":
            return node == self.root
        return self.kind != "allgather" or node == block

    def wants(self, node: int, block: int) -> bool:
        return self.kind != "reduce_scatter" or node == block

    def room(self, wire: Wire) -> bool:
        return len(self.wires.get(wire, ())) < self.in_transit

    def check(self, lane: int, block: int, value: Value, node: int) -> None:
        if self.sums:
            right = value == self.sums_of[lane, block]
            everybody = sorted(leaves(value)) == list(range(self.plan.nodes))
        else:
            right, everybody = value == (block if self.kind in PARTED else self.root), True
        if not right or not everybody:
            raise InvariantViolation(f"node {node} ends block {block} of lane {lane} with {value}")

    def events(self) -> list[Event]:
        able: list[Event] = []
        for half in self.halves:
            if half.node != self.dead and half.node not in self.blamed:
                able += half.events()
        if self.dead is not None:
            able += self._news_of_death()
        return able

    def _news_of_death(self) -> Iterator[Event]:
        for node, other in self.near:
            if node == self.dead or node in self.blamed:
                continue
            if other == self.dead and not self._over(node):
                yield "notice", node, (other, 0, 0, 0)
            elif other in self.blamed:
                yield "hear", node, (other, 0, 0, 0)

    def _over(self, node: int) -> bool:
        return all(self._half_of[node, lane].over() for lane in LANES)

    def perform(self, event: Event) -> None:
        what, node, where = event
        if what in ("notice", "hear"):
            self.blamed[node] = where[0] if what == "notice" else self.blamed[where[0]]
            return
        half = self._half_of[node, where[0]]
        half.changed()
        if what in ("send", "receive"):  # the other end of the connection
            self._half_of[where[2] if what == "send" else where[1], where[0]].changed()
        if what == "fill":
            half.fill()
        elif what == "take":
            half.take()
        else:
            {"send": half.send, "receive": half.receive, "add": half.add}[what](where)

    def kill(self, node: int, choose: Callable[[int], int]) -> None:
        self.dead = node
        for wire, frames in self.wires.items():
            if wire[1] == node:
                for _ in range(choose(len(frames) + 1)):
                    frames.pop()
        for half in self.halves:
            half.changed()

    def ends(self) -> list[End]:
        nodes = range(self.plan.nodes)
        taken = {node: sum(half.taken for half in self.halves if half.node == node) for node in nodes}
        return [End(self.blamed.get(node), node == self.dead, taken[node]) for node in nodes]


MAX_EVENTS: Final = 1_000_000


def run(
    plan: Plan,
    kind: str,
    algorithm: str,
    chunks: int,
    choose: Callable[[int], int],
    *,
    root: int | None = None,
    in_transit: int = 1,
    scratch: int = 1,
    death: Death | None = None,
) -> tuple[list[End], int]:
    """Runs one operation; `choose(n)` picks one of n events that could happen. Returns how each node ended, and how
    many events there were."""
    world = _World(plan, kind, algorithm, chunks, root, in_transit, scratch)
    count = 0
    while count < MAX_EVENTS:
        if death is not None and world.dead is None and count == death.after_events:
            world.kill(death.node, choose)
        able = world.events()
        if not able:
            break
        world.perform(able[choose(len(able))])
        count += 1
    _check_ends(world, death)
    return world.ends(), count


def _check_ends(world: _World, death: Death | None) -> None:
    for half in world.halves:
        if half.node != world.dead and half.node not in world.blamed and not half.over():
            raise InvariantViolation(f"nothing can happen, but node {half.node} has not ended in lane {half.lane}")
    if any(culprit != world.dead for culprit in world.blamed.values()) or (death is None and world.blamed):
        raise InvariantViolation(f"nodes are blamed that live: {world.blamed}")
    if world.dead is None and any(world.wires.values()):
        raise InvariantViolation("frames were sent that nobody receives")
