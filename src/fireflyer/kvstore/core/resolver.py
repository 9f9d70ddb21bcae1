"""Decides which transactions may commit, so that the order of their versions is a serial order of them all.

A transaction has read a snapshot: everything up to its *read version*, nothing later. It may commit as the next version
if nothing that it read has been written since: then its reads are the same as if it had run alone after all that were
committed before it. What it only wrote does not matter, later versions replace it.

    version = resolver.version + 1
    reason = resolver.refusal(read_version, reads)     None, or why not
    resolver.add(version, writes)                      in order of versions; then apply the writes at that version

The resolver remembers the writes of recent versions, at most `max_entries` keys and ranges. Who read before the oldest
that it remembers is refused: it may have missed a write that is forgotten. A version that was added and then failed to
be stored may stay: it can only refuse too much.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from fireflyer.base.errors import InvariantViolation
from fireflyer.kvstore.core.conflicts import Conflicts
from fireflyer.kvstore.core.keys import KeyRange, shown

__all__ = ["MAX_WINDOW_ENTRIES", "Resolver"]

MAX_WINDOW_ENTRIES: Final = 200_000
"""Some 50 MiB with keys of 100 bytes."""


class Resolver:
    """See the module's text. `version` is that of the store when this begins."""

    def __init__(self, version: int, *, max_entries: int = MAX_WINDOW_ENTRIES) -> None:
        self._max_entries = max_entries
        self._entries = 0
        self._window: deque[tuple[int, Conflicts]] = deque()
        self._last_write: dict[bytes, int] = {}
        """Of each key that the window names as a point, its last version: reads are points, mostly."""
        self._ranges: deque[tuple[int, KeyRange]] = deque()
        self.version = version
        self.oldest_version = version
        """Transactions that read before it are refused."""

    def refusal(self, read_version: int, reads: Conflicts) -> str | None:
        """Why a transaction that read `reads` as of `read_version` may not become the next version; None if it may."""
        if read_version > self.version:
            raise InvariantViolation(f"read version {read_version} is ahead of version {self.version}")
        if not reads.entries or read_version == self.version:
            return None
        if read_version < self.oldest_version:
            return f"it began at version {read_version}; conflicts are known from {self.oldest_version} on"
        for key in reads.points:
            if self._last_write.get(key, 0) > read_version:
                return f"{shown(key)} was written since"
        for version, written in reversed(self._ranges):
            if version <= read_version:
                break
            if reads.meets(written):
                return f"a range from {shown(written.begin)} was cleared since"
        return self._refusal_by_range(read_version, reads)

    def _refusal_by_range(self, read_version: int, reads: Conflicts) -> str | None:
        if not reads.ranges:
            return None
        for version, writes in reversed(self._window):
            if version <= read_version:
                break
            for wanted in reads.ranges:
                if writes.meets(wanted):
                    return f"something in a range from {shown(wanted.begin)} was written since"
        return None

    def add(self, version: int, writes: Conflicts) -> list[Conflicts]:
        """Version `version` wrote `writes`. Returns the writes of versions that fell out of the window."""
        if version <= self.version:
            raise InvariantViolation(f"version {version} follows {self.version}")
        self.version = version
        self._window.append((version, writes))
        self._entries += writes.entries
        for key in writes.points:
            self._last_write[key] = version
        self._ranges.extend((version, each) for each in writes.ranges)
        forgotten: list[Conflicts] = []
        while self._entries > self._max_entries:
            forgotten.append(self._forget())
        return forgotten

    def _forget(self) -> Conflicts:
        version, writes = self._window.popleft()
        self._entries -= writes.entries
        for key in writes.points:
            if self._last_write[key] == version:
                del self._last_write[key]
        while self._ranges and self._ranges[0][0] <= version:
            self._ranges.popleft()
        self.oldest_version = version
        return writes
