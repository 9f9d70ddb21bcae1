"""One attempt of a transaction, the same for all engines.

An engine brings a `Source`: reads at a snapshot, and a commit. The attempt keeps the writes (`core.overlay`) and what
it conflicts with (`core.conflicts`), lays its writes over its reads, and checks limits and the deadline.

    open ──body──> committing ──> ended
      └── any error of the source or over a limit: failed, and every later call raises the same error

Failed is final even where the body swallows the error: a transaction that has lost a read must not commit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from fireflyer.base.errors import Aborted, UsageError
from fireflyer.base.units import format_bytes
from fireflyer.kvstore.api import Reader, Transaction
from fireflyer.kvstore.core.conflicts import Conflicts, ConflictSetBuilder
from fireflyer.kvstore.core.keys import (
    ENTRY_OVERHEAD_BYTES,
    MAX_ENTRIES,
    MAX_PAGE_ITEMS,
    MAX_TRANSACTION_BYTES,
    KeyRange,
    Page,
    checked_key,
    checked_range,
    checked_value,
    key_after,
)
from fireflyer.kvstore.core.overlay import Mutations, Overlay, looked_at, read_through
from fireflyer.kvstore.errors import TransactionTimeout

__all__ = ["Attempt", "Source"]


_SURELY_BYTES: Final = min(MAX_ENTRIES * ENTRY_OVERHEAD_BYTES, MAX_TRANSACTION_BYTES)
"""With so many counted no limit is passed, since each entry counts `ENTRY_OVERHEAD_BYTES` at least."""


class Source(Protocol):
    """A snapshot of the store. Its reads begin it at the latest."""

    async def get(self, key: bytes) -> bytes | None: ...

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]: ...

    async def scan(self, wanted: KeyRange, limit: int, *, reverse: bool) -> Page:
        """Up to `limit` items and about `MAX_PAGE_BYTES`, but at least one if there is any."""

    async def conflict_with(self, conflicts: Conflicts) -> None:
        """Reads that were asked for explicitly, before `commit`; for sources whose store has to see them."""

    async def commit(self, reads: Conflicts, mutations: Mutations) -> None: ...

    @property
    def commit_sent(self) -> bool:
        """Whether it may have committed although `commit` has not returned."""

    async def end(self, error: BaseException | None) -> None:
        """Always called, once, at the end. Must not wait when `error` is not an `Exception` (it was cancelled)."""


class Attempt(Transaction):
    """See the module's text."""

    def __init__(self, source: Source, now_ns: Callable[[], int], deadline_ns: int, *, read_only: bool) -> None:
        self._source = source
        self._now_ns = now_ns
        self._deadline_ns = deadline_ns
        self._read_only = read_only
        self._overlay = Overlay()
        self._reads = ConflictSetBuilder()
        self._asked = ConflictSetBuilder()
        self._makes_room = False
        self._failure: Exception | None = None
        self._ended = False
        self.committed = False
        """The commit was answered: from here on nothing is in doubt."""
        self._snapshot = _SnapshotReader(self)

    @property
    def snapshot(self) -> Reader:
        return self._snapshot

    async def get(self, key: bytes) -> bytes | None:
        return await self._get(checked_key(key), conflict=True)

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return await self._get_many(keys, conflict=True)

    async def get_range(
        self, begin: bytes, end: bytes | None, *, limit: int = MAX_PAGE_ITEMS, reverse: bool = False
    ) -> Page:
        return await self._range(checked_range(begin, end), limit, reverse=reverse, conflict=True)

    def set(self, key: bytes, value: bytes) -> None:
        self._writable()
        self._overlay.write(checked_key(key), checked_value(key, value))
        self._check_size()

    def clear(self, key: bytes) -> None:
        self._writable()
        self._overlay.write(checked_key(key), None)
        self._check_size()

    def clear_range(self, begin: bytes, end: bytes | None) -> None:
        self._writable()
        self._overlay.clear_range(checked_range(begin, end))
        self._check_size()

    def frees_space(self) -> None:
        self._writable()
        self._makes_room = True

    def apply(self, mutations: Mutations) -> None:
        self._writable()
        self._overlay.absorb(mutations)
        self._check_size()

    def add_read_conflict(self, begin: bytes, end: bytes | None = None) -> None:
        self._writable()
        asked = KeyRange(checked_key(begin), key_after(begin)) if end is None else checked_range(begin, end)
        for gathering in (self._reads, self._asked):
            if end is None:
                gathering.add_point(begin)
            else:
                gathering.add_range(asked)
        self._check_size()

    async def commit(self) -> None:
        """Once; after it nothing but `end`."""
        self._usable()
        mutations = self._overlay.mutations()
        if self._makes_room:
            mutations = mutations._replace(frees_space=True)
        try:
            if not mutations.empty and self._asked.entries:
                await self._source.conflict_with(self._asked.normal())
            await self._source.commit(self._reads.normal(), mutations)
        except BaseException as error:
            self._fail(error)
            raise
        self._ended = self.committed = True

    async def end(self, error: BaseException | None) -> None:
        self._ended = True
        await self._source.end(error)

    @property
    def commit_sent(self) -> bool:
        return self._source.commit_sent

    async def _get(self, key: bytes, *, conflict: bool) -> bytes | None:
        self._usable()
        if not self._read_only:
            known, value = self._overlay.find(key)
            if known:
                return value
            if conflict:
                self._reads.add_point(key)
                self._check_size()
        try:
            return await self._source.get(key)
        except BaseException as error:
            self._fail(error)
            raise

    async def _get_many(self, keys: Sequence[bytes], *, conflict: bool) -> list[bytes | None]:
        self._usable()
        if len(keys) > MAX_PAGE_ITEMS:
            raise UsageError(f"{len(keys)} keys at once; at most {MAX_PAGE_ITEMS} are allowed")
        found: dict[bytes, bytes | None] = {}
        asked: list[bytes] = []
        for key in keys:
            known, value = self._overlay.find(checked_key(key))
            if known:
                found[key] = value
            else:
                asked.append(key)
                if conflict and not self._read_only:
                    self._reads.add_point(key)
        self._check_size()
        if asked:
            try:
                found.update(zip(asked, await self._source.get_many(asked), strict=True))
            except BaseException as error:
                self._fail(error)
                raise
        return [found[key] for key in keys]

    async def _range(self, wanted: KeyRange, limit: int, *, reverse: bool, conflict: bool) -> Page:
        self._usable()
        if not 1 <= limit <= MAX_PAGE_ITEMS:
            raise UsageError(f"limit {limit} of a range; 1 to {MAX_PAGE_ITEMS} are allowed")
        if wanted.empty:
            return Page([], False)
        try:
            page = await read_through(
                self._overlay,
                lambda rest, ask: self._source.scan(rest, ask, reverse=reverse),
                wanted,
                limit,
                reverse=reverse,
            )
        except BaseException as error:
            self._fail(error)
            raise
        if conflict and not self._read_only:
            self._reads.add_range(looked_at(wanted, page, reverse=reverse))
            self._check_size()
        return page

    def _fail(self, error: BaseException) -> None:
        cancelled = Aborted("an operation of this transaction was cancelled, so it cannot be committed")
        self._failure = error if isinstance(error, Exception) else cancelled

    def _writable(self) -> None:
        self._usable()
        if self._read_only:
            raise UsageError("this transaction only reads; use Engine.transact to write")

    def _usable(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._ended:
            raise UsageError("this transaction has ended; a transaction function may use it only while it runs")
        if self._now_ns() > self._deadline_ns:
            self._failure = TransactionTimeout(
                "the transaction was open for too long and was not committed; make it shorter"
            )
            raise self._failure

    def _check_size(self) -> None:
        if self._overlay.bytes_counted + self._reads.bytes_counted <= _SURELY_BYTES:
            return
        entries = max(self._overlay.entries, self._reads.entries)
        counted = self._overlay.bytes_counted + self._reads.bytes_counted
        if entries > MAX_ENTRIES:
            self._failure = UsageError(f"the transaction has more than {MAX_ENTRIES} entries; split it")
            raise self._failure
        if counted > MAX_TRANSACTION_BYTES:
            allowed = format_bytes(MAX_TRANSACTION_BYTES)
            self._failure = UsageError(
                f"the transaction has {format_bytes(counted)}, at most {allowed} are allowed; split it"
            )
            raise self._failure


class _SnapshotReader(Reader):
    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt

    async def get(self, key: bytes) -> bytes | None:
        return await self._attempt._get(checked_key(key), conflict=False)  # noqa: SLF001

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return await self._attempt._get_many(keys, conflict=False)  # noqa: SLF001

    async def get_range(
        self, begin: bytes, end: bytes | None, *, limit: int = MAX_PAGE_ITEMS, reverse: bool = False
    ) -> Page:
        wanted = checked_range(begin, end)
        return await self._attempt._range(wanted, limit, reverse=reverse, conflict=False)  # noqa: SLF001
