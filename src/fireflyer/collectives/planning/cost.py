"""How long a collective takes, predicted from a few speeds; and which chunk size is best. Pure.

The model is alpha-beta-gamma for a pipeline of chunks. An array of S bytes is cut into chunks of c bytes that go in
turn to two lanes; each lane has at most `window / 2` chunks under way on a node. With K chunks in a lane

    time = local + max(trip, busy) + (K - 1) * max(busy, held / (window / 2))

`local` is what the first and last chunks need of the node's memory; `trip` the time of a chunk alone on its longest
way (hops times latency, plus the bytes that it waits for on that way); `busy` the time for which the busiest resource
serves one chunk of each lane: the network card in one direction, the leader's thread (messages, bytes through sockets,
additions), the node's memory, or the links between zones; `held` the part of the trip for which a node keeps a slot for
the chunk: all of it, except where nothing comes back. What an algorithm does to a node is a `Shape` (see
`shapes`); its fields are the
whole difference between algorithms. For a tree the shape is counted on the trees themselves, so that crossing trees and
uneven zones need no formulas of their own.

All four are linear in c, so between the points where two of them are equal the time is convex in c, and its minimum is
at one of few places that have closed forms: `best_chunk_bytes` compares these.

The formulas of each algorithm, their sources, and what the model gets wrong: docs/design/0009-placement-and-cost.md.
"""

from __future__ import annotations

import functools
import math
from typing import Final, NamedTuple

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.units import MIB, SECOND
from fireflyer.collectives.planning.plan import DEFAULT_WINDOW, MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, PARTED, WIDEST_ELEMENT
from fireflyer.collectives.planning.shapes import shape_of

__all__ = ["Layout", "Speeds", "best_chunk_bytes", "one_node_ns", "predict_ns"]

SLOT_BYTES: Final = 32 * MIB
FLIGHT_BYTES: Final = 2 * MIB
GOOD_ENOUGH: Final = 1.05
"""Fewer, larger chunks are worth this much: they need fewer messages, and where several resources are nearly busy the
prediction is too good for small ones."""


class Speeds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Declared by a person or measured by `fireflyer.collectives.tuning`; one number for all nodes: the slowest counts.

    The defaults are those of two processes on one machine over loopback.
    """

    latency_ns: float = 30_000.0
    """Latency of a small message from a leader's thread to that of another node, one way, waking included."""
    bytes_per_s: float = 3e9
    """Bandwidth of a node into the network in one direction."""
    both_ways_bytes_per_s: float = 5e9
    """Bandwidth of a leader's thread, sent and received together, while both directions are busy."""
    message_ns: float = 4_000.0
    """Processor time of a leader's thread for one message, sent or received."""
    add_bytes_per_s: float = 15e9
    """Bytes of operands that one thread reads while adding."""
    memory_bytes_per_s: float = 30e9
    """Memory bandwidth of all ranks of a node together, read and written."""
    local_latency_ns: float = 5_000.0
    """Latency from one rank to another of the same node."""
    cross_latency_ns: float = 0.0
    """Latency between zones, in place of `latency_ns`; 0: the same."""
    cross_bytes_per_s: float = 0.0
    """Bandwidth of all links between two zones in one direction, as far as this job may use them; 0: no limit."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            may_be_zero = name.startswith("cross_")
            if not math.isfinite(value) or value < 0 or (value == 0 and not may_be_zero):
                raise UsageError(f"{name} {value} must be a {'number from 0' if may_be_zero else 'positive number'}")


class Layout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the speeds are applied to."""

    nodes: int
    ranks_per_node: int = 1
    """Of the fullest node."""
    window: int = DEFAULT_WINDOW
    """Chunks in flight on a node, as in `Plan`."""
    zones: tuple[int, ...] = ()
    """The zone of each node; empty: all in one."""
    slot_bytes: int = SLOT_BYTES
    """What the slots of a node may take together: no more than its last-level cache, or chunks go through memory once
    more than the model says."""
    flight_bytes: int = FLIGHT_BYTES
    """Of the chunks in flight together: they should stay in the cache of the leader's core. With more of them summing
    between two nodes took 1.7 times as long here."""

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.ranks_per_node < 1 or self.window < 2:
            raise UsageError(f"layout {self.nodes} x {self.ranks_per_node}, window {self.window}: too small")
        if self.slot_bytes < 1 or self.flight_bytes < 1:
            raise UsageError(f"slot_bytes {self.slot_bytes} and flight_bytes {self.flight_bytes} must be positive")
        if self.zones and len(self.zones) != self.nodes:
            raise UsageError(f"zones names {len(self.zones)} nodes of {self.nodes}; one zone for each is needed")

    @property
    def zone_of_node(self) -> tuple[int, ...]:
        return self.zones or (0,) * self.nodes

    @property
    def most_chunk_bytes(self) -> int:
        """A slot has a part for each rank, the sum, and the result."""
        most = min(self.slot_bytes // (self.ranks_per_node + 2), self.flight_bytes) // self.window
        return min(MAX_CHUNK_BYTES, max(1, most // MIN_CHUNK_BYTES) * MIN_CHUNK_BYTES)

    def least_chunk_bytes(self, kind: str) -> int:
        """A chunk of parts holds at least an element of each."""
        parts = self.nodes * self.ranks_per_node if kind in PARTED else 1
        return -(-parts * WIDEST_ELEMENT // MIN_CHUNK_BYTES) * MIN_CHUNK_BYTES


def predict_ns(
    speeds: Speeds, layout: Layout, kind: str, algorithm: str, nbytes: int, chunk_bytes: int | None = None
) -> float:
    """Predicted time of an operation on an array of `nbytes` (all parts together; of fp32 or wider: smaller floats
    travel as fp32). `chunk_bytes` None: the best. On one node the algorithm is the node's own. Raises `UsageError` for
    a kind that the algorithm cannot do."""
    if nbytes < 0:
        raise UsageError(f"nbytes {nbytes} must not be negative")
    if chunk_bytes is None:
        chunk_bytes = best_chunk_bytes(speeds, layout, kind, algorithm, nbytes)
    if layout.nodes == 1:
        return one_node_ns(speeds, layout, nbytes)
    return _pipeline_ns(_cost(speeds, layout, kind, algorithm), max(1, layout.window // 2), nbytes, chunk_bytes)


def one_node_ns(speeds: Speeds, layout: Layout, nbytes: int) -> float:
    """Of a sum on one node, each rank its slice: every array read once and written once, three hand-overs."""
    ranks = layout.ranks_per_node
    memory_ns = 2 * ranks * nbytes * SECOND / speeds.memory_bytes_per_s
    return 3 * speeds.local_latency_ns + max(memory_ns, nbytes * SECOND / speeds.add_bytes_per_s)


def best_chunk_bytes(speeds: Speeds, layout: Layout, kind: str, algorithm: str, nbytes: int) -> int:
    """The chunk size with the least predicted time, or a larger one that is as good to within `GOOD_ENOUGH`: a multiple
    of 4 KiB that a plan accepts."""
    least, most = layout.least_chunk_bytes(kind), layout.most_chunk_bytes
    if layout.nodes == 1 or nbytes <= least:
        shape_of(kind, algorithm, layout.zone_of_node)  # refuses what cannot be done
        return least
    cost, slots = _cost(speeds, layout, kind, algorithm), max(1, layout.window // 2)
    turns = (*cost.busy, cost.held.divided(slots))
    wishes = [nbytes / 2, float(nbytes)]
    wishes += [a.meets(b) for a in (cost.way, *turns) for b in turns if a is not b]
    # d/dc of start + (S / 2c - 1) * (fixed + slope * c) = 0
    for start in (cost.way, *cost.busy):
        for turn in turns:
            rise = cost.local.slope + start.slope - turn.slope
            wishes.append(math.sqrt(nbytes * turn.fixed_ns / (2 * rise)) if rise > 0 else nbytes / 2)
    most = max(least, most)
    chunks = sorted({_rounded(wish, least, most, step) for wish in wishes for step in (0, 1)})
    best_ns = min(_pipeline_ns(cost, slots, nbytes, chunk) for chunk in chunks)
    good = [chunk for chunk in chunks if _pipeline_ns(cost, slots, nbytes, chunk) <= GOOD_ENOUGH * best_ns]
    best = max(good)
    while 2 * best <= most and _pipeline_ns(cost, slots, nbytes, 2 * best) <= GOOD_ENOUGH * best_ns:
        best *= 2
    return best


class _Line(NamedTuple):
    """A time as a linear function of the chunk's bytes."""

    fixed_ns: float
    slope: float
    """ns per byte."""

    def at(self, chunk_bytes: int) -> float:
        return self.fixed_ns + self.slope * chunk_bytes

    def divided(self, by: float) -> _Line:
        return _Line(self.fixed_ns / by, self.slope / by)

    def meets(self, other: _Line) -> float:
        """The bytes at which both are equal; 0 where they never are."""
        rise = self.slope - other.slope
        return (other.fixed_ns - self.fixed_ns) / rise if rise else 0.0


class _Cost(NamedTuple):
    local: _Line
    """Into the first chunks and out of the last, before and after the network has them."""
    way: _Line
    busy: tuple[_Line, ...]
    """Of each resource; the largest counts."""
    held: _Line


@functools.lru_cache(maxsize=64)  # choosing a route and a chunk size asks for the same one again and again
def _cost(speeds: Speeds, layout: Layout, kind: str, algorithm: str) -> _Cost:
    shape = shape_of(kind, algorithm, layout.zone_of_node)
    wire_ns, thread_ns = SECOND / speeds.bytes_per_s, SECOND / speeds.both_ways_bytes_per_s
    add_ns = SECOND / speeds.add_bytes_per_s
    memory_ns = 2 * layout.ranks_per_node * SECOND / speeds.memory_bytes_per_s
    near, far = speeds.latency_ns, speeds.cross_latency_ns or speeds.latency_ns
    crossing_ns = shape.crossing * SECOND / speeds.cross_bytes_per_s if speeds.cross_bytes_per_s else 0.0
    way = _Line(
        shape.hops * (near + 2 * speeds.message_ns) + shape.cross_hops * (far - near),
        shape.trip * max(wire_ns, thread_ns) + shape.trip_added * add_ns,
    )
    local = _Line(2 * speeds.local_latency_ns, 2 * memory_ns)
    held = _Line(way.fixed_ns * shape.held + 2 * speeds.local_latency_ns, way.slope * shape.held + memory_ns)
    thread = _Line(shape.messages * speeds.message_ns, 2 * shape.traffic * thread_ns + shape.added * add_ns)
    others = _Line(0.0, max(shape.traffic * wire_ns, 2 * memory_ns, crossing_ns))
    return _Cost(local, way, (thread, others), held)


def _pipeline_ns(cost: _Cost, slots: int, nbytes: int, chunk_bytes: int) -> float:
    chunk = min(chunk_bytes, nbytes)
    lanes = 2 if nbytes > chunk else 1
    turns = max(1.0, nbytes / (lanes * chunk)) if chunk else 1.0
    busy = max(line.at(chunk) for line in cost.busy) * lanes / 2
    each = max(busy, cost.held.at(chunk) / slots)
    return cost.local.at(chunk) * lanes / 2 + max(cost.way.at(chunk), busy) + (turns - 1) * each


def _rounded(wish: float, least: int, most: int, step: int) -> int:
    """To a multiple of 4 KiB below (`step` 0) or above (1), from `least` to `most`."""
    pages = math.floor(min(max(wish, 0.0), float(most)) / MIN_CHUNK_BYTES) + step
    return min(most, max(least, pages * MIN_CHUNK_BYTES))
