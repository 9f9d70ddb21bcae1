"""Clients of files in the test's process: the real meta service over memory, chunks that are played with their bytes.

What a client asks of chunks is done later, in any order that the chunk client could give: updates of one chunk one
after the other, all else as chance has it. A test can make updates fail.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, Self

from tests.support.fs.clusters.meta_service import CHAINS, SERVICE, FakeChunks, MetaRig

from fireflyer.base.errors import FireflyerError, NoSpace, Unreachable
from fireflyer.fs.client.files.asyncio_files import Files
from fireflyer.fs.client.files.open_file_table import FileOptions
from fireflyer.fs.client.files.port import LoopPort
from fireflyer.fs.client.meta import DEFAULT_TIMEOUT_NS, MetaClient
from fireflyer.fs.core.requests.effects import DataArrived, Failed, QuerySpec
from fireflyer.fs.schema.chunks import Change, Missing
from fireflyer.fs.schema.chunks import Done as Updated
from fireflyer.fs.schema.ids import ChainId, ChunkId, ContentId
from fireflyer.fs.schema.meta import Answers, Calls
from fireflyer.fs.schema.routing import ChainTable, Routing
from fireflyer.fs.service.meta.group_commit import Later, in_loop
from fireflyer.kvstore import MemoryEngine
from fireflyer.native import crc32c

__all__ = ["FakeClient", "FileRig", "Silent", "Store", "content", "no_space", "run", "turns"]

CONTENT = ContentId(1, 1)


class Store(FakeChunks):
    """The bytes of all chunks, for clients and for the meta service."""

    def __init__(self) -> None:
        super().__init__(1000)
        self.bytes: dict[tuple[int, int, int], bytearray] = {}

    def put(self, key: tuple[int, int, int], offset: int, data: bytes) -> None:
        chunk = self.bytes.setdefault(key, bytearray())
        chunk.extend(bytes(max(0, offset - len(chunk))))
        chunk[offset : offset + len(data)] = data
        self.lengths[key] = len(chunk)

    async def remove(self, file: int, chunks: Any, *, session: int) -> None:
        await super().remove(file, chunks, session=session)
        for chain, index in chunks:
            self.bytes.pop((file, chain, index), None)

    async def truncate(self, file: int, chain: int, index: int, length: int, *, session: int) -> None:
        await super().truncate(file, chain, index, length, session=session)
        key = file, chain, index
        if key in self.bytes:
            del self.bytes[key][length:]
            self.lengths[key] = len(self.bytes[key])

    async def write_zeros(self, file: int, chain: int, index: int, offset: int, size: int, *, session: int) -> None:
        await super().write_zeros(file, chain, index, offset, size, session=session)
        self.put((file, chain, index), offset, bytes(size))


class FakeClient:
    """As `Chunks` and its `Control`, of one session."""

    def __init__(self, rig: FileRig, client: int) -> None:
        self.rig = rig
        self.client = client
        self.routing = Routing(1, tables=(ChainTable(1, CHAINS),))
        self.failing: Callable[[ChunkId], FireflyerError | None] = lambda _: None
        self.held = False
        """Updates wait."""
        self.away = 0
        """Those of this file do."""
        self.unreadable = False
        self.reads = 0
        self._queues: dict[ChunkId, list[Callable[[], None]]] = {}
        self._given_up: set[int] = set()
        self._operations = 0
        # as a control
        self.exchanging = False
        self.addresses = ("played:1",)
        self.credential: Any = None
        self.on_exchange: list[Callable[[], None]] = []
        self.rights = SimpleNamespace(keep=lambda *_: None, drop=lambda *_: None)
        self._tasks: dict[asyncio.Task[Any], None] = {}

    def begin(
        self, chain: ChainId, chunk: ChunkId, what: Change | QuerySpec, memory: memoryview | None,
        done: Callable[[Any], None], timeout_ns: int | None = None,
    ) -> int:  # fmt: skip
        assert timeout_ns is None
        assert memory is not None
        self._operations += 1
        operation, key = self._operations, (chunk.file, chain, chunk.index)

        def update() -> None:
            if operation in self._given_up:
                return
            error = self.failing(chunk)
            if error is not None:
                done(Failed(error.code, error.message))
                return
            assert isinstance(what, Change)
            self.rig.store.put(key, what.offset, bytes(memory))
            done(Updated(CONTENT, None))

        def read() -> None:
            if operation in self._given_up:
                return
            self.reads += 1
            if self.unreadable:
                done(Failed("timeout", "no replica answered in time"))
                return
            found = self.rig.store.bytes.get(key)
            if found is None:
                done(Missing())
                return
            part = found[what.offset : what.offset + len(memory)]
            memory[: len(part)] = part
            done(DataArrived(len(part), CONTENT, len(found), crc32c(part)))

        if isinstance(what, Change):
            self._queues.setdefault(chunk, []).append(update)
            self._later(lambda: self._next(chunk))
        else:
            self._later(read)
        return operation

    def _next(self, chunk: ChunkId) -> None:
        if self.held or chunk.file == self.away:
            self._later(lambda: self._next(chunk))
        else:
            self._queues[chunk].pop(0)()

    def _later(self, call: Callable[[], None], turns: int | None = None) -> None:
        left = self.rig.rng.randrange(6) if turns is None else turns
        if left:
            asyncio.get_running_loop().call_soon(lambda: self._later(call, left - 1))
        else:
            asyncio.get_running_loop().call_soon(call)

    def send(self) -> None: ...

    def give_up(self, operation: int) -> None:
        self._given_up.add(operation)

    def present(self, *_: Any) -> None: ...

    def forget(self, *_: Any) -> None: ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(lambda ended: self._tasks.pop(ended, None))
        return task

    async def meta_services(self) -> tuple[str, ...]:
        return self.addresses

    async def learn_table(self, table: int) -> None:
        assert table == 1
        self.routing = Routing(2, tables=(ChainTable(1, CHAINS),))

    def want_routing(self) -> None:
        """The manager says that the session is over."""
        self.spawn(self.exchange())

    def evicted(self, client: int) -> None:
        assert client == self.client
        self.spawn(self.exchange())

    async def exchange(self) -> None:
        self.exchanging = True
        self.client = await self.rig.rig.open_session(self.rig.next_session())
        self.exchanging = False
        for tell in self.on_exchange:
            tell()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()


class FileRig:
    def __init__(self, seed: int = 0, *, later: Later = in_loop) -> None:
        self.rng = random.Random(seed)
        self.store = Store()
        self.rig = MetaRig(MemoryEngine(), chunks=self.store, later=later)
        self.sends: Callable[[Calls], Coroutine[Any, Any, Answers]] = self._serve
        """A test may put something between."""
        self._sessions = 1
        self._clients: list[tuple[Files, FakeClient]] = []

    def next_session(self) -> int:
        self._sessions += 1
        return self._sessions

    async def _serve(self, calls: Calls) -> Answers:
        return await self.rig.service.serve(calls, SERVICE)

    async def client(
        self, options: FileOptions | None = None, *, timeout_ns: int = DEFAULT_TIMEOUT_NS
    ) -> tuple[Files, FakeClient]:
        played: Any = FakeClient(self, await self.rig.open_session(self.next_session()))

        async def sends(_: str, calls: Calls, __: int) -> Answers:
            return await self.sends(calls)

        meta = MetaClient(played, sends=sends, timeout_ns=timeout_ns)
        meta.start()
        files = Files(LoopPort(played, meta, played), options or FileOptions(umask=0), played.close)
        self._clients.append((files, played))
        return files, played

    async def __aenter__(self) -> Self:
        await self.rig.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        for files, played in self._clients:
            try:
                await files.close()
            except FireflyerError:
                await played.close()
        await self.rig.__aexit__()


def no_space(_: ChunkId) -> FireflyerError:
    return NoSpace("the disks are full")


def run(test: Callable[[FileRig], Coroutine[Any, Any, None]]) -> None:
    async def inside() -> None:
        async with FileRig() as rig:
            await test(rig)

    asyncio.run(inside())


async def content(files: Files, path: str) -> bytes:
    async with await files.open(path) as file:
        return await file.pread(0, 1 << 24)


class Silent:
    """Requests of one kind are done, or not, and not answered, until `over`."""

    def __init__(self, rig: FileRig, kind: type, *, done: bool) -> None:
        self.over = False
        before = rig.sends

        async def sends(calls: Calls) -> Answers:
            if self.over or not isinstance(calls.calls[0].request, kind):
                return await before(calls)
            if done:
                await before(calls)
            raise Unreachable("the connection was lost")

        rig.sends = sends


async def turns() -> None:
    """What can be done without waiting for anything else is done."""
    for _ in range(50):
        await asyncio.sleep(0)
