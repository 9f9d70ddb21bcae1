"""Queues before the store: requests that write the same directory or inode are carried out in one transaction.

    put(key, work) ─> queue of the key ──all that wait, `MAX_BATCH` at most──> one transaction, a savepoint each ─> done

As transactions of their own they would conflict for ever, since all of them change the directory; together they cost
one commit. While a queue commits, what comes next waits in it. One queue is best: there is one core to run bodies on,
a group commit takes the time of a sync however much is in it, and two queues would meet in quota trees, links and
renames; on a database also where they have nothing in common, since it finds conflicts by pages.

*Lazy* works begin no transaction: they go with the next one of their queue, or with one of their own when they have
waited for `LAZY_NS`, or are many.

What came first is carried out first, lazy or not. Works that raise are rolled back, and their callers get the error; an
error of the transaction is everybody's, but one that is too large, or finds the disk full, is divided before that is
believed; and where the time was over, it was so for the one that was being carried out: that is told, the others go on
without it.

Requests that only read wait in a queue as well (`Reads`): those of one turn of the loop share a snapshot. Where all is
in memory nothing ever waits, so both let the rest of the process go on between works.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from typing import Any, Final, TypeAlias

from fireflyer.base.errors import Busy, FireflyerError, NoSpace, UsageError
from fireflyer.base.units import MS, SECOND
from fireflyer.kvstore import Engine, Reader, Savepoint, Transaction, TransactionBatch, TransactionTimeout

__all__ = [
    "LAZY_NS",
    "MAX_BATCH",
    "MAX_LAZY",
    "MAX_WAITING",
    "CommitItem",
    "CommitQueues",
    "Later",
    "Prefetch",
    "Reads",
    "in_loop",
]

_log = logging.getLogger(__name__)
MAX_BATCH: Final = 256
"""Requests of one transaction."""
MAX_WAITING: Final = 16384
"""Requests in all queues together; of those that read as many again."""
MAX_FULLNESS: Final = 0.5
"""Of the limits of a transaction: what comes behind it waits for the next one."""
MAX_ATTEMPT_NS: Final = 1 * SECOND
"""An attempt that has run for so long begins no more work."""
MAX_HELD_NS: Final = 5 * MS
"""Then the loop does what else there is."""
TIMEOUT_NS: Final = 20 * SECOND
"""For a transaction with all its attempts."""
LAZY_NS: Final = 50 * MS
MAX_LAZY: Final = 64
"""Works that wait in a queue, when one of them is lazy: their client has no more than 256 numbers."""
Later: TypeAlias = Callable[[int, Callable[[], None]], Callable[[], None]]
"""Nanoseconds, what to call then; how to call it off."""


def in_loop(delay_ns: int, call: Callable[[], None]) -> Callable[[], None]:
    return asyncio.get_running_loop().call_later(delay_ns / SECOND, call).cancel


class CommitItem(abc.ABC):
    """One request."""

    __slots__ = ()

    @property
    def frees_space(self) -> bool:
        """By it, or by what follows from it, there is more room in the store."""
        return False

    @property
    def lazy(self) -> bool:
        """Nobody waits for it."""
        return False

    @abc.abstractmethod
    async def carry_out(self, rows: Savepoint) -> Any:
        """In a savepoint of a transaction (`Reads`: of one that only reads). May run several times, so it has no effect
        but there."""

    @abc.abstractmethod
    def done(self, outcome: Any) -> None:
        """Called once: with what `carry_out` returned when it was committed, or with the error."""


Prefetch: TypeAlias = Callable[[TransactionBatch, Sequence[CommitItem]], Awaitable[None]]
"""Reads what the works are going to read, as far as that is known."""


class _Tasks:
    """That are waited for in the end."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], None] = {}

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)

    async def wait(self) -> None:
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a queue of the meta service failed", exc_info=error)


class _Attempt:
    """The works of a transaction, one after the other."""

    def __init__(self, batch: Sequence[CommitItem]) -> None:
        self.batch = batch
        self.at = 0
        """Of the one that is carried out."""

    def begin(self) -> None:
        self.at = 0

    async def outcomes(self, transaction_batch: TransactionBatch) -> list[Any]:
        """Of the first ones, of one at least. Errors of the transaction itself are among them too: its commit raises
        them again."""
        outcomes: list[Any] = []
        held_ns = time.monotonic_ns()
        until_ns = held_ns + MAX_ATTEMPT_NS
        for at, work in enumerate(self.batch):
            now_ns = time.monotonic_ns()
            if outcomes and (transaction_batch.fullness > MAX_FULLNESS or now_ns > until_ns):
                break
            self.at = at
            if now_ns - held_ns > MAX_HELD_NS:
                await asyncio.sleep(0)
                held_ns = time.monotonic_ns()
            savepoint = transaction_batch.savepoint()
            try:
                outcome = await work.carry_out(savepoint)
            except TransactionTimeout:
                raise  # it was this one's time, and nobody's behind it
            except Exception as error:
                outcomes.append(error)
            else:
                savepoint.release()
                outcomes.append(outcome)
        return outcomes


class _CommitQueue:
    __slots__ = ("call_off", "due", "running", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[CommitItem] = deque()
        self.running = False
        self.due = False
        """Somebody waits for one of them, or they have waited long enough."""
        self.call_off: Callable[[], None] | None = None
        """The time when they have. None: they are due, or there are none."""

    def take(self) -> list[CommitItem]:
        """The first ones; the others are due with them."""
        batch = [self.waiting.popleft() for _ in range(min(len(self.waiting), MAX_BATCH))]
        self.wait_no_more()
        self.due = bool(self.waiting)
        return batch

    def put_back(self, batch: Sequence[CommitItem]) -> None:
        self.waiting.extendleft(reversed(batch))
        self.due = self.due or bool(batch)

    def wait_no_more(self) -> None:
        call_off, self.call_off = self.call_off, None
        if call_off is not None:
            call_off()


class CommitQueues:
    """Lives in one loop. `prepare` is awaited before each transaction with the number of works that it may hold;
    `prefetch` at its begin, with the works. `later`: another clock than the loop's, for lazy works."""

    def __init__(
        self,
        engine: Engine,
        *,
        width: int,
        prepare: Callable[[int], Awaitable[None]],
        prefetch: Prefetch | None = None,
        later: Later = in_loop,
    ) -> None:
        self._engine = engine
        self._prefetch = prefetch
        self._prepare = prepare
        self._later = later
        self._queues = [_CommitQueue() for _ in range(width)]
        self._tasks = _Tasks()
        self._closed = False
        self.waiting = 0
        """Works that are not done."""
        self.transactions = 0
        """That were committed, or failed for good."""

    def put(self, key: Hashable, work: CommitItem) -> None:
        """Raises `Busy` when too many wait, also after `close`."""
        if self._closed:
            raise Busy("the meta service is stopping; ask another one")
        if self.waiting >= MAX_WAITING:
            raise Busy(f"the meta service is overloaded: {self.waiting} requests wait for the store; try again later")
        queue = self._queues[hash(key) % len(self._queues)]
        queue.waiting.append(work)
        self.waiting += 1
        if queue.due:
            return
        if not work.lazy or len(queue.waiting) >= MAX_LAZY:
            self._begin(queue)
        elif queue.call_off is None:
            queue.call_off = self._later(LAZY_NS, lambda: self._begin(queue))

    def _begin(self, queue: _CommitQueue) -> None:
        queue.wait_no_more()
        queue.due = True
        if not queue.running:
            queue.running = True
            self._tasks.spawn(self._run(queue))

    async def close(self) -> None:
        """What waits is refused; transactions under way come to their end."""
        self._closed = True
        for queue in self._queues:
            queue.wait_no_more()
            while queue.waiting:
                self._finish(queue.waiting.popleft(), Busy("the meta service is stopping; ask another one"))
        await self._tasks.wait()

    async def _run(self, queue: _CommitQueue) -> None:
        try:
            while queue.due and (batch := queue.take()):
                queue.put_back(await self._transact(batch))
        finally:
            queue.running = False

    def _finish(self, work: CommitItem, outcome: Any) -> None:
        self.waiting -= 1
        work.done(outcome)

    async def _transact(self, batch: Sequence[CommitItem], *, again: bool = False) -> Sequence[CommitItem]:
        """Those that are still to be done. `again`: one that found the disk full, or a transaction too large."""
        frees_space = again and batch[0].frees_space
        self.transactions += 1
        attempt = _Attempt(batch)

        async def body(transaction: Transaction) -> list[Any]:
            attempt.begin()
            if frees_space:
                transaction.frees_space()
            transaction_batch = TransactionBatch(transaction, transaction)
            if self._prefetch is not None:
                await self._prefetch(transaction_batch, batch)
            return await attempt.outcomes(transaction_batch)

        try:
            await self._prepare(len(batch))
            outcomes = await self._engine.transact(body, timeout_ns=TIMEOUT_NS, idempotent=True)
        except (UsageError, NoSpace) as error:
            if len(batch) > 1 or (batch[0].frees_space and not again):
                for work in batch:
                    await self._transact([work], again=True)
            else:
                self._finish(batch[0], error)
            return ()
        except TransactionTimeout as error:
            self._finish(batch[attempt.at], error)
            return [*batch[: attempt.at], *batch[attempt.at + 1 :]]
        except Exception as error:
            if not isinstance(error, FireflyerError):
                _log.exception("a transaction of the meta service failed unexpectedly")
            for work in batch:
                self._finish(work, error)
            return ()
        for work, outcome in zip(batch, outcomes, strict=False):
            self._finish(work, outcome)
        return batch[len(outcomes) :]


class Reads:
    """Lives in one loop."""

    def __init__(self, engine: Engine, prefetch: Prefetch | None = None) -> None:
        self._engine = engine
        self._prefetch = prefetch
        self._waiting: deque[CommitItem] = deque()
        self._tasks = _Tasks()
        self._scheduled = False

    def put(self, work: CommitItem) -> None:
        """Raises `Busy` when too many wait."""
        if len(self._waiting) >= MAX_WAITING:
            raise Busy(
                f"the meta service is overloaded: {len(self._waiting)} requests wait to read the store; try again later"
            )
        self._waiting.append(work)
        if not self._scheduled:
            self._scheduled = True
            self._tasks.spawn(self._run())

    async def close(self) -> None:
        await self._tasks.wait()

    async def _run(self) -> None:
        """What has come by now; what comes while it waits for the store gets a transaction beside this one."""
        self._scheduled = False
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_BATCH))]
            self._waiting.extendleft(reversed(await self._read(batch)))

    async def _read(self, batch: Sequence[CommitItem]) -> Sequence[CommitItem]:
        """Those that are still to be read."""
        attempt = _Attempt(batch)

        async def body(reader: Reader) -> list[Any]:
            attempt.begin()
            transaction_batch = TransactionBatch(reader)
            if self._prefetch is not None:
                await self._prefetch(transaction_batch, batch)
            return await attempt.outcomes(transaction_batch)

        try:
            outcomes = await self._engine.read(body, timeout_ns=TIMEOUT_NS)
        except TransactionTimeout as error:
            batch[attempt.at].done(error)
            return [*batch[: attempt.at], *batch[attempt.at + 1 :]]
        except Exception as error:
            if not isinstance(error, FireflyerError):
                _log.exception("reading for the meta service failed unexpectedly")
            outcomes = [error] * len(batch)
        for work, outcome in zip(batch, outcomes, strict=False):
            work.done(outcome)
        return batch[len(outcomes) :]
