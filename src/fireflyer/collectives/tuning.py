"""Measures what the cost model needs, on a communicator that exists; opt-in. Rank 0 decides, so all ranks plan alike.

    tuning = tune(comm)                    # every rank, at the same time; some hundred milliseconds
    save(msgspec.json.encode(tuning))      # with the job's checkpoints
    print(explain(tuning.plan))
    Communicator.create(plan=tuning.plan, ...)

A restart creates its communicator with the plan that was stored and measures nothing, so it sums in the same order
(`tune(comm, kept=stored)` hands the stored one back where it fits the group, and measures where it does not).

What is measured, each while the others do the same, so that what they share is shared:

1. by all ranks: how fast a rank adds what is in its cache, and updates memory in place;
2. by the leaders of pairs of nodes, first inside zones, then one pair for neighbouring zones: bytes per second of long
   messages in one direction and in both, and the round trip of short ones;
3. by all ranks: small sums, whose time over the number of hops is the latency as the collectives themselves see it.

What is not measured keeps its declared value: the processor time of a message, and, on several nodes, the hand-over
inside a node. The slowest node counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from fireflyer.base.units import KIB, MIB, MS, SECOND
from fireflyer.collectives.group import Group
from fireflyer.collectives.planning.cost import Speeds
from fireflyer.collectives.planning.plan import TREE, Plan
from fireflyer.collectives.planning.routing import layout_of, plan_for
from fireflyer.collectives.planning.shapes import shape_of
from fireflyer.native import reduce as native_reduce

__all__ = ["Tuning", "measure", "tune"]

Array = npt.NDArray[np.float64]

SMALL_SUMS: Final = 30
ROUND_TRIPS: Final = 20
LONG_BYTES: Final = 4 * MIB
MOST_LONG: Final = 12
LONG_NS: Final = 40 * MS
"""About so long a direction is measured."""
CACHED_BYTES: Final = 128 * KIB
MEMORY_BYTES: Final = 16 * MIB
LOCAL_NS: Final = 15 * MS
LEAST_LATENCY_NS: Final = 500.0
"""What is left of a latency when the processor time of its messages is taken off it may be nothing."""
TAG: Final = 1


class Tuning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measurement, and what follows from it. JSON-able; to be stored with the job."""

    speeds: Speeds
    plan: Plan
    zones: tuple[int, ...] = ()
    took_ns: int = 0


class _Pair(NamedTuple):
    """What a pair of leaders measured."""

    latency_ns: float
    bytes_per_s: float
    both_ways_bytes_per_s: float


def tune(
    comm: Group,
    *,
    zones: Sequence[int] = (),
    declared: Speeds | None = None,
    only: Sequence[str] | None = None,
    kept: Tuning | None = None,
) -> Tuning:
    """Called by all ranks of `comm` with the same arguments, with nothing else under way. All get the same result.

    `zones[n]` is the zone of node n, `declared` what stands in for the speeds that are not measured, `only` names the
    algorithms to choose from, `kept` is an earlier result. Raises what operations raise, and `UsageError`.
    """
    here = (comm.plan.node_of_rank, comm.plan.sums, tuple(zones))
    if kept is not None and (kept.plan.node_of_rank, kept.plan.sums, kept.zones) == here:
        return kept
    begin_ns = time.monotonic_ns()
    speeds = measure(comm, zones=zones, declared=declared)
    plan = plan_for(comm.plan.node_of_rank, speeds, zones=zones, only=only, sums=comm.plan.sums)
    took = np.array([time.monotonic_ns() - begin_ns])
    comm.broadcast(took, root=0)
    return Tuning(speeds=speeds, plan=plan, zones=tuple(zones), took_ns=int(took[0]))


def measure(comm: Group, *, zones: Sequence[int] = (), declared: Speeds | None = None) -> Speeds:
    """The speeds of the group's machines and network, the same on all ranks. See `tune`."""
    speeds = declared or Speeds()
    plan = comm.plan
    zone_of_node = layout_of(plan.node_of_rank, zones).zone_of_node
    comm.barrier()
    local = _local_rates(comm)
    near, far = _pairs(zone_of_node)
    inside = _measure_pairs(comm, near)
    across = _measure_pairs(comm, far)
    small_ns = _small_sum_ns(comm)
    found = _Found(_shared(comm, local), _shared(comm, inside), _shared(comm, across), small_ns)
    return _agreed(comm, _speeds_of(speeds, plan, zone_of_node, found))


class _Found(NamedTuple):
    """A row for each rank; zeros where a rank has measured nothing."""

    local: Array
    """Adding, updating memory: bytes per second."""
    inside: Array
    across: Array
    """As `_Pair`."""
    small_ns: float


def _speeds_of(declared: Speeds, plan: Plan, zones: tuple[int, ...], found: _Found) -> Speeds:
    memory = [sum(found.local[rank, 1] for rank in plan.ranks_of(node)) for node in range(plan.nodes)]
    known = {"add_bytes_per_s": float(found.local[:, 0].min()), "memory_bytes_per_s": float(min(memory))}
    if plan.nodes == 1:
        known["local_latency_ns"] = max(LEAST_LATENCY_NS, found.small_ns / 3)
        return msgspec.structs.replace(declared, **known)
    inside, across = _slowest(found.inside), _slowest(found.across)
    network = inside or across
    if network is not None:
        known["bytes_per_s"] = network.bytes_per_s
        known["both_ways_bytes_per_s"] = network.both_ways_bytes_per_s
    if across is not None and inside is not None:
        known["cross_bytes_per_s"] = across.bytes_per_s
    farther_ns = max(0.0, across.latency_ns - inside.latency_ns) if across and inside else 0.0
    way_ns = found.small_ns - 2 * declared.local_latency_ns - 2 * farther_ns * (len(set(zones)) - 1)
    known["latency_ns"] = max(LEAST_LATENCY_NS, way_ns / _hops(plan) - 2 * declared.message_ns)
    if farther_ns:
        known["cross_latency_ns"] = known["latency_ns"] + farther_ns
    return msgspec.structs.replace(declared, **known)


def _hops(plan: Plan) -> int:
    """Of a small sum, which is one chunk in the first lane."""
    algorithm = plan.route("allreduce", 4).algorithm
    if algorithm != TREE:
        return shape_of("allreduce", algorithm, (0,) * plan.nodes).hops
    parents, deepest = plan.trees[0], 0
    for node in range(plan.nodes):
        hops, above = 0, parents[node]
        while above >= 0:
            hops, above = hops + 1, parents[above]
        deepest = max(deepest, hops)
    return 2 * deepest


def _slowest(rows: Array) -> _Pair | None:
    measured = rows[rows[:, 0] > 0]
    if not len(measured):
        return None
    return _Pair(float(measured[:, 0].max()), float(measured[:, 1].min()), float(measured[:, 2].min()))


def _pairs(zones: tuple[int, ...]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Pairs of nodes that measure at the same time: inside zones, and between neighbouring zones. No node is in two
    pairs of a list (a chain of zones leaves out every other edge)."""
    members: dict[int, list[int]] = {}
    for node, zone in enumerate(zones):
        members.setdefault(zone, []).append(node)
    near = [pair for nodes in members.values() for pair in zip(nodes[::2], nodes[1::2], strict=False)]
    first = [members[zone][0] for zone in sorted(members)]
    return near, list(zip(first[::2], first[1::2], strict=False))


def _measure_pairs(comm: Group, pairs: Sequence[tuple[int, int]]) -> Sequence[float]:
    """What this rank has measured as the first of its pair, else nothing."""
    comm.barrier()
    result: Sequence[float] = (0.0, 0.0, 0.0)
    for one, other in pairs:
        first, second = comm.plan.leader_of(one), comm.plan.leader_of(other)
        if comm.rank == first:
            result = _lead(comm, second)
        elif comm.rank == second:
            _follow(comm, first)
    comm.barrier()
    return result


def _lead(comm: Group, peer: int) -> _Pair:
    word = np.zeros(1, np.int64)
    trips = [_timed(lambda: _there_and_back(comm, peer, word)) for _ in range(ROUND_TRIPS)]
    long, back = np.zeros(LONG_BYTES, np.uint8), np.zeros(LONG_BYTES, np.uint8)
    _stream(comm, peer, long, 1)  # connections and windows grow
    once_ns = _timed(lambda: _stream(comm, peer, long, 1))
    count = max(1, min(MOST_LONG, int(LONG_NS / once_ns)))
    word[0] = count
    comm.send(word, to=peer, tag=TAG)
    one_way_ns = _timed(lambda: _stream(comm, peer, long, count))
    both_ns = _timed(lambda: _both_ways(comm, peer, long, back, count))
    moved = count * LONG_BYTES * SECOND
    return _Pair(median(trips[ROUND_TRIPS // 4 :]) / 2, moved / one_way_ns, 2 * moved / both_ns)


def _follow(comm: Group, peer: int) -> None:
    word = np.zeros(1, np.int64)
    for _ in range(ROUND_TRIPS):
        _back_and_there(comm, peer, word)
    long, back = np.zeros(LONG_BYTES, np.uint8), np.zeros(LONG_BYTES, np.uint8)
    for _ in range(2):
        _drain(comm, peer, long, 1)
    comm.recv(word, source=peer, tag=TAG)
    count = max(1, min(MOST_LONG, int(word[0])))
    _drain(comm, peer, long, count)
    _both_ways(comm, peer, long, back, count)


def _there_and_back(comm: Group, peer: int, word: npt.NDArray[np.int64]) -> None:
    comm.send(word, to=peer, tag=TAG)
    comm.recv(word, source=peer, tag=TAG)


def _back_and_there(comm: Group, peer: int, word: npt.NDArray[np.int64]) -> None:
    comm.recv(word, source=peer, tag=TAG)
    comm.send(word, to=peer, tag=TAG)


def _stream(comm: Group, peer: int, data: npt.NDArray[np.uint8], count: int) -> None:
    """Done when the other has said that it has everything."""
    works = [comm.send(data, to=peer, tag=TAG, async_op=True) for _ in range(count)]
    comm.recv(np.zeros(1, np.int64), source=peer, tag=TAG)
    for work in works:
        work.wait()


def _drain(comm: Group, peer: int, data: npt.NDArray[np.uint8], count: int) -> None:
    for _ in range(count):
        comm.recv(data, source=peer, tag=TAG)
    comm.send(np.zeros(1, np.int64), to=peer, tag=TAG)


def _both_ways(comm: Group, peer: int, out: npt.NDArray[np.uint8], into: npt.NDArray[np.uint8], count: int) -> None:
    works = [comm.send(out, to=peer, tag=TAG, async_op=True) for _ in range(count)]
    for _ in range(count):
        comm.recv(into, source=peer, tag=TAG)
    for work in works:
        work.wait()


def _small_sum_ns(comm: Group) -> float:
    word = np.zeros(1, np.float32)
    times = [_timed(lambda: comm.allreduce(word)) for _ in range(SMALL_SUMS)]
    return median(times[SMALL_SUMS // 3 :])


def _local_rates(comm: Group) -> Sequence[float]:
    one, other = (np.ones(CACHED_BYTES // 4, np.float32) for _ in range(2))
    out = np.empty_like(one)
    large = np.ones(MEMORY_BYTES // 4, np.float32)
    adding = _rate(lambda: native_reduce(out, [one, other], "f32"), 2 * CACHED_BYTES)
    comm.barrier()
    updating = _rate(lambda: np.add(large, 1.0, out=large), 2 * MEMORY_BYTES)
    return adding, updating


def _rate(work: Callable[[], object], nbytes: int) -> float:
    """Bytes per second of something that moves `nbytes`, after it was done once."""
    work()
    begin_ns = time.monotonic_ns()
    rounds = 0
    while (took_ns := time.monotonic_ns() - begin_ns) < LOCAL_NS or rounds == 0:
        work()
        rounds += 1
    return rounds * nbytes * SECOND / max(1, took_ns)


def _timed(work: Callable[[], object]) -> int:
    begin_ns = time.monotonic_ns()
    work()
    return max(1, time.monotonic_ns() - begin_ns)


def _shared(comm: Group, mine: Sequence[float]) -> Array:
    """A row for each rank, on all ranks: each adds its own to zeros, which is exact."""
    rows = np.zeros((comm.world_size, len(mine)), np.float64)
    rows[comm.rank] = mine
    comm.allreduce(rows)
    return rows


def _agreed(comm: Group, speeds: Speeds) -> Speeds:
    """Rank 0's."""
    names = Speeds.__struct_fields__
    values = np.array([getattr(speeds, name) for name in names], np.float64)
    comm.broadcast(values, root=0)
    return Speeds(**{name: float(value) for name, value in zip(names, values, strict=True)})
