"""Reads all that a target has, at a bounded rate, so that damage is found while another replica can mend it.

What native code finds damaged it tells as an event of its own, as it does for any reader; here it is only decided what
is read when. Chunks that a reader could not verify come first, beside that rate, at one of their own; and no reader
can fill the places of those that wait.
"""

from __future__ import annotations

from typing import Final, Protocol

from fireflyer.base.units import MIB, SECOND
from fireflyer.fs.schema.ids import ChunkId

__all__ = ["DOUBTED_BYTES_PER_S", "MAX_DOUBTS", "MAX_DOUBTS_OF_ONE", "Scrub"]

STEP_BYTES: Final = 4 * MIB
MAX_DOUBTS: Final = 256
"""That wait; a reader who has another one finds it damaged again later."""
MAX_DOUBTS_OF_ONE: Final = 32
"""Of these, that one peer may have."""
DOUBTED_BYTES_PER_S: Final = 64 * MIB
_LAST_INDEX: Final = (1 << 32) - 1


class Verifier(Protocol):
    """`TargetEngine`."""

    def verify(self, after: tuple[int, int] | None, limit_bytes: int) -> int: ...


class Scrub:
    """Of one target. `bytes_per_s` 0: only what is doubted."""

    def __init__(self, engine: Verifier, *, bytes_per_s: int, rest_ns: int) -> None:
        self._engine = engine
        self._bytes_per_s = bytes_per_s
        self._rest_ns = rest_ns
        self._after: tuple[int, int] | None = None
        self._job = 0
        self._doubts: dict[ChunkId, str] = {}
        """And who could not verify it."""
        self._doubted = False
        self._due_ns = self._doubts_due_ns = 0
        self.passes = 0
        """How often everything was read."""
        self.verified_bytes = 0

    def verify_soon(self, chunk: ChunkId, peer: str) -> None:
        of_it = sum(one == peer for one in self._doubts.values())
        if len(self._doubts) < MAX_DOUBTS and of_it < MAX_DOUBTS_OF_ONE:
            self._doubts.setdefault(chunk, peer)

    def tick(self, now_ns: int) -> None:
        """Begins the next step, if it is time for it."""
        if self._job:
            return
        chunk = next(iter(self._doubts), None) if now_ns >= self._doubts_due_ns else None
        due = bool(self._bytes_per_s) and now_ns >= self._due_ns
        # In turns: readers who report chunks without end must not keep the rest from being looked at.
        self._doubted = chunk is not None and not (due and self._doubted)
        if chunk is not None and self._doubted:
            del self._doubts[chunk]
            self._begin(_before(chunk), 1)
        elif due:
            self._begin(self._after, STEP_BYTES)

    def _begin(self, after: tuple[int, int] | None, limit_bytes: int) -> None:
        self._job = self._engine.verify(after, limit_bytes)

    def verified(self, now_ns: int, job: int, last: tuple[int, int] | None, verified_bytes: int) -> None:
        """The step is done. `last`: the last chunk that was read; None: there are no more."""
        if job != self._job:
            return
        self._job = 0
        self.verified_bytes += verified_bytes
        if self._doubted:
            self._doubts_due_ns = now_ns + verified_bytes * SECOND // DOUBTED_BYTES_PER_S
            return
        self._after = last
        self._due_ns = now_ns + verified_bytes * SECOND // self._bytes_per_s
        if last is None:
            self.passes += 1
            self._due_ns += self._rest_ns


def _before(chunk: ChunkId) -> tuple[int, int] | None:
    """The place behind which the chunk is the first one, if it is there."""
    if chunk.index:
        return chunk.file, chunk.index - 1
    return (chunk.file - 1, _LAST_INDEX) if chunk.file else None
