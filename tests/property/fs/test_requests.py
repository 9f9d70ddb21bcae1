"""Whatever happens in whatever order, a client's requests keep their promises and their bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fireflyer.base.units import MS
from fireflyer.fs.core.requests.effects import (
    Begin,
    CancelOperation,
    ConnectionLost,
    Effect,
    End,
    Event,
    Finish,
    Limits,
    NewSession,
    QuerySpec,
    ReplyReceived,
    RoutingConfirmed,
    RoutingLearned,
    SendRequest,
    SessionOpened,
    SessionOver,
    Tick,
    Withdraw,
)
from fireflyer.fs.core.requests.state_machine import Requests
from fireflyer.fs.schema.chunks import (
    Change,
    Done,
    Missing,
    NotCommitted,
    Operation,
    QueryKind,
    RefusalReason,
    Refused,
    Update,
)
from fireflyer.fs.schema.ids import ChunkId, ContentId
from fireflyer.fs.schema.routing import Chain, Member, Routing, TargetState

LIMITS = Limits(
    requests=20,
    channels=2,
    unknown=2,
    node_asks=3,
    node_bytes=2 << 20,
    senders=1,
    grant_bytes=2 << 20,
    attempt_ns=50 * MS,
)
WHATS: list[Change | QuerySpec] = [
    QuerySpec(QueryKind.READ, 0, 4096),
    QuerySpec(QueryKind.READ, 0, 1 << 20),
    QuerySpec(QueryKind.LIST),
    Change(Operation.TRUNCATE, 0, 1),
    Change(Operation.WRITE, 0, 1 << 20),
]
COMMON = ["begin"] * 4 + ["tell"] * 6 + ["wait"] * 2
ACTIONS = st.lists(
    st.tuples(st.sampled_from([*COMMON, "give up", "lose", "route", "confirm", "exchange"]),
              st.integers(0, 1 << 16)),
    max_size=60,
)  # fmt: skip


class Watched:
    """Performs nothing, but knows what is open, and what must hold."""

    def __init__(self) -> None:
        self.machine = Requests(1, LIMITS, seed=3)
        self.now_ns = self.begun = self.version = 0
        self.waiting: dict[int, None] = {}
        self.asks: dict[int, SendRequest] = {}
        self.numbers: dict[tuple[int, int, int], int] = {}
        self.client, self.exchanging = 1, False

    def feed(self, event: Event) -> None:
        for effect in self.machine.handle(self.now_ns, event):
            self._see(effect)
        assert self.machine.open == len(self.waiting)
        assert self.machine.senders <= 1
        assert self.machine.due_ns is None or self.machine.due_ns > self.now_ns or not isinstance(event, Tick)

    def _see(self, effect: Effect) -> None:
        match effect:
            case SendRequest(ask, operation, _, _, body):
                assert operation in self.waiting
                self.asks[ask] = effect
                if isinstance(body, Update):
                    # A number of a channel is one operation's for ever.
                    assert body.client == self.client
                    assert not self.exchanging
                    channel = body.client, body.channel
                    assert self.numbers.setdefault((*channel, body.sequence), operation) == operation
                    assert all(one[-1] <= body.sequence for one in self.numbers if one[:2] == channel)
            case Withdraw(ask):
                del self.asks[ask]
            case Finish(operation):
                del self.waiting[operation]
            case NewSession(client):
                assert client == self.client
                assert not self.exchanging
                under_way = [one for one in self.asks.values() if isinstance(one.body, Update)]
                assert not [one for one in under_way if one.operation in self.waiting]
                self.exchanging = True

    def do(self, action: str, number: int) -> None:
        if action == "begin":
            self.begun += 1
            self.waiting[self.begun] = None
            deadline_ns = self.now_ns + [20, 200][number % 2] * MS
            chunk, what = ChunkId(1, number % 3), WHATS[number // 8 % len(WHATS)]
            self.feed(Begin(self.begun, deadline_ns, [1, 2, 1, 2, 1, 2, 3][number // 4 % 7], chunk, what))
        elif action == "tell" and self.asks:
            ask = list(self.asks.values())[number % len(self.asks)]
            del self.asks[ask.ask]
            self.feed(ReplyReceived(ask.ask, _reply(isinstance(ask.body, Update), number // 64)))
        elif action == "give up" and self.waiting:
            operation = list(self.waiting)[number % len(self.waiting)]
            del self.waiting[operation]
            self.feed(CancelOperation(operation))
        elif action == "lose":
            node = number % 3 + 1
            self.asks = {one: ask for one, ask in self.asks.items() if ask.node != node}
            self.feed(ConnectionLost(node, sent=number % 2 == 0))
        elif action == "route":
            self.version += 1
            self.feed(RoutingLearned(_routing(self.version, number)))
        elif action == "exchange" and not self.exchanging and number % 2:
            self.asks = {one: ask for one, ask in self.asks.items() if not isinstance(ask.body, Update)}
            self.feed(SessionOver(self.client))
        elif action == "exchange" and self.exchanging:
            self.client, self.exchanging = self.client + 1, False
            self.feed(SessionOpened(self.client))
        elif action == "confirm":
            self.feed(RoutingConfirmed(self.now_ns - number % 3 * MS))
        elif action == "wait":
            self.now_ns = max(self.now_ns + number % 30 * MS, self.machine.due_ns or 0)
            self.feed(Tick())


def _reply(update: bool, number: int) -> Done | Missing | NotCommitted | Refused:
    refusal = list(RefusalReason)[number // 4 % len(RefusalReason)]
    if number % 4 == 3:
        return Refused(refusal, "no", 1)
    if number % 4 == 2 and not update:
        return NotCommitted(number % 3 + 1)
    return Done(ContentId(1, 1), None) if update else Missing()


def _routing(version: int, number: int) -> Routing:
    def chain(chain_id: int, shift: int) -> Chain:
        nodes = [1, 2, 3][shift % 3 :] + [1, 2, 3][: shift % 3]
        count = number // 16 % 4
        members = tuple(
            Member(one, one, TargetState.SERVING if at < count else TargetState.OFFLINE) for at, one in enumerate(nodes)
        )
        return Chain(chain_id, version, members)

    return Routing(version, chains=(chain(1, number), chain(2, number // 4)))


@given(ACTIONS)
def test_each_operation_ends_once_and_no_number_is_given_twice(actions: list[tuple[str, int]]) -> None:
    watched = Watched()
    watched.do("route", 48)
    for action, number in actions:
        watched.do(action, number)
    for _ in range(200):
        if not watched.waiting:
            break
        watched.do("wait", 29)
    assert not watched.waiting
    watched.feed(End("over"))
    assert not [one for one in watched.asks.values() if not isinstance(one.body, Update)]
