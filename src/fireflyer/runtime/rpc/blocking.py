"""The calling end for synchronous code: an `RpcClient` on an event loop in a daemon thread of its own.

Threads may share a client. A process made by `fork` may not use its parent's (the thread is not there): it is told so.
At interpreter exit every client that is still open is closed, so that nothing warns about open sockets.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import threading
import weakref
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

import uvloop

from fireflyer.base.errors import Aborted, Busy, FireflyerError, Timeout, UsageError
from fireflyer.base.units import SECOND, format_duration
from fireflyer.identity.handshake import Credential
from fireflyer.runtime.address import Address
from fireflyer.runtime.framing import DEFAULT_MAX_FRAME_BYTES
from fireflyer.runtime.processes.standard_streams import open_standard_streams
from fireflyer.runtime.rpc.client import RpcClient
from fireflyer.runtime.rpc.messages import Method, Req, Resp

__all__ = ["MAX_NOTIFICATIONS_QUEUED", "BlockingRpcClient"]

MAX_NOTIFICATIONS_QUEUED = 1024
_GRACE_S = 5.0
_T = TypeVar("_T")


class BlockingRpcClient:
    """An `RpcClient` for synchronous callers; made by `connect`. Also a context manager."""

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: threading.Thread, client: RpcClient) -> None:
        self.address = client.address
        self._loop = loop
        self._thread = thread
        self._client = client
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._queued = threading.BoundedSemaphore(MAX_NOTIFICATIONS_QUEUED)
        _open_clients.add(self)

    @classmethod
    def connect(
        cls,
        address: Address | str,
        credential: Credential,
        timeout_ns: int,
        *,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
    ) -> BlockingRpcClient:
        """Raises as `RpcClient.connect` does."""
        open_standard_streams()
        loop = uvloop.new_event_loop()
        thread = threading.Thread(target=_run_loop, args=(loop,), name=f"rpc {address}", daemon=True)
        thread.start()
        try:
            work = RpcClient.connect(address, credential, timeout_ns, max_frame_bytes=max_frame_bytes)
            client = _wait(asyncio.run_coroutine_threadsafe(work, loop), timeout_ns)
        except BaseException:
            _stop_loop(loop, thread)
            raise
        return cls(loop, thread, client)

    @property
    def server_identity(self) -> str:
        return self._client.server_identity

    @property
    def lost(self) -> FireflyerError | None:
        """Reason why this connection cannot be used any more, None while it can."""
        return self._client.lost

    def call(self, method: Method[Req, Resp], request: Req, timeout_ns: int) -> Resp:
        """Raises as `RpcClient.call` does. An interrupt (Ctrl-C) gives the call up."""
        return _wait(self._submit(self._client.call(method, request, timeout_ns)), timeout_ns)

    def notify(self, method: Method[Req, Resp], request: Req) -> None:
        """Queues the request and returns at once. Raises `Unreachable` when the connection is known to be lost, `Busy`
        when `MAX_NOTIFICATIONS_QUEUED` are waiting to be sent."""
        if (lost := self._client.lost) is not None:
            raise type(lost)(f"{method.name}: {lost}")
        if not self._queued.acquire(blocking=False):
            raise Busy(f"{method.name}: {MAX_NOTIFICATIONS_QUEUED} notifications to {self.address} are waiting already")

        def sent(future: concurrent.futures.Future[None]) -> None:
            self._queued.release()
            if not future.cancelled():
                future.exception()  # a lost connection is told by the next call

        try:
            future = self._submit(self._client.notify(method, request))
        except BaseException:
            self._queued.release()
            raise
        future.add_done_callback(sent)

    def close(self) -> None:
        """Idempotent. Calls in flight in other threads raise `Aborted`; queued notifications are sent first."""
        if os.getpid() != self._owner:  # before the lock, which another thread may have held during the fork
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        _open_clients.discard(self)
        try:
            _wait(asyncio.run_coroutine_threadsafe(self._client.close(), self._loop), SECOND)
        except Timeout:
            pass  # the thread is a daemon's: it ends with the process
        finally:
            _stop_loop(self._loop, self._thread)

    def _submit(self, work: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        if os.getpid() != self._owner:
            work.close()
            raise UsageError(f"the client of {self.address} was made before a fork; connect again in the new process")
        with self._lock:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise Aborted(f"the client of {self.address} was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_open_clients: weakref.WeakSet[BlockingRpcClient] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for client in list(_open_clients):
        client.close()


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    for task in asyncio.all_tasks(loop):
        task.cancel()
        try:
            loop.run_until_complete(task)
        except (asyncio.CancelledError, FireflyerError):
            pass
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def _stop_loop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    thread.join(_GRACE_S)


def _wait(future: concurrent.futures.Future[_T], timeout_ns: int) -> _T:
    try:
        return future.result(timeout_ns / SECOND + _GRACE_S)
    except concurrent.futures.CancelledError:
        raise Aborted("the client was closed during a call") from None
    except FireflyerError:
        raise
    except TimeoutError:
        future.cancel()
        limit = format_duration(timeout_ns)
        raise Timeout(f"the RPC thread did not answer within {limit} and 5 s; was this process stopped?") from None
    except BaseException:
        future.cancel()
        raise
