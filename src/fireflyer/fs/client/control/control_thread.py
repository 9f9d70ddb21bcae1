"""A client's control in a thread of its own, for callers that block. What it says waits until the caller takes it."""

from __future__ import annotations

import asyncio
import atexit
import collections
import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, TypeVar

import uvloop

from fireflyer.base.errors import FireflyerError
from fireflyer.fs.client.control.capabilities import Right
from fireflyer.fs.client.control.session import ControlEvents, ManagerSession
from fireflyer.fs.schema.ids import ClientId
from fireflyer.fs.schema.routing import Node, Routing
from fireflyer.fs.schema.sessions import Session
from fireflyer.identity.handshake import Credential
from fireflyer.runtime.processes.standard_streams import open_standard_streams

__all__ = ["ControlThread"]

_T = TypeVar("_T")
_STOP_S: Final = 5.0


class ControlThread:
    """`fd` is readable while `deliver` has something to say."""

    def __init__(self, managers: Sequence[str], credential: Credential, *, name: str) -> None:
        open_standard_streams()
        self._process = os.getpid()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="chunk client", daemon=True)
        self._thread.start()
        self._inbox: collections.deque[Callable[[ControlEvents], None]] = collections.deque()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.expected = 0
        """Connections and sessions that were asked for and have not come: worth waiting for."""
        self._closed = False
        try:
            self._control: ManagerSession = self.call(_made(managers, credential, name))
        except BaseException:
            self._stop()
            raise
        atexit.register(self.close)

    def open(self, timeout_ns: int) -> Session:
        session = self.call(self._control.open(timeout_ns))
        self._loop.call_soon_threadsafe(self._control.start, self)
        return session

    def call(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Its result, awaited in the thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def start(self, work: Coroutine[Any, Any, _T], ended: Callable[[_T | None, BaseException | None], None]) -> None:
        """Begins it in the thread; `ended` is called with its result, or its error, by `deliver`."""

        def begin() -> None:
            self._loop.create_task(work).add_done_callback(over)

        def over(task: asyncio.Task[_T]) -> None:
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            self._say(lambda _: ended(None if error is not None else task.result(), error))

        self._loop.call_soon_threadsafe(begin)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    @property
    def is_here(self) -> bool:
        """This is its thread, which waits for nobody."""
        return threading.get_ident() == self._thread.ident

    @property
    def control(self) -> ManagerSession:
        """To be used in its loop alone, by `call`."""
        return self._control

    def connect(self, node: Node) -> None:
        self.expected += 1
        self._loop.call_soon_threadsafe(self._control.connect, node)

    def want_routing(self) -> None:
        self._loop.call_soon_threadsafe(self._control.want_routing)

    def want_right(self, right: Right) -> None:
        self._loop.call_soon_threadsafe(self._control.rights.refused, right)

    def exchange(self, client: ClientId) -> None:
        self.expected += 1
        self._loop.call_soon_threadsafe(self._control.exchange, client)

    def say(self, call: Callable[[], None]) -> None:
        """In the loop: `call` is called by `deliver`, in its turn among all that is said."""
        self._say(lambda _: call())

    def keep_right(self, right: Right, expires_unix_s: int) -> None:
        self._loop.call_soon_threadsafe(self._control.rights.keep, right, expires_unix_s)

    def deliver(self, hears: ControlEvents) -> None:
        """Says all that waits to `hears`, in the caller's thread."""
        if not self._inbox:
            return
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass
        while self._inbox:
            self._inbox.popleft()(hears)

    def close(self) -> None:
        """Idempotent; done at the interpreter's exit where nobody did it. A forked child lacks the thread."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        atexit.unregister(self.close)
        try:
            self.call(self._control.close())
        finally:
            self._stop()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_S)
        if not self._thread.is_alive():
            self._loop.close()
        self.deliver(_Closing())
        os.close(self.fd)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _say(self, what: Callable[[ControlEvents], None]) -> None:
        self._inbox.append(what)
        os.eventfd_write(self.fd, 1)

    # --- in the thread of the loop ---

    def learned(self, routing: Routing) -> None:
        self._say(lambda hears: hears.learned(routing))

    def confirmed(self, asked_ns: int) -> None:
        self._say(lambda hears: hears.confirmed(asked_ns))

    def connected(self, node: Node, fd: int) -> None:
        def take(hears: ControlEvents) -> None:
            self.expected -= 1
            hears.connected(node, fd)

        self._say(take)

    def not_connected(self, node: Node, error: FireflyerError) -> None:
        def take(hears: ControlEvents) -> None:
            self.expected -= 1
            hears.not_connected(node, error)

        self._say(take)

    def renewed(self, right: Right, capability: bytes) -> None:
        self._say(lambda hears: hears.renewed(right, capability))

    def denied(self, right: Right) -> None:
        self._say(lambda hears: hears.denied(right))

    def over(self, client: ClientId) -> None:
        self._say(lambda hears: hears.over(client))

    def exchanged(self, client: ClientId, capabilities: Mapping[Right, bytes]) -> None:
        def take(hears: ControlEvents) -> None:
            self.expected -= 1
            hears.exchanged(client, capabilities)

        self._say(take)

    def end(self, reason: str) -> None:
        self._say(lambda hears: hears.end(reason))


class _Closing:
    """Who has not taken what was said yet does not want it any more."""

    def learned(self, routing: Routing) -> None:
        pass

    def confirmed(self, asked_ns: int) -> None:
        pass

    def connected(self, node: Node, fd: int) -> None:  # noqa: ARG002
        os.close(fd)

    def not_connected(self, node: Node, error: FireflyerError) -> None:
        pass

    def renewed(self, right: Right, capability: bytes) -> None:
        pass

    def denied(self, right: Right) -> None:
        pass

    def over(self, client: ClientId) -> None:
        pass

    def exchanged(self, client: ClientId, capabilities: Mapping[Right, bytes]) -> None:
        pass

    def end(self, reason: str) -> None:
        pass


async def _made(managers: Sequence[str], credential: Credential, name: str) -> ManagerSession:
    return ManagerSession(managers, credential, name=name)
