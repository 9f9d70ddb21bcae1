"""A chunk store of real processes: a manager, storage nodes, and clients that verify whatever they read.

    async with running(tmp_path, nodes=3, replicas=3) as site:
        async with await site.connect() as chunks: ...
        site.nodes[2].kill()

Node n has target n; chain 1 is on the first of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from tests.support.fs.clusters.managers import ManagerProcess, Site
from tests.support.fs.clusters.storage_cluster import Node
from tests.support.patience import allowed_s

from fireflyer.base.errors import FireflyerError, NotFound, Timeout
from fireflyer.base.units import MIB, SECOND
from fireflyer.fs.client import Chunks, Options, connect
from fireflyer.fs.control import ManagerClient
from fireflyer.fs.schema.ids import ChainId, ChunkId
from fireflyer.fs.schema.manager import AddChains, AddNode, AddTargets, GetStatus, NewChain, Status
from fireflyer.fs.schema.routing import TargetState
from fireflyer.fs.service.storage.config import StorageConfig, StorageTarget
from fireflyer.fs.service.storage.target_directory import make_target

__all__ = ["CHAIN", "RetryingWriter", "Running", "running"]

CHAIN: ChainId = 1
LIMIT_S = 60.0


class Running:
    def __init__(self, site: Site, manager: ManagerProcess) -> None:
        self.site, self.manager = site, manager
        self.nodes: dict[int, Node] = {}
        self.asking = ManagerClient([manager.address], site.service)

    async def connect(self, options: Options | None = None) -> Chunks:
        return await connect([self.manager.address], self.site.service, options=options)

    async def status(self) -> Status:
        status = await self.asking.ask(GetStatus())
        assert isinstance(status, Status)
        return status

    async def until(self, true: Callable[[Status], bool]) -> None:
        async with asyncio.timeout(allowed_s(LIMIT_S)):
            while True:
                if true(await self.status()):
                    return
                await asyncio.sleep(0.05)

    async def until_all_serve(self, above: int = 0) -> int:
        """Returns the version of the chain, which is `above` that one."""
        versions: list[int] = []

        def all_serve(status: Status) -> bool:
            versions.append(status.chains[0].version)
            serving = [one.state is TargetState.SERVING for one in status.chains[0].members]
            return versions[-1] > above and all(serving)

        await self.until(all_serve)
        return versions[-1]


@contextlib.asynccontextmanager
async def running(directory: Path, *, nodes: int, replicas: int, **options: Any) -> AsyncIterator[Running]:
    """`options`: of `StorageConfig`, for all nodes. One chain, on the first `replicas` nodes."""
    site = Site(directory, f"embedded:{directory}/manager-store")
    with ManagerProcess(site.manager("m1")) as manager:
        run = Running(site, manager)
        try:
            for number in range(1, nodes + 1):
                path = str(directory / f"target{number}")
                make_target(path, "test", number)
                config = StorageConfig(
                    cluster="test",
                    node=number,
                    managers=(manager.address,),
                    targets=(StorageTarget(number, path),),
                    secret_file=site.secret_file,
                    **{"io_threads": 1, "job_threads": 2, "buffer_bytes": 128 * MIB, "reserve": 0.0} | options,
                )
                run.nodes[number] = Node(config, directory / f"node{number}.json")
                await run.asking.ask(AddNode(number))
                await run.asking.ask(AddTargets(number, (number,)))
            await asyncio.gather(*(node.start() for node in run.nodes.values()))
            await run.until(lambda status: all(one.incarnation and one.alive for one in status.nodes))
            await run.asking.ask(AddChains((NewChain(CHAIN, tuple(range(1, replicas + 1))),)))
            yield run
        finally:
            await run.asking.close()
            for node in run.nodes.values():
                await node.end()


class RetryingWriter:
    """Writes to chunks of its own, reads them, and knows what they may hold. `longest_ns`: between two updates done."""

    def __init__(self, chunks: Chunks, file: int, seed: int, *, timeout_ns: int = 4 * SECOND) -> None:
        self._chunks, self._file, self._timeout_ns = chunks, file, timeout_ns
        self._random = random.Random(seed)
        self._may: dict[int, list[bytes | None]] = {index: [None] for index in range(3)}
        self.done = self.reads = self.unknown = 0
        self.longest_ns = 0
        self.failures: list[str] = []

    async def work(self, until: asyncio.Event) -> None:
        last_ns = time.monotonic_ns()
        while not until.is_set():
            index = self._random.randrange(len(self._may))
            if self._random.random() < 0.5:
                await self.check(index)
                continue
            done = self.done
            await self._update(index)
            if self.done > done:
                now_ns = time.monotonic_ns()
                self.longest_ns, last_ns = max(self.longest_ns, now_ns - last_ns), now_ns

    async def check(self, index: int) -> None:
        """Raises `AssertionError` when something is read that was never written, or was overwritten."""
        try:
            found: bytes | None = bytes(await self._chunks.read(CHAIN, self._chunk(index), timeout_ns=self._timeout_ns))
        except NotFound:
            found = None
        except Timeout:
            return
        may = self._may[index]
        assert found in may, f"chunk {index}: {_short(found)} is none of {[_short(one) for one in may]}"
        self._may[index] = may[may.index(found) :]
        self.reads += 1

    async def _update(self, index: int) -> None:
        data = self._random.randbytes(self._random.choice([10, 5000, 300_000]))
        offset = self._random.choice([0, 0, 100_000])
        kind = self._random.random()
        befores = self._may[index]
        try:
            if kind < 0.1:
                await self._chunks.remove(CHAIN, self._chunk(index), timeout_ns=self._timeout_ns)
                afters: list[bytes | None] = [None]
            else:
                await self._chunks.write(CHAIN, self._chunk(index), data, offset, timeout_ns=self._timeout_ns)
                afters = [_written(one, offset, data) for one in befores]
            self._may[index] = afters
            self.done += 1
        except Timeout:
            self.unknown += 1
            self._may[index] = befores + [None if kind < 0.1 else _written(one, offset, data) for one in befores]
        except FireflyerError as error:
            self.failures.append(f"{type(error).__name__}: {error}")

    def _chunk(self, index: int) -> ChunkId:
        return ChunkId(self._file, index)


def _written(before: bytes | None, offset: int, data: bytes) -> bytes:
    old = before or b""
    return old[:offset].ljust(offset, b"\0") + data + old[offset + len(data) :]


def _short(content: bytes | None) -> str:
    return "nothing" if content is None else f"{len(content)} bytes {content[:8].hex()}"
