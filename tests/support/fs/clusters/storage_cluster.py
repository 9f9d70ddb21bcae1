"""A small chunk store of real parts: a manager in this process, storage processes of their own, a client that insists.

    async with cluster(tmp_path, nodes=3, replicas=3) as store:
        await store.write(ChunkId(1, 0), 0, b"...")
        store.nodes[1].kill()

Node n has the targets n, n + 100, … on 127.0.0.1; chain 1 is of the first ones. What the client was told is done it
remembers: `check` reads all of it everywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
from tests.support.fs.clusters.data_connection import FOUND, MISSING, DataConnection
from tests.support.loops import on_loop
from tests.support.patience import allowed_s

from fireflyer.accounts.managing import UsersClient
from fireflyer.base.errors import FireflyerError, UsageError
from fireflyer.base.units import MIB
from fireflyer.fs.control import ManagerClient
from fireflyer.fs.core.routing import apply_delta
from fireflyer.fs.schema.chunks import Change, Done, Operation, RefusalReason, Update, UpdateReply
from fireflyer.fs.schema.ids import ChunkId, NodeId
from fireflyer.fs.schema.manager import (
    AddChains,
    AddNode,
    AddTargets,
    GetRouting,
    GetStatus,
    NewChain,
    RoutingAnswer,
    Status,
)
from fireflyer.fs.schema.routing import Chain, Member, Routing, TargetState
from fireflyer.fs.schema.sessions import KeepSession, OpenSession, Session, SessionKept
from fireflyer.fs.service.manager.config import ManagerConfig
from fireflyer.fs.service.manager.process import run_manager
from fireflyer.fs.service.storage.config import StorageConfig, StorageTarget
from fireflyer.fs.service.storage.target_directory import make_target
from fireflyer.identity.handshake import NodeCredential, UserCredential
from fireflyer.identity.secrets import new_secret, save_secret
from fireflyer.native import crc32c

__all__ = ["FAILURE_TIMEOUT_MS", "FIRST", "PATIENT_MS", "SECOND", "THIRD", "Node", "Store", "cluster", "in_cluster"]
__all__ += ["user_of", "users_of"]

FIRST, SECOND, THIRD = ChunkId(1, 0), ChunkId(1, 1), ChunkId(2, 7)
FAILURE_TIMEOUT_MS = 1500
PATIENT_MS = 15_000
"""Where nobody is to be taken for dead: a busy machine may well let a process stand still for a second."""
CHAIN = 1
ATTEMPT_S = 2.0
DEADLINE_S = 40.0


class Node:
    """A storage process, which may be killed and started again."""

    def __init__(self, config: StorageConfig, path: Path) -> None:
        self.config, self.path = config, path
        self.process: asyncio.subprocess.Process | None = None
        path.write_bytes(msgspec.json.encode(config))

    @property
    def target_directory(self) -> Path:
        return Path(self.config.targets[0].directory)

    async def start(self, **limits: int) -> None:
        """`limits`: names of RLIMIT_ and values."""
        log = self.path.with_suffix(".log").open("ab")
        arguments = [f"{name}={value}" for name, value in limits.items()]
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.support.fs.clusters.storage_process",
            str(self.path),
            *arguments,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            cwd=Path(__file__).parents[4],
        )
        log.close()
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        assert line.startswith(b"ready "), self.log()

    def kill(self, number: int = signal.SIGKILL) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def ended(self) -> int:
        assert self.process is not None
        return await self.process.wait()

    async def stop(self, number: int = signal.SIGKILL) -> int:
        self.kill(number)
        return await self.ended()

    async def end(self) -> None:
        """At the end of a test, whatever state it is in."""
        if self.process is not None and self.process.returncode is None:
            self.kill(signal.SIGCONT)
            await self.stop()

    def log(self) -> str:
        return self.path.with_suffix(".log").read_text()


class Store:
    """`known`: what each chunk must hold, by what was acknowledged."""

    def __init__(self, directory: Path, credential: NodeCredential) -> None:
        self.directory = directory
        self.credential = credential
        self.nodes: dict[NodeId, Node] = {}
        self.routing = Routing(0)
        self.known: dict[ChunkId, bytes] = {}
        self.manager: ManagerClient
        self.managers: list[str] = []
        self.client = 0
        self.chain_id = CHAIN
        """Where the client reads and writes."""
        self._sequences: dict[int, int] = {}
        """Of the channels."""
        self._idle_channels: list[int] = []
        self._connections: dict[str, DataConnection] = {}
        self._connecting = asyncio.Lock()

    # --- the cluster ---

    async def begin(self, manager: str, replicas: int) -> None:
        self.managers = [manager]
        self.manager = ManagerClient(self.managers, self.credential)
        for node in self.nodes:
            await self.manager.ask(AddNode(node))
            await self.manager.ask(AddTargets(node, tuple(one.id for one in self.nodes[node].config.targets)))
        await asyncio.gather(*(node.start() for node in self.nodes.values()))
        await self.until(self._all_registered)
        await self.manager.ask(AddChains((NewChain(CHAIN, tuple(sorted(self.nodes)[:replicas])),)))
        session = await self.manager.ask(OpenSession(f"test {random.random()}"))
        assert isinstance(session, Session)
        self.client = session.client
        await self.until_serving(replicas)

    async def _all_registered(self) -> bool:
        status = await self.manager.ask(GetStatus())
        assert isinstance(status, Status)
        return all(one.incarnation and one.alive for one in status.nodes)

    async def until(self, holds: Callable[[], Any], *, limit_s: float = DEADLINE_S) -> None:
        async with asyncio.timeout(allowed_s(limit_s)):
            while True:
                if await holds():
                    return
                await asyncio.sleep(0.05)

    async def until_serving(self, count: int, *, limit_s: float = DEADLINE_S) -> None:
        async def holds() -> bool:
            await self.look()
            return len(self.serving()) == count

        try:
            await self.until(holds, limit_s=limit_s)
        except TimeoutError:
            logs = "\n".join(f"--- {one.config.node}\n{one.log()[-3000:]}" for one in self.nodes.values())
            raise AssertionError(f"{self.chain}\n{logs}") from None

    async def look(self) -> None:
        """What the manager says now."""
        known = self.routing.version
        answer = await self.manager.ask(KeepSession(self.client, known) if self.client else GetRouting(known))
        assert isinstance(answer, RoutingAnswer | SessionKept)
        if answer.routing is not None:
            self.routing = apply_delta(self.routing, answer.routing)

    @property
    def chain(self) -> Chain:
        return next(one for one in self.routing.chains if one.id == self.chain_id)

    def serving(self) -> list[Member]:
        return [one for one in self.chain.members if one.state is TargetState.SERVING]

    async def connection(self, node: NodeId) -> DataConnection:
        address = next(one.address for one in self.routing.nodes if one.id == node)
        async with self._connecting:
            known = self._connections.get(address)
            if known is None or known.lost:
                if known is not None:
                    await known.close()
                known = self._connections[address] = await DataConnection.connect(address, self.credential)
        return known

    # --- what a client does ---

    async def write(self, chunk: ChunkId, offset: int, data: bytes) -> Done:
        before = self.known.get(chunk, b"")
        change = Change(Operation.WRITE, offset, len(data), crc32c(data))
        done = await self.update(chunk, change, data)
        self.known[chunk] = before[:offset].ljust(offset, b"\0") + data + before[offset + len(data) :]
        assert done.held is None or (done.held.length, done.held.crc) == (
            len(self.known[chunk]),
            crc32c(self.known[chunk]),
        )
        return done

    async def remove(self, chunk: ChunkId) -> None:
        done = await self.update(chunk, Change(Operation.REMOVE))
        assert done.held is None
        self.known.pop(chunk, None)

    async def update(self, chunk: ChunkId, change: Change, data: bytes = b"") -> Done:
        """Until it is done. Raises `UsageError` with the reason when it never will be."""
        channel = self._idle_channels.pop() if self._idle_channels else len(self._sequences)
        self._sequences[channel] = self._sequences.get(channel, 0) + 1
        try:
            return await self._retry(channel, chunk, change, data)
        finally:
            self._idle_channels.append(channel)

    async def _retry(self, channel: int, chunk: ChunkId, change: Change, data: bytes) -> Done:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                reply = await self._attempt(channel, chunk, change, data)
                if isinstance(reply, Done):
                    return reply
                if reply is not None and reply.refusal not in (RefusalReason.STALE, RefusalReason.BUSY):
                    raise UsageError(f"{reply.refusal.value}: {reply.message}")
                await asyncio.sleep(0.02)
                with contextlib.suppress(FireflyerError):
                    await self.look()

    async def _attempt(self, channel: int, chunk: ChunkId, change: Change, data: bytes) -> UpdateReply | None:
        if not self.serving():
            return None
        head, version = self.serving()[0], self.chain.version
        update = Update(self.chain_id, version, self.client, channel, self._sequences[channel], chunk, change)
        with contextlib.suppress(FireflyerError, TimeoutError):
            connection = await self.connection(head.node)
            return await connection.ask(update, data, timeout_s=ATTEMPT_S)  # type: ignore[return-value]
        return None

    async def read(self, chunk: ChunkId, node: NodeId, offset: int = 0, length: int = 64 * MIB) -> bytes | None:
        """From this replica, when it can say what is committed; None: there is no such chunk."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                connection = await self.connection(node)
                answer = await connection.read(
                    self.chain_id, self.chain.version, chunk.file, chunk.index, offset, length
                )
                if answer.status in (FOUND, MISSING):
                    return answer.data if answer.status == FOUND else None
                await asyncio.sleep(0.02)
                await self.look()

    async def check(self, *, absent: tuple[ChunkId, ...] = ()) -> None:
        """Everything that was acknowledged is at every serving replica."""
        await self.look()
        for member in self.serving():
            for chunk, content in self.known.items():
                found = await self.read(chunk, member.node)
                assert found == content, f"target {member.target} has another {chunk}: {(found or b'')[:20]!r}"
            for chunk in absent:
                assert await self.read(chunk, member.node) is None

    async def close(self) -> None:
        for connection in self._connections.values():
            await connection.close()
        await self.manager.close()


@contextlib.asynccontextmanager
async def cluster(
    directory: Path,
    *,
    nodes: int,
    replicas: int,
    targets: int = 1,
    failure_timeout_ms: int = FAILURE_TIMEOUT_MS,
    **options: Any,
) -> AsyncIterator[Store]:
    """`options`: of `StorageConfig`, for all nodes, and `capacity_bytes` of their targets."""
    secret = new_secret()
    secret_file = str(directory / "secret")
    save_secret(secret, secret_file)
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[str] = loop.create_future()
    config = ManagerConfig(
        name="m1",
        cluster="test",
        store=f"embedded:{directory}/manager",
        listen="127.0.0.1:0",
        secret_file=secret_file,
        failure_timeout_ms=failure_timeout_ms,
        lease_ms=400,
    )
    manager = loop.create_task(run_manager(config, on_ready=ready.set_result))
    manager.add_done_callback(lambda _: None if ready.done() else ready.cancel())
    await ready
    store = Store(directory, NodeCredential(secret, "test client"))
    capacity = options.pop("capacity_bytes", 0)
    options = {"io_threads": 1, "job_threads": 2, "buffer_bytes": 128 * MIB, "reserve": 0.0} | options
    for node in range(1, nodes + 1):
        places = {node + 100 * at: str(directory / f"disk{node}.{at}" / "target") for at in range(targets)}
        for target, path in places.items():
            make_target(path, "test", target)
        storage = StorageConfig(
            cluster="test",
            node=node,
            managers=(ready.result(),),
            targets=tuple(StorageTarget(target, path, capacity) for target, path in places.items()),
            secret_file=secret_file,
            **options,
        )
        store.nodes[node] = Node(storage, directory / f"node{node}.json")
    try:
        await store.begin(ready.result(), replicas)
        yield store
    finally:
        for one in store.nodes.values():
            await one.end()
        await store.close()
        manager.cancel()
        await asyncio.wait([manager])


def in_cluster(
    work: Callable[[Store], Coroutine[Any, Any, None]], directory: Path, *, limit_s: float = 60, **options: Any
) -> None:
    async def run() -> None:
        async with cluster(directory, **({"nodes": 3, "replicas": 3} | options)) as store:
            await work(store)

    on_loop(run, limit_s=limit_s)()


def users_of(store: Store) -> UsersClient:
    """As its manager has them."""
    return UsersClient(store.managers, store.credential)


async def user_of(store: Store, name: str) -> UserCredential:
    """A new one."""
    async with users_of(store) as users:
        await users.create_user(name)
        return UserCredential(await users.issue(name))
