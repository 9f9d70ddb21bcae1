"""A cluster of processes as `ff fs manager` and `ff fs storage` run them, with the limits that users get.

    async with running(directory, nodes=3, chains=spread(3, 2)) as cluster:
        with cluster.ring() as ring: ...
        cluster.nodes[2].kill()

Node n has target n. In a network (`tests.support.network.namespaces`) node n is on host n - 1, and managers on the host
of the bridge. Everything dies with the thread that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import lmdb
import msgspec
from tests.support.network.namespaces import Network

from fireflyer.base.toml_text import to_toml
from fireflyer.base.units import KIB, MIB
from fireflyer.fs.client import Options, Ring, open_ring
from fireflyer.fs.control import ManagerClient
from fireflyer.fs.schema.manager import AddChains, AddNode, AddTable, AddTargets, GetStatus, NewChain, Status
from fireflyer.fs.schema.routing import TargetState
from fireflyer.fs.service.manager.config import ManagerConfig
from fireflyer.fs.service.meta.config import MetaSettings
from fireflyer.fs.service.storage.config import StorageConfig, StorageTarget
from fireflyer.fs.service.storage.target_directory import make_target
from fireflyer.identity import NodeCredential, load_secret, new_secret, save_secret

__all__ = ["CLUSTER", "Cluster", "Process", "all_serve", "processor_s", "running", "spread", "target_directory"]

CLUSTER: Final = "bench"
LIMIT_S: Final = 120.0
_BOUND_TO_US: Final = ("setpriv", "--pdeathsig", "KILL")
_STORAGE: Final = {"buffer_bytes": 128 * MIB, "reserve": 0.0, "scrub_bytes_per_s": 0}
"""Where not the defaults: one machine has all of them, and a scrub would be measured by chance."""


class Process:
    """One that says "ready ADDRESS"."""

    def __init__(self, command: str, config: msgspec.Struct, path: Path, prefix: Sequence[str]) -> None:
        path.write_text(to_toml(msgspec.to_builtins(config)))
        self._words = [*(prefix or _BOUND_TO_US), sys.executable, "-P", "-m", "fireflyer", "fs", command, str(path)]
        self._log = path.with_suffix(".log")
        self._process: asyncio.subprocess.Process | None = None
        self.address = ""
        self.ready_s = 0.0
        """From its start until it was ready."""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        began_s = time.perf_counter()
        with self._log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(*self._words, stdout=asyncio.subprocess.PIPE, stderr=log)
        self._process = process
        assert process.stdout is not None
        async with asyncio.timeout(LIMIT_S):
            line = (await process.stdout.readline()).decode()
        if not line.startswith("ready "):
            raise RuntimeError(f"{' '.join(self._words)} did not start: {self._log.read_text()[-2000:]}")
        self.address, self.ready_s = line.split()[1], time.perf_counter() - began_s

    def anonymous_bytes(self) -> int:
        """Its memory that no file is behind."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        (line,) = [one for one in status.splitlines() if one.startswith("RssAnon")]
        return int(line.split()[1]) * KIB

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
            await self._process.wait()


class Cluster:
    def __init__(self, directory: Path, network: Network | None, store: str = "") -> None:
        self.directory = directory
        self.network = network
        self.nodes: dict[int, Process] = {}
        self._secret_file = str(directory / "secret")
        save_secret(new_secret(), self._secret_file)
        self.credential = NodeCredential(load_secret(self._secret_file), "bench")
        host = "127.0.0.1" if network is None else network.control.address
        config = ManagerConfig(
            name="m1", cluster=CLUSTER, store=store or f"embedded:{directory}/store", listen=f"{host}:0",
            secret_file=self._secret_file, files=MetaSettings(trusted_root=True),
        )  # fmt: skip
        prefix = () if network is None else network.control.command([])
        self.manager = Process("manager", config, directory / "manager.toml", prefix)
        self._asking: ManagerClient

    async def add_table(self) -> None:
        """Of all chains: files can be made then."""
        chains = (await self.status()).chains
        await self._asking.ask(AddTable(1, tuple(chain.id for chain in chains)))

    def stored_bytes(self) -> int:
        """Of the embedded store: pages that hold something, without those that are free."""
        with lmdb.open(str(self.directory / "store"), max_dbs=2, readonly=True, lock=False) as env, env.begin() as txn:
            stat = txn.stat(env.open_db(b"records", txn, create=False))
            return int((stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]) * stat["psize"])

    def ring(self, options: Options | None = None) -> Ring:
        return open_ring([self.manager.address], self.credential, options=options, timeout_ns=int(LIMIT_S * 1e9))

    def target_directory(self, node: int) -> Path:
        return target_directory(self.directory, node)

    def make_target(self, node: int) -> None:
        make_target(str(self.target_directory(node)), CLUSTER, node)

    async def begin(self, nodes: int, chains: Sequence[NewChain], storage: dict[str, Any]) -> None:
        await self.manager.start()
        self._asking = ManagerClient([self.manager.address], self.credential)
        for node in range(1, nodes + 1):
            self.nodes[node] = self._make(node, storage)
            await self._asking.ask(AddNode(node))
            await self._asking.ask(AddTargets(node, (node,)))
        await asyncio.gather(*(process.start() for process in self.nodes.values()))
        await self.until(lambda status: all(one.incarnation and one.alive for one in status.nodes))
        await self._asking.ask(AddChains(tuple(chains)))
        await self.until(all_serve)

    def _make(self, node: int, storage: dict[str, Any]) -> Process:
        self.make_target(node)
        path = str(self.target_directory(node))
        host = "127.0.0.1" if self.network is None else self.network.hosts[node - 1].address
        config = StorageConfig(
            cluster=CLUSTER, node=node, managers=(self.manager.address,), targets=(StorageTarget(node, path),),
            secret_file=self._secret_file, host=host, **(_STORAGE | storage),
        )  # fmt: skip
        prefix = () if self.network is None else self.network.hosts[node - 1].command([])
        return Process("storage", config, self.directory / f"node{node}.toml", prefix)

    async def status(self) -> Status:
        status = await self._asking.ask(GetStatus())
        assert isinstance(status, Status)
        return status

    async def until(self, true: Callable[[Status], bool], *, limit_s: float = LIMIT_S) -> None:
        async with asyncio.timeout(limit_s):
            while True:
                if true(await self.status()):
                    return
                await asyncio.sleep(0.02)

    def processor_s(self) -> float:
        """What the storage processes have used so far."""
        return sum(processor_s(process.pid) for process in self.nodes.values())

    async def end(self) -> None:
        with contextlib.suppress(AttributeError):
            await self._asking.close()
        for process in (*self.nodes.values(), self.manager):
            await process.kill()


@contextlib.asynccontextmanager
async def running(
    directory: Path,
    *,
    nodes: int,
    chains: Sequence[NewChain],
    network: Network | None = None,
    store: str = "",
    **storage: Any,
) -> AsyncIterator[Cluster]:
    """`store`: of the manager, if not an embedded one. `storage`: of `StorageConfig`. All chains serve."""
    cluster = Cluster(directory, network, store)
    try:
        await cluster.begin(nodes, chains, storage)
        yield cluster
    finally:
        await cluster.end()


def target_directory(directory: Path, node: int) -> Path:
    return directory / f"target{node}"


def spread(nodes: int, replicas: int) -> tuple[NewChain, ...]:
    """A chain for each so many nodes."""
    firsts = range(1, nodes - replicas + 2, replicas)
    return tuple(NewChain(1 + at, tuple(range(first, first + replicas))) for at, first in enumerate(firsts))


def all_serve(status: Status) -> bool:
    return all(one.state is TargetState.SERVING for chain in status.chains for one in chain.members)


def processor_s(pid: int) -> float:
    """That a process has used so far; 0 of one that is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0
