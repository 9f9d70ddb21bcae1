"""What a job of ours is on one node: it joins the platform with the token of its script, and runs an agent below a
guard until the managers say that it is to go, Slurm kills it, or the agent dies."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import partial

import msgspec
from tests.support.platform.agents import Agents
from tests.support.platform.hosts import Grounds, Host
from tests.support.platform.managers import ManagerHost
from tests.support.platform.slurm.controller import Job, Machine
from tests.support.platform.slurm.coroutines import Later
from tests.support.platform.store import SimStore

from fireflyer.base.errors import PermissionDenied, Unreachable
from fireflyer.base.units import MS, SECOND
from fireflyer.cluster.core.slurm.request import JobOrders, node_of, slot_name
from fireflyer.sim import World

__all__ = ["AgentStep", "ForeignStep", "JobAgents", "JobTokens", "Joining"]

JOIN_NS = 20 * SECOND
KILL_NS = 500 * MS
READ_PERIOD_NS = 300 * MS
KILLED = 143


class JobTokens:
    """As `manager.machines`, of all managers: which tokens let nodes of which jobs join, and who has joined."""

    def __init__(self, world: World, store: SimStore) -> None:
        self._world, self._store = world, store
        self._rng = world.fork_random("tokens")
        self._tokens: dict[str, tuple[str, int]] = {}
        self._issued = 0
        self.joined: dict[str, None] = {}
        self.retired: dict[str, None] = {}
        """Nodes of jobs that have ended."""
        self.told_to_go: dict[str, None] = {}

    def of_manager(self, name: str) -> ManagerTokens:
        return ManagerTokens(self, name)

    def answered(self, manager: str, act: Callable[[], str]) -> Later[str]:
        later: Later[str] = Later(self._world)

        def now() -> None:
            if self._store.cut.get(manager, False):
                later.fail(Unreachable("the store cannot be reached"))
            else:
                later.give(act())

        self._world.call_after(self._rng.randrange(20 * MS), now)
        return later

    def issue(self, job: str, most: int) -> str:
        self._issued += 1
        self._tokens = {token: of for token, of in self._tokens.items() if of[0] != job}
        token = f"token-{self._issued}"
        self._tokens[token] = job, most
        return token

    def retire(self, living: Collection[str]) -> str:
        self._tokens = {token: of for token, of in self._tokens.items() if of[0] in living}
        self.retired |= {slot: None for slot in self.joined if node_of(slot)[1] not in living}
        self.joined = {slot: None for slot in self.joined if node_of(slot)[1] in living}
        return ""

    def admit(self, token: str, job: str, node: str) -> str:
        """The name of the node. Raises `PermissionDenied`."""
        of, most = self._tokens.get(token, ("", 0))
        slot = slot_name(node, job)
        there = [name for name in self.joined if node_of(name)[1] == job]
        if of != job or slot in there or len(there) >= most:
            raise PermissionDenied(f"the join token of {slot} is used, withdrawn or expired")
        self.joined[slot] = None
        return slot


class ManagerTokens:
    """As one manager reaches them."""

    def __init__(self, tokens: JobTokens, manager: str) -> None:
        self._tokens, self._manager = tokens, manager

    async def issue_for_job(self, job: str, nodes: int, lifetime_s: int) -> str:
        return await self._tokens.answered(self._manager, partial(self._tokens.issue, job, nodes))

    async def retire_jobs(self, living: Collection[str], now_s: int) -> None:
        await self._tokens.answered(self._manager, partial(self._tokens.retire, tuple(living)))


class JobHost(Host):
    """A node as the platform calls it while a job has it: its agent is not started again."""

    def start_agent(self) -> None:
        pass


class JobAgents(Agents):
    """Agents that go when they are told to."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.steps: dict[str, AgentStep] = {}

    def left(self, host: Host, code: int) -> None:
        self.steps[host.name].leave(code)


class Joining:
    """What all steps need to join."""

    def __init__(
        self,
        grounds: Grounds,
        agents: JobAgents,
        tokens: JobTokens,
        managers: list[ManagerHost],
        store: SimStore,
        drift: Callable[[], int],
        new_slot: Callable[[str], None],
    ) -> None:
        """`new_slot`: is told before the agent of a node that has joined begins."""
        self.grounds, self.world, self.agents, self.tokens = grounds, grounds.world, agents, tokens
        self.managers, self.store, self.drift, self.new_slot = managers, store, drift, new_slot

    def manager_for(self, node: str) -> ManagerHost | None:
        cut = self.grounds.cut
        for one in self.managers:
            reached = one.node.alive and not cut(node, one.name) and not cut(one.name, node)
            if reached and not self.store.cut.get(one.name, False):
                return one
        return None


class AgentStep:
    def __init__(self, joining: Joining, machine: Machine, job: Job) -> None:
        self._joining, self._machine, self._world = joining, machine, joining.world
        said = re.search(r"<<'ORDERS'\n(.*)\nORDERS\n", job.script, re.DOTALL)
        assert said is not None, "the script has no orders"
        self._orders = msgspec.json.decode(said[1], type=JobOrders)
        self.alive, self.code = True, 0
        self._host: JobHost | None = None
        self._ending = False
        self._until_ns = self._world.now_ns + JOIN_NS
        self._world.call_after(joining.grounds.upto(SECOND), self._join)

    def _join(self) -> None:
        if not self.alive:
            return
        joining, node = self._joining, self._machine.name
        if joining.manager_for(node) is None:
            if self._world.now_ns >= self._until_ns:
                self._end(1)
            else:
                self._world.call_after(SECOND, self._join)
            return
        try:
            slot = joining.tokens.admit(self._orders.token, self._orders.job, node)
        except PermissionDenied:
            self._end(1)
            return
        if joining.grounds.happens(joining.grounds.faults.start_fails):
            self._world.call_after(SECOND, self._join)  # the answer was lost
            return
        joining.new_slot(slot)
        joining.agents.steps[slot] = self
        self._host = JobHost(self._world, joining.grounds, slot, joining.drift(), joining.agents.boot)
        self._look()

    def _look(self) -> None:
        """The guard: it ends with its agent."""
        if self.alive and self._host is not None:
            if not self._host.agent.alive:
                self._end_soon(1)
            self._world.call_after(READ_PERIOD_NS, self._look)

    def leave(self, code: int) -> None:
        self._end_soon(code)

    def kill(self) -> None:
        self._end_soon(KILLED)

    def _end_soon(self, code: int) -> None:
        if not self._ending:
            self._ending = True
            self._world.call_after(self._joining.grounds.upto(KILL_NS), lambda: self._end(code))

    def power_cut(self) -> None:
        self._end(KILLED)

    def _end(self, code: int) -> None:
        """All that is below the guard is dead, and its directory removed."""
        if not self.alive:
            return
        self.alive, self.code = False, code
        if self._host is not None:
            self._host.power_cut()
            self._host.runs.clear()


class ForeignStep:
    """Of another user's job: it does nothing for a while."""

    def __init__(self, world: World, lasts_ns: int) -> None:
        self.alive, self.code = True, 0
        world.call_after(lasts_ns, self.power_cut)

    def kill(self) -> None:
        self.alive = False

    def power_cut(self) -> None:
        self.alive = False
