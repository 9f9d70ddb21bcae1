"""A client's requests: whom to ask, what to do with the answer, when to ask again, and what may be said at the end.

    Begin ──> (waits for its turn, and a channel: updates) ──> queued at a node ──> asked ──> Finish
                                                                  ^               │
                                                                  └── rests <─────┘  refused, late, or lost

*Looks* go to the serving replica whose node has least to do for this client (`flow_control`). One that answers
NotCommitted names the tail, which is asked next; one that is damaged is told so, and another is asked. A look that is
late is withdrawn before another replica is asked: data of two answers must not meet in the caller's memory.

*Updates* go to the head, with the numbers of `channels`. An attempt that is late stays open: if its answer
comes it is as good as any. The retry has the same number, so the chain does it once.

*What an end means.* Done is final. A refusal speaks of one attempt. So an update that ends otherwise was *not done and
never will be* if each of its attempts was answered with a refusal which says so. Those because of a stale version do
not: what had been begun then may have gone on. In all other cases the outcome is unknown, and the error is `Timeout`,
whatever its reason; no other error of an update is ambiguous. That holds also when the session ends.

*Bound updates* are for one session alone (`Begin.session`): who sends them may do so only while others know that this
session lives. They are refused as stale when they begin under another one, and when the session is lost or exchanged
before they were done, also those that were never sent: under the next one they could come when somebody has gone on in
their place.

*Routing* is asked for when an answer says that the version is another, when a node cannot be reached, and when nobody
serves; at most once in `Limits.routing_ns`. When it comes, what rests or is queued for the chain is decided anew, what
was asked of a replica that has lost its role as well. A chain that is not in what the primary says after the request
began is not there, and nobody waits for it.

Chance comes from the seed, for pauses only.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import Final

from fireflyer.base.errors import (
    Aborted,
    Busy,
    DataCorruption,
    NoSpace,
    NotFound,
    PermissionDenied,
    StaleVersion,
    Timeout,
    Unreachable,
    UsageError,
)
from fireflyer.base.units import SECOND, counted
from fireflyer.fs.core.placement.seeded_random import SeededRandom
from fireflyer.fs.core.requests.channels import Channel, Channels
from fireflyer.fs.core.requests.effects import (
    AskRouting,
    Begin,
    CancelOperation,
    ConnectionLost,
    DataArrived,
    Effect,
    End,
    Event,
    Failed,
    Finish,
    Limits,
    NewSession,
    ReplyReceived,
    RoutingConfirmed,
    RoutingLearned,
    SendCorruptionHint,
    SendRequest,
    SessionOpened,
    SessionOver,
    Withdraw,
)
from fireflyer.fs.core.requests.flow_control import Load, Nodes
from fireflyer.fs.core.requests.state import NOWHERE, PendingOperation, Route, State
from fireflyer.fs.schema.chunks import (
    Change,
    Done,
    Found,
    Missing,
    NotCommitted,
    Operation,
    Query,
    QueryKind,
    QueryReply,
    RefusalReason,
    Refused,
    Update,
    UpdateReply,
)
from fireflyer.fs.schema.ids import MAX_CHUNK_BYTES, ChainId, ClientId, NodeId, TargetId
from fireflyer.fs.schema.routing import Routing, TargetState

__all__ = ["Requests"]

_MAX_DOUBLINGS: Final = 3
_MAX_OLD_ENTRIES: Final = 256
"""In the heap of what is due, beside so many times the requests."""
_FINAL: Final = {
    RefusalReason.NO_SPACE: NoSpace.code,
    RefusalReason.USAGE: UsageError.code,
    RefusalReason.DENIED: PermissionDenied.code,
}
"""Refusals after which nothing is tried again."""


class Requests:
    """`handle(now_ns, event)` for all events of one session; `now_ns`: a monotonic clock."""

    def __init__(self, client: ClientId, limits: Limits | None = None, *, seed: int) -> None:
        self._client = client
        self._limits = limits or Limits()
        self._rng = SeededRandom(seed)
        self._nodes = Nodes(self._limits)
        self._channels = Channels(self._limits.channels, self._limits.unknown)
        self._requests: dict[int, PendingOperation] = {}
        self._ghosts: deque[PendingOperation] = deque()
        """Updates that ended without a known outcome, and may be answered yet."""
        self._asks: dict[int, PendingOperation] = {}
        self._numbers = 0
        self._due: list[tuple[int, int]] = []
        self._routing = Routing(0)
        self._routes: dict[ChainId, Route] = {}
        self._routing_wanted = True
        self._routing_asked_ns: int | None = None
        self._strayed = False
        """Some request is for a chain that is not in the routing."""
        self._ended: str | None = None
        self._exchanging = False
        """Of the session: it was asked for."""
        self._now_ns = 0
        self._effects: list[Effect] = []

    @property
    def routing(self) -> Routing:
        return self._routing

    @property
    def due_ns(self) -> int | None:
        """When `Tick` is to be given at the latest; None: never."""
        while self._due and self._stale(*self._due[0]):
            heapq.heappop(self._due)
        due = [self._due[0][0]] if self._due else []
        if self._routing_wanted and self._routing_asked_ns is not None and self._ended is None:
            due.append(self._routing_asked_ns + self._limits.routing_ns)
        if (grant_ns := self._nodes.due_ns) is not None:
            due.append(grant_ns)
        return min(due, default=None)

    @property
    def open(self) -> int:
        """Operations that have not finished."""
        return len(self._requests)

    @property
    def senders(self) -> int:
        """Nodes that owe large replies."""
        return self._nodes.senders

    @property
    def unresolved_channels(self) -> int:
        return self._channels.unresolved

    def handle(self, now_ns: int, event: Event) -> list[Effect]:
        """What to do about the event, in this order."""
        self._now_ns = max(now_ns, self._now_ns)
        match event:
            case Begin():
                self._begin(event)
            case ReplyReceived(ask, reply):
                self._told(ask, reply)
            case ConnectionLost(node, sent, reason):
                self._lost(node, reason, sent=sent)
            case RoutingLearned(routing):
                self._learn(routing)
            case RoutingConfirmed(asked_ns):
                self._confirm(asked_ns)
            case SessionOver(client) if client == self._client and not self._exchanging:
                self._lose_session()
            case SessionOpened(client) if self._exchanging:
                self._exchanged(client)
            case CancelOperation(operation):
                if (request := self._requests.get(operation)) is not None:
                    self._over(request, done=False)
            case End(reason):
                self._end(reason)
        self._wake()
        for _, operation, _ in self._nodes.leaving(self._now_ns, lambda one: self._place(self._requests[one])):
            self._ask(self._requests[operation])
        self._ask_routing()
        self._exchange()
        effects, self._effects = self._effects, []
        return effects

    # --- beginnings ---

    def _begin(self, begin: Begin) -> None:
        what = begin.what
        data_bytes, large = 0, False
        if isinstance(what, Change):
            data_bytes = what.length if what.carries_data else 0
            end = what.length + (what.offset if what.operation is Operation.WRITE else 0)
        else:
            end = what.offset + what.length if what.kind is QueryKind.READ else 0
            if what.kind is QueryKind.READ:
                data_bytes, large = what.length, what.length >= self._limits.large_bytes
        request = PendingOperation(begin, Load(data_bytes, large), begun_ns=self._now_ns)
        self._requests[begin.operation] = request
        if self._ended is not None:
            self._fail(request, Aborted.code, f"the session has ended: {self._ended}")
        elif len(self._requests) > self._limits.requests:
            self._fail(
                request,
                Busy.code,
                f"{self._limits.requests} requests are in flight, the maximum; wait for some of them",
            )
        elif end > MAX_CHUNK_BYTES or what.offset < 0 or what.length < 0:
            self._fail(request, UsageError.code, f"{what}: a chunk has at most {MAX_CHUNK_BYTES} bytes")
        elif begin.session and (begin.session != self._client or self._exchanging):
            self._fail(request, StaleVersion.code, _bound_to(begin.session))
        elif begin.chunk.file >> 63 or begin.chunk.index >> 32:
            self._fail(
                request,
                UsageError.code,
                f"{begin.chunk} is not valid: file numbers are below 2^63 and chunk indices below 2^32",
            )
        elif isinstance(what, Change):
            self._wait_until(request, begin.deadline_ns)
            request.code, request.why = (
                Busy.code,
                "earlier updates of the chunk, or of all channels, were not answered yet",
            )
            self._give_channels(self._channels.enter(request.place, begin.operation))
        else:
            self._place(request)

    def _give_channels(self, begun: list[tuple[int, Channel]]) -> None:
        for operation, channel in begun:
            request = self._requests[operation]
            request.channel, request.sequence = channel, channel.sequence
            request.code, request.why = Unreachable.code, "no storage node was asked yet"
            self._place(request)

    def _end(self, reason: str) -> None:
        self._ended = reason
        for request in list(self._requests.values()):
            self._fail(request, Aborted.code, f"the session has ended: {reason}")

    def _lose_session(self) -> None:
        """What was sent may have been done, and will not be answered. What was not waits for another session."""
        self._channels.close()
        begun = [one for one in self._requests.values() if one.channel is not None]
        for request in begun:
            why = "the session had ended"
            if request.maybe_done or request.asks:
                self._fail(request, Aborted.code, why)
                continue
            if request.state is State.QUEUED:
                self._nodes.drop(request.node, request.begin.operation)
            request.state, request.code, request.why = State.WAITS, Aborted.code, f"{why}, and no other is open yet"
            self._wait_until(request, request.begin.deadline_ns)
        self._want_session()

    def _exchange(self) -> None:
        if self._channels.used_up and not self._exchanging:
            self._want_session()

    def _want_session(self) -> None:
        for request in [one for one in self._requests.values() if one.begin.session]:
            self._fail(request, StaleVersion.code, _bound_to(self._client))
        if self._ended is None:
            self._exchanging = True
            self._effects.append(NewSession(self._client))

    def _exchanged(self, client: ClientId) -> None:
        self._client, self._exchanging = client, False
        while self._ghosts:
            self._forget(self._ghosts.popleft())
        self._give_channels(self._channels.renew())

    # --- whom to ask ---

    def _place(self, request: PendingOperation) -> None:
        """Decides whom to ask, and queues it there."""
        route = self._routes.get(request.begin.chain, NOWHERE)
        serving = route.serving
        tail, request.tail = request.tail, 0
        if not serving:
            request.code, request.why = self._nobody(request.begin.chain)
            self._want_routing()
            self._rest(request)
            return
        if request.update:
            chosen = serving[0]
        else:
            chosen = next((one for one in serving if one.target == tail), serving[0])
            if chosen.target != tail:
                chosen = self._nodes.choose(self._now_ns, serving, request.avoid) or chosen
        request.target, request.node, request.state = chosen.target, chosen.node, State.QUEUED
        self._nodes.queue(chosen.node, request.begin.operation, request.load)
        self._wait_until(request, request.begin.deadline_ns)

    def _nobody(self, chain: ChainId) -> tuple[str, str]:
        if chain in self._routes:
            return (
                Unreachable.code,
                f"chain {chain} is unavailable: none of its targets is serving; `ff fs status` shows it",
            )
        if self._routing.version:
            self._strayed = True
            return NotFound.code, f"chain {chain} is not in routing version {self._routing.version}"
        return Unreachable.code, "no manager has answered yet"

    def _ask(self, request: PendingOperation) -> None:
        begin, what = request.begin, request.begin.what
        version = self._routes[begin.chain].version
        self._numbers += 1
        ask = request.present = self._numbers
        request.asks[ask] = request.node
        self._asks[ask] = request
        request.state = State.ASKED
        if isinstance(what, Change):
            number = request.channel.number if request.channel else 0
            body: Update | Query = Update(
                begin.chain, version, self._client, number, request.sequence, begin.chunk, what
            )
        else:
            body = Query(begin.chain, version, what.kind, begin.chunk, what.offset, what.length)
        self._nodes.sent(request.node, request.load)
        patience_ns = self._limits.attempt_ns << min(request.attempts, _MAX_DOUBLINGS)
        patience_ns += self._nodes.under_way_bytes(request.node) * SECOND // self._limits.least_bytes_per_s
        request.attempts += 1
        self._wait_until(request, self._now_ns + patience_ns)
        self._effects.append(SendRequest(ask, begin.operation, request.node, request.target, body))

    def _elsewhere(self, request: PendingOperation) -> bool:
        """Whether there is a replica that may know better."""
        serving = self._routes.get(request.begin.chain, NOWHERE).serving
        return not request.update and any(
            one.target not in request.avoid and not self._nodes.suspected(self._now_ns, one.node) for one in serving
        )

    def _again(self, request: PendingOperation) -> None:
        """At once where somebody else can be asked."""
        if self._elsewhere(request):
            self._place(request)
        else:
            self._rest(request)

    def _rest(self, request: PendingOperation) -> None:
        bound = self._limits
        pause_ns = min(bound.pause_ns << min(request.refusals, 16), bound.max_pause_ns)
        request.refusals += 1
        request.state = State.RESTS
        self._wait_until(request, self._now_ns + 1 + pause_ns // 2 + self._rng.below(pause_ns // 2 + 1))

    # --- time ---

    def _wait_until(self, request: PendingOperation, due_ns: int) -> None:
        request.due_ns = min(due_ns, request.begin.deadline_ns)
        heapq.heappush(self._due, (request.due_ns, request.begin.operation))
        if len(self._due) > 4 * len(self._requests) + _MAX_OLD_ENTRIES:
            self._due = [(one.due_ns, number) for number, one in self._requests.items()]
            heapq.heapify(self._due)

    def _stale(self, due_ns: int, operation: int) -> bool:
        request = self._requests.get(operation)
        return request is None or request.due_ns != due_ns

    def _wake(self) -> None:
        while self._due and (self._due[0][0] <= self._now_ns or self._stale(*self._due[0])):
            due_ns, operation = heapq.heappop(self._due)
            request = self._requests.get(operation)
            if request is None or request.due_ns != due_ns:
                continue
            if self._now_ns >= request.begin.deadline_ns:
                self._expire(request)
            elif request.state is State.RESTS:
                self._place(request)
            elif request.state is State.ASKED:
                self._late(request)

    def _expire(self, request: PendingOperation) -> None:
        what = "no answer came in time" if request.state is State.ASKED else request.why
        code = request.code if request.update else NotFound.code if request.code == NotFound.code else Timeout.code
        self._fail(request, code, f"not done before the deadline, after {counted(request.attempts, 'attempt')}: {what}")

    def _late(self, request: PendingOperation) -> None:
        request.code, request.why = Unreachable.code, f"node {request.node} did not answer"
        self._nodes.suspect(request.node, self._now_ns + self._limits.suspect_ns)
        self._want_routing()
        self._withdraw(request)
        self._place(request)

    def _withdraw(self, request: PendingOperation) -> None:
        if not request.update:
            for ask in list(request.asks):
                self._close(ask, request)
                self._effects.append(Withdraw(ask))

    def _close(self, ask: int, request: PendingOperation) -> None:
        del self._asks[ask]
        node = request.asks.pop(ask)
        if request.state is not State.OVER:
            self._nodes.ended(node, request.load)

    # --- answers ---

    def _told(self, ask: int, reply: UpdateReply | QueryReply | DataArrived) -> None:
        if (request := self._asks.get(ask)) is None:
            return
        self._nodes.trust(request.asks[ask], self._now_ns)
        newest = ask == request.present and request.state is State.ASKED
        self._close(ask, request)
        match reply:
            case Done() | Found() | Missing() | DataArrived() if request.state is not State.OVER:
                self._effects.append(Finish(request.begin.operation, reply))
                self._over(request, done=request.update)
            case Done():
                self._resolved(request, done=True)
            case NotCommitted(tail) if newest:
                self._not_committed(request, tail)
            case Refused():
                self._refused(request, reply, newest=newest)
            case _:
                pass

    def _not_committed(self, request: PendingOperation, tail: TargetId) -> None:
        request.why = "another update of the chunk was not finished"
        serving = self._routes.get(request.begin.chain, NOWHERE).serving
        if tail == request.target:
            request.tail = tail
            self._rest(request)
        elif any(one.target == tail for one in serving):
            request.tail = tail
            self._place(request)
        else:
            self._want_routing()
            self._rest(request)

    def _refused(self, request: PendingOperation, refused: Refused, *, newest: bool) -> None:
        refusal = refused.refusal
        if request.update and refusal in (RefusalReason.STALE, RefusalReason.DUPLICATE):
            request.maybe_done = True
        if request.state is State.OVER:
            if not request.asks:
                self._answered_late(request)
            return
        if not newest:
            return
        request.why = refused.message
        request.code = _FINAL.get(refusal, Busy.code if refusal is RefusalReason.BUSY else StaleVersion.code)
        if refusal in _FINAL:
            self._fail(request, request.code, refused.message)
        elif refusal is RefusalReason.CORRUPT:
            self._corrupt(request)
        else:
            if refusal is not RefusalReason.BUSY:
                self._want_routing()
            request.avoid[request.target] = None
            self._again(request)

    def _corrupt(self, request: PendingOperation) -> None:
        begin = request.begin
        request.code = DataCorruption.code
        request.damaged += 1
        request.avoid[request.target] = None
        serving = self._routes.get(begin.chain, NOWHERE).serving
        if not request.update:
            self._effects.append(SendCorruptionHint(request.node, request.target, begin.chain, begin.chunk))
        if request.damaged >= self._limits.damaged * max(1, 1 if request.update else len(serving)):
            self._fail(request, request.code, f"{request.why}; every replica that was asked is damaged")
        else:
            self._again(request)

    def _lost(self, node: NodeId, reason: str, *, sent: bool) -> None:
        self._nodes.suspect(node, self._now_ns + self._limits.suspect_ns)
        self._want_routing()
        for ask, request in list(self._asks.items()):
            if request.asks.get(ask) != node:
                continue
            newest = ask == request.present and request.state is State.ASKED
            self._close(ask, request)
            request.maybe_done = request.maybe_done or (request.update and sent)
            if request.state is State.OVER and not request.asks:
                self._ghosts.remove(request)
            if newest:
                request.code, request.why = Unreachable.code, f"node {node}: {reason}"
                self._again(request)

    # --- routing ---

    def _want_routing(self) -> None:
        self._routing_wanted = True

    def _ask_routing(self) -> None:
        asked_ns = self._routing_asked_ns
        if not self._routing_wanted or self._ended is not None:
            return
        if asked_ns is None or self._now_ns >= asked_ns + self._limits.routing_ns:
            self._routing_wanted, self._routing_asked_ns = False, self._now_ns
            self._effects.append(AskRouting())

    def _learn(self, routing: Routing) -> None:
        if routing.version <= self._routing.version:
            return
        before, self._routing = self._routes, routing
        self._routes = {}
        for chain in routing.chains:
            known = before.get(chain.id)
            if known is None or known.version != chain.version:
                serving = tuple(one for one in chain.members if one.state is TargetState.SERVING)
                known = Route(chain.version, serving)
            self._routes[chain.id] = known
        for request in list(self._requests.values()):
            chain_id = request.begin.chain
            if self._routes.get(chain_id, NOWHERE) is not before.get(chain_id, NOWHERE):
                self._decide_anew(request)

    def _confirm(self, asked_ns: int) -> None:
        if not self._strayed:
            return
        waiting = [one for one in self._requests.values() if one.state in (State.WAITS, State.RESTS)]
        strayed = [one for one in waiting if one.begin.chain not in self._routes]
        self._strayed = any(one.begun_ns > asked_ns for one in strayed)
        for request in strayed:
            if request.begun_ns <= asked_ns:
                self._fail(request, NotFound.code, f"{self._nobody(request.begin.chain)[1]}, the newest")

    def _decide_anew(self, request: PendingOperation) -> None:
        request.avoid.clear()
        if request.state is State.QUEUED:
            self._nodes.drop(request.node, request.begin.operation)
            self._place(request)
        elif request.state is State.RESTS:
            self._place(request)
        elif request.state is State.ASKED:
            serving = self._routes.get(request.begin.chain, NOWHERE).serving
            able = serving[:1] if request.update else serving
            if request.target not in [one.target for one in able]:
                self._withdraw(request)
                self._place(request)

    # --- ends ---

    def _fail(self, request: PendingOperation, code: str, message: str) -> None:
        if request.update and (request.maybe_done or request.asks):
            code = Timeout.code
            message += "; the update may or may not have been done, and may be done yet"
        self._effects.append(Finish(request.begin.operation, Failed(code, message[:1024])))
        self._over(request, done=False)

    def _over(self, request: PendingOperation, *, done: bool) -> None:
        """Of what is still open, looks are withdrawn; answers to an update of unknown outcome are listened for."""
        operation = request.begin.operation
        del self._requests[operation]
        if request.state is State.QUEUED:
            self._nodes.drop(request.node, operation)
        unknown = request.update and not done and (request.maybe_done or bool(request.asks))
        self._withdraw(request)
        for ask, node in list(request.asks.items()):
            self._nodes.ended(node, request.load)
            if not unknown:
                del self._asks[ask], request.asks[ask]
        request.state = State.OVER
        if unknown:
            self._ghosts.append(request)
            if len(self._ghosts) > self._limits.channels:
                self._forget(self._ghosts.popleft())
        if request.update:
            self._give_channels(self._channels.leave(request.place, operation, done=done, unknown=unknown))

    def _answered_late(self, ghost: PendingOperation) -> None:
        """All its attempts were refused."""
        if ghost.maybe_done:
            self._ghosts.remove(ghost)
        else:
            self._resolved(ghost, done=False)

    def _forget(self, ghost: PendingOperation) -> None:
        for ask in ghost.asks:
            del self._asks[ask]
        ghost.asks.clear()

    def _resolved(self, ghost: PendingOperation, *, done: bool) -> None:
        self._ghosts.remove(ghost)
        self._forget(ghost)
        if ghost.channel is not None:
            self._give_channels(self._channels.resolve(ghost.place, ghost.channel, ghost.sequence, done=done))


def _bound_to(session: ClientId) -> str:
    return f"the update belongs to session {session}, which has ended"
