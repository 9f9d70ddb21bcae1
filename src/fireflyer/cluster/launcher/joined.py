"""Machines that join the job by themselves: the same `ff run` is started on each, as with torchrun."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from fireflyer.base.errors import PermissionDenied, UsageError
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.facts import Answer
from fireflyer.cluster.core.messages import Event, SupervisorGone, SupervisorLost
from fireflyer.cluster.launcher.machines import Machine
from fireflyer.cluster.launcher.nodes import Nodes
from fireflyer.cluster.schema.hosts import HostQuestion
from fireflyer.cluster.schema.job import JobSpec, node_range
from fireflyer.cluster.schema.join import (
    ASK,
    HOST_NEWS,
    HOST_NEXT,
    JOIN,
    GuardEnded,
    HostCommand,
    JobEnded,
    Joined,
    JoinRequest,
    KillGuard,
    NumberedHostCommand,
    StartGuard,
)
from fireflyer.cluster.schema.wire import Done, Next, SupervisorConfig
from fireflyer.runtime.rpc import Caller, RpcServer

__all__ = ["JoinedHosts", "JoinedNodes"]

_NEXT_WAIT_NS: Final = 10 * SECOND
_FAREWELL_S: Final = 5.0
_ANSWER_S: Final = 5.0
"""A host that does not ask for its next command within this time, when told to, is not there any more."""
_HAS_LEFT: Final = "its machine has left the job"


@dataclass(slots=True)
class _Host:
    answer: Answer
    address: str
    connection: int
    commands: list[HostCommand] = field(default_factory=list)
    heard: int = 0
    """So many of the commands have come there: it has asked for the next."""
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    told_end: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, command: HostCommand) -> None:
        self.commands.append(command)
        self.arrived.set()


class JoinedHosts:
    """The hosts of the job from 1 on; host 0 is the launcher's machine. One that has left may join again, in its old
    place; one that was not there when the job began may join later.

    `on_ended(host, news)`, `on_joined(host)`; `on_left(host, commands)` with those that it may not have heard.
    `admit(host, answer, address)` raises `UsageError` where the machine cannot be that host."""

    def __init__(self, spec: JobSpec, *, question: HostQuestion, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._spec = spec
        self._count = len(spec.hosts)
        self._question = question
        self._now_ns = now_ns
        self._asked_ns: dict[int, int] = {}
        """By connection: when it fetched the question."""
        self._hosts: dict[int, _Host] = {}
        self._ranks = dict.fromkeys(range(self._count), spec.ranks_per_node)
        """Of each host; until they are `settled`, of one that has not joined what is known of all."""
        self._settled = False
        self._changed = asyncio.Event()
        self.on_ended: Callable[[int, GuardEnded], None] = lambda *_: None
        self.on_joined: Callable[[int], None] = lambda _: None
        self.on_left: Callable[[int, list[HostCommand]], None] = lambda *_: None
        self.admit: Callable[[int, Answer, str], None] = lambda *_: None

    def serve(self, server: RpcServer) -> None:
        server.register(ASK, self._ask)
        server.register(JOIN, self._join)
        server.register(HOST_NEXT, self._next)
        server.register(HOST_NEWS, self._news)

    def missing(self) -> list[int]:
        return [number for number in range(1, self._count) if number not in self._hosts]

    async def wait_for_all(self, tell: Callable[[list[int]], None]) -> dict[int, Answer]:
        """Waits without limit for as many as the job needs, and so long as the last call says for the others. `tell` is
        called with the numbers that are missing, at first and after each change."""
        loop = asyncio.get_running_loop()
        last_call_s: float | None = None
        while missing := self.missing():
            if not self._spec.elastic or len(self._hosts) + 1 < self._spec.least_nodes:
                last_call_s = None
            elif last_call_s is None:
                last_call_s = loop.time() + self._spec.timeouts.last_call_ns / SECOND
            tell(missing)
            self._changed.clear()
            try:
                async with asyncio.timeout_at(last_call_s):
                    await self._changed.wait()
            except TimeoutError:
                break
        return {number: host.answer for number, host in self._hosts.items()}

    def settle(self) -> tuple[int, ...]:
        """How many ranks each host has, as `JobSpec.host_ranks`; one that joins later, or again, must have as many."""
        self._settled = True
        ranks = tuple(self._ranks[number] for number in range(self._count))
        return ranks if len(set(ranks)) > 1 else ()

    def address(self, number: int) -> str:
        """From which the host has connected."""
        return self._hosts[number].address

    def tell(self, number: int, command: HostCommand) -> bool:
        """False where the host is not there."""
        host = self._hosts.get(number)
        if host is not None:
            host.tell(command)
        return host is not None

    async def end(self, exit_code: int, reason: str) -> None:
        """Tells every host how the job ended, and waits a moment until they know."""
        hosts = list(self._hosts.values())  # each leaves when it knows
        for host in hosts:
            host.tell(JobEnded(exit_code, reason[:4000]))
        try:
            async with asyncio.timeout(_FAREWELL_S):
                for host in hosts:
                    await host.told_end.wait()
        except TimeoutError:
            pass

    def disconnected(self, caller: Caller) -> None:
        self._asked_ns.pop(caller.connection, None)
        for number, host in list(self._hosts.items()):
            if host.connection == caller.connection:
                self._forget(number)

    def _forget(self, number: int) -> None:
        host = self._hosts.pop(number)
        host.told_end.set()
        self._changed.set()
        self.on_left(number, host.commands[host.heard :])

    # -- methods -------------------------------------------------------------------------------------------------------

    async def _ask(self, _: Done, caller: Caller) -> HostQuestion:
        self._asked_ns[caller.connection] = self._now_ns()
        return self._question

    async def _join(self, request: JoinRequest, caller: Caller) -> Joined:
        if caller.role != "node":
            raise PermissionDenied("only holders of the job's secret may join it")
        number = request.node_rank
        spec = self._spec
        if request.nodes and (request.nodes, request.min_nodes) != (spec.nodes, spec.min_nodes):
            theirs = node_range(request.nodes, request.min_nodes)
            raise UsageError(
                f"--nnodes {theirs} is not that of the job, which has {node_range(spec.nodes, spec.min_nodes)} nodes; "
                "give the same command on each machine"
            )
        if number >= 0 and not 1 <= number < self._count:
            raise UsageError(f"--node-rank {number} must be from 1 to {self._count - 1}; 0 is the launcher's machine")
        address = caller.address.rpartition(":")[0].strip("[]").removeprefix("::ffff:")
        answer = Answer(request.facts, self._asked_ns.get(caller.connection, 0), self._now_ns())
        ranks = request.ranks_per_node or spec.ranks_per_node
        number = await self._place(number, ranks, answer, address)
        if not self._settled:
            self._ranks[number] = ranks
        self._hosts[number] = _Host(answer, address, caller.connection)
        self._changed.set()
        self.on_joined(number)
        return Joined(number, spec.name)

    def _check_ranks(self, number: int, ranks: int) -> None:
        """The launcher's machine has the most, for which all is prepared. Raises `UsageError`."""
        most, there = self._spec.ranks_per_node, self._ranks[number]
        if ranks > most:
            raise UsageError(
                f"--ranks-per-node {ranks} is more than the {most} of machine 0; give the machine with the most ranks "
                "--node-rank 0"
            )
        if self._settled and ranks != there:
            raise UsageError(
                f"--ranks-per-node {ranks} is not that of machine {number}, which has had {there} since the job began; "
                f"give --ranks-per-node {there}"
            )

    async def _place(self, number: int, ranks: int, answer: Answer, address: str) -> int:
        """The number that the machine of so many ranks gets, which is free now. Raises `UsageError`."""
        if number >= 0:
            self._check_ranks(number, ranks)
            self.admit(number, answer, address)
            await self._make_free(number)
            return number
        refused = UsageError(f"the job has all of its {self._count} machines already")
        for any_number in [*self.missing(), *self._hosts]:
            try:
                return await self._place(any_number, ranks, answer, address)
            except UsageError as error:
                refused = error if any_number not in self._hosts else refused
        raise refused

    async def _make_free(self, number: int) -> None:
        """A machine that was switched off closes no connection: one that does not answer any more is forgotten.
        Raises `UsageError` where it answers."""
        while (host := self._hosts.get(number)) is not None:
            host.asked.clear()
            host.arrived.set()  # ends the call in which it waits for a command; it then asks again
            try:
                async with asyncio.timeout(_ANSWER_S):
                    await host.asked.wait()
            except TimeoutError:
                if self._hosts.get(number) is host:
                    self._forget(number)
                continue
            if self._hosts.get(number) is host:
                raise UsageError(f"--node-rank {number} has joined already, from {host.address}")

    def _who(self, caller: Caller) -> tuple[int, _Host]:
        for number, host in self._hosts.items():
            if host.connection == caller.connection:
                return number, host
        raise PermissionDenied("this machine has not joined the job, or another has taken its place")

    async def _next(self, request: Next, caller: Caller) -> NumberedHostCommand:
        _, host = self._who(caller)
        if request.after > len(host.commands):
            raise UsageError(f"there is no command {request.after}")
        host.heard = max(host.heard, request.after)
        host.asked.set()
        if any(isinstance(command, JobEnded) for command in host.commands[: request.after]):
            host.told_end.set()
        if request.after == len(host.commands):
            host.arrived.clear()
            try:
                async with asyncio.timeout(_NEXT_WAIT_NS / SECOND):
                    await host.arrived.wait()
            except TimeoutError:
                pass
        if request.after == len(host.commands):
            return NumberedHostCommand(request.after, None)
        return NumberedHostCommand(request.after + 1, host.commands[request.after])

    async def _news(self, request: GuardEnded, caller: Caller) -> Done:
        number, _ = self._who(caller)
        self.on_ended(number, request)
        return Done()


class JoinedNodes:
    """Nodes of which some are on hosts that have joined; the rest are on this machine."""

    def __init__(
        self,
        hosts: JoinedHosts,
        here: Nodes,
        *,
        job_token: str,
        first_lease_ns: int,
        feed: Callable[[Event], None],
        was_up: Callable[[int, int], bool],
    ) -> None:
        self._hosts = hosts
        self._here = here
        self._job_token = job_token
        self._first_lease_ns = first_lease_ns
        self._feed = feed
        self._was_up = was_up
        self._host_of: dict[tuple[int, int], int] = {}
        self._waiting: dict[int, StartGuard] = {}
        """Host that has left: what it is to start when it joins again in time."""
        hosts.on_ended = self._ended
        hosts.on_joined = self._joined
        hosts.on_left = self._left

    def start(self, machine: Machine, config: SupervisorConfig) -> None:
        if machine.number == 0:
            self._here.start(machine, config)
            return
        self._host_of[config.node, config.incarnation] = machine.number
        token = f"{self._job_token}.{config.node}.{config.incarnation}"
        command = StartGuard(config, token, self._first_lease_ns)
        if not self._hosts.tell(machine.number, command):
            self._waiting[machine.number] = command

    def kill(self, node: int, incarnation: int) -> None:
        host = self._host_of.get((node, incarnation))
        if host is None:
            self._here.kill(node, incarnation)
            return
        waiting = self._waiting.get(host)
        if waiting is not None and (waiting.config.node, waiting.config.incarnation) == (node, incarnation):
            del self._waiting[host]
            self._feed(SupervisorGone(node, incarnation, _HAS_LEFT))
        elif not self._hosts.tell(host, KillGuard(node, incarnation)) and not self._was_up(node, incarnation):
            self._feed(SupervisorGone(node, incarnation, _HAS_LEFT))

    async def close(self) -> bool:
        return await self._here.close()

    def _joined(self, number: int) -> None:
        command = self._waiting.pop(number, None)
        if command is not None:
            self._hosts.tell(number, command)

    def _left(self, number: int, unheard: list[HostCommand]) -> None:
        """What the host was to start, and may not have heard of, waits for it. Whatever it has started ends with it,
        and if that has not connected, nobody else says so."""
        killed = {(command.node, command.incarnation) for command in unheard if isinstance(command, KillGuard)}
        for command in unheard:
            if isinstance(command, StartGuard) and (command.config.node, command.config.incarnation) not in killed:
                self._waiting[number] = command
        waiting = self._waiting.get(number)
        for (node, incarnation), host in self._host_of.items():
            waits = waiting is not None and (waiting.config.node, waiting.config.incarnation) == (node, incarnation)
            if host == number and not waits and not self._was_up(node, incarnation):
                self._feed(SupervisorGone(node, incarnation, _HAS_LEFT))

    def _ended(self, number: int, news: GuardEnded) -> None:
        host = self._host_of.get((news.node, news.incarnation))
        if host is None:
            return
        if host != number:
            raise PermissionDenied(f"node {news.node} is on another machine")
        kind = SupervisorGone if news.clean else SupervisorLost
        self._feed(kind(news.node, news.incarnation, news.reason))
