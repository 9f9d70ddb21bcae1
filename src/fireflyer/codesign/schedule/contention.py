"""Several pipelines (data-parallel replicas) whose ranks share the NIC of a node, and how to keep them apart.

A node holds as many ranks as there are replicas, and sends through one NIC. Ranks compute as in `timing`; a message
takes its time on the wire at full speed if it has the NIC of its sender for itself. Otherwise the NIC is fair, and
divides its speed equally among the messages that are on it, or sends one after another in the order in which they come
(FIFO). Messages between ranks of one node take no time on the NIC.

Source: one NIC serves 8 GPUs of a node of the Fire-Flyer 2 cluster; its training library gives the 8 GPUs of a node to
different replicas (Fire-Flyer AI-HPC, 2024, section V-B2) "which staggers the timing". The layouts:

- `lockstep`: rank r of every replica is on node r, and all begin at once: all its messages meet at the NIC;
- `offset`: the same, but replica d begins the time of d messages later;
- `rotated`: rank r of replica d is on node r + d (modulo the ranks): ranks of a node are at different stages;
- `one-node`: all ranks of a replica are on one node. No message of the pipeline leaves it; but the gradients of as many
  different stages as it has ranks do, where they were first added up inside the node in the other layouts.
"""

from __future__ import annotations

import enum
import heapq
from typing import Final, NamedTuple

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.codesign.schedule.costs import Costs
from fireflyer.codesign.schedule.program import Program
from fireflyer.codesign.schedule.timing import durations_s, simulate

__all__ = ["Choice", "Layout", "Policy", "Sharing", "choose_layout", "simulate_shared"]

ENOUGH: Final = 0.001
"""A layout that is slower than the fastest by less than this part of the step counts as equally fast."""


class Layout(enum.StrEnum):
    """Nodes and begins of the replicas; see the top of this module."""

    LOCKSTEP = "lockstep"
    OFFSET = "offset"
    ROTATED = "rotated"
    ONE_NODE = "one-node"


class Policy(enum.StrEnum):
    """Order in which a NIC serves several messages at once."""

    FAIR = "fair"
    FIFO = "fifo"


class Sharing(NamedTuple):
    """Outcome of one layout."""

    layout: Layout
    policy: Policy
    total_s: float
    """Time until the last rank of the last replica has ended its last pass."""
    alone_s: float
    """The same schedule with messages that take no time."""

    @property
    def slowdown(self) -> float:
        return self.total_s / self.alone_s


class Choice(NamedTuple):
    """The layout to use, what each takes, and why."""

    chosen: Sharing
    all: tuple[Sharing, ...]
    reason: str


def simulate_shared(
    program: Program, costs: Costs, replicas: int, layout: Layout = Layout.LOCKSTEP, policy: Policy = Policy.FAIR
) -> Sharing:
    """Times `replicas` pipelines whose nodes have one NIC each. Raises `UsageError` for fewer than one replica, and for
    costs of another number of stages."""
    if replicas < 1:
        raise UsageError(f"{replicas} replicas share a NIC; give at least 1")
    alone = simulate(program, _without_messages(costs)).total_s
    if layout is Layout.ONE_NODE:
        return Sharing(layout, policy, alone, alone)
    return Sharing(layout, policy, _Shared(program, costs, replicas, layout, policy).run(), alone)


def choose_layout(program: Program, costs: Costs, replicas: int, policy: Policy = Policy.FAIR) -> Choice:
    """Simulates the layouts that keep a replica on many nodes, and takes the fastest; of equally fast ones the first of
    lockstep, offset, rotated: the simplest. `Layout.ONE_NODE` is timed for comparison, not chosen: it multiplies the
    traffic of the data-parallel sums by the ranks of a node, which are not in this model."""
    found = tuple(simulate_shared(program, costs, replicas, layout, policy) for layout in Layout)
    spread = [one for one in found if one.layout is not Layout.ONE_NODE]
    fastest = min(one.total_s for one in spread)
    chosen = next(one for one in spread if one.total_s <= fastest * (1 + ENOUGH))
    others = ", ".join(f"{one.layout} {one.slowdown:.2f}" for one in found if one is not chosen)
    reason = (
        f"{chosen.layout} takes {chosen.slowdown:.2f} of the time without messages ({others}); "
        f"{_why(chosen.layout, costs, replicas)}"
    )
    return Choice(chosen, found, reason)


def _why(layout: Layout, costs: Costs, replicas: int) -> str:
    if layout is Layout.OFFSET:
        last = (replicas - 1) * _offset_s(costs)
        return f"replica d begins by d messages late, the last one by {last:g}: messages do not meet at the NIC"
    if layout is Layout.ROTATED:
        return "rank r of replica d is on node r + d, and ranks of a node send at different times"
    return "another layout gains less than a thousandth"


def _without_messages(costs: Costs) -> Costs:
    return msgspec.structs.replace(costs, send_s=(), latency_s=0.0, reduce_s=(), optimizer_s=())


def _offset_s(costs: Costs) -> float:
    return max(costs.send_s, default=0.0)


class _Message(NamedTuple):
    """On a NIC: to which item of which replica, and its time on the wire."""

    replica: int
    item: int
    wire_s: float


class _Nic:
    """Egress of one node. `next_s` is when the first of its messages leaves it, if no other comes before."""

    def __init__(self, policy: Policy) -> None:
        self._fair = policy is Policy.FAIR
        self._heap: list[tuple[float, int, _Message]] = []
        self._served = 0.0
        """Seconds of full speed that each message on a fair NIC has had since the begin; with FIFO, when it is free."""
        self._now = 0.0
        self._count = 0

    def add(self, now: float, message: _Message) -> None:
        self._advance(now)
        self._count += 1
        if self._fair:
            heapq.heappush(self._heap, (self._served + message.wire_s, self._count, message))
        else:
            self._served = max(self._served, now) + message.wire_s
            heapq.heappush(self._heap, (self._served, self._count, message))

    def next_s(self) -> float | None:
        if not self._heap:
            return None
        first = self._heap[0][0]
        return max(self._now, self._now + (first - self._served) * len(self._heap)) if self._fair else first

    def take(self, now: float) -> _Message:
        self._advance(now)
        target, _, message = heapq.heappop(self._heap)
        if self._fair:
            self._served = target
        return message

    def _advance(self, now: float) -> None:
        if self._fair and self._heap:
            self._served += (now - self._now) / len(self._heap)
        self._now = now


class _Shared:
    """The events of one step: passes that end, and messages that leave a NIC or arrive."""

    def __init__(self, program: Program, costs: Costs, replicas: int, layout: Layout, policy: Policy) -> None:
        self._items = program.items
        self._rows = program.rows
        self._durations = durations_s(program, costs)
        boundaries = len(costs.forward_s) - 1
        self._local = boundaries
        self._wires = costs.send_s or (0.0,) * boundaries
        self._latency = costs.latency_s
        self._consumers: list[list[tuple[int, int]]] = [[] for _ in program.items]
        """By item: the items that wait for its output, and the boundary."""
        for index, item in enumerate(program.items):
            for need, boundary in ((item.need, item.boundary), (item.other_need, item.other_boundary)):
                if need >= 0:
                    self._consumers[need].append((index, boundary))
        self._missing = [[(item.need >= 0) + (item.other_need >= 0) for item in program.items] for _ in range(replicas)]
        self._position = [[0] * len(program.rows) for _ in range(replicas)]
        self._busy = [[False] * len(program.rows) for _ in range(replicas)]
        ranks = len(program.rows)
        self._node = [
            [(rank + replica) % ranks if layout is Layout.ROTATED else rank for rank in range(ranks)]
            for replica in range(replicas)
        ]
        self._nics = [_Nic(policy) for _ in range(ranks)]
        offset = _offset_s(costs) if layout is Layout.OFFSET else 0.0
        self._begins = [replica * offset for replica in range(replicas)]
        # (time, order, what, replica or NIC, item or version). A NIC event of an old version is stale.
        self._events: list[tuple[float, int, str, int, int]] = []
        self._order = 0
        self._versions = [0] * ranks

    def run(self) -> float:
        for replica, begin in enumerate(self._begins):
            for rank in range(len(self._rows)):
                self._push(begin, "start", replica, rank)
        now = 0.0
        last = 0.0
        while self._events:
            now, _, what, first, second = heapq.heappop(self._events)
            if what == "start":
                self._start(now, first, second)
            elif what == "end":
                last = now
                self._end(now, first, second)
            elif what == "arrive":
                self._arrive(now, first, second)
            elif self._versions[first] == second:
                message = self._nics[first].take(now)
                self._push(now + self._latency, "arrive", message.replica, message.item)
                self._watch(first)
        return last

    def _start(self, now: float, replica: int, rank: int) -> None:
        position, row = self._position[replica][rank], self._rows[rank]
        if self._busy[replica][rank] or position == len(row):
            return
        item = row[position]
        if self._missing[replica][item] or now < self._begins[replica]:
            return
        self._busy[replica][rank] = True
        self._push(now + self._durations[self._items[item].work], "end", replica, item)

    def _end(self, now: float, replica: int, item: int) -> None:
        rank = self._items[item].rank
        self._busy[replica][rank] = False
        self._position[replica][rank] += 1
        for consumer, boundary in self._consumers[item]:
            if boundary == self._local:
                self._missing[replica][consumer] -= 1
            else:
                node = self._node[replica][rank]
                self._nics[node].add(now, _Message(replica, consumer, self._wires[boundary]))
                self._watch(node)
        self._start(now, replica, rank)

    def _arrive(self, now: float, replica: int, item: int) -> None:
        self._missing[replica][item] -= 1
        self._start(now, replica, self._items[item].rank)

    def _watch(self, node: int) -> None:
        self._versions[node] += 1
        when = self._nics[node].next_s()
        if when is not None:
            self._push(when, "sent", node, self._versions[node])

    def _push(self, when: float, what: str, first: int, second: int) -> None:
        self._order += 1
        heapq.heappush(self._events, (when, self._order, what, first, second))
