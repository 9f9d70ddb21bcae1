"""Updates that are for one session alone: nothing of them is sent by the next one, also of what waited."""

from __future__ import annotations

import pytest
from tests.support.fs.chain_sim.request_rig import CHUNK, DONE, OTHER, TRUNCATE, Bench, exchanges, exchanging, refused

from fireflyer.base.units import MS, SECOND
from fireflyer.fs.core.requests.effects import Begin, ReplyReceived, SessionOpened, SessionOver
from fireflyer.fs.schema.chunks import RefusalReason
from fireflyer.fs.schema.ids import ChunkId


def begin(bench: Bench, session: int, chunk: ChunkId = CHUNK) -> int:
    bench.operations += 1
    bench.feed(Begin(bench.operations, bench.now_ns + 20 * SECOND, 1, chunk, TRUNCATE, session))
    return bench.operations


def another_session(bench: Bench) -> None:
    bench.feed(SessionOver(7))
    bench.until(bench.now_ns + SECOND)
    bench.feed(SessionOpened(8))
    bench.until(bench.now_ns + 2 * SECOND)


def test_under_its_session_it_is_an_update_like_others() -> None:
    bench = Bench(1)
    bound = begin(bench, 7)
    bench.tell(DONE)
    assert bench.ended[bound] == DONE


@pytest.mark.parametrize("session", [6, 8])
def test_under_another_one_it_is_refused_and_not_sent(session: int) -> None:
    bench = Bench(1)
    bound = begin(bench, session)
    assert bench.failure(bound).code == "stale_version"
    assert not bench.updates


def test_what_waits_for_a_replica_is_not_sent_by_the_next_session() -> None:
    bench = Bench()
    bench.route()  # nobody serves
    bound, free = begin(bench, 7), bench.begin(TRUNCATE, OTHER, within_ns=20 * SECOND)
    another_session(bench)
    bench.route(1)
    assert bench.failure(bound).code == "stale_version"
    assert [(one.client, one.chunk) for one in bench.updates] == [(8, OTHER)]
    assert free not in bench.ended


def test_what_was_refused_because_the_session_is_over_is_not_sent_by_the_next_one() -> None:
    bench = Bench(1)
    bound = begin(bench, 7)
    bench.tell(refused(RefusalReason.ENDED))
    another_session(bench)
    assert bench.failure(bound).code == "stale_version"
    assert {one.client for one in bench.updates} == {7}


def test_what_waits_for_its_turn_is_not_sent_by_the_next_session() -> None:
    bench = Bench(1)
    first, bound = bench.begin(TRUNCATE, within_ns=20 * SECOND), begin(bench, 7)
    bench.tell(refused(RefusalReason.BUSY))
    another_session(bench)
    bench.tell(DONE)
    assert bench.ended[first] == DONE
    assert bench.failure(bound).code == "stale_version"
    assert {(one.client, one.sequence) for one in bench.updates} == {(7, 1), (8, 1)}


def test_of_what_was_sent_nobody_knows() -> None:
    bench = Bench(1)
    bound = begin(bench, 7)
    another_session(bench)
    assert bench.failure(bound).code == "timeout"
    assert len(bench.updates) == 1


def test_while_the_session_is_exchanged_none_begins() -> None:
    bench = exchanging()
    under_way = bench.begin(TRUNCATE, ChunkId(2, 0))
    bench.until(60 * MS)
    waits = begin(bench, 7, ChunkId(2, 1))
    assert waits not in bench.ended
    bench.feed(ReplyReceived(next(one.ask for one in bench.asks if one.operation == under_way), DONE))
    assert exchanges(bench)
    late = begin(bench, 7)
    assert bench.failure(waits).code == bench.failure(late).code == "stale_version"
    bench.feed(SessionOpened(8))
    assert not [one for one in bench.updates if one.client == 8]
    bench.begin(TRUNCATE)
    assert bench.updates[-1].client == 8
