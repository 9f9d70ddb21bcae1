"""Runs a pure machine in the real world: `Driver` on asyncio, `InlineDriver` and `BlockingDriver` in a thread.

The machine decides, the driver acts: `post` queues an event, the loop hands it to `machine.handle` with the clock's
time, and every effect that comes back goes to `perform`, in order, before the next event. Events that `perform` posts
wait their turn, so the machine is never entered twice. Slow work belongs into `spawn`: it runs beside the machine and
posts what came of it.

An error in the machine, in `perform` or in spawned work is a bug of ours: the driver stops and `run` raises it.
"""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, Protocol, TypeVar

import uvloop

from fireflyer.base.errors import Aborted, Busy
from fireflyer.base.ports import Clock
from fireflyer.runtime.clock import MonotonicClock
from fireflyer.runtime.processes.standard_streams import open_standard_streams

__all__ = ["MAX_EVENTS_QUEUED", "BlockingDriver", "Driver", "InlineDriver", "Machine", "run"]

MAX_EVENTS_QUEUED = 65536
_E = TypeVar("_E")
_F = TypeVar("_F")
_T = TypeVar("_T")
_EventIn = TypeVar("_EventIn", contravariant=True)
_EffectOut = TypeVar("_EffectOut", covariant=True)


class Machine(Protocol[_EventIn, _EffectOut]):
    """State and decisions, without IO: `handle` may only compute."""

    def handle(self, now_ns: int, event: _EventIn) -> Sequence[_EffectOut]: ...


def run(main: Coroutine[Any, Any, _T]) -> _T:
    """Runs `main` to its end on a fresh uvloop loop and returns its result. Ctrl-C cancels it, then raises
    `KeyboardInterrupt`."""
    open_standard_streams()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


class InlineDriver(Generic[_E, _F]):
    """Handles an event at once, in the thread that feeds it. For a machine whose caller needs the outcome when `feed`
    returns. Not for use by two threads at once."""

    __slots__ = ("_events", "_handle", "_handling", "_now_ns", "_perform")

    def __init__(
        self, machine: Machine[_E, _F], perform: Callable[[_F], None], *, now_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._handle = machine.handle
        self._perform = perform
        self._now_ns = now_ns
        self._events: collections.deque[_E] = collections.deque()
        self._handling = False

    def feed(self, event: _E, now_ns: int = 0) -> None:
        """Returns when the event's effects are performed, and those of the events that these have fed. Fed by an
        effect, it returns at once: the machine is never entered twice. `now_ns`: the time, where the caller has just
        asked for it. Raises what the machine or `perform` raises; events that wait then are handled by the next
        `feed`."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                for effect in self._handle(now_ns or self._now_ns(), self._events.popleft()):
                    self._perform(effect)
        finally:
            self._handling = False


class BlockingDriver(Generic[_E, _F]):
    """For a machine whose effects may block: each is performed to its end, one after the other, and gives the event
    that the machine hears next. Threads may take turns, but use it one at a time."""

    def __init__(
        self, machine: Machine[_E, _F], perform: Callable[[_F], _E], *, now_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._handle = machine.handle
        self._perform = perform
        self._now_ns = now_ns
        self._effects: collections.deque[_F] = collections.deque()

    def post(self, event: _E) -> None:
        """Lets the machine hear `event`; its effects wait for `step` or `run`. Raises what the machine raises."""
        self._effects.extend(self._handle(self._now_ns(), event))

    def step(self) -> bool:
        """Performs the next effect, and lets the machine hear what came of it. False: there was none. Raises what the
        machine or `perform` raises."""
        if not self._effects:
            return False
        self.post(self._perform(self._effects.popleft()))
        return True

    def run(self) -> None:
        """Until no effect is left."""
        while self.step():
            pass


class Driver(Generic[_E, _F]):
    """See the module's text. Lives in the loop in which it is made, and is called there only."""

    def __init__(self, machine: Machine[_E, _F], perform: Callable[[_F], None], *, clock: Clock | None = None) -> None:
        self._machine = machine
        self._perform = perform
        self._clock = clock or MonotonicClock()
        self._loop = asyncio.get_running_loop()
        self._events: collections.deque[_E] = collections.deque()
        self._scheduled = False
        self._finished: asyncio.Future[None] = self._loop.create_future()
        self._tasks: set[asyncio.Task[Any]] = set()

    def post(self, event: _E) -> None:
        """Queues an event; ignored once the driver has stopped. Raises `Busy` over `MAX_EVENTS_QUEUED`."""
        if self._finished.done():
            return
        if len(self._events) >= MAX_EVENTS_QUEUED:
            raise Busy(f"{MAX_EVENTS_QUEUED} events are queued already")
        self._events.append(event)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs `work` beside the machine; cancelled when the driver stops."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def stop(self) -> None:
        """No more events are handled; `run` returns. Effects of the event in hand are still performed."""
        self._finish(None)

    async def run(self) -> None:
        """Waits until `stop`, then ends spawned work. Raises what broke the driver. Cancelling it stops."""
        try:
            await asyncio.shield(self._finished)
        finally:
            self._finish(Aborted("the driver was cancelled"))
            self._events.clear()
            for task in self._tasks:
                task.cancel()
            while self._tasks:
                await asyncio.wait(self._tasks)
            self._finished.exception()  # seen: either raised above or our own, for a cancelled run

    def _drain(self) -> None:
        self._scheduled = False
        # Only what is queued now: events that come of these wait, so that sockets get their turn in between.
        for _ in range(len(self._events)):
            if self._finished.done():
                return
            self._step(self._events.popleft())

    def _step(self, event: _E) -> None:
        try:
            for effect in self._machine.handle(self._clock.now_ns(), event):
                self._perform(effect)
        except Exception as error:
            self._finish(error)

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._finish(error)

    def _finish(self, error: BaseException | None) -> None:
        if self._finished.done():
            return
        if error is None:
            self._finished.set_result(None)
        else:
            self._finished.set_exception(error)
