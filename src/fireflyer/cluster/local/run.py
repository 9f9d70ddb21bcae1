"""Runs a local platform: the manager, then an agent for each node.

    layout ──> manager ready ──> guarantee set ──> `before_agents` ──> agents join ──> agents ready
           ──> every node heard ──> nodes that `ff down` has closed are open ──> `on_up` ──> until cancelled

Each step may come twice. It ends by itself when its directory is no longer there, and when the manager or all agents
die at once again and again. Runs of tasks go on when it ends, until `ff down`, or until they have heard of no manager
for `stop_after_ms`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import msgspec

from fireflyer.base.errors import FireflyerError, NotFound, PermanentError, Timeout, TransientError, UsageError
from fireflyer.cluster.agent.join import join
from fireflyer.cluster.agent.records import AgentDirectory
from fireflyer.cluster.client import Client, read_connection
from fireflyer.cluster.core.platform.commands import LabelNode, MoveNode, SetPolicy
from fireflyer.cluster.core.platform.views import NodeView
from fireflyer.cluster.local.config import HealthWish, UpConfig
from fireflyer.cluster.local.layout import ADMIN, AccountsAt, LocalPlatform, PlatformLayout
from fireflyer.cluster.local.leaving import open_nodes
from fireflyer.cluster.local.up_file import UpFile
from fireflyer.cluster.manager.administrators import new_administrator
from fireflyer.runtime.address import parse_listen
from fireflyer.runtime.master_port import lasting_address, reserve_any_port
from fireflyer.runtime.port_search import reserve_port
from fireflyer.runtime.processes.run_lock import RunLock
from fireflyer.runtime.processes.services import LocalProcess

__all__ = ["run_local_platform"]

FS_ADMIN: Final = "fs:admin"
"""The role, as `fs.service.rights` has it."""
START_S: Final = 60.0
LOOK_S: Final = 0.1
WATCH_S: Final = 1.0
HERE: Final = "127.0.0.1"
TOKEN_S: Final = 600


async def run_local_platform(
    layout: PlatformLayout,
    platform: LocalPlatform,
    *,
    wanted: UpConfig,
    lock: RunLock,
    say: Callable[[str], None],
    on_up: Callable[[LocalPlatform], None],
    before_agents: Callable[[], Awaitable[None]] | None = None,
    task_environment: Callable[[], Mapping[str, str]] = dict,
    accounts: AccountsAt | None = None,
    file: UpFile | None = None,
) -> None:
    """Until it is cancelled; then everything is ended, agents first. Raises `FireflyerError` when it cannot be started
    or cannot go on. `lock`: of the directory, held. `before_agents`: of what tasks need, waited for before any can
    run. `task_environment`: asked after that, for variables of all tasks, which their own settings come before.
    `accounts`: of a file system whose users are those of the platform. `file`: that is followed while it is up."""
    runner = _Runner(layout, platform, wanted, lock, say, task_environment, accounts)
    try:
        await runner.start_manager()
        if before_agents is not None:
            await before_agents()
        await runner.start_agents()
        on_up(runner.platform)
        await runner.follow(file)
    finally:
        await runner.stop()


class _Runner:
    def __init__(
        self,
        layout: PlatformLayout,
        platform: LocalPlatform,
        wanted: UpConfig,
        lock: RunLock,
        say: Callable[[str], None],
        task_environment: Callable[[], Mapping[str, str]],
        accounts: AccountsAt | None,
    ) -> None:
        self.platform = platform
        self._task_environment = task_environment
        self._accounts = accounts
        self._wanted = wanted
        self._layout = layout
        self._lock = lock
        self._say = say
        self._manager: LocalProcess | None = None
        self._agents: dict[str, LocalProcess] = {}
        self._reservations: list[socket.socket] = []
        """Of ports of manager and agents: no other process of this machine chooses one of them while this runs."""

    async def start_manager(self) -> None:
        new = not self._layout.has_connection
        there = self.platform
        at = _address(self._wanted.listen, there.listen), _address(self._wanted.listen_agents, there.listen_agents)
        if at[1] != there.listen_agents and not there.listen_agents.endswith(":0"):
            raise UsageError(
                f"listen_agents = {at[1]!r}: agents of {self._layout.directory} reach the manager at "
                f"{there.listen_agents}, which cannot be changed; leave the key out"
            )
        at = self._reserved(at[0]), self._reserved(at[1])
        config, path = self._layout.write_manager(there, self._wanted, *at, self._accounts)
        if new:
            token = await new_administrator(config, ADMIN, uid=os.getuid(), gid=os.getgid())
        else:
            token = read_connection(self._layout.connection_file).token
        self._manager = self._process("manager", ["manager", path])
        url, at_agents, *fingerprint = (await self._manager.wait_ready(START_S)).split()
        self._layout.write_connection(url, fingerprint[0] if fingerprint else "", token)
        listen = url.partition("://")[2]
        # When it is started again it listens at the same addresses.
        self._layout.write_manager(self.platform, self._wanted, listen, at_agents, self._accounts)
        self.platform = msgspec.structs.replace(self.platform, listen=listen, listen_agents=at_agents)
        self._layout.save(self.platform)
        await self._until(lambda: self._set_policy(new=new), "the manager does not lead")
        if self._accounts is not None:
            await self._until(self._grant_files, "the manager does not lead")

    def _reserved(self, listen: str) -> str:
        address, reservation = lasting_address(listen, random.SystemRandom())
        if reservation is not None:
            self._reservations.append(reservation)
        return address

    def _process(self, name: str, arguments: list[str], environment: dict[str, str] | None = None) -> LocalProcess:
        process = LocalProcess(name, arguments, self._layout.log_file(name), self._say, environment)
        process.start()
        return process

    def _set_policy(self, *, new: bool) -> bool:
        with self._client() as client:
            config = client.cluster().config
            now = config.policy, self.platform.guaranteed_ns if new else config.guaranteed_ns
            policy, guaranteed_ns = self._wanted.time_sharing.changed(*now)
            if (policy, guaranteed_ns) != (config.policy, config.guaranteed_ns):
                client.command(SetPolicy(policy=policy, guaranteed_ns=guaranteed_ns))
        return True

    def _grant_files(self) -> bool:
        """The administrator of the platform is that of its file system, too."""
        with self._client() as client:
            client.grant_role(ADMIN, FS_ADMIN)
        return True

    async def start_agents(self) -> None:
        names = [f"agent-{number}" for number in range(1, self.platform.nodes + 1)]
        environment = dict(self._task_environment())
        for name in names:
            directory = AgentDirectory(self._layout.agent_directory(name))
            membership = directory.membership()
            if membership is None:
                await self._join(name, directory)
            elif (reservation := reserve_port(membership.port)) is not None:
                self._reservations.append(reservation)
            self._agents[name] = self._process(
                name,
                ["agent", "run", "--dir", directory.path, "--own-user", f"--run-logs-mib={self._wanted.run_logs_mib}"],
                environment,
            )
        for process in self._agents.values():
            await process.wait_ready(START_S)
        await self._until(lambda: self._all_heard(names), "not all agents have registered")

    async def _join(self, name: str, directory: AgentDirectory) -> None:
        def token() -> str:
            with self._client() as client:
                return client.join_token(name, lifetime_s=TOKEN_S)

        port, reservation = reserve_any_port(random.SystemRandom(), "end programs on this machine that listen")
        self._reservations.append(reservation)
        await join(
            directory,
            await asyncio.to_thread(token),
            issuer=self.platform.listen_agents,
            port=port,
            address=HERE,
        )

    def _all_heard(self, names: list[str]) -> bool:
        with self._client() as client:
            nodes = {node.name: node for node in client.nodes()}
            if any(name not in nodes or nodes[name].silent_ns is None for name in names):
                return False
            for number, name in enumerate(names):
                self._place(client, nodes[name], number)
            open_nodes(client)
        return True

    def _place(self, client: Client, node: NodeView, number: int) -> None:
        """Where the file says; a node that it does not name stays where operators have put it, unless zones are tried.
        `number`: of the node, from 0."""
        zones, place = self.platform.zones, self._wanted.place_of(node.name)
        if place is not None:
            at = place.zone, place.leaf, place.group
        elif zones > 1:
            at = f"zone-{number * zones // self.platform.nodes + 1}", node.leaf, node.group
        else:
            return
        if at != (node.zone, node.leaf, node.group):
            client.command(MoveNode(node=node.name, zone=at[0], leaf=at[1], group=at[2]))
        if place is not None and set(place.labels) != set(node.labels):
            client.command(LabelNode(node.name, place.labels))

    def _client(self) -> Client:
        return Client(read_connection(self._layout.connection_file))

    async def _until(self, true: Callable[[], bool], what: str) -> None:
        until_s = time.monotonic() + START_S
        while True:
            self._check()
            with contextlib.suppress(TransientError):
                if await asyncio.to_thread(true):
                    return
            if time.monotonic() > until_s:
                raise Timeout(f"{what} within {START_S:.0f} s; see the logs {self._layout.directory}/*/log")
            await asyncio.sleep(LOOK_S)

    async def follow(self, file: UpFile | None) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            self._check()
            if file is not None:
                await asyncio.to_thread(file.look, self._apply_health)

    def _apply_health(self, health: HealthWish) -> None:
        """The manager follows its file, and one that is started again reads it."""
        wanted, there = msgspec.structs.replace(self._wanted, health=health), self.platform
        self._layout.write_manager(there, wanted, there.listen, there.listen_agents, self._accounts)
        self._wanted = wanted

    def _check(self) -> None:
        if not self._lock.in_place():
            raise NotFound(f"{self._layout.directory} was removed, so its processes were stopped")
        managers = [] if self._manager is None else [self._manager]
        for processes in (managers, list(self._agents.values())):
            reasons = [f"{one.name}: {one.crash_looping}" for one in processes if one.crash_looping]
            if reasons and len(reasons) == len(processes):
                raise PermanentError(
                    f"crash looping: {'; '.join(reasons)}; see the logs {self._layout.directory}/*/log"
                )

    async def stop(self) -> None:
        try:
            await asyncio.gather(*(one.stop() for one in self._agents.values()), return_exceptions=True)
            if self._manager is not None:
                with contextlib.suppress(FireflyerError):
                    await self._manager.stop()
        finally:
            for reservation in self._reservations:
                reservation.close()


def _address(wanted: str, there: str) -> str:
    """Where to listen: any free port is the one that was found at an earlier start."""
    (host, port), (host_there, _) = parse_listen(wanted), parse_listen(there)
    return there if port == 0 and host == host_there else wanted
