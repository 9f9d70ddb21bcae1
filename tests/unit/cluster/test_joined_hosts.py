"""Machines that join a job by themselves: what they are told, and what happens when they leave in the middle of it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
import pytest
from tests.support.loops import on_loop

from fireflyer.base.errors import PermissionDenied, UsageError
from fireflyer.cluster.core.facts import Answer
from fireflyer.cluster.core.messages import Event, SupervisorGone, SupervisorLost
from fireflyer.cluster.launcher import joined
from fireflyer.cluster.launcher.joined import JoinedHosts, JoinedNodes
from fireflyer.cluster.launcher.machines import Machine
from fireflyer.cluster.schema.hosts import HostFacts, HostQuestion
from fireflyer.cluster.schema.job import JobSpec
from fireflyer.cluster.schema.join import GuardEnded, JobEnded, JoinRequest, KillGuard, StartGuard
from fireflyer.cluster.schema.wire import Done, Next, SupervisorConfig
from fireflyer.runtime.rpc import Caller

FACTS = HostFacts(
    version="1.0", python="3.11.2", hostname="b", boot_id="x", namespace="net:[1]", uid=0, cores=2, gpus=0,
    has_workdir=True, script_sha256="ab", has_script=True, shares_run_dir=False, client="", server="", time_ns=1000,
)  # fmt: skip
QUESTION = HostQuestion(workdir="/work", script="train.py", kind="script", run_dir="/run", mark="x")


class World:
    """The hosts of one job, and what the gang would be told of their nodes."""

    def __init__(self, count: int = 3) -> None:
        names = tuple(f"machine {number}" for number in range(count))
        spec = JobSpec(script="train.py", run_dir="/run", nodes=count, ranks_per_node=2, hosts=names)
        self.now_ns = 5000
        self.hosts = JoinedHosts(spec, question=QUESTION, now_ns=lambda: self.now_ns)
        self.events: list[Event] = []
        self.up: set[tuple[int, int]] = set()
        nowhere: Any = None  # no node of these tests is on the launcher's machine
        self.nodes = JoinedNodes(
            self.hosts,
            nowhere,
            job_token="token",
            first_lease_ns=1,
            feed=self.events.append,
            was_up=lambda node, incarnation: (node, incarnation) in self.up,
        )

    async def join(self, number: int, connection: int, facts: HostFacts = FACTS, ranks: int = 0) -> Caller:
        caller = Caller("node", f"host {number}", f"10.0.0.{number}:4000", connection)
        await self.hosts._join(JoinRequest(number, 0, facts, ranks), caller)
        return caller

    def start(self, number: int, incarnation: int = 1) -> None:
        machine = Machine(number=number, name="b", address="", launcher="", directory="/run", shared=False)
        self.nodes.start(machine, config_of(number, incarnation))

    async def next(self, caller: Caller, after: int = 0) -> object:
        return (await self.hosts._next(Next(after), caller)).command

    async def heard(self, caller: Caller, after: int) -> None:
        """It asks for the next command, and waits in vain."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0):
                await self.next(caller, after)


def config_of(node: int, incarnation: int) -> SupervisorConfig:
    return SupervisorConfig(
        launcher="a:1", secret_file="s", node=node, incarnation=incarnation, heartbeat_ns=1, logs_dir=""
    )  # fmt: skip


def guard(node: int, incarnation: int = 1) -> StartGuard:
    return StartGuard(config_of(node, incarnation), f"token.{node}.{incarnation}", 1)


@on_loop
async def test_machines_that_leave_during_the_farewell_end_it() -> None:
    """The job ends well although each leaves as soon as it knows."""
    world = World()
    callers = [await world.join(1, 11), await world.join(2, 12)]
    farewell = asyncio.create_task(world.hosts.end(0, "done"))
    await asyncio.sleep(0)
    for caller in callers:
        assert await world.next(caller) == JobEnded(0, "done")
        world.hosts.disconnected(caller)
    async with asyncio.timeout(2):
        await farewell


@on_loop
async def test_what_a_machine_was_not_told_before_it_left_it_is_told_when_it_joins_again() -> None:
    world = World()
    caller = await world.join(1, 11)
    world.start(1)
    world.hosts.disconnected(caller)
    again = await world.join(1, 13)
    assert await world.next(again) == guard(1)


@on_loop
async def test_what_a_machine_was_told_before_it_left_it_is_not_told_again() -> None:
    """Its guard has ended with the connection, and the gang hears so from there."""
    world = World()
    caller = await world.join(1, 11)
    world.start(1)
    assert await world.next(caller) == guard(1)
    await world.heard(caller, 1)
    world.hosts.disconnected(caller)
    assert world.events == [SupervisorGone(1, 1, "its machine has left the job")]
    again = await world.join(1, 13)
    world.hosts.tell(1, KillGuard(9, 9))
    assert await world.next(again) == KillGuard(9, 9)


@on_loop
async def test_a_node_that_is_killed_while_its_machine_is_away_is_gone_and_is_not_started_there() -> None:
    world = World()
    caller = await world.join(1, 11)
    world.start(1)
    world.hosts.disconnected(caller)
    world.nodes.kill(1, 1)
    assert world.events == [SupervisorGone(1, 1, "its machine has left the job")]
    again = await world.join(1, 13)
    world.start(1, 2)
    assert await world.next(again) == guard(1, 2)


@on_loop
async def test_a_machine_whose_old_connection_is_dead_takes_its_place_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that lost its power closes no connection, and TCP may not notice for minutes."""
    monkeypatch.setattr(joined, "_ANSWER_S", 0.05)
    world = World()
    caller = await world.join(1, 11)
    asking = asyncio.create_task(world.next(caller))
    world.start(1)
    assert await asking == guard(1)
    again = await world.join(1, 13)
    assert await world.next(again) == guard(1), "it was on its way, and nobody has said that it came"
    world.hosts.disconnected(caller)
    assert world.hosts.missing() == [2], "what the old connection does changes nothing"


@on_loop
async def test_a_machine_that_is_there_keeps_its_place() -> None:
    world = World()
    caller = await world.join(1, 11)

    async def live() -> None:
        while True:
            await world.next(caller)

    living = asyncio.create_task(live())
    await asyncio.sleep(0)
    with pytest.raises(UsageError, match="has joined already"):
        await world.join(1, 13)
    living.cancel()
    await asyncio.wait([living])


@on_loop
async def test_a_machine_speaks_of_its_own_nodes_only() -> None:
    world = World()
    first, second = await world.join(1, 11), await world.join(2, 12)
    world.start(1)
    with pytest.raises(PermissionDenied):
        await world.hosts._news(GuardEnded(1, 1, True, "over"), second)
    await world.hosts._news(GuardEnded(1, 1, True, "over"), first)
    assert world.events == [SupervisorGone(1, 1, "over")]
    await world.hosts._news(GuardEnded(1, 1, False, "its supervisor ended"), first)
    assert world.events[1:] == [SupervisorLost(1, 1, "its supervisor ended")]


@on_loop
async def test_a_machine_that_joins_again_must_still_fit() -> None:
    """It is checked as at the start: another script would train another model beside the others."""
    world = World()
    caller = await world.join(1, 11)

    def admit(number: int, answer: Answer, address: str) -> None:
        assert (number, address) == (1, "10.0.0.1")
        if answer.facts.script_sha256 != "ab":
            raise UsageError("machine 1 has another train.py")

    world.hosts.admit = admit
    world.hosts.disconnected(caller)
    with pytest.raises(UsageError, match=r"another train\.py"):
        await world.join(1, 12, msgspec.structs.replace(FACTS, script_sha256="cd"))
    assert world.hosts.missing() == [1, 2]
    await world.join(1, 13)


@on_loop
async def test_when_a_machine_looked_at_its_clock_is_known_from_both_sides() -> None:
    """Between its question and its answer, however long the launcher then waits for others."""
    world = World()
    caller = Caller("node", "host 1", "10.0.0.1:4000", 11)
    await world.hosts._ask(Done(), caller)
    world.now_ns = 7000
    await world.join(1, 11)
    await world.join(2, 12)  # without a question: how old its answer is is not known
    world.now_ns = 10**15
    assert await world.hosts.wait_for_all(lambda _: None) == {1: Answer(FACTS, 5000, 7000), 2: Answer(FACTS, 0, 7000)}


@on_loop
async def test_each_machine_says_how_many_ranks_it_has_until_the_job_begins() -> None:
    world = World()
    await world.join(1, 11, ranks=2)
    caller = await world.join(2, 12, ranks=1)
    with pytest.raises(
        UsageError, match="--ranks-per-node 3 is more than the 2 of machine 0; give the machine with the"
    ):
        await world.join(1, 13, ranks=3)
    assert world.hosts.settle() == (2, 2, 1)
    world.hosts.disconnected(caller)
    with pytest.raises(UsageError, match="--ranks-per-node 2 is not that of machine 2, which has had 1 since the job"):
        await world.join(2, 14, ranks=2)
    await world.join(2, 15, ranks=1)


@on_loop
async def test_machines_with_the_same_number_of_ranks_have_nothing_to_say_of_it() -> None:
    world = World()
    await world.join(1, 11)
    await world.join(2, 12, ranks=2)
    assert world.hosts.settle() == ()
