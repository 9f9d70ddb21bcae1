"""What happens when, in the order of time, and of one instant in the order in which it was planned."""

from __future__ import annotations

import heapq
from collections.abc import Callable

__all__ = ["Agenda"]


class Agenda:
    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Callable[[int], None]]] = []
        self._planned = 0

    def at(self, at_ns: int, what: Callable[[int], None]) -> None:
        """`what` is called with the time."""
        self._planned += 1
        heapq.heappush(self._heap, (at_ns, self._planned, what))

    def next_ns(self) -> int | None:
        return self._heap[0][0] if self._heap else None

    def happen(self, now_ns: int) -> None:
        """All that is due, also what that plans for now."""
        while self._heap and self._heap[0][0] <= now_ns:
            heapq.heappop(self._heap)[2](now_ns)
