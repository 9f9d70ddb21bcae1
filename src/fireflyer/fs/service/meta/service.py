"""The meta service: requests about names and files, carried out over a key-value engine.

    service = MetaService(engine, settings, secret)
    await service.start()                       makes "/" the first time
    server.register(META, service.serve)
    ...
    await service.close()

It keeps nothing of its own that matters: several may serve one store at the same time, and one that dies takes nothing
with it but requests in flight, which their clients send again, to it or to another one.

    serve ──> who asks (`callers`) ──changes──> commit queues: one transaction for many (`group_commit`, `requests`)
                                         └─reads──> one snapshot for many

The requests of one `Calls` are carried out at the same time, and answered together. A client that goes away does not
stop what it has asked for.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

import msgspec

from fireflyer.base.errors import Busy, FireflyerError, TransientError, UsageError
from fireflyer.fs.core.meta import dispatch
from fireflyer.fs.core.meta.background_tasks import BackgroundTasks
from fireflyer.fs.core.meta.context import Context, Requester
from fireflyer.fs.core.meta.open_files import holds
from fireflyer.fs.core.meta.ports import NotAtOnce, Ports
from fireflyer.fs.core.meta.replies import SessionEnded, check_session, number_allowed
from fireflyer.fs.core.rows import SESSIONS
from fireflyer.fs.schema.errors import file_error
from fireflyer.fs.schema.ids import ClientId
from fireflyer.fs.schema.inodes import Kind
from fireflyer.fs.schema.meta import (
    MAX_LISTED,
    Answer,
    Answers,
    Call,
    Calls,
    ListDirectory,
    Lock,
    Open,
    Opened,
    StatMany,
)
from fireflyer.fs.service.meta.callers import Callers
from fireflyer.fs.service.meta.cluster_view import ClusterView
from fireflyer.fs.service.meta.config import MetaSettings
from fireflyer.fs.service.meta.context import ServiceContext
from fireflyer.fs.service.meta.group_commit import MAX_WAITING, Later, in_loop
from fireflyer.fs.service.meta.metrics import MetaMetrics
from fireflyer.fs.service.meta.requests import (
    QueuedRequest,
    RequestPorts,
    Step,
    carry_out_long,
    is_changing,
    prefetch_all,
    refusal,
)
from fireflyer.identity import Secret
from fireflyer.kvstore import Engine
from fireflyer.runtime.metrics import Series
from fireflyer.runtime.rpc import Caller

__all__ = ["MAX_WEIGHT", "MetaService"]

_log = logging.getLogger(__name__)
MAX_WEIGHT: Final = 16 * MAX_LISTED
"""Inodes that one `Calls` may ask for: its answer has to fit into a message."""
MAX_LONG: Final = 1024
"""Requests that take several transactions, under way at the same time; those that wait for locks are not counted."""
MAX_LOCK_WAITS: Final = 16384
USERS_SHARE: Final = 4
"""Of both, and of all that waits, a user may have one part in so many."""
MAX_ENROLLED: Final = 1 << 17
LOOK_S: Final = 2.0
LOOK_SOON_S: Final = 0.2
"""Before the chunk store is reached."""
COUNT_EVERY_S: Final = 30.0
REST_S: Final = 1.0
"""Of the keeper, when there is nothing to do."""
COMMIT_QUEUES: Final = 1
"""Over a database too, though each read is a round trip there: PostgreSQL finds conflicts by pages of its index, so
queues conflict whatever they do, and requests in one transaction ask together and are committed together."""


class _Group:
    """The answers to one `Calls`."""

    __slots__ = ("_over", "answers", "complete", "left")

    def __init__(self, count: int, over: Callable[[int], None]) -> None:
        """`over` is told the count when all are there, whether somebody waits for them or not."""
        self._over = over
        self.answers: list[Answer | None] = [None] * count
        self.left = count
        self.complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def put(self, at: int, answer: Answer) -> None:
        self.answers[at] = answer
        self.left -= 1
        if self.left:
            return
        self._over(len(self.answers))
        if not self.complete.done():
            self.complete.set_result(None)


class _Procedures:
    """Requests under way that take several transactions, `most` at once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tasks: dict[tuple[ClientId, int], tuple[bytes, asyncio.Task[Answer]]] = {}
        self._users: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._tasks)

    def under_way(self, asked: QueuedRequest) -> asyncio.Task[Answer] | None:
        """The same request. Raises EINVAL where it is another one under the same number."""
        digest, task = self._tasks.get((asked.requester.client, asked.number), (asked.digest, None))
        if digest != asked.digest:
            raise file_error(errno.EINVAL, f"request number {asked.number} is in use by another request")
        return task

    def begin(self, asked: QueuedRequest, spawn: Callable[[], asyncio.Task[Answer]]) -> asyncio.Task[Answer]:
        """Raises `Busy`. Services have no share: they are all users."""
        key, user = (asked.requester.client, asked.number), asked.user
        if len(self._tasks) >= self._most or (user and self._users[user] >= self._most // USERS_SHARE):
            raise Busy(f"the meta service is overloaded: {len(self._tasks)} long requests are running; try again later")
        task = spawn()
        self._tasks[key] = asked.digest, task
        self._users[user] += 1

        def ended(_: object) -> None:
            del self._tasks[key]
            self._users[user] -= 1
            if not self._users[user]:
                del self._users[user]

        task.add_done_callback(ended)
        return task


class MetaService:
    """Lives in one loop."""

    def __init__(
        self,
        engine: Engine,
        settings: MetaSettings,
        secret: Secret,
        *,
        cluster_view: ClusterView | None = None,
        shared_store: bool = False,
        later: Later = in_loop,
    ) -> None:
        """`cluster_view`: without them, requests that need chunks are `Busy`.
        `shared_store`: other processes write there too. `later`: as of `CommitQueues`."""
        self._settings = settings
        self._service_context = ServiceContext(
            engine,
            settings,
            secret,
            cluster_view,
            commit_queues=COMMIT_QUEUES,
            prefetch=prefetch_all if shared_store else None,
            later=later,
        )
        self._callers = Callers(settings)
        self._cluster_view = cluster_view
        self._started = asyncio.Event()
        self._failed: FireflyerError | None = None
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._long, self._lock_waits = _Procedures(MAX_LONG), _Procedures(MAX_LOCK_WAITS)
        self._asking: Counter[str] = Counter()
        self._enrolled: dict[ClientId, None] = {}
        self._figures = MetaMetrics()
        self._background_tasks = BackgroundTasks(os.urandom(8).hex())
        self._closed = False

    @property
    def service_context(self) -> ServiceContext:
        """What its requests share."""
        return self._service_context

    def metrics(self) -> list[Series]:
        """For Prometheus."""
        service_context = self._service_context
        gauges = {
            "waiting": ("Requests that wait for the store", service_context.commit_queues.waiting),
            "long_requests": ("Running requests that take several transactions", len(self._long)),
            "lock_waits": ("Requests that wait for a lock", len(self._lock_waits)),
            "chunk_store_reached": (
                "1 if this service is connected to the chunk store, else 0",
                service_context.has_chunks,
            ),
            "collects": ("1 if this service runs garbage collection, else 0", self._background_tasks.leads),
            "in_trouble": ("1 if the last garbage collection or session cleanup failed, else 0", bool(self.last_error)),
        }
        return [
            *self._figures.series(),
            Series.one(
                "fireflyer_meta_transactions_total",
                "counter",
                "Transactions that write",
                service_context.commit_queues.transactions,
            ),
            *(Series.one(f"fireflyer_meta_{name}", "gauge", text, value) for name, (text, value) in gauges.items()),
        ]

    @property
    def last_error(self) -> str:
        """What could not be collected, reaped or cut last; empty where all is well, or another service does it."""
        return self._background_tasks.last_error

    # --- from start to end ---

    def start_soon(self) -> None:
        """As soon as the store can be reached; requests wait until then."""
        self._spawn(self._start_when_possible())

    async def _start_when_possible(self) -> None:
        while not self._started.is_set():
            try:
                await self.start()
            except TransientError as error:
                _log.warning("the meta service does not serve yet reason=%s", error)
                await asyncio.sleep(REST_S)
            except FireflyerError as error:
                _log.error("the meta service cannot serve reason=%s", error)
                self._failed = error
                self._started.set()

    async def start(self) -> None:
        """Raises what the store raises."""
        settings = self._settings

        async def make_root(context: Context) -> None:
            await dispatch.make_root(
                context.rows,
                now_ns=context.now_ns,
                uid=settings.root_uid,
                gid=settings.root_gid,
                mode=settings.root_mode,
            )

        await self._step(make_root)
        await self._service_context.look()
        self._spawn(self._look_again())
        background_tasks = self._background_tasks
        for part in (
            background_tasks.lead,
            background_tasks.cut,
            background_tasks.reap,
            background_tasks.collect,
            background_tasks.survey,
            background_tasks.expire,
        ):
            self._spawn(self._keep(part))
        self._started.set()

    async def close(self) -> None:
        """Transactions under way come to their end; what waits is refused."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._service_context.commit_queues.close()
        await self._service_context.reads.close()
        if self._cluster_view is not None:
            await self._cluster_view.close()

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task

    async def _step(self, body: Callable[[Context], Awaitable[None]]) -> None:
        step = Step(self._service_context, body)
        self._service_context.commit_queues.put(0, step)
        await step.outcome

    # --- requests ---

    async def serve(self, calls: Calls, caller: Caller) -> Answers:
        """Raises `PermissionDenied` for a user who is no more, `UsageError` for what no client of ours sends."""
        if not self._started.is_set():
            await self._started.wait()
        if self._failed is not None:
            raise self._failed
        weight = 0
        enrol = False
        for call in calls.calls:
            request = call.request
            if type(request) is ListDirectory:
                weight += request.limit
            elif type(request) is StatMany:
                weight += len(request.places)
            elif call.number or type(request) is Open:
                enrol = True
        if weight > MAX_WEIGHT:
            raise UsageError(f"one message asks for {weight} inodes; at most {MAX_WEIGHT} are allowed, so send several")
        if not self._service_context.cluster.chains:
            await self._service_context.look()
        requester, user = self._callers.requester(caller, calls.client), self._callers.user_of(caller)
        if enrol and calls.client not in self._enrolled:
            await self._enrol(requester, user)
        group = self._group(user, len(calls.calls))
        for at, call in enumerate(calls.calls):
            self._begin(calls, call, caller, requester, user, group, at)
        if group.left:
            await group.complete
        self._figures.answered(calls.calls, group.answers)
        return Answers(tuple(group.answers))  # type: ignore[arg-type]

    def _group(self, user: str, count: int) -> _Group:
        """Raises `Busy` where this user has asked for too much already."""
        if user and self._asking[user] + count > MAX_WAITING // USERS_SHARE:
            raise Busy(
                f"{self._asking[user]} requests of user {user} are running, their share of the meta service; try "
                "again later"
            )
        self._asking[user] += count

        def over(answered: int) -> None:
            self._asking[user] -= answered
            if not self._asking[user]:
                del self._asking[user]

        return _Group(count, over)

    def _begin(
        self, calls: Calls, call: Call, caller: Caller, requester: Requester, user: str, group: _Group, at: int
    ) -> None:
        def reply(asked: QueuedRequest, outcome: Any) -> None:
            if isinstance(outcome, NotAtOnce):
                self._go_on(asked, lambda answer: group.put(at, answer))
            else:
                group.put(at, self._answer(asked, outcome))

        try:
            if call.actor is not None:
                requester = self._callers.named(caller, calls.client, call.actor)
            number = call.number if is_changing(call.request) else 0
            asked = QueuedRequest(
                self._service_context, call.request, number, calls.done_below, requester, user, reply, call.actor
            )
            if not is_changing(call.request):
                self._service_context.reads.put(asked)
            elif not call.number or not number_allowed(call.number, calls.done_below):
                raise file_error(
                    errno.EINVAL, f"request number {call.number} is outside of the window that may be used now"
                )
            else:
                self._service_context.commit_queues.put(asked.queue_key, asked)
        except FireflyerError as error:
            group.put(at, refusal(error))

    def _answer(self, asked: QueuedRequest, outcome: Any) -> Answer:
        if isinstance(outcome, BaseException):
            return refusal(outcome)
        if type(outcome) is Opened and asked.user and outcome.inode.kind is Kind.FILE:
            return self._with_capability(asked, outcome)
        if type(asked.request) is Lock:
            self._service_context.changed(asked.request.inode)
        answer: Answer = outcome
        return answer

    def _with_capability(self, asked: QueuedRequest, opened: Opened) -> Answer:
        """By what was granted when it was done, and for as long: the answer may be a stored one, to another request
        under the same number."""
        if not opened.rights or opened.expires_unix_s <= time.time():
            return opened
        try:
            token = self._service_context.capability(asked.user, asked.requester.client, opened)
        except FireflyerError as error:
            return refusal(error)
        return msgspec.structs.replace(opened, capability=token)

    def _go_on(self, asked: QueuedRequest, tell: Callable[[Answer], None]) -> None:
        """By a procedure. The same request once more hears what the first one hears."""
        waits = self._lock_waits if type(asked.request) is Lock else self._long
        try:
            task = waits.under_way(asked)
            if task is None:
                if self._closed:
                    raise Busy("the meta service is stopping; ask another one")
                task = waits.begin(asked, lambda: self._spawn(carry_out_long(self._service_context, asked)))
        except FireflyerError as error:
            tell(refusal(error))
            return

        def ended(done: asyncio.Task[Answer]) -> None:
            if done.cancelled():
                tell(refusal(Busy("the meta service is stopping; ask another one")))
            else:
                tell(self._answer(asked, done.exception() or done.result()))

        task.add_done_callback(ended)

    async def _enrol(self, requester: Requester, user: str) -> None:
        """The collector and the reaper have to know of the client before it has anything open. Where its session is
        over, its requests will be told."""

        async def enrol(context: Context) -> bool:
            if await context.rows.get(SESSIONS.key(requester.client)) is None:
                return False
            try:
                await check_session(context.rows, requester.client, user)
            except SessionEnded:  # it was evicted
                return False
            await holds.enrol(self._service_context.context(context.rows, requester))
            return True

        step = Step(self._service_context, enrol)
        self._service_context.commit_queues.put(-requester.client, step)
        if await step.outcome:
            while len(self._enrolled) >= MAX_ENROLLED:
                del self._enrolled[next(iter(self._enrolled))]
            self._enrolled[requester.client] = None

    # --- what it does by itself ---

    async def _look_again(self) -> None:
        """At the cluster; and reaches the chunk store, until it has."""
        counted_s = time.monotonic() - COUNT_EVERY_S
        while True:
            try:
                if time.monotonic() - counted_s >= COUNT_EVERY_S:
                    counted_s = time.monotonic()
                    await self._service_context.count()
                await self._service_context.look()
                if self._cluster_view is not None and self._service_context.cluster.chains:
                    await self._cluster_view.look()
            except FireflyerError as error:
                _log.info("no manager reached yet reason=%s", error)
            await asyncio.sleep(LOOK_S if self._service_context.has_chunks else LOOK_SOON_S)

    async def _keep(self, part: Callable[[Ports], Awaitable[bool]]) -> None:
        """Removes what is unlinked, ends what dead clients have left, and so on: of all services one at a time."""
        ports = RequestPorts(self._service_context)
        while True:
            more = False
            try:
                if self._service_context.has_chunks:
                    more = await part(ports)
            except FireflyerError as error:
                _log.warning("background work failed, retrying part=%s reason=%s", part.__name__, error)
            if not more:
                await asyncio.sleep(REST_S)
