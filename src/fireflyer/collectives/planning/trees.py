"""Two binary trees over the nodes of a group. Pure.

With an even number of nodes every node is inner in one tree and a leaf in the other (with an odd number one node is
inner in both), so that every node sends and receives about as much as any other. `node_order` says which node takes
which place: places next to each other are near in the trees, so nodes that are near in the network belong side by side.

Source of the shape: P. Sanders, J. Speck, J. L. Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and
scan", Parallel Computing 35 (2009); the numbering is that of NCCL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from fireflyer.base.errors import UsageError

__all__ = ["Orientation", "Tree", "check_tree", "double_binary_tree", "orient"]

Tree = tuple[int, ...]
"""The parent of each node, -1 at the root."""

MAX_NEIGHBOURS: Final = 3


class Orientation(NamedTuple):
    """A tree as one node sees it: the way to the root, and the ways from it, in ascending order."""

    parent: int
    children: tuple[int, ...]


def double_binary_tree(nodes: int, node_order: Sequence[int] = ()) -> tuple[Tree, Tree]:
    """Two binary trees over `nodes` nodes. The first is the in-order binary tree: odd places are leaves, place 0 is the
    root. The second is its mirror image for an even number of nodes, and the first shifted by one place for an odd
    number. Place p is taken by `node_order[p]`, or by node p where no order is given.

    >>> double_binary_tree(4)
    ((-1, 2, 0, 2), (1, 3, 1, -1))
    """
    if nodes < 1:
        raise UsageError(f"a tree needs at least 1 node, not {nodes}")
    first = tuple(_in_order_parent(place, nodes) for place in range(nodes))
    second = [0] * nodes
    for place, parent in enumerate(first):
        if nodes % 2 == 0:
            second[nodes - 1 - place] = nodes - 1 - parent if parent >= 0 else -1
        else:
            second[(place + 1) % nodes] = (parent + 1) % nodes if parent >= 0 else -1
    if not node_order:
        return first, tuple(second)
    return _renamed(first, node_order), _renamed(second, node_order)


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
        raise UsageError(f"the parents {tree[:16]} do not form one tree")
    return tuple(
        Orientation(above[node], tuple(sorted(n for n in near[node] if n != above[node]))) for node in range(len(tree))
    )


def check_tree(tree: Tree) -> None:
    """Raises `UsageError` where these parents are not one binary tree."""
    roots = [node for node, parent in enumerate(tree) if parent == -1]
    if len(roots) != 1 or not all(-1 <= parent < len(tree) for parent in tree):
        raise UsageError(f"the parents {tree[:16]} do not form one tree: it needs one root (-1) and known nodes")
    for view in orient(tree, roots[0]):
        if len(view.children) + (view.parent >= 0) > MAX_NEIGHBOURS:
            raise UsageError(f"the parents {tree[:16]} do not form a binary tree")


def _in_order_parent(place: int, places: int) -> int:
    if place == 0:
        return -1
    bit = place & -place
    parent = (place ^ bit) | (bit << 1)
    return parent if parent < places else place ^ bit


def _renamed(tree: Sequence[int], names: Sequence[int]) -> Tree:
    parents = [-1] * len(tree)
    for place, parent in enumerate(tree):
        parents[names[place]] = names[parent] if parent >= 0 else -1
    return tuple(parents)
