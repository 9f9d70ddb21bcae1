"""Performs what `core.agent` decides: starts guards that nobody is a parent of, finds and watches them, signals them.

A guard that this agent started and one that it adopted are watched alike: through a pidfd of the process that the guard
has named itself, compared with the time of its start and the boot. How it ended is in the file of its words; without
the word `clean` whatever carries the guard's token is killed first.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from typing import Final

import msgspec

from fireflyer.base.errors import Busy, FireflyerError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.cluster.agent.records import AgentDirectory, GuardRecord
from fireflyer.cluster.core.agent import (
    AgentMachine,
    Begin,
    Effect,
    End,
    Event,
    Forget,
    Guard,
    GuardGone,
    GuardUp,
    Kill,
    Order,
    Refused,
    Spawn,
    StartRequested,
    Terminate,
    Tick,
    Watch,
)
from fireflyer.cluster.schema.hosts import NodeOrders
from fireflyer.runtime.clock import BootClock
from fireflyer.runtime.driver import InlineDriver
from fireflyer.runtime.processes.guarded import MARKER, kill_marked
from fireflyer.runtime.processes.identity import open_process

__all__ = ["TICK_S", "Guards"]

_log = logging.getLogger(__name__)
TICK_S: Final = 1.0
_LOOK_S: Final = 0.05
_STARTER_S: Final = 60.0


class Guards:
    """Made in an event loop; `begin` first. `on_change` is called after a guard has changed its state, `uid` is that of
    this process."""

    def __init__(self, directory: AgentDirectory, on_change: Callable[[str], None], *, uid: int) -> None:
        self._directory = directory
        self._on_change = on_change
        self._clock = BootClock()
        self._machine = AgentMachine(uid)
        self._driver: InlineDriver[Event, Effect] = InlineDriver(
            self._machine, self._perform, now_ns=self._clock.now_ns
        )
        self._orders: dict[str, NodeOrders] = {}
        """Of guards that are being started."""
        self._pidfds: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._refused: Refused | None = None

    def begin(self) -> None:
        self.feed(Begin(self._directory.found()))

    def feed(self, event: Event) -> None:
        self._driver.feed(event)

    def start(self, order: Order, orders: NodeOrders) -> Refused | None:
        """None: it is being started, or was."""
        self._refused = None
        self._orders[order.token] = orders
        try:
            self.feed(StartRequested(order))
        finally:
            self._orders.pop(order.token, None)
        return self._refused

    def get(self, token: str) -> Guard | None:
        return self._machine.guards.get(token)

    def all(self) -> list[Guard]:
        return list(self._machine.guards.values())

    def age_ns(self, guard: Guard) -> int:
        return max(0, self._clock.now_ns() - guard.since_ns)

    async def tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.feed(Tick())

    def close(self) -> None:
        """Guards live on."""
        for task in self._tasks:
            task.cancel()
        for fd in self._pidfds.values():
            os.close(fd)
        self._pidfds.clear()

    # -- effects -------------------------------------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Spawn(order):
                self._run(order.token, self._spawn(order, self._orders[order.token]))
            case Watch(token):
                self._run(token, self._watch(token))
            case Terminate(token):
                self._signal(token, signal.SIGCONT)  # one that is stopped hears nothing else
                self._signal(token, signal.SIGTERM)
            case Kill(token):
                _log.warning("a guard does not end, and is killed token=%s", token)
                self._signal(token, signal.SIGKILL)
                self._run(token, self._sweep(token))
            case Forget(token):
                self._directory.record(token).remove()
            case Refused():
                self._refused = effect

    def _run(self, token: str, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            error = None if task.cancelled() else task.exception()
            if error is not None:
                _log.error("guard is not watched any more token=%s", token, exc_info=error)
                self._gone(token, End(clean=False, reason=f"its agent failed: {type(error).__name__}: {error}"[:500]))

        task.add_done_callback(done)

    def _signal(self, token: str, number: int) -> None:
        fd = self._pidfds.get(token)
        if fd is not None:
            try:
                signal.pidfd_send_signal(fd, number)
            except ProcessLookupError:
                pass  # it has just ended

    async def _sweep(self, token: str) -> None:
        await kill_marked(token)

    def _gone(self, token: str, end: End) -> None:
        self.feed(GuardGone(token, end))
        self._on_change(token)

    # -- a guard's life ------------------------------------------------------------------------------------------------

    async def _spawn(self, order: Order, orders: NodeOrders) -> None:
        record = self._directory.record(order.token)
        try:
            await asyncio.to_thread(_start, record, order, orders)
        except FireflyerError as error:
            if not await kill_marked(order.token):
                raise
            await self._conclude(order.token, record, End(clean=True, reason=f"its guard was not started: {error}"))
            return
        await self._watch(order.token)

    async def _watch(self, token: str) -> None:
        record = self._directory.record(token)
        process = await asyncio.to_thread(record.process)
        while process is None and await asyncio.to_thread(record.lives):
            await asyncio.sleep(_LOOK_S)
            process = await asyncio.to_thread(record.process)
        fd = None if process is None else open_process(process)
        if fd is not None:
            self._pidfds[token] = fd
            self.feed(GuardUp(token))
            self._on_change(token)
            try:
                await _readable(fd)
            finally:
                if self._pidfds.pop(token, None) is not None:
                    os.close(fd)
        await self._conclude(token, record, None)

    async def _conclude(self, token: str, record: GuardRecord, end: End | None) -> None:
        if end is None:
            exit_code, expired, clean = await asyncio.to_thread(record.words)
            if not clean:
                clean = await kill_marked(token)
            reason = "its lease ended" if expired else record.last_log_line() or "its guard ended"
            end = End(clean=clean, reason=reason, exit_code=exit_code)
        try:
            await asyncio.to_thread(record.write_end, end)
        except FireflyerError as error:
            _log.warning("how a guard ended is not on disk token=%s reason=%s", token, error)
        _log.info("guard ended token=%s clean=%s reason=%s", token, end.clean, end.reason)
        self._gone(token, end)


def _start(record: GuardRecord, order: Order, orders: NodeOrders) -> None:
    """Returns when the guard has left this process, or has failed to begin: `watch` tells. Raises `FireflyerError`."""
    record.write_order(order)
    lock = record.lock()
    if lock is None:
        raise Busy("a process of it lives already")
    try:
        with open(record.file("words"), "ab") as words, open(record.file("log"), "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "fireflyer.cluster.agent.start", record.file("process.json")],
                stdin=subprocess.PIPE,
                stdout=words,
                stderr=log,
                pass_fds=(lock,),
                cwd="/",
                env={**os.environ, MARKER: order.token},
                start_new_session=True,
            )
        try:
            process.communicate(msgspec.json.encode(orders) + b"\n", timeout=_STARTER_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    except OSError as error:
        raise translate_os_error(error, f"start a guard with {sys.executable}") from error
    finally:
        os.close(lock)


async def _readable(fd: int) -> None:
    """Of a pidfd: its process has ended."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(fd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(fd)
