"""A client's requests on a bench: time passes, and answers come, when the test says so."""

from __future__ import annotations

from fireflyer.base.units import MS, SECOND
from fireflyer.fs.core.requests.effects import (
    Begin,
    DataArrived,
    Effect,
    Event,
    Failed,
    Finish,
    Limits,
    NewSession,
    QuerySpec,
    ReplyReceived,
    RoutingLearned,
    SendRequest,
    Tick,
)
from fireflyer.fs.core.requests.state_machine import Requests
from fireflyer.fs.schema.chunks import (
    Change,
    Done,
    Operation,
    QueryKind,
    QueryReply,
    RefusalReason,
    Refused,
    Update,
    UpdateReply,
)
from fireflyer.fs.schema.ids import ChunkId, ContentId
from fireflyer.fs.schema.routing import Chain, Member, Routing, TargetState

__all__ = [
    "ARRIVED",
    "CHUNK",
    "DONE",
    "LARGE",
    "LIMITS",
    "OTHER",
    "READ",
    "TRUNCATE",
    "Bench",
    "exchanges",
    "exchanging",
    "refused",
]


CHUNK, OTHER = ChunkId(1, 0), ChunkId(1, 1)
DONE = Done(ContentId(1, 1), None)
ARRIVED = DataArrived(1 << 20, ContentId(1, 1), 1 << 20, 0)
READ = QuerySpec(QueryKind.READ, 0, 4096)
LARGE = QuerySpec(QueryKind.READ, 0, 1 << 20)
TRUNCATE = Change(Operation.TRUNCATE, 0, 5)
LIMITS = Limits(attempt_ns=100 * MS, channels=2)


class Bench:
    """A machine whose clock and answers are the test's. Target t is on node t."""

    def __init__(self, *serving: int, limits: Limits = LIMITS, kind: type[Requests] = Requests) -> None:
        self.machine = kind(7, limits, seed=1)
        self.now_ns, self.version, self.operations = 0, 0, 0
        self.asks: list[SendRequest] = []
        self.ended: dict[int, object] = {}
        self.effects: list[Effect] = []
        if serving:
            self.route(*serving)

    def feed(self, event: Event) -> list[Effect]:
        effects = self.machine.handle(self.now_ns, event)
        self.effects += effects
        self.asks += [one for one in effects if isinstance(one, SendRequest)]
        self.ended.update({one.operation: one.result for one in effects if isinstance(one, Finish)})
        return effects

    def route(self, *serving: int, chains: tuple[int, ...] = (1,)) -> None:
        self.version += 1
        members = tuple(Member(one, one, TargetState.SERVING) for one in serving) or (
            Member(1, 1, TargetState.OFFLINE),
        )
        routed = tuple(Chain(one, self.version, members) for one in chains)
        self.feed(RoutingLearned(Routing(self.version, chains=routed)))

    def begin(
        self, what: Change | QuerySpec, chunk: ChunkId = CHUNK, *, chain: int = 1, within_ns: int = SECOND
    ) -> int:
        self.operations += 1
        self.feed(Begin(self.operations, self.now_ns + within_ns, chain, chunk, what))
        return self.operations

    def tell(self, reply: UpdateReply | QueryReply | DataArrived, ask: int = -1) -> list[Effect]:
        return self.feed(ReplyReceived(self.asks[ask].ask, reply))

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


def refused(refusal: RefusalReason, version: int = 1) -> Refused:
    return Refused(refusal, refusal.value, version)


def exchanging() -> Bench:
    """A session with two updates of unknown outcome, of which no more may be begun."""
    bench = Bench(1, limits=Limits(attempt_ns=100 * MS, channels=8, unknown=2))
    for chunk in (CHUNK, OTHER):
        bench.begin(TRUNCATE, chunk, within_ns=50 * MS)
    return bench


def exchanges(bench: Bench) -> list[NewSession]:
    return [one for one in bench.effects if isinstance(one, NewSession)]
