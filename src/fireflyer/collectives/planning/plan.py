"""The plan of a group's collectives: who talks to whom, and in which order numbers are added. Pure.

A plan names for every kind of operation, by the size of its array, an *algorithm* and a size of chunks (`routes`). An
array is cut into chunks; chunk k of an operation belongs to *lane* `k % 2`. What each node does with a chunk of each
lane is a program (`fireflyer.collectives.planning.programs`), built from nothing but the plan; the native executor runs
it.

Which numbers are added to which, and so every bit of a result, depends on nothing but the arguments: the plan, the kind
of operation, the element type, the number of elements, and the ranks' data. Within a chunk:

1. on a node: its ranks in ascending order, in the accumulation type (float32 for the small floats);
2. between nodes as the algorithm's program says (see there), never in the order of arrival; partial sums travel in the
   accumulation type;
3. one rounding to the element type, where the sum is complete. Every rank receives these bits.

A plan with `sums="canonical"` replaces 1 and 2 for allreduce, reduce and reduce_scatter: all ranks in ascending order,
wherever they sit (`fireflyer.collectives.p2p.canonical`). Then every bit of a result depends only on the number of
ranks, the element type, the operation and the ranks' data.

A job keeps the plan of its first start (`Plan` goes into its checkpoints), so that a resumed run adds in the same
order. `version` says which rules a plan was made by: 1 had the double binary tree alone and no routes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.units import KIB, MIB, format_bytes
from fireflyer.collectives.planning.trees import Orientation, Tree, check_tree, double_binary_tree, orient

__all__ = [
    "ACROSS_ZONES",
    "ALGORITHMS",
    "BY_NODE",
    "CANONICAL",
    "CANONICAL_KINDS",
    "DEFAULT_CHUNK_BYTES",
    "DEFAULT_WINDOW",
    "HALVING_DOUBLING",
    "LINE",
    "RING",
    "SUMS",
    "TREE",
    "Orientation",
    "Plan",
    "Route",
    "Tree",
    "check_ranks",
    "chunk_lane",
    "double_binary_tree",
    "make_plan",
    "orient",
]

TREE: Final = "double_binary_tree"
RING: Final = "ring"
HALVING_DOUBLING: Final = "halving_doubling"
LINE: Final = "line"
ALGORITHMS: Final = (TREE, RING, HALVING_DOUBLING, LINE)
"""Their positions are their numbers in native code."""
BY_NODE: Final = "by_node"
CANONICAL: Final = "canonical"
SUMS: Final = (BY_NODE, CANONICAL)
CANONICAL_KINDS: Final = ("allreduce", "reduce", "reduce_scatter")
"""The operations to which `sums` applies."""
SUITABLE: Final = {
    "allreduce": ALGORITHMS,
    "barrier": ALGORITHMS,
    "reduce": (TREE,),
    "broadcast": (TREE,),
    "reduce_scatter": (RING, LINE),
    "allgather": (RING, LINE),
}
"""The algorithms of each kind of operation, the default first."""
ACROSS_ZONES: Final = (TREE, LINE)
"""Those that cross zones by one pair of nodes, given trees and an order for it; a ring comes back by another one."""
PARTED: Final = ("reduce_scatter", "allgather")

VERSION: Final = 2
DEFAULT_CHUNK_BYTES: Final = 256 * KIB
DEFAULT_WINDOW: Final = 4
DEFAULT_DEEP_WINDOW: Final = 8
"""Of more nodes than 2, where a chunk keeps its slot while it goes up a tree and down again: on eight hosts with links
of 1 Gbit/s a sum took 1.3 times as long with 4."""
MAX_RANKS: Final = 1 << 16
MAX_RANKS_PER_NODE: Final = 64
MIN_CHUNK_BYTES: Final = 4 * KIB
MAX_CHUNK_BYTES: Final = 64 * MIB
MAX_WINDOW: Final = 32
MAX_SOCKETS: Final = 8
MAX_ROUTES: Final = 64
WIDEST_ELEMENT: Final = 8


class Route(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One row of a plan: how operations of one kind are done, up to a size."""

    kind: str
    """allreduce, reduce, broadcast, barrier, reduce_scatter or allgather."""
    up_to_bytes: int | None
    """Largest size, inclusive, of the whole array (of all parts, for a reduce_scatter or allgather); None: any size."""
    algorithm: str
    chunk_bytes: int
    """Size of a chunk in the accumulation type, all parts together; a multiple of 4096."""
    reason: str = ""
    """Reason for the choice, for people."""


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A way in which a group computes. Two groups with equal plans give bitwise equal results. JSON-able with
    `msgspec.json`.

    Raises `UsageError` (when decoded: `msgspec.ValidationError`) where it makes no sense.
    """

    version: int = 1
    """Plans written before there was a version are 1."""
    algorithm: str = TREE
    """Algorithm of `trees`: always `double_binary_tree`; `routes` name the algorithms of operations."""
    node_of_rank: tuple[int, ...]
    """The node of each rank. Nodes are numbered from 0 without gaps."""
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    """Size of chunks of operations that no route names; as in `Route`."""
    window: int = DEFAULT_WINDOW
    """Chunks in flight on a node; even. Does not change results."""
    trees: tuple[Tree, ...]
    """Two trees over the nodes, one for each lane."""
    node_order: tuple[int, ...] = ()
    """The nodes in the order in which they stand in the ring, and in the line; none: 0, 1, 2, ..."""
    routes: tuple[Route, ...] = ()
    """Rows of one kind stand together, from small sizes to large ones."""
    sockets: int = 1
    """Connections for each edge and lane. Does not change results."""
    sums: str = BY_NODE
    """Order of additions, one of `SUMS`: which numbers are added first."""

    def __post_init__(self) -> None:
        if self.version not in (1, VERSION):
            raise UsageError(f"plan version {self.version} is not known; this version knows 1 and {VERSION}")
        if self.algorithm != TREE:
            raise UsageError(f"plan algorithm {self.algorithm!r} is not known; this version knows {TREE!r}")
        if self.version == 1 and (self.node_order or self.routes or self.sockets != 1 or self.sums != BY_NODE):
            raise UsageError("a plan of version 1 has no node_order, routes, sockets or sums")
        if self.sums not in SUMS:
            raise UsageError(f"sums {self.sums!r} is not known; use one of {', '.join(SUMS)}")
        check_ranks(self.node_of_rank)
        _check_chunk_bytes(self.chunk_bytes)
        if not 2 <= self.window <= MAX_WINDOW or self.window % 2:
            raise UsageError(f"window {self.window} must be even and from 2 to {MAX_WINDOW}")
        if not 1 <= self.sockets <= MAX_SOCKETS:
            raise UsageError(f"sockets {self.sockets} must be from 1 to {MAX_SOCKETS}")
        nodes = self.nodes
        _check_order(self.node_order, nodes)
        if len(self.trees) != 2:
            raise UsageError(f"a plan has 2 trees, not {len(self.trees)}")
        for tree in self.trees:
            if len(tree) != nodes:
                raise UsageError(f"a tree names {len(tree)} nodes, the plan has {nodes}")
            check_tree(tree)
        _check_routes(self.routes, self.world_size)

    @property
    def nodes(self) -> int:
        return max(self.node_of_rank) + 1

    @property
    def world_size(self) -> int:
        return len(self.node_of_rank)

    @property
    def order(self) -> tuple[int, ...]:
        """The nodes as they stand in the ring, and in the line."""
        return self.node_order or tuple(range(self.nodes))

    @property
    def largest_chunk_bytes(self) -> int:
        """Bytes that a slot of the window must hold."""
        return max(route.chunk_bytes for route in self.all_routes())

    def all_routes(self) -> tuple[Route, ...]:
        """The routes, and the defaults of the kinds that none is for."""
        named = {route.kind for route in self.routes}
        defaults = default_routes(self.chunk_bytes, self.world_size)
        return (*self.routes, *(route for route in defaults if route.kind not in named))

    def route(self, kind: str, nbytes: int) -> Route:
        """Return how an operation on an array of `nbytes` (all parts together) is done. Raises `UsageError`."""
        for route in self.all_routes():
            if route.kind == kind and (route.up_to_bytes is None or nbytes <= route.up_to_bytes):
                return route
        raise UsageError(f"operation {kind!r} has no route; kinds are {', '.join(SUITABLE)}")

    def describe(self) -> str:
        """The routes with their reasons, a line for each, for people."""
        where = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        lines = [f"{self.world_size} ranks on {where}, {self.window} chunks in flight"]
        canonical = CANONICAL_KINDS if self.sums == CANONICAL and self.nodes > 1 else ()
        if canonical:
            lines.append(f"{', '.join(canonical)}, any size: rank to rank, added in the order of ranks (canonical)")
        for route in self.all_routes():
            if route.kind in canonical:
                continue
            sizes = "any size" if route.up_to_bytes is None else f"up to {format_bytes(route.up_to_bytes)}"
            lines.append(f"{route.kind}, {sizes}: chunks of {format_bytes(route.chunk_bytes)}; {route.reason}")
        return "\n".join(lines)

    def ranks_of(self, node: int) -> tuple[int, ...]:
        """Ascending; the first is the node's leader."""
        return tuple(rank for rank, where in enumerate(self.node_of_rank) if where == node)

    def leader_of(self, node: int) -> int:
        return self.node_of_rank.index(node)


def make_plan(
    node_of_rank: Sequence[int],
    *,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    window: int | None = None,
    routes: Sequence[Route] | None = None,
    node_order: Sequence[int] | None = None,
    sockets: int = 1,
    sums: str = BY_NODE,
) -> Plan:
    """The plan of a new group. `node_of_rank[r]` is the node of rank r, counted from 0. Kinds of operations that
    `routes` leaves out get the default: the tree, and the ring for reduce_scatter and allgather. `window` None: the
    default, more for more than 2 nodes.

    Raises `UsageError`."""
    check_ranks(node_of_rank)
    nodes, order = max(node_of_rank) + 1, tuple(node_order or ())
    _check_order(order, nodes)
    _check_chunk_bytes(chunk_bytes)
    plan = Plan(
        version=VERSION,
        node_of_rank=tuple(node_of_rank),
        chunk_bytes=chunk_bytes,
        window=(DEFAULT_WINDOW if nodes <= 2 else DEFAULT_DEEP_WINDOW) if window is None else window,
        trees=double_binary_tree(nodes, order),
        node_order=order,
        routes=tuple(routes or ()),
        sockets=sockets,
        sums=sums,
    )
    return msgspec.structs.replace(plan, routes=plan.all_routes())


def default_routes(chunk_bytes: int, world_size: int) -> tuple[Route, ...]:
    """One for each kind, for all sizes. A chunk of parts holds at least an element of each."""
    least = _least_parted_bytes(world_size)
    return tuple(
        Route(kind, None, suitable[0], max(chunk_bytes, least) if kind in PARTED else chunk_bytes, "default")
        for kind, suitable in SUITABLE.items()
    )


def chunk_lane(chunk: int) -> int:
    """Which of the two lanes carries the chunk-th chunk of an operation."""
    return chunk % 2


def _least_parted_bytes(world_size: int) -> int:
    return -(-world_size * WIDEST_ELEMENT // MIN_CHUNK_BYTES) * MIN_CHUNK_BYTES


def check_ranks(node_of_rank: Sequence[int]) -> None:
    """Raises `UsageError` for what is no group."""
    if not 1 <= len(node_of_rank) <= MAX_RANKS:
        raise UsageError(f"a group has 1 to {MAX_RANKS} ranks, not {len(node_of_rank)}")
    ranks_on = Counter(node_of_rank)
    nodes = sorted(ranks_on)
    if nodes != list(range(len(nodes))):
        raise UsageError(f"nodes must be numbered from 0 without gaps, not {nodes[:8]}")
    fullest = max(ranks_on.values())
    if fullest > MAX_RANKS_PER_NODE:
        raise UsageError(f"a node has {fullest} ranks; at most {MAX_RANKS_PER_NODE} are possible")


def _check_chunk_bytes(chunk_bytes: int) -> None:
    if not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES or chunk_bytes % MIN_CHUNK_BYTES:
        raise UsageError(f"chunk_bytes {chunk_bytes} must be a multiple of 4096 from 4 KiB to 64 MiB")


def _check_order(node_order: Sequence[int], nodes: int) -> None:
    if node_order and sorted(node_order) != list(range(nodes)):
        raise UsageError(f"node_order {tuple(node_order[:16])} must name each of the {nodes} nodes once")


def _check_routes(routes: Sequence[Route], world_size: int) -> None:
    if len(routes) > MAX_ROUTES:
        raise UsageError(f"a plan has at most {MAX_ROUTES} routes, not {len(routes)}")
    last: dict[str, int | None] = {}
    for route in routes:
        if route.algorithm not in SUITABLE.get(route.kind, ()):
            known = ", ".join(SUITABLE.get(route.kind, ())) or f"one of the kinds {', '.join(SUITABLE)}"
            raise UsageError(f"route: {route.kind!r} cannot be done by {route.algorithm!r}; use {known}")
        _check_chunk_bytes(route.chunk_bytes)
        if route.kind in PARTED and route.chunk_bytes < _least_parted_bytes(world_size):
            raise UsageError(
                f"route: chunks of a {route.kind} of {world_size} ranks cannot be {route.chunk_bytes} bytes"
            )
        before = last.get(route.kind, -1)
        if before is None or (route.up_to_bytes is not None and not before < route.up_to_bytes < 1 << 63):
            raise UsageError(f"route: sizes of {route.kind} must grow, and the last one is for any size")
        last[route.kind] = route.up_to_bytes
    for kind, limit in last.items():
        if limit is not None:
            raise UsageError(f"route: the last one of {kind} must be for any size (up_to_bytes None)")
