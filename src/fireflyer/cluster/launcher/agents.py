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
from fireflyer.cluster.core.guard_calls import (
    Answered,
    Ask,
    Begin,
    Call,
    Effect,
    Ended,
    GaveUp,
    GuardCalls,
    KillWanted,
    NotAnswered,
    Pause,
    PauseOver,
    Refused,
)
from fireflyer.cluster.core.guard_calls import Event as CallEvent
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
from fireflyer.runtime.driver import InlineDriver
from fireflyer.runtime.rpc import Method, RpcClient

__all__ = ["AgentNodes", "AgentTarget", "Agents", "UserToken"]

_CONNECT_NS: Final = 5 * SECOND
_CALL_NS: Final = 15 * SECOND
"""A question that waits is answered every ten seconds."""
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
    """Token of the user of a run of the platform: each node of the run has it in a file."""

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
    """As `Nodes`, by agents: performs what `core.guard_calls` decides for each incarnation. `was_up` says whether a
    supervisor has connected, and lets none connect that has not."""

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
        self._incarnations: dict[tuple[int, int], _Incarnation] = {}
        """That have not ended as far as is known."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._farewells: set[asyncio.Task[None]] = set()

    def start(self, machine: Machine, config: SupervisorConfig) -> None:
        key = config.node, config.incarnation
        name = GuardName(f"{self._job_token}.{config.node}.{config.incarnation}")
        self._incarnations[key] = one = _Incarnation(self, self._agents.link(machine.name), machine, config, name)
        one.driver.feed(Begin())

    def kill(self, node: int, incarnation: int) -> None:
        one = self._incarnations.get((node, incarnation))
        if one is not None:
            one.driver.feed(KillWanted())

    async def close(self) -> bool:
        """Stops what is left of the job, as far as agents can be reached; leases end the rest."""
        left = list(self._incarnations.values())
        for one in left:
            one.stopped.clear()
            one.driver.feed(KillWanted())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.gather(*(one.stopped.wait() for one in left), *self._farewells, return_exceptions=True)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        await self._agents.close()
        return True

    def perform(self, one: _Incarnation, effect: Effect) -> None:
        match effect:
            case Ask("forget"):
                farewell = self._spawn(self._forget(one))
                self._farewells.add(farewell)
                farewell.add_done_callback(self._farewells.discard)
            case Ask(call):
                self._spawn(self._ask(one, call))
            case Pause(call):
                self._spawn(self._pause(one, call))
            case Ended(status):
                self._ended(one, status)
            case GaveUp(reason):
                node, incarnation = one.key
                kind = SupervisorLost if self._was_up(node, incarnation) else SupervisorGone
                self._finish(one, kind(node, incarnation, f"its agent cannot be used: {_shown(reason)}"))

    def _ended(self, one: _Incarnation, status: GuardStatus) -> None:
        node, incarnation = one.key
        reason = _shown(status.reason)
        if status.exit_code is not None:
            self._feed(SupervisorLost(node, incarnation, describe_exit(status.exit_code, reason)))
        kind = SupervisorGone if status.clean else SupervisorLost
        self._finish(one, kind(node, incarnation, reason))

    def _finish(self, one: _Incarnation, event: Event) -> None:
        self._incarnations.pop(one.key, None)
        self._feed(event)

    async def _ask(self, one: _Incarnation, call: Call) -> None:
        answer: CallEvent
        try:
            match call:
                case "start":
                    await one.link.call(START_GUARD, self._order(one))
                    answer = Answered(call)
                case "wait":
                    status = await one.link.call(WAIT_GUARD, one.name)
                    answer = Answered(call, status)
                case _:
                    await one.link.call(STOP_GUARD, one.name)
                    answer = Answered(call)
        except TransientError as error:
            answer = NotAnswered(call, str(error))
        except FireflyerError as error:
            answer = Refused(call, str(error))
        one.driver.feed(answer)
        if not one.calls.stopping:
            one.stopped.set()

    async def _pause(self, one: _Incarnation, call: Call) -> None:
        await asyncio.sleep(_PAUSE_S)
        one.driver.feed(PauseOver(call))

    async def _forget(self, one: _Incarnation) -> None:
        with contextlib.suppress(FireflyerError):
            await one.link.call(FORGET_GUARD, one.name)

    def _order(self, one: _Incarnation) -> GuardOrder:
        machine, key = one.machine, one.link.target.key
        nonce = secrets.token_bytes(NONCE_BYTES)
        environment, sealed_token = self._environment, b""
        if self._user_token is not None and machine.shared:
            environment = {**environment, "FF_TOKEN_FILE": self._user_token.path}
        elif self._user_token is not None:
            sealed_token = apply_pad(self._user_token.text.encode(), key, nonce)
        orders = NodeOrders(
            config=one.config,
            secret=b"",
            directory=machine.directory,
            workdir=self._workdir,
            token=one.name.token,
            environment=environment,
            first_lease_ns=self._first_lease_ns,
        )
        return GuardOrder(
            job=self._job,
            token=orders.token,
            orders=orders,
            sealed=b"" if machine.shared else seal(self._secret, key, nonce),
            nonce=nonce,
            sealed_user_token=sealed_token,
        )

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class _Incarnation:
    """Of a node, with the machine that decides what its agent is asked."""

    def __init__(
        self, nodes: AgentNodes, link: _Link, machine: Machine, config: SupervisorConfig, name: GuardName
    ) -> None:
        self.link, self.machine, self.config, self.name = link, machine, config, name
        self.key = config.node, config.incarnation
        self.calls = GuardCalls()
        self.stopped = asyncio.Event()
        """Nothing that would stop it is under way."""
        self.driver: InlineDriver[CallEvent, Effect] = InlineDriver(
            self.calls, lambda effect: nodes.perform(self, effect)
        )


def _shown(text: str) -> str:
    """What another machine says, as far as a terminal may get it."""
    return "".join(char for char in " ".join(text.split()) if char.isprintable())[:500]
