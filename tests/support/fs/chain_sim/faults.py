"""What goes wrong in a simulated chain: single faults, and plans of them that go together.

Chance alone meets rare moments rarely. So some plans are made for one kind of trouble, and a `Wire` strikes at the very
moment when a replica performs an effect: before its reply, or when it has just become up to date.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from tests.support.fs.chain_sim.engine_model import Engine

from fireflyer.base.units import MS, SECOND
from fireflyer.fs.core.chain import effects as fx
from fireflyer.fs.schema.ids import TargetId
from fireflyer.fs.schema.routing import Chain, TargetState
from fireflyer.sim import SimCrash, SimNet, SimNode, World

__all__ = ["FAULTS_NS", "MANAGER", "PLANS", "Faults", "FaultyNode", "FaultyWorld", "Wire"]

FAULTS_NS: Final = 2 * SECOND
"""So long they happen; then all is healed."""
MANAGER: Final = "manager"
PLANS: Final = [
    "mixed", "mixed", "mixed", "flipped bits", "cut off", "restarts", "restarts", "lost replies", "last moment",
    "declined",
]  # fmt: skip
TRIPPING: Final[list[type[fx.Effect]]] = [
    fx.Stage, fx.Commit, fx.Reply, fx.Reply, fx.InstallRecords, fx.UpToDate, fx.UpToDate, fx.Send, fx.Publish,
]  # fmt: skip


class FaultyNode(Protocol):
    """What faults need of a `world.StorageNode`."""

    node: SimNode
    target: TargetId
    engine: Engine
    disk_failed: bool

    def feed(self, event: fx.Event) -> None: ...
    def crash(self, *, power: bool) -> None: ...
    def fail_disk(self) -> None: ...


class _Chained(Protocol):
    chain: Chain


class FaultyWorld(Protocol):
    """What faults need of a `world.ReplicaWorld`."""

    sim: World
    net: SimNet
    rng: random.Random
    managers: list[str]
    epoch_ns: int

    @property
    def nodes(self) -> Sequence[FaultyNode]: ...
    @property
    def clients(self) -> Sequence[object]: ...
    @property
    def oracle(self) -> _Chained: ...


class Wire(NamedTuple):
    """A fault that strikes when a replica has performed so many effects of a kind."""

    effect: type[fx.Effect]
    left: int
    fault: Callable[[FaultyNode], None]


class Faults:
    """Of one world. Chance is the world's."""

    def __init__(self, world: FaultyWorld) -> None:
        self.world = world
        self.plan = ""
        self.wires: list[Wire] = []
        self.cuts: list[tuple[list[str], list[str], bool]] = []

    def heal(self) -> None:
        self.cuts.clear()
        self.world.net.heal()

    def plan_some(self) -> None:
        plan = self.plan = self.world.rng.choice(PLANS)
        faults: list[Callable[[], None]] = []
        if plan == "mixed":
            kinds = [
                self._crash,
                self._cut,
                self._isolate,
                self._all,
                self._full,
                self._slow,
                self._reset,
                self._deafen,
            ]
            faults = [self.world.rng.choice(kinds) for _ in range(self.world.rng.randrange(1, 6))]
            if len(self.world.nodes) > 2 and self.world.rng.random() < 0.1:
                faults.append(lambda: self._one().fail_disk())
            for _ in range(self.world.rng.randrange(4)):
                self._lay_wire()
        elif plan == "flipped bits":
            faults = [self._flip] * self.world.rng.randrange(1, 3)
        elif plan == "cut off":
            faults = [self._isolate] * self.world.rng.randrange(1, 4)
        elif plan == "restarts":
            faults = [*[self._crash] * self.world.rng.randrange(2, 6), self._slow, self._reset, self._reset]
        elif plan == "lost replies":
            faults = [self._crash, self._crash, *[self._deafen] * self.world.rng.randrange(2, 5)]
        elif plan == "last moment":
            self.wires.append(Wire(fx.UpToDate, self.world.rng.randrange(1, 3), self._last_moment))
            faults = [self._crash, self._crash]
        elif plan == "declined":
            self.wires.append(Wire(fx.Drop, self.world.rng.randrange(1, 3), self._black_out))
            faults = [self._full] * self.world.rng.randrange(2, 6)
        for fault in faults:
            self.world.sim.call_after(self.world.rng.randrange(FAULTS_NS // 10, FAULTS_NS), fault)

    def _lay_wire(self) -> None:
        effect = self.world.rng.choice(TRIPPING)
        count = 1 if effect is fx.UpToDate else self.world.rng.randrange(1, 30)
        fault = self.world.rng.choice([self._crash_now, self._crash_now, self._mute, self._cut_off])
        self.wires.append(Wire(effect, count, fault))

    def trip(self, node: FaultyNode, effect: fx.Effect) -> None:
        for at, wire in enumerate(self.wires):
            if type(effect) is wire.effect and self.world.sim.now_ns < self.world.epoch_ns + FAULTS_NS:
                self.wires[at] = wire._replace(left=wire.left - 1)
                if wire.left == 1:
                    wire.fault(node)

    def _crash_now(self, node: FaultyNode) -> None:
        self._stop(node, self.world.rng.random() < 0.7)
        raise SimCrash

    def _mute(self, node: FaultyNode) -> None:
        """The others hear nothing of it, but the manager does."""
        self._part([node.node.name], [one.node.name for one in self.world.nodes if one is not node], one_way=True)

    def _cut_off(self, node: FaultyNode) -> None:
        self._part([node.node.name], self.world.managers)

    def _reset(self) -> None:
        """A connection breaks; both ends notice."""
        if len(self.world.nodes) > 1:
            left, right = self.world.rng.sample(self.world.nodes, 2)
            for one, other in ((left, right), (right, left)):
                if one.node.alive and not one.disk_failed:
                    one.node.guarded(functools.partial(one.feed, fx.PeerLost(other.target)))

    def _deafen(self) -> None:
        """A client hears nothing from a node, which hears it."""
        self._part([self._one().node.name], [f"c{self.world.rng.randrange(len(self.world.clients)) + 1}"], one_way=True)

    def _last_moment(self, node: FaultyNode) -> None:
        """Who became up to date can say so to the manager alone; the others learn late of what follows."""
        self._mute(node)
        self._part(self.world.managers, [one.node.name for one in self.world.nodes if one is not node], one_way=True)

    def _black_out(self, node: FaultyNode) -> None:
        """All lose power soon after somebody has dropped what it had staged."""
        after_ns = self.world.rng.randrange(4 * MS)
        for one in self.world.nodes:
            self.world.sim.call_after(after_ns, functools.partial(self._stop, one, True))

    def _one(self) -> FaultyNode:
        return self.world.rng.choice(self.world.nodes)

    def _crash(self) -> None:
        self._stop(self._one(), self.world.rng.random() < 0.7)

    def _all(self) -> None:
        for node in self.world.nodes:
            if self.world.rng.random() < 0.8:
                delay_ns = self.world.rng.randrange(1, 30) * MS
                self.world.sim.call_after(delay_ns, functools.partial(self._stop, node, True))

    def _stop(self, node: FaultyNode, power: bool) -> None:
        node.crash(power=power)
        down_ns = self.world.rng.choice([5 * MS, 60 * MS, 300 * MS, 900 * MS])
        self.world.sim.call_after(self.world.rng.randrange(down_ns), lambda: self.start(node))

    def start(self, node: FaultyNode) -> None:
        if not node.node.alive and not node.disk_failed:
            node.node.restart()

    def _cut(self) -> None:
        if len(self.world.nodes) > 1:
            left, right = self.world.rng.sample([one.node.name for one in self.world.nodes], 2)
            self._part([left], [right])

    def _isolate(self) -> None:
        name = self._one().node.name
        others = list(self.world.managers)
        if self.world.rng.random() < 0.5:
            others += [one.node.name for one in self.world.nodes if one.node.name != name]
        self._part([name], others) if self.world.rng.random() < 0.5 else self._part(others, [name])

    def _part(self, left: list[str], right: list[str], *, one_way: bool = False) -> None:
        cut = (left, right, not one_way and self.world.rng.random() < 0.5)
        self.cuts.append(cut)
        self.world.net.partition(left, right, symmetric=cut[2])

        def mend() -> None:
            if cut in self.cuts:
                self.cuts.remove(cut)
            self.world.net.heal()
            for one in self.cuts:
                self.world.net.partition(one[0], one[1], symmetric=one[2])

        self.world.sim.call_after(self.world.rng.randrange(50, 1300) * MS, mend)

    def _full(self) -> None:
        node = self._one()
        node.engine.full = True
        self.world.sim.call_after(self.world.rng.randrange(600) * MS, lambda: setattr(node.engine, "full", False))

    def _slow(self) -> None:
        node = self._one()
        node.engine.slow_ns = self.world.rng.choice([100, 400]) * MS
        self.world.sim.call_after(self.world.rng.randrange(600) * MS, lambda: setattr(node.engine, "slow_ns", 0))

    def _flip(self) -> None:
        serving = [one.target for one in self.world.oracle.chain.members if one.state is TargetState.SERVING]
        sound = all(
            record.block is None or record.block.sound
            for node in self.world.nodes
            for record in node.engine.index.records.values()
        )
        if sound and len(serving) == len(self.world.nodes) > 1:
            self._one().engine.flip()
