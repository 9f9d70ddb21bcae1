"""The lease of a service: who takes the row and when, and until when a holder acts."""

from __future__ import annotations

import pytest

from fireflyer.base.errors import DataCorruption, UsageError
from fireflyer.base.units import MS, SECOND
from fireflyer.kvstore.core.fenced import (
    Committed,
    Failed,
    LeaseCondition,
    LeaseRow,
    OutcomeUnknown,
    PreconditionFailed,
    Transact,
)
from fireflyer.kvstore.core.lease import LeaseMachine
from fireflyer.kvstore.core.rows import decode_row, encode_row

LEASE_KEY = b"PMle"
LEASE_NS = 2 * SECOND


def machine(name: str = "a/1") -> LeaseMachine:
    return LeaseMachine(LEASE_KEY, name, f"{name}:1", LEASE_NS)


def other(renewals: int, term: int = 4) -> bytes:
    return encode_row(LeaseRow("b/1", "b/1:1", term, renewals, LEASE_NS))


def tick(lease: LeaseMachine, now_ns: int) -> Transact:
    order = lease.tick(now_ns, now_ns // MS + 1)
    assert order is not None
    return order


def written(order: Transact) -> LeaseRow:
    ((key, value),) = order.write
    assert key == LEASE_KEY
    assert value is not None
    return decode_row(key, value, LeaseRow)


def taken(lease: LeaseMachine) -> int:
    """Lets it take an empty store's lease; at which instant it began to."""
    look = tick(lease, 0)
    assert not look.write
    lease.outcome(10 * MS, Committed(look.number, None))
    take = tick(lease, SECOND)
    assert take.expect == ((LEASE_KEY, None),)
    assert written(take).term == 1
    assert not lease.may_act(SECOND)
    lease.outcome(SECOND + 300 * MS, Committed(take.number, None))
    return SECOND


def test_an_empty_store_is_taken_and_the_holder_acts_half_a_lease_from_the_start_of_the_taking() -> None:
    lease = machine()
    start_ns = taken(lease)
    assert lease.held == LeaseCondition("a/1", 1)
    assert lease.may_act(start_ns + LEASE_NS // 2 - 1)
    assert not lease.may_act(start_ns + LEASE_NS // 2)


def test_another_holder_is_left_alone_while_its_row_changes() -> None:
    lease = machine()
    for now_ns in range(0, 10 * SECOND, SECOND // 2):
        look = tick(lease, now_ns)
        assert not look.write
        lease.outcome(now_ns + MS, Committed(look.number, other(now_ns // SECOND)))
    assert lease.held is None
    assert lease.primary_address == "b/1:1"


def test_a_row_that_stands_still_is_taken_when_its_lease_has_passed_since_the_first_look_came_back() -> None:
    lease = machine()
    look = tick(lease, 0)
    lease.outcome(1500 * MS, Committed(look.number, other(7)))
    assert not tick(lease, 1500 * MS + LEASE_NS - 1).write
    lease.outcome(1500 * MS + LEASE_NS, Committed(1500 + 2000, other(7)))
    take = tick(lease, 1500 * MS + 2 * LEASE_NS)
    assert take.expect == ((LEASE_KEY, other(7)),)
    assert written(take).term == 5
    lease.outcome(6 * SECOND, PreconditionFailed(take.number, other(8), ((LEASE_KEY, other(8)),)))
    assert lease.held is None
    assert not tick(lease, 7 * SECOND).write


def test_a_holder_without_answers_stops_acting_and_goes_on_where_it_was() -> None:
    lease = machine()
    now_ns = taken(lease)
    for _ in range(8):
        now_ns += SECOND
        order = tick(lease, now_ns)
        assert order.held == LeaseCondition("a/1", 1)
        lease.outcome(now_ns, Failed(order.number, "") if now_ns % 2 else OutcomeUnknown(order.number, ""))
        assert lease.held == LeaseCondition("a/1", 1)
    assert not lease.may_act(now_ns)
    order = tick(lease, now_ns + SECOND)
    lease.outcome(now_ns + SECOND, Committed(order.number, None))
    assert lease.may_act(now_ns + SECOND)
    assert lease.held == LeaseCondition("a/1", 1)


def test_each_renewal_has_a_new_beat_and_one_is_under_way_at_a_time() -> None:
    lease = machine()
    now_ns = taken(lease)
    first = tick(lease, now_ns + SECOND)
    assert lease.tick(now_ns + 9 * SECOND, 99) is None
    lease.outcome(now_ns + 9 * SECOND, OutcomeUnknown(first.number, ""))
    assert written(tick(lease, now_ns + 9 * SECOND)).renewals == written(first).renewals + 1


def test_a_holder_that_finds_the_row_in_other_hands_is_a_candidate() -> None:
    lease = machine()
    order = tick(lease, taken(lease) + SECOND)
    lease.outcome(3 * SECOND, PreconditionFailed(order.number, other(1)))
    assert lease.held is None
    assert not lease.may_act(3 * SECOND)


def test_a_taking_that_came_through_unnoticed_counts_only_after_a_renewal() -> None:
    """When it was committed, and so since when others wait, is not known."""
    lease = machine()
    look = tick(lease, 0)
    lease.outcome(0, Committed(look.number, None))
    take = tick(lease, SECOND)
    lease.outcome(2 * SECOND, OutcomeUnknown(take.number, "the connection broke"))
    assert not lease.may_act(2 * SECOND)
    again = tick(lease, 9 * SECOND)
    lease.outcome(9 * SECOND, PreconditionFailed(again.number, take.write[0][1], ((LEASE_KEY, take.write[0][1]),)))
    assert lease.held == LeaseCondition("a/1", 1)
    assert not lease.may_act(9 * SECOND)
    renewal = tick(lease, 9 * SECOND)
    assert renewal.held == LeaseCondition("a/1", 1)
    lease.outcome(9 * SECOND, Committed(renewal.number, take.write[0][1]))
    assert lease.may_act(9 * SECOND)


def test_a_damaged_row_and_a_lease_that_cannot_be_kept_are_refused() -> None:
    lease = machine()
    look = tick(lease, 0)
    with pytest.raises(DataCorruption, match="restore the store"):
        lease.outcome(0, Committed(look.number, b"\x01nonsense"))
    with pytest.raises(DataCorruption, match="has format 09, not 1"):
        machine().seen(0, b"\x09")
    with pytest.raises(UsageError, match="lease 1 ms is below 20 ms"):
        LeaseMachine(LEASE_KEY, "a", "a:1", MS)
