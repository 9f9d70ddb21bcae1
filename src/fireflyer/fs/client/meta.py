"""Requests to the meta service, of one client: numbered, sent together, and sent again until they are answered.

    call ──> number ──> queue of its service ──end of this turn of the loop──> Calls ──> answers ──> callers
               │                                    │
               waits while 256 are under way        no answer, or "not now": after a pause again, at another service

Requests of one turn of the loop go together, those that only read apart from those that change something, those that
take long alone, and those that may wait (`is_lazy`) apart from all others. What is sent again has the same number, so
it is done once.

The session is that of the chunk client. When it is over, `ManagerSession` opens another one: what was not done goes
on there
under a new number, but what this client held (open handles, locks) is lost, and requests that mean it get ESTALE.
"""

from __future__ import annotations

import asyncio
import collections
import errno
import itertools
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

from fireflyer.base.errors import (
    Aborted,
    FireflyerError,
    InvariantViolation,
    Timeout,
    TransientError,
    UsageError,
    error_from_wire,
)
from fireflyer.base.units import MS, SECOND, format_duration
from fireflyer.fs.client.control.session import ManagerSession
from fireflyer.fs.control import META, ConnectionPool
from fireflyer.fs.core.files.holds import HoldReporter
from fireflyer.fs.core.files.meta_requests import RequestNumbers, refusal
from fireflyer.fs.core.files.request_routing import (
    MAX_LISTED_TOGETHER,
    MAX_TOGETHER_BYTES,
    changes,
    cost_of,
    is_lazy,
    of_handle,
    routing_key_of,
    service_for,
    takes_long,
)
from fireflyer.fs.schema.errors import FileError, file_error
from fireflyer.fs.schema.ids import ClientId, TableId
from fireflyer.fs.schema.inodes import InodeId
from fireflyer.fs.schema.meta import MAX_CALLS, Actor, Answer, Answers, Call, Calls, ErrorReply, Lock, Open, Request
from fireflyer.runtime.pauses import spread

__all__ = ["SESSION_EVICTED", "SESSION_FORGOTTEN", "SESSION_OVER", "MetaClient", "Sends"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
SESSION_OVER: Final = "session_over"
"""Code of a `ErrorReply`: not done, the session of the client is over."""
SESSION_EVICTED: Final = "session_struck"
"""Not done either: the session lives, but nothing is done in it any more."""
SESSION_FORGOTTEN: Final = "session_forgotten"
"""It is over for so long that what had been sent before may have been done."""
HEARTBEAT_S: Final = 5.0
DEFAULT_TIMEOUT_NS: Final = 60 * SECOND
ATTEMPT_NS: Final = 10 * SECOND
"""For a service to answer, before another one is asked; those that take long have all the time that there is."""
_MAX_SLOW: Final = 64
"""Requests that take long, and as many that wait for locks, under way at once: the others go on beside them."""
_PAUSE_S: Final = 0.01
_MAX_PAUSE_S: Final = 1.0
_AVOID_S: Final = 1.0
"""A service that did not answer is asked after the others."""
Sends: TypeAlias = Callable[[str, Calls, int], Awaitable[Answers]]
"""Address, what, nanoseconds to wait. Raises `FireflyerError`."""


@dataclass(slots=True, eq=False)
class _Item:
    request: Request
    number: int
    actor: Actor | None
    until_s: float
    client: ClientId = 0
    answer: asyncio.Future[Answer] | None = None
    in_doubt: bool = False
    """It was sent in this session, and has no answer: it may have been done."""


class MetaClient:
    """Made for one loop; `start` it there. `call` is for that loop, `hold` and `release` are for any thread."""

    def __init__(
        self, control: ManagerSession, *, sends: Sends | None = None, timeout_ns: int = DEFAULT_TIMEOUT_NS
    ) -> None:
        """`sends`: another way to the services than RPC."""
        self._control = control
        self._lines = ConnectionPool(control.credential)
        self._sends = sends or self._send_rpc
        self._timeout_ns = timeout_ns
        self._services: tuple[str, ...] = control.addresses
        self._avoided: dict[str, float] = {}
        self._numbers = RequestNumbers()
        self._waiting: collections.deque[asyncio.Future[int]] = collections.deque()
        self._slow, self._locks = asyncio.Semaphore(_MAX_SLOW), asyncio.Semaphore(_MAX_SLOW)
        self._queues: dict[tuple[str, bool, bool], list[_Item]] = {}
        self._handles = itertools.count(1)
        self._holding, self._holding_lock = HoldReporter(), threading.Lock()
        self._beating = asyncio.Lock()
        self._learning: asyncio.Task[None] | None = None
        self._exchanged: asyncio.Future[None] | None = None
        self._exchanges = 0
        self._closed = False
        self.on_lost: list[Callable[[ClientId], None]] = []
        """Called in the loop when another session has taken the place of one, and what that held is lost."""

    def start(self) -> None:
        self._control.on_exchange.append(self._another_session)
        self._control.spawn(self._heartbeats())
        self._learn()

    @property
    def client(self) -> ClientId:
        """The session's number, as it is now."""
        return self._control.client

    def handle(self) -> int:
        """One that was never used."""
        return next(self._handles)

    async def call(self, request: Request, *, actor: Actor | None = None, timeout_ns: int | None = None) -> Answer:
        """Its answer, never a `ErrorReply`: raises `FileError`, or a `FireflyerError`. After `Timeout` a request that
        changes something may have been done, or may be done yet."""
        return (await self.call_in_session(request, actor=actor, timeout_ns=timeout_ns))[0]

    async def call_in_session(
        self, request: Request, *, actor: Actor | None = None, timeout_ns: int | None = None
    ) -> tuple[Answer, ClientId]:
        """As `call`, and the session in which it was answered: what it has opened is lost with that."""
        limit_ns = self._timeout_ns if timeout_ns is None else timeout_ns
        item = _Item(request, 0, actor, time.monotonic() + limit_ns / SECOND)
        slow = None if not takes_long(request) else self._locks if isinstance(request, Lock) else self._slow
        try:
            if slow is not None:
                await self._within(item, slow.acquire())
            try:
                if changes(request):
                    item.number = await self._number(item)
                return await self._answered(item, limit_ns), item.client
            finally:
                if slow is not None:
                    slow.release()
        finally:
            self._over(item)

    async def learn_table(self, table: TableId) -> None:
        """As `ManagerSession.learn_table`."""
        await self._control.learn_table(table)

    async def close(self) -> None:
        """Calls under way raise `Aborted`. The control is its owner's."""
        self._closed = True
        if self._another_session in self._control.on_exchange:
            self._control.on_exchange.remove(self._another_session)
        await self._lines.close()

    # --- what is held ---

    def hold(self, inode: InodeId, *, late: bool = False) -> None:
        """It is open; once for each `release`. `late`: it was opened in a session that is over."""
        with self._holding_lock:
            self._holding.opened(inode, late=late)

    def release(self, inode: InodeId) -> None:
        with self._holding_lock:
            self._holding.closed(inode)

    async def heartbeat(self) -> None:
        """Tells the service of all files that are open. Raises `FireflyerError`."""
        async with self._beating:
            whole = False
            while not whole:
                exchanges, heard = self._exchanges, False
                with self._holding_lock:
                    heartbeat = self._holding.heartbeat()
                try:
                    await self.call(heartbeat)
                    heard = exchanges == self._exchanges  # else another one was told what was open in the one before
                finally:
                    if not heard:
                        with self._holding_lock:
                            self._holding.failed(heartbeat)
                whole = heard and heartbeat.whole

    async def _heartbeats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                await self.heartbeat()
            except FireflyerError as error:
                _log.warning("heartbeat to the meta service failed reason=%s", error)

    def _another_session(self) -> None:
        self._exchanges += 1
        with self._holding_lock:
            self._holding.another_session()
        exchanged, self._exchanged = self._exchanged, None
        if exchanged is not None and not exchanged.done():
            exchanged.set_result(None)
        for tell in self.on_lost:
            tell(self._control.client)

    # --- one request ---

    async def _number(self, item: _Item) -> int:
        """Whoever came first gets the first one that is free."""
        if not self._waiting and self._numbers.free:
            return self._numbers.take()
        number: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append(number)
        try:
            return await self._within(item, number)
        except BaseException:
            if number.done() and not number.cancelled():  # it came at the same time, and nobody will use it
                self._numbers.done(number.result())
                self._hand_out()
            raise

    async def _within(self, item: _Item, turn: Awaitable[_T]) -> _T:
        try:
            async with asyncio.timeout(max(0.0, item.until_s - time.monotonic())):
                return await turn
        except TimeoutError:
            what = type(item.request).__name__
            raise Timeout(
                f"{what} was not sent: too many requests of this client are not answered yet; try again"
            ) from None

    def _over(self, item: _Item) -> None:
        if item.number:
            self._numbers.done(item.number)
            item.number = 0
        self._hand_out()

    def _hand_out(self) -> None:
        while self._waiting and self._numbers.free:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(self._numbers.take())

    async def _answered(self, item: _Item, limit_ns: int) -> Answer:
        attempt, reason = 0, "no meta service is known"
        routing_key = routing_key_of(item.request)
        while time.monotonic() < item.until_s:
            if not _to_be_told(item):
                if self._control.exchanging:
                    await self._next_session(item)
                before, item.client = item.client, self._control.client
                if before not in (0, item.client) and of_handle(item.request):
                    raise _lost()
            address = self._choose(routing_key)
            try:
                answer = await self._asked(address, item)
            except (TransientError, Aborted) as error:  # Aborted: it was ending; another one goes on
                if self._closed:
                    raise
                reason = f"{address}: {error}"
                item.in_doubt = True
                self._avoid(address)
            else:
                if not isinstance(answer, ErrorReply):
                    return answer
                refused = await self._refused(item, answer)
                if refused is None:
                    continue
                reason = str(refused)
                item.in_doubt = True
            attempt += 1
            pause_s = spread(min(_MAX_PAUSE_S, _PAUSE_S * 2.0 ** min(attempt, 16)))
            await asyncio.sleep(min(pause_s, max(0.0, item.until_s - time.monotonic())))
        what = type(item.request).__name__
        raise Timeout(f"{what} was not answered within {format_duration(limit_ns)}; {reason}")

    async def _refused(self, item: _Item, answer: ErrorReply) -> FireflyerError | None:
        """Raises what is the caller's; returns why it is to be sent again after a pause, or None: at once."""
        if answer.code == SESSION_FORGOTTEN and item.number and item.in_doubt:
            raise Timeout("the session of this client ended long ago; the request may have been executed before that")
        if answer.code == SESSION_EVICTED:
            self._control.evicted(item.client)
        if answer.code in (SESSION_OVER, SESSION_EVICTED, SESSION_FORGOTTEN):
            await self._elsewhere(item)
            return None
        if answer.errno and answer.code != Aborted.code:
            raise file_error(answer.errno, answer.message)
        refused = error_from_wire(answer.code, answer.message)
        if not isinstance(refused, TransientError | Aborted):
            raise refused
        return refused

    async def _elsewhere(self, item: _Item) -> None:
        """The session is over in which it was to be done, and it was not done, nor will be: what was done before the
        end gets its answer, also when it is asked again after it."""
        if of_handle(item.request):
            raise _lost()
        await self._next_session(item)
        item.in_doubt = False
        if item.number:
            self._over(item)
            item.number = await self._number(item)

    async def _next_session(self, item: _Item) -> None:
        """Waits until there is another one."""
        while self._control.exchanging or self._control.client == item.client:
            if self._exchanged is None:
                self._exchanged = asyncio.get_running_loop().create_future()
            self._control.want_routing()  # the manager says there that the session is over
            left_s = item.until_s - time.monotonic()
            if left_s <= 0:
                raise Timeout("the session of this client has ended, and no other could be opened in time")
            await asyncio.wait([self._exchanged], timeout=min(left_s, _MAX_PAUSE_S))
            if not self._control.exchanging and self._control.client != item.client:
                return

    # --- many together ---

    async def _asked(self, address: str, item: _Item) -> Answer:
        loop = asyncio.get_running_loop()
        item.answer = loop.create_future()
        if not self._queues:
            loop.call_soon(self._send_all)
        queue = address, item.number != 0, is_lazy(item.request)
        self._queues.setdefault(queue, []).append(item)
        return await item.answer

    def _send_all(self) -> None:
        queues, self._queues = self._queues, {}
        for (address, _, _), items in queues.items():
            together: list[_Item] = []
            bytes_, listed = 0, 0
            for item in items:
                cost = cost_of(item.request)
                if takes_long(item.request):
                    self._control.spawn(self._send(address, [item], int((item.until_s - time.monotonic()) * SECOND)))
                    continue
                full = bytes_ + cost[0] > MAX_TOGETHER_BYTES or listed + cost[1] > MAX_LISTED_TOGETHER
                if together and (full or len(together) == MAX_CALLS or item.client != together[0].client):
                    self._control.spawn(self._send(address, together, ATTEMPT_NS))
                    together, bytes_, listed = [], 0, 0
                together.append(item)
                bytes_, listed = bytes_ + cost[0], listed + cost[1]
            if together:
                self._control.spawn(self._send(address, together, ATTEMPT_NS))

    async def _send(self, address: str, items: Sequence[_Item], limit_ns: int) -> None:
        calls = Calls(
            items[0].client,
            self._numbers.done_below,
            tuple(Call(item.request, item.number, item.actor) for item in items),
        )
        try:
            answers = (await self._sends(address, calls, max(MS, limit_ns))).answers
            if len(answers) != len(items):
                raise InvariantViolation(f"{address} gave {len(answers)} answers to {len(items)} requests")
        except (UsageError, OverflowError) as error:
            self._sort_out(address, items, limit_ns, error)
            return
        except FireflyerError as error:
            _fail(items, error)
            return
        except asyncio.CancelledError:
            _fail(items, Aborted("the client was closed"))
            raise
        for item, answer in zip(items, answers, strict=True):
            if item.answer is not None and not item.answer.done():
                item.answer.set_result(answer)

    def _sort_out(self, address: str, items: Sequence[_Item], limit_ns: int, error: Exception) -> None:
        """What is wrong with one of them is not the others' fault: they are sent again."""
        good = []
        for item in items:
            refused = refusal(Call(item.request, item.number, item.actor))
            if refused is None:
                good.append(item)
            else:
                _fail([item], refused)
        if len(good) < len(items):
            if good:
                self._control.spawn(self._send(address, good, limit_ns))
        else:
            _fail(good, error if isinstance(error, FireflyerError) else InvariantViolation(str(error)))

    async def _send_rpc(self, address: str, calls: Calls, timeout_ns: int) -> Answers:
        return await self._lines.call_method(address, META, calls, timeout_ns)

    # --- services ---

    def _choose(self, routing_key: bytes) -> str:
        now_s = time.monotonic()
        if self._avoided:
            good = [one for one in self._services if self._avoided.get(one, 0.0) <= now_s]
            if good:
                return service_for(routing_key, good)
        return service_for(routing_key, self._services)

    def _avoid(self, address: str) -> None:
        self._avoided[address] = time.monotonic() + _AVOID_S
        self._learn()

    def _learn(self) -> None:
        if self._learning is None or self._learning.done():
            self._learning = self._control.spawn(self._learned())

    async def _learned(self) -> None:
        try:
            services = await self._control.meta_services()
        except FireflyerError as error:
            _log.info("no manager answers where the meta services are reason=%s", error)
            return
        if services:
            self._services = services
            self._avoided = {one: until_s for one, until_s in self._avoided.items() if one in services}


def _to_be_told(item: _Item) -> bool:
    """It may have been done in the session in which it was sent, and the service says whether, also after the end. Not
    so of opening: what the session had open is lost."""
    return item.in_doubt and item.number != 0 and not isinstance(item.request, Open)


def _lost() -> FileError:
    return file_error(
        errno.ESTALE, "the session of this client has ended, so its files are no longer open; open them again"
    )


def _fail(items: Sequence[_Item], error: FireflyerError) -> None:
    for item in items:
        if item.answer is not None and not item.answer.done():
            item.answer.set_exception(error)
