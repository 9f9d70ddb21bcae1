"""Threads that wait for works and then run what was asked for: they complete futures, which runs their callbacks.

A request is *pending* until its work has ended. Then one thread takes it and runs it: it is *running*. Nothing else of
the same level runs meanwhile, so callbacks run one at a time, in the order in which the futures were asked for.

A callback may itself start a collective and wait for its future (PowerSGD does). The thread that runs the callback
cannot complete that future. So works have a *level*: 0 if an ordinary thread started them, n + 1 if a callback on level
n did. Each level has its own thread, which starts with the first request: the future that a callback waits for is
completed by the thread of the next level. Callbacks keep their order, whatever they wait for on the way.

A callback may also wait for something of its own level, such as the future of a later work. Only another thread can
help then. While a callback runs and others wait for their turn, a watch thread looks at the processor time of the
thread that runs it. When that has not grown for `STUCK_NS`, another thread takes over the level. The blocked thread
ends after its callback. This gives up the order of callbacks for progress; nothing else could go on in any order.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import lru_cache
from types import CodeType
from typing import Final, NamedTuple, Protocol

from fireflyer.base.units import MS, SECOND

__all__ = ["Completer", "Completion", "level_of_new_works", "starts_collectives_inside"]

MAX_LEVELS: Final = 8
"""Works of deeper callbacks belong to the last level."""
MAX_BLOCKED: Final = 32
"""How many threads of a level may be blocked in callbacks at a time."""
STUCK_NS: Final = 200 * MS
_LOOKS: Final = 4
_SLICE_NS: Final = 50 * MS
_SWEEP_NS: Final = 2 * MS
_JOIN_S: Final = 5.0

_COLLECTIVES: Final = frozenset(
    {
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all",
        "all_to_all_single",
        "allgather",
        "allreduce",
        "barrier",
        "broadcast",
        "broadcast_object_list",
        "gather",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "scatter",
    }
)
"""Functions of `torch.distributed`, and methods of its groups."""

_log = logging.getLogger(__name__)


class _OfThread(threading.local):
    level = 0


_here: Final = _OfThread()


def level_of_new_works() -> int:
    """Of works that this thread starts."""
    return min(_here.level, MAX_LEVELS - 1)


@lru_cache(1024)
def starts_collectives_inside(code: CodeType) -> bool:
    """Whether a function that is written inside of this one names an operation of `torch.distributed`.

    >>> starts_collectives_inside((lambda: lambda dist, t: dist.all_reduce(t)).__code__)
    True
    >>> starts_collectives_inside((lambda dist, t: dist.all_reduce(t)).__code__)
    False
    """
    inside = [const for const in code.co_consts if isinstance(const, CodeType)]
    return any(not _COLLECTIVES.isdisjoint(one.co_names) or starts_collectives_inside(one) for one in inside)


class Completion(Protocol):
    """What a completer needs of a work."""

    ordered: bool
    """It ends after all ordered works that were started before it."""
    level: int

    def finished(self) -> bool: ...

    def settle(self, limit_ns: int | None) -> bool: ...

    def give_up(self) -> None:
        """Ends it with an error if it has not ended."""


class _Request(NamedTuple):
    work: Completion
    then: Callable[[], object]


class Completer:
    """Of one process group. Its threads start with the first requests."""

    def __init__(self, name: str, *, inline: bool | None = False) -> None:
        """`inline`: futures that Python asks for wait for their works; None: see `runs_inline`."""
        self._inline = inline
        self._name = name
        self._lock = threading.Lock()
        self._levels: dict[int, _Level] = {}
        self._stopped = False
        _alive.add(self)

    def runs_inline(self, asked_by: CodeType) -> bool:
        """Whether a future that this function asks for is to wait for its work: as was said, else where a function that
        is written inside of it, such as a callback, names a collective. Callbacks that start collectives while the main
        thread starts others have one order on all ranks only there."""
        return starts_collectives_inside(asked_by) if self._inline is None else self._inline

    def add(self, work: Completion, then: Callable[[], object]) -> None:
        """Calls `then` after the end of `work`: in this thread if it has ended, and never after `stop`."""
        if work.finished():
            work.settle(None)
            then()
            return
        with self._lock:
            if self._stopped:
                return
            level = self._levels.get(work.level)
            if level is None:
                level = self._levels[work.level] = _Level(f"{self._name}, level {work.level}", work.level)
            level.add(_Request(work, then))

    def stop(self, *, complete: bool = False) -> None:
        """Ends the threads. What was not run by then is dropped; or run here, if `complete`, so that nobody waits
        for ever: works that have not ended fail."""
        with self._lock:
            self._stopped = True
            levels = list(self._levels.values())
        for level in levels:
            for request in level.stop():
                if complete:
                    request.work.give_up()
                    request.then()


class _Level:
    """Requests of one level, and the threads that run them: at most one at a time is `_serving`."""

    def __init__(self, name: str, number: int) -> None:
        self._name = name
        self._number = number
        lock = threading.Lock()
        self._changed = threading.Condition(lock)
        """There is a request, or the threads are to end."""
        self._to_watch = threading.Condition(lock)
        self._requests: list[_Request] = []
        self._serving: threading.Thread | None = None
        self._watch: threading.Thread | None = None
        self._blocked: list[threading.Thread] = []
        self._in_callback = False
        self._callbacks = 0
        self._stopped = False

    def add(self, request: _Request) -> None:
        with self._changed:
            self._requests.append(request)
            if self._serving is None:
                self._serve_by_another()
            self._changed.notify()
            self._watch_callback()
            self._to_watch.notify()

    def stop(self) -> list[_Request]:
        """Returns those that were not run."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            self._to_watch.notify_all()
            threads = [thread for thread in (self._serving, self._watch, *self._blocked) if thread is not None]
        deadline_s = time.monotonic() + _JOIN_S
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline_s - time.monotonic()))
                if thread.is_alive():
                    _log.warning("a callback of a future did not return before the group was destroyed: %s", self._name)
        left, self._requests = self._requests, []
        return left

    def _serve_by_another(self) -> None:
        self._serving = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._serving.start()

    # --- the thread that serves ---

    def _run(self) -> None:
        _here.level = self._number + 1
        me = threading.current_thread()
        while True:
            with self._changed:
                while not self._requests and not self._stopped and self._serving is me:
                    self._changed.wait()
                if self._stopped or self._serving is not me:
                    self._blocked = [thread for thread in self._blocked if thread is not me]
                    return
                first = self._requests[0].work
                mixed = any(not request.work.ordered for request in self._requests)
            first.settle(_SWEEP_NS if mixed else _SLICE_NS)
            while (request := self._take(me)) is not None:
                request.work.settle(None)
                try:
                    request.then()
                except Exception:  # the futures of later works must be completed nevertheless
                    _log.exception("a future could not be completed: %s", self._name)

    def _take(self, me: threading.Thread) -> _Request | None:
        """The next request whose work has ended."""
        with self._changed:
            if self._serving is not me:
                return None
            self._in_callback = False
            if self._stopped:
                return None
            for index, request in enumerate(self._requests):
                if request.work.finished():
                    del self._requests[index]
                    self._in_callback = True
                    self._callbacks += 1
                    self._watch_callback()
                    return request
            return None

    # --- the thread that watches ---

    def _watch_callback(self) -> None:
        """A callback runs, and others wait for their turn."""
        if self._in_callback and self._requests and self._watch is None and not self._stopped:
            self._watch = threading.Thread(target=self._look, name=f"watch of {self._name}", daemon=True)
            self._watch.start()

    def _look(self) -> None:
        seen: tuple[int, int] | None = None
        looks = 0
        with self._to_watch:
            while not self._stopped:
                if not self._requests:
                    seen = None
                    self._to_watch.wait()
                    continue
                now = self._progress()
                looks = looks + 1 if now is not None and now == seen else 0
                seen = now
                if looks == _LOOKS:
                    self._take_over()
                    seen = None
                self._to_watch.wait(STUCK_NS / _LOOKS / SECOND)

    def _progress(self) -> tuple[int, int] | None:
        """Which callback runs, and the processor time of its thread; None where no callback runs."""
        thread = self._serving
        if not self._in_callback or thread is None or thread.ident is None or not thread.is_alive():
            return None
        return self._callbacks, time.clock_gettime_ns(time.pthread_getcpuclockid(thread.ident))

    def _take_over(self) -> None:
        if len(self._blocked) == MAX_BLOCKED:
            _log.error(
                "%d callbacks of futures wait for others at a time; no more can run (%s)", MAX_BLOCKED, self._name
            )
            return
        if self._serving is not None:
            self._blocked.append(self._serving)
        self._in_callback = False
        self._serve_by_another()


_alive: weakref.WeakSet[Completer] = weakref.WeakSet()


def _stop_all() -> None:
    for completer in list(_alive):
        completer.stop()


atexit.register(_stop_all)
os.register_at_fork(after_in_child=_alive.clear)  # their threads do not exist there
