"""What becomes of the one transaction that a leader has under way."""

from __future__ import annotations

import pytest

from fireflyer.base.units import MS, SECOND
from fireflyer.kvstore.core.fenced import (
    Committed,
    Failed,
    LeaseRow,
    Outcome,
    OutcomeUnknown,
    PreconditionFailed,
    Transact,
)
from fireflyer.kvstore.core.leadership import Leadership, NotWritten, Read, StoreChanged, Written
from fireflyer.kvstore.core.lease import LeaseMachine
from fireflyer.kvstore.core.rows import encode_row

LEASE_NS = 2 * SECOND
BEFORE = (b"state", b"1")
ROWS = ((b"task", b"new"), (b"state", b"2"))


class Process:
    """One that leads from its second transaction on; `ended` are the terms that it was told of."""

    def __init__(self) -> None:
        self.sent: list[Transact] = []
        self.ended: list[int] = []
        lease = LeaseMachine(b"lease", "a/1", "a:1", LEASE_NS)
        self.leadership = Leadership(lease, LEASE_NS, self.sent.append)
        self.may_write = False
        for now_ns in (0, SECOND):
            self.advance(now_ns)
            self.hear(now_ns, Committed(self.sent[-1].number, None))
        assert self.leadership.term == 1
        assert self.may_write

    def advance(self, now_ns: int) -> None:
        self.may_write = self.leadership.advance(now_ns, self.ended.append)

    def hear(self, now_ns: int, outcome: Outcome) -> object:
        result = self.leadership.outcome(now_ns, outcome)
        self.advance(now_ns)
        return result

    def write(self) -> Transact:
        self.leadership.write(ROWS, BEFORE)
        return self.sent[-1]


def own_lease(term: int = 1) -> bytes:
    return encode_row(LeaseRow("a/1", "a:1", term, 1, LEASE_NS))


def test_what_is_read_and_written_is_conditional_on_the_lease_and_on_the_row_before() -> None:
    process = Process()
    process.leadership.read(((b"a", b"b"),))
    assert process.leadership.busy
    assert process.hear(SECOND, Committed(process.sent[-1].number, own_lease(), ((b"a", b"1"),))) == Read(
        ((b"a", b"1"),)
    )
    order = process.write()
    assert order.held is not None
    assert (order.held.holder, order.held.term) == ("a/1", 1)
    assert (order.expect, order.write) == ((BEFORE,), ROWS)
    assert process.hear(SECOND, Committed(order.number, own_lease())) == Written()
    assert not process.leadership.busy


def test_an_unknown_outcome_is_asked_again_at_the_next_tick_until_the_store_says_which() -> None:
    process = Process()
    first = process.write()
    assert process.hear(SECOND, OutcomeUnknown(first.number, "cut")) is None
    process.leadership.tick(SECOND + MS)
    again = process.sent[-1]
    assert again.number != first.number
    assert (again.expect, again.write) == (first.expect, first.write)
    assert process.hear(SECOND, Failed(again.number, "away")) is None, "the first attempt may still come through"
    process.leadership.tick(SECOND + 2 * MS)
    last = process.sent[-1]
    assert process.hear(SECOND, PreconditionFailed(last.number, own_lease(), (ROWS[-1],))) == Written()


def test_a_failure_that_leaves_no_doubt_is_final_and_the_next_try_waits_for_a_tick() -> None:
    process = Process()
    order = process.write()
    assert process.hear(SECOND, Failed(order.number, "away")) == NotWritten("away")
    assert not process.may_write
    process.leadership.tick(SECOND + MS)
    process.advance(SECOND + MS)
    assert process.may_write


def test_a_store_with_another_past_is_said() -> None:
    process = Process()
    order = process.write()
    found = ((b"state", b"7"),)
    assert process.hear(SECOND, PreconditionFailed(order.number, own_lease(), found)) == StoreChanged()
    assert process.ended == [0], "once, when it took the lease"


def test_the_lease_of_another_ends_everything_that_is_under_way() -> None:
    process = Process()
    order = process.write()
    theirs = encode_row(LeaseRow("b/1", "b:1", 2, 1, LEASE_NS))
    assert process.hear(SECOND, PreconditionFailed(order.number, theirs)) is None
    assert process.ended == [0, 1]
    assert not process.may_write
    assert not process.leadership.busy
    assert process.leadership.address == "b:1"
    assert process.hear(SECOND, Committed(order.number, theirs)) is None, "of a term that is over"


@pytest.mark.parametrize("in_doubt", [False, True])
def test_who_leaves_waits_for_its_transaction_unless_nobody_knows_of_it(in_doubt: bool) -> None:
    process = Process()
    order = process.write()
    if in_doubt:
        process.hear(SECOND, OutcomeUnknown(order.number, "cut"))
    process.leadership.leave()
    process.advance(SECOND + MS)
    assert process.leadership.busy is not in_doubt
    if not in_doubt:
        assert process.hear(SECOND + MS, Committed(order.number, own_lease())) == Written()
    giving_up = process.sent[-1]
    assert [key for key, _ in giving_up.write] == [b"lease"]
    process.hear(SECOND + MS, Committed(giving_up.number, own_lease()))
    assert process.leadership.left


def test_a_process_that_stood_still_is_told_for_how_long() -> None:
    process = Process()
    assert process.leadership.tick(SECOND) == 0
    assert process.leadership.tick(SECOND + LEASE_NS // 2) == 0
    assert process.leadership.tick(3 * SECOND + LEASE_NS // 2) == 2 * SECOND
