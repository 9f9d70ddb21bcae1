"""The meta service: requests about names and files, carried out over a key-value engine.

    service = MetaService(engine, settings, secret, accounts=...)
    await service.start()                       makes "/" the first time
    server.register(META, service.serve)
    ...
    await service.close()

It keeps nothing of its own that matters: several may serve one store at the same time, and one that dies takes nothing
with it but requests in flight, which their clients send again, to it or to another one.

    serve ──> who asks (`meta_callers`) ──changes──> lanes: one transaction for many (`meta_lanes`, `meta_requests`)
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
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, Final

import msgspec

from fireflyer.base.errors import Busy, FireflyerError, TransientError, UsageError
from fireflyer.fs.core.meta import holds, namespace
from fireflyer.fs.core.meta.context import Asker, Context
from fireflyer.fs.core.meta.keeping import Keeper
from fireflyer.fs.core.meta.ports import NotAtOnce
from fireflyer.fs.core.meta.replies import check_session, number_allowed
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
from fireflyer.fs.service.meta_callers import Callers
from fireflyer.fs.service.meta_config import MetaSettings
from fireflyer.fs.service.meta_figures import Figures
from fireflyer.fs.service.meta_house import House
from fireflyer.fs.service.meta_requests import (
    Asked,
    RequestPorts,
    Step,
    carry_out_long,
    foresee_all,
    is_changing,
    refusal,
)
from fireflyer.fs.service.meta_surroundings import Surroundings
from fireflyer.identity import Account, Secret
from fireflyer.kvstore import Engine
from fireflyer.runtime.metrics import Series
from fireflyer.runtime.rpc import Caller

__all__ = ["MAX_WEIGHT", "MetaService"]

_log = logging.getLogger(__name__)
MAX_WEIGHT: Final = 16 * MAX_LISTED
"""Inodes that one `Calls` may ask for: its answer has to fit into a message."""
MAX_LONG: Final = 1024
"""Requests that take several transactions, under way at the same time."""
MAX_ENROLLED: Final = 1 << 17
LOOK_S: Final = 2.0
LOOK_SOON_S: Final = 0.2
"""Before the chunk store is reached."""
REST_S: Final = 1.0
"""Of the keeper, when there is nothing to do."""
LANES_OF_DATABASE: Final = 16


class _Group:
    """The answers to one `Calls`."""

    __slots__ = ("answers", "complete", "left")

    def __init__(self, count: int) -> None:
        self.answers: list[Answer | None] = [None] * count
        self.left = count
        self.complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def put(self, at: int, answer: Answer) -> None:
        self.answers[at] = answer
        self.left -= 1
        if not self.left and not self.complete.done():
            self.complete.set_result(None)


class MetaService:
    """Lives in one loop."""

    def __init__(
        self,
        engine: Engine,
        settings: MetaSettings,
        secret: Secret,
        *,
        administrators: Collection[str] = (),
        accounts: Callable[[str], Account | None] = lambda _: None,
        surroundings: Surroundings | None = None,
        shared_store: bool = False,
    ) -> None:
        """`administrators`: users who act as uid 0. `surroundings`: without them, requests that need chunks are `Busy`.
        `shared_store`: other processes write there too."""
        self._settings = settings
        self._house = House(
            engine,
            settings,
            secret,
            surroundings,
            lanes=LANES_OF_DATABASE if shared_store else 1,
            foresee=foresee_all if shared_store else None,
        )
        self._callers = Callers(settings, administrators, accounts)
        self._surroundings = surroundings
        self._started = asyncio.Event()
        self._failed: FireflyerError | None = None
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._long: dict[tuple[ClientId, int], asyncio.Task[Answer]] = {}
        self._enrolled: dict[ClientId, None] = {}
        self._figures = Figures()
        self._keeper = Keeper(os.urandom(8).hex())
        self._closed = False

    @property
    def house(self) -> House:
        """What its requests share."""
        return self._house

    def metrics(self) -> list[Series]:
        """For Prometheus."""
        house = self._house
        gauges = {
            "waiting": ("Requests that wait for the store", house.lanes.waiting),
            "long_requests": ("Requests under way that take several transactions", len(self._long)),
            "chunk_store_reached": ("Whether the chunk store can be used", house.has_chunks),
            "collects": ("Whether this service collects what is unlinked", self._keeper.leads),
            "in_trouble": ("Whether collecting or reaping failed last", bool(self.trouble)),
        }
        return [
            *self._figures.series(),
            Series.one(
                "fireflyer_meta_transactions_total", "counter", "Transactions that write", house.lanes.transactions
            ),
            *(Series.one(f"fireflyer_meta_{name}", "gauge", text, value) for name, (text, value) in gauges.items()),
        ]

    @property
    def trouble(self) -> str:
        """What could not be collected or reaped last; empty where all is well, or another service does it."""
        return self._keeper.collector.trouble or self._keeper.reaper.trouble

    # --- from start to end ---

    def start_soon(self) -> None:
        """As soon as the store can be reached; requests wait until then."""
        self._spawn(self._start_when_possible())

    async def _start_when_possible(self) -> None:
        while not self._started.is_set():
            try:
                await self.start()
            except TransientError as error:
                _log.warning("files are not served yet reason=%s", error)
                await asyncio.sleep(REST_S)
            except FireflyerError as error:
                _log.error("files cannot be served reason=%s", error)
                self._failed = error
                self._started.set()

    async def start(self) -> None:
        """Raises what the store raises."""
        settings = self._settings

        async def make_root(context: Context) -> None:
            await namespace.make_root(
                context.rows,
                now_ns=context.now_ns,
                uid=settings.root_uid,
                gid=settings.root_gid,
                mode=settings.root_mode,
            )

        await self._step(make_root)
        await self._house.look()
        for work in (self._look_again(), self._keep()):
            self._spawn(work)
        self._started.set()

    async def close(self) -> None:
        """Transactions under way come to their end; what waits is refused."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._house.lanes.close()
        await self._house.reads.close()
        if self._surroundings is not None:
            await self._surroundings.close()

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task

    async def _step(self, body: Callable[[Context], Awaitable[None]]) -> None:
        step = Step(self._house, body)
        self._house.lanes.put(0, step)
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
            raise UsageError(f"one message asks for {weight} inodes; at most {MAX_WEIGHT} are allowed, send two")
        if not self._house.cluster.chains:
            await self._house.look()
        asker, user = self._callers.asker(caller, calls.client), self._callers.user_of(caller)
        if enrol and calls.client not in self._enrolled:
            await self._enrol(asker, user)
        group = _Group(len(calls.calls))
        for at, call in enumerate(calls.calls):
            self._begin(calls, call, caller, asker, user, group, at)
        if group.left:
            await group.complete
        self._figures.answered(calls.calls, group.answers)
        return Answers(tuple(group.answers))  # type: ignore[arg-type]

    def _begin(self, calls: Calls, call: Call, caller: Caller, asker: Asker, user: str, group: _Group, at: int) -> None:
        def reply(asked: Asked, outcome: Any) -> None:
            if isinstance(outcome, NotAtOnce):
                self._go_on(asked, lambda answer: group.put(at, answer))
            else:
                group.put(at, self._answer(asked, outcome))

        try:
            if call.actor is not None:
                asker = self._callers.named(caller, calls.client, call.actor)
            asked = Asked(self._house, call.request, call.number, calls.done_below, asker, user, reply)
            if not is_changing(call.request):
                asked.number = 0
                self._house.reads.put(asked)
            elif not call.number or not number_allowed(call.number, calls.done_below):
                raise file_error(errno.EINVAL, f"request number {call.number} is not one of those that may be used now")
            else:
                self._house.lanes.put(asked.lane, asked)
        except FireflyerError as error:
            group.put(at, refusal(error))

    def _answer(self, asked: Asked, outcome: Any) -> Answer:
        if isinstance(outcome, BaseException):
            return refusal(outcome)
        if type(outcome) is Opened and asked.user and outcome.inode.kind is Kind.FILE:
            return self._with_capability(asked, outcome)
        if type(asked.request) is Lock:
            self._house.changed(asked.request.inode)
        answer: Answer = outcome
        return answer

    def _with_capability(self, asked: Asked, opened: Opened) -> Answer:
        """By what was granted when it was done, and for as long: the answer may be a stored one, to another request
        under the same number."""
        if not opened.rights or opened.expires_unix_s <= time.time():
            return opened
        try:
            token = self._house.capability(asked.user, asked.asker.client, opened)
        except FireflyerError as error:
            return refusal(error)
        return msgspec.structs.replace(opened, capability=token)

    def _go_on(self, asked: Asked, tell: Callable[[Answer], None]) -> None:
        """By a procedure. The same request once more hears what the first one hears."""
        key = asked.asker.client, asked.number
        task = self._long.get(key)
        if task is None:
            if self._closed or len(self._long) >= MAX_LONG:
                tell(refusal(Busy(f"{len(self._long)} long requests are under way; ask again later")))
                return
            task = self._long[key] = self._spawn(carry_out_long(self._house, asked))
            task.add_done_callback(lambda _: self._long.pop(key, None))

        def ended(done: asyncio.Task[Answer]) -> None:
            if done.cancelled():
                tell(refusal(Busy("the meta service ends; ask another one")))
            else:
                tell(self._answer(asked, done.exception() or done.result()))

        task.add_done_callback(ended)

    async def _enrol(self, asker: Asker, user: str) -> None:
        """The collector and the reaper have to know of the client before it has anything open. Where its session is
        over, its requests will be told."""

        async def enrol(context: Context) -> bool:
            if await context.rows.get(SESSIONS.key(asker.client)) is None:
                return False
            await check_session(context.rows, asker.client, user)
            await holds.enrol(self._house.context(context.rows, asker))
            return True

        step = Step(self._house, enrol)
        self._house.lanes.put(-asker.client, step)
        if await step.outcome:
            while len(self._enrolled) >= MAX_ENROLLED:
                del self._enrolled[next(iter(self._enrolled))]
            self._enrolled[asker.client] = None

    # --- what it does by itself ---

    async def _look_again(self) -> None:
        """At the cluster; and reaches the chunk store, until it has."""
        while True:
            try:
                await self._house.look()
                if self._surroundings is not None and self._house.cluster.chains:
                    await self._surroundings.look()
            except FireflyerError as error:
                _log.info("the cluster is not known yet reason=%s", error)
            await asyncio.sleep(LOOK_S if self._house.has_chunks else LOOK_SOON_S)

    async def _keep(self) -> None:
        """Removes what is unlinked, ends what dead clients have left: of all services one at a time."""
        ports = RequestPorts(self._house)
        while True:
            more = False
            try:
                if self._house.has_chunks:
                    more = await self._keeper.step(ports)
            except FireflyerError as error:
                _log.warning("collecting is interrupted reason=%s", error)
            if not more:
                await asyncio.sleep(REST_S)
