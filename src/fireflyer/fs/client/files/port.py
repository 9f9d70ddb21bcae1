"""What open files need of the world: chunks, the meta service, and to be told of both. Two of them: `LoopPort` for an
event loop, `client.files.engine.ThreadPort` for threads."""

from __future__ import annotations

import abc
import asyncio
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, Final, NamedTuple, Protocol

from fireflyer.base.errors import Aborted, FireflyerError, error_from_wire
from fireflyer.fs.client.chunks import Chunks, chains_of, change_of
from fireflyer.fs.client.control.capabilities import Right
from fireflyer.fs.client.control.session import ManagerSession
from fireflyer.fs.client.futures import ClientFuture
from fireflyer.fs.client.meta import MetaClient
from fireflyer.fs.core.requests.effects import DataArrived, Failed, QuerySpec
from fireflyer.fs.schema.chunks import Change, QueryKind
from fireflyer.fs.schema.ids import ChainId, ChunkId, ClientId, TableId
from fireflyer.fs.schema.meta import Actor, Answer, Request
from fireflyer.fs.schema.routing import Routing
from fireflyer.fs.schema.sessions import CapabilityAnswer

__all__ = ["MISSING", "ChunkBytes", "LoopPort", "Port"]

MISSING: Final = -1
"""Count of a read of a chunk that is not there."""


class ChunkBytes(NamedTuple):
    """What a read of a chunk has brought, verified."""

    length: int
    """Fewer than asked for before the chunk's end, or `MISSING`."""
    crc32c: int
    """Of these bytes."""


_NO_CHUNK: Final = ChunkBytes(MISSING, 0)


class _Store(Protocol):
    """`Chunks` or `Ring`."""

    @property
    def routing(self) -> Routing: ...
    def begin(
        self, chain: ChainId, chunk: ChunkId, what: Change | QuerySpec, memory: memoryview | None,
        done: Callable[[Any], None], timeout_ns: int | None = None,
    ) -> int: ...  # fmt: skip
    def send(self) -> None: ...
    def give_up(self, operation: int) -> None: ...
    def present(self, right: Right, capability: bytes, presented: Callable[[FireflyerError | None], None]) -> None: ...
    def forget(self, right: Right) -> None: ...


class Port(abc.ABC):
    """Futures are for one driver, which `wait` belongs to."""

    def __init__(self, store: _Store, meta: MetaClient) -> None:
        self.meta = meta
        self._store = store
        self._chains: dict[TableId, tuple[ChainId, ...]] = {}
        self.answered_ns: dict[ChainId, int] = {}
        """When each has last answered a read, by `time.monotonic_ns`."""

    @abc.abstractmethod
    def wait(self, future: ClientFuture[Any]) -> Generator[Any, None, None]:
        """Until it is over."""

    def call(self, request: Request, actor: Actor | None = None) -> ClientFuture[Answer]:
        """As `MetaClient.call`."""
        return self.future_of(self.meta.call(request, actor=actor))

    @abc.abstractmethod
    def future_of(self, work: Coroutine[Any, Any, Any]) -> ClientFuture[Any]:
        """Of work in the loop of the meta client."""

    @abc.abstractmethod
    def on_lost(self, call: Callable[[ClientId], None]) -> None:
        """`call` is to hear, where futures end, of each session that has taken the place of another, before anything
        of it or later comes: what the one before held is lost."""

    @abc.abstractmethod
    async def together(self, work: Sequence[Coroutine[Any, Any, None]]) -> list[BaseException | None]:
        """All at once, until each has ended; how, in their order."""

    @abc.abstractmethod
    def renew(
        self, right: Right, expires_unix_s: int, ask: Callable[[Right], Coroutine[Any, Any, CapabilityAnswer]]
    ) -> None:
        """From now on, by asking anew before it expires."""

    @abc.abstractmethod
    def drop(self, right: Right) -> None:
        """It is not wanted any more."""

    def chains(self, table: TableId) -> tuple[ChainId, ...]:
        """Raises `NotFound`."""
        if table not in self._chains:
            self._chains[table] = chains_of(self._store.routing, table)
        return self._chains[table]

    def read(self, chain: ChainId, chunk: ChunkId, into: memoryview, offset: int) -> ClientFuture[ChunkBytes]:
        """It goes out with `send`."""
        future: ClientFuture[ChunkBytes] = ClientFuture(self.wait)

        def done(result: Any) -> None:
            if isinstance(result, Failed):
                future.fail(error_from_wire(result.code, result.message))
                return
            self.answered_ns[chain] = time.monotonic_ns()
            arrived = isinstance(result, DataArrived)
            future.finish(ChunkBytes(result.length, result.crc32c) if arrived else _NO_CHUNK)

        try:
            operation = self._store.begin(chain, chunk, QuerySpec(QueryKind.READ, offset, len(into)), into, done)
        except FireflyerError as error:
            future.fail(error)
            return future
        future.on_give_up(lambda: self._store.give_up(operation))
        return future

    def write(self, chain: ChainId, chunk: ChunkId, data: memoryview, offset: int) -> ClientFuture[None]:
        """It goes out with `send`; `data` is left as it is until then, and after. Given up it fails: not sent, if it
        was not yet."""
        future: ClientFuture[None] = ClientFuture(self.wait)

        def done(result: Any) -> None:
            if isinstance(result, Failed):
                future.fail(error_from_wire(result.code, result.message))
            else:
                future.finish(None)

        try:
            operation = self._store.begin(chain, chunk, change_of(data, offset), data, done)
        except FireflyerError as error:
            future.fail(error)
            return future

        def give_up() -> None:
            self._store.give_up(operation)
            future.fail(Aborted("the update was cancelled"))

        future.on_give_up(give_up)
        return future

    def send(self) -> None:
        self._store.send()

    def present(self, right: Right, capability: bytes) -> ClientFuture[None]:
        """To all nodes, before anything else is asked of them."""
        future: ClientFuture[None] = ClientFuture(self.wait)
        self._store.present(
            right, capability, lambda error: future.finish(None) if error is None else future.fail(error)
        )
        return future


class LoopPort(Port):
    """In an event loop, over `Chunks`."""

    def __init__(self, chunks: Chunks, meta: MetaClient, control: ManagerSession) -> None:
        super().__init__(chunks, meta)
        self._loop = asyncio.get_running_loop()
        self._control = control
        self._sending = False

    def on_lost(self, call: Callable[[ClientId], None]) -> None:
        self.meta.on_lost.append(call)

    def send(self) -> None:
        """When all that is ready to run has run: one call for what all of it asks, and who has written something goes
        on before that takes its time."""
        if not self._sending:
            self._sending = True
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        self._sending = False
        self._store.send()

    def wait(self, future: ClientFuture[Any]) -> Generator[Any, None, None]:
        self.send()
        over: asyncio.Future[None] = self._loop.create_future()

        def end() -> None:
            if not over.done():
                over.set_result(None)

        future.then(end)
        yield from over

    def future_of(self, work: Coroutine[Any, Any, Any]) -> ClientFuture[Any]:
        future: ClientFuture[Any] = ClientFuture(self.wait)

        def over(task: asyncio.Task[Any]) -> None:
            if task.cancelled():
                future.fail(asyncio.CancelledError())
            elif (error := task.exception()) is not None:
                future.fail(error)
            else:
                future.finish(task.result())

        self._loop.create_task(work).add_done_callback(over)
        return future

    async def together(self, work: Sequence[Coroutine[Any, Any, None]]) -> list[BaseException | None]:
        return await asyncio.gather(*work, return_exceptions=True)

    def renew(
        self, right: Right, expires_unix_s: int, ask: Callable[[Right], Coroutine[Any, Any, CapabilityAnswer]]
    ) -> None:
        self._control.rights.keep(right, expires_unix_s, ask)

    def drop(self, right: Right) -> None:
        self._control.rights.drop(right)
        self._store.forget(right)
