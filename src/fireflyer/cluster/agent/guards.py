"""Performs what `core.agent` decides: starts the guards of nodes, finds and watches them, signals them."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from typing import Final

import msgspec

from fireflyer.base.errors import FireflyerError
from fireflyer.cluster.agent.accounts import Account, Accounts
from fireflyer.cluster.agent.processes import DetachedProcesses, start_detached
from fireflyer.cluster.agent.records import AgentDirectory
from fireflyer.cluster.agent.start import Starting
from fireflyer.cluster.core.agent import (
    AgentMachine,
    Begin,
    Effect,
    End,
    Event,
    Forget,
    Guard,
    GuardGone,
    GuardUp,
    Kill,
    Order,
    Refused,
    Spawn,
    StartRequested,
    Terminate,
    Tick,
    Watch,
)
from fireflyer.cluster.schema.hosts import NodeOrders
from fireflyer.runtime.clock import BootClock
from fireflyer.runtime.driver import InlineDriver

__all__ = ["TICK_S", "Guards"]

_log = logging.getLogger(__name__)
TICK_S: Final = 1.0


class Guards:
    """Made in an event loop; `begin` first. `on_change` is called after a guard has changed its state."""

    def __init__(self, directory: AgentDirectory, on_change: Callable[[str], None], accounts: Accounts) -> None:
        self._directory = directory
        self._on_change = on_change
        self._clock = BootClock()
        self._machine = AgentMachine(serves_own=accounts.serves_own)
        self._driver: InlineDriver[Event, Effect] = InlineDriver(
            self._machine, self._perform, now_ns=self._clock.now_ns
        )
        self._starting: dict[str, Starting] = {}
        """Guards that are being started."""
        self._accounts = accounts
        self._processes = DetachedProcesses(self._on_up, self._on_gone)
        self._refused: Refused | None = None

    def begin(self) -> None:
        self.feed(Begin(self._directory.found()))

    def feed(self, event: Event) -> None:
        self._driver.feed(event)

    def start(
        self, order: Order, orders: NodeOrders, account: Account | None = None, until: str = ""
    ) -> Refused | None:
        """None: it is being started, or was. `account`: of its processes, where that is not this one; `until`: a file,
        as guards know it."""
        self._refused = None
        payload = msgspec.json.encode(orders) + b"\n"
        self._starting[order.token] = Starting(program="node", payload=payload, account=account, until=until)
        try:
            self.feed(StartRequested(order))
        finally:
            self._starting.pop(order.token, None)
        return self._refused

    def living_of(self, run_token: str) -> int:
        """Guards of the run that have not ended."""
        return self._machine.living_of(run_token)

    def stop_of(self, run_token: str) -> None:
        """All of the run."""
        for event in self._machine.to_stop(run_token):
            self.feed(event)

    def get(self, token: str) -> Guard | None:
        return self._machine.guards.get(token)

    def all(self) -> list[Guard]:
        return list(self._machine.guards.values())

    def living(self) -> list[Guard]:
        return self._machine.living()

    def age_ns(self, guard: Guard) -> int:
        return max(0, self._clock.now_ns() - guard.since_ns)

    def tick(self) -> None:
        self.feed(Tick())

    def close(self) -> None:
        """Guards live on."""
        self._processes.close()

    # -- effects -------------------------------------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Spawn(order):
                starting = self._starting[order.token]
                record = self._directory.record(order.token)

                def start() -> None:
                    record.write_order(order)
                    start_detached(record, starting, mark=order.token)

                self._processes.start(order.token, record, start, uid=self._uid_of(order))
            case Watch(token):
                order = self._machine.guards[token].order
                self._processes.watch(token, self._directory.record(token), uid=self._uid_of(order))
            case Terminate(token):
                self._processes.signal(token, signal.SIGCONT, signal.SIGTERM)
            case Kill(token):
                _log.warning("a guard does not end, and is killed token=%s", token)
                self._processes.kill(token, uid=self._uid_of(self._machine.guards[token].order))
            case Forget(token):
                self._directory.record(token).remove()
            case Refused():
                self._refused = effect

    def _uid_of(self, order: Order) -> int | None:
        return self._accounts.uid_of(order.account) if order.account else None

    def _on_up(self, token: str) -> None:
        self.feed(GuardUp(token))
        self._on_change(token)

    def _on_gone(self, token: str, end: End) -> None:
        record = self._directory.record(token)
        try:
            record.write_end(end)
        except FireflyerError as error:
            _log.warning("how a guard ended is not on disk token=%s reason=%s", token, error)
        self.feed(GuardGone(token, end))
        self._on_change(token)
