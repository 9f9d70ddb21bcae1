"""A chain of replicas in a seeded world: the real machines, a model of their engine, an oracle for their manager.

    clients ──Update, Look──> storage nodes ──Put …──> storage nodes          all over a network that loses, delays,
                                    │ heartbeats                              reorders, duplicates and cuts
                                    └──────────> oracle

Reads are decided by the published table and the engine's index, as the native path will do it. For a while faults
happen; then everything is healed, and the chain has to recover and agree with what the clients saw.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec
from tests.support.fs.chain_sim.clients import Client, Histories
from tests.support.fs.chain_sim.engine_model import Disk, Engine
from tests.support.fs.chain_sim.faults import FAULTS_NS, MANAGER, Faults
from tests.support.fs.chain_sim.reliable_manager import Beat, BeatAnswer, ReliableManager

from fireflyer.base.units import MS, SECOND, US
from fireflyer.fs.core.chain import effects as fx
from fireflyer.fs.core.chain.reads import decide
from fireflyer.fs.core.chain.replica import Limits, Replica
from fireflyer.fs.schema import manager
from fireflyer.fs.schema.chunks import (
    Found,
    PeerMessage,
    Query,
    QueryKind,
    QueryReply,
    RefusalReason,
    Refused,
    Update,
    UpdateReply,
)
from fireflyer.fs.schema.ids import ChunkId, ContentId, TargetId
from fireflyer.fs.schema.routing import Chain, Member, TargetState
from fireflyer.fs.schema.sessions import EndSession, KeepSession, OpenSession
from fireflyer.sim import Link, SimClock, SimNet, SimNode, World
from fireflyer.sim.linearizability import linearize

__all__ = ["FAULTS_NS", "LIMITS", "MANAGER", "Deciding", "ReplicaWorld", "StorageNode"]

SILENCE_NS: Final = 500 * MS
BEAT_NS: Final = 90 * MS
TICK_NS: Final = 40 * MS
EVALUATE_NS: Final = 60 * MS
RECOVERY_NS: Final = 15 * SECOND
LIMITS: Final = Limits(
    slots=3, chunks=8, queue=4, completions=64, resend_ns=100 * MS, retry_ns=20 * MS, stall_ns=300 * MS,
    hang_ns=800 * MS, rest_ns=100 * MS,
    page=2, copies=2, copy_bytes_per_tick=64,
)  # fmt: skip
CHUNKS: Final = [ChunkId(1, 0), ChunkId(1, 1), ChunkId(2, 0)]
PROBABILITIES: Final = [0.0, 0.0, 0.02, 0.1]
KINDS: Final[tuple[Any, ...]] = (
    Update, Query, UpdateReply, QueryReply, PeerMessage, Beat, BeatAnswer, Chain, manager.Request, manager.Answer,
)  # fmt: skip
UPDATE, LOOK, UPDATE_REPLY, LOOK_REPLY, PEER, BEAT, BEAT_ANSWER, ROUTING, MANAGE, TOLD = range(len(KINDS))
_DECODERS: Final = [msgspec.msgpack.Decoder(kind) for kind in KINDS]


Deciding = Callable[[int, fx.TableEntry | None, fx.ChunkIndex, Query], QueryReply]


class Frame(msgspec.Struct, frozen=True, array_like=True):
    kind: int
    number: int
    body: bytes
    data: bytes


_FRAMES: Final = msgspec.msgpack.Decoder(Frame)


def frame(kind: int, body: msgspec.Struct, data: bytes = b"", number: int = 0) -> bytes:
    return msgspec.msgpack.encode(Frame(kind, number, msgspec.msgpack.encode(body), data))


def decoded(payload: bytes) -> tuple[Frame, Any]:
    one = _FRAMES.decode(payload)
    return one, _DECODERS[one.kind].decode(one.body)


class Knows(Protocol):
    chain: Chain

    @property
    def changes(self) -> int: ...


class StorageNode:
    """Target t on node t: what survives, and the process of now."""

    def __init__(self, world: ReplicaWorld, target: TargetId) -> None:
        self.world, self.target = world, target
        self.disk = Disk()
        self.disk_failed = False
        drift_ppm = world.rng.randrange(-10_000, 10_001)
        clock = SimClock(world.sim, offset_ns=world.rng.randrange(10 * SECOND), drift_ppm=drift_ppm)
        self.node = world.sim.node(f"s{target}", self.boot, clock=clock)

    def boot(self, node: SimNode) -> None:
        self.node = node
        self.engine = Engine(self.disk, self.world.sim.fork_random(f"engine {self.target}/{node.incarnation}"))
        self.replica = self.world.make_replica(self.target, self.engine.index)
        self.table: fx.TableEntry | None = None
        self.gone_in, self.chain_version, self.up_to_date, self.unreachable = 0, 0, 0, 0
        self.handles: dict[int, bytes] = {}
        self.waiters: dict[int, tuple[str, int]] = {}
        self.asked_routing = False
        self._numbers = 0
        node.on_message(self.receive)
        self.beat()
        node.after(TICK_NS, self._tick)
        node.after(BEAT_NS, self._beats)

    # --- time and the manager ---

    def _tick(self) -> None:
        self.node.after(TICK_NS, self._tick)
        self.feed(fx.Tick())
        if self.asked_routing:
            self.beat()

    def _beats(self) -> None:
        self.node.after(BEAT_NS, self._beats)
        self.beat()

    def beat(self) -> None:
        self.asked_routing = False
        now_ns, incarnation = self.node.clock.now_ns(), self.node.incarnation
        gone = self.disk_failed or (self.gone_in > 0 and self.gone_in >= self.chain_version)
        beat = Beat(self.target, incarnation, now_ns, gone, self.up_to_date, self.unreachable)
        self.unreachable = 0
        self.post(MANAGER, BEAT, beat)

    def _answered(self, answer: BeatAnswer) -> None:
        if answer.incarnation != self.node.incarnation:
            return
        self.chain_version = max(self.chain_version, answer.chain.version)
        self.feed(fx.ChainChanged(answer.chain))
        if answer.give_up:
            self.feed(fx.GiveUp(answer.chain.version, "the manager says so"))
        self.feed(fx.FenceExtended(answer.sent_ns + SILENCE_NS // 2))

    # --- messages ---

    def post(self, to: str, kind: int, body: msgspec.Struct, data: bytes = b"", number: int = 0) -> None:
        self.world.net.send(self.node.name, to, frame(kind, body, data, number))

    def receive(self, source: str, payload: bytes) -> None:
        one, body = decoded(payload)
        if one.kind == UPDATE:
            waiter = self._number()
            self.waiters[waiter] = (source, one.number)
            self.feed(fx.ClientUpdate(waiter, body, self._keep(one.data)))
        elif one.kind == LOOK:
            self._look(source, one.number, body)
        elif one.kind == PEER:
            self.feed(fx.MessageFromPeer(int(source[1:]), body, self._keep(one.data)))
        elif one.kind == BEAT_ANSWER:
            self._answered(body)

    def _look(self, source: str, number: int, look: Query) -> None:
        reply, data = self.look(look)
        self.post(source, LOOK_REPLY, reply, data, number)

    def look(self, look: Query) -> tuple[QueryReply, bytes]:
        reply = self.world.decide(self.node.clock.now_ns(), self.table, self.engine.index, look)
        if look.kind is not QueryKind.READ or not isinstance(reply, Found):
            return reply, b""
        held = reply.entries[0].held
        assert held is not None
        data = self.engine.load(look.chunk, held.id)
        if data is not None:
            return reply, data
        self.feed(fx.CorruptionFound(look.chunk))
        return Refused(RefusalReason.CORRUPT, "damaged"), b""

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _keep(self, data: bytes) -> int:
        if not data:
            return 0
        handle = self._number()
        self.handles[handle] = data
        return handle

    # --- the machine ---

    def feed(self, event: fx.Event) -> None:
        if self.disk_failed and isinstance(event, fx.ChainChanged | fx.FenceExtended):
            return
        for effect in self.replica.handle(self.node.clock.now_ns(), event):
            self.world.faults.trip(self, effect)
            self._perform(effect)
        assert self.replica.busy_chunks <= 2 * LIMITS.chunks + LIMITS.copies

    def _perform(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Stage():
                data = self.handles[effect.handle] if effect.handle else b""
                delay_ns, record, event = self.engine.stage(effect, data)
                if record and effect.completion is not None:
                    self.world.check_content(effect.chunk, effect.id, self.disk.journal[record - 1][2])
                    key = (effect.completion.client, effect.completion.channel, effect.completion.sequence)
                    self.world.update_of[effect.chunk, effect.id] = key
                self.node.after(delay_ns, lambda: self._durable(record, event))
            case fx.InstallRecords():
                delay_ns, record, adopted = self.engine.adopt(effect, self.world.sim.now_ns)
                self.node.after(delay_ns, lambda: self._durable(record, adopted))
            case fx.Drop(awaited=True):
                delay_ns, record, dropped = self.engine.drop(effect)
                self.node.after(delay_ns, lambda: self._durable(record, dropped))
            case fx.Commit() | fx.Drop() | fx.Forget():
                self.engine.note(effect)
                if isinstance(effect, fx.Commit) and self.table is not None and self.table.serving:
                    self.world.check_once(effect)
            case fx.Send():
                self._send(effect)
            case fx.Release(handle):
                del self.handles[handle]
            case fx.Reply(waiter, reply):
                source, number = self.waiters.pop(waiter)
                self.post(source, UPDATE_REPLY, reply, number=number)
            case _:
                self.note(effect)

    def note(self, effect: fx.Effect) -> None:
        self.world.sim.record(type(effect).__name__, self.node.name)
        match effect:
            case fx.Publish(entry):
                self.table = entry
            case fx.UpToDate(version):
                self.up_to_date = version
                self.asked_routing = True
            case fx.ReportGone(version, reason):
                self.gone_in, self.asked_routing = version, True
                self.world.reports.append(reason)
            case fx.ReportUnreachable(peer):
                self.unreachable = peer
            case fx.AskRouting():
                self.asked_routing = True

    def _durable(self, record: int, event: fx.Staged | fx.StageFailed | fx.Dropped | fx.RecordsInstalled) -> None:
        if self.disk_failed:
            return
        self.engine.finish(record, event)
        self.feed(event)

    def _send(self, effect: fx.Send) -> None:
        data: bytes | None = self.handles[effect.handle] if effect.handle else b""
        if effect.content is not None:
            chunk = effect.message.body.chunk  # type: ignore[union-attr]
            data = self.engine.load(chunk, effect.content)
            if data is None:
                self.node.after(0, lambda: self.feed(fx.CorruptionFound(chunk)))
                return
        assert data is not None
        self.post(f"s{effect.peer}", PEER, effect.message, data)

    # --- faults ---

    def crash(self, *, power: bool) -> None:
        if self.node.alive:
            self.node.crash()
            if power:
                self.disk.cut_power(self.world.rng)

    def fail_disk(self) -> None:
        if not self.node.alive:
            return
        self.node.guarded(lambda: self.feed(fx.DiskFailed("input/output error")))
        self.disk_failed = True

    def scrub(self) -> None:
        for chunk, record in sorted(self.engine.index.records.items()):
            if record.block is not None and not record.block.sound:
                self.engine.note_damage(chunk)
                self.feed(fx.CorruptionFound(chunk))


class AnyClient(Protocol):
    @property
    def finished(self) -> bool: ...
    def hurry(self) -> None: ...
    def routing(self, chain: Chain) -> None: ...
    def reply(self, number: int, reply: UpdateReply | QueryReply, data: bytes) -> None: ...
    def told(self, number: int, answer: manager.Answer) -> None: ...


class ReplicaWorld:
    """One seeded history. `make_replica` is the seam for mutants, `make_client` for other clients."""

    make_client: Callable[..., AnyClient] = Client

    def __init__(
        self,
        seed: int,
        *,
        replicas: int | None = None,
        replica: Callable[[TargetId, fx.ChunkIndex], Replica] | None = None,
        calm: bool = False,
    ) -> None:
        self.sim = World(seed)
        self.decide: Deciding = decide
        self.rng: random.Random = self.sim.fork_random("plan")
        count = replicas or self.rng.choice([1, 2, 2, 3, 3, 3, 4])
        self.make_replica = replica or (lambda target, index: Replica(1, target, index, LIMITS))
        loss, again, slow = (0.0, 0.0, 0.0) if calm else (self.rng.choice(PROBABILITIES) for _ in range(3))
        self.link = Link(50 * US, 2 * MS, slow, self.rng.choice([100, 300]) * MS, loss / 2, again)
        self.net = SimNet(self.sim, default=self.link)
        self.reports: list[str] = []
        self.managers = [MANAGER]
        self.oracle: Knows
        """Of which version the chain is now."""
        self.histories = Histories()
        self.contents: dict[tuple[ChunkId, ContentId], bytes | None] = {}
        self.update_of: dict[tuple[ChunkId, ContentId], tuple[int, int, int]] = {}
        self.made_by: dict[tuple[int, int, int], ContentId] = {}
        self.faults = Faults(self)
        self.nodes: list[StorageNode] = []
        self.start(range(1, count + 1))
        self.epoch_ns = self.sim.now_ns
        self.clients = [self._client(number) for number in range(1, self.rng.randrange(2, 4))]
        self.recovered = False

    def start(self, targets: range) -> None:
        """Managers and nodes, until they serve. Other worlds have other managers."""
        started = Chain(1, 1, tuple(Member(one, one, TargetState.SERVING) for one in targets))
        self.oracle = self.decider = ReliableManager(started, SILENCE_NS)
        self.manager = self.sim.node(MANAGER, self._boot_manager)
        self.nodes += [StorageNode(self, target) for target in targets]

    def _boot_manager(self, node: SimNode) -> None:
        node.on_message(self._manage)
        node.after(EVALUATE_NS, self._evaluate)

    def _evaluate(self) -> None:
        self.manager.after(EVALUATE_NS, self._evaluate)
        self.decider.evaluate(self.sim.now_ns)

    def _manage(self, source: str, payload: bytes) -> None:
        _, body = decoded(payload)
        if isinstance(body, Beat):
            answer = self.decider.beat(self.sim.now_ns, body)
            if answer is not None:
                self.net.send(MANAGER, source, frame(BEAT_ANSWER, answer))
        else:
            self.net.send(MANAGER, source, frame(ROUTING, self.oracle.chain))

    def _client(self, number: int) -> AnyClient:
        clients: list[AnyClient] = []
        name = f"c{number}"

        def wire(target: TargetId, message: msgspec.Struct, data: bytes, request: int) -> None:
            kinds = {Update: UPDATE, Query: LOOK, EndSession: MANAGE, OpenSession: MANAGE, KeepSession: MANAGE}
            kind = kinds.get(type(message), ROUTING)
            for to in [f"s{target}"] if target else self.managers:
                self.net.send(name, to, frame(kind, message, data, request))

        def receive(_source: str, payload: bytes) -> None:
            one, body = decoded(payload)
            if isinstance(body, Chain):
                clients[0].routing(body)
            elif one.kind == TOLD:
                clients[0].told(one.number, body)
            else:
                clients[0].reply(one.number, body, one.data)

        def boot(node: SimNode) -> None:
            node.on_message(receive)

        channels = self.rng.randrange(1, 3) if number == 1 else self.rng.randrange(3)
        count = self.rng.choice([6, 15, 25])
        node = self.sim.node(name, boot)
        clients.append(
            type(self).make_client(
                node, number, wire, self.oracle.chain, self.histories,
                chunks=CHUNKS, channels=channels, count=count, span_ns=FAULTS_NS,
            )
        )  # fmt: skip
        return clients[0]

    def plan_faults(self) -> None:
        self.faults.plan_some()

    # --- the run ---

    def run(self) -> None:
        self.sim.run(until_ns=self.epoch_ns + FAULTS_NS)
        self.heal()
        self._until_recovered()
        for node in self.nodes:
            if not node.disk_failed and node.node.alive:
                node.scrub()
        self._until_recovered()

    def heal(self) -> None:
        self.faults.heal()
        clients = [f"c{number + 1}" for number in range(len(self.clients))]
        names = [*self.managers, *(one.node.name for one in self.nodes), *clients]
        for source in names:
            for target in names:
                self.net.set_link(source, target, Link())
        for node in self.nodes:
            node.engine.full, node.engine.slow_ns = False, 0
            self.faults.start(node)
        for client in self.clients:
            client.hurry()

    def _until_recovered(self) -> None:
        self.recovered = False
        end_ns = self.sim.now_ns + RECOVERY_NS

        def look() -> None:
            self.recovered = self._is_recovered()
            self.sim.call_after(50 * MS, look)

        self.sim.call_after(20 * MS, look)
        self.sim.run(until_ns=end_ns, stop=lambda: self.recovered)
        assert self.recovered, f"not recovered after {RECOVERY_NS / SECOND:.0f} s: {self.oracle.chain}"

    @property
    def lost(self) -> bool:
        """The only ones that are clean are on disks that failed: nobody may serve."""
        last = [one.target for one in self.oracle.chain.members if one.state is TargetState.LASTSRV]
        return bool(last) and all(self.nodes[target - 1].disk_failed for target in last)

    def _is_recovered(self) -> bool:
        chain = self.oracle.chain
        if self.lost:
            return all(client.finished for client in self.clients)
        for member in chain.members:
            node = self.nodes[member.target - 1]
            if node.disk_failed:
                continue
            table = node.table
            fits = table is not None and table.serving and table.chain_version == chain.version
            fits = fits and table is not None and node.node.clock.now_ns() < table.fence_until_ns
            if member.state is not TargetState.SERVING or not fits or node.replica.busy_chunks:
                return False
        return all(client.finished for client in self.clients)

    # --- what must hold ---

    def check_content(self, chunk: ChunkId, content: ContentId, block: Any) -> None:
        data = None if block is None else block.data
        known = self.contents.setdefault((chunk, content), data)
        assert known == data, f"{content} of {chunk} names {known!r} and {data!r}"

    def check_once(self, commit: fx.Commit) -> None:
        """What a serving replica commits stays: no update may be committed as two contents."""
        key = self.update_of.get((commit.chunk, commit.id))
        if key is not None:
            known = self.made_by.setdefault(key, commit.id)
            assert known == commit.id, f"update {key} of {commit.chunk} was done as {known} and as {commit.id}"

    def check(self) -> None:
        """At the end: all serving replicas hold the same, nothing is left over, and what they hold explains what every
        client saw."""
        strange = [reason for reason in self.reports if "does not follow" in reason]
        assert not strange, strange
        living = [] if self.lost else [one for one in self.nodes if not one.disk_failed]
        for node in living:
            index, first = node.engine.index, living[0].engine.index
            assert not index.pending(), f"{node.target} has {index.pending()} pending"
            assert index.chunks(None, 100) == first.chunks(None, 100), f"{node.target} differs from {living[0].target}"
            assert not node.handles, f"{node.target} keeps {len(node.handles)} buffers"
            assert not node.waiters, f"{node.target} left {len(node.waiters)} clients without a reply"
            for chunk in CHUNKS:
                reply, data = node.look(Query(1, self.oracle.chain.version, QueryKind.READ, chunk))
                assert not isinstance(reply, Refused), reply
                content = data if isinstance(reply, Found) else None
                now_ns = self.sim.now_ns
                self.histories.read(f"finally at {node.target}", chunk, content, now_ns, now_ns)
        for chunk in CHUNKS:
            linearize(self.histories.of.get(chunk, []), (None,))
