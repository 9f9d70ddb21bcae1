"""The platform's manager: which task runs where, and what becomes of it. A pure machine; a shell performs its effects.

    Submitted, Commanded ──queue──┐
    Synced ──> heard, dirty nodes ┼─> draft ──Transact──> Written      it holds; answers, orders, changes go out
    Tick ──> deadlines, scheduler ┘                    ├> NotWritten   dropped; who asked is told to ask again
                                                       └> the lease, or the store, changed: all memory is dropped

Several run over one key-value store, and one leads (`kvstore.core.leadership`); the others name it. A leader
has all rows in memory (`store.ledger`), one draft at a time, and one transaction for each. What comes while that is
under way is the next draft. Nothing leaves before it is committed, so what was ordered is always in the rows: a leader
that is killed in between is followed by one that orders the same.

What nodes say is kept as it is (`heard`), and looked at again by each draft: nothing is lost with a draft that fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from fireflyer.base.errors import (
    Busy,
    InvariantViolation,
    NotFound,
    PermanentError,
    TransientError,
    Unreachable,
    UsageError,
    error_to_wire,
)
from fireflyer.cluster.core.platform.health_figures import HealthFigures
from fireflyer.cluster.core.platform.leading import Leading
from fireflyer.cluster.core.platform.messages import (
    LEASE_KEY,
    MAX_PENDING,
    Answer,
    Audited,
    Changed,
    ChecksChanged,
    Commanded,
    Copied,
    Effect,
    Event,
    Leave,
    LogDecision,
    NotLeader,
    OrdersChanged,
    Refused,
    Result,
    Settings,
    SlurmFollowed,
    StepDown,
    Submitted,
    Synced,
    Tick,
    TookLead,
    WebhookAsked,
)
from fireflyer.cluster.core.platform.slurm.messages import (
    JobNotSubmitted,
    JobSubmitted,
    SlurmSaid,
    SlurmSilent,
    WatchedJob,
    Work,
)
from fireflyer.cluster.core.platform.store.history import ClusterTotals
from fireflyer.cluster.core.platform.store.ledger import RANGES, Ledger
from fireflyer.cluster.core.platform.tally import Tally
from fireflyer.cluster.core.platform.views import (
    ClusterView,
    LimitUse,
    NodeView,
    QuotaView,
    RunView,
    TaskView,
    UserView,
    Why,
)
from fireflyer.cluster.core.platform.webhooks import Delivered
from fireflyer.cluster.schema.sync import Orders
from fireflyer.cluster.schema.tasks import TaskSpec, TaskState
from fireflyer.cluster.schema.webhooks import WebhookView
from fireflyer.kvstore.core.fenced import Committed, Failed, Item, Outcome, OutcomeUnknown, PreconditionFailed
from fireflyer.kvstore.core.leadership import Leadership, NotWritten, Read, StoreChanged, Written
from fireflyer.kvstore.core.lease import LeaseMachine

__all__ = ["PlatformMachine"]

MAX_BATCH: Final = 256
"""Submissions and commands of one draft."""
MAX_ROWS_PER_DRAFT: Final = 5000
"""With more, no further one is taken into it. One of them puts some 20,000 at most."""


@dataclass(slots=True)
class _Draft:
    """What one transaction changes, and who waits for it."""

    answers: list[Answer] = field(default_factory=list)


class PlatformMachine:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        lease = LeaseMachine(LEASE_KEY, settings.holder, settings.address, settings.lease_ns)
        self._leadership = Leadership(lease, settings.lease_ns, lambda order: self._effects.append(order))
        self._effects: list[Effect] = []
        self._queue: deque[Submitted | Commanded | WebhookAsked | Audited] = deque()
        self._loaded: list[tuple[bytes, bytes]] = []
        self._ranges_read = 0
        self._leading: Leading | None = None
        self._draft: _Draft | None = None
        self._wall_ns: int | None = None

    @property
    def term(self) -> int:
        """Of the lease that this manager holds; 0 for the others."""
        return self._leadership.term

    @property
    def leader_address(self) -> str:
        """Of the one that leads, as it was last seen; empty if nobody was."""
        return self._leadership.address

    @property
    def left(self) -> bool:
        """After `Leave`: nothing is under way."""
        return self._draft is None and self._leadership.left

    def may_act(self, now_ns: int) -> bool:
        """Whether its answers and orders count."""
        return self._leading is not None and self._leadership.may_act(now_ns)

    def handle(self, now_ns: int, event: Event) -> list[Effect]:
        """Raises `DataCorruption` and `InvariantViolation`, upon which the process must end."""
        match event:
            case Tick():
                self._on_tick(now_ns, event)
            case Submitted() | Commanded() | WebhookAsked() | Audited():
                self._on_request(now_ns, event)
            case Synced():
                self._on_sync(now_ns, event)
            case Delivered() | Copied():
                if self._leading is not None:
                    self._on_done(self._leading, event)
            case ChecksChanged(checks):
                self._settings.checking.now = checks
            case SlurmSaid() | SlurmSilent() | JobSubmitted() | JobNotSubmitted():
                if self._leading is not None:
                    self._leading.hear_slurm(event)
            case Leave():
                self._leadership.leave()
            case Committed() | PreconditionFailed() | Failed() | OutcomeUnknown():
                self._on_outcome(now_ns, event)
        self._advance(now_ns)
        effects, self._effects = self._effects, []
        return effects

    def _on_done(self, leading: Leading, event: Delivered | Copied) -> None:
        if isinstance(event, Copied):
            leading.copied = max(leading.copied, event.until)
        else:
            leading.webhooks.hear(event)

    # --- reading ---

    def orders_for(self, node: str, now_ns: int) -> Orders | None:
        """None: this manager does not lead, or has not heard the node."""
        if self._leading is None or not self.may_act(now_ns):
            return None
        return self._leading.orders.of(node) if self._leading.heard.ever(node) else None

    def _lead(self, now_ns: int) -> Leading:
        if self._leading is None or not self.may_act(now_ns):
            raise Unreachable(f"this manager does not lead; ask {self.leader_address or 'again in some seconds'}")
        return self._leading

    def time_ns(self, now_ns: int) -> int:
        """Cluster time."""
        return self._lead(now_ns).ledger.time_ns(now_ns)

    def task(self, task: int, now_ns: int) -> TaskView:
        show = self._lead(now_ns).show
        return show.task(show.row(task), self.time_ns(now_ns), with_spec=True)

    def runs(self, task: int, now_ns: int) -> tuple[RunView, ...]:
        show = self._lead(now_ns).show
        return tuple(show.runs(show.row(task)))

    def tasks(
        self,
        now_ns: int,
        *,
        user: str = "",
        states: tuple[TaskState, ...] = (),
        name: str = "",
        before: int | None = None,
        limit: int = 1000,
    ) -> tuple[TaskView, ...]:
        """The newest first; `before`: with smaller ids than this."""
        show = self._lead(now_ns).show
        time_ns = self.time_ns(now_ns)
        return tuple(show.tasks(time_ns, user=user, states=states, name=name, before=before, limit=limit))

    def run_place(self, task: int, run: int, now_ns: int) -> tuple[str, str]:
        """Token of the run, and the node of its launcher. Raises `NotFound`."""
        row = self._lead(now_ns).ledger.runs.committed.get((task, run))
        if row is None:
            raise NotFound(f"there is no run {run} of task {task}, or it ended long ago")
        return row.token, row.nodes[0]

    def snapshots(self, now_ns: int) -> tuple[tuple[str, str], ...]:
        """User and snapshot of all unfinished tasks that have one."""
        ledger = self._lead(now_ns).ledger
        rows = (row for row in ledger.tasks.committed.values() if row.state is not TaskState.FINISHED)
        named = ((row.user, ledger.submissions.committed[row.submission].spec.program.snapshot) for row in rows)
        return tuple(dict.fromkeys(pair for pair in named if pair[1]))

    def why(self, task: int, now_ns: int) -> Why:
        leading = self._lead(now_ns)
        why = leading.show.why(leading.show.row(task), self.time_ns(now_ns))
        unsettled = leading.unsettled(now_ns)
        return msgspec.structs.replace(why, text=f"{why.text}; {unsettled}") if unsettled else why

    def would_start(self, user: str, group: str, spec: TaskSpec, now_ns: int) -> Why:
        """What would become of a submission."""
        return self._lead(now_ns).show.would_start(user, group, spec, self.time_ns(now_ns))

    def nodes(self, now_ns: int, *, after: str = "", limit: int = 1 << 20) -> tuple[NodeView, ...]:
        """By name, those behind `after`."""
        show, time_ns = self._lead(now_ns).show, self.time_ns(now_ns)
        return tuple(show.nodes(time_ns, now_ns, after=after, limit=limit))

    def node(self, name: str, now_ns: int) -> NodeView:
        return self._lead(now_ns).show.one_node(name, self.time_ns(now_ns), now_ns)

    def users(self, now_ns: int) -> tuple[UserView, ...]:
        return tuple(self._lead(now_ns).show.users())

    def webhooks(self, user: str, now_ns: int) -> tuple[WebhookView, ...]:
        """Of one user, or of all where that is empty."""
        return self._lead(now_ns).webhooks.views(user, self.time_ns(now_ns))

    def totals(self, now_ns: int) -> ClusterTotals:
        """Node-time until now."""
        return self._lead(now_ns).totals(self.time_ns(now_ns))

    def outbox(self, now_ns: int) -> tuple[str, int, int]:
        """The word of the cluster, the first row of the outbox that was not cleared, and the next that will come."""
        state = self._lead(now_ns).ledger.state
        return state.cluster, state.outbox_first, state.outbox_next

    def quota(self, user: str, group: str, now_ns: int) -> QuotaView:
        return self._lead(now_ns).show.quota(user, group)

    def limits(self, now_ns: int) -> tuple[LimitUse, ...]:
        return tuple(self._lead(now_ns).show.limits())

    def cluster(self, now_ns: int) -> ClusterView:
        return self._lead(now_ns).show.cluster(self.time_ns(now_ns), now_ns)

    def node_states(self, now_ns: int) -> dict[str, int]:
        return self._lead(now_ns).show.node_states(now_ns)

    def health_states(self, now_ns: int) -> dict[str, int]:
        """How many nodes are in each state of repair, and how many of them the breaker holds (`held`)."""
        return self._lead(now_ns).show.health_states()

    def health_figures(self, now_ns: int) -> HealthFigures:
        return self._lead(now_ns).show.health_figures()

    def agents_heard(self, now_ns: int) -> int:
        return self._lead(now_ns).show.agents_heard(now_ns)

    def tally(self, now_ns: int) -> Tally:
        """Since this manager began to lead."""
        return self._lead(now_ns).tally

    def slurm_jobs(self, now_ns: int) -> tuple[WatchedJob, ...]:
        """Of which Slurm is to be asked; empty for another engine."""
        return self._lead(now_ns).slurm_jobs()

    def slurm_work(self, now_ns: int) -> tuple[Work, ...]:
        return self._lead(now_ns).slurm_work(now_ns)

    # --- what comes in ---

    def _on_tick(self, now_ns: int, tick: Tick) -> None:
        self._wall_ns = tick.wall_ns
        slept_ns = self._leadership.tick(now_ns)
        if self._leading is not None:
            self._leading.tick(now_ns, slept=slept_ns > 0)

    def _on_request(self, now_ns: int, asked: Submitted | Commanded | WebhookAsked | Audited) -> None:
        if not self.may_act(now_ns) or self._leadership.leaving:
            self._answer(asked.call, NotLeader(self.leader_address))
        elif len(self._queue) >= MAX_PENDING:
            words = f"the manager is overloaded: {MAX_PENDING} requests are waiting; try again later"
            self._answer(asked.call, Refused(*error_to_wire(Busy(words))))
        else:
            self._queue.append(asked)

    def _on_sync(self, now_ns: int, event: Synced) -> None:
        leading = self._leading
        if leading is None or not leading.hear(event.node, event.sync, now_ns):
            return
        if leading.orders.refresh(event.node):
            self._effects.append(OrdersChanged(event.node))

    def _on_outcome(self, now_ns: int, outcome: Outcome) -> None:
        match self._leadership.outcome(now_ns, outcome):
            case Read(rows):
                self._on_read(now_ns, rows)
            case Written():
                self._commit(now_ns, *self._drafted())
            case NotWritten(reason):
                self._drop(now_ns, *self._drafted(), reason)
            case StoreChanged():
                self._forget("another process changed the rows of the platform; reading them again")

    # --- beginning and ceasing to lead ---

    def _on_read(self, now_ns: int, rows: Sequence[Item]) -> None:
        self._loaded += rows
        self._ranges_read += 1
        if self._ranges_read < len(RANGES) or self._wall_ns is None:
            return
        settings, wall_ns = self._settings, self._wall_ns
        cluster, history = settings.cluster, settings.history
        ledger = Ledger(term=self.term, cluster=cluster, history=history, wall_ns=wall_ns, now_ns=now_ns)
        ledger.load(self._loaded)
        ledger.begin()
        self._loaded = []
        self._leading = Leading(ledger, settings, now_ns)
        self._effects.append(TookLead(self.term))
        self._log_decision(f"leads in term {self.term} with {len(ledger.tasks)} tasks and {len(ledger.nodes)} nodes")

    def _cease(self, ended_term: int) -> None:
        """Whatever was known or under way belongs to the term in which it began."""
        if ended_term:
            self._log_decision(f"leads no longer in term {ended_term}")
        self._forget("it is to end" if self._leadership.leaving else "the lease is another one's")

    def _forget(self, reason: str) -> None:
        draft, self._draft = self._draft, None
        waiting = [answer.call for answer in (draft.answers if draft is not None else ())]
        for call in (*waiting, *(asked.call for asked in self._queue)):
            self._answer(call, NotLeader(self.leader_address))
        self._queue.clear()
        self._loaded, self._ranges_read = [], 0
        if self._leading is not None:
            self._leading = None
            self._effects.append(StepDown(reason))

    def _advance(self, now_ns: int) -> None:
        if not self._leadership.advance(now_ns, self._cease) or self._leadership.busy:
            return
        if self._leading is None:
            if self._wall_ns is not None:
                self._leadership.read(RANGES[self._ranges_read])
        elif self.may_act(now_ns):
            self._plan(now_ns, self._leading)

    # --- drafts ---

    def _plan(self, now_ns: int, leading: Leading) -> None:
        """One draft of all that waits. Nothing is sent if it comes out empty."""
        draft, ledger = _Draft(), leading.ledger
        leading.begin(now_ns)
        while self._queue and len(draft.answers) < MAX_BATCH and ledger.draft_rows() < MAX_ROWS_PER_DRAFT:
            asked = self._queue.popleft()
            try:
                result: Result = leading.carry_out(asked, now_ns)
            except (UsageError, TransientError, PermanentError) as error:
                result = Refused(*error_to_wire(error))
            draft.answers.append(Answer(asked.call, result))
        leading.decide(now_ns)
        pending = ledger.pending(ledger.time_ns(now_ns))
        if pending is None:
            self._conclude(now_ns, leading, draft)
            return
        self._draft = draft
        self._leadership.write(*pending)

    def _drafted(self) -> tuple[Leading, _Draft]:
        if self._leading is None or self._draft is None:
            raise InvariantViolation("a transaction without a leader, or without a draft")
        return self._leading, self._draft

    def _commit(self, now_ns: int, leading: Leading, draft: _Draft) -> None:
        self._draft = None
        leading.tally.take(leading.ledger)
        first, changes = leading.ledger.commit()
        self._conclude(now_ns, leading, draft)
        for place, change in enumerate(changes):
            self._effects.append(Changed(first + place, change.what, change.name, change.state))

    def _conclude(self, now_ns: int, leading: Leading, draft: _Draft) -> None:
        self._effects += draft.answers
        leading.webhooks.committed()
        if self.may_act(now_ns):
            self._effects += leading.webhooks.due(leading.ledger.time_ns(now_ns))
        for node in leading.changed_orders():
            self._effects.append(OrdersChanged(node))
        followed = leading.followed_slurm()
        if followed:
            self._effects.append(SlurmFollowed(followed))
        for text in leading.taken_notes():
            self._log_decision(text)

    def _drop(self, now_ns: int, leading: Leading, draft: _Draft, reason: str) -> None:
        self._draft = None
        leading.rollback(now_ns)
        refused = Refused(*error_to_wire(Busy(f"the store did not commit the change ({reason}); try again")))
        for answer in draft.answers:
            self._answer(answer.call, refused)

    # --- small things ---

    def _answer(self, call: int, result: Result) -> None:
        self._effects.append(Answer(call, result))

    def _log_decision(self, text: str) -> None:
        self._effects.append(LogDecision(text))
