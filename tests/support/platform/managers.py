"""The shell of a manager in a seeded world: held calls of agents, calls of clients, the store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec
from tests.support.platform.post import Ask, Post, Tell
from tests.support.platform.store import SimStore
from tests.support.platform.tables import MemoryTables, SimCopier

from fireflyer.base.units import MS, SECOND
from fireflyer.cluster.core.platform.machine import PlatformMachine
from fireflyer.cluster.core.platform.messages import (
    Answer,
    Changed,
    Commanded,
    Copied,
    Effect,
    Event,
    Leave,
    LogDecision,
    NotLeader,
    OrdersChanged,
    Settings,
    StepDown,
    Submitted,
    Synced,
    Tick,
)
from fireflyer.cluster.schema.sync import Orders, Sync
from fireflyer.kvstore.core.fenced import Outcome, Transact
from fireflyer.sim import SimClock, SimNode, World

__all__ = ["SETTINGS", "ManagerHost", "Watcher"]

TICK_NS = 500 * MS
HOLD_NS = 2 * SECOND
SETTINGS = Settings(
    holder="",
    address="",
    cluster="5eed" * 8,
    lease_ns=4 * SECOND,
    lost_ns=6 * SECOND,
    stop_after_ns=20 * SECOND,
    stop_slack_ns=6 * SECOND,
    start_timeout_ns=15 * SECOND,
    prepare_timeout_ns=30 * SECOND,
    suspend_slack_ns=8 * SECOND,
    requeue_pause_ns=SECOND,
    requeue_pause_max_ns=8 * SECOND,
    settle_ns=4 * SECOND,
    history=True,
)


class Watcher(Protocol):
    """What checks that all is as it must be."""

    def ordered(self, node: str, orders: Orders) -> None: ...

    def told(self, manager: str, change: Changed) -> None: ...

    def looked_at(self, manager: ManagerHost) -> None: ...


class ManagerHost:
    settings = SETTINGS

    def __init__(
        self,
        world: World,
        post: Post,
        store: SimStore,
        watcher: Watcher,
        tables: MemoryTables,
        name: str,
        drift_ppm: int,
    ) -> None:
        self.world, self.post, self.store, self.watcher, self.name = world, post, store, watcher, name
        self.wall_skew_ns = world.random.randrange(-3600, 3600) * SECOND
        self.machine = PlatformMachine(self.settings)
        self.tables = tables
        self.notes: list[str] = []
        self._askers: dict[int, tuple[str, int]] = {}
        self._held: dict[str, tuple[int, Sync]] = {}
        self._calls = 0
        self._clock = SimClock(world, offset_ns=world.random.randrange(10**15), drift_ppm=drift_ppm)
        self.node = world.node(name, self._boot, clock=self._clock)

    @property
    def now_ns(self) -> int:
        return self._clock.now_ns()

    def acts(self) -> bool:
        return self.node.alive and self.machine.may_act(self.now_ns)

    def leave(self) -> None:
        if self.node.alive:
            self._handle(Leave())

    def _boot(self, node: SimNode) -> None:
        holder = f"{self.name}/{node.incarnation}"
        self.machine = PlatformMachine(msgspec.structs.replace(self.settings, holder=holder, address=self.name))
        self._askers, self._held = {}, {}
        copier = SimCopier(self.world, self.store, self.tables, self)

        def tick() -> None:
            self._handle(Tick(1_700_000_000 * SECOND + self.world.now_ns + self.wall_skew_ns))
            if self.acts():
                self.watcher.looked_at(self)
            copier.look()
            if self.machine.left:
                node.crash()
            node.after(TICK_NS, tick)

        node.on_message(self._receive)
        node.after(self.world.random.randrange(TICK_NS), tick)

    def copied(self, event: Copied) -> None:
        if self.node.alive:
            self.node.guarded(lambda: self._handle(event))

    def _receive(self, source: str, payload: bytes) -> None:
        ask = self.post.opened(payload)
        assert isinstance(ask, Ask)
        if isinstance(ask.body, Sync):
            self._on_sync(source, ask.number, ask.body)
        elif isinstance(ask.body, Submitted | Commanded):
            self._asked(source, ask.number, ask.body)

    def _asked(self, source: str, number: int, body: Submitted | Commanded) -> None:
        self._calls += 1
        self._askers[self._calls] = (source, number)
        self._handle(msgspec.structs.replace(body, call=self._calls))

    def _on_sync(self, node: str, number: int, sync: Sync) -> None:
        self._handle(Synced(node, sync))
        orders = self.machine.orders_for(node, self.now_ns)
        if orders is None:
            self.post.send(self.name, node, Tell(number, NotLeader(self.machine.leader_address)))
        elif (orders.term, orders.version) != (sync.term, sync.heard):
            self._send_orders(node, number, orders)
        else:
            self._held[node] = (number, sync)
            self.node.after(HOLD_NS, lambda: self._release(node, number))

    def _release(self, node: str, number: int | None = None) -> None:
        held = self._held.get(node)
        if held is None or (number is not None and held[0] != number):
            return
        orders = self.machine.orders_for(node, self.now_ns)
        del self._held[node]
        if orders is not None:
            self._send_orders(node, held[0], orders)
        else:
            self.post.send(self.name, node, Tell(held[0], NotLeader(self.machine.leader_address)))

    def _send_orders(self, node: str, number: int, orders: Orders) -> None:
        self.watcher.ordered(node, orders)
        self.post.send(self.name, node, Tell(number, orders))

    def _handle(self, event: Event) -> None:
        for effect in self.machine.handle(self.now_ns, event):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Transact():
                self.store.perform(self.name, effect, self._outcome_to(self.node.incarnation))
            case Answer(call, result):
                source, number = self._askers.pop(call)
                self.post.send(self.name, source, Tell(number, result))
            case OrdersChanged(node):
                self._release(node)
            case Changed():
                self.watcher.told(self.name, effect)
            case StepDown():
                for node in list(self._held):
                    self._release(node)
            case LogDecision(text):
                self.notes.append(f"{self.world.now_ns / SECOND:.2f} {self.name}: {text}")
            case _:
                pass

    def _outcome_to(self, incarnation: int) -> Callable[[Outcome], None]:
        def told(outcome: Outcome) -> None:
            if self.node.alive and self.node.incarnation == incarnation:
                self.node.guarded(lambda: self._handle(outcome))

        return told
