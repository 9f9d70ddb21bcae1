"""A client's requests when a session is over, or has too many unknown outcomes: another one takes its place."""

from __future__ import annotations

from tests.support.fs.chain_sim.request_rig import (
    CHUNK,
    DONE,
    OTHER,
    READ,
    TRUNCATE,
    Bench,
    exchanges,
    exchanging,
    refused,
)

from fireflyer.base.units import MS, SECOND
from fireflyer.fs.core.requests.effects import (
    End,
    NewSession,
    ReplyReceived,
    SessionOpened,
    SessionOver,
    Withdraw,
)
from fireflyer.fs.schema.chunks import (
    Missing,
    RefusalReason,
    Update,
)
from fireflyer.fs.schema.ids import ChunkId


def test_with_too_many_unknown_outcomes_nothing_begins_until_there_is_another_session() -> None:
    bench = exchanging()
    under_way = bench.begin(TRUNCATE, ChunkId(2, 0))
    bench.until(60 * MS)
    waiting, again = bench.begin(TRUNCATE, ChunkId(2, 1)), bench.begin(TRUNCATE, CHUNK)
    look = bench.begin(READ)
    bench.tell(Missing())
    assert bench.ended[look] == Missing()
    assert len(bench.updates) == 3
    assert not exchanges(bench)
    bench.feed(ReplyReceived(next(one.ask for one in bench.asks if one.operation == under_way), DONE))
    assert exchanges(bench) == [NewSession(7)]
    bench.until(200 * MS)
    assert exchanges(bench) == [NewSession(7)]
    assert len(bench.updates) == 3
    bench.feed(SessionOpened(8))
    assert [(one.client, one.chunk, one.sequence) for one in bench.updates[3:]] == [
        (8, CHUNK, 1),
        (8, ChunkId(2, 1), 1),
    ]
    assert bench.machine.unresolved_channels == 0
    bench.feed(ReplyReceived(bench.asks[0].ask, DONE))  # of the first session: of no interest any more
    for ask in bench.asks[-2:]:
        bench.feed(ReplyReceived(ask.ask, DONE))
    assert bench.ended[waiting] == bench.ended[again] == DONE
    assert exchanges(bench) == [NewSession(7)]


def test_what_waits_for_another_session_says_at_its_deadline_that_it_was_not_done() -> None:
    bench = exchanging()
    bench.until(60 * MS)
    assert exchanges(bench) == [NewSession(7)]
    late = bench.begin(TRUNCATE, within_ns=100 * MS)
    bench.until(SECOND)
    assert bench.failure(late).code == "busy"
    bench.feed(SessionOpened(8))
    bench.feed(SessionOpened(9))  # nobody has asked for it
    bench.begin(TRUNCATE)
    assert bench.updates[-1].client == 8


def test_a_session_that_is_over_is_not_exchanged() -> None:
    bench = exchanging()
    bench.feed(End("over"))
    assert not exchanges(bench)


def test_when_a_session_was_ended_what_was_sent_is_unknown_and_all_else_is_done_in_another_one() -> None:
    bench = Bench(1)
    sent, behind = bench.begin(TRUNCATE), bench.begin(TRUNCATE)
    declined = bench.begin(TRUNCATE, OTHER)
    bench.tell(refused(RefusalReason.ENDED))
    look = bench.begin(READ)
    bench.feed(SessionOver(6))  # of an earlier one
    assert not exchanges(bench)
    bench.feed(SessionOver(7))
    bench.feed(SessionOver(7))
    assert exchanges(bench) == [NewSession(7)]
    assert bench.failure(sent).code == "timeout"
    assert list(bench.ended) == [sent]
    bench.until(500 * MS)
    assert len(bench.updates) == 2
    bench.feed(SessionOpened(8))
    again = {one.operation: one.body for one in bench.asks if isinstance(one.body, Update) and one.body.client == 8}
    assert sorted(again) == [behind, declined]
    for ask in bench.asks[-2:]:
        bench.feed(ReplyReceived(ask.ask, DONE))
    assert bench.ended[behind] == bench.ended[declined] == DONE
    assert look not in bench.ended
    bench.feed(ReplyReceived(bench.asks[0].ask, DONE))  # of the late copy


def test_without_another_session_nothing_is_said_to_be_done() -> None:
    bench = Bench(1)
    declined = bench.begin(TRUNCATE)
    bench.tell(refused(RefusalReason.ENDED))
    bench.feed(SessionOver(7))
    bench.until(2 * SECOND)
    assert bench.failure(declined).code == "aborted"
    assert "no other is open yet" in bench.failure(declined).message


# --- ends ---


def test_when_the_session_ends_all_fails_and_says_what_is_known() -> None:
    bench = Bench(1)
    sent, waits, read = bench.begin(TRUNCATE), bench.begin(TRUNCATE), bench.begin(READ)
    bench.feed(End("the manager has not heard of us"))
    later = bench.begin(READ)
    assert [bench.failure(one).code for one in (sent, waits, read, later)] == [
        "timeout", "aborted", "aborted", "aborted",
    ]  # fmt: skip
    assert Withdraw(bench.asks[1].ask) in bench.effects
