"""The manager's machine as the parts of its process use it: events go in with a number, answers come back by it.

    HTTP ──submit, command, views──┐                       ┌──> Answer ──> who waits for it
    agents ──sync (held)───────────┼──> PlatformMachine ───┼──> OrdersChanged ──> the held call of that node
    lease, transactions ───────────┘                       └──> Changed ──> whoever follows changes

Views are read from the machine's memory, which is what was committed, and only while this manager leads.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, Protocol

from fireflyer.base.decoding import convert
from fireflyer.base.errors import Busy, InvariantViolation, NotFound, UsageError, error_from_wire
from fireflyer.base.histogram import Histogram
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.platform import messages
from fireflyer.cluster.core.platform.access import check
from fireflyer.cluster.core.platform.commands import Command, DrainNode, ResumeNode
from fireflyer.cluster.core.platform.health_figures import HealthFigures
from fireflyer.cluster.core.platform.machine import PlatformMachine
from fireflyer.cluster.core.platform.messages import LEASE_KEY, Effect, Event, Leave, Settings, Tick
from fireflyer.cluster.core.platform.node_checking import Checks
from fireflyer.cluster.core.platform.slurm.messages import SlurmEvent, WatchedJob, Work
from fireflyer.cluster.core.platform.store.history import ClusterTotals
from fireflyer.cluster.core.platform.tally import Tally
from fireflyer.cluster.core.platform.views import (
    ClusterView,
    LimitUse,
    NodeView,
    QuotaView,
    RunView,
    TaskAnswer,
    TaskPage,
    TaskReason,
    TaskReasons,
    TaskView,
    UserView,
    Why,
)
from fireflyer.cluster.core.platform.webhooks import (
    AddWebhook,
    Deliver,
    RemoveWebhook,
    SendTest,
    WebhookChange,
)
from fireflyer.cluster.manager.changes import Changes
from fireflyer.cluster.manager.tickets import Tickets
from fireflyer.cluster.manager.webhooks import WebhookSender
from fireflyer.cluster.schema.api import Change, Commanded, Submitted
from fireflyer.cluster.schema.sync import HOLD_NS, Orders, Sync
from fireflyer.cluster.schema.tasks import TaskSpec, TaskState
from fireflyer.cluster.schema.webhooks import NewWebhook, ShownWebhook, WebhookView
from fireflyer.kvstore import Engine
from fireflyer.kvstore.core.fenced import Committed, Failed, Outcome, OutcomeUnknown, PreconditionFailed
from fireflyer.kvstore.fenced_driver import FencedDriver
from fireflyer.runtime.clock import BootClock

__all__ = ["Elsewhere", "Platform", "TaskProgress"]

_log = logging.getLogger(__name__)
MAX_WAITING: Final = 4096
"""Submissions and commands that wait for their transaction."""
ANSWER_S: Final = 20.0
_NONCE_BYTES: Final = 16
_TRANSACTION_BOUNDS_S: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5)
_OUTCOMES: Final[dict[type, str]] = {
    Committed: "committed",
    PreconditionFailed: "fenced",
    Failed: "failed",
    OutcomeUnknown: "unknown",
}


class Elsewhere(Busy):
    """Another manager leads, at `address`; empty where nobody knows who."""

    def __init__(self, address: str) -> None:
        super().__init__(
            f"this manager does not lead; ask {address}" if address else "no manager leads yet; try again in a moment"
        )
        self.address = address


class SlurmNodes(Protocol):
    """Raise `PermanentError` where Slurm refuses, `TransientError` where it does not answer."""

    async def drain(self, node: str, reason: str) -> None: ...

    async def resume(self, node: str) -> None: ...


class LeadFigures:
    """What this manager counts of its lead and its transactions."""

    def __init__(self) -> None:
        self.leads_begun = 0
        self.transactions: Counter[str] = Counter()
        self.transaction_s = Histogram(_TRANSACTION_BOUNDS_S)

    def transacted(self, outcome: Outcome, took_ns: int) -> None:
        self.transactions[_OUTCOMES[type(outcome)]] += 1
        self.transaction_s.observe(took_ns / SECOND)


class TaskProgress(NamedTuple):
    view: TaskView
    runs: tuple[RunView, ...]
    time_ns: int
    """Cluster time."""


class Platform:
    """Lives in the loop in which it is made."""

    def __init__(
        self, settings: Settings, engine: Engine, tickets: Tickets, changes: Changes, sender: WebhookSender
    ) -> None:
        self.figures = LeadFigures()
        self._machine = PlatformMachine(settings)
        self._clock = BootClock()
        self._tickets = tickets
        self._changes = changes
        self._driver: FencedDriver[Event, Effect] = FencedDriver(
            self._machine,
            self._perform,
            engine=engine,
            lease_key=LEASE_KEY,
            lease_ns=settings.lease_ns,
            tick=lambda: Tick(time.time_ns()),
            leave=Leave(),
            on_transaction=self.figures.transacted,
        )
        self._calls = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[messages.Result]] = {}
        self._held: dict[str, asyncio.Event] = {}
        self._sender = sender
        self._told_slurm: list[tuple[SlurmEvent, asyncio.Future[None]]] = []
        self.slurm_nodes: SlurmNodes | None = None
        """Where the nodes are Slurm's."""

    async def run(self) -> None:
        """Until it is cancelled: then the lease is given up. Raises what the machine or the store cannot live with."""
        try:
            await self._driver.run()
        finally:
            self._dismiss()

    @property
    def leads(self) -> bool:
        return self._machine.may_act(self._clock.now_ns())

    @property
    def leader_address(self) -> str:
        return self._machine.leader_address

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    # --- changes ---

    async def submit(
        self,
        user: str,
        roles: tuple[str, ...],
        specs: tuple[TaskSpec, ...],
        key: str,
        group: str = "",
        *,
        address: str = "",
    ) -> Submitted:
        """Raises `UsageError`, `PermissionDenied`, `Exists`, `NoSpace`, `Elsewhere`."""

        def event(call: int) -> Event:
            return messages.Submitted(
                call=call, user=user, group=group, roles=roles, address=address, key=key, specs=specs
            )

        result = await self._ask(event)
        if not isinstance(result, messages.Submission):
            raise InvariantViolation(f"a submission was answered by {type(result).__name__}")
        return Submitted(result.tasks, result.repeated)

    async def command(self, user: str, roles: tuple[str, ...], command: Command, *, address: str = "") -> Commanded:
        """Raises `UsageError`, `PermissionDenied`, `NotFound`, `Elsewhere`."""
        if self.slurm_nodes is not None and isinstance(command, DrainNode | ResumeNode):
            return await self._command_slurm(self.slurm_nodes, user, roles, command)

        def event(call: int) -> Event:
            return messages.Commanded(call=call, user=user, roles=roles, address=address, command=command)

        result = await self._ask(event)
        if not isinstance(result, messages.Done):
            raise InvariantViolation(f"a command was answered by {type(result).__name__}")
        return Commanded(result.text)

    async def add_webhook(self, user: str, roles: tuple[str, ...], new: NewWebhook) -> ShownWebhook:
        """Raises `UsageError`, `PermissionDenied`, `Exists`, `Elsewhere`."""
        self._sender.check(new.url)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        done = await self._change_webhook(user, roles, AddWebhook(new, nonce))
        return ShownWebhook(done.number, self._sender.secret_of(user, nonce))

    async def remove_webhook(self, user: str, roles: tuple[str, ...], number: int) -> Commanded:
        """Raises `NotFound`, `Elsewhere`."""
        return Commanded((await self._change_webhook(user, roles, RemoveWebhook(number))).text)

    async def test_webhook(self, user: str, roles: tuple[str, ...], number: int) -> Commanded:
        """Raises `NotFound`, `Busy`, `Elsewhere`."""
        return Commanded((await self._change_webhook(user, roles, SendTest(number))).text)

    async def _change_webhook(self, user: str, roles: tuple[str, ...], change: WebhookChange) -> messages.Done:
        def event(call: int) -> Event:
            return messages.WebhookAsked(call=call, user=user, roles=roles, change=change)

        result = await self._ask(event)
        if not isinstance(result, messages.Done):
            raise InvariantViolation(f"a change of a webhook was answered by {type(result).__name__}")
        return result

    async def audit(self, user: str, what: str, target: str, text: str) -> None:
        """Returns when it is durable that `user` did this. Raises `Elsewhere`, `Busy`."""

        def event(call: int) -> Event:
            return messages.Audited(call=call, user=user, what=what, target=target, text=text)

        await self._ask(event)

    async def _command_slurm(
        self, slurm: SlurmNodes, user: str, roles: tuple[str, ...], command: DrainNode | ResumeNode
    ) -> Commanded:
        """Slurm is the truth about its nodes: it is asked at once, and what it answers is the answer."""
        check(command, user, roles, None)
        self.node(command.node)
        if isinstance(command, DrainNode):
            await slurm.drain(command.node, f"{user}: {command.reason}")
            text = f"Slurm drains node {command.node}: it gets no new job"
        else:
            await slurm.resume(command.node)
            text = f"Slurm gives jobs to node {command.node} again"
        _log.info("%s: %s", user, text)
        return Commanded(text)

    async def _ask(self, event: Callable[[int], Event]) -> messages.Result:
        if self._driver.leaving:
            raise Elsewhere(self.leader_address)
        if len(self._waiting) >= MAX_WAITING:
            raise Busy(f"{MAX_WAITING} requests wait for this manager; try again later", retry_ns=SECOND)
        call = next(self._calls)
        answer: asyncio.Future[messages.Result] = asyncio.get_running_loop().create_future()
        self._waiting[call] = answer
        try:
            self._driver.post(event(call))
            async with asyncio.timeout(ANSWER_S):
                result = await answer
        except TimeoutError:
            raise Busy("the store does not answer; whether it was done is not known: ask with the same key") from None
        finally:
            del self._waiting[call]
        if isinstance(result, messages.Refused):
            raise error_from_wire(result.code, result.message)
        if isinstance(result, messages.NotLeader):
            raise Elsewhere(result.address)
        return result

    # --- agents ---

    async def sync(self, node: str, said: Sync) -> Orders:
        """Holds the call until there is something new for the node, for `HOLD_NS` at most. Raises `Elsewhere`."""
        self.require_lead()
        self._driver.post(messages.Synced(node, said))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HOLD_NS / SECOND):
                while True:
                    news = self._held.setdefault(node, asyncio.Event())
                    orders = self._orders(node)
                    if orders is not None and (orders.term, orders.version) != (said.term, said.heard):
                        return await self._tickets.add(orders)
                    await news.wait()
        orders = self._orders(node)
        if orders is None:
            raise Elsewhere(self.leader_address)
        return await self._tickets.add(orders)

    def _orders(self, node: str) -> Orders | None:
        return self._machine.orders_for(node, self.require_lead())

    # --- Slurm: raise `Elsewhere` ---

    def slurm_jobs(self) -> tuple[WatchedJob, ...]:
        return self._machine.slurm_jobs(self.require_lead())

    def slurm_work(self) -> tuple[Work, ...]:
        return self._machine.slurm_work(self.require_lead())

    async def tell_slurm(self, event: SlurmEvent) -> None:
        """Returns when what follows from it is committed."""
        self.require_lead()
        followed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        told = (event, followed)
        self._told_slurm.append(told)
        try:
            self._driver.post(event)
            await followed
        finally:
            self._told_slurm.remove(told)

    # --- views: raise `Elsewhere`, and `NotFound` ---

    def task(self, number: int) -> TaskAnswer:
        now_ns = self.require_lead()
        view = self._machine.task(number, now_ns)
        return TaskAnswer(view, self._machine.runs(number, now_ns), self._machine.why(number, now_ns))

    def progress(self, number: int) -> TaskProgress:
        """How far a task is, without why."""
        now_ns = self.require_lead()
        view, time_ns = self._machine.task(number, now_ns), self._machine.time_ns(now_ns)
        return TaskProgress(view, self._machine.runs(number, now_ns), time_ns)

    def why(self, number: int) -> str:
        return self._machine.why(number, self.require_lead()).text

    def reasons(self, numbers: Iterable[int]) -> TaskReasons:
        """One that is not known refuses nothing: the others have a reason all the same."""
        now_ns = self.require_lead()
        found: list[TaskReason] = []
        for number in dict.fromkeys(numbers):
            try:
                why = self._machine.why(number, now_ns)
            except NotFound:
                found.append(TaskReason(number, None))
            else:
                found.append(TaskReason(number, why))
        return TaskReasons(tuple(found))

    def run_place(self, task: int, run: int) -> tuple[str, str]:
        """Token of the run, and the node of its launcher."""
        return self._machine.run_place(task, run, self.require_lead())

    def would_start(self, user: str, group: str, spec: TaskSpec) -> Why:
        """When the task would start if it was submitted now. Raises `UsageError` where it could not be."""
        return self._machine.would_start(user, group, spec, self.require_lead())

    def tasks(self, *, user: str, state: str, name: str, before: int | None, limit: int) -> TaskPage:
        """Newest first, those below `before`. `state`: one, `unfinished`, or empty. Raises `UsageError`."""
        found = self._machine.tasks(
            self.require_lead(), user=user, states=_states(state), name=name, before=before, limit=limit + 1
        )
        return TaskPage(found[:limit], found[limit - 1].id if len(found) > limit else None)

    def nodes(self, *, after: str, limit: int) -> tuple[NodeView, ...]:
        return self._machine.nodes(self.require_lead(), after=after, limit=limit)

    def node(self, name: str) -> NodeView:
        return self._machine.node(name, self.require_lead())

    def snapshots(self) -> tuple[tuple[str, str], ...]:
        """User and snapshot of all unfinished tasks that have one."""
        return self._machine.snapshots(self.require_lead())

    def runs_snapshot(self, node: str, snapshot: str) -> bool:
        """Whether the node is to run a task that has this snapshot."""
        orders = self._machine.orders_for(node, self.require_lead())
        if orders is None:
            raise Busy(f"this manager has not heard {node} yet; ask again")
        return bool(snapshot) and any(run.snapshot == snapshot and run.wanted == "run" for run in orders.runs)

    def term(self) -> int:
        """Of this manager's lead."""
        self.require_lead()
        return self._machine.term

    def users(self) -> tuple[UserView, ...]:
        return self._machine.users(self.require_lead())

    def webhooks(self, user: str) -> tuple[WebhookView, ...]:
        """Of one user, or of all where that is empty."""
        return self._machine.webhooks(user, self.require_lead())

    def quota(self, user: str, group: str) -> QuotaView:
        return self._machine.quota(user, group, self.require_lead())

    def limits(self) -> tuple[LimitUse, ...]:
        return self._machine.limits(self.require_lead())

    def cluster(self) -> ClusterView:
        return self._machine.cluster(self.require_lead())

    # --- metrics: raise `Elsewhere` ---

    def node_states(self) -> dict[str, int]:
        return self._machine.node_states(self.require_lead())

    def health_states(self) -> dict[str, int]:
        return self._machine.health_states(self.require_lead())

    def health_figures(self) -> HealthFigures:
        return self._machine.health_figures(self.require_lead())

    @property
    def agents_heard(self) -> int:
        return self._machine.agents_heard(self.require_lead())

    def tally(self) -> Tally:
        """Since this manager began to lead."""
        return self._machine.tally(self.require_lead())

    # --- the history ---

    def totals(self) -> ClusterTotals:
        """Node-time until now."""
        return self._machine.totals(self.require_lead())

    def outbox(self) -> tuple[str, int, int]:
        """The word of the cluster, the first row that was not cleared, and the next that will come."""
        return self._machine.outbox(self.require_lead())

    def copied(self, until: int) -> None:
        """Rows of the outbox below are in the history."""
        self._driver.post(messages.Copied(until))

    def check_nodes(self, checks: Checks) -> None:
        """As this says, from now on."""
        self._driver.post(messages.ChecksChanged(checks))

    def require_lead(self) -> int:
        """The time of the machine's clock. Raises `Elsewhere`."""
        now_ns = self._clock.now_ns()
        if not self._machine.may_act(now_ns):
            raise Elsewhere(self.leader_address)
        return now_ns

    # --- effects ---

    def _perform(self, effect: Effect) -> None:
        match effect:
            case messages.Answer(call, result):
                waits = self._waiting.get(call)
                if waits is not None and not waits.done():
                    waits.set_result(result)
            case messages.OrdersChanged(node):
                self._wake(node)
            case messages.Changed(number, what, name, state):
                change = {"number": number, "what": what, "name": name, "state": state}
                self._changes.add(convert(change, Change))
            case messages.SlurmFollowed(events):
                for told, followed in self._told_slurm:
                    if not followed.done() and any(event is told for event in events):
                        followed.set_result(None)
            case Deliver():
                self._sender.deliver(effect, self._driver.post)
            case messages.LogDecision(text):
                _log.info("%s", text)
            case messages.TookLead(term):
                self.figures.leads_begun += 1
                _log.info("this manager leads term=%d", term)
                self._changes.open(self._machine.cluster(self._clock.now_ns()).changes)
            case messages.StepDown(reason):
                _log.warning("this manager leads no longer reason=%s", reason)
                self._dismiss()

    def _wake(self, node: str) -> None:
        news = self._held.pop(node, None)
        if news is not None:
            news.set()

    def _dismiss(self) -> None:
        """Those who wait are told to ask elsewhere."""
        self._sender.stop()
        self._changes.close()
        for node in list(self._held):
            self._wake(node)
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_result(messages.NotLeader(self._machine.leader_address))
        for _, followed in self._told_slurm:
            if not followed.done():
                followed.set_exception(Elsewhere(self._machine.leader_address))


def _states(state: str) -> tuple[TaskState, ...]:
    """Raises `UsageError`."""
    if not state:
        return ()
    if state == "unfinished":
        return tuple(one for one in TaskState if one is not TaskState.FINISHED)
    try:
        return (TaskState(state),)
    except ValueError:
        names = ", ".join(one.value for one in TaskState)
        raise UsageError(f"there is no state {state[:80]!r}; states are {names}, and unfinished") from None
