"""Runs a local cluster: managers, then storage processes; makes its nodes, chains and table the first time.

    layout ──> managers ready ──> nodes and targets added ──> storage processes ready and registered
           ──> chains and table, unless the manager has the table ──> every chain serves ──> `on_up` ──> until cancelled

Each step may come twice: who is killed in the middle goes on with the next `up`. Chains are made only when their nodes
have registered, since a new target serves its chain from the first moment.

It ends by itself when its directory is no longer there (somebody has removed it: what the processes would write is
lost), and when all managers, or all nodes, die at once again and again: the reason is then said once, and not for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
from collections.abc import Callable
from typing import Final

import msgspec

from fireflyer.accounts.managing import UsersClient
from fireflyer.base.errors import Exists, FireflyerError, InvariantViolation, NotFound, PermanentError, Timeout
from fireflyer.base.units import SECOND
from fireflyer.fs.control import ManagerClient
from fireflyer.fs.core.routing import apply_delta
from fireflyer.fs.schema.manager import (
    MAX_PER_REQUEST,
    AddChains,
    AddNode,
    AddTable,
    AddTargets,
    Answer,
    GetRouting,
    Request,
    RoutingAnswer,
    Status,
)
from fireflyer.fs.schema.routing import Routing, TargetState
from fireflyer.fs.service.local.layout import ADMIN, TABLE, Layout, LocalCluster, LocalNode
from fireflyer.fs.service.storage.target_directory import make_target
from fireflyer.identity import NodeCredential, load_secret
from fireflyer.runtime.master_port import lasting_address
from fireflyer.runtime.processes.run_lock import RunLock
from fireflyer.runtime.processes.services import LocalProcess
from fireflyer.runtime.rpc import Address

__all__ = ["run_local"]

START_S: Final = 60.0
"""For a process to be ready, for nodes to register, for chains to serve."""
AGAIN_S: Final = 10.0
"""For a cluster that was there already to become whole; a part of it may be broken."""
LOOK_S: Final = 0.1
WATCH_S: Final = 1.0
"""Between two looks whether there is anything left to run."""


async def run_local(
    layout: Layout,
    cluster: LocalCluster,
    *,
    lock: RunLock,
    say: Callable[[str], None],
    on_up: Callable[[LocalCluster, Status], None],
) -> None:
    """Until it is cancelled; then everything is ended, storage processes first. SIGHUP: reads `cluster.json` again,
    starts the nodes that are new in it and ends those that are not there any more. Raises `FireflyerError` when the
    cluster cannot be started or cannot go on. `lock`: of the directory, held."""
    runner = _Runner(layout, cluster, lock, say)
    changed = asyncio.Event()
    # Before a manager answers: whoever has told it of a node sends the signal, which would end us.
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, changed.set)
    try:
        await runner.start_managers()
        status = await runner.start_nodes()
        on_up(runner.cluster, status)
        await runner.follow(changed)
    finally:
        await runner.stop()


class _Runner:
    def __init__(self, layout: Layout, cluster: LocalCluster, lock: RunLock, say: Callable[[str], None]) -> None:
        self.cluster = cluster
        self._layout = layout
        self._lock = lock
        self._say = say
        self._managers: list[LocalProcess] = []
        self._nodes: dict[int, LocalProcess] = {}
        self._reservations: list[socket.socket] = []
        """Of ports of managers: no other process of this machine chooses one of them while this runs."""

    # --- managers ---

    async def start_managers(self) -> None:
        for number, last in enumerate(self.cluster.managers, 1):
            address, reservation = lasting_address(_free(last), random.SystemRandom())
            if reservation is not None:
                self._reservations.append(reservation)
            config = self._layout.write_manager(self.cluster, number, address)
            self._managers.append(self._process(f"manager-{number}", ["fs", "manager", config]))
        addresses = [await one.wait_ready(START_S) for one in self._managers]
        for number, address in enumerate(addresses, 1):
            # When it is started again it listens at the same address.
            self._layout.write_manager(self.cluster, number, address)
        self.cluster = msgspec.structs.replace(self.cluster, managers=tuple(addresses))
        self._layout.save(self.cluster)
        if not self.cluster.accounts:
            await self._make_administrator()

    async def _make_administrator(self) -> None:
        """And the token with which commands on the directory prove themselves, if they are not there."""
        if self._layout.has_admin_token:
            return
        credential = NodeCredential(load_secret(self._layout.secret_file), "ff fs up")
        async with UsersClient(self.cluster.managers, credential, timeout_ns=int(START_S) * SECOND) as users:
            with contextlib.suppress(Exists):
                await users.create_user(ADMIN)
            self._layout.write_admin_token(await users.issue(ADMIN, label="ff fs up"))

    def _process(self, name: str, arguments: list[str]) -> LocalProcess:
        process = LocalProcess(name, arguments, self._layout.log_file(name), self._say)
        process.start()
        return process

    # --- nodes ---

    async def start_nodes(self) -> Status:
        credential = NodeCredential(load_secret(self._layout.secret_file), "ff fs up")
        async with ManagerClient(self.cluster.managers, credential) as client:
            made = any(table.id == TABLE for table in (await self._routing(client)).tables)
            if not made:
                await self._add_nodes(client)
            for node in self.cluster.nodes:
                self._start_node(node, new=not made)
            await self._settle(made=made)
            if not made:
                await self._until(client, _all_alive, "not all nodes have registered")
                await self._ask(client, AddChains(self.cluster.chains))
                await self._ask(client, AddTable(TABLE, tuple(chain.id for chain in self.cluster.chains)))
                return await self._until(client, _all_serve, "not all chains are fully replicated")
            with contextlib.suppress(Timeout):
                return await self._until(client, _all_serve, "not all chains are fully replicated", within_s=AGAIN_S)
            return await self._status(client)

    async def _settle(self, *, made: bool) -> None:
        """A node of a cluster that is there already may be broken: the others serve. All of them may not, and none of a
        new cluster."""
        failed: list[FireflyerError] = []
        for process in list(self._nodes.values()):
            try:
                await process.wait_ready(START_S)
            except FireflyerError as reason:
                failed.append(reason)
        if failed and (not made or len(failed) == len(self._nodes)):
            raise failed[0]
        for error in failed:
            self._say(str(error))

    async def _add_nodes(self, client: ManagerClient) -> None:
        if len(self.cluster.chains) > MAX_PER_REQUEST:
            raise InvariantViolation("more chains than one request names")
        for node in self.cluster.nodes:
            await self._ask(client, AddNode(node.id))
            await self._ask(client, AddTargets(node.id, node.targets))

    def _start_node(self, node: LocalNode, *, new: bool) -> None:
        config = self._layout.write_storage(self.cluster, node)
        for target in node.targets:
            directory = self._layout.target_directory(node.id, target)
            if not os.path.exists(directory):
                make_target(directory, self.cluster.cluster, target)
                if not new:
                    self._say(
                        f"{directory} was missing: a new, empty target is made there and synced from other replicas"
                    )
        self._nodes[node.id] = self._process(f"node-{node.id}", ["fs", "storage", config])

    async def follow(self, changed: asyncio.Event) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await changed.wait()
            self._check()
            if changed.is_set():
                changed.clear()
                await self._reload()

    def _check(self) -> None:
        if not self._lock.in_place():
            raise NotFound(f"{self._layout.directory} was removed, so the processes of its cluster were stopped")
        for processes in (self._managers, list(self._nodes.values())):
            reasons = [f"{one.name}: {one.crash_looping}" for one in processes if one.crash_looping]
            if reasons and len(reasons) == len(processes):
                raise PermanentError(
                    f"crash looping: {'; '.join(reasons)}; see the logs {self._layout.directory}/*/log"
                )

    async def _reload(self) -> None:
        try:
            self.cluster = self._layout.load()
            for node in self.cluster.nodes:
                if node.id not in self._nodes:
                    self._start_node(node, new=True)
                    self._say(f"node-{node.id} is started")
            for number in [one for one in self._nodes if one not in [node.id for node in self.cluster.nodes]]:
                await self._nodes.pop(number).stop()
                self._say(f"node-{number} is stopped: the node was retired")
        except FireflyerError as error:
            self._say(str(error))

    async def stop(self) -> None:
        """All at once, but managers after those who still have something to tell them."""
        await asyncio.gather(*(one.stop() for one in self._nodes.values()))
        await asyncio.gather(*(one.stop() for one in self._managers))
        for reservation in self._reservations:
            reservation.close()

    # --- asking ---

    async def _ask(self, client: ManagerClient, request: Request) -> Answer:
        return await client.ask(request, timeout_ns=int(START_S) * SECOND)

    async def _routing(self, client: ManagerClient) -> Routing:
        answer = await self._ask(client, GetRouting())
        if not isinstance(answer, RoutingAnswer):
            raise InvariantViolation(f"GetRouting was answered by {type(answer).__name__}")
        return apply_delta(Routing(0), answer.routing) if answer.routing is not None else Routing(0)

    async def _status(self, client: ManagerClient) -> Status:
        return await client.status(timeout_ns=int(START_S) * SECOND)

    async def _until(
        self, client: ManagerClient, true: Callable[[Status], bool], what: str, *, within_s: float = START_S
    ) -> Status:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while True:
                    self._check()
                    status = await self._status(client)
                    if true(status):
                        return status
                    await asyncio.sleep(LOOK_S)
        raise Timeout(f"{what} within {within_s:.0f} s; see the logs {self._layout.directory}/*/log")


def _all_alive(status: Status) -> bool:
    return all(node.alive for node in status.nodes)


def _all_serve(status: Status) -> bool:
    """And know it: a new target that was killed before it had been told would come back not clean: it does not know
    that it has everything."""
    states = [member.state for chain in status.chains for member in chain.members]
    told = all(one.report is not None and one.report.clean for one in status.targets if one.chain is not None)
    return bool(states) and all(state is TargetState.SERVING for state in states) and told and _all_alive(status)


def _free(address: str) -> str:
    """This address if one can listen there, else the host with any free port."""
    host, _, port = address.rpartition(":")
    if port == "0":
        return address
    parsed = Address.parse(address)
    try:
        with socket.socket(socket.AF_INET6 if ":" in parsed.host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(parsed)
    except OSError:
        return f"{host}:0"
    return address
