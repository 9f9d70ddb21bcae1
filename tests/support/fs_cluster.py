"""Managers, storage nodes and an administrator in the seeded world, with checks after everything that happens.

Managers are the real machines. A storage node is the real `Fence` and, around it, what the data path will do as far as
the manager is concerned: it registers, sends heartbeats, takes over routing, obeys. Its data is one number per target:
how many acknowledged updates of its chain it has. `Truth` knows how many there are."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator

import msgspec
from tests.support.fs_store import SimStore
from tests.support.fs_truth import Truth

from fireflyer.base.errors import StaleVersion
from fireflyer.base.units import MS, SECOND
from fireflyer.fs.core.fence import Fence
from fireflyer.fs.core.manager import Asked, Effect, Event, Manager, Note, Reply, Settings, Tick
from fireflyer.fs.core.routing import apply_delta
from fireflyer.fs.core.transact import Transact
from fireflyer.fs.schema.ids import NodeId, TargetId
from fireflyer.fs.schema.manager import (
    Answer,
    Behind,
    Condition,
    GiveUp,
    Heartbeat,
    HeartbeatAnswer,
    NotPrimary,
    Override,
    OverrideWarning,
    Refusal,
    Register,
    Registered,
    Request,
    Superseded,
    TargetReport,
)
from fireflyer.fs.schema.routing import Chain, Member, Routing, TargetState
from fireflyer.sim import MachineDriver, SimClock, SimNet, SimNode, World

__all__ = ["FAILURE_TIMEOUT_NS", "LEASE_NS", "Administrator", "ManagerHost", "StorageHost", "StorageProcess"]

FAILURE_TIMEOUT_NS = 6 * SECOND
LEASE_NS = 2 * SECOND
TICK_NS = 250 * MS
BEAT_NS = 700 * MS
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

    def __init__(self, world: World, net: SimNet, store: SimStore, truth: Truth, name: str, drift_ppm: int) -> None:
        self.name = name
        self.notes: list[str] = []
        self.manager: Manager | None = None
        self._world, self._net, self._store, self._truth = world, net, store, truth
        self._askers: dict[int, tuple[str, int]] = {}
        self._asked = 0
        self.clock = SimClock(world, offset_ns=world.random.randrange(10**15), drift_ppm=drift_ppm)
        self.node = world.node(name, self._boot, clock=self.clock)

    def acts(self) -> bool:
        return self.node.alive and self.manager is not None and self.manager.may_act(self.clock.now_ns())

    def _boot(self, node: SimNode) -> None:
        holder = f"{self.name}/{node.incarnation}"
        manager = Manager(Settings(holder, self.name, FAILURE_TIMEOUT_NS, LEASE_NS))
        self.manager = manager
        self._askers.clear()
        driver: MachineDriver[Event, Effect] = MachineDriver(node, manager, self._perform, parallel=lambda _: True)

        def hear(source: str, payload: bytes) -> None:
            ask = _ASKED(payload)
            self._asked += 1
            self._askers[self._asked] = (source, ask.number)
            driver.submit(Asked(self._asked, ask.request))
            self._truth.check_primaries()

        def tick() -> None:
            driver.submit(Tick())
            self._truth.check_primaries()
            node.after(TICK_NS, tick)

        node.on_message(hear)
        node.after(self._world.random.randrange(TICK_NS), tick)

    def _perform(self, effect: Effect) -> Generator[int | None, None, Event | None]:
        if isinstance(effect, Transact):
            return (yield from self._store.perform(self.name, effect))
        if isinstance(effect, Note):
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
        truth: Truth,
        node_id: NodeId,
        targets: list[TargetId],
        name: str,
        drift_ppm: int,
    ) -> None:
        self.world, self.net, self.truth = world, net, truth
        self.node_id, self.targets, self.name = node_id, targets, name
        self.managers = truth.manager_names
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
        if self.process is not None and self.process.incarnation == self.truth.incarnations.get(self.node_id):
            for target in self.targets:
                self.truth.lose_unflushed(target)
        self.boots += 1
        self.node.crash()


class StorageProcess:
    def __init__(self, host: StorageHost, node: SimNode) -> None:
        self.host = host
        self.node = node
        self.incarnation = 0
        self.routing = Routing(0)
        self.fence: Fence | None = None
        self.failing: dict[TargetId, bool] = {}
        """Targets whose disks are broken."""
        self._previous = 0
        self._asker = _Asker(host.net, node, host.managers)
        self._given_up: dict[TargetId, int] = {}
        self._up_to_date: dict[TargetId, int] = {}
        self._reported: tuple[TargetReport, ...] = ()
        node.on_message(self._hear)
        node.after(host.world.random.randrange(BEAT_NS), self._turn)

    @property
    def alive(self) -> bool:
        return self.node.alive and self.host.process is self

    # --- what it believes ---

    def chain(self, target: TargetId) -> tuple[Chain, Member] | None:
        for chain in self.routing.chains:
            for member in chain.members:
                if member.target == target:
                    return chain, member
        return None

    def serves(self, target: TargetId) -> bool:
        """Whether this process lets the target serve now."""
        place = self.chain(target)
        if not self.node.alive or self.fence is None or place is None:
            return False
        chain, member = place
        given_up = self._given_up.get(target, 0) >= chain.version
        open_now = self.fence.is_open(self.host.clock.now_ns())
        return member.state is TargetState.SERVING and not given_up and open_now

    def takes(self, target: TargetId, chain: Chain) -> bool:
        """Whether the target, which syncs in this chain version, takes updates from its predecessor."""
        known = self.node.alive and chain in self.routing.chains
        return known and self._given_up.get(target, 0) < chain.version

    def give_up(self, target: TargetId) -> None:
        place = self.chain(target)
        if place is not None:
            self._given_up[target] = place[0].version

    # --- what it does ---

    def _turn(self) -> None:
        self._sync()
        self._send()
        self.node.after(BEAT_NS, self._turn)

    def _send(self) -> None:
        host = self.host
        if not self.incarnation:
            nonce = f"{host.name}/{self.node.incarnation}"
            self._asker.ask(Register(host.node_id, nonce, self._previous, host.name, host.name, f"boot {host.boots}"))
            return
        if self.fence is None:
            return
        sequence = self.fence.sent(host.clock.now_ns())
        self._reported = self._reports()
        unreachable = tuple(node for node, broken in host.broken_to.items() if broken)
        known = self.routing.version
        self._asker.ask(Heartbeat(host.node_id, self.incarnation, sequence, known, self._reported, unreachable))

    def _reports(self) -> tuple[TargetReport, ...]:
        reports = []
        for target in self.host.targets:
            place = self.chain(target)
            if place is None:
                continue
            version = place[0].version
            if self.failing.get(target, False):
                self._given_up[target] = version
            condition = Condition.ONLINE
            if self._given_up.get(target, 0) >= version:
                condition = Condition.GONE
            elif self._up_to_date.get(target, 0) == version:
                condition = Condition.UP_TO_DATE
            reports.append(TargetReport(target, condition, version, self.host.truth.sure(target)))
        return tuple(reports)

    def _sync(self) -> None:
        for target in self.host.targets:
            place = self.chain(target)
            if place is None or place[1].state is not TargetState.SYNCING or self.failing.get(target, False):
                continue
            version = place[0].version
            if self._up_to_date.get(target) == version or self._given_up.get(target, 0) >= version:
                continue
            if self.host.world.random.random() < 0.6 and self.host.truth.sync(target, place[0]):
                self._up_to_date[target] = version

    # --- what it hears ---

    def _hear(self, _source: str, payload: bytes) -> None:
        told = self._asker.told(payload)
        if told is None:
            return
        answer = told[1]
        match answer:
            case Registered(incarnation, failure_timeout_ns):
                if not self.incarnation:
                    self.incarnation, self.fence = incarnation, Fence(failure_timeout_ns)
                    self._send()
            case Behind(incarnation):
                if not self.incarnation and incarnation > self._previous:
                    self._previous = incarnation
                    self._send()
            case Superseded():
                self.node.crash()
            case HeartbeatAnswer():
                self._on_answer(answer)
            case NotPrimary() | Refusal():
                pass
            case _:
                raise AssertionError(f"{answer} is no answer for a storage node")
        self.host.truth.check_process(self)

    def _on_answer(self, answer: HeartbeatAnswer) -> None:
        if answer.routing is not None:
            try:
                self.routing = apply_delta(self.routing, answer.routing)
            except StaleVersion:
                return
        for order in answer.give_up:
            self._obey(order)
        self._open_fence(answer.sequence)
        if self._reports() != self._reported:
            self._send()

    def _obey(self, order: GiveUp) -> None:
        place = self.chain(order.target)
        if place is not None and place[0].version == order.chain_version:
            self.give_up(order.target)

    def _open_fence(self, sequence: int) -> None:
        if self.fence is not None:
            self.fence.answered(sequence)


class Administrator:
    """Asks one thing after the other, again and again until it is done. Warnings are confirmed."""

    def __init__(self, world: World, net: SimNet, truth: Truth) -> None:
        self._truth = truth
        self.answers: list[tuple[Request, Answer]] = []
        self._requests: deque[Request] = deque()
        self._net = net
        world.node("admin", self._boot)

    @property
    def idle(self) -> bool:
        return not self._requests

    def ask(self, *requests: Request) -> None:
        self._requests.extend(requests)

    def _boot(self, node: SimNode) -> None:
        asker = _Asker(self._net, node, self._truth.manager_names)
        asked = 0

        def turn() -> None:
            nonlocal asked
            if self._requests:
                asked = asker.ask(self._requests[0])
            node.after(ASK_AGAIN_NS, turn)

        def hear(_source: str, payload: bytes) -> None:
            told = asker.told(payload)
            if told is None or told[0] != asked or not self._requests:
                return
            answer = told[1]
            if isinstance(answer, NotPrimary) or (isinstance(answer, Refusal) and answer.code == "busy"):
                return
            request = self._requests.popleft()
            if isinstance(answer, OverrideWarning) and isinstance(request, Override):
                self._truth.overridden[request.chain] = answer.confirm
                self._requests.appendleft(msgspec.structs.replace(request, confirm=answer.confirm))
            self.answers.append((request, answer))

        node.on_message(hear)
        node.after(0, turn)
