"""The agent's calls to the managers of the platform: what runs here, and the orders that are the answer.

One call at a time is held by the leader. When something changes here, the call is given up and the next one says it. A
manager that cannot be reached, or does not lead, is followed by the next one (`core.manager_choice`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import fireflyer
from fireflyer.base.errors import FireflyerError, PermissionDenied
from fireflyer.base.units import SECOND
from fireflyer.cluster.agent.health import NodeChecks
from fireflyer.cluster.agent.inventory import inventory_of
from fireflyer.cluster.agent.records import AgentDirectory, Membership
from fireflyer.cluster.agent.runs import Runs
from fireflyer.cluster.core.manager_choice import ManagerChoice
from fireflyer.cluster.core.revisions import check_manager
from fireflyer.cluster.schema.sync import HOLD_NS, REVISION, SYNC, Inventory, Sync
from fireflyer.identity.handshake import UserCredential
from fireflyer.runtime.pauses import spread
from fireflyer.runtime.rpc import RpcClient

__all__ = ["Managers"]

_log = logging.getLogger(__name__)
_CONNECT_NS: Final = 3 * SECOND
_CALL_NS: Final = HOLD_NS + 3 * SECOND
"""A manager whose machine is silent is left before the lease of the node is in danger."""
_ANSWER_S: Final = 0.05


class Managers:
    """`run` until it is cancelled. `changed` is set when there is something new to say. `on_leader` is called with the
    connection to the manager that leads, and with None when it has ended."""

    def __init__(
        self,
        directory: AgentDirectory,
        runs: Runs,
        checks: NodeChecks,
        membership: Callable[[], Membership | None],
        incarnation: int,
        on_leader: Callable[[RpcClient | None], None],
    ) -> None:
        self.changed = asyncio.Event()
        self._directory = directory
        self._runs = runs
        self._checks = checks
        self._membership = membership
        self._incarnation = incarnation
        self._on_leader = on_leader
        self._sequence = 0
        self._choice = ManagerChoice()
        self._inventory: Inventory | None = None
        self.leave: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Done when the managers want this agent to go, with the exit code that it is to have."""

    async def run(self) -> None:
        while True:
            heard = False
            for address in self.addresses():
                if await self._follow(address):
                    heard = True
                    self._choice.lost(address)
                    break
            pause_ns = self._choice.pause_ns(heard=heard)
            await asyncio.sleep(spread(pause_ns / SECOND))

    def addresses(self) -> list[str]:
        """In the order in which they are asked."""
        membership = self._membership()
        if membership is None or not membership.managers:
            return []
        try:
            named = self._directory.leader().managers
        except FireflyerError as error:
            _log.error("addresses of managers cannot be read reason=%s", error)
            named = ()
        return self._choice.addresses(named, membership.managers)

    async def _follow(self, address: str) -> bool:
        """As long as this manager answers. Whether it ever did."""
        membership = self._membership()
        if membership is None:
            return False
        answered = False
        client: RpcClient | None = None
        self._inventory = await asyncio.to_thread(inventory_of, membership)
        try:
            client = await RpcClient.connect(address, UserCredential(membership.credential), _CONNECT_NS)
            while self._membership() is not None:
                if await self._ask(client, self._inventory):
                    answered = True
                    self._choice.answers(address)
                    self._on_leader(client)
        except PermissionDenied as error:
            _log.warning("manager refuses this agent, or is refused address=%s reason=%s", address, error)
        except FireflyerError as error:
            _log.info("manager does not answer address=%s reason=%s", address, error)
        finally:
            self._on_leader(None)
            if client is not None:
                await client.close()
        return answered

    async def _ask(self, client: RpcClient, inventory: Inventory) -> bool:
        """One call; False where it was given up because there is something new to say. Raises `FireflyerError`."""
        self.changed.clear()
        asked_ns = self._runs.now_ns()
        call = asyncio.ensure_future(client.call(SYNC, self._message(inventory), _CALL_NS))
        news = asyncio.ensure_future(self.changed.wait())
        try:
            await asyncio.wait({call, news}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({call}, timeout=_ANSWER_S)  # what is under way is not thrown away
            if not call.done():
                return False
            orders = call.result()
            check_manager(orders, fireflyer.__version__)
        finally:
            news.cancel()
            call.cancel()
            await asyncio.wait({call})
            if not call.cancelled():
                call.exception()  # seen
        self._runs.heard(orders, asked_ns)
        self._checks.hear(orders.health)
        if orders.leave is not None and not self.leave.done():
            self.leave.set_result(orders.leave)
        return True

    def _message(self, inventory: Inventory) -> Sync:
        self._sequence += 1
        term, version = self._runs.heard_version
        return Sync(
            incarnation=self._incarnation,
            sequence=self._sequence,
            heard=version,
            term=term,
            inventory=inventory,
            runs=self._runs.statuses(),
            revision=REVISION,
            health=self._checks.reports(),
        )
