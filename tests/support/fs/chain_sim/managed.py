"""Replicas under the real managers: two of them over one store, and on each node the machine that attends to them."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from types import MappingProxyType

from tests.support.fs.chain_sim.world import (
    LIMITS,
    MANAGE,
    ROUTING,
    TOLD,
    ReplicaWorld,
    StorageNode,
    decoded,
    frame,
)
from tests.support.fs.manager_sim.store import SimStore, StoreFaults

from fireflyer.base.units import MS, SECOND
from fireflyer.fs.core.chain import effects as fx
from fireflyer.fs.core.chain import storage_node
from fireflyer.fs.core.chain.node_membership import (
    End,
    ManagerReply,
    NodeMembership,
    ProcessIdentity,
    SendToManager,
    TakeRouting,
)
from fireflyer.fs.core.chain.node_membership import Tick as NodeTick
from fireflyer.fs.core.chain.served_notes import ServedNote
from fireflyer.fs.core.manager.state_machine import Effect, Event, Manager, Reply, RequestReceived, Settings, Tick
from fireflyer.fs.core.routing import apply_delta
from fireflyer.fs.schema.ids import TargetId
from fireflyer.fs.schema.manager import (
    AddChains,
    AddNode,
    AddTargets,
    Done,
    GetRouting,
    NewChain,
    Request,
    RoutingAnswer,
)
from fireflyer.fs.schema.routing import Chain, Member, Routing, TargetState
from fireflyer.fs.schema.sessions import KeepSession, OpenSession, Session
from fireflyer.kvstore.core.fenced import Transact
from fireflyer.sim import MachineDriver, SimClock, SimNode

__all__ = ["ManagedWorld"]

FAILURE_TIMEOUT_NS = 600 * MS
LEASE_NS = 200 * MS
TICK_NS = 25 * MS
START_NS = 20 * SECOND
CLIENTS = range(1, 4)
"""An administrator opens and keeps their sessions."""


class _Seen:
    """The newest chain that any node has been told."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self._first: int | None = None

    def take(self, routing: Routing) -> None:
        for chain in routing.chains:
            if chain.version > self.chain.version:
                self.chain = chain
                self._first = chain.version if self._first is None else self._first

    @property
    def changes(self) -> int:
        return self.chain.version - (self._first or self.chain.version)


class _ManagerHost:
    """A process with one manager, restarted with nothing."""

    def __init__(self, world: ManagedWorld, name: str) -> None:
        self._world, self._name = world, name
        drift_ppm = world.rng.randrange(-10_000, 10_001)
        self.node = world.sim.node(name, self._boot, clock=SimClock(world.sim, drift_ppm=drift_ppm))

    def _boot(self, node: SimNode) -> None:
        holder = f"{self._name}/{node.incarnation}"
        manager = Manager(Settings(holder, self._name, FAILURE_TIMEOUT_NS, LEASE_NS))
        requesters: dict[int, tuple[str, int]] = {}

        def perform(effect: Effect) -> Generator[int | None, None, Event | None]:
            if isinstance(effect, Transact):
                return (yield from self._world.store.perform(self._name, effect))
            if isinstance(effect, Reply):
                source, number = requesters.pop(effect.request_id)
                if source.startswith("c") and isinstance(effect.answer, RoutingAnswer) and effect.answer.routing:
                    for chain in apply_delta(Routing(0), effect.answer.routing).chains:
                        self._world.net.send(self._name, source, frame(ROUTING, chain))
                else:
                    self._world.net.send(self._name, source, frame(TOLD, effect.answer, number=number))
            return None

        driver: MachineDriver[Event, Effect] = MachineDriver(node, manager, perform, parallel=lambda _: True)

        def hear(source: str, payload: bytes) -> None:
            one, body = decoded(payload)
            number = self._world.ask_number()
            requesters[number] = (source, one.number)
            driver.submit(RequestReceived(number, body if one.kind == MANAGE else GetRouting(0)))

        def tick() -> None:
            node.after(TICK_NS, tick)
            driver.submit(Tick())

        node.on_message(hear)
        tick()


class ManagedNode(StorageNode):
    """What a storage process is: `StorageCore`, here with one target."""

    noted: Mapping[TargetId, ServedNote] = MappingProxyType({})
    """On its disk; a power cut takes none of it."""

    def boot(self, node: SimNode) -> None:
        name = node.name
        identity = ProcessIdentity(self.target, f"{name}/{node.incarnation}", name, name, "boot")
        membership = NodeMembership(identity, {self.target: True}, self.world.managers, self.noted)
        self.core = storage_node.StorageCore(
            membership, [self.target], lambda _chain, _target: self.replica, unreachable_report_ns=SECOND // 2
        )
        super().boot(node)

    def beat(self) -> None:
        self.asked_routing = False

    def receive(self, source: str, payload: bytes) -> None:
        one, body = decoded(payload)
        if one.kind == TOLD:
            if one.number >> 32 == self.node.incarnation:
                self._handle(ManagerReply(one.number & 0xFFFFFFFF, body))
        else:
            super().receive(source, payload)

    def feed(self, event: fx.Event) -> None:
        match event:
            case fx.Tick():
                self._handle(NodeTick())
            case fx.ClientUpdate(waiter, update, handle):
                self._handle(storage_node.ClientUpdateReceived(waiter, update, handle))
            case fx.MessageFromPeer(source, message, handle):
                self._handle(storage_node.PeerMessageReceived(source, self.target, message, handle))
            case fx.PeerLost(peer):
                self._handle(storage_node.NodeLost(peer))
            case _:
                self._handle(storage_node.TargetScoped(self.target, event))
        assert self.replica.busy_chunks <= 2 * LIMITS.chunks + LIMITS.copies

    def _handle(self, event: storage_node.Event) -> None:
        for effect in self.core.handle(self.node.clock.now_ns(), event):
            match effect:
                case SendToManager(number, manager, request):
                    self.post(manager, MANAGE, request, number=self.node.incarnation << 32 | number)
                case TakeRouting(routing):
                    self.noted = dict(self.core.membership.noted)
                    self.world.seen.take(routing)  # type: ignore[attr-defined]
                case End():
                    self.node.crash()
                case storage_node.TargetScoped(_, what):
                    self.world.faults.trip(self, what)  # type: ignore[arg-type]
                    self._perform(what)  # type: ignore[arg-type]


class ManagedWorld(ReplicaWorld):
    """Its chain is made by an administrator who asks until it is done. Managers are restarted, and their store is slow,
    refuses, and is silent about commits."""

    def start(self, targets: range) -> None:
        self.managers = ["m1", "m2"]
        self.seen = _Seen(Chain(1, 0, tuple(Member(one, one, TargetState.OFFLINE) for one in targets)))
        self.oracle = self.seen
        self.store = SimStore(self.sim, lambda _before, _written: None)
        self._asks = 0
        self.hosts = [_ManagerHost(self, name) for name in self.managers]
        self._administrate(
            [
                *(AddNode(one) for one in targets),
                *(AddTargets(one, (one,)) for one in targets),
                AddChains((NewChain(1, tuple(targets)),)),
                *(OpenSession(f"client {one}") for one in CLIENTS),
            ]
        )
        self.nodes += [ManagedNode(self, target) for target in targets]
        self.sim.run(until_ns=START_NS, stop=self._serves)
        assert self._serves(), f"not started: {self.seen.chain}"

    def _serves(self) -> bool:
        return all(
            node.table is not None
            and node.table.serving
            and all(node.core.membership.sessions.admits(client) for client in CLIENTS)
            for node in self.nodes
            if isinstance(node, ManagedNode)
        )

    def ask_number(self) -> int:
        self._asks += 1
        return self._asks

    def _administrate(self, requests: list[Request]) -> None:
        def boot(node: SimNode) -> None:
            def turn() -> None:
                ask = [requests[0]] if requests else [KeepSession(client) for client in CLIENTS]
                for request in ask:
                    for name in self.managers:
                        self.net.send("admin", name, frame(MANAGE, request, number=len(requests)))
                node.after(100 * MS, turn)

            def hear(_source: str, payload: bytes) -> None:
                one, body = decoded(payload)
                if isinstance(body, Done | Session) and requests and one.number == len(requests):
                    requests.pop(0)

            node.on_message(hear)
            turn()

        self.sim.node("admin", boot)

    def heal(self) -> None:
        super().heal()
        self.store.faults = None

    def plan_faults(self) -> None:
        super().plan_faults()
        self.store.faults = StoreFaults(slow_ns=SECOND // 2) if self.rng.random() < 0.5 else None
        for host in self.hosts:
            if self.rng.random() < 0.4:
                after_ns = self.rng.randrange(2 * SECOND)
                self.sim.call_after(after_ns, lambda host=host: host.node.restart())  # type: ignore[misc]
