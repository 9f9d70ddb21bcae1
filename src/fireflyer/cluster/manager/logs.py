"""The logs of runs as a manager serves them: taken from the nodes, read by people, removed when they are old.

Only the manager that leads has the store open, under a lock on its directory: another one that was the leader and hangs
keeps logs from being read, never from being right. Nodes send again what it did not take.

    nodes ──append, end──> LogStore (threads) ──growth──> who follows the task
    task's changes ────────────────────────────────────────────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple, ParamSpec, TypeVar

from fireflyer.base.errors import Busy, FireflyerError, NotFound, TransientError, UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.objects.log_follow import MAX_TEXT_BYTES, LogFollower, LogPosition, rest
from fireflyer.cluster.core.platform.views import TaskView
from fireflyer.cluster.manager.platform import Platform, TaskProgress
from fireflyer.cluster.manager.rights import check_reads_logs
from fireflyer.cluster.objects import LogStore, RunKey, open_objects
from fireflyer.cluster.objects.log_store import SearchPage
from fireflyer.cluster.objects.named_files import open_files
from fireflyer.cluster.schema.api import Change
from fireflyer.cluster.schema.logs import (
    LAUNCHER,
    AppendLog,
    EndLog,
    LogAnswer,
    LogEvent,
    LogPiece,
    LogsEnded,
    LogsState,
    RunLogs,
    StreamView,
    TaskLogs,
    rank_log_of,
    stream_of_rank,
)
from fireflyer.cluster.schema.tasks import FINISHED, TaskState

__all__ = ["KEEP_ALIVE_S", "MAX_FOLLOWERS_OF_USER", "LogLimits", "Logs", "Reader"]

_log = logging.getLogger(__name__)
_P = ParamSpec("_P")
_T = TypeVar("_T")
THREADS: Final = 8
LOOK_S: Final = 1.0
SWEEP_S: Final = 3600.0
BLOB_GRACE_NS: Final = 24 * 3600 * SECOND
"""A blob is put before the index names it; see 0044."""
MAX_FOLLOWERS: Final = 512
MAX_FOLLOWERS_OF_USER: Final = 32
MAX_LISTED_RUNS: Final = 100
KEEP_ALIVE_S: Final = 15.0
PATIENCE_NS: Final = 30 * SECOND
"""After the end of a run its node is expected to have sent all logs; else they count as incomplete."""
PATIENCE_WITHOUT_LOGS_NS: Final = 5 * SECOND


class LogLimits(NamedTuple):
    of_run_bytes: int
    keep_ns: int


class Reader(NamedTuple):
    """Who asks."""

    user: str
    roles: tuple[str, ...]


class _Follower:
    def __init__(self, user: str) -> None:
        self.user = user
        self.news = asyncio.Event()


class Logs:
    """Lives in the loop in which it is made; `run` beside the platform."""

    def __init__(self, platform: Platform, directory: str, objects: str, limits: LogLimits) -> None:
        """`directory`: of the newest bytes. `objects`: as in the configuration; logs have the folders `logs` and
        `log-indexes` there for themselves. Raises `UsageError`."""
        for name, where, is_path in (("objects", objects, "://" not in objects), ("logs_directory", directory, True)):
            if is_path and not os.path.isabs(where):
                raise UsageError(f"{name} {where!r} is not an absolute path; the manager may be started anywhere")
        self._platform = platform
        self._directory = directory
        self._objects = f"{objects.rstrip('/')}/logs"
        self._indexes = f"{objects.rstrip('/')}/log-indexes"
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(THREADS, "logs")
        self._opening = asyncio.Lock()
        self._store: LogStore | None = None
        self._lock_fd = -1
        self._followers: dict[int, set[_Follower]] = {}
        """Of each task that is followed."""

    async def run(self) -> None:
        """Until it is cancelled: removes old logs while this manager leads, and lets go of the store when it does
        not."""
        swept_s = time.monotonic() - SWEEP_S + 60.0  # not while a new leader is busiest
        try:
            while True:
                await self.let_go_unless_leading()
                if self._platform.leads and time.monotonic() - swept_s >= SWEEP_S:
                    swept_s = time.monotonic()
                    try:
                        await self.sweep()
                    except FireflyerError as error:
                        _log.warning("old logs could not be removed, which is tried again reason=%s", error)
                await asyncio.sleep(LOOK_S)
        finally:
            await self._let_go()
            self._threads.shutdown()

    # --- from nodes ---

    async def append(self, node: str, request: AppendLog) -> LogAnswer:
        """Raises `NotFound` where nothing is taken of this run from this node, for good; `Busy`, `NoSpace`."""
        self._check_sender(node, request.task, request.run, request.run_token)
        store = await self._open()
        answer = await self._in_thread(store.append, RunKey(request.task, request.run), request.chunk)
        self._platform.require_lead()  # else the next leader may have read before this was written
        return answer

    async def end(self, node: str, request: EndLog) -> LogAnswer:
        """As `append`."""
        self._check_sender(node, request.task, request.run, request.run_token)
        store = await self._open()
        answer = await self._in_thread(store.close, RunKey(request.task, request.run), request.end)
        self._platform.require_lead()
        return answer

    def _check_sender(self, node: str, task: int, run: int, token: str) -> None:
        if (token, node) != self._platform.run_place(task, run):
            raise NotFound(f"run {run} of task {task} has no launcher on {node}")
        progress = self._platform.progress(task)
        if self._is_old(progress.view, progress.time_ns):
            raise NotFound(f"the logs of task {task} are not kept any more")

    # --- for people: all raise `PermissionDenied`, `NotFound`, `Elsewhere` ---

    async def of_task(self, reader: Reader, task: int) -> TaskLogs:
        runs = self.check_reader(reader, task)
        found = [RunLogs(run, await self.streams(task, run)) for run in range(max(0, runs - MAX_LISTED_RUNS), runs)]
        return TaskLogs(task, tuple(one for one in found if one.streams))

    async def piece(
        self, reader: Reader, task: int, run: int, stream: str, offset: int, max_bytes: int = MAX_TEXT_BYTES
    ) -> LogPiece:
        self.check_reader(reader, task)
        return await self._piece(task, run, stream, offset, max_bytes)

    async def search(self, task: int, begin: LogPosition, text: str, most: int) -> SearchPage:
        """One log, from `begin` on, whose task the caller may read."""
        store = await self._open()
        stream = stream_of_rank(begin.attempt, begin.rank)
        return await self._in_thread(store.search, RunKey(task, begin.run), stream, text, begin.offset, most)

    def check_reader(self, reader: Reader, task: int) -> int:
        """How many runs the task has had."""
        view = self._platform.progress(task).view
        check_reads_logs(view, *reader)
        return view.runs

    async def streams(self, task: int, run: int) -> tuple[StreamView, ...]:
        """Nothing where there are no logs."""
        store = await self._open()
        try:
            infos = await self._in_thread(store.streams, RunKey(task, run))
        except NotFound:
            return ()
        views = []
        for info in infos:
            attempt, rank = rank_log_of(info.stream) or (None, None)
            gaps = tuple((gap.begin, gap.end) for gap in info.gaps)
            view = StreamView(name=info.stream, attempt=attempt, rank=rank, end=info.end, gaps=gaps, cut=info.cut,
                              closed=info.closed)  # fmt: skip
            views.append(view)
        return tuple(views)

    async def _piece(self, task: int, run: int, stream: str, offset: int, max_bytes: int) -> LogPiece:
        store = await self._open()
        page = await self._in_thread(store.read, RunKey(task, run), stream, offset, max_bytes)
        return LogPiece(
            offset=page.offset, data=page.data, next_offset=page.next_offset, cut=page.cut, closed=page.closed
        )

    def follow(
        self, reader: Reader, task: int, follower: LogFollower, *, wait: bool
    ) -> AsyncIterator[tuple[LogEvent, LogPosition | None] | None]:
        """What the ranks print, as `follower` wants it; None: nothing for a while. With `wait` until the task has
        finished. The next one is read when it is asked for, so a slow reader costs nothing. Raises at once."""
        self.check_reader(reader, task)
        following = [one.user for followers in self._followers.values() for one in followers]
        mine = following.count(reader.user)
        if mine >= MAX_FOLLOWERS_OF_USER or len(following) >= MAX_FOLLOWERS:
            raise Busy(f"{mine} clients of {reader.user} follow logs already; end some, or try again later")
        return self._following(reader.user, task, follower, wait)

    async def _following(
        self, user: str, task: int, follower: LogFollower, wait: bool
    ) -> AsyncIterator[tuple[LogEvent, LogPosition | None] | None]:
        me = _Follower(user)
        self._followers.setdefault(task, set()).add(me)
        try:
            async for event in self._events(task, follower, me.news, wait):
                yield event
        except TransientError as error:
            _log.info("a reader of logs is sent away task=%d reason=%s", task, error)  # and asks again, elsewhere
        finally:
            self._followers[task].discard(me)
            if not self._followers[task]:
                del self._followers[task]

    async def _events(
        self, task: int, follower: LogFollower, news: asyncio.Event, wait: bool
    ) -> AsyncIterator[tuple[LogEvent, LogPosition | None] | None]:
        said: tuple[TaskState, int] | None = None
        complete = True
        while True:
            news.clear()
            progress = self._platform.progress(task)
            view = progress.view
            if wait and (view.state, view.runs) != said:
                said = (view.state, view.runs)
                yield LogsState(state=view.state, runs=view.runs, why=self._platform.why(task)), None
            streams = await self.streams(task, follower.run) if follower.run < view.runs else ()
            read = follower.next(streams)
            if read is not None:
                stream = next(one for one in streams if one.name == read.stream)
                piece = await self._piece(task, follower.run, read.stream, read.offset, MAX_TEXT_BYTES)
                found = follower.taken(stream, piece)
                if found is not None:
                    yield found
                continue
            sent, left_ns = _is_sent(streams), _patience_ns(progress, follower.run, streams)
            if not sent and left_ns == 0 and follower.flush():
                continue
            what = rest(
                follow=wait,
                only=follower.only_run is not None,
                complete=sent or left_ns == 0,
                more_runs=view.runs > follower.run + 1,
                finished=view.state is FINISHED,
            )
            if what == "wait":
                if not await _happened(news, left_ns):
                    yield None
                continue
            complete = complete and (sent or follower.run >= view.runs)
            if what == "end":
                yield _ended(view, complete=complete), None
                return
            follower.go_on()

    # --- old logs ---

    async def sweep(self) -> None:
        """Removes what is older than it is kept, and then the blobs that no log names."""
        store = await self._open()
        for run in await self._in_thread(store.runs):
            if await self._may_go(store, run):
                _log.info("logs are removed task=%d run=%d", run.task, run.run)
                await self._in_thread(store.remove, run)
        removed = await self._in_thread(store.collect, time.time_ns() - BLOB_GRACE_NS)
        _log.info("logs were swept blobs=%d", removed)

    async def _may_go(self, store: LogStore, run: RunKey) -> bool:
        """Logs of a task that the platform has forgotten go when nothing was written of them for as long."""
        try:
            progress = self._platform.progress(run.task)
        except NotFound:
            return time.time_ns() - await self._in_thread(store.changed_ns, run) > self._limits.keep_ns
        return self._is_old(progress.view, progress.time_ns)

    def _is_old(self, view: TaskView, time_ns: int) -> bool:
        return view.ended_ns is not None and time_ns - view.ended_ns > self._limits.keep_ns

    # --- the store ---

    def on_change(self, change: Change) -> None:
        """A task, which its followers are told."""
        if change.what == "task":
            self._wake(int(change.name))

    def _wake(self, task: int) -> None:
        for follower in self._followers.get(task, ()):
            follower.news.set()

    async def _open(self) -> LogStore:
        """Raises `Elsewhere`, `Busy`."""
        async with self._opening:
            self._platform.require_lead()
            if self._store is None:
                self._store = await self._in_thread(self._opened)
            return self._store

    def _opened(self) -> LogStore:
        try:
            os.makedirs(self._directory, mode=0o700, exist_ok=True)
            path = os.path.join(self._directory, "lock")
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                raise Busy(f"another manager has {self._directory} still; try again in some seconds") from None
            self._lock_fd = fd
        except OSError as error:
            raise translate_os_error(error, f"open {self._directory}") from error

        def grown(run: RunKey, _stream: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._wake, run.task)

        return LogStore(
            self._directory,
            open_objects(self._objects),
            index_files=open_files(self._indexes),
            max_run_bytes=self._limits.of_run_bytes,
            on_growth=grown,
        )

    async def let_go_unless_leading(self) -> None:
        """Then another manager can open the store."""
        async with self._opening:
            if not self._platform.leads:
                await self._let_go()

    async def _let_go(self) -> None:
        """Of the store, once no thread uses it any more."""
        self._store = None
        if self._lock_fd < 0:
            return
        old, self._threads = self._threads, ThreadPoolExecutor(THREADS, "logs")
        await asyncio.to_thread(old.shutdown)
        os.close(self._lock_fd)
        self._lock_fd = -1

    async def _in_thread(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return await self._loop.run_in_executor(self._threads, lambda: function(*args, **kwargs))


async def _happened(news: asyncio.Event, limit_ns: int | None) -> bool:
    limit_s = KEEP_ALIVE_S if limit_ns is None else min(KEEP_ALIVE_S, limit_ns / SECOND)
    try:
        async with asyncio.timeout(limit_s):
            await news.wait()
    except TimeoutError:
        return False
    return True


def _is_sent(streams: tuple[StreamView, ...]) -> bool:
    """The log of the launcher is closed after all others."""
    return any(one.name == LAUNCHER and (one.closed or one.cut) for one in streams)


def _patience_ns(progress: TaskProgress, number: int, streams: tuple[StreamView, ...]) -> int | None:
    """How long more is expected of this run; None: nobody knows, as it has not ended."""
    run = next((one for one in progress.runs if one.number == number), None)
    if run is None:
        return 0 if progress.view.state is FINISHED or number + 1 < progress.view.runs else None
    ended_ns = run.over_ns or run.ended_ns
    if ended_ns is None:
        return None
    patience_ns = PATIENCE_NS if streams or run.started_ns is not None else PATIENCE_WITHOUT_LOGS_NS
    return max(0, ended_ns + patience_ns - progress.time_ns)


def _ended(view: TaskView, *, complete: bool) -> LogsEnded:
    return LogsEnded(
        state=view.state, outcome=view.outcome, exit_code=view.exit_code, reason=view.reason, complete=complete
    )
