"""A client's requests: whom they ask, when they ask again, and what their end may say."""

from __future__ import annotations

import pytest
from tests.support.fs.chain_sim.request_mutants import BelievesThatStaleIsNotDone, OneChannelForAll
from tests.support.fs.chain_sim.request_rig import CHUNK, DONE, LARGE, OTHER, READ, TRUNCATE, Bench, refused

from fireflyer.base.units import MS, SECOND
from fireflyer.fs.core.requests.effects import (
    AskRouting,
    CancelOperation,
    ConnectionLost,
    DataArrived,
    Limits,
    QuerySpec,
    ReplyReceived,
    RoutingConfirmed,
    SendCorruptionHint,
    SendRequest,
    Withdraw,
)
from fireflyer.fs.core.requests.state_machine import Requests
from fireflyer.fs.schema.chunks import (
    Change,
    Missing,
    NotCommitted,
    Operation,
    Query,
    QueryKind,
    RefusalReason,
)
from fireflyer.fs.schema.ids import ChunkId, ContentId

# --- looks ---


def test_reads_are_spread_over_all_that_serve() -> None:
    bench = Bench(1, 2, 3)
    for _ in range(9):
        bench.begin(READ)
    assert sorted(ask.target for ask in bench.asks) == [1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_whoever_has_least_under_way_is_asked() -> None:
    bench = Bench(1, 2)
    bench.begin(LARGE)
    slow = bench.asks[0].target
    for _ in range(4):
        bench.begin(READ)
    assert {ask.target for ask in bench.asks[1:]} == {3 - slow}


def test_not_committed_sends_to_the_tail_at_once_and_later_again() -> None:
    bench = Bench(1, 2, 3)
    operation = bench.begin(READ)
    first = bench.asks[0].target
    tail = next(one for one in (1, 2, 3) if one != first)
    bench.tell(NotCommitted(tail))
    assert bench.asks[-1].target == tail
    bench.tell(NotCommitted(tail))
    assert len(bench.asks) == 2
    bench.until(20 * MS)
    assert [ask.target for ask in bench.asks[2:]] == [tail]
    bench.tell(Missing())
    assert bench.ended[operation] == Missing()


def test_a_tail_that_routing_does_not_know_is_waited_for() -> None:
    bench = Bench(1)
    bench.until(SECOND)
    bench.begin(READ, within_ns=10 * SECOND)
    bench.effects.clear()
    bench.tell(NotCommitted(2))
    assert bench.effects == [AskRouting()]
    bench.route(1, 2)
    assert len(bench.asks) == 2


def test_a_late_read_is_withdrawn_before_another_replica_is_asked() -> None:
    bench = Bench(1, 2)
    operation = bench.begin(READ)
    bench.effects.clear()
    bench.until(120 * MS)
    kinds = [type(one) for one in bench.effects]
    assert kinds.index(Withdraw) < kinds.index(SendRequest)
    assert AskRouting in kinds
    first, second = bench.asks
    assert first.target != second.target
    assert bench.feed(ReplyReceived(first.ask, Missing())) == []
    bench.tell(DataArrived(5, ContentId(1, 1), 5, 7))
    assert bench.ended[operation] == DataArrived(5, ContentId(1, 1), 5, 7)


def test_damage_is_told_and_read_elsewhere_until_there_is_nobody_left() -> None:
    bench = Bench(1, 2)
    operation = bench.begin(READ)
    bench.tell(refused(RefusalReason.CORRUPT))
    one, two = bench.asks
    assert {one.target, two.target} == {1, 2}
    assert SendCorruptionHint(one.node, one.target, 1, CHUNK) in bench.effects
    while operation not in bench.ended:
        if not any(isinstance(one, SendRequest) for one in bench.tell(refused(RefusalReason.CORRUPT))):
            bench.until(bench.machine.due_ns or bench.now_ns)
    assert bench.failure(operation).code == "data_corruption"
    assert len(bench.asks) == 6


def test_a_node_that_is_lost_is_asked_again_only_where_there_is_no_other() -> None:
    bench = Bench(1, 2)
    bench.begin(READ)
    lost = bench.asks[0].node
    bench.feed(ConnectionLost(lost))
    for _ in range(4):
        bench.begin(READ)
    assert {ask.node for ask in bench.asks[1:]} == {3 - lost}
    bench.tell(Missing())
    bench.route(lost)
    bench.begin(READ)
    assert bench.asks[-1].node == lost


def test_a_stale_version_asks_for_routing_and_what_rests_goes_on_when_it_comes() -> None:
    bench = Bench(1)
    bench.until(SECOND)
    operation = bench.begin(READ, within_ns=10 * SECOND)
    bench.effects.clear()
    bench.tell(refused(RefusalReason.STALE, 2))
    assert bench.effects == [AskRouting()]
    bench.route(2)
    assert bench.asks[-1].target == 2
    assert isinstance(bench.asks[-1].body, Query)
    assert bench.asks[-1].body.chain_version == 2
    bench.tell(Missing())
    assert bench.ended[operation] == Missing()


def test_routing_is_not_asked_for_more_often_than_allowed() -> None:
    bench = Bench(limits=Limits(routing_ns=50 * MS, max_pause_ns=2 * MS))
    for _ in range(10):
        bench.begin(READ, within_ns=400 * MS)
    bench.until(400 * MS)
    assert 6 <= bench.effects.count(AskRouting()) <= 9
    assert {bench.failure(one).code for one in range(1, 11)} == {"timeout"}


def test_a_chain_that_routing_does_not_know_is_not_found() -> None:
    bench = Bench(1)
    operation = bench.begin(READ, chain=9, within_ns=30 * MS)
    bench.until(40 * MS)
    assert bench.failure(operation).code == "not_found"


# --- updates ---


def test_a_chain_that_the_primary_does_not_know_either_is_not_waited_for() -> None:
    bench = Bench(1)
    bench.now_ns = 10 * MS
    first, second = bench.begin(TRUNCATE, chain=5), bench.begin(TRUNCATE, chain=5)
    look, other = bench.begin(READ, chain=5), bench.begin(TRUNCATE, chain=1)
    bench.feed(RoutingConfirmed(9 * MS))
    assert not bench.ended, "it was asked before they began: the chain may have been made since"
    bench.feed(RoutingConfirmed(10 * MS))
    assert sorted(bench.ended) == [first, second, look]
    assert [bench.failure(one).code for one in sorted(bench.ended)] == ["not_found"] * 3
    bench.now_ns = 20 * MS
    late = bench.begin(TRUNCATE, chain=6)
    bench.route(1, chains=(1, 6))
    bench.feed(RoutingConfirmed(20 * MS))
    assert late not in bench.ended
    assert {ask.operation for ask in bench.asks} == {other, late}


def test_an_update_goes_to_the_head_and_its_retry_has_the_same_number() -> None:
    bench = Bench(1, 2)
    operation = bench.begin(TRUNCATE)
    bench.until(120 * MS)
    assert [(one.channel, one.sequence) for one in bench.updates] == [(0, 1), (0, 1)]
    assert {ask.target for ask in bench.asks} == {1}
    bench.tell(DONE, ask=0)
    assert bench.ended[operation] == DONE
    bench.begin(TRUNCATE)
    assert (bench.updates[-1].channel, bench.updates[-1].sequence) == (0, 2)


def test_updates_of_one_chunk_go_one_after_the_other_and_those_of_others_beside_them() -> None:
    bench = Bench(1)
    for chunk in (CHUNK, CHUNK, OTHER):
        bench.begin(TRUNCATE, chunk)
    assert [(one.chunk, one.channel) for one in bench.updates] == [(CHUNK, 0), (OTHER, 1)]
    bench.tell(DONE, ask=0)
    assert [(one.chunk, one.sequence) for one in bench.updates[2:]] == [(CHUNK, 2)]


def test_without_a_free_channel_an_update_waits_and_says_at_its_deadline_that_it_was_not_done() -> None:
    bench = Bench(1)
    begun = [bench.begin(TRUNCATE, ChunkId(2, at), within_ns=50 * MS) for at in range(3)]
    assert len(bench.updates) == 2
    bench.until(60 * MS)
    assert [bench.failure(one).code for one in begun] == ["timeout", "timeout", "busy"]


def test_who_does_little_at_a_time_uses_few_channels_and_those_that_have_rows() -> None:
    """After a burst for which the replicas have no room: those that there are are used again."""
    bench = Bench(1, limits=Limits(attempt_ns=100 * MS, channels=64))
    for at in range(8):
        bench.begin(TRUNCATE, ChunkId(2, at), within_ns=10 * MS)
    for at in (7, 1, 4):
        bench.tell(DONE, ask=at)
    for at in (0, 2, 3, 5, 6):
        bench.tell(refused(RefusalReason.BUSY), ask=at)
    told = 8
    while len(bench.ended) < 8:
        bench.until(bench.machine.due_ns or bench.now_ns)
        while told < len(bench.asks):
            bench.tell(refused(RefusalReason.BUSY), ask=told)
            told += 1
    assert bench.machine.unresolved_channels == 0
    before = len(bench.updates)
    for at in range(20):
        bench.begin(TRUNCATE, ChunkId(3, at))
        if at % 2:
            bench.tell(DONE, ask=-2)
            bench.tell(DONE)
    assert {one.channel for one in bench.updates[before:]} == {1, 4}
    for at in range(3):
        bench.begin(TRUNCATE, ChunkId(4, at))
    assert {one.channel for one in bench.updates[-3:-1]} == {1, 4}
    assert bench.updates[-1].channel == 7


def test_who_was_refused_each_time_was_not_done() -> None:
    bench = Bench(1)
    operation = bench.begin(TRUNCATE, within_ns=20 * MS)
    while operation not in bench.ended:
        bench.tell(refused(RefusalReason.BUSY))
        bench.until(bench.machine.due_ns or bench.now_ns)
    assert bench.failure(operation).code == "busy"
    assert len(bench.asks) > 2
    assert bench.machine.unresolved_channels == 0


@pytest.mark.parametrize("refusal", [RefusalReason.NO_SPACE, RefusalReason.USAGE, RefusalReason.DENIED])
def test_some_refusals_are_final(refusal: RefusalReason) -> None:
    bench = Bench(1)
    operation = bench.begin(TRUNCATE)
    bench.tell(refused(refusal))
    assert bench.failure(operation).code == refusal.value


def test_after_an_attempt_without_an_answer_no_refusal_says_that_nothing_was_done() -> None:
    bench = Bench(1)
    operation = bench.begin(TRUNCATE)
    bench.until(120 * MS)
    bench.tell(refused(RefusalReason.NO_SPACE))
    failed = bench.failure(operation)
    assert failed.code == "timeout"
    assert "may or may not" in failed.message
    assert bench.machine.unresolved_channels == 1
    bench.feed(ReplyReceived(bench.asks[0].ask, refused(RefusalReason.BUSY)))
    assert bench.machine.unresolved_channels == 0


@pytest.mark.parametrize(
    ("kind", "code"),
    [(Requests, "timeout"), pytest.param(BelievesThatStaleIsNotDone, "stale_version", id="mutant")],
)
def test_a_stale_version_does_not_say_that_nothing_was_done(kind: type[Requests], code: str) -> None:
    """The head that lost its role may have passed it on: whoever follows it drives it to its end."""
    bench = Bench(1, kind=kind)
    operation = bench.begin(TRUNCATE, within_ns=1 * MS)
    bench.tell(refused(RefusalReason.STALE))
    bench.until(2 * MS)
    assert bench.failure(operation).code == code


@pytest.mark.parametrize(("sent", "code"), [(True, "timeout"), (False, "unreachable")])
def test_a_lost_connection_leaves_doubts_unless_there_never_was_one(sent: bool, code: str) -> None:
    bench = Bench(1)
    operation = bench.begin(TRUNCATE, within_ns=1 * MS)
    bench.feed(ConnectionLost(1, sent))
    bench.until(2 * MS)
    assert bench.failure(operation).code == code


def test_a_channel_of_unknown_outcome_stays_with_its_chunk_until_a_later_update_is_done() -> None:
    bench = Bench(1)
    bench.begin(TRUNCATE, CHUNK, within_ns=50 * MS)
    bench.until(60 * MS)
    for _ in range(2):
        bench.begin(TRUNCATE, OTHER)
        bench.tell(DONE)
    assert {one.channel for one in bench.updates if one.chunk == OTHER} == {1}
    bench.begin(TRUNCATE, CHUNK)
    assert (bench.updates[-1].channel, bench.updates[-1].sequence) == (0, 2)
    bench.tell(DONE)
    assert bench.machine.unresolved_channels == 0


def test_a_late_answer_resolves_a_channel() -> None:
    bench = Bench(1)
    bench.begin(TRUNCATE, CHUNK, within_ns=50 * MS)
    bench.until(60 * MS)
    assert bench.machine.unresolved_channels == 1
    bench.tell(DONE)
    assert bench.machine.unresolved_channels == 0
    bench.begin(TRUNCATE, OTHER)
    bench.begin(TRUNCATE, ChunkId(3, 0))
    assert len(bench.updates) == 3


def test_two_unknown_outcomes_of_a_chunk_are_not_resolved_by_a_refusal_of_the_last() -> None:
    bench = Bench(1)
    for _ in range(2):
        bench.begin(TRUNCATE, within_ns=50 * MS)
        bench.until(bench.now_ns + 60 * MS)
    bench.tell(refused(RefusalReason.BUSY))
    assert bench.machine.unresolved_channels == 1
    bench.begin(TRUNCATE)
    bench.tell(DONE)
    assert bench.machine.unresolved_channels == 0


@pytest.mark.parametrize(("kind", "channels"), [(Requests, 2), pytest.param(OneChannelForAll, 1, id="mutant")])
def test_of_a_channel_one_update_is_under_way(kind: type[Requests], channels: int) -> None:
    bench = Bench(1, kind=kind)
    bench.begin(TRUNCATE, CHUNK)
    bench.begin(TRUNCATE, OTHER)
    assert len({one.channel for one in bench.updates}) == channels


def test_a_new_head_is_asked_at_once_and_the_old_attempt_may_still_answer() -> None:
    bench = Bench(1, 2)
    operation = bench.begin(TRUNCATE)
    bench.route(2)
    assert [(ask.target, ask.body.chain_version) for ask in bench.asks] == [(1, 1), (2, 2)]
    bench.tell(DONE, ask=0)
    assert bench.ended[operation] == DONE


def test_what_nobody_waits_for_ends_without_a_word() -> None:
    bench = Bench(1)
    read, write = bench.begin(READ), bench.begin(TRUNCATE)
    bench.effects.clear()
    bench.feed(CancelOperation(read))
    bench.feed(CancelOperation(write))
    assert bench.effects == [Withdraw(bench.asks[0].ask)]
    assert bench.machine.open == 0
    assert bench.machine.unresolved_channels == 1


@pytest.mark.parametrize(
    ("what", "chunk"),
    [
        (QuerySpec(QueryKind.READ, 1 << 26, 1), CHUNK),
        (QuerySpec(QueryKind.READ, -1, 1), CHUNK),
        (Change(Operation.TRUNCATE, 0, -5), CHUNK),
        (READ, ChunkId(1 << 63, 0)),
        (TRUNCATE, ChunkId(1, 1 << 32)),
        (TRUNCATE, ChunkId(1, -1)),
    ],
)
def test_what_cannot_be_is_refused_here(what: Change | QuerySpec, chunk: ChunkId) -> None:
    """A node ends the connection of who sends what cannot be decoded."""
    bench = Bench(1)
    operation = bench.begin(what, chunk)
    assert bench.failure(operation).code == "usage"
    assert bench.asks == []
