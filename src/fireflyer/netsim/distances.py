"""Links on shortest paths from all switches at once. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["UNREACHED", "Adjacency"]

UNREACHED: Final = (1 << 16) - 1
"""Above the links of any path that a fabric has."""


class Adjacency:
    """Which vertices links join. Those below `first` are nodes, which do not forward."""

    def __init__(self, near: Sequence[Sequence[int]], first: int) -> None:
        self._first = first
        switches = [[other - first for other in others if other >= first] for others in near[first:]]
        self._starts = np.zeros(len(switches) + 1, np.int64)
        np.cumsum([len(others) for others in switches], out=self._starts[1:])
        self._others = np.fromiter((other for others in switches for other in others), np.int64, self._starts[-1])
        self._known: dict[tuple[tuple[int, int], ...], memoryview] = {}

    def distances(self, entries: tuple[tuple[int, int], ...]) -> Sequence[int]:
        """Least sum of links to one of these switches and the number beside it, from each vertex; `UNREACHED` from
        those that reach none, and of nodes. In breadth first, all of one distance at a time."""
        found = self._known.get(entries)
        if found is None:
            found = self._known[entries] = self._searched(entries)
        return found

    def _searched(self, entries: tuple[tuple[int, int], ...]) -> memoryview:
        found = np.full(self._first + len(self._starts) - 1, UNREACHED, np.uint16)
        links = found[self._first :]
        pending: dict[int, list[int]] = {}
        for switch, beyond in entries:
            pending.setdefault(beyond, []).append(switch - self._first)
        frontier, distance = np.zeros(0, np.int64), 0
        while len(frontier) or pending:
            frontier = np.append(frontier, np.array(pending.pop(distance, ()), np.int64))
            links[frontier[links[frontier] == UNREACHED]] = distance
            frontier = self._neighbours(np.flatnonzero(links == distance))
            distance += 1
        return found.data

    def _neighbours(self, switches: NDArray[np.int64]) -> NDArray[np.int64]:
        """Other ends of all their links."""
        first, counts = self._starts[switches], self._starts[switches + 1] - self._starts[switches]
        before = np.cumsum(counts) - counts
        found: NDArray[np.int64] = self._others[np.repeat(first - before, counts) + np.arange(counts.sum())]
        return found
