"""Work of several callers in one transaction, each with writes of its own on top.

    batch = TransactionBatch(transaction)
    for work in waiting:
        savepoint = batch.savepoint()
        try:
            await work(savepoint)         sees what earlier ones have written, and its own writes
        except RefusedByTheWork:
            ...                           nothing of it is left, but what it read counts as read
        else:
            savepoint.release()

When the transaction itself fails (a conflict, a lost connection), all later calls and its commit raise the same error,
whatever a caller made of it: then nobody's work counts.

Why the result is serializable: the transaction is as if it were alone, by its engine; within it the callers run one
after the other, and one that is rolled back has only read. What it has read stays in the conflict set, because its
caller is told something that follows from it.

A key that was read once is not asked for again: all of them see one snapshot. Who knows what they will read asks for
it before they begin (`TransactionBatch.get_many`): with one question instead of one for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from fireflyer.kvstore.core.keys import (
    MAX_ENTRIES,
    MAX_PAGE_ITEMS,
    MAX_TRANSACTION_BYTES,
    KeyRange,
    Page,
    checked_key,
    checked_range,
    checked_value,
)
from fireflyer.kvstore.core.overlay import Mutations, Overlay, read_through

__all__ = ["Savepoint", "TransactionBatch"]

MAX_LOOKED_THROUGH: Final = 4
"""Ranges that one savepoint has cleared: for each, all that is known is looked through."""


class BatchBase(Protocol):
    """What a batch is made on: a `Transaction`, or a `Reader`, and then nobody writes."""

    async def get(self, key: bytes) -> bytes | None: ...

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]: ...

    async def get_range(self, begin: bytes, end: bytes | None, *, limit: int = ..., reverse: bool = ...) -> Page: ...


class Writable(BatchBase, Protocol):
    def apply(self, mutations: Mutations) -> None: ...


class TransactionBatch:
    """See the module's text. One savepoint at a time."""

    __slots__ = ("_below", "_known", "_writes", "kept_bytes", "kept_entries")

    def __init__(self, below: BatchBase, writes: Writable | None = None) -> None:
        """`writes`: the same transaction, if savepoints may write."""
        self._below = below
        self._writes = writes
        self._known: dict[bytes, bytes | None] = {}
        self.kept_entries = 0
        self.kept_bytes = 0

    def savepoint(self) -> Savepoint:
        return Savepoint(self)

    @property
    def fullness(self) -> float:
        """Used share of the limits of a transaction; conflicts are not counted."""
        return max(self.kept_entries / MAX_ENTRIES, self.kept_bytes / MAX_TRANSACTION_BYTES)

    async def get(self, key: bytes) -> bytes | None:
        try:
            return self._known[key]
        except KeyError:
            pass
        value = self._known[key] = await self._below.get(key)
        return value

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        known = self._known
        asked = [key for key in dict.fromkeys(keys) if key not in known]
        for first in range(0, len(asked), MAX_PAGE_ITEMS):
            some = asked[first : first + MAX_PAGE_ITEMS]
            known.update(zip(some, await self._below.get_many(some), strict=True))
        return [known[key] for key in keys]

    async def get_range(
        self, begin: bytes, end: bytes | None, *, limit: int = MAX_PAGE_ITEMS, reverse: bool = False
    ) -> Page:
        return await self._below.get_range(begin, end, limit=limit, reverse=reverse)

    def apply(self, overlay: Overlay) -> None:
        """Apply what a savepoint that is released wrote."""
        writes = self._writes
        if writes is None:
            raise TypeError("this transaction only reads; its parts cannot write")
        mutations = overlay.mutations()
        self._forget(mutations.cleared)
        writes.apply(mutations)
        self._known.update(mutations.writes)
        self.kept_entries += overlay.entries
        self.kept_bytes += overlay.bytes_counted

    def _forget(self, cleared: Sequence[KeyRange]) -> None:
        """What lay in these ranges is not there any more; the rest stays known, or all would be asked for again."""
        known = self._known
        if len(cleared) > MAX_LOOKED_THROUGH:
            known.clear()
            return
        for begin, end in cleared:
            for key in [key for key in known if begin <= key and (end is None or key < end)]:
                known[key] = None


class Savepoint:
    """Reads and writes like a `Transaction`; raises `UsageError` over a limit, and what the transaction raises."""

    __slots__ = ("_overlay", "_transaction_batch")

    def __init__(self, transaction_batch: TransactionBatch) -> None:
        self._transaction_batch = transaction_batch
        self._overlay = Overlay()

    async def get(self, key: bytes) -> bytes | None:
        if self._overlay.entries:
            known, value = self._overlay.find(key)
            if known:
                return value
        return await self._transaction_batch.get(key)

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        if not self._overlay.entries:
            return await self._transaction_batch.get_many(keys)
        found = {key: self._overlay.find(key) for key in keys}
        asked = [key for key, (known, _) in found.items() if not known]
        found.update(
            (key, (True, value))
            for key, value in zip(asked, await self._transaction_batch.get_many(asked), strict=True)
        )
        return [found[key][1] for key in keys]

    async def get_range(
        self, begin: bytes, end: bytes | None, *, limit: int = MAX_PAGE_ITEMS, reverse: bool = False
    ) -> Page:
        if not self._overlay.entries:
            return await self._transaction_batch.get_range(begin, end, limit=limit, reverse=reverse)
        wanted = checked_range(begin, end)
        if wanted.empty:
            return Page([], False)

        async def scan(rest: KeyRange, ask: int) -> Page:
            return await self._transaction_batch.get_range(rest.begin, rest.end, limit=ask, reverse=reverse)

        return await read_through(self._overlay, scan, wanted, limit, reverse=reverse)

    def set(self, key: bytes, value: bytes) -> None:
        self._overlay.write(checked_key(key), checked_value(key, value))

    def clear(self, key: bytes) -> None:
        self._overlay.write(checked_key(key), None)

    def clear_range(self, begin: bytes, end: bytes | None) -> None:
        self._overlay.clear_range(checked_range(begin, end))

    def rollback(self) -> None:
        """Undo what was written; it may go on."""
        self._overlay = Overlay()

    def release(self) -> None:
        """Give what was written to the transaction. Raises `UsageError` when that becomes too large by it: then the
        transaction has failed."""
        if self._overlay.entries:
            self._transaction_batch.apply(self._overlay)
            self._overlay = Overlay()
