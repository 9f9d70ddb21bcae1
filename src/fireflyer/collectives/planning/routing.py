"""Which algorithm and chunk size an operation uses, by its kind and size: chosen by predicted time, with reasons. Pure.

The predictions of `cost` are compared at powers of two. A kind keeps its default algorithm unless another is clearly
better, and a row goes on to smaller sizes unless changing is worth it, so that a plan has few rows and each says
something. Equal arguments give equal rows; a job keeps those of its first start in its plan.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Final, NamedTuple

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.units import GIB, KIB, MIB, format_bytes
from fireflyer.collectives.planning.cost import FLIGHT_BYTES, SLOT_BYTES, Layout, Speeds, best_chunk_bytes, predict_ns
from fireflyer.collectives.planning.plan import (
    ACROSS_ZONES,
    BY_NODE,
    DEFAULT_CHUNK_BYTES,
    LINE,
    MAX_WINDOW,
    MIN_CHUNK_BYTES,
    SUITABLE,
    TREE,
    Plan,
    Route,
    make_plan,
)
from fireflyer.collectives.planning.trees import double_binary_tree
from fireflyer.topology import zone_order, zone_trees

__all__ = ["best_window", "choose_routes", "default_plan", "explain", "layout_of", "plan_for"]

SMALLEST: Final = KIB
LARGEST: Final = 4 * GIB
"""Between these sizes the algorithms are compared, at powers of two; beyond them nothing changes."""
WORTH: Final = (0.93, 0.85, 0.7, 0.5, 0.35, 0.25, 0.0)
"""Another algorithm or chunk size must take less than this share of the time, or the row goes on. The next is tried
where that makes more than `MAX_ROWS`."""
MAX_ROWS: Final = 8
"""Of one kind: a plan takes 64 routes in all."""
PREFERRED: Final = 0.9
"""Another algorithm than a kind's default must be predicted to take at most this share of its time: the model is no
better than that, and the tree has the fewest connections."""
SURE: Final = 0.75
"""Where no speeds are known, other chunks or a larger window must be predicted to take at most this share of the
time."""
LEAST_USEFUL: Final = 16 * KIB
"""Smaller chunks are not chosen for larger arrays: four of 4 KiB took twice the time of one of 16 KiB here, waking and
being woken."""
_ONE_NODE: Final = "one node: nothing crosses the network"
_WINDOWS: Final = (4, 8, 16, 32)
_UNDECLARED: Final = (DEFAULT_CHUNK_BYTES, DEFAULT_CHUNK_BYTES // 2, DEFAULT_CHUNK_BYTES // 4)
_LARGE: Final = (MIB, 25 * MIB, 186 * MIB)
"""The sizes for which a window is chosen: a small bucket, that of DistributedDataParallel, the paper's."""


def choose_routes(
    speeds: Speeds, layout: Layout, *, kinds: Sequence[str] = tuple(SUITABLE), only: Sequence[str] | None = None
) -> tuple[Route, ...]:
    """For each kind the best algorithm and chunk size by the size of the array, with the reason of each row.

    Across zones these are the algorithms that talk by one pair of nodes, and within one zone all but the line, which
    is no better than the ring there. The last row of a kind is for any size; sizes grow within a kind. `only` overrides
    the choice: of these algorithms the best is taken, for kinds that can do any of them. Raises `UsageError` for
    unknown names.
    """
    known = SUITABLE["allreduce"]
    unknown = [name for name in only or () if name not in known]
    if unknown:
        raise UsageError(f"algorithm {unknown[0]!r} is not known; algorithms are {', '.join(known)}")
    rows: list[Route] = []
    for kind in kinds:
        if kind not in SUITABLE:
            raise UsageError(f"kind {kind!r} has no routes; kinds are {', '.join(SUITABLE)}")
        rows += _rows(speeds, layout, kind, _allowed(kind, only, layout))
    return tuple(rows)


def _allowed(kind: str, only: Sequence[str] | None, layout: Layout) -> tuple[str, ...]:
    named = tuple(name for name in SUITABLE[kind] if name in (only or ()))
    if named:
        return named
    across = len(set(layout.zones)) > 1
    return tuple(name for name in SUITABLE[kind] if (name in ACROSS_ZONES if across else name != LINE))


def plan_for(
    node_of_rank: Sequence[int],
    speeds: Speeds,
    *,
    zones: Sequence[int] = (),
    window: int | None = None,
    only: Sequence[str] | None = None,
    sockets: int = 1,
    routes: Sequence[Route] = (),
    slot_bytes: int = SLOT_BYTES,
    flight_bytes: int = FLIGHT_BYTES,
    sums: str = BY_NODE,
) -> Plan:
    """A plan with routes by predicted time.

    `zones[n]` is the zone of node n (empty: all in one). Neighbouring zones then talk by one pair of nodes, whatever
    the operation, unless `only` or `routes` name an algorithm that needs more.
    `window` None: the best. `only` as in `choose_routes`. `routes` are taken as they are: nothing is chosen for the
    kinds that they name. `slot_bytes` and `flight_bytes` bound the memory, as in `Layout`. Raises `UsageError`.
    """
    layout = layout_of(node_of_rank, zones)
    layout = msgspec.structs.replace(layout, slot_bytes=slot_bytes, flight_bytes=flight_bytes)
    if window is not None and (window < 2 or window % 2 or window > MAX_WINDOW):
        raise UsageError(f"window {window} must be even and from 2 to {MAX_WINDOW}")
    layout = msgspec.structs.replace(layout, window=window or best_window(speeds, layout, only))
    named = {route.kind for route in routes}
    chosen = choose_routes(speeds, layout, kinds=[kind for kind in SUITABLE if kind not in named], only=only)
    order = zone_order(zones) if zones else None
    plan = make_plan(
        node_of_rank, window=layout.window, routes=(*chosen, *routes), node_order=order, sockets=sockets, sums=sums
    )
    return msgspec.structs.replace(plan, trees=zone_trees(zones, double_binary_tree)) if zones else plan


def default_plan(
    node_of_rank: Sequence[int],
    host_of_node: Sequence[str] = (),  # noqa: ARG001 - a `rendezvous.Planner` is told; this one does not ask who they are
) -> Plan:
    """What a group does that was given no plan, and knows nothing of its network but the number of nodes: the default
    algorithms, one size of chunks, and more of them in flight where a chunk has a long way. Raises `UsageError`."""
    speeds, layout = Speeds(), layout_of(node_of_rank)
    chunk, window, best_ns = DEFAULT_CHUNK_BYTES, layout.window, math.inf
    for more, smaller in product(_WINDOWS, _UNDECLARED) if layout.nodes > 1 else ():
        with_it = msgspec.structs.replace(layout, window=more)
        if smaller > with_it.most_chunk_bytes:
            continue
        ns = math.prod(predict_ns(speeds, with_it, "allreduce", TREE, size, smaller) for size in _LARGE)
        if ns < SURE ** len(_LARGE) * best_ns:
            chunk, window, best_ns = smaller, more, ns
    plan = make_plan(node_of_rank, chunk_bytes=chunk, window=window)
    reason = f"the default for {layout.nodes} nodes of which no speeds are known" if layout.nodes > 1 else _ONE_NODE
    routes = tuple(msgspec.structs.replace(route, reason=reason) for route in plan.routes)
    return msgspec.structs.replace(plan, routes=(*_halves(layout, chunk), *routes))


def _halves(layout: Layout, chunk_bytes: int) -> Iterator[Route]:
    """The rows of an allreduce that would be a single chunk, but for the shortest: one half for each lane, which go
    opposite ways at the same time. Between two nodes, whose sums do not depend on chunks; of one rank each, where
    another chunk is no work for other ranks."""
    if layout.nodes != 2 or layout.ranks_per_node > 1:
        return
    half = LEAST_USEFUL
    while half < chunk_bytes:
        yield Route("allreduce", 2 * half, TREE, half, "both lanes carry a half")
        half *= 2


def layout_of(node_of_rank: Sequence[int], zones: Sequence[int] = ()) -> Layout:
    """Raises `UsageError`."""
    ranks = Counter(node_of_rank)
    return Layout(nodes=len(ranks), ranks_per_node=max(ranks.values(), default=0), zones=tuple(zones))


def explain(plan: Plan) -> str:
    """The routes of a plan with their reasons, a line for each, for people."""
    return plan.describe()


def best_window(speeds: Speeds, layout: Layout, only: Sequence[str] | None = None) -> int:
    """Chunks in flight for large sums: more of them hide latency, but are smaller and keep fewer bytes in the cache.
    A larger window must pay. Does not change results, but for the chunk sizes chosen with it."""
    best, best_ns = layout.window, math.inf
    for window in _WINDOWS:
        with_it = msgspec.structs.replace(layout, window=window)
        ns = math.prod(_best_ns(speeds, with_it, only, size) for size in _LARGE)
        if ns < WORTH[0] ** len(_LARGE) * best_ns:
            best, best_ns = window, ns
    return best


class _Choice(NamedTuple):
    algorithm: str
    chunk_bytes: int


def _rows(speeds: Speeds, layout: Layout, kind: str, allowed: Sequence[str]) -> list[Route]:
    if layout.nodes == 1:
        chunk = max(DEFAULT_CHUNK_BYTES, layout.least_chunk_bytes(kind))
        return [Route(kind, None, allowed[0], chunk, _ONE_NODE)]
    sizes = [1] if kind == "barrier" else [SMALLEST << step for step in range((LARGEST // SMALLEST).bit_length())]
    best = [_best(speeds, layout, kind, allowed, size) for size in sizes]
    choices = (_merged(speeds, layout, kind, sizes, best, worth) for worth in WORTH)
    starts = next(rows for rows in choices if len(rows) <= MAX_ROWS)
    ends = [sizes[row.first] for row in starts[1:]]
    return [
        Route(
            kind,
            end and end - 1,
            row.choice.algorithm,
            _no_larger_than(row.choice.chunk_bytes, end, layout.least_chunk_bytes(kind)),
            _reason(row.choice.algorithm, row.times, sizes[row.first], layout),
        )
        for row, end in zip(starts, [*ends, None], strict=True)
    ]


def _no_larger_than(chunk_bytes: int, end: int | None, least: int) -> int:
    """A chunk beyond the row's largest array does no good, and slots are as large as the largest chunk."""
    return chunk_bytes if end is None else max(least, MIN_CHUNK_BYTES, min(chunk_bytes, end))


class _Row(NamedTuple):
    first: int
    """Index of its smallest size."""
    choice: _Choice
    times: dict[str, float]
    """Of all algorithms at that size."""


def _merged(
    speeds: Speeds,
    layout: Layout,
    kind: str,
    sizes: Sequence[int],
    best: Sequence[tuple[_Choice, dict[str, float]]],
    worth: float,
) -> list[_Row]:
    """From the largest size down, a row goes on unless changing is worth it: of chunks that are nearly as good the
    larger ones are taken, for what is not in the model (waking, and being woken) speaks for fewer messages."""
    rows = [_Row(len(sizes) - 1, *best[-1])]
    for index in reversed(range(len(sizes))):
        choice, times = best[index]
        now = rows[-1].choice
        as_now = predict_ns(speeds, layout, kind, now.algorithm, sizes[index], now.chunk_bytes)
        if choice != now and times[choice.algorithm] < worth * as_now:
            rows.append(_Row(index, choice, times))
        else:
            rows[-1] = _Row(index, now, times)
    return rows[::-1]


def _best(
    speeds: Speeds, layout: Layout, kind: str, allowed: Sequence[str], size: int
) -> tuple[_Choice, dict[str, float]]:
    """With chunks of a power of two, so that neighbouring sizes mostly choose the same."""
    least = max(layout.least_chunk_bytes(kind), min(LEAST_USEFUL, layout.most_chunk_bytes))
    chunks = {name: best_chunk_bytes(speeds, layout, kind, name, size) for name in allowed}
    chunks = {name: max(least, 1 << (chunk.bit_length() - 1)) for name, chunk in chunks.items()}
    times = {name: predict_ns(speeds, layout, kind, name, size, chunk) for name, chunk in chunks.items()}
    best = min(allowed, key=lambda name: (times[name], allowed.index(name)))
    if times[best] > PREFERRED * times[allowed[0]]:
        best = allowed[0]
    return _Choice(best, chunks[best]), times


def _best_ns(speeds: Speeds, layout: Layout, only: Sequence[str] | None, size: int) -> float:
    choice, times = _best(speeds, layout, "allreduce", _allowed("allreduce", only, layout), size)
    return times[choice.algorithm]


def _reason(chosen: str, times: dict[str, float], size: int, layout: Layout) -> str:
    """`ring: 41 ms predicted against 55 ms of double binary tree at 186.0 MiB on 4 nodes`"""
    name = chosen.replace("_", " ")
    text = f"{name}: {_time(times[chosen])} predicted"
    others = {other: time for other, time in times.items() if other != chosen}
    if others:
        second = min(others, key=lambda other: others[other])
        text += f" against {_time(times[second])} of {second.replace('_', ' ')}"
    else:
        text += ", the only one"
    text += f" at {format_bytes(size)} on {layout.nodes} nodes"
    return text if times[chosen] <= min(times.values()) else f"{text}; not enough to change"


def _time(ns: float) -> str:
    for unit, name in ((1e9, "s"), (1e6, "ms"), (1e3, "us")):
        if ns >= unit:
            return f"{ns / unit:.3g} {name}" if ns < 999.5 * unit else f"{ns / unit:.0f} {name}"
    return f"{ns:.0f} ns"
