"""Chunks for asyncio: reads into, and writes from, the caller's memory.

    async with await connect(["10.0.0.1:7000"], credential) as chunks:
        await chunks.write(chain, ChunkId(file, 0), array)
        count = await chunks.read_into(chain, ChunkId(file, 0), other)

Every method takes `timeout_ns`. What an update that raises `Timeout` did is not known: it may have been done, or may be
done yet; the next update of the chunk by this client comes after it. All other errors of updates mean that it was not
done and never will be. Memory must not be changed while a call is under way; when the call is over, or was cancelled,
it is the caller's again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, Self, TypeAlias, TypeVar

import msgspec

from fireflyer.base.errors import (
    Aborted,
    FireflyerError,
    NotFound,
    PermissionDenied,
    Timeout,
    UsageError,
    error_from_wire,
)
from fireflyer.base.units import SECOND
from fireflyer.fs.client.control.capabilities import ATTEMPTS, Right
from fireflyer.fs.client.control.session import ManagerSession
from fireflyer.fs.client.control_listener import ControlListener
from fireflyer.fs.client.dispatch import Dispatch
from fireflyer.fs.client.fork_safety import ProcessBound
from fireflyer.fs.client.memory import memory_of
from fireflyer.fs.core.requests.effects import DataArrived, Failed, Limits, QuerySpec
from fireflyer.fs.schema.chunks import (
    MAX_PAGE,
    Change,
    ChunkEntry,
    ChunkVersion,
    Done,
    Found,
    Missing,
    Operation,
    QueryKind,
)
from fireflyer.fs.schema.ids import MAX_CHUNK_BYTES, ChainId, ChunkId, ClientId
from fireflyer.fs.schema.routing import Routing
from fireflyer.identity.handshake import Credential
from fireflyer.native import crc32c

__all__ = ["DEFAULT_TIMEOUT_NS", "Chunks", "Options", "Read", "Write", "chains_of", "change_of", "connect"]

DEFAULT_TIMEOUT_NS: Final = 30 * SECOND
_T = TypeVar("_T")
_Counts: TypeAlias = list[int | FireflyerError]
_Dones: TypeAlias = list[Done | FireflyerError]
_Replies: TypeAlias = list[Any]
_Entries: TypeAlias = list[ChunkEntry]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """`limits`: see there; `limits.senders` switches request-to-send on."""

    limits: Limits = Limits()
    timeout_ns: int = DEFAULT_TIMEOUT_NS
    """Timeout of calls that name none."""
    seed: int = 0
    """Seed of pauses between attempts; 0: from the session's id."""


class Read(NamedTuple):
    """One of a batch: bytes [offset, offset + size of `into`) of the chunk."""

    chain: ChainId
    chunk: ChunkId
    into: Any
    offset: int = 0


class Write(NamedTuple):
    chain: ChainId
    chunk: ChunkId
    data: Any
    offset: int = 0


async def connect(
    managers: Sequence[str], credential: Credential, *, name: str = "", options: Options | None = None,
    timeout_ns: int = DEFAULT_TIMEOUT_NS,
) -> Chunks:  # fmt: skip
    """Opens a session at the managers (addresses of some of them) and learns the routing. Raises `Timeout` when none
    answers as primary, `PermissionDenied`. Close it, or use it with `async with`."""
    control = ManagerSession(managers, credential, name=name)
    try:
        session = await control.open(timeout_ns)
    except BaseException:
        await control.close()
        raise
    chunks = Chunks(control, session.client, options or Options())
    try:
        async with asyncio.timeout(timeout_ns / SECOND):
            await chunks.first_routing.wait()
    except BaseException as error:
        await chunks.close()
        if isinstance(error, TimeoutError):
            raise Timeout("no manager sent the routing in time; check that the managers run: ff fs status") from None
        raise
    return chunks


class Chunks(ControlListener, ProcessBound):
    """A client of the chunk store; made by `connect`, for one event loop."""

    def __init__(self, control: ManagerSession, client: int, options: Options) -> None:
        ProcessBound.__init__(self)
        dispatch = Dispatch(
            client, limits=options.limits, seed=options.seed or client, connect=control.connect,
            ask_routing=control.want_routing, ask_right=control.rights.refused,
            exchange=control.exchange,
        )  # fmt: skip
        ControlListener.__init__(self, client, dispatch)
        self._options = options
        self._control = control
        self.first_routing = asyncio.Event()
        """Set when the routing is known."""
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns: int | None = None
        self._closed = False
        self._fd = self._dispatch.ring.fd
        self._loop.add_reader(self._fd, self._ready)
        control.start(self)

    @property
    def control(self) -> ManagerSession:
        """The session that it shares with others."""
        return self._control

    @property
    def routing(self) -> Routing:
        """Routing, as this client knows it."""
        return self._dispatch.routing

    def chains(self, table: int = 1) -> tuple[ChainId, ...]:
        """Chains of this chain table, in its order: place i of a file's layout is the i-th. Raises `NotFound`."""
        return chains_of(self.routing, table)

    # --- reads ---

    async def read_into(
        self, chain: ChainId, chunk: ChunkId, into: Any, offset: int = 0, *, timeout_ns: int | None = None
    ) -> int:
        """Bytes [offset, offset + size of `into`) of the chunk; returns how many there are before its end. Verified
        against the checksums of who stores them. Raises `NotFound`, `Timeout`, `DataCorruption`, …"""
        memory = memory_of(into, writable=True)
        reply = await self._look(chain, chunk, QuerySpec(QueryKind.READ, offset, memory.nbytes), memory, timeout_ns)
        return _count(reply, chunk)

    async def read(
        self, chain: ChainId, chunk: ChunkId, offset: int = 0, length: int | None = None,
        *, timeout_ns: int | None = None,
    ) -> bytearray:  # fmt: skip
        """Read as `read_into` does, into new memory; to the end without `length`."""
        if length is None:
            length = max(0, (await self.stat(chain, chunk, timeout_ns=timeout_ns)).length - offset)
        memory = bytearray(length)
        count = await self.read_into(chain, chunk, memory, offset, timeout_ns=timeout_ns)
        return memory if count == length else memory[:count]

    async def read_batch(self, reads: Iterable[Read], *, timeout_ns: int | None = None) -> _Counts:
        """Up to `Limits.requests` at once. For each its count of bytes, or the error that `read_into` would raise."""
        wanted = [(one, memory_of(one.into, writable=True)) for one in reads]
        replies = await self._all(
            [
                (one.chain, one.chunk, QuerySpec(QueryKind.READ, one.offset, memory.nbytes), memory)
                for one, memory in wanted
            ],
            timeout_ns,
        )
        return [_error_or(_count, reply, one.chunk) for (one, _), reply in zip(wanted, replies, strict=True)]

    # --- updates ---

    async def write(
        self, chain: ChainId, chunk: ChunkId, data: Any, offset: int = 0,
        *, timeout_ns: int | None = None, session: ClientId = 0,
    ) -> Done:  # fmt: skip
        """Bytes [offset, offset + size of `data`) of the chunk become `data`; what was missing before them, zeros. When
        it returns, all that serve the chain have it, durably unless they were told otherwise. `session`: `StaleVersion`
        instead of sending it by any other session than this one; so for all updates that have it."""
        memory = memory_of(data, writable=False)
        return _done(await self._one(chain, chunk, change_of(memory, offset), memory, timeout_ns, session))

    async def write_batch(self, writes: Iterable[Write], *, timeout_ns: int | None = None) -> _Dones:
        """Up to `Limits.requests` at once; those of one chunk are done in their order."""
        given = [(one, memory_of(one.data, writable=False)) for one in writes]
        replies = await self._all(
            [(one.chain, one.chunk, change_of(memory, one.offset), memory) for one, memory in given], timeout_ns
        )
        return [_error_or(_done, reply) for reply in replies]

    async def truncate(
        self, chain: ChainId, chunk: ChunkId, length: int, *, timeout_ns: int | None = None, session: ClientId = 0
    ) -> Done:
        """The chunk has `length` bytes then; new ones are zeros. A chunk that was not there is made."""
        return _done(await self._one(chain, chunk, Change(Operation.TRUNCATE, 0, length), None, timeout_ns, session))

    async def remove(
        self, chain: ChainId, chunk: ChunkId, *, timeout_ns: int | None = None, session: ClientId = 0
    ) -> Done:
        """Remove a chunk; one that is not there is no error."""
        return _done(await self._one(chain, chunk, Change(Operation.REMOVE), None, timeout_ns, session))

    # --- what there is ---

    async def stat(self, chain: ChainId, chunk: ChunkId, *, timeout_ns: int | None = None) -> ChunkVersion:
        """Content id, length and checksum. Raises `NotFound`."""
        reply = await self._look(chain, chunk, QuerySpec(QueryKind.STAT), None, timeout_ns)
        entry = next(iter(reply.entries), None) if isinstance(reply, Found) else None
        if entry is None or entry.held is None:
            raise NotFound(f"chunk {chunk.index} of file {chunk.file} does not exist")
        return entry.held

    async def last_chunk(
        self, chain: ChainId, file: int, *, below: int = 1 << 32, timeout_ns: int | None = None
    ) -> ChunkEntry | None:
        """The last chunk of the file on this chain whose index is less than `below`."""
        if below <= 0:
            return None
        reply = await self._look(chain, ChunkId(file, below - 1), QuerySpec(QueryKind.LAST), None, timeout_ns)
        return reply.entries[0] if isinstance(reply, Found) and reply.entries else None

    async def list(
        self, chain: ChainId, file: int, *, start: int = 0, limit: int = MAX_PAGE, timeout_ns: int | None = None
    ) -> tuple[ChunkEntry, ...]:
        """Chunks of the file on this chain from index `start` on, in order, at most `limit`. Each page of `MAX_PAGE` is
        right as a whole, all together are not."""
        found: _Entries = []
        while len(found) < limit:
            page = min(MAX_PAGE, limit - len(found))
            reply = await self._look(chain, ChunkId(file, start), QuerySpec(QueryKind.LIST, 0, page), None, timeout_ns)
            entries = reply.entries if isinstance(reply, Found) else ()
            found += entries
            if len(entries) < page or entries[-1].chunk.index == (1 << 32) - 1:
                break
            start = entries[-1].chunk.index + 1
        return tuple(found)

    # --- rights ---

    async def acquire(self, first_file: int, last_file: int, rights: int) -> None:
        """Asks the manager for the right to these files, presents it to all nodes, and renews it from then on. Clients
        with the node secret need none. Raises `PermissionDenied`."""
        self.check_process()
        right, attempt = Right(first_file, last_file, rights), 0
        while True:
            client, answer = self.client, await self._control.rights.ask(right, attempt)
            error = await self._presented(right, answer.capability)
            attempt += 1
            if attempt == ATTEMPTS or not (client != self.client or isinstance(error, PermissionDenied)):
                break
        if error is not None:
            self._dispatch.forget(right)
            raise error
        self._control.rights.keep(right, answer.expires_unix_s)

    async def _presented(self, right: Right, capability: bytes) -> FireflyerError | None:
        presented: asyncio.Future[FireflyerError | None] = self._loop.create_future()

        def on_presented(error: FireflyerError | None) -> None:
            if not presented.done():
                presented.set_result(error)

        self._dispatch.present(right, capability, on_presented)
        return await presented

    # --- for those who build on it ---

    def begin(
        self, chain: ChainId, chunk: ChunkId, what: Change | QuerySpec, memory: memoryview | None,
        done: Callable[[Any], None], timeout_ns: int | None = None,
    ) -> int:  # fmt: skip
        """The number of an operation that goes out with the next `send`; `done` has its result, as the machine says it
        (`core.requests.effects.Finish`), perhaps at once."""
        self.check_process()
        if self._closed:
            raise Aborted("this chunk client is closed; open another one")
        limit_ns = self._options.timeout_ns if timeout_ns is None else timeout_ns
        return self._dispatch.begin(chain, chunk, what, memory, limit_ns, done)

    def send(self) -> None:
        if not self._closed:
            self._dispatch.flush()
            self._wake()

    def give_up(self, operation: int) -> None:
        """Give up an operation: its memory is not touched any more, and `done` is not called."""
        self._dispatch.give_up(operation)
        self._wake()

    def present(self, right: Right, capability: bytes, presented: Callable[[FireflyerError | None], None]) -> None:
        """Present a capability to all nodes, on all connections from now on."""
        self._dispatch.present(right, capability, presented)

    def forget(self, right: Right) -> None:
        self._dispatch.forget(right)

    # --- the machine ---

    async def _look(
        self, chain: ChainId, chunk: ChunkId, what: QuerySpec, memory: memoryview | None, timeout_ns: int | None
    ) -> Found | Missing | DataArrived:
        reply: Found | Missing | DataArrived | Failed = await self._one(chain, chunk, what, memory, timeout_ns)
        if isinstance(reply, Failed):
            raise error_from_wire(reply.code, reply.message)
        return reply

    async def _one(
        self, chain: ChainId, chunk: ChunkId, what: Change | QuerySpec, memory: memoryview | None, timeout_ns: int |
        None,
        session: ClientId = 0,
    ) -> Any:  # fmt: skip
        return (await self._all([(chain, chunk, what, memory)], timeout_ns, session))[0]

    async def _all(
        self, asked: Sequence[tuple[ChainId, ChunkId, Change | QuerySpec, memoryview | None]], timeout_ns: int | None,
        session: ClientId = 0,
    ) -> _Replies:  # fmt: skip
        """The machine's results, in the order of what is asked."""
        self.check_process()
        replies: _Replies = [None] * len(asked)
        left = len(asked)
        over: asyncio.Future[None] = self._loop.create_future()

        def done(at: int) -> Callable[[Any], None]:
            def take(result: Any) -> None:
                nonlocal left
                replies[at] = result
                left -= 1
                if not left and not over.done():
                    over.set_result(None)

            return take

        limit_ns = self._options.timeout_ns if timeout_ns is None else timeout_ns
        dispatch = self._dispatch
        begun = [dispatch.begin(*one, limit_ns, done(at), session) for at, one in enumerate(asked)]
        dispatch.flush()
        self._wake()
        try:
            if left:
                await over
        except asyncio.CancelledError:
            for operation in begun:
                dispatch.give_up(operation)
            raise
        return replies

    def _ready(self) -> None:
        dispatch = self._dispatch
        dispatch.take(dispatch.ring.wait(0, 0))
        dispatch.flush()
        self._wake()

    def _wake(self) -> None:
        due_ns = self._dispatch.due_ns
        if due_ns == self._timer_ns:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_ns = None, due_ns
        if due_ns is not None:
            delay_s = max(0, due_ns - time.monotonic_ns()) / SECOND
            self._timer = self._loop.call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer, self._timer_ns = None, None
        self._dispatch.tick()
        self._wake()

    # --- what the control says ---

    def heard(self) -> None:
        self._wake()

    def learned(self, routing: Routing) -> None:
        super().learned(routing)
        self.first_routing.set()

    async def close(self) -> None:
        """Ends the session; idempotent, and nothing in a forked child. Calls under way raise `Aborted`, or `Timeout`
        (updates that may be done)."""
        if self._closed or self.elsewhere:
            return
        self._closed = True
        self._loop.remove_reader(self._fd)
        if self._timer is not None:
            self._timer.cancel()
        self._dispatch.end("the client was closed")
        await self._control.close()
        self._dispatch.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def chains_of(routing: Routing, table: int) -> tuple[ChainId, ...]:
    """Raises `NotFound`."""
    for one in routing.tables:
        if one.id == table:
            return one.chains
    raise NotFound(
        f"there is no chain table {table} in routing {routing.version}; make one with "
        f"`ff fs admin add-chains --table {table}`"
    )


def change_of(memory: memoryview, offset: int) -> Change:
    if offset < 0 or offset + memory.nbytes > MAX_CHUNK_BYTES:
        raise UsageError(
            f"{memory.nbytes} bytes at offset {offset} exceed the maximum chunk size of {MAX_CHUNK_BYTES} bytes"
        )
    return Change(Operation.WRITE, offset, memory.nbytes, crc32c(memory))


def _count(reply: Any, chunk: ChunkId) -> int:
    if isinstance(reply, DataArrived):
        return reply.length
    if isinstance(reply, Failed):
        raise error_from_wire(reply.code, reply.message)
    raise NotFound(f"chunk {chunk.index} of file {chunk.file} does not exist")


def _done(reply: Any) -> Done:
    if isinstance(reply, Done):
        return reply
    raise error_from_wire(reply.code, reply.message)


def _error_or(take: Callable[..., _T], *reply: Any) -> _T | FireflyerError:
    try:
        return take(*reply)
    except FireflyerError as error:
        return error
