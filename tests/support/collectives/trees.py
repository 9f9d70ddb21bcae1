"""Counting on trees that are given as the parent of each node."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["depth_of", "edges_of", "inner_nodes", "subtrees_of"]


def edges_of(tree: Sequence[int]) -> list[int]:
    edges = [0] * len(tree)
    for node, parent in enumerate(tree):
        if parent >= 0:
            edges[node] += 1
            edges[parent] += 1
    return edges


def inner_nodes(tree: Sequence[int]) -> set[int]:
    return {parent for parent in tree if parent >= 0}


def depth_of(tree: Sequence[int]) -> int:
    return max(len(_way(tree, node)) for node in range(len(tree))) - 1


def subtrees_of(tree: Sequence[int]) -> list[frozenset[int]]:
    """What is below each edge."""
    ways = [_way(tree, node) for node in range(len(tree))]
    return [
        frozenset(node for node in range(len(tree)) if top in ways[node]) for top in range(len(tree)) if tree[top] >= 0
    ]


def _way(tree: Sequence[int], node: int) -> list[int]:
    way = [node]
    while tree[way[-1]] >= 0:
        way.append(tree[way[-1]])
    return way
