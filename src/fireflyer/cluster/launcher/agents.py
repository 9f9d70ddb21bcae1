"""Nodes on machines whose agents start their guards.

A connection to an agent is used for orders and news only: ranks depend on that of their supervisor. So an agent may be
away for a while; what is asked of it is asked again when it is back, and a guard of one token is started once.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

import msgspec

from fireflyer.base.errors import Busy, FireflyerError, PermanentError, TransientError, UsageError
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.messages import Event, SupervisorGone, SupervisorLost
from fireflyer.cluster.launcher.machines import Machine
from fireflyer.cluster.launcher.nodes import describe_exit
from fireflyer.cluster.schema.agent import (
    ASK_AGENT,
    FORGET_GUARD,
    START_GUARD,
    STOP_GUARD,
    WAIT_GUARD,
    GuardName,
    GuardOrder,
    GuardStatus,
)
from fireflyer.cluster.schema.hosts import HostFacts, HostQuestion, NodeOrders
from fireflyer.cluster.schema.wire import SupervisorConfig
from fireflyer.identity.derived import apply_pad, seal
from fireflyer.identity.handshake import NONCE_BYTES, Credential, UserCredential, token_key
from fireflyer.identity.machines import JoinedMachine
from fireflyer.identity.secrets import Secret
from fireflyer.runtime.address import Address
from fireflyer.runtime.rpc import Method, RpcClient

__all__ = ["AgentNodes", "AgentTarget", "Agents", "UserToken"]

_CONNECT_NS: Final = 5 * SECOND
_CALL_NS: Final = 15 * SECOND
"""A question that waits is answered every ten seconds."""
_START_S: Final = 10.0
"""An agent that cannot be reached for so long starts nothing."""
_TOLD_S: Final = 60.0
"""An agent may hear of a run later than its launcher was started."""
_PREPARE_S: Final = 2400.0
"""As long as an agent answers that it is busy, it may be building the environment of the run."""
_CLOSE_S: Final = 2.0
_PAUSE_S: Final = 0.2
_Req = TypeVar("_Req")
_Resp = TypeVar("_Resp")


@dataclass(frozen=True, slots=True)
class AgentTarget:
    """How an agent is reached, and with what: the credential of its machine, or a ticket."""

    address: str
    port: int
    credential: Credential
    key: bytes = field(repr=False)
    """With which the secret of the job is sealed for it."""
    waits: bool = False
    """It may refuse for a while: nobody has told it yet that the launcher may come."""

    @classmethod
    def of_machine(cls, machine: JoinedMachine) -> AgentTarget:
        credential = machine.credential
        return cls(machine.address, machine.port, UserCredential(credential), token_key(credential))


class UserToken(NamedTuple):
    """Of the user of a run of the platform: each node of the run has it in a file."""

    path: str
    """Of the file on the launcher's machine."""
    text: str

    def __repr__(self) -> str:
        return f"UserToken({self.path!r})"


class _Link:
    """To one agent; connects when it is needed, and again after it was lost."""

    def __init__(self, target: AgentTarget) -> None:
        self.target = target
        self._client: RpcClient | None = None
        self._connecting = asyncio.Lock()

    async def call(self, method: Method[_Req, _Resp], request: _Req) -> _Resp:
        """Raises `TransientError` where the agent cannot be reached, or the outcome is unknown."""
        client = await self._connected()
        try:
            return await client.call(method, request, _CALL_NS)
        except TransientError:
            if self._client is client and client.lost is not None:
                self._client = None
            raise

    async def ask_until_answered(
        self, method: Method[_Req, _Resp], request: _Req, limit_s: float | None = None
    ) -> _Resp:
        """Asks again until there is an answer. Raises what the agent answers, and `TransientError` after `limit_s`."""
        loop = asyncio.get_running_loop()
        until_s = None if limit_s is None else loop.time() + limit_s
        while True:
            try:
                return await self.call(method, request)
            except TransientError as error:
                more_s = _PREPARE_S if limit_s and isinstance(error, Busy) else 0
                if until_s is not None and loop.time() >= until_s + more_s:
                    raise
            await asyncio.sleep(_PAUSE_S)

    async def _connected(self) -> RpcClient:
        async with self._connecting:
            if self._client is None or self._client.lost is not None:
                address = Address(self.target.address, self.target.port)
                self._client = await RpcClient.connect(address, self.target.credential, _CONNECT_NS)
            return self._client

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()


class Agents:
    """By the names of their machines."""

    def __init__(self, targets: Mapping[str, AgentTarget]) -> None:
        self._links = {name: _Link(target) for name, target in targets.items()}

    async def ask(self, name: str, question: HostQuestion) -> HostFacts | str:
        """What the machine says of itself, or why it cannot be used."""
        link = self._links.get(name)
        if link is None:
            return f"has not joined, or was revoked; let it join: ff agent token {name}"
        try:
            facts = await link.ask_until_answered(ASK_AGENT, question, _TOLD_S if link.target.waits else 0)
        except (PermanentError, UsageError) as error:
            return f"cannot be used: {_shown(str(error))}"
        except FireflyerError as error:
            return f"cannot be reached: {_shown(str(error))}; does `ff agent run` run there?"
        return msgspec.structs.replace(facts, server=link.target.address)

    def link(self, name: str) -> _Link:
        return self._links[name]

    async def close(self) -> None:
        await asyncio.gather(*(link.close() for link in self._links.values()))


class AgentNodes:
    """As `Nodes`, by agents. `was_up` says whether a supervisor has connected, and lets none connect that has not."""

    def __init__(
        self,
        agents: Agents,
        *,
        job: str,
        job_token: str,
        secret: Secret,
        workdir: str,
        environment: dict[str, str],
        user_token: UserToken | None,
        first_lease_ns: int,
        feed: Callable[[Event], None],
        was_up: Callable[[int, int], bool],
    ) -> None:
        self._agents = agents
        self._job = job
        self._job_token = job_token
        self._secret = secret
        self._workdir = workdir
        self._environment = environment
        self._user_token = user_token
        self._first_lease_ns = first_lease_ns
        self._feed = feed
        self._was_up = was_up
        self._machines: dict[tuple[int, int], Machine] = {}
        """Where each incarnation is that has not ended as far as is known."""
        self._killed: set[tuple[int, int]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._farewells: set[asyncio.Task[None]] = set()

    def start(self, machine: Machine, config: SupervisorConfig) -> None:
        self._machines[config.node, config.incarnation] = machine
        self._spawn(self._serve(machine, config))

    def kill(self, node: int, incarnation: int) -> None:
        if (node, incarnation) in self._machines and (node, incarnation) not in self._killed:
            self._killed.add((node, incarnation))
            self._spawn(self._stop(node, incarnation, self._machines[node, incarnation]))

    async def close(self) -> bool:
        """Stops what is left of the job, as far as agents can be reached; leases end the rest."""
        stops = [self._stop(*key, machine) for key, machine in self._machines.items()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.gather(*stops, *self._farewells, return_exceptions=True)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        await self._agents.close()
        return True

    async def _serve(self, machine: Machine, config: SupervisorConfig) -> None:
        """One incarnation, from its start to its end."""
        node, incarnation = config.node, config.incarnation
        link = self._agents.link(machine.name)
        name = GuardName(self._token(node, incarnation))
        try:
            await self._order(link, machine, config)
            status = await self._end_of(link, name, (node, incarnation))
        except FireflyerError as error:
            kind = SupervisorLost if self._was_up(node, incarnation) else SupervisorGone
            self._finish(node, incarnation, kind(node, incarnation, f"its agent cannot be used: {_shown(str(error))}"))
            return
        reason = _shown(status.reason)
        if status.exit_code is not None:
            self._feed(SupervisorLost(node, incarnation, describe_exit(status.exit_code, reason)))
        kind = SupervisorGone if status.clean else SupervisorLost
        farewell = self._spawn(self._forget(link, name))
        self._farewells.add(farewell)
        farewell.add_done_callback(self._farewells.discard)
        self._finish(node, incarnation, kind(node, incarnation, reason))

    def _finish(self, node: int, incarnation: int, event: Event) -> None:
        self._machines.pop((node, incarnation), None)
        self._feed(event)

    async def _order(self, link: _Link, machine: Machine, config: SupervisorConfig) -> None:
        """Until it is started; whether it was is not known where this raises `TransientError`."""
        key = config.node, config.incarnation
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _START_S
        while key not in self._killed:
            nonce = secrets.token_bytes(NONCE_BYTES)
            environment, sealed_token = self._environment, b""
            if self._user_token is not None and machine.shared:
                environment = {**environment, "FF_TOKEN_FILE": self._user_token.path}
            elif self._user_token is not None:
                sealed_token = apply_pad(self._user_token.text.encode(), link.target.key, nonce)
            orders = NodeOrders(
                config=config,
                secret=b"",
                directory=machine.directory,
                workdir=self._workdir,
                token=self._token(*key),
                environment=environment,
                first_lease_ns=self._first_lease_ns,
            )
            sealed = b"" if machine.shared else seal(self._secret, link.target.key, nonce)
            order = GuardOrder(
                job=self._job,
                token=orders.token,
                orders=orders,
                sealed=sealed,
                nonce=nonce,
                sealed_user_token=sealed_token,
            )
            try:
                await link.call(START_GUARD, order)
            except TransientError:
                if loop.time() >= until_s:
                    raise
                await asyncio.sleep(_PAUSE_S)
            else:
                return

    async def _end_of(self, link: _Link, name: GuardName, key: tuple[int, int]) -> GuardStatus:
        """An agent that was started anew does not know of a stop that an earlier one was told."""
        while (status := await link.ask_until_answered(WAIT_GUARD, name)).state != "ended":
            if key in self._killed and status.state != "stopping":
                await link.ask_until_answered(STOP_GUARD, name)
        return status

    async def _forget(self, link: _Link, name: GuardName) -> None:
        with contextlib.suppress(FireflyerError):
            await link.call(FORGET_GUARD, name)

    async def _stop(self, node: int, incarnation: int, machine: Machine) -> None:
        """A stop that comes before the start makes the agent refuse the start."""
        name = GuardName(self._token(node, incarnation))
        with contextlib.suppress(PermanentError):
            await self._agents.link(machine.name).ask_until_answered(STOP_GUARD, name)

    def _token(self, node: int, incarnation: int) -> str:
        return f"{self._job_token}.{node}.{incarnation}"

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _shown(text: str) -> str:
    """What another machine says, as far as a terminal may get it."""
    return "".join(char for char in " ".join(text.split()) if char.isprintable())[:500]
