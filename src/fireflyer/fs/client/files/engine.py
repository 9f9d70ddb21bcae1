"""Drives the coroutines of files in threads that block, over one ring.

    run(coroutine) ──it waits for a future──> whoever comes first leads: polls the ring, takes what has come, tells the
                                              others; the others sleep until something has come

Coroutines run under one lock, which is released while a thread waits. So between two futures nothing else of this
client runs, and any number of threads may call at once. While a program computes nobody waits in the ring: a thread of
its own takes what comes meanwhile, and now and then looks after what was written.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np

from fireflyer.base.errors import FireflyerError, UsageError
from fireflyer.base.units import MS
from fireflyer.fs.client.control.capabilities import Right
from fireflyer.fs.client.control.control_thread import ControlThread
from fireflyer.fs.client.files.port import Port
from fireflyer.fs.client.futures import ClientFuture
from fireflyer.fs.client.meta import MetaClient
from fireflyer.fs.client.replica_selector import Reads
from fireflyer.fs.client.ring import Completed, Ring
from fireflyer.fs.schema.ids import ClientId
from fireflyer.fs.schema.sessions import CapabilityAnswer

__all__ = ["Records", "ThreadPort"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_LONGEST_NS: Final = 200 * MS
"""In one poll."""
_ALONE_NS: Final = 2 * MS
"""In one wait of the ring, with the lock: where no other thread is there, which costs least."""
_IDLE_S: Final = 0.002
"""After so long without a call the thread of the engine takes what comes."""
LOOK_S: Final = 5.0
_STOP_S: Final = 5.0


class Records:
    """Counts of a batch of plain reads: bytes that there were, or `ring.MISSING`."""

    __slots__ = ("counts", "error", "first", "future", "left")

    def __init__(self, first: int, count: int, future: ClientFuture[Any]) -> None:
        self.first = first
        self.counts = np.zeros(count, dtype=np.int64)
        self.left = count
        self.error: FireflyerError | None = None
        self.future = future


class _Deferred:
    """Work of a file for which nobody could wait where it came up."""

    __slots__ = ("done", "failed", "file", "size", "work")

    def __init__(
        self, work: Coroutine[Any, Any, Any], file: str, size: int, failed: Callable[[Exception], None] | None
    ) -> None:
        self.work = work
        self.file, self.size, self.failed = file, size, failed
        self.done = False


class ThreadPort(Port):
    def __init__(self, ring: Ring, background: ControlThread, meta: MetaClient) -> None:
        super().__init__(ring, meta)
        self.ring = ring
        self._background = background
        self._mutex = threading.Lock()
        self._turn = threading.Condition(self._mutex)
        self._leading = False
        """A thread polls."""
        self._owner = 0
        """The thread that has the lock, and does not wait. Said before all else that is done with the lock."""
        self._inside: dict[int, None] = {}
        """Threads that are in `run`, or about to be."""
        self._later: collections.deque[_Deferred] = collections.deque()
        self._left_by: dict[int, _Deferred] = {}
        """The last of each thread."""
        self._retrying = False
        """A thread is at the work of `_later`."""
        self._records: list[Records] = []
        self._next_tag = 0
        self._last_s = 0.0
        """When a caller has taken something."""
        self._wanted = threading.Event()
        """Something is under way, and nobody may be waiting for it."""
        self._stop = threading.Event()
        self._look: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._thread = threading.Thread(target=self._keep_going, name="files", daemon=True)

    def start(self, look: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """`look`: what is to be done every few seconds."""
        self._look = look
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Its result, in this thread. Not while `busy_here`."""
        if self.busy_here:
            work.close()
            raise UsageError(
                "this thread is inside another call of this file system; a callback or signal handler must not call it"
            )
        me = threading.get_ident()
        self._inside[me] = None
        try:
            with self._mutex:
                self._owner = me
                try:
                    self._retry_all()
                    try:
                        return self._run(work)
                    finally:
                        self._retry_all()
                finally:
                    self._owner = 0
        finally:
            del self._inside[me]

    @property
    def busy_here(self) -> bool:
        """This thread is in the middle of `run`, or has the lock, and something that was called there calls again: the
        garbage collector closes a file object, or a signal came. It cannot wait: while it waits in `run` it may be the
        one that leads. Nor can the thread that speaks with the services, whoever's file is closed there."""
        me = threading.get_ident()
        return self._owner == me or me in self._inside or self._background.is_here

    def later(
        self, work: Coroutine[Any, Any, Any], *, file: str = "a file", size: int = 0,
        failed: Callable[[Exception], None] | None = None,
    ) -> None:  # fmt: skip
        """While `busy_here`: when what runs has ended, or within some seconds. `file`: whose work it is, for people.
        `size`: bytes that are lost if it is not done; when this engine is closed before, the log says so as an error.
        `failed` has what the work raises, which the call that happens to do it does not."""
        left = _Deferred(work, file, size, failed)
        self._left_by[threading.get_ident()] = left
        self._later.append(left)
        self._wanted.set()
        if self._stop.is_set():
            self._forget_later()

    def _forget_later(self) -> None:
        while (left := self._next_deferred()) is not None:
            left.work.close()
            left.done = True
            if left.size:
                _log.error(
                    "%d bytes written to %s are lost: its last reference went inside another call, and the file system "
                    "was closed before they could be sent; close files before the file system",
                    left.size, left.file,
                )  # fmt: skip

    def _next_deferred(self) -> _Deferred | None:
        """`close` takes them without the lock, which `later` may have in this very thread."""
        try:
            return self._later.popleft()
        except IndexError:
            return None

    def _retry_all(self) -> None:
        """In order and by one thread at a time: the bytes that a file object leaves are written before it is closed.
        Waits for what this thread has left; the rest is waited for by whoever is at it."""
        mine = self._left_by.pop(threading.get_ident(), None)
        while self._later or not (mine is None or mine.done):
            if not self._retrying:
                if (left := self._next_deferred()) is not None:
                    self._retry(left)
            elif mine is None or mine.done:
                return
            else:
                self._give_way(self._turn.wait)

    def _retry(self, left: _Deferred) -> None:
        self._retrying = True
        try:
            self._run(left.work)
        except Exception as error:  # of this file, and not of the call that is at work here
            self._say_failed(left, error)
        finally:
            left.done = True
            self._retrying = False
            self._turn.notify_all()

    def _say_failed(self, left: _Deferred, error: Exception) -> None:
        if left.failed is not None:
            left.failed(error)
        if left.size:
            _log.error("%d bytes written to %s are lost: %s", left.size, left.file, error)
        elif isinstance(error, FireflyerError):
            _log.warning("%s was never closed; closing it failed: %s", left.file, error)
        else:
            _log.error("%s was never closed; closing it failed", left.file, exc_info=error)

    def _give_way(self, wait: Callable[[], object]) -> None:
        """`wait` releases the lock, and has it again at its end."""
        self._owner = 0
        try:
            wait()
        finally:
            self._owner = threading.get_ident()

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        error: BaseException | None = None
        while True:
            try:
                future = work.send(None) if error is None else work.throw(error)
            except StopIteration as end:
                self._after()
                result: _T = end.value
                return result
            try:
                error = None
                self._drive(future)
            except BaseException as raised:
                error = raised

    def _after(self) -> None:
        """What was begun goes on."""
        ring = self.ring
        ring.send()
        if ring.under_way:
            self._take()
            if not self._wanted.is_set():
                self._wanted.set()

    def _drive(self, future: ClientFuture[Any]) -> None:
        self.ring.send()
        while not future.done:
            if len(self._inside) == 1 and not self._leading and not future.remote:
                self._take(next((one.left for one in self._records if one.future is future), 1), _ALONE_NS)
                continue
            self._give_way(self._turn.wait if self._leading else self._lead)
            if not self._leading:
                self._take()
        self._last_s = time.monotonic()

    def _lead(self) -> None:
        """Waits without the lock until something has come."""
        released = False
        try:
            self._leading = True
            try:
                self._mutex.release()
            finally:
                released = True  # also where a handler of a signal raises just then
            self.ring.until_ready(_LONGEST_NS)
        finally:
            if released:
                self._mutex.acquire()
            self._leading = False
            self._turn.notify_all()

    def _take(self, least: int = 0, limit_ns: int = 0) -> None:
        over = self.ring.take(least, limit_ns)
        if over is not None:
            self._of_records(over)
        self._turn.notify_all()

    # --- the thread of the engine ---

    def _keep_going(self) -> None:
        due_s = time.monotonic() + LOOK_S
        while not self._stop.is_set():
            self._wanted.wait(max(0.0, due_s - time.monotonic()))
            if self._stop.is_set():
                return
            if time.monotonic() >= due_s:
                due_s = time.monotonic() + LOOK_S
                self._maintain()
            elif time.monotonic() - self._last_s < _IDLE_S or self._leading:
                time.sleep(_IDLE_S)
            else:
                self._take_idle()

    def _take_idle(self) -> None:
        self.ring.until_ready(20 * MS)
        self._take_for_others(idle=True)

    def _take_for_others(self, *, idle: bool = False) -> None:
        with self._mutex:
            self._owner = threading.get_ident()
            try:
                if self._stop.is_set():
                    return
                if idle and not self.ring.under_way:
                    self._wanted.clear()
                elif not self._leading:
                    self._take()
            finally:
                self._owner = 0

    def _maintain(self) -> None:
        try:
            if self._look is not None:
                self.run(self._look())
        except FireflyerError as error:
            _log.info("background flushing of written data failed reason=%s", error)
        self._take_for_others()  # rights that were renewed, and routing, while nothing was under way

    # --- as a port ---

    def wait(self, future: ClientFuture[Any]) -> Generator[Any, None, None]:
        yield future

    def on_lost(self, call: Callable[[ClientId], None]) -> None:
        self.meta.on_lost.append(lambda client: self._background.say(lambda: call(client)))

    def future_of(self, work: Coroutine[Any, Any, Any]) -> ClientFuture[Any]:
        future: ClientFuture[Any] = ClientFuture(self.wait)
        future.remote = True

        def ended(result: Any, error: BaseException | None) -> None:
            if error is not None:
                future.fail(error)
            else:
                future.finish(result)

        self._background.start(work, ended)
        return future

    async def together(self, work: Sequence[Coroutine[Any, Any, None]]) -> list[BaseException | None]:
        ends: list[BaseException | None] = [None] * len(work)
        left, came = len(work), collections.deque(range(len(work)))
        any_: ClientFuture[None] = ClientFuture(self.wait)

        def tell(at: int) -> None:
            came.append(at)
            any_.finish(None)

        try:
            while left:
                while came:
                    at = came.popleft()
                    try:
                        future = work[at].send(None)
                    except StopIteration:
                        left -= 1
                    except Exception as error:
                        ends[at] = error
                        left -= 1
                    else:
                        future.then(partial(tell, at))
                if left and not came:
                    any_ = ClientFuture(self.wait)
                    any_.remote = True  # or one of them may be: they end in other threads, or in the ring
                    await any_
        finally:
            for one in work:
                one.close()
        return ends

    def renew(
        self, right: Right, expires_unix_s: int, ask: Callable[[Right], Coroutine[Any, Any, CapabilityAnswer]]
    ) -> None:
        self._background.loop.call_soon_threadsafe(self._background.control.rights.keep, right, expires_unix_s, ask)

    def drop(self, right: Right) -> None:
        self._background.loop.call_soon_threadsafe(self._background.control.rights.drop, right)
        self._store.forget(right)

    # --- records ---

    def read_records(self, reads: Reads, memory: Any) -> ClientFuture[Any]:
        """An array of `client.READ`, in one call of the ring: an array of counts."""
        future: ClientFuture[Any] = ClientFuture(self.wait)
        records = Records(self._next_tag, len(reads), future)
        self.ring.prepare_reads(self._next_tag, reads, memory)
        self._next_tag += len(reads)
        self._records.append(records)
        self.ring.submit()
        return future

    def _of_records(self, over: Completed) -> None:
        for one in self._records:
            at = over.tags - np.uint64(one.first)  # what is below the first one becomes very large
            mine = at < len(one.counts)
            one.counts[at[mine].astype(np.int64)] = over.counts[mine]
            one.left -= int(np.count_nonzero(mine))
            for tag, error in over.errors.items():
                if 0 <= tag - one.first < len(one.counts):
                    one.error = error
            if not one.left:
                if one.error is not None:
                    one.future.fail(one.error)
                else:
                    one.future.finish(one.counts)
        self._records = [one for one in self._records if one.left]

    # --- the end ---

    def close(self) -> None:
        """The ring is its owner's."""
        with self._mutex:
            self._stop.set()
        self._wanted.set()
        self._thread.join(_STOP_S)
        self._forget_later()
