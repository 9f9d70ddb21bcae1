"""The cluster manager: who may serve which chain. A pure machine; a shell performs its effects.

    RequestReceived(request)  ──> Reply
    Tick  ──> Transact  ──> an outcome  ──> Reply, LogDecision

Several run over one key-value store. `kvstore.core.lease` says which is primary; only that one answers, the others
name it.

    candidate ──lease taken──> loading ──all rows read──> primary ──the row is another one's──> candidate

The primary has the whole state in memory (`ledger`), and beside it what it hears (`health`). Heartbeats and questions
are answered at once, from what is committed. Whatever changes something waits in a queue; when no transaction is under
way, all that waits and all chains about which something new is known are worked into one draft, which is one
transaction (`kvstore.core.leadership`):

    queue, dirty chains ──> draft ──Transact──> Written       it holds; answers go out
                                             ├> NotWritten    dropped; who asked is told to ask again
                                             └> the lease, or the store, changed: everything in memory is dropped

Why nobody loses a role that it still uses:

1. Silence. The fence of a node ends before the manager calls it dead (`fence`). While a transaction is under way that
   may take its roles, the node is *condemned*: it gets no answer, so its fence cannot open again meanwhile. After that
   each answer brings the routing in which the role is gone.
2. Registration. A process proves that the one before it is dead: the directories' locks on the same machine, T of
   silence on another. The transaction that gives out its incarnation takes the roles of the old one.
3. GONE, reported for the present version of the chain: see the promises in `schema.manager`.

A manager that ends (`Leave`) refuses what waits, lets a transaction that is under way come to its end, and then gives
the lease up, so that the next primary need not wait for it.

A primary that stood still (no tick for half a lease) has not heard what was sent meanwhile: it takes the silence for
its own.

Answers of a primary whose lease is over are not given (`LeaseMachine.may_act`); ones that are still under way open
fences which end before the next primary, who waits T, takes anything away."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec

from fireflyer.base.errors import (
    Busy,
    FireflyerError,
    InvariantViolation,
    NotFound,
    PermanentError,
    StaleVersion,
    TransientError,
    UsageError,
    error_to_wire,
)
from fireflyer.base.units import SECOND
from fireflyer.fs.core.capability import MAX_LIFETIME_S, MAX_SKEW_S
from fireflyer.fs.core.fence import fence_ns
from fireflyer.fs.core.manager import admin, migration
from fireflyer.fs.core.manager.acknowledged import AcknowledgedVersions, unchanged
from fireflyer.fs.core.manager.chains import next_chain
from fireflyer.fs.core.manager.health import Health
from fireflyer.fs.core.manager.key_rotation import KeyRotation
from fireflyer.fs.core.manager.ledger import Ledger
from fireflyer.fs.core.manager.sessions import SessionTable
from fireflyer.fs.core.rows import CHAINS, LEASE_KEY, MOVES, NODES, SESSIONS, STATE_KEY, TABLES, TARGETS, NodeRow
from fireflyer.fs.schema.ids import ChainId, Incarnation, NodeId, RoutingVersion, TargetId
from fireflyer.fs.schema.manager import (
    AdminRequest,
    Answer,
    GetMoves,
    GetRouting,
    GetStatus,
    Heartbeat,
    HeartbeatAnswer,
    ManagerError,
    MoveList,
    NotPrimary,
    Register,
    Registered,
    Request,
    RoutingAnswer,
    StaleIncarnation,
    Superseded,
    TargetReport,
)
from fireflyer.fs.schema.routing import Chain
from fireflyer.fs.schema.sessions import (
    EndSession,
    GetSessions,
    KeepSession,
    OpenSession,
    SessionKept,
    SessionList,
    SessionOver,
)
from fireflyer.kvstore.core.fenced import Committed, Failed, Item, Outcome, OutcomeUnknown, PreconditionFailed, Transact
from fireflyer.kvstore.core.leadership import Leadership, NotWritten, Read, StoreChanged, Written
from fireflyer.kvstore.core.lease import LeaseMachine

__all__ = [
    "MAX_PENDING",
    "Effect",
    "Event",
    "Leave",
    "LogDecision",
    "Manager",
    "Reply",
    "RequestReceived",
    "Settings",
    "Tick",
]

MAX_PENDING: Final = 1024
"""Requests that wait for a transaction."""
MAX_PENDING_PER_USER: Final = MAX_PENDING // 8
"""Of one user who is neither a service nor an administrator: what others ask has room beside it."""
MAX_BATCH: Final = 64
"""Of them, in one transaction."""
MAX_CHAINS_PER_DRAFT: Final = 1024
MAX_ROWS_PER_DRAFT: Final = 20_000
"""With more, no further request is taken into it. One request puts about as many at most."""

_RANGES: Final = (
    (STATE_KEY, STATE_KEY + b"\0"),
    *((kind.prefix, kind.end) for kind in (NODES, TARGETS, CHAINS, TABLES, SESSIONS, MOVES)),
)


class Settings(msgspec.Struct, frozen=True):
    holder: str
    """Unique to this process: a name and something random."""
    address: str
    """Where the others send those who ask."""
    failure_timeout_ns: int = 6 * SECOND
    """T. Counts when the cluster is made; later it is what was kept then."""
    lease_ns: int = 2 * SECOND
    cluster: str = ""
    """Of which cluster the store must be, if not empty; a new store becomes its."""
    session_ns: int = 60 * SECOND
    """A session that is silent for so long is over."""
    key_life_ns: int = (MAX_LIFETIME_S + MAX_SKEW_S) * SECOND
    """A key that signs no more is valid for so long."""


# --- events ---


class Tick(msgspec.Struct, frozen=True):
    """Time has passed; comes at least every eighth of the lease."""


class RequestReceived(msgspec.Struct, frozen=True):
    """`request_id` is the shell's: it comes back in the one `Reply` to it."""

    request_id: int
    request: Request
    user: str = ""
    """Who asks, as the connection has proven."""
    trusted: bool = True
    """A service or an administrator: may end the sessions of others."""


class Leave(msgspec.Struct, frozen=True):
    """The process is to end; it may when `Manager.left`. Ticks go on until then."""


Event: TypeAlias = Tick | RequestReceived | Leave | Outcome


# --- effects ---


class Reply(msgspec.Struct, frozen=True):
    request_id: int
    answer: Answer


class LogDecision(msgspec.Struct, frozen=True):
    """A decision and its reason, for the log."""

    text: str


Effect: TypeAlias = Transact | Reply | LogDecision


@dataclass(slots=True)
class _Draft:
    """What one transaction changes, and who waits for it."""

    replies: list[tuple[int, Answer]] = field(default_factory=list)
    replaced: dict[NodeId, None] = field(default_factory=dict)
    """Nodes of which a new process has registered."""
    pending_dead: dict[NodeId, None] = field(default_factory=dict)
    chains: dict[ChainId, None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Manager:
    def __init__(self, settings: Settings) -> None:
        fence_ns(settings.failure_timeout_ns)  # refuses what cannot be kept
        self._settings = settings
        lease = LeaseMachine(LEASE_KEY, settings.holder, settings.address, settings.lease_ns)
        self._leadership = Leadership(lease, settings.lease_ns, lambda order: self._effects.append(order))
        self._effects: list[Effect] = []
        self._queue: deque[RequestReceived] = deque()
        self._waiting: Counter[str] = Counter()
        """How many of them are of which user."""
        self._ledger: Ledger | None = None
        self._health = Health(Ledger(0, settings.failure_timeout_ns), 0)
        self._learned = AcknowledgedVersions()
        self._book = SessionTable(Ledger(0, settings.failure_timeout_ns), settings.session_ns, 0)
        self._keys: KeyRotation | None = None
        self._silent = False
        self._moving = False
        self._dirty: dict[ChainId, None] = {}
        self._draft: _Draft | None = None

    @property
    def term(self) -> int:
        """Of the lease that this manager holds; 0 for a candidate."""
        return self._leadership.term

    @property
    def routing_version(self) -> RoutingVersion:
        """What is committed, as a primary knows it; 0 for the others."""
        return self._ledger.state.version if self._ledger is not None else 0

    @property
    def key_ids(self) -> tuple[int, ...]:
        """Of the keys of capabilities; the first one signs. None for a candidate."""
        return self._ledger.state.key_ids if self._ledger is not None else ()

    @property
    def leaving(self) -> bool:
        return self._leadership.leaving

    @property
    def left(self) -> bool:
        """After `Leave`: nothing is under way."""
        return self._draft is None and self._leadership.left

    def may_act(self, now_ns: int) -> bool:
        """Whether it answers as primary."""
        return self._ledger is not None and self._leadership.may_act(now_ns)

    def handle(self, now_ns: int, event: Event) -> list[Effect]:
        """Raises `DataCorruption` and `InvariantViolation`, upon which the process must end."""
        match event:
            case Tick():
                self._on_tick(now_ns)
            case RequestReceived():
                self._on_request(now_ns, event)
            case Leave():
                self._leadership.leave()
            case Committed() | PreconditionFailed() | Failed() | OutcomeUnknown():
                self._on_outcome(now_ns, event)
        self._advance(now_ns)
        effects, self._effects = self._effects, []
        return effects

    # --- what comes in ---

    def _on_tick(self, now_ns: int) -> None:
        slept_ns = self._leadership.tick(now_ns)
        if slept_ns:
            self._health.restart_clocks(slept_ns)
            self._book.restart_clocks(slept_ns)
            if self._keys is not None:
                self._keys.restart_clocks(slept_ns)
        if self._ledger is not None:
            self._mark_dirty(self._health.sweep(now_ns))
            self._silent = bool(self._book.silent(now_ns))
            self._moving = bool(self._ledger.moves.committed)

    def _on_request(self, now_ns: int, asked: RequestReceived) -> None:
        ledger, request_id, request = self._ledger, asked.request_id, asked.request
        if isinstance(request, Heartbeat) and ledger is not None:
            self._reply(request_id, self._on_heartbeat(now_ns, ledger, request))
        elif ledger is None or not self.may_act(now_ns):
            self._reply(request_id, NotPrimary(self._leadership.address))
        elif isinstance(request, GetRouting):
            self._reply(request_id, RoutingAnswer(ledger.delta(request.known)))
        elif isinstance(request, GetStatus):
            self._reply(request_id, admin.status(ledger, self._health, now_ns, request.after))
        elif isinstance(request, GetSessions):
            self._reply(request_id, SessionList(self._book.status(now_ns)))
        elif isinstance(request, GetMoves):
            self._reply(request_id, MoveList(migration.moves_status(ledger)))
        elif isinstance(request, KeepSession):
            self._reply(request_id, self._keep(now_ns, ledger, asked, request))
        elif len(self._queue) >= MAX_PENDING:
            self._reply(
                request_id,
                _manager_error(Busy(f"the manager is overloaded: {MAX_PENDING} requests are waiting; try again later")),
            )
        elif not asked.trusted and self._waiting[asked.user] >= MAX_PENDING_PER_USER:
            words = f"{MAX_PENDING_PER_USER} requests of {asked.user} are waiting; wait for some of them"
            self._reply(request_id, _manager_error(Busy(words)))
        else:
            self._queue.append(asked)
            self._waiting[asked.user] += 1

    def _keep(self, now_ns: int, ledger: Ledger, asked: RequestReceived, request: KeepSession) -> Answer:
        if not self._book.living(request.client, asked.user, trusted=asked.trusted):
            return SessionOver(request.client)
        if ledger.sessions.get(request.client) is None:
            return _manager_error(Busy(f"session {request.client} is being changed; try again"))
        self._book.heard(request.client, now_ns)
        return SessionKept(ledger.delta(request.known))

    def _on_heartbeat(self, now_ns: int, ledger: Ledger, heartbeat: Heartbeat) -> Answer:
        """Also a primary that may not answer now hears it: the node lives."""
        node = self._health.get(heartbeat.node)
        if node is None or not heartbeat.incarnation or heartbeat.incarnation > node.incarnation:
            return _manager_error(
                NotFound(f"process {heartbeat.incarnation} of node {heartbeat.node} is unknown; register")
            )
        if heartbeat.incarnation < node.incarnation:
            return Superseded(node.incarnation)
        if heartbeat.sequence <= node.sequence:
            return _manager_error(
                StaleVersion(f"heartbeat {heartbeat.sequence} came after {node.sequence}; send a new one")
            )
        self._mark_dirty(self._health.hear(heartbeat, now_ns))
        if not self.may_act(now_ns):
            return NotPrimary(self._leadership.address)
        if self._draft is not None and heartbeat.node in self._draft.pending_dead:
            return _manager_error(Busy(f"node {heartbeat.node} is being changed; send the next heartbeat"))
        self._learned.answered(heartbeat.node, ledger.chains_of_node(heartbeat.node))
        orders = self._health.orders(heartbeat.node, now_ns)
        sessions = self._book.delta(heartbeat.sessions)
        return HeartbeatAnswer(
            heartbeat.sequence, ledger.delta(heartbeat.known), orders, sessions, ledger.state.key_ids
        )

    def _on_outcome(self, now_ns: int, outcome: Outcome) -> None:
        match self._leadership.outcome(now_ns, outcome):
            case Read(rows):
                self._on_loaded(now_ns, rows)
            case Written():
                self._commit(now_ns, *self._drafted())
            case NotWritten(reason):
                self._drop(*self._drafted(), reason)
            case StoreChanged():
                self._log_decision("another process changed the rows of the manager; reading them again")
                self._forget()

    # --- becoming and ceasing to be primary ---

    def _on_loaded(self, now_ns: int, rows: Sequence[Item]) -> None:
        settings = self._settings
        ledger = Ledger(self.term, settings.failure_timeout_ns, settings.cluster)
        ledger.load(rows)
        if settings.cluster and ledger.state.cluster not in ("", settings.cluster):
            raise UsageError(
                f"the store holds cluster {ledger.state.cluster!r}, and the configuration of this manager names "
                f"cluster {settings.cluster!r}; correct `store` or `cluster` in it"
            )
        self._ledger, self._health, self._learned = ledger, Health(ledger, now_ns), AcknowledgedVersions()
        self._book, self._silent = SessionTable(ledger, settings.session_ns, now_ns), False
        self._keys = KeyRotation(
            ledger, told_ns=ledger.state.failure_timeout_ns, life_ns=settings.key_life_ns, now_ns=now_ns
        )
        self._mark_dirty(sorted(ledger.chains.committed))
        self._log_decision(f"primary in term {self.term} with routing {ledger.state.version}")

    def _cease(self, ended_term: int) -> None:
        """Whatever was known or under way belongs to the term in which it began."""
        if ended_term:
            self._log_decision(f"no longer primary in term {ended_term}")
        self._forget()

    def _forget(self) -> None:
        draft, self._draft = self._draft, None
        waiting = [request_id for request_id, _ in (draft.replies if draft is not None else ())]
        for request_id in (*waiting, *(asked.request_id for asked in self._queue)):
            self._reply(request_id, NotPrimary(self._leadership.address))
        self._queue.clear()
        self._waiting.clear()
        self._dirty.clear()
        self._ledger = self._keys = None

    def _advance(self, now_ns: int) -> None:
        if not self._leadership.advance(now_ns, self._cease) or self._leadership.busy:
            return
        if self._ledger is None:
            self._leadership.read(_RANGES)
        elif self.may_act(now_ns):
            self._plan(now_ns, self._ledger)

    # --- drafts ---

    def _plan(self, now_ns: int, ledger: Ledger) -> None:
        """One draft of all that waits. Nothing is sent if it comes out empty."""
        draft = _Draft()
        while self._queue and len(draft.replies) < MAX_BATCH and ledger.draft_rows() < MAX_ROWS_PER_DRAFT:
            asked = self._queue.popleft()
            self._waiting[asked.user] -= 1
            if not self._waiting[asked.user]:
                del self._waiting[asked.user]
            try:
                answer = self._decide(now_ns, ledger, draft, asked)
            except (UsageError, TransientError, PermanentError) as error:
                answer = _manager_error(error)
            draft.replies.append((asked.request_id, answer))
        if self._silent:
            self._end_silent(now_ns, ledger, draft)
        if self._moving:
            self._moving = False
            draft.notes += migration.advance(ledger)
        if self._keys is not None and self._keys.due(now_ns):
            draft.notes += self._keys.advance()
        self._evaluate(ledger, draft)
        pending = ledger.pending()
        if pending is None:
            self._conclude(draft)
            return
        draft.pending_dead.update(dict.fromkeys(self._health.dead()))
        draft.pending_dead.update(draft.replaced)
        self._draft = draft
        self._leadership.write(*pending)

    def _decide(self, now_ns: int, ledger: Ledger, draft: _Draft, asked: RequestReceived) -> Answer:
        match asked.request:
            case Register() as request:
                return self._register(now_ns, ledger, draft, request)
            case OpenSession() as request:
                return self._book.open(request, asked.user, now_ns)
            case EndSession() as request:
                return self._book.end(request, asked.user, trusted=asked.trusted)
            case request if isinstance(request, AdminRequest):
                return self._administrate(now_ns, ledger, request)
            case _:
                raise InvariantViolation(f"{type(asked.request).__name__} waits for a transaction")

    def _end_silent(self, now_ns: int, ledger: Ledger, draft: _Draft) -> None:
        for client in self._book.silent(now_ns):
            if ledger.sessions.get(client) is not None:
                ledger.sessions.put(client, None)
                draft.notes.append(f"session {client} has expired: no heartbeat")
        self._silent = False

    def _administrate(self, now_ns: int, ledger: Ledger, request: AdminRequest) -> Answer:
        return admin.apply(request, ledger, self._health, now_ns)

    def _register(self, now_ns: int, ledger: Ledger, draft: _Draft, request: Register) -> Answer:
        if request.cluster and ledger.state.cluster not in ("", request.cluster):
            raise UsageError(
                f"node {request.node} has target directories of cluster {request.cluster!r}, and this manager is of "
                f"cluster {ledger.state.cluster!r}; correct `managers` in the configuration of the node"
            )
        row = ledger.nodes.get(request.node)
        if row is None:
            raise NotFound(f"there is no node {request.node}; add it: ff fs admin register-node --node {request.node}")
        if row.incarnation and row.nonce == request.nonce:
            return self._registered(ledger, row.incarnation)
        if request.previous != row.incarnation:
            return StaleIncarnation(row.incarnation)
        moved = row.incarnation > 0 and row.machine != request.machine
        if moved and not self._health.silent(request.node, now_ns):
            raise Busy(f"node {request.node} is alive on another machine; stop it there, or wait until it has failed")
        incarnation = row.incarnation + 1
        new = NodeRow(request.node, incarnation, request.address, request.nonce, request.machine, request.boot)
        ledger.nodes.put(request.node, new)
        if row.incarnation:
            draft.replaced[request.node] = None
        return self._registered(ledger, incarnation)

    def _registered(self, ledger: Ledger, incarnation: Incarnation) -> Registered:
        return Registered(incarnation, ledger.state.failure_timeout_ns, ledger.state.key_ids)

    def _evaluate(self, ledger: Ledger, draft: _Draft) -> None:
        """Applies the rules to chains that lose a process, all at once, and to those of which something new is
        known."""
        lost = {chain: None for node in draft.replaced for chain in ledger.chains_of_node(node)}
        changing = [chain for chain in self._dirty if ledger.chains.in_draft(chain)]
        known = [chain for chain in self._dirty if chain not in lost and chain not in changing]
        for chain_id in (*lost, *known[:MAX_CHAINS_PER_DRAFT]):
            self._dirty.pop(chain_id, None)
            chain = ledger.chains.get(chain_id)
            if chain is None:
                continue
            reports = self._health.reports(chain, draft.replaced)
            complete = (*self._learned.complete(chain_id), *self._unchanged(ledger, chain, reports))
            following, reason = next_chain(chain, reports, complete)
            if following is not chain:
                ledger.put_chain(chain_id, following.members)
                draft.notes.append(f"chain {chain_id} version {following.version}: {reason}")
        draft.chains = {chain_id: None for chain_id, _ in ledger.chains.changes()}

    def _unchanged(self, ledger: Ledger, chain: Chain, reports: Mapping[TargetId, TargetReport]) -> Sequence[TargetId]:
        rows = ((one.target, ledger.targets.get(one.target)) for one in chain.members)
        return unchanged(chain, reports, {target: row.intact_until for target, row in rows if row is not None})

    def _drafted(self) -> tuple[Ledger, _Draft]:
        if self._ledger is None or self._draft is None:
            raise InvariantViolation("a transaction without a ledger, or without a draft")
        return self._ledger, self._draft

    def _commit(self, now_ns: int, ledger: Ledger, draft: _Draft) -> None:
        nodes = list(ledger.nodes.changes())
        drained = [ledger.chain_of(target) for target, _ in ledger.targets.changes()]
        for chain_id, chain in ledger.chains.changes():
            if chain is not None:
                self._learned.committed(ledger.chains.committed.get(chain_id), chain)
        sessions = dict(ledger.sessions.changes())
        ledger.commit()
        for node_id, node in nodes:
            if node is None:
                self._health.forget(node_id)
            else:
                self._health.started(node_id, node.incarnation, ledger.state.version, now_ns)
        self._book.committed(sessions, now_ns)
        if self._keys is not None:
            self._keys.committed(now_ns)
        self._draft = None
        self._mark_dirty(list(draft.chains))
        self._mark_dirty([chain for chain in drained if chain is not None])
        self._conclude(draft)

    def _conclude(self, draft: _Draft) -> None:
        for text in draft.notes:
            self._log_decision(text)
        for request_id, answer in draft.replies:
            self._reply(request_id, answer)

    def _drop(self, ledger: Ledger, draft: _Draft, reason: str) -> None:
        ledger.rollback()
        self._draft = None
        self._mark_dirty(list(draft.chains))
        refusal = _manager_error(Busy(f"the store of the manager did not commit the change ({reason}); try again"))
        for request_id, _ in draft.replies:
            self._reply(request_id, refusal)

    # --- small things ---

    def _mark_dirty(self, chains: list[ChainId]) -> None:
        self._dirty.update(dict.fromkeys(chains))

    def _reply(self, request_id: int, answer: Answer) -> None:
        self._effects.append(Reply(request_id, answer))

    def _log_decision(self, text: str) -> None:
        self._effects.append(LogDecision(text))


def _manager_error(error: FireflyerError) -> ManagerError:
    return ManagerError(*error_to_wire(error))
