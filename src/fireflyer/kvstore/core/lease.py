"""Who is primary among the processes of a service: one row in the key-value store, and no two clocks compared.

    CANDIDATE ──the row did not change for its `lease_ns`──> take it ──committed──> HOLDER
        ^                                                                             │
        └──────────────────the row is another one's──────────────────────── renews early

    tick     -> the next transaction, if one is due and none is under way
    outcome  <- how it went
    may_act  -- whether this process may answer as primary now

A candidate looks at the row a few times per lease. When it has seen the same row for `lease_ns`, which the row itself
names, it takes it on condition that it still is that row. It counts from the instant when the first look *came back*:
what that look saw had been committed by then, and its holder acts until half a lease after the *start* of that renewal.
So the holder has stopped for half a lease, less the drift of two clocks, before anybody takes the row.

A holder whose renewals fail, or stay without an answer, stops acting, and keeps trying: as long as the row is still its
own nobody else was primary, and it goes on where it was. Each try writes a new number of renewals, so one whose
outcome is unknown needs no inquiry. Whoever finds the row in its own name (a taking of unknown outcome that came
through) is holder, but acts only after a renewal: when that taking was committed, and so when others began to count,
it cannot know.

A holder that ends gives the lease up: it stops acting, and then writes the row with a `lease_ns` of nothing, upon which
the next candidate takes it at its second look. What others promise each other by time (fences) is not shortened by it:
the next primary counts from its own beginning."""

from __future__ import annotations

from typing import Final

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.units import MS, format_duration
from fireflyer.kvstore.core.fenced import Committed, LeaseCondition, LeaseRow, Outcome, PreconditionFailed, Transact
from fireflyer.kvstore.core.rows import decode_row, encode_row

__all__ = ["MIN_LEASE_NS", "LeaseMachine"]

MIN_LEASE_NS: Final = 20 * MS
RENEWALS_PER_LEASE: Final = 8
"""Renewals. Three in a row must fail before half of the lease is over."""
LOOKS_PER_LEASE: Final = 4


class LeaseMachine:
    """One process's view of the lease."""

    def __init__(self, key: bytes, holder: str, address: str, lease_ns: int) -> None:
        """`key`: of the row, the same for all processes of the service. `holder` is unique to this process (a name
        and something random)."""
        if lease_ns < MIN_LEASE_NS:
            raise UsageError(f"lease {format_duration(lease_ns)} is below {format_duration(MIN_LEASE_NS)}; use seconds")
        self._key = key
        self._me = LeaseRow(holder, address, 0, 0, lease_ns)
        self._lease_ns = lease_ns
        self._row: LeaseRow | None = None
        self._raw: bytes | None = None
        self._unchanged_since_ns: int | None = None
        self._acts_until_ns: int | None = None
        self._due_ns: int | None = None
        self._trying: Transact | None = None
        self._started_ns = 0
        self._term = 0
        self._leaving = False
        self._last: Transact | None = None

    @property
    def held(self) -> LeaseCondition | None:
        """What every transaction of this primary must be conditional on; None for a candidate."""
        return LeaseCondition(self._me.holder, self._term) if self._term else None

    @property
    def left(self) -> bool:
        """After `leave`: nothing is under way any more, and the lease is not held, or cannot be given up."""
        return self._leaving and self._trying is None and not self._term

    @property
    def primary_address(self) -> str:
        """Of the holder, as it was last seen."""
        return self._row.address if self._row is not None else ""

    def may_act(self, now_ns: int) -> bool:
        """Whether answers of this process count. True for one process at a time."""
        return (
            bool(self._term) and not self._leaving and self._acts_until_ns is not None and now_ns < self._acts_until_ns
        )

    def tick(self, now_ns: int, number: int) -> Transact | None:
        """The transaction that is due, as `number`."""
        if self._leaving:
            return self._giving_up(number)
        if self._trying is not None or (self._due_ns is not None and now_ns < self._due_ns):
            return None
        self._started_ns = now_ns
        self._due_ns = now_ns + self._lease_ns // (RENEWALS_PER_LEASE if self._term else LOOKS_PER_LEASE)
        self._trying = self._renewal(number) if self._term else self._taking(now_ns, number)
        return self._trying

    def leave(self) -> None:
        """Does not act any more; `tick` gives the lease up as soon as no transaction of it is under way."""
        self._leaving = True

    def outcome(self, now_ns: int, outcome: Outcome) -> bool:
        """False if it is not about the lease."""
        trying = self._trying
        if trying is None or outcome.number != trying.number:
            return False
        self._trying = None
        if self._leaving and trying is self._last:
            self._term = 0
        elif isinstance(outcome, Committed) and trying.write:
            self._won(trying)
        elif isinstance(outcome, Committed | PreconditionFailed):
            self.seen(now_ns, outcome.lease)
        return True

    def seen(self, now_ns: int, raw: bytes | None) -> None:
        """The lease row, as another transaction that came back now found it."""
        row = decode_row(self._key, raw, LeaseRow) if raw is not None else None
        if row is not None and row.holder == self._me.holder:
            if row.term != self._term:
                self._term, self._acts_until_ns, self._due_ns = row.term, None, None
            self._row, self._raw = row, raw
            return
        self._term, self._acts_until_ns = 0, None
        if self._unchanged_since_ns is None or raw != self._raw:
            self._row, self._raw, self._unchanged_since_ns = row, raw, now_ns

    # --- transactions ---

    def _renewal(self, number: int) -> Transact:
        self._me = self._renewed(self._term)
        return Transact(number, held=self.held, write=((self._key, encode_row(self._me)),))

    def _giving_up(self, number: int) -> Transact | None:
        """Once: whether or not it is committed, nothing more can be done."""
        if self._trying is not None or not self._term:
            return None
        row = msgspec.structs.replace(self._renewed(self._term), lease_ns=0)
        self._trying = self._last = Transact(number, held=self.held, write=((self._key, encode_row(row)),))
        return self._trying

    def _taking(self, now_ns: int, number: int) -> Transact:
        since_ns = self._unchanged_since_ns
        if since_ns is None:
            return Transact(number)
        if self._row is not None and now_ns - since_ns < self._row.lease_ns:
            return Transact(number)
        term = 1 + (self._row.term if self._row is not None else 0)
        self._me = self._renewed(term)
        return Transact(number, expect=((self._key, self._raw),), write=((self._key, encode_row(self._me)),))

    def _renewed(self, term: int) -> LeaseRow:
        return LeaseRow(self._me.holder, self._me.address, term, self._me.renewals + 1, self._lease_ns)

    # --- outcomes ---

    def _won(self, trying: Transact) -> None:
        self._term = self._me.term
        self._row, self._raw = self._me, trying.write[0][1]
        self._unchanged_since_ns = None
        self._acts_until_ns = self._started_ns + self._lease_ns // 2
