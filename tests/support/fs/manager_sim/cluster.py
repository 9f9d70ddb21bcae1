"""Managers, storage nodes and an administrator in the seeded world, with checks after everything that happens.

Managers and storage processes (registration, heartbeats, fence) are the real machines. Their replicas are played: they
stop when they are told to, and their data is one number per target: how many acknowledged updates of its chain it has.
`ClusterOracle` knows how many there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator

import msgspec
from tests.support.fs.manager_sim.oracle import KEY_LIFE_NS, ClusterOracle
from tests.support.fs.manager_sim.sessions import SESSION_NS, FakeClient
from tests.support.fs.manager_sim.store import SimStore

from fireflyer.base.units import MS, SECOND
from fireflyer.fs.core.chain import effects as fx
from fireflyer.fs.core.chain import storage_node
from fireflyer.fs.core.chain.node_membership import (
    End,
    ManagerReply,
    NodeMembership,
    ProcessIdentity,
    SendToManager,
    TakeSessions,
)
from fireflyer.fs.core.chain.node_membership import Tick as NodeTick
from fireflyer.fs.core.manager.sessions import LiveSessions
from fireflyer.fs.core.manager.state_machine import (
    Effect,
    Event,
    Leave,
    LogDecision,
    Manager,
    Reply,
    RequestReceived,
    Settings,
    Tick,
)
from fireflyer.fs.schema.ids import NodeId, TargetId
from fireflyer.fs.schema.manager import Answer, Drain, ManagerError, NotPrimary, Override, OverrideWarning, Request
from fireflyer.fs.schema.routing import Chain, Routing, TargetState
from fireflyer.kvstore.core.fenced import Transact
from fireflyer.sim import MachineDriver, SimClock, SimNet, SimNode, World

__all__ = ["FAILURE_TIMEOUT_NS", "LEASE_NS", "Administrator", "ManagerHost", "StorageHost", "StorageProcess"]
__all__ += ["fake_client"]

FAILURE_TIMEOUT_NS = 6 * SECOND
LEASE_NS = 2 * SECOND
TICK_NS = 250 * MS
NODE_TICK_NS = 350 * MS
SYNC_PROBABILITY = 0.4
"""Of a target to be synced within a tick."""
ASK_AGAIN_NS = 800 * MS
PATIENCE = 3
"""Messages without an answer until another manager is tried."""


class _Ask(msgspec.Struct, frozen=True):
    number: int
    request: Request


class _Told(msgspec.Struct, frozen=True):
    number: int
    answer: Answer


_ENCODE = msgspec.msgpack.Encoder().encode
_ASKED = msgspec.msgpack.Decoder(_Ask).decode
_TOLD = msgspec.msgpack.Decoder(_Told).decode


class ManagerHost:
    """A process with one manager, restarted with nothing."""

    def __init__(
        self, world: World, net: SimNet, store: SimStore, oracle: ClusterOracle, name: str, drift_ppm: int
    ) -> None:
        self.name = name
        self.notes: list[str] = []
        self.manager: Manager | None = None
        self._world, self._net, self._store, self._oracle = world, net, store, oracle
        self._askers: dict[int, tuple[str, int]] = {}
        self._asked = 0
        self._leave: Callable[[], None] | None = None
        self.clock = SimClock(world, offset_ns=world.random.randrange(10**15), drift_ppm=drift_ppm)
        self.node = world.node(name, self._boot, clock=self.clock)

    def acts(self) -> bool:
        return self.node.alive and self.manager is not None and self.manager.may_act(self.clock.now_ns())

    @property
    def key_ids(self) -> tuple[int, ...]:
        return self.manager.key_ids if self.manager is not None else ()

    def leave(self) -> None:
        """Its clean end: it gives the lease up."""
        if self._leave is not None and self.node.alive:
            self._leave()

    def _boot(self, node: SimNode) -> None:
        holder = f"{self.name}/{node.incarnation}"
        settings = Settings(
            holder, self.name, FAILURE_TIMEOUT_NS, LEASE_NS, session_ns=SESSION_NS, key_life_ns=KEY_LIFE_NS
        )
        manager = Manager(settings)
        self.manager = manager
        self._askers.clear()
        driver: MachineDriver[Event, Effect] = MachineDriver(node, manager, self._perform, parallel=lambda _: True)

        def hear(source: str, payload: bytes) -> None:
            ask = _ASKED(payload)
            self._asked += 1
            self._askers[self._asked] = (source, ask.number)
            driver.submit(RequestReceived(self._asked, ask.request))
            self._oracle.check_primaries()

        def tick() -> None:
            driver.submit(Tick())
            self._oracle.check_primaries()
            node.after(TICK_NS, tick)

        self._leave = lambda: driver.submit(Leave())
        node.on_message(hear)
        node.after(self._world.random.randrange(TICK_NS), tick)

    def _perform(self, effect: Effect) -> Generator[int | None, None, Event | None]:
        if isinstance(effect, Transact):
            return (yield from self._store.perform(self.name, effect))
        if isinstance(effect, LogDecision):
            self.notes.append(effect.text)
            self._world.record("note", self.name, effect.text)
        elif isinstance(effect, Reply):
            source, number = self._askers.pop(effect.request_id)
            self._net.send(self.name, source, _ENCODE(_Told(number, effect.answer)))
        return None


class _Asker:
    """Finds the primary: the one that was named, else the next. One for each process, as connections are."""

    def __init__(self, net: SimNet, node: SimNode, managers: list[str]) -> None:
        self._net, self._name, self._managers = net, node.name, managers
        self._first = self._number = node.incarnation << 32
        self._current = managers[0]
        self._unanswered = 0

    def ask(self, request: Request) -> int:
        self._unanswered += 1
        if self._unanswered > PATIENCE:
            self._next()
        self._number += 1
        self._net.send(self._name, self._current, _ENCODE(_Ask(self._number, request)))
        return self._number

    def told(self, payload: bytes) -> tuple[int, Answer] | None:
        """Which message is answered, and how; None for an answer to a process before this one."""
        told = _TOLD(payload)
        if told.number < self._first:
            return None
        self._unanswered = 0
        if isinstance(told.answer, NotPrimary):
            if told.answer.address in self._managers and told.answer.address != self._current:
                self._current = told.answer.address
            else:
                self._next()
        return told.number, told.answer

    def _next(self) -> None:
        place = self._managers.index(self._current) + 1
        self._current, self._unanswered = self._managers[place % len(self._managers)], 0


class StorageHost:
    """A machine on which a storage process of a node may run. Two hosts may have the same node: its disks were
    moved."""

    def __init__(
        self,
        world: World,
        net: SimNet,
        oracle: ClusterOracle,
        node_id: NodeId,
        targets: list[TargetId],
        name: str,
        drift_ppm: int,
    ) -> None:
        self.world, self.net, self.oracle = world, net, oracle
        self.node_id, self.targets, self.name = node_id, targets, name
        self.managers = oracle.manager_names
        self.process: StorageProcess | None = None
        self.boots = 0
        self.broken_to: dict[NodeId, bool] = {}
        """Nodes that it cannot reach."""
        self.clock = SimClock(world, offset_ns=world.random.randrange(10**15), drift_ppm=drift_ppm)
        self.node = world.node(name, self._boot, clock=self.clock)

    def _boot(self, node: SimNode) -> None:
        self.process = StorageProcess(self, node)

    def power_cut(self) -> None:
        """The machine goes down, and what was not flushed is lost, if it is the one that has the disks."""
        if self.process is not None and self.process.incarnation == self.oracle.incarnations.get(self.node_id):
            for target in self.targets:
                self.oracle.lose_unflushed(target)
            for other in self.oracle.hosts:
                if other is not self and other.node_id == self.node_id and other.node.alive:
                    other.node.restart()  # it waits for these disks: what they lack, it sees when it has them
        self.boots += 1
        self.node.crash()


class _Says(msgspec.Struct, frozen=True):
    """To a played replica: it wants this now."""

    effect: fx.Effect


class _FakeReplica:
    """A replica as far as the manager hears of it. It takes its time to stop."""

    busy = False

    def __init__(self, process: StorageProcess, target: TargetId) -> None:
        self._process, self._target = process, target
        self._chain_version = 0

    def handle(self, _now_ns: int, event: fx.Event | _Says) -> list[fx.Effect]:
        match event:
            case _Says(effect):
                return [effect]
            case fx.ChainChanged(chain):
                self._chain_version = chain.version
            case fx.GiveUp(chain_version, reason):
                self._process.host.oracle.check_give_up(self._target, reason)
                self._process.soon(self._target, fx.ReportGone(chain_version, reason))
            case fx.DiskFailed(message):
                return [fx.ReportGone(self._chain_version, message, failed=True)]
        return []


class StorageProcess:
    """Performs the effects of a `StorageCore`, and plays its replicas."""

    def __init__(self, host: StorageHost, node: SimNode) -> None:
        self.host = host
        self.node = node
        self._first = node.incarnation << 32
        nonce = f"{host.name}/{node.incarnation}"
        identity = ProcessIdentity(host.node_id, nonce, host.name, host.name, f"boot {host.boots}")
        clean = {target: host.oracle.clean(target) for target in host.targets}
        self.membership = NodeMembership(identity, clean, host.managers)
        self.core = storage_node.StorageCore(
            self.membership,
            host.targets,
            lambda _, target: _FakeReplica(self, target),
            unreachable_report_ns=NODE_TICK_NS,
        )
        self._synced: dict[TargetId, int] = {}
        node.on_message(self._hear)
        node.after(host.world.random.randrange(NODE_TICK_NS), self._turn)

    @property
    def alive(self) -> bool:
        return self.node.alive and self.host.process is self

    @property
    def incarnation(self) -> int:
        return self.membership.incarnation

    @property
    def routing(self) -> Routing:
        return self.membership.routing

    @property
    def sessions(self) -> LiveSessions:
        return self.membership.sessions

    @property
    def key_ids(self) -> tuple[int, ...]:
        return self.membership.key_ids

    @property
    def is_open(self) -> bool:
        fence = self.membership._fence
        return self.alive and fence is not None and fence.is_open(self.host.clock.now_ns())

    def serves(self, target: TargetId) -> bool:
        """Whether this process lets the target serve now."""
        return self.node.alive and self.membership.serves(self.host.clock.now_ns(), target)

    def takes(self, target: TargetId, chain: Chain) -> bool:
        """Whether the target, which syncs in this chain version, takes updates from its predecessor."""
        return self.node.alive and chain in self.routing.chains and self.membership.active(target, chain.version)

    def stop(self, target: TargetId) -> None:
        """The data path has stopped it by itself, for now."""
        for chain in self.routing.chains:
            if any(member.target == target for member in chain.members):
                self._says(target, fx.ReportGone(chain.version, "it has stopped"))

    def fail(self, target: TargetId) -> None:
        self.feed(storage_node.TargetScoped(target, fx.DiskFailed("the disk has failed")))

    def soon(self, target: TargetId, effect: fx.Effect) -> None:
        self.node.after(self.host.world.random.randrange(SECOND), lambda: self._says(target, effect))

    def feed(self, event: storage_node.Event) -> None:
        for effect in self.core.handle(self.host.clock.now_ns(), event):
            match effect:
                case SendToManager(number, manager, request):
                    self.host.net.send(self.host.name, manager, _ENCODE(_Ask(self._first + number, request)))
                case TakeSessions(sessions):
                    self.host.oracle.sessions.learn(self.host.targets, sessions)
                case End():
                    self.node.crash()
        self.host.oracle.check_process(self)

    def _says(self, target: TargetId, effect: fx.Effect) -> None:
        self.feed(storage_node.TargetScoped(target, _Says(effect)))  # type: ignore[arg-type]

    def _turn(self) -> None:
        self._sync()
        self._complain()
        self.feed(NodeTick())
        self.node.after(NODE_TICK_NS, self._turn)

    def _hear(self, _source: str, payload: bytes) -> None:
        told = _TOLD(payload)
        if told.number > self._first:
            self.feed(ManagerReply(told.number - self._first, told.answer))

    def _complain(self) -> None:
        for chain in self.routing.chains:
            own = next((one.target for one in chain.members if one.target in self.host.targets), None)
            for member in chain.members:
                if own is not None and self.host.broken_to.get(member.node, False):
                    self._says(own, fx.ReportUnreachable(member.target))

    def _sync(self) -> None:
        for chain in self.routing.chains:
            for member in chain.members:
                target, version = member.target, chain.version
                if target not in self.host.targets or member.state is not TargetState.SYNCING:
                    continue
                if self._synced.get(target) == version or not self.membership.active(target, version):
                    continue
                if self.host.world.random.random() < SYNC_PROBABILITY and self.host.oracle.sync(target, chain):
                    self._synced[target] = version
                    self._says(target, fx.UpToDate(version))


def fake_client(world: World, net: SimNet, oracle: ClusterOracle, name: str) -> FakeClient:
    def connect(
        node: SimNode, managers: list[str]
    ) -> tuple[Callable[[Request], int], Callable[[bytes], tuple[int, Answer] | None]]:
        requester = _Asker(net, node, managers)
        return requester.ask, requester.told

    return FakeClient(world, name, oracle.sessions, oracle.manager_names, connect)


class Administrator:
    """Asks one thing after the other, again and again until it is done. Warnings are confirmed."""

    def __init__(self, world: World, net: SimNet, oracle: ClusterOracle) -> None:
        self._oracle = oracle
        self.answers: list[tuple[Request, Answer]] = []
        self._requests: deque[Request] = deque()
        self._net = net
        world.node("admin", self._boot)

    @property
    def idle(self) -> bool:
        return not self._requests

    def ask(self, *requests: Request) -> None:
        for request in requests:
            if isinstance(request, Drain) and request.drain and request.at_once:
                self._oracle.may_drain[request.node] = True
        self._requests.extend(requests)

    def _boot(self, node: SimNode) -> None:
        requester = _Asker(self._net, node, self._oracle.manager_names)
        asked = 0

        def turn() -> None:
            nonlocal asked
            if self._requests:
                asked = requester.ask(self._requests[0])
            node.after(ASK_AGAIN_NS, turn)

        def hear(_source: str, payload: bytes) -> None:
            told = requester.told(payload)
            if told is None or told[0] != asked or not self._requests:
                return
            answer = told[1]
            if isinstance(answer, NotPrimary) or (isinstance(answer, ManagerError) and answer.code == "busy"):
                return
            request = self._requests.popleft()
            if isinstance(answer, OverrideWarning) and isinstance(request, Override):
                self._oracle.overridden[request.chain] = answer.confirm
                self._requests.appendleft(msgspec.structs.replace(request, confirm=answer.confirm))
            self.answers.append((request, answer))

        node.on_message(hear)
        node.after(0, turn)
