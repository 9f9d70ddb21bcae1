"""A client's requests: whom they ask, when they ask again, and what their end may say."""

from __future__ import annotations

import pytest
from tests.support.request_bugs import BelievesThatStaleIsNotDone, OneChannelForAll

from fireflyer.base.units import MS, SECOND
from fireflyer.fs.core.request_effects import (
    Arrived,
    Ask,
    AskRouting,
    Begin,
    Doubt,
    Effect,
    End,
    Event,
    Failed,
    Finish,
    GiveUp,
    Glance,
    Limits,
    Lost,
    NewSession,
    RoutingConfirmed,
    RoutingLearned,
    SessionOpened,
    SessionOver,
    Tick,
    Told,
    Withdraw,
)
from fireflyer.fs.core.requests import Requests
from fireflyer.fs.schema.chunks import (
    Change,
    Done,
    Found,
    Look,
    LookKind,
    LookReply,
    Missing,
    NotCommitted,
    Operation,
    Refusal,
    Refused,
    Update,
    UpdateReply,
)
from fireflyer.fs.schema.ids import ChunkId, ContentId
from fireflyer.fs.schema.routing import Chain, Member, Routing, TargetState

CHUNK, OTHER = ChunkId(1, 0), ChunkId(1, 1)
DONE = Done(ContentId(1, 1), None)
ARRIVED = Arrived(1 << 20, ContentId(1, 1), 1 << 20)
READ = Glance(LookKind.READ, 0, 4096)
LARGE = Glance(LookKind.READ, 0, 1 << 20)
TRUNCATE = Change(Operation.TRUNCATE, 0, 5)
LIMITS = Limits(attempt_ns=100 * MS, channels=2)


class Bench:
    """A machine whose clock and answers are the test's. Target t is on node t."""

    def __init__(self, *serving: int, limits: Limits = LIMITS, kind: type[Requests] = Requests) -> None:
        self.machine = kind(7, limits, seed=1)
        self.now_ns, self.version, self.operations = 0, 0, 0
        self.asks: list[Ask] = []
        self.ended: dict[int, object] = {}
        self.effects: list[Effect] = []
        if serving:
            self.route(*serving)

    def feed(self, event: Event) -> list[Effect]:
        effects = self.machine.handle(self.now_ns, event)
        self.effects += effects
        self.asks += [one for one in effects if isinstance(one, Ask)]
        self.ended.update({one.operation: one.result for one in effects if isinstance(one, Finish)})
        return effects

    def route(self, *serving: int, chains: tuple[int, ...] = (1,)) -> None:
        self.version += 1
        members = tuple(Member(one, one, TargetState.SERVING) for one in serving) or (
            Member(1, 1, TargetState.OFFLINE),
        )
        routed = tuple(Chain(one, self.version, members) for one in chains)
        self.feed(RoutingLearned(Routing(self.version, chains=routed)))

    def begin(self, what: Change | Glance, chunk: ChunkId = CHUNK, *, chain: int = 1, within_ns: int = SECOND) -> int:
        self.operations += 1
        self.feed(Begin(self.operations, self.now_ns + within_ns, chain, chunk, what))
        return self.operations

    def tell(self, reply: UpdateReply | LookReply | Arrived, ask: int = -1) -> list[Effect]:
        return self.feed(Told(self.asks[ask].ask, reply))

    def until(self, now_ns: int) -> None:
        """Wakes the machine whenever it wants to be."""
        while (due_ns := self.machine.due_ns) is not None and due_ns <= now_ns:
            self.now_ns = max(self.now_ns, due_ns)
            self.feed(Tick())
        self.now_ns = now_ns

    def failure(self, operation: int) -> Failed:
        failed = self.ended[operation]
        assert isinstance(failed, Failed)
        return failed

    @property
    def updates(self) -> list[Update]:
        return [one.body for one in self.asks if isinstance(one.body, Update)]


def refused(refusal: Refusal, version: int = 1) -> Refused:
    return Refused(refusal, refusal.value, version)


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
    assert kinds.index(Withdraw) < kinds.index(Ask)
    assert AskRouting in kinds
    first, second = bench.asks
    assert first.target != second.target
    assert bench.feed(Told(first.ask, Missing())) == []
    bench.tell(Arrived(5, ContentId(1, 1), 5))
    assert bench.ended[operation] == Arrived(5, ContentId(1, 1), 5)


def test_damage_is_told_and_read_elsewhere_until_there_is_nobody_left() -> None:
    bench = Bench(1, 2)
    operation = bench.begin(READ)
    bench.tell(refused(Refusal.CORRUPT))
    one, two = bench.asks
    assert {one.target, two.target} == {1, 2}
    assert Doubt(one.node, one.target, 1, CHUNK) in bench.effects
    while operation not in bench.ended:
        if not any(isinstance(one, Ask) for one in bench.tell(refused(Refusal.CORRUPT))):
            bench.until(bench.machine.due_ns or bench.now_ns)
    assert bench.failure(operation).code == "data_corruption"
    assert len(bench.asks) == 6


def test_a_node_that_is_lost_is_asked_again_only_where_there_is_no_other() -> None:
    bench = Bench(1, 2)
    bench.begin(READ)
    lost = bench.asks[0].node
    bench.feed(Lost(lost))
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
    bench.tell(refused(Refusal.STALE, 2))
    assert bench.effects == [AskRouting()]
    bench.route(2)
    assert bench.asks[-1].target == 2
    assert isinstance(bench.asks[-1].body, Look)
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
        bench.tell(refused(Refusal.BUSY), ask=at)
    told = 8
    while len(bench.ended) < 8:
        bench.until(bench.machine.due_ns or bench.now_ns)
        while told < len(bench.asks):
            bench.tell(refused(Refusal.BUSY), ask=told)
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
        bench.tell(refused(Refusal.BUSY))
        bench.until(bench.machine.due_ns or bench.now_ns)
    assert bench.failure(operation).code == "busy"
    assert len(bench.asks) > 2
    assert bench.machine.unresolved_channels == 0


@pytest.mark.parametrize("refusal", [Refusal.NO_SPACE, Refusal.USAGE, Refusal.DENIED])
def test_some_refusals_are_final(refusal: Refusal) -> None:
    bench = Bench(1)
    operation = bench.begin(TRUNCATE)
    bench.tell(refused(refusal))
    assert bench.failure(operation).code == refusal.value


def test_after_an_attempt_without_an_answer_no_refusal_says_that_nothing_was_done() -> None:
    bench = Bench(1)
    operation = bench.begin(TRUNCATE)
    bench.until(120 * MS)
    bench.tell(refused(Refusal.NO_SPACE))
    failed = bench.failure(operation)
    assert failed.code == "timeout"
    assert "may or may not" in failed.message
    assert bench.machine.unresolved_channels == 1
    bench.feed(Told(bench.asks[0].ask, refused(Refusal.BUSY)))
    assert bench.machine.unresolved_channels == 0


@pytest.mark.parametrize(
    ("kind", "code"),
    [(Requests, "timeout"), pytest.param(BelievesThatStaleIsNotDone, "stale_version", id="planted")],
)
def test_a_stale_version_does_not_say_that_nothing_was_done(kind: type[Requests], code: str) -> None:
    """The head that lost its role may have passed it on: whoever follows it drives it to its end."""
    bench = Bench(1, kind=kind)
    operation = bench.begin(TRUNCATE, within_ns=1 * MS)
    bench.tell(refused(Refusal.STALE))
    bench.until(2 * MS)
    assert bench.failure(operation).code == code


@pytest.mark.parametrize(("sent", "code"), [(True, "timeout"), (False, "unreachable")])
def test_a_lost_connection_leaves_doubts_unless_there_never_was_one(sent: bool, code: str) -> None:
    bench = Bench(1)
    operation = bench.begin(TRUNCATE, within_ns=1 * MS)
    bench.feed(Lost(1, sent))
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
    bench.tell(refused(Refusal.BUSY))
    assert bench.machine.unresolved_channels == 1
    bench.begin(TRUNCATE)
    bench.tell(DONE)
    assert bench.machine.unresolved_channels == 0


@pytest.mark.parametrize(("kind", "channels"), [(Requests, 2), pytest.param(OneChannelForAll, 1, id="planted")])
def test_of_a_channel_one_update_is_under_way(kind: type[Requests], channels: int) -> None:
    bench = Bench(1, kind=kind)
    bench.begin(TRUNCATE, CHUNK)
    bench.begin(TRUNCATE, OTHER)
    assert len({one.channel for one in bench.updates}) == channels


def exchanging() -> Bench:
    """A session with two updates of unknown outcome, of which no more may be begun."""
    bench = Bench(1, limits=Limits(attempt_ns=100 * MS, channels=8, unknown=2))
    for chunk in (CHUNK, OTHER):
        bench.begin(TRUNCATE, chunk, within_ns=50 * MS)
    return bench


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
    bench.feed(Told(next(one.ask for one in bench.asks if one.operation == under_way), DONE))
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
    bench.feed(Told(bench.asks[0].ask, DONE))  # of the first session: of no interest any more
    for ask in bench.asks[-2:]:
        bench.feed(Told(ask.ask, DONE))
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
    bench.tell(refused(Refusal.ENDED))
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
        bench.feed(Told(ask.ask, DONE))
    assert bench.ended[behind] == bench.ended[declined] == DONE
    assert look not in bench.ended
    bench.feed(Told(bench.asks[0].ask, DONE))  # the straggler's


def test_without_another_session_nothing_is_said_to_be_done() -> None:
    bench = Bench(1)
    declined = bench.begin(TRUNCATE)
    bench.tell(refused(Refusal.ENDED))
    bench.feed(SessionOver(7))
    bench.until(2 * SECOND)
    assert bench.failure(declined).code == "aborted"
    assert "there is no other yet" in bench.failure(declined).message


def exchanges(bench: Bench) -> list[NewSession]:
    return [one for one in bench.effects if isinstance(one, NewSession)]


def test_a_new_head_is_asked_at_once_and_the_old_attempt_may_still_answer() -> None:
    bench = Bench(1, 2)
    operation = bench.begin(TRUNCATE)
    bench.route(2)
    assert [(ask.target, ask.body.chain_version) for ask in bench.asks] == [(1, 1), (2, 2)]
    bench.tell(DONE, ask=0)
    assert bench.ended[operation] == DONE


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


def test_what_nobody_waits_for_ends_without_a_word() -> None:
    bench = Bench(1)
    read, write = bench.begin(READ), bench.begin(TRUNCATE)
    bench.effects.clear()
    bench.feed(GiveUp(read))
    bench.feed(GiveUp(write))
    assert bench.effects == [Withdraw(bench.asks[0].ask)]
    assert bench.machine.open == 0
    assert bench.machine.unresolved_channels == 1


def test_no_more_is_begun_than_the_bound() -> None:
    bench = Bench(1, limits=Limits(requests=2))
    begun = [bench.begin(READ) for _ in range(3)]
    assert bench.failure(begun[2]).code == "busy"


@pytest.mark.parametrize(
    ("what", "chunk"),
    [
        (Glance(LookKind.READ, 1 << 26, 1), CHUNK),
        (Glance(LookKind.READ, -1, 1), CHUNK),
        (Change(Operation.TRUNCATE, 0, -5), CHUNK),
        (READ, ChunkId(1 << 63, 0)),
        (TRUNCATE, ChunkId(1, 1 << 32)),
        (TRUNCATE, ChunkId(1, -1)),
    ],
)
def test_what_cannot_be_is_refused_here(what: Change | Glance, chunk: ChunkId) -> None:
    """A node ends the connection of who sends what cannot be decoded."""
    bench = Bench(1)
    operation = bench.begin(what, chunk)
    assert bench.failure(operation).code == "usage"
    assert bench.asks == []


def test_a_node_has_more_time_for_much_data() -> None:
    bench = Bench(1, 2, limits=Limits(attempt_ns=100 * MS, least_bytes_per_s=1 << 20))
    bench.begin(Glance(LookKind.READ, 0, 1 << 18))
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
        bench.feed(Told(bench.asks[answered].ask, Arrived(1 << 20, ContentId(1, 1), 1 << 20)))
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
    operation = bench.begin(Glance(LookKind.LIST, 0, 10))
    bench.tell(Found(()))
    assert bench.ended[operation] == Found(())
