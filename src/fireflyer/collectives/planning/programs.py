"""What each node does with a chunk of an operation: programs, built from a plan. Pure.

The nodes exchange blocks of a chunk. A node holds for every chunk an *accumulator*, into which the node's own sum has
been put, and a *result* (the same memory where their element types are the same). A step is one of

    SEND_ACC        sends blocks of the accumulator to a peer
    RECEIVE_ADD     receives blocks from a peer and adds them to the accumulator
    FINISH          makes results of blocks of the accumulator: rounds once to the element type; a mean divides here
    SEND_RESULT     sends blocks of the result
    RECEIVE_RESULT  receives blocks of the result

and may happen as soon as the steps in `after` have, and (for all but RECEIVE_RESULT) the node's own contribution is
there, and (for RECEIVE_RESULT) the chunk's slot is free. Steps of the same program that no `after` orders may happen in
any order; the sums do not depend on it, because every addition to a block is ordered after the one before.

*Blocks.* A chunk is cut into `blocks` equal blocks (whole multiples of 64 elements, the last ones shorter or empty),
or, in a reduce_scatter or allgather, into one block for each node that holds the parts of the node's ranks.

*Order on connections.* Every transfer has a `round`, the same at both ends, that is greater than the rounds of all
transfers that it depends on; a FINISH has that of the last transfer before it. Frames in one direction of one
connection go in the order of (key, chunk), where

    key = position of the chunk in its lane * stride + round,  stride = ceil(rounds / depth),

and depth is the number of chunks that a lane has in flight. So the rounds of successive chunks interleave. *Why nothing
blocks for ever:* take all steps of all nodes in the order of (key, chunk). Whatever a step waits for stands earlier: a
step of its own chunk has a lower round; the frame before it on its connection comes first by definition; room for its
chunk means that the chunk `depth` places before has left, whose keys are all lower, since depth * stride >= rounds. So
the first step that has not happened can always happen.

*The order of sums.* Tree: `(own + first child) + second child`, children ascending by node. Ring, in lane 0 the nodes
in the plan's order, in lane 1 the other way round: block b starts at the node after node b and every node that it comes
to adds its own, up to node b. Line, nodes likewise: what the nodes before node b hold is added on the way from the
first one, and what those behind it hold on the way from the last; block b is `(own + those before) + those behind`.
Halving-doubling, places in the plan's order (lane 1: reversed), p the greatest power of two: the first places pair up,
an even one adds what its odd neighbour sends; what remains is numbered v = 0..p-1 and adds what v XOR p/2, then v XOR
p/4, ... send. An addition has the same bits whichever operand comes first.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Final, NamedTuple

from fireflyer.base.errors import UsageError
from fireflyer.collectives.planning.plan import ALGORITHMS, HALVING_DOUBLING, LINE, PARTED, RING, TREE, Plan
from fireflyer.collectives.planning.trees import Orientation, orient

__all__ = [
    "CONTROL",
    "LANES",
    "MAX_NETWORKS",
    "Action",
    "Link",
    "Program",
    "Step",
    "build",
    "channel_of",
    "links",
    "native_programs",
    "native_routes",
    "network_of",
    "program_of",
    "sockets_for",
    "steps_of_tree",
    "stride_of",
]

LANES: Final = (0, 1)
MAX_NETWORKS: Final = 8
"""That a group uses beside each other."""
CONTROL: Final = -1
NOBODY: Final = -1


class Action(IntEnum):
    """The numbers are those of native code."""

    SEND_ACC = 0
    RECEIVE_ADD = 1
    FINISH = 2
    SEND_RESULT = 3
    RECEIVE_RESULT = 4


SENDS: Final = (Action.SEND_ACC, Action.SEND_RESULT)
RECEIVES: Final = (Action.RECEIVE_ADD, Action.RECEIVE_RESULT)


class Step(NamedTuple):
    action: Action
    peer: int
    """The other node of a send or receive, else -1."""
    block: int
    """The first block."""
    span: int
    """How many blocks, one after the other."""
    round: int
    after: tuple[int, ...]
    """Indices of earlier steps of the program."""


class Program(NamedTuple):
    """What one node does with each chunk of one lane."""

    channel: int
    """Whose connections it uses."""
    blocks: int
    rounds: int
    """Of all nodes; greater than the round of any step."""
    steps: tuple[Step, ...]


class Link(NamedTuple):
    """A connection of a node."""

    channel: int
    """-1 for the control connection of a pair of neighbours."""
    node: int
    """At the other end."""
    socket: int
    """From 0, counts the connections of one channel with one neighbour."""


def channel_of(algorithm: str, lane: int) -> int:
    return 2 * ALGORITHMS.index(algorithm) + lane


def stride_of(rounds: int, depth: int) -> int:
    return max(1, -(-rounds // depth))


def build(plan: Plan, kind: str, algorithm: str, lane: int, root: int | None = None) -> tuple[Program, ...]:
    """The programs of all nodes for chunks of one lane; `root` is the root's node, None where there is no root.

    Raises `UsageError` where the algorithm cannot do that.
    """
    if (root is not None) != (kind in ("reduce", "broadcast")):
        raise UsageError(f"{kind} {'has no' if root is not None else 'needs a'} root")
    if algorithm == TREE and kind in ("allreduce", "barrier", "reduce", "broadcast"):
        return _tree_programs(plan, kind, lane, root)
    return tuple(program_of(plan, kind, algorithm, lane, node) for node in range(plan.nodes))


def program_of(plan: Plan, kind: str, algorithm: str, lane: int, node: int) -> Program:
    """The program of one node, where there is no root and no tree. Raises as `build` does."""
    order = plan.order if lane == 0 else plan.order[::-1]
    channel, place = channel_of(algorithm, lane), order.index(node)
    if algorithm == RING and kind in ("allreduce", "barrier", *PARTED):
        return _ring_program(order, place, kind, channel)
    if algorithm == LINE and kind in ("allreduce", "barrier", *PARTED):
        return _line_program(order, place, kind, channel)
    if algorithm == HALVING_DOUBLING and kind in ("allreduce", "barrier"):
        return _halving_doubling_program(order, place, channel)
    raise UsageError(f"{kind} cannot be done by {algorithm}")


def links(plan: Plan, node: int) -> tuple[Link, ...]:
    """All connections of `node`: control connections first, in ascending order of nodes."""
    edges: list[Link] = []
    for algorithm in sorted({route.algorithm for route in plan.all_routes()}, key=ALGORITHMS.index):
        for lane in LANES:
            channel = channel_of(algorithm, lane)
            for other in _neighbours(plan, algorithm, lane, node):
                edges += [Link(channel, other, socket) for socket in range(plan.sockets)]
    controls = [Link(CONTROL, other, 0) for other in sorted({edge.node for edge in edges})]
    return (*controls, *edges)


def network_of(link: Link, networks: int) -> int:
    """In which of so many networks a connection is: those of a lane, and of both lanes together, take turns. Control
    connections are in the first."""
    if link.channel == CONTROL:
        return 0
    return (link.channel % len(LANES) + len(LANES) * link.socket) % networks


def sockets_for(networks: int) -> int:
    """How many connections a channel must have with a neighbour for `network_of` to use each network."""
    return -(-networks // len(LANES))


NativeProgram = tuple[str, int, int, int, int, list[tuple[int, int, int, int, int, list[int]]]]
NativeRoute = tuple[str, int, int, int]


def native_routes(plan: Plan) -> list[NativeRoute]:
    """Kind, greatest size (-1: any), number of the algorithm, chunk bytes."""
    return [
        (r.kind, -1 if r.up_to_bytes is None else r.up_to_bytes, ALGORITHMS.index(r.algorithm), r.chunk_bytes)
        for r in plan.all_routes()
    ]


def native_programs(plan: Plan, node: int) -> list[NativeProgram]:
    """Kind, lane, channel, blocks, rounds, steps of a node's programs. Trees are left out: native code hangs them up
    at any root by itself."""
    if plan.nodes == 1:
        return []
    wanted = {(r.kind, r.algorithm) for r in plan.all_routes() if r.algorithm != TREE}
    made = []
    for kind, algorithm in sorted(wanted):
        for lane in LANES:
            program = program_of(plan, kind, algorithm, lane, node)
            steps = [(int(s.action), s.peer, s.block, s.span, s.round, list(s.after)) for s in program.steps]
            made.append((kind, lane, program.channel, program.blocks, program.rounds, steps))
    return made


class _Steps:
    """A growing list of steps."""

    def __init__(self) -> None:
        self.made: list[Step] = []

    def add(self, action: Action, peer: int, block: int, span: int, at: int, after: Iterable[int] = ()) -> int:
        """The index of the new step."""
        self.made.append(Step(action, peer, block, span, at, tuple(sorted(set(after)))))
        return len(self.made) - 1


# --- trees ---


def steps_of_tree(kind: str, view: Orientation, from_children: int, to_parent: int, down: int) -> tuple[Step, ...]:
    """The steps of a node with this view, given the rounds in which sums come from its children and go to its parent,
    and that in which it sends results down."""
    steps = _Steps()
    ready: tuple[int, ...] = ()
    if kind != "broadcast":
        for child in view.children:
            ready = (steps.add(Action.RECEIVE_ADD, child, 0, 1, from_children, ready),)
        if view.parent >= 0:
            ready = (steps.add(Action.SEND_ACC, view.parent, 0, 1, to_parent, ready),)
        else:
            ready = (steps.add(Action.FINISH, NOBODY, 0, 1, max(0, down - 1), ready),)
    if kind != "reduce":
        if view.parent >= 0:
            ready = (steps.add(Action.RECEIVE_RESULT, view.parent, 0, 1, down - 1, ready),)
        for child in view.children:
            steps.add(Action.SEND_RESULT, child, 0, 1, down, ready)
    return tuple(steps.made)


def _tree_programs(plan: Plan, kind: str, lane: int, root: int | None) -> tuple[Program, ...]:
    tree = plan.trees[lane]
    top = tree.index(-1) if root is None else root
    views = orient(tree, top)
    depth = {top: 0}
    downwards = [top]
    for node in downwards:
        for child in views[node].children:
            depth[child] = depth[node] + 1
            downwards.append(child)
    height: dict[int, int] = {}
    for node in reversed(downwards):
        height[node] = max((height[child] + 1 for child in views[node].children), default=0)
    rounds = max(1, 2 * height[top])
    programs = []
    for node, view in enumerate(views):
        to_parent = height[view.parent] - 1 if view.parent >= 0 else NOBODY
        steps = steps_of_tree(kind, view, height[node] - 1, to_parent, height[top] + depth[node])
        programs.append(Program(channel_of(TREE, lane), 1, rounds, steps))
    return tuple(programs)


# --- ring ---


def _ring_program(order: tuple[int, ...], place: int, kind: str, channel: int) -> Program:
    """Blocks are numbered as the nodes where they are finished."""
    n = len(order)
    scatters, gathers = kind != "allgather", kind != "reduce_scatter"
    steps = _Steps()
    following, preceding = order[(place + 1) % n], order[place - 1]
    sent: dict[int, int] = {}
    ready: tuple[int, ...] = ()
    if scatters:
        for k in range(n - 1):
            outgoing, incoming = order[(place - 1 - k) % n], order[(place - 2 - k) % n]
            sent[outgoing] = steps.add(Action.SEND_ACC, following, outgoing, 1, k, ready)
            ready = (steps.add(Action.RECEIVE_ADD, preceding, incoming, 1, k),)
        ready = (steps.add(Action.FINISH, NOBODY, order[place], 1, max(0, n - 2), ready),)
    if gathers:
        first = n - 1 if scatters else 0
        for k in range(n - 1):
            outgoing, incoming = order[(place - k) % n], order[(place - 1 - k) % n]
            steps.add(Action.SEND_RESULT, following, outgoing, 1, first + k, ready)
            free = (sent[incoming],) if scatters else ()
            ready = (steps.add(Action.RECEIVE_RESULT, preceding, incoming, 1, first + k, free),)
    return Program(channel, n, max(1, (n - 1) * (scatters + gathers)), tuple(steps.made))


# --- line ---


def _line_program(order: tuple[int, ...], place: int, kind: str, channel: int) -> Program:
    """A ring that is not closed: sums of a block come to its node from both ends at once, and its result goes to both
    ends at once. It takes as many rounds as a ring, and the nodes at the ends do not talk to each other. Blocks are
    numbered as the nodes where they are finished."""
    n = len(order)
    scatters, gathers = kind != "allgather", kind != "reduce_scatter"
    ways = ((order, place), (order[::-1], n - 1 - place))
    steps = _Steps()
    sent: dict[int, int] = {}
    ready: tuple[int, ...] = ()
    if scatters:
        for way, at in ways:
            for to in reversed(range(at, n)):
                summed = ready if to == at else ()
                if at > 0:
                    summed = (steps.add(Action.RECEIVE_ADD, way[at - 1], way[to], 1, n - 2 - to + at, summed),)
                if to > at:
                    sent[way[to]] = steps.add(Action.SEND_ACC, way[at + 1], way[to], 1, n - 1 - to + at, summed)
                else:
                    ready = summed
        ready = (steps.add(Action.FINISH, NOBODY, order[place], 1, max(0, n - 2), ready),)
    if gathers:
        first = n - 1 if scatters else 0
        for way, at in ways:
            for origin in reversed(range(at + 1)):
                here = ready
                if origin < at:
                    free = (sent[way[origin]],) if scatters else ()
                    before = first + at - 1 - origin
                    here = (steps.add(Action.RECEIVE_RESULT, way[at - 1], way[origin], 1, before, free),)
                if at < n - 1:
                    steps.add(Action.SEND_RESULT, way[at + 1], way[origin], 1, first + at - origin, here)
    return Program(channel, n, max(1, (n - 1) * (scatters + gathers)), tuple(steps.made))


# --- recursive halving and doubling ---


def _halving_doubling_program(order: tuple[int, ...], place: int, channel: int) -> Program:
    """The first places beyond a power of two only hand their blocks to the place before, and get the results back."""
    n = len(order)
    p = 1 << (n.bit_length() - 1)
    extra = n - p
    distances = [p >> (i + 1) for i in range(p.bit_length() - 1)]
    rounds = 2 * len(distances) + 2
    steps = _Steps()

    def at(v: int) -> int:
        return order[2 * v] if v < extra else order[v + extra]

    if place < 2 * extra and place % 2:
        given = steps.add(Action.SEND_ACC, order[place - 1], 0, p, 0)
        steps.add(Action.RECEIVE_RESULT, order[place - 1], 0, p, rounds - 1, (given,))
        return Program(channel, p, rounds, tuple(steps.made))
    v = place // 2 if place < 2 * extra else place - extra
    added: tuple[int, ...] = ()
    if v < extra:
        added = (steps.add(Action.RECEIVE_ADD, order[place + 1], 0, p, 0),)
    low, sent = 0, {}
    for turn, d in enumerate(distances, 1):
        high = bool(v & d)
        sent[d] = steps.add(Action.SEND_ACC, at(v ^ d), low if high else low + d, d, turn, added)
        low += d if high else 0
        added = (steps.add(Action.RECEIVE_ADD, at(v ^ d), low, d, turn, added),)
    here = [steps.add(Action.FINISH, NOBODY, v, 1, len(distances), added)]
    for turn, d in enumerate(reversed(distances), len(distances) + 1):
        mine = v & ~(d - 1)
        steps.add(Action.SEND_RESULT, at(v ^ d), mine, d, turn, here)
        here.append(steps.add(Action.RECEIVE_RESULT, at(v ^ d), mine ^ d, d, turn, (sent[d],)))
    if v < extra:
        steps.add(Action.SEND_RESULT, order[place + 1], 0, p, rounds - 1, here)
    return Program(channel, p, rounds, tuple(steps.made))


def _neighbours(plan: Plan, algorithm: str, lane: int, node: int) -> list[int]:
    """Ascending."""
    if plan.nodes == 1:
        return []
    if algorithm == TREE:
        view = orient(plan.trees[lane], 0)[node]
        return sorted({view.parent, *view.children} - {NOBODY})
    place = plan.order.index(node)
    if algorithm == RING:
        return sorted({plan.order[place - 1], plan.order[(place + 1) % plan.nodes]})
    if algorithm == LINE:
        return sorted((*plan.order[max(0, place - 1) : place], *plan.order[place + 1 : place + 2]))
    steps = program_of(plan, "allreduce", algorithm, lane, node).steps
    return sorted({step.peer for step in steps} - {NOBODY})
