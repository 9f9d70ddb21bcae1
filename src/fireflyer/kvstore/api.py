"""What users of the key-value engine see: `Reader`, `Transaction`, `Engine`.

A body is an `async def` that is given a transaction. **It may run several times**, so it must not change anything but
through its transaction, and whatever it returns or keeps from an attempt that did not commit is void. Snapshot: all
reads of one attempt see one state, that of its first read at the latest, and its own writes. Serializable: what commits
is as if transactions had run one after the other.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol, Self, TypeVar

from fireflyer.base.units import SECOND
from fireflyer.kvstore.core.keys import MAX_PAGE_ITEMS, Page
from fireflyer.kvstore.core.overlay import Mutations

__all__ = ["DEFAULT_TIMEOUT_NS", "Engine", "Reader", "Transaction"]

T = TypeVar("T")

DEFAULT_TIMEOUT_NS: Final = 10 * SECOND
"""Of all attempts together."""


class Reader(Protocol):
    """Reads. They raise `UsageError` over a limit, `Conflict` when the snapshot is gone or the database refuses to go
    on, `Disconnected`, `TransactionTimeout` when the attempt has been open for too long, `DataCorruption`."""

    async def get(self, key: bytes) -> bytes | None:
        """None if there is no such key."""

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Get each, in this order; where the store is another process, with one question. At most
        `MAX_PAGE_ITEMS` keys, of values that are small: their bytes are not bounded."""

    async def get_range(
        self, begin: bytes, end: bytes | None, *, limit: int = MAX_PAGE_ITEMS, reverse: bool = False
    ) -> Page:
        """Keys from `begin` up to but without `end` (None: to the last), ascending, or descending from the end.
        Up to `limit` items (`MAX_PAGE_ITEMS` at most) and about `MAX_PAGE_BYTES`; while `Page.more`, go on behind the
        last item's key."""


class Transaction(Reader, Protocol):
    """Reads see the writes before them. Writes are kept until commit; they raise `UsageError` over a limit."""

    @property
    def snapshot(self) -> Reader:
        """The same reads, own writes included, without conflicting with what others write there. (On PostgreSQL they do
        conflict: the server knows no weaker read.) Use `add_read_conflict` for what the decision hangs on."""

    def set(self, key: bytes, value: bytes) -> None:
        """Creates or replaces."""

    def clear(self, key: bytes) -> None:
        """Remove a key. Nothing happens if there is no such key."""

    def clear_range(self, begin: bytes, end: bytes | None) -> None:
        """Clears all keys from `begin` up to but without `end` (None: to the last)."""

    def frees_space(self) -> None:
        """Declare that it makes room in the end, though it writes something first: where a disk is full it may use the
        room that is kept for clearing keys. For little, and nothing that goes on for ever without clearing."""

    def apply(self, mutations: Mutations) -> None:
        """All of them, whose keys and values have been checked: see `Part`."""

    def add_read_conflict(self, begin: bytes, end: bytes | None = None) -> None:
        """Count the key `begin` as read, or with `end` the range: `Conflict` if another writes there."""


class Engine(Protocol):
    """An ordered map of bytes to bytes. Lives in the loop in which it was opened."""

    async def transact(
        self,
        body: Callable[[Transaction], Awaitable[T]],
        *,
        timeout_ns: int = DEFAULT_TIMEOUT_NS,
        idempotent: bool = False,
    ) -> T:
        """Runs `body` and commits, again after a conflict or a broken connection, until it has committed; returns what
        the attempt returned that did. Errors that `body` raises itself end it: nothing is written, the error comes out.

        Raises the last attempt's `Conflict` or `Disconnected` when attempts or time have run out, `TransactionTimeout`
        when the body took too long, `NoSpace` or `Busy` when a disk or a queue is full: nothing happened. Raises
        `CommitUnknown` when it cannot be known whether it committed; with `idempotent`, which promises that doing it
        twice is the same as once, it tries again instead.
        Cancelling it while it commits leaves the same doubt."""

    async def read(self, body: Callable[[Reader], Awaitable[T]], *, timeout_ns: int = DEFAULT_TIMEOUT_NS) -> T:
        """The same for a body that only reads: it sees one consistent snapshot."""

    def transaction(self, *, timeout_ns: int = ...) -> AbstractAsyncContextManager[Transaction]:
        """A single attempt: commits at the end of the `async with`, unless an error leaves it. Raises like `transact`,
        also `Conflict` at once; the caller repeats."""

    async def close(self) -> None:
        """Ends it: commits under way are finished or refused. Idempotent."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...
