"""Numbers of requests that change something: one more with each, at most `MAX_UNDER_WAY` not answered, and the last one
less than `MAX_NUMBERS` after the first that is not, so that one that takes long does not stop all others."""

from __future__ import annotations

from dataclasses import dataclass, field

from fireflyer.fs.schema.meta import MAX_NUMBERS, MAX_UNDER_WAY

__all__ = ["RequestNumbers"]


@dataclass(slots=True)
class RequestNumbers:
    next: int = 1
    done_below: int = 1
    """All below have been answered."""
    _done: set[int] = field(default_factory=set)
    """From `done_below` on."""

    @property
    def free(self) -> bool:
        under_way = self.next - self.done_below - len(self._done)
        return under_way < MAX_UNDER_WAY and self.next < self.done_below + MAX_NUMBERS

    def take(self) -> int:
        """Call it only while `free`."""
        self.next += 1
        return self.next - 1

    def done(self, number: int) -> None:
        """Answered, or given up and never to be sent again."""
        if number >= self.done_below:
            self._done.add(number)
        while self.done_below in self._done:
            self._done.discard(self.done_below)
            self.done_below += 1
