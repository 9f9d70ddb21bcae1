"""Runs the processes of a host until it is told to end.

    cluster file ──> configurations on disk ──> managers, meta service and agent started
                 ──> new targets made, then registered with the managers ──> storage process started
                 ──> every process serves ──> `on_ready` ──> until cancelled

A process that dies is started again, for ever: what it waits for may be on another host. SIGHUP: the cluster file is
read again; processes of which something has changed are ended and started anew, all others are left alone.

`targets.json` in the directory of the host says which targets were made here, and how often. The directory of a target
that was made is never made again by itself: where it is missing a disk is not mounted. `make_again` does so.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from typing import Final

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, decode_json
from fireflyer.base.errors import DataCorruption, FireflyerError, NotFound, PermanentError, Timeout, UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.units import SECOND
from fireflyer.cli.hosts.config import ClusterFile, HostConfig
from fireflyer.cli.hosts.processes import AGENT, STORAGE, HostProcess, processes_of
from fireflyer.cluster.agent.records import AgentDirectory, state_directory
from fireflyer.fs.control import ManagerClient
from fireflyer.fs.schema.manager import AddNode, AddTargets
from fireflyer.fs.service.storage.target_directory import make_target
from fireflyer.identity import NodeCredential, load_secret
from fireflyer.identity.private_files import read_private_file, write_private_file
from fireflyer.runtime.processes.services import LocalProcess

__all__ = ["HostDirectory", "run_host"]

READY_S: Final = 60.0
"""Between two looks at a process that does not serve yet."""
PAUSE_S: Final = 0.2
AGAIN_S: Final = 5.0
"""Between two tries to register targets."""
JOINED_S: Final = 0.5
ASK_S: Final = 10
MAX_BYTES: Final = 1 << 20


class HostDirectory:
    """What `ff host run` keeps on its host, below the directory that the cluster file names."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.lock_file = os.path.join(directory, "host.lock")
        self._targets_file = os.path.join(directory, "targets.json")

    def make(self) -> None:
        """Users pass through it to directories of their runs; all else in it is private. Raises `FireflyerError`."""
        if not os.path.isdir(self.directory):
            self._make_private(self.directory)
            os.chmod(self.directory, 0o755)  # noqa: S103

    def made(self) -> dict[int, int]:
        """How often each target was made here. Raises `DataCorruption`."""
        try:
            return decode_json(read_private_file(self._targets_file, MAX_BYTES), dict[int, int])
        except NotFound:
            return {}
        except DECODE_ERRORS as error:
            raise DataCorruption(
                f"{self._targets_file} is damaged: {error}; remove it if all disks of this host are mounted"
            ) from None

    def record(self, targets: dict[int, int]) -> None:
        write_private_file(self._targets_file, msgspec.json.encode(targets) + b"\n")

    def make_again(self, cluster: ClusterFile, host: HostConfig, target: int) -> str:
        """Makes the directory of a target anew, which must be empty or missing: on a new disk. Its path. Raises
        `FireflyerError`."""
        directory = host.target_directories.get(target)
        if directory is None:
            known = ", ".join(host.targets) or "none"
            raise UsageError(f"host {host.name} has no target {target} (it has {known}); give one of them")
        with contextlib.suppress(OSError):
            if os.listdir(directory):
                raise UsageError(
                    f"{directory} is not empty, so target {target} is not made anew there; mount the new disk first"
                )
        self.make()
        make_target(directory, cluster.cluster, target, root_disk=cluster.root_disk)
        made = self.made()
        self.record(made | {target: made.get(target, 0) + 1})
        return directory

    def log_file(self, process: HostProcess) -> str:
        return os.path.join(self.directory, process.name, "log")

    def write(self, process: HostProcess) -> None:
        """Its directory, with its configuration. Raises `FireflyerError`."""
        self._make_private(os.path.join(self.directory, process.name))
        if process.config_file:
            write_private_file(process.config_file, process.config.encode())

    def _make_private(self, path: str) -> None:
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)
        except OSError as error:
            raise translate_os_error(error, f"make {path}") from error


async def run_host(
    read: Callable[[], tuple[ClusterFile, HostConfig]],
    *,
    say: Callable[[str], None],
    on_ready: Callable[[], None],
) -> None:
    """Until it is cancelled; then all processes are ended, but not the ranks that agents have started. `read`: the
    cluster file, now and at each SIGHUP. `on_ready`: everything serves. Raises `FireflyerError` for a first file that
    is wrong, and for a directory that cannot be written."""
    runner = _Runner(*read(), say)
    changed = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, changed.set)
    try:
        await runner.start()
        on_ready()
        while True:
            await changed.wait()
            changed.clear()
            try:
                await runner.change(*read())
            except FireflyerError as error:
                say(f"nothing is changed: {error.message}")
    finally:
        await runner.stop()


class _Runner:
    def __init__(self, cluster: ClusterFile, host: HostConfig, say: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._host = host
        self._say = say
        self._directory = HostDirectory(cluster.directory)
        self._running: dict[str, tuple[LocalProcess, tuple[HostProcess, dict[int, int]]]] = {}
        """Each process with what it was started for."""
        self._joining: asyncio.Task[None] | None = None
        """Waits until this machine has joined, and starts the agent."""

    async def start(self) -> None:
        wanted = processes_of(self._cluster, self._host)
        self._directory.make()
        for process in wanted:
            if process.name == AGENT:
                self._joining = asyncio.create_task(self._start_joined(process))
                await asyncio.sleep(0)  # one that has joined is started now
            elif process.name != STORAGE:
                self._start(process)
        for process in wanted:
            if process.name == STORAGE:
                await self._make_targets()
                self._start(process)
        for running, _ in list(self._running.values()):
            await self._until_ready(running)

    async def change(self, cluster: ClusterFile, host: HostConfig) -> None:
        """Raises `UsageError`, and has changed nothing then."""
        wanted = {process.name: process for process in processes_of(cluster, host)}
        if cluster.directory != self._cluster.directory:
            raise UsageError(f"directory was {self._cluster.directory}; end `ff host run` before you change it")
        self._cluster, self._host = cluster, host
        for name in [name for name in self._running if name not in wanted]:
            await self._end(name)
        if self._joining is not None and AGENT not in self._running:
            self._joining.cancel()
        for name, process in wanted.items():
            if name == STORAGE:
                await self._make_targets()
            if name == AGENT and name not in self._running:
                self._joining = asyncio.create_task(self._start_joined(process))
                continue
            if name in self._running and self._running[name][1] == self._key(process):
                continue
            if name in self._running:
                await self._end(name)
            self._start(process)
            await self._until_ready(self._running[name][0])

    def _key(self, process: HostProcess) -> tuple[HostProcess, dict[int, int]]:
        return process, self._directory.made() if process.name == STORAGE else {}

    def _start(self, process: HostProcess) -> None:
        self._directory.write(process)
        log_file = self._directory.log_file(process)
        running = LocalProcess(process.name, process.arguments, log_file, self._say, dict(process.environment))
        running.start()
        self._running[process.name] = running, self._key(process)

    async def _start_joined(self, process: HostProcess) -> None:
        """The agent, which ends at once on a machine that has not joined: when it has."""
        agent = AgentDirectory(state_directory("agent"))
        if agent.membership() is None:
            name = self._host.name
            self._say(
                f"the agent is started when this machine has joined: ff node token {name} | ssh {name} ff agent join "
                f"{self._cluster.managers[0].at(self._cluster.ports.agents)}"
            )
            while agent.membership() is None:  # noqa: ASYNC110 - another process writes it
                await asyncio.sleep(JOINED_S)
        self._start(process)

    async def _end(self, name: str) -> None:
        running, _ = self._running.pop(name)
        await running.stop()
        self._say(f"{name} is ended: the cluster file has another one, or none")

    async def _until_ready(self, process: LocalProcess) -> None:
        while True:
            try:
                self._say(f"{process.name} serves at {await process.wait_ready(READY_S)}")
                return
            except PermanentError:  # it is started again, and has said why
                await asyncio.sleep(PAUSE_S)
            except Timeout as error:
                self._say(error.message)

    # --- targets ---

    async def _make_targets(self) -> None:
        """Those that are new here: on disk, then at the managers. Returns when both is done; a reason why it cannot be
        done is said once."""
        said = ""
        while True:
            made = self._directory.made()
            new = [target for target in self._host.target_directories if target not in made]
            if not new:
                return
            try:
                for target in new:
                    directory = self._host.target_directories[target]
                    make_target(directory, self._cluster.cluster, target, root_disk=self._cluster.root_disk)
                await self._register(new)
                self._directory.record(made | dict.fromkeys(new, 1))
                return
            except FireflyerError as error:
                if str(error) != said:
                    said = str(error)
                    self._say(f"storage is not started yet, and tried again: {said}")
                await asyncio.sleep(AGAIN_S)

    async def _register(self, targets: list[int]) -> None:
        node = self._host.node
        credential = NodeCredential(load_secret(self._cluster.node_secret_file), f"ff host run {self._host.name}")
        async with ManagerClient(self._cluster.file_managers, credential) as client:
            for request in (AddNode(node), AddTargets(node, tuple(targets))):
                await client.ask(request, timeout_ns=ASK_S * SECOND)

    async def stop(self) -> None:
        """Managers last: the others may have something to tell them."""
        if self._joining is not None:
            self._joining.cancel()
        managers = [name for name in self._running if name.endswith("manager")]
        others = [name for name in self._running if name not in managers]
        for names in (others, managers):
            await asyncio.gather(*(self._running[name][0].stop() for name in names))
