"""A client's requests are bounded: in all, and at each node, which also asks before it is sent large replies."""

from __future__ import annotations

from tests.support.fs.chain_sim.request_rig import ARRIVED, LARGE, READ, Bench

from fireflyer.base.units import MS, SECOND
from fireflyer.fs.core.requests.effects import (
    DataArrived,
    Limits,
    QuerySpec,
    ReplyReceived,
    RoutingLearned,
)
from fireflyer.fs.schema.chunks import (
    Found,
    Missing,
    QueryKind,
)
from fireflyer.fs.schema.ids import ChunkId, ContentId
from fireflyer.fs.schema.routing import Chain, Member, Routing, TargetState


def test_no_more_is_begun_than_the_bound() -> None:
    bench = Bench(1, limits=Limits(requests=2))
    begun = [bench.begin(READ) for _ in range(3)]
    assert bench.failure(begun[2]).code == "busy"


def test_a_node_has_more_time_for_much_data() -> None:
    bench = Bench(1, 2, limits=Limits(attempt_ns=100 * MS, least_bytes_per_s=1 << 20))
    bench.begin(QuerySpec(QueryKind.READ, 0, 1 << 18))
    bench.until(340 * MS)
    assert len(bench.asks) == 1
    bench.until(360 * MS)
    assert len(bench.asks) == 2


# --- bounds of a node, and request-to-send ---


def test_a_node_has_no_more_under_way_than_its_bounds() -> None:
    bench = Bench(1, limits=Limits(node_asks=2, node_bytes=1 << 20))
    for _ in range(3):
        bench.begin(READ)
    assert len(bench.asks) == 2
    bench.tell(Missing(), ask=0)
    bench.begin(LARGE)
    assert len(bench.asks) == 3
    bench.tell(Missing(), ask=1)
    assert len(bench.asks) == 3
    bench.tell(Missing(), ask=2)
    assert len(bench.asks) == 4


def test_at_most_so_many_nodes_send_large_replies_at_once_and_each_has_its_turn() -> None:
    limits = Limits(senders=2, grant_bytes=2 << 20, requests=1000)
    bench = Bench(limits=limits)
    members = [(Member(one, one, TargetState.SERVING),) for one in range(1, 6)]
    chains = tuple(Chain(at, 1, member) for at, member in enumerate(members, 1))
    bench.feed(RoutingLearned(Routing(1, chains=chains)))
    for at in range(50):
        bench.begin(LARGE, ChunkId(1, at), chain=at % 5 + 1, within_ns=100 * SECOND)
    small = bench.begin(READ, chain=5)
    assert bench.asks[-1].operation == small
    order: list[int] = []
    answered = 0
    while answered < len(bench.asks):
        assert bench.machine.senders <= 2
        order.append(bench.asks[answered].node)
        bench.feed(ReplyReceived(bench.asks[answered].ask, DataArrived(1 << 20, ContentId(1, 1), 1 << 20, 0)))
        answered += 1
    assert len(order) == 51
    assert {order[:20].count(node) for node in range(1, 6)} <= {3, 4, 5}
    assert bench.machine.open == 0


def test_a_node_that_hangs_loses_the_permission_when_others_wait() -> None:
    limits = Limits(senders=1, grant_bytes=2 << 20, attempt_ns=5 * SECOND)
    bench = Bench(limits=limits)
    members = (Member(1, 1, TargetState.SERVING), Member(2, 2, TargetState.SERVING))
    chains = (Chain(1, 1, members[:1]), Chain(2, 1, members), Chain(3, 1, members[1:]))
    bench.feed(RoutingLearned(Routing(1, chains=chains)))
    for at in range(4):
        bench.begin(LARGE, ChunkId(1, at), within_ns=100 * SECOND)
    bench.until(2 * SECOND)
    assert [one.node for one in bench.asks] == [1, 1, 1, 1]  # nobody else waits: it may take its time
    other = bench.begin(LARGE, ChunkId(3, 0), chain=3, within_ns=100 * SECOND)
    bench.until(2 * SECOND + MS)
    assert (bench.asks[-1].node, bench.asks[-1].operation) == (2, other)
    assert bench.machine.senders == 1
    small = bench.begin(READ, chain=1)
    assert (bench.asks[-1].node, bench.asks[-1].operation) == (1, small)
    more = bench.begin(LARGE, ChunkId(1, 9), within_ns=100 * SECOND)
    bench.tell(ARRIVED, ask=4)
    for ask in range(3):
        bench.tell(ARRIVED, ask=ask)
    assert len(bench.asks) == 6
    bench.tell(ARRIVED, ask=3)
    assert (bench.asks[-1].node, bench.asks[-1].operation) == (1, more)


def test_what_is_queued_at_a_node_that_hangs_goes_to_another_replica() -> None:
    limits = Limits(senders=1, grant_bytes=1 << 20, attempt_ns=5 * SECOND)
    bench = Bench(limits=limits)
    members = (Member(1, 1, TargetState.SERVING), Member(2, 2, TargetState.SERVING))
    bench.feed(RoutingLearned(Routing(1, chains=(Chain(1, 1, members),))))
    for at in range(6):
        bench.begin(LARGE, ChunkId(1, at), within_ns=100 * SECOND)
    (first,) = bench.asks
    bench.until(SECOND)
    assert bench.asks[1].node != first.node
    while len(bench.asks) < 6:
        bench.tell(ARRIVED)
    assert {one.node for one in bench.asks[1:]} == {bench.asks[1].node}
    bench.tell(ARRIVED)
    assert bench.machine.open == 1


def test_listing_is_passed_on_as_it_is() -> None:
    bench = Bench(1)
    operation = bench.begin(QuerySpec(QueryKind.LIST, 0, 10))
    bench.tell(Found(()))
    assert bench.ended[operation] == Found(())
