"""A transaction as data: the machine asks for it, a shell carries it out on a key-value store and says how it went.

    Transact ──> carry_out in a serializable transaction ──> Committed   what was read; the writes are durable
                                                           ├> Refused     a condition did not hold, nothing was written
                                                           ├> Failed      nothing was written and nothing will be
                                                           └> Unknown     perhaps it was written, perhaps it will be

The shell answers each `Transact` once. `carry_out` gives the first two; the shell turns errors of the store into the
others. It must not repeat a transaction whose commit is unknown: the machine does, with the same conditions and values.

What fences is the row of the lease (`kvstore.core.lease`), under a key that each service chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol, TypeAlias

import msgspec

from fireflyer.kvstore.core.rows import decode_row

__all__ = [
    "Committed",
    "Failed",
    "Item",
    "LeaseCondition",
    "LeaseRow",
    "Outcome",
    "OutcomeUnknown",
    "PreconditionFailed",
    "Rows",
    "Transact",
    "carry_out",
]

Item: TypeAlias = tuple[bytes, bytes]
PAGE_ROWS: Final = 1000


class Page(Protocol):
    @property
    def items(self) -> Sequence[Item]: ...

    @property
    def more(self) -> bool:
        """Whether there may be rows behind the last one."""


class Rows(Protocol):
    """A transaction of the store; `fireflyer.kvstore.Transaction` is one."""

    async def get(self, key: bytes) -> bytes | None: ...

    async def get_range(self, begin: bytes, end: bytes | None, *, limit: int) -> Page: ...

    def set(self, key: bytes, value: bytes) -> None: ...

    def clear(self, key: bytes) -> None: ...


class LeaseRow(msgspec.Struct, frozen=True):
    """Who is primary. Changed by each renewal, so that a candidate sees that somebody lives."""

    holder: str
    """Of one process: no other one and no later one has the same."""
    address: str
    """Where it is asked."""
    term: int
    """One more with each taking."""
    renewals: int = msgspec.field(name="beat")
    """One more with each renewal that was tried."""
    lease_ns: int
    """What this holder promises: it stops answering half of it after its last renewal. Others wait all of it."""


class LeaseCondition(msgspec.Struct, frozen=True):
    """The lease row must name this holder and term."""

    holder: str
    term: int


class Transact(msgspec.Struct, frozen=True):
    """Conditions, reads and writes of one transaction. None as a value: there is no such row."""

    number: int
    """Comes back in the outcome."""
    held: LeaseCondition | None = None
    expect: tuple[tuple[bytes, bytes | None], ...] = ()
    read: tuple[tuple[bytes, bytes], ...] = ()
    """Ranges, the ends not included."""
    write: tuple[tuple[bytes, bytes | None], ...] = ()


class Committed(msgspec.Struct, frozen=True):
    number: int
    lease: bytes | None
    """The lease row as it was before the transaction, also in `PreconditionFailed`."""
    rows: tuple[Item, ...] = ()


class PreconditionFailed(msgspec.Struct, frozen=True):
    number: int
    lease: bytes | None
    found: tuple[tuple[bytes, bytes | None], ...] = ()
    """What was there instead, for the conditions of `expect`, in their order; empty if the lease was not held."""


class Failed(msgspec.Struct, frozen=True):
    number: int
    reason: str


class OutcomeUnknown(msgspec.Struct, frozen=True):
    number: int
    reason: str


Outcome: TypeAlias = Committed | PreconditionFailed | Failed | OutcomeUnknown


async def carry_out(order: Transact, rows: Rows, lease_key: bytes) -> Committed | PreconditionFailed:
    """The body of the transaction. It may run several times; what counts is what the attempt that committed
    returned."""
    lease = await rows.get(lease_key)
    if order.held is not None and not _holds(lease_key, lease, order.held):
        return PreconditionFailed(order.number, lease)
    found = tuple([(key, await rows.get(key)) for key, _ in order.expect])
    if found != order.expect:
        return PreconditionFailed(order.number, lease, found)
    items: list[Item] = []
    for begin, end in order.read:
        await _read(rows, begin, end, items)
    for key, value in order.write:
        if value is None:
            rows.clear(key)
        else:
            rows.set(key, value)
    return Committed(order.number, lease, tuple(items))


def _holds(lease_key: bytes, lease: bytes | None, held: LeaseCondition) -> bool:
    if lease is None:
        return False
    row = decode_row(lease_key, lease, LeaseRow)
    return row.holder == held.holder and row.term == held.term


async def _read(rows: Rows, begin: bytes, end: bytes, items: list[Item]) -> None:
    while True:
        page = await rows.get_range(begin, end, limit=PAGE_ROWS)
        items.extend(page.items)
        if not page.more:
            return
        begin = items[-1][0] + b"\0"
