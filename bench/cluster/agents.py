"""Agents that are simulated in one process: real connections, synchronisation and timing, and runs that only last."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Final, Self

from fireflyer.base.errors import FireflyerError
from fireflyer.base.units import SECOND
from fireflyer.cluster.agent.join import join
from fireflyer.cluster.agent.records import AgentDirectory, Membership
from fireflyer.cluster.client import Client
from fireflyer.cluster.schema.sync import HOLD_NS, SYNC, EndedRun, Inventory, Orders, RunStatus, Sync
from fireflyer.cluster.schema.tasks import Cause
from fireflyer.identity import UserCredential
from fireflyer.runtime.rpc import RpcClient

__all__ = ["SimulatedAgents", "join_all"]

_CONNECT_NS: Final = 30 * SECOND
_ENDS: Final = {"stop": Cause.STOPPED, "suspend": Cause.SUSPENDED}


async def join_all(client: Client, at_agents: str, directory: str, count: int) -> list[Membership]:
    """Machines `node-0`, `node-1`, …, each by a join token of its own."""
    found = []
    for number in range(count):
        token = await asyncio.to_thread(client.join_token, f"node-{number}")
        one = AgentDirectory(f"{directory}/{number}")
        found.append(await join(one, token, issuer=at_agents, port=1 + number, address="127.0.0.1"))
    return found


class SimulatedAgents:
    """A run of one node lasts `run_s` on average, exponentially distributed."""

    def __init__(self, at_agents: str, memberships: list[Membership], run_s: float, seed: int) -> None:
        self._random = random.Random(seed)
        self._run_s = run_s
        self._at_agents = at_agents
        self._agents = [_Agent(self, one) for one in memberships]
        self._tasks: list[asyncio.Task[None]] = []
        self.calls = 0
        self.ended = 0

    async def __aenter__(self) -> Self:
        """All are connected afterwards."""
        for one in self._agents:
            await one.connect(self._at_agents)
        self._tasks = [asyncio.create_task(one.run()) for one in self._agents]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def check(self) -> None:
        """Raises what an agent has failed with."""
        for task in self._tasks:
            if task.done():
                task.result()

    def lasts_s(self) -> float:
        return self._random.expovariate(1 / self._run_s)


class _Agent:
    def __init__(self, owner: SimulatedAgents, membership: Membership) -> None:
        self._owner = owner
        self._membership = membership
        self._client: RpcClient | None = None
        self._runs: dict[str, RunStatus] = {}
        self._changed = asyncio.Event()
        self._sequence = 0
        self._orders = Orders(term=0, version=0)
        self._inventory = Inventory(
            address="127.0.0.1", port=membership.port, version="bench", boot_id="b", hostname=membership.machine,
            cores=64, memory_bytes=1 << 39,
        )  # fmt: skip

    async def connect(self, address: str) -> None:
        self._client = await RpcClient.connect(address, UserCredential(self._membership.credential), _CONNECT_NS)

    async def run(self) -> None:
        client = self._client
        assert client is not None
        try:
            while True:
                self._changed.clear()
                call = asyncio.ensure_future(client.call(SYNC, self._message(), 4 * HOLD_NS))
                news = asyncio.ensure_future(self._changed.wait())
                try:
                    await asyncio.wait({call, news}, return_when=asyncio.FIRST_COMPLETED)
                    if call.done():
                        self._owner.calls += 1
                        self._follow(call.result())
                finally:
                    news.cancel()
                    call.cancel()
                    with contextlib.suppress(asyncio.CancelledError, FireflyerError):
                        await call
        finally:
            await client.close()

    def _message(self) -> Sync:
        self._sequence += 1
        return Sync(
            incarnation=1, sequence=self._sequence, heard=self._orders.version, term=self._orders.term,
            inventory=self._inventory, runs=tuple(self._runs.values()),
        )  # fmt: skip

    def _follow(self, orders: Orders) -> None:
        self._orders = orders
        for order in orders.runs:
            token = order.run_token
            known = self._runs.get(token)
            if order.wanted == "forget":
                self._runs.pop(token, None)
            elif order.wanted == "run" and known is None:
                self._runs[token] = RunStatus(token=token, state="running", lead=True)
                asyncio.get_running_loop().call_later(self._owner.lasts_s(), self._end, token, Cause.SUCCEEDED)
                self._changed.set()
            elif order.wanted in _ENDS and (known is None or known.state != "gone"):
                self._end(token, _ENDS[order.wanted])

    def _end(self, token: str, cause: Cause) -> None:
        known = self._runs.get(token)
        if known is not None and known.state == "gone":
            return
        self._owner.ended += 1
        self._runs[token] = RunStatus(
            token=token, state="gone", lead=True, ended=EndedRun(cause=cause, exit_code=0)
        )  # fmt: skip
        self._changed.set()
