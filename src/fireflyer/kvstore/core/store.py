"""The whole store in memory, synchronous: what an engine is, in its simplest form.

    version = store.version                              begin: what is committed now
    store.get(version, key), store.scan(version, ...)    as it was then
    store.commit(version, reads, mutations)              the next version, or `Conflict`

It keeps the history of each key as far back as the resolver remembers writes, and refuses reads and commits of versions
before that. `attempts` is told of every commit that was asked for, with its exact conflict sets.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import NamedTuple

from fireflyer.kvstore.core.conflicts import Conflicts
from fireflyer.kvstore.core.keys import MAX_PAGE_BYTES, MAX_PAGE_ITEMS, Item, KeyRange, Page, key_after
from fireflyer.kvstore.core.overlay import Mutations
from fireflyer.kvstore.core.resolver import MAX_WINDOW_ENTRIES, Resolver
from fireflyer.kvstore.errors import Conflict

__all__ = ["Attempted", "MemoryStore"]


class Attempted(NamedTuple):
    """A commit that was asked for."""

    read_version: int
    reads: Conflicts
    """Keys and ranges that were read: the commit is refused if others wrote them after `read_version`."""
    writes: Conflicts
    """Keys and ranges that were written: later commits that read them at an older version are refused."""
    mutations: Mutations
    version: int | None
    """Version of the commit; None: it was refused. A transaction that wrote nothing has its read version."""
    refusal: str | None


class MemoryStore:
    """See the module's text. Not thread-safe."""

    def __init__(
        self, *, window_entries: int = MAX_WINDOW_ENTRIES, attempts: Callable[[Attempted], None] | None = None
    ) -> None:
        self._resolver = Resolver(0, max_entries=window_entries)
        self._histories: dict[bytes, list[tuple[int, bytes | None]]] = {}
        """Of each key its versions, oldest first; None where it was cleared."""
        self._order: list[bytes] = []
        self._attempts = attempts

    @property
    def version(self) -> int:
        return self._resolver.version

    def get(self, version: int, key: bytes) -> bytes | None:
        self._check(version)
        return self._value(key, version)

    def scan(self, version: int, wanted: KeyRange, limit: int = MAX_PAGE_ITEMS, *, reverse: bool = False) -> Page:
        """Up to `limit` items and about `MAX_PAGE_BYTES`, at least one if there is any."""
        self._check(version)
        first = bisect.bisect_left(self._order, wanted.begin)
        last = len(self._order) if wanted.end is None else bisect.bisect_left(self._order, wanted.end)
        items: list[Item] = []
        bytes_read = 0
        for index in range(last - 1, first - 1, -1) if reverse else range(first, last):
            key = self._order[index]
            value = self._value(key, version)
            if value is None:
                continue
            if len(items) == limit or bytes_read >= MAX_PAGE_BYTES:
                return Page(items, True)
            items.append((key, value))
            bytes_read += len(key) + len(value)
        return Page(items, False)

    def commit(self, read_version: int, reads: Conflicts, mutations: Mutations) -> int:
        """Raises `Conflict`; then nothing has changed."""
        writes = mutations.conflicts()
        # Without writes it is over: what it read is the state after its read version.
        refusal = None if mutations.empty else self._resolver.refusal(read_version, reads)
        version = None if refusal else read_version if mutations.empty else self.version + 1
        if self._attempts is not None:
            self._attempts(Attempted(read_version, reads, writes, mutations, version, refusal))
        if version is None:
            raise Conflict(f"transaction not committed: {refusal}; run it again", retry_ns=0)
        if not mutations.empty:
            self._apply(version, mutations)
            for forgotten in self._resolver.add(version, writes):
                self._prune(forgotten)
        return version

    def _check(self, version: int) -> None:
        if version < self._resolver.oldest_version:
            raise Conflict(f"version {version} is no longer kept; run the transaction again", retry_ns=0)

    def _value(self, key: bytes, version: int) -> bytes | None:
        for written, value in reversed(self._histories.get(key, ())):
            if written <= version:
                return value
        return None

    def _apply(self, version: int, mutations: Mutations) -> None:
        for cleared in mutations.cleared:
            for key in self._keys_in(cleared):
                self._histories[key].append((version, None))
        for key, value in mutations.writes:
            if (history := self._histories.get(key)) is None:
                if value is not None:
                    self._histories[key] = [(version, value)]
                    bisect.insort(self._order, key)
            elif history[-1][0] == version:
                history[-1] = (version, value)
            else:
                history.append((version, value))

    def _keys_in(self, wanted: KeyRange) -> list[bytes]:
        first = bisect.bisect_left(self._order, wanted.begin)
        last = len(self._order) if wanted.end is None else bisect.bisect_left(self._order, wanted.end)
        return self._order[first:last]

    def _prune(self, forgotten: Conflicts) -> None:
        """No one reads before the oldest version any more."""
        oldest = self._resolver.oldest_version
        for wanted in (*forgotten.ranges, *(KeyRange(key, key_after(key)) for key in forgotten.points)):
            for key in self._keys_in(wanted):
                history = self._histories[key]
                kept = max((i for i, (written, _) in enumerate(history) if written <= oldest), default=0)
                del history[:kept]
                if len(history) == 1 and history[0][1] is None and history[0][0] <= oldest:
                    del self._histories[key]
                    del self._order[bisect.bisect_left(self._order, key)]
