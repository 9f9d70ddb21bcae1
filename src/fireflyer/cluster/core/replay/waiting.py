"""Tasks that wait, in the order of a queue that never changes: priority where it counts, then submission.

Beside the order, for backfill: of the tasks of one priority and size, the first one whose run is short enough. A tree
of minima over the places of the trace answers that in the logarithm of their number, so that a queue of 50,000 costs
little.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Final

__all__ = ["LONGEST", "Waiting"]

LONGEST: Final = 1 << 62
_ABSENT: Final = LONGEST + 1


class _Minima:
    """One priority and size: lengths of its tasks that wait, by their place among all its tasks."""

    def __init__(self, tasks: Sequence[int]) -> None:
        self.tasks = tasks
        self._size = 1 << max(len(tasks) - 1, 0).bit_length()
        self._least = [_ABSENT] * (2 * self._size)

    def put(self, place: int, length: int) -> None:
        least, at = self._least, self._size + place
        least[at] = length
        at >>= 1
        while at:
            left, right = least[2 * at], least[2 * at + 1]
            lower = min(left, right)
            if least[at] == lower:
                break
            least[at] = lower
            at >>= 1

    def first(self, longest: int) -> int | None:
        """The first task that is no longer than that."""
        least, at = self._least, 1
        if least[1] > longest:
            return None
        while at < self._size:
            at *= 2
            if least[at] > longest:
                at += 1
        return self.tasks[at - self._size]


class Waiting:
    """`keys`: of each task of the trace its rank in the queue, lower first, before its place in the trace."""

    def __init__(self, sizes: Sequence[int], lengths: Sequence[int], keys: Sequence[int]) -> None:
        self._lengths, self._keys = lengths, keys
        members: dict[tuple[int, int], list[int]] = {}
        self._places: list[int] = []
        for task, (size, key) in enumerate(zip(sizes, keys, strict=True)):
            own = members.setdefault((size, key), [])
            self._places.append(len(own))
            own.append(task)
        self._minima = {key: _Minima(tasks) for key, tasks in sorted(members.items())}
        self._of_task = [self._minima[size, key] for size, key in zip(sizes, keys, strict=True)]
        self._order: list[tuple[int, int]] = []
        self._waits = bytearray(len(sizes))

    def add(self, task: int) -> None:
        self._waits[task] = 1
        self._of_task[task].put(self._places[task], self._lengths[task])
        heapq.heappush(self._order, (self._keys[task], task))

    def remove(self, task: int) -> None:
        self._waits[task] = 0
        self._of_task[task].put(self._places[task], _ABSENT)

    def head(self) -> int | None:
        """Who comes first."""
        order = self._order
        while order and not self._waits[order[0][1]]:
            heapq.heappop(order)
        return order[0][1] if order else None

    def first_by_size(self, most_nodes: int, longest: int) -> list[tuple[int, int]]:
        """(key, task): of each size up to `most_nodes` and each key the first task that is no longer than that."""
        found = []
        for (size, key), minima in self._minima.items():
            if size > most_nodes:
                break
            task = minima.first(longest)
            if task is not None:
                found.append((key, task))
        return found
