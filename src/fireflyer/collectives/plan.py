"""The plan of a group's collectives: who talks to whom, and in which order numbers are added. Pure.

Two binary trees over the nodes (not the ranks) carry half of the chunks each: chunk k of an operation belongs to tree
`k % 2`. A node is inner in at most one of the two trees (with an odd number of nodes, one node is inner in both), so
every node sends and receives about as much as any other. In each tree sums travel up and results travel down at the
same time, chunk by chunk.

Which numbers are added to which, and so every bit of a result, depends on nothing but the arguments: the plan, the
element type, the number of elements, and the ranks' data. The order within a chunk is fixed:

1. on a node: its ranks in ascending order, in the accumulation type (float32 for the small floats);
2. in a tree: `(first child + own) + other children`, children in ascending order of their nodes, never in the order of
   arrival; partial sums travel in the accumulation type;
3. at the root: one rounding to the element type. Every rank receives these bits.

A job keeps the plan of its first start (`Plan` goes into its checkpoints), so that a resumed run adds in the same
order.

The native executor is given the trees. What it does with them is said step by step in `fireflyer.collectives.steps`,
whose streams the tests run in every order: each contribution counts once, and nothing blocks for ever.

Source of the tree shape: P. Sanders, J. Speck, J. L. Träff, "Two-tree algorithms for full bandwidth broadcast,
reduction and scan", Parallel Computing 35 (2009); the numbering is that of NCCL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.units import KIB, MIB

__all__ = [
    "DEFAULT_CHUNK_BYTES",
    "DEFAULT_WINDOW",
    "Orientation",
    "Plan",
    "Tree",
    "chunk_tree",
    "double_binary_tree",
    "make_plan",
    "orient",
]

Tree = tuple[int, ...]
"""The parent of each node, -1 at the root."""

ALGORITHM: Final = "double_binary_tree"
DEFAULT_CHUNK_BYTES: Final = 256 * KIB
DEFAULT_WINDOW: Final = 4
MAX_RANKS: Final = 1 << 16
MAX_RANKS_PER_NODE: Final = 64
MIN_CHUNK_BYTES: Final = 4 * KIB
MAX_CHUNK_BYTES: Final = 64 * MIB
MAX_WINDOW: Final = 32
MAX_NEIGHBOURS: Final = 3


class Orientation(NamedTuple):
    """A tree as one node sees it: the way to the root, and the ways from it, in ascending order."""

    parent: int
    children: tuple[int, ...]


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a group computes. Two groups with equal plans give bitwise equal results. JSON-able with `msgspec.json`.

    Raises `UsageError` (when decoded: `msgspec.ValidationError`) where it makes no sense.
    """

    algorithm: str = ALGORITHM
    node_of_rank: tuple[int, ...]
    """The node of each rank. Nodes are numbered from 0 without gaps."""
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    """Of a chunk in the accumulation type; a multiple of 4096."""
    window: int = DEFAULT_WINDOW
    """Chunks in flight on a node; even. Does not change results."""
    trees: tuple[Tree, ...]
    """Two trees over the nodes."""

    def __post_init__(self) -> None:
        if self.algorithm != ALGORITHM:
            raise UsageError(f"plan algorithm {self.algorithm!r} is not known; this version knows {ALGORITHM!r}")
        _check_ranks(self.node_of_rank)
        if not MIN_CHUNK_BYTES <= self.chunk_bytes <= MAX_CHUNK_BYTES or self.chunk_bytes % MIN_CHUNK_BYTES:
            raise UsageError(f"chunk_bytes {self.chunk_bytes} must be a multiple of 4096 from 4 KiB to 64 MiB")
        if not 2 <= self.window <= MAX_WINDOW or self.window % 2:
            raise UsageError(f"window {self.window} must be even and from 2 to {MAX_WINDOW}")
        if len(self.trees) != 2:
            raise UsageError(f"a plan has 2 trees, not {len(self.trees)}")
        for tree in self.trees:
            if len(tree) != self.nodes:
                raise UsageError(f"a tree names {len(tree)} nodes, the plan has {self.nodes}")
            _check_tree(tree)

    @property
    def nodes(self) -> int:
        return max(self.node_of_rank) + 1

    @property
    def world_size(self) -> int:
        return len(self.node_of_rank)

    def ranks_of(self, node: int) -> tuple[int, ...]:
        """Ascending; the first is the node's leader."""
        return tuple(rank for rank, where in enumerate(self.node_of_rank) if where == node)

    def leader_of(self, node: int) -> int:
        return self.node_of_rank.index(node)


def make_plan(
    node_of_rank: Sequence[int], *, chunk_bytes: int = DEFAULT_CHUNK_BYTES, window: int = DEFAULT_WINDOW
) -> Plan:
    """The plan of a new group. `node_of_rank[r]` is the node of rank r, counted from 0. Raises `UsageError`."""
    _check_ranks(node_of_rank)
    trees = double_binary_tree(max(node_of_rank) + 1)
    return Plan(node_of_rank=tuple(node_of_rank), chunk_bytes=chunk_bytes, window=window, trees=trees)


def chunk_tree(chunk: int) -> int:
    """Which of the two trees carries the chunk-th chunk of an operation."""
    return chunk % 2


def double_binary_tree(nodes: int) -> tuple[Tree, Tree]:
    """Two binary trees over `nodes` nodes such that with an even number every node is a leaf in one of them, and with
    an odd number every node but one.

    The first is the in-order binary tree: odd nodes are leaves, node 0 is the root. The second is its mirror image
    for an even number of nodes, and the first shifted by one node for an odd number.

    >>> double_binary_tree(4)
    ((-1, 2, 0, 2), (1, 3, 1, -1))
    """
    if nodes < 1:
        raise UsageError(f"a tree needs at least 1 node, not {nodes}")
    first = tuple(_in_order_parent(node, nodes) for node in range(nodes))
    second = [0] * nodes
    for node, parent in enumerate(first):
        if nodes % 2 == 0:
            second[nodes - 1 - node] = nodes - 1 - parent if parent >= 0 else -1
        else:
            second[(node + 1) % nodes] = (parent + 1) % nodes if parent >= 0 else -1
    return first, tuple(second)


def orient(tree: Tree, root: int) -> tuple[Orientation, ...]:
    """The same tree hung up at `root`, as each node sees it: reduce and broadcast to any root use the same connections.

    Raises `UsageError` where the root is no node of the tree.
    """
    if not 0 <= root < len(tree):
        raise UsageError(f"root node {root} is not one of {len(tree)} nodes")
    near: list[list[int]] = [[] for _ in tree]
    for node, parent in enumerate(tree):
        if parent >= 0:
            near[node].append(parent)
            near[parent].append(node)
    above = {root: -1}
    queue = [root]
    for node in queue:
        for other in near[node]:
            if other not in above:
                above[other] = node
                queue.append(other)
    if len(above) != len(tree):
        raise UsageError(f"the parents {tree} do not form one tree")
    return tuple(
        Orientation(above[node], tuple(sorted(n for n in near[node] if n != above[node]))) for node in range(len(tree))
    )


def _in_order_parent(node: int, nodes: int) -> int:
    if node == 0:
        return -1
    bit = node & -node
    parent = (node ^ bit) | (bit << 1)
    return parent if parent < nodes else node ^ bit


def _check_ranks(node_of_rank: Sequence[int]) -> None:
    if not 1 <= len(node_of_rank) <= MAX_RANKS:
        raise UsageError(f"a group has 1 to {MAX_RANKS} ranks, not {len(node_of_rank)}")
    nodes = sorted(set(node_of_rank))
    if nodes != list(range(len(nodes))):
        raise UsageError(f"nodes must be numbered from 0 without gaps, not {nodes[:8]}")
    fullest = max(node_of_rank.count(node) for node in nodes)
    if fullest > MAX_RANKS_PER_NODE:
        raise UsageError(f"a node has {fullest} ranks; at most {MAX_RANKS_PER_NODE} are possible")


def _check_tree(tree: Tree) -> None:
    roots = [node for node, parent in enumerate(tree) if parent == -1]
    if len(roots) != 1 or not all(-1 <= parent < len(tree) for parent in tree):
        raise UsageError(f"the parents {tree[:16]} do not form one tree: it needs one root (-1) and known nodes")
    for view in orient(tree, roots[0]):
        if len(view.children) + (view.parent >= 0) > MAX_NEIGHBOURS:
            raise UsageError(f"the parents {tree[:16]} do not form a binary tree")
