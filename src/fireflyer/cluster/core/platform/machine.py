"""The platform's manager: which task runs where, and what becomes of it. A pure machine; a shell performs its effects.

    Submitted, Commanded ──queue──┐
    Synced ──> heard, dirty nodes ┼─> draft ──Transact──> Committed   it holds; answers, orders, changes go out
    Tick ──> deadlines, scheduler ┘                    ├> Failed      dropped; who asked is told to ask again
                                                       ├> Unknown     the same transaction again
                                                       └> Refused     no longer the leader: all memory is dropped

Several run over one key-value store, and one leads by the lease (`kvstore.core.lease`); the others name it. A leader
has all rows in memory (`store.ledger`), one draft at a time, and one transaction for each. What comes while that is
under way is the next draft. Nothing leaves before it is committed, so what was ordered is always in the rows: a leader
that is killed in between is followed by one that orders the same.

Every transaction is conditional on the lease, and on the row that the one before it wrote: so one of which nobody knows
whether it was committed can come through late only if nothing came after it.

What nodes say is kept as it is (`heard`), and looked at again by each draft: nothing is lost with a draft that fails.
"""

from __future__ import annotations

from collections import deque
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
from fireflyer.cluster.core.platform.leading import Leading
from fireflyer.cluster.core.platform.messages import (
    LEASE_KEY,
    MAX_PENDING,
    Answer,
    Changed,
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
    StepDown,
    Submitted,
    Synced,
    Tick,
    TookLead,
)
from fireflyer.cluster.core.platform.store.ledger import RANGES, Ledger
from fireflyer.cluster.core.platform.views import ClusterView, NodeView, RunView, TaskView, UserView, Why
from fireflyer.cluster.schema.sync import Orders
from fireflyer.cluster.schema.tasks import TaskSpec, TaskState
from fireflyer.kvstore.core.fenced import (
    Committed,
    Failed,
    LeaseCondition,
    Outcome,
    OutcomeUnknown,
    PreconditionFailed,
    Transact,
)
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
    order: Transact | None = None
    in_doubt: bool = False
    """An attempt ended without an answer: it may still come through."""
    resting: bool = False
    """Waits for the next tick to be tried again."""


class PlatformMachine:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lease = LeaseMachine(LEASE_KEY, settings.holder, settings.address, settings.lease_ns)
        self._numbers = 0
        self._effects: list[Effect] = []
        self._queue: deque[Submitted | Commanded] = deque()
        self._held: LeaseCondition | None = None
        self._loading: int | None = None
        self._loaded: list[tuple[bytes, bytes]] = []
        self._ranges_read = 0
        self._resting = False
        self._leading: Leading | None = None
        self._draft: _Draft | None = None
        self._ticked_ns: int | None = None
        self._wall_ns: int | None = None
        self._leaving = False

    @property
    def term(self) -> int:
        """Of the lease that this manager holds; 0 for the others."""
        return self._held.term if self._held is not None else 0

    @property
    def leader_address(self) -> str:
        """Of the one that leads, as it was last seen; empty if nobody was."""
        return self._lease.primary_address

    @property
    def left(self) -> bool:
        """After `Leave`: nothing is under way."""
        return self._leaving and self._draft is None and self._lease.left

    def may_act(self, now_ns: int) -> bool:
        """Whether its answers and orders count."""
        return self._leading is not None and self._lease.may_act(now_ns)

    def handle(self, now_ns: int, event: Event) -> list[Effect]:
        """Raises `DataCorruption` and `InvariantViolation`, upon which the process must end."""
        match event:
            case Tick():
                self._on_tick(now_ns, event)
            case Submitted() | Commanded():
                self._on_request(now_ns, event)
            case Synced():
                self._on_sync(now_ns, event)
            case Copied(until):
                if self._leading is not None:
                    self._leading.copied = max(self._leading.copied, until)
            case Leave():
                self._leaving = True
            case Committed() | PreconditionFailed() | Failed() | OutcomeUnknown():
                self._on_outcome(now_ns, event)
        self._advance(now_ns)
        effects, self._effects = self._effects, []
        return effects

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
        return tuple(self._lead(now_ns).show.nodes(now_ns, after=after, limit=limit))

    def node(self, name: str, now_ns: int) -> NodeView:
        leading = self._lead(now_ns)
        row = leading.ledger.nodes.committed.get(name)
        if row is None:
            raise NotFound(f"there is no node {name}")
        return leading.show.node(row, now_ns)

    def users(self, now_ns: int) -> tuple[UserView, ...]:
        return tuple(self._lead(now_ns).show.users())

    def cluster(self, now_ns: int) -> ClusterView:
        return self._lead(now_ns).show.cluster(self.time_ns(now_ns), now_ns)

    # --- what comes in ---

    def _on_tick(self, now_ns: int, tick: Tick) -> None:
        self._resting, self._wall_ns = False, tick.wall_ns
        slept_ns = now_ns - self._ticked_ns if self._ticked_ns is not None else 0
        self._ticked_ns = now_ns
        if self._leading is not None:
            self._leading.tick(now_ns, slept=slept_ns > self._settings.lease_ns // 2)
        if self._draft is not None and self._draft.resting:
            self._draft.resting = False
            self._attempt(self._draft)

    def _on_request(self, now_ns: int, asked: Submitted | Commanded) -> None:
        if not self.may_act(now_ns) or self._leaving:
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
        if self._lease.outcome(now_ns, outcome):
            return
        if outcome.number == self._loading:
            self._loading = None
            self._on_read(now_ns, outcome)
        elif self._draft is not None and self._draft.order is not None and outcome.number == self._draft.order.number:
            self._on_draft(now_ns, self._draft, outcome)

    # --- beginning and ceasing to lead ---

    def _on_read(self, now_ns: int, outcome: Outcome) -> None:
        if isinstance(outcome, PreconditionFailed):
            self._lease.seen(now_ns, outcome.lease)
        if not isinstance(outcome, Committed):
            self._resting = True
            return
        self._loaded += outcome.rows
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

    def _follow_lease(self) -> None:
        """Whatever was known or under way belongs to the term in which it began."""
        if self._lease.held == self._held:
            return
        if self._held is not None:
            self._log_decision(f"leads no longer in term {self._held.term}")
        self._held, self._resting = self._lease.held, False
        self._forget("the lease is another one's")

    def _forget(self, reason: str) -> None:
        draft, self._draft = self._draft, None
        waiting = [answer.call for answer in (draft.answers if draft is not None else ())]
        for call in (*waiting, *(asked.call for asked in self._queue)):
            self._answer(call, NotLeader(self.leader_address))
        self._queue.clear()
        self._loading, self._loaded, self._ranges_read = None, [], 0
        if self._leading is not None:
            self._leading = None
            self._effects.append(StepDown(reason))

    def _advance(self, now_ns: int) -> None:
        self._follow_lease()
        if self._leaving and (self._draft is None or self._draft.in_doubt):
            self._forget("it is to end")
            self._lease.leave()
        order = self._lease.tick(now_ns, self._numbers + 1)
        if order is not None:
            self._numbers += 1
            self._effects.append(order)
        if self._held is None or self._resting or self._leaving:
            return
        if self._leading is None:
            if self._loading is None and self._wall_ns is not None:
                self._loading = self._number()
                self._effects.append(Transact(self._loading, held=self._held, read=RANGES[self._ranges_read]))
        elif self._draft is None and self.may_act(now_ns):
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
            self._conclude(leading, draft)
            return
        writes, before = pending
        draft.order = Transact(0, held=self._held, expect=(before,), write=writes)
        self._draft = draft
        self._attempt(draft)

    def _attempt(self, draft: _Draft) -> None:
        if draft.order is not None:
            draft.order = msgspec.structs.replace(draft.order, number=self._number())
            self._effects.append(draft.order)

    def _on_draft(self, now_ns: int, draft: _Draft, outcome: Outcome) -> None:
        leading = self._leading
        if leading is None or draft.order is None:
            raise InvariantViolation("a draft without a ledger")
        match outcome:
            case Committed():
                self._commit(leading, draft)
            case PreconditionFailed(_, _, found) if found == draft.order.write[-1:]:
                self._commit(leading, draft)
            case PreconditionFailed(_, lease, found):
                self._lease.seen(now_ns, lease)
                if found:
                    # The store has another past than ours (restored, edited): begin again from what it has.
                    self._forget("another process changed the rows of the platform; reading them again")
            case OutcomeUnknown():
                draft.in_doubt = draft.resting = True
            case Failed() if draft.in_doubt:
                draft.resting = True
            case Failed(_, reason):
                self._drop(now_ns, leading, draft, reason)

    def _commit(self, leading: Leading, draft: _Draft) -> None:
        self._draft = None
        first, changes = leading.ledger.commit()
        self._conclude(leading, draft)
        for place, change in enumerate(changes):
            self._effects.append(Changed(first + place, change.what, change.name, change.state))

    def _conclude(self, leading: Leading, draft: _Draft) -> None:
        self._effects += draft.answers
        for node in leading.changed_orders():
            self._effects.append(OrdersChanged(node))
        for text in leading.taken_notes():
            self._log_decision(text)

    def _drop(self, now_ns: int, leading: Leading, draft: _Draft, reason: str) -> None:
        self._draft, self._resting = None, True
        leading.rollback(now_ns)
        refused = Refused(*error_to_wire(Busy(f"the store did not commit the change ({reason}); try again")))
        for answer in draft.answers:
            self._answer(answer.call, refused)

    # --- small things ---

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _answer(self, call: int, result: Result) -> None:
        self._effects.append(Answer(call, result))

    def _log_decision(self, text: str) -> None:
        self._effects.append(LogDecision(text))
