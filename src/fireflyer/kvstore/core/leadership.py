"""A process's part in a service of which one process leads: its lease, and the one transaction that is under way in it.

    read  ──Transact──> Read                      the rows that were asked for
    write ──Transact──> Committed                 Written: it holds
                     ├> Failed                    NotWritten: nothing of it will ever hold
                     ├> Unknown                   the same transaction again, until one of the others
                     └> Refused, mine             the Unknown one had come through: Written
                        Refused, another row      StoreChanged: the store has another past than this process knows
                        Refused, lease            no longer leader: `advance` says so

Every transaction is conditional on the lease, and what writes also on the row that the one before it wrote (`before`,
which the machine names, and whose new value is the last of `rows`): so one of which nobody knows whether it was
committed can come through late only if nothing came after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec

from fireflyer.kvstore.core.fenced import (
    Committed,
    Failed,
    Item,
    LeaseCondition,
    Outcome,
    OutcomeUnknown,
    PreconditionFailed,
    Transact,
)
from fireflyer.kvstore.core.lease import LeaseMachine

__all__ = ["Leadership", "NotWritten", "Read", "Result", "StoreChanged", "Written"]

SLEPT_LEASES: Final = 2
"""Without a tick for this part of the lease, the process stood still."""


@dataclass(frozen=True, slots=True)
class Read:
    rows: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Written:
    pass


@dataclass(frozen=True, slots=True)
class NotWritten:
    reason: str


@dataclass(frozen=True, slots=True)
class StoreChanged:
    """Somebody restored or edited it: read again what it has."""


Result: TypeAlias = Read | Written | NotWritten | StoreChanged


@dataclass(slots=True)
class _Writing:
    order: Transact
    in_doubt: bool = False
    """An attempt ended without an answer: it may still come through."""
    resting: bool = False
    """Waits for the next tick to be tried again."""


class Leadership:
    """`send` is given each transaction; the outcome of each comes back to `outcome`."""

    def __init__(self, lease: LeaseMachine, lease_ns: int, send: Callable[[Transact], None]) -> None:
        self._lease, self._lease_ns, self._send = lease, lease_ns, send
        self._numbers = 0
        self._held: LeaseCondition | None = None
        self._reading: int | None = None
        self._writing: _Writing | None = None
        self._resting = False
        self._leaving = False
        self._ticked_ns: int | None = None

    @property
    def term(self) -> int:
        """Of the lease that this process holds; 0 for a candidate."""
        return self._held.term if self._held is not None else 0

    @property
    def address(self) -> str:
        """Of the one that leads, as it was last seen; empty if nobody was."""
        return self._lease.primary_address

    @property
    def leaving(self) -> bool:
        return self._leaving

    @property
    def left(self) -> bool:
        """After `leave`: nothing is under way."""
        return self._leaving and self._writing is None and self._lease.left

    @property
    def busy(self) -> bool:
        """A transaction is under way, or waits for the next tick."""
        return self._reading is not None or self._writing is not None

    def may_act(self, now_ns: int) -> bool:
        """Whether what this process answers counts."""
        return self._lease.may_act(now_ns)

    def leave(self) -> None:
        """The process is to end: what is under way comes to its end, and then the lease is given up."""
        self._leaving = True

    def tick(self, now_ns: int) -> int:
        """For how long the process stood still, where that is so long that others' silence may be its own; else 0."""
        slept_ns = now_ns - self._ticked_ns if self._ticked_ns is not None else 0
        self._ticked_ns = now_ns
        self._resting = False
        if self._writing is not None and self._writing.resting:
            self._writing.resting = False
            self._try(self._writing)
        return slept_ns if slept_ns > self._lease_ns // SLEPT_LEASES else 0

    def advance(self, now_ns: int, forget: Callable[[int], None]) -> bool:
        """After each event. True: this process may read and write. `forget`: the memory of a leader is void, and
        nothing is under way any more; it is given the term that has ended, 0 if none has."""
        if self._lease.held != self._held:
            ended = self.term
            self._held, self._reading, self._writing, self._resting = self._lease.held, None, None, False
            forget(ended)
        if self._leaving and (self._writing is None or self._writing.in_doubt):
            self._reading = self._writing = None
            forget(0)
            self._lease.leave()
        order = self._lease.tick(now_ns, self._numbers + 1)
        if order is not None:
            self._numbers += 1
            self._send(order)
        return self._held is not None and not self._resting and not self._leaving

    def read(self, ranges: tuple[tuple[bytes, bytes], ...]) -> None:
        self._reading = self._number()
        self._send(Transact(self._reading, held=self._held, read=ranges))

    def write(self, rows: tuple[tuple[bytes, bytes | None], ...], before: tuple[bytes, bytes | None]) -> None:
        self._writing = _Writing(Transact(0, held=self._held, expect=(before,), write=rows))
        self._try(self._writing)

    def outcome(self, now_ns: int, outcome: Outcome) -> Result | None:
        """What became of the reading or the writing; None: nothing is settled yet, or it was about the lease."""
        if self._lease.outcome(now_ns, outcome):
            return None
        if outcome.number == self._reading:
            self._reading = None
            return self._read(now_ns, outcome)
        writing = self._writing
        if writing is None or outcome.number != writing.order.number:
            return None
        result = self._settle(now_ns, writing, outcome)
        if result is not None:
            self._writing = None
        return result

    def _read(self, now_ns: int, outcome: Outcome) -> Result | None:
        if isinstance(outcome, PreconditionFailed):
            self._lease.seen(now_ns, outcome.lease)
        if isinstance(outcome, Committed):
            return Read(outcome.rows)
        self._resting = True
        return None

    def _settle(self, now_ns: int, writing: _Writing, outcome: Outcome) -> Result | None:
        match outcome:
            case Committed():
                return Written()
            case PreconditionFailed(_, _, found) if found == writing.order.write[-1:]:
                return Written()
            case PreconditionFailed(_, lease, found):
                self._lease.seen(now_ns, lease)
                return StoreChanged() if found else None
            case OutcomeUnknown():
                writing.in_doubt = writing.resting = True
            case Failed() if writing.in_doubt:
                writing.resting = True
            case Failed(_, reason):
                self._resting = True
                return NotWritten(reason)
        return None

    def _try(self, writing: _Writing) -> None:
        writing.order = msgspec.structs.replace(writing.order, number=self._number())
        self._send(writing.order)

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers
