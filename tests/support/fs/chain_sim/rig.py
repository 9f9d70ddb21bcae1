"""Replicas on a bench: messages and engine results move when the test says so."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tests.support.fs.chain_sim.engine_model import Disk, Engine

from fireflyer.base.units import SECOND
from fireflyer.fs.core.chain import effects as fx
from fireflyer.fs.core.chain.reads import decide
from fireflyer.fs.core.chain.replica import Limits, Replica
from fireflyer.fs.schema.chunks import (
    Answer,
    Change,
    Operation,
    PeerMessage,
    Put,
    Query,
    QueryKind,
    QueryReply,
    RefusalReason,
    Refused,
    Request,
    SyncDone,
    Update,
    UpdateReply,
)
from fireflyer.fs.schema.ids import ChunkId, TargetId
from fireflyer.fs.schema.routing import Chain, Member, TargetState
from fireflyer.native import crc32c

__all__ = [
    "CHUNK",
    "FAR_NS",
    "LASTSRV",
    "OFFLINE",
    "REMOVE",
    "SERVING",
    "SYNCING",
    "Machine",
    "MessageInTransit",
    "Rig",
]
__all__ += ["is_answer", "is_done", "is_put", "refusal", "write"]

CHUNK = ChunkId(1, 0)
FAR_NS = 1 << 60
SERVING, SYNCING, OFFLINE, LASTSRV = "serving", "syncing", "offline", "lastsrv"
REMOVE = Change(Operation.REMOVE)


def write(data: bytes, offset: int = 0) -> Change:
    return Change(Operation.WRITE, offset, len(data), crc32c(data))


@dataclass(frozen=True)
class MessageInTransit:
    source: TargetId
    target: TargetId
    message: PeerMessage
    data: bytes


class Machine:
    """A replica with its engine; `working`: what the engine has not finished."""

    def __init__(self, rig: Rig, target: TargetId, limits: Limits, kind: type[Replica]) -> None:
        self.rig, self.target = rig, target
        self.engine = Engine(Disk(), random.Random(target))
        self.replica = kind(1, target, self.engine.index, limits)
        self.table: fx.TableEntry | None = None
        self.handles: dict[int, bytes] = {}
        self.working: deque[tuple[int, fx.Staged | fx.StageFailed | fx.Dropped | fx.RecordsInstalled]] = deque()
        self.others: list[fx.Effect] = []
        self._numbers = 0

    def feed(self, event: fx.Event) -> None:
        for effect in self.replica.handle(self.rig.now_ns, event):
            self.rig.effects.append((self.target, effect))
            match effect:
                case fx.Stage():
                    data = self.handles[effect.handle] if effect.handle else b""
                    self.working.append(self.engine.stage(effect, data)[1:])
                case fx.InstallRecords():
                    self.working.append(self.engine.adopt(effect, self.rig.now_ns)[1:])
                case fx.Drop(awaited=True):
                    self.working.append(self.engine.drop(effect)[1:])
                case fx.Commit() | fx.Drop() | fx.Forget():
                    self.engine.note(effect)
                case fx.Send(peer, message, handle, content):
                    data = self.handles[handle] if handle else b""
                    if content is not None:
                        data = self.engine.load(message.body.chunk, content) or b""  # type: ignore[union-attr]
                    self.rig.in_transit.append(MessageInTransit(self.target, peer, message, data))
                case fx.Release(handle):
                    del self.handles[handle]
                case fx.Reply(waiter, reply):
                    self.rig.replies[waiter] = reply
                case fx.Publish(entry):
                    self.table = entry
                case _:
                    self.others.append(effect)

    def keep(self, data: bytes) -> int:
        self._numbers += 1
        if data:
            self.handles[self._numbers] = data
        return self._numbers if data else 0

    def work(self) -> None:
        """The engine finishes the oldest thing."""
        record, event = self.working.popleft()
        self.engine.finish(record, event)
        self.feed(event)


class Rig:
    """`states`: of targets 1, 2, …"""

    def __init__(self, *states: str, limits: Limits | None = None, kind: type[Replica] = Replica) -> None:
        self.now_ns = 0
        self.version = 0
        self.in_transit: deque[MessageInTransit] = deque()
        self.replies: dict[int, UpdateReply] = {}
        self.effects: list[tuple[TargetId, fx.Effect]] = []
        self.machines = {
            one: Machine(self, one, limits or Limits(resend_ns=SECOND), kind) for one in range(1, len(states) + 1)
        }
        self.waiters = 0
        for machine in self.machines.values():
            machine.feed(fx.FenceExtended(FAR_NS))
        self.chain(*states)

    def __getitem__(self, target: TargetId) -> Machine:
        return self.machines[target]

    def chain(self, *states: str, tell: tuple[TargetId, ...] | None = None, order: tuple[TargetId, ...] = ()) -> Chain:
        self.version += 1
        names = order or tuple(range(1, len(states) + 1))
        members = tuple(Member(one, one, TargetState(state)) for one, state in zip(names, states, strict=True))
        chain = Chain(1, self.version, members)
        for one in self.machines if tell is None else tell:
            self[one].feed(fx.ChainChanged(chain))
        return chain

    def update(
        self, target: TargetId, change: Change, data: bytes = b"", *, chunk: ChunkId = CHUNK, sequence: int = 1,
        client: int = 1, channel: int = 0, version: int | None = None,
    ) -> int:  # fmt: skip
        """Returns the number under which the reply will be in `replies`."""
        self.waiters += 1
        known = self.version if version is None else version
        update = Update(1, known, client, channel, sequence, chunk, change)
        self[target].feed(fx.ClientUpdate(self.waiters, update, self[target].keep(data)))
        return self.waiters

    def read(self, target: TargetId, chunk: ChunkId = CHUNK) -> QueryReply:
        table = self[target].table
        version = table.chain_version if table else 0
        look = Query(1, version, QueryKind.READ, chunk)
        return decide(self.now_ns, table, self[target].engine.index, look)

    def content(self, target: TargetId, chunk: ChunkId = CHUNK) -> bytes | None:
        """What is committed."""
        record = self[target].engine.index.records.get(chunk)
        return record.block.data if record is not None and record.block is not None else None

    def deliver(self, sent: MessageInTransit) -> None:
        machine = self[sent.target]
        machine.feed(fx.MessageFromPeer(sent.source, sent.message, machine.keep(sent.data)))

    def run(
        self, *, drop: Callable[[MessageInTransit], bool] = lambda _: False, idle: tuple[TargetId, ...] = ()
    ) -> list[MessageInTransit]:
        """Until nothing moves. Returns the messages that were dropped; the engines in `idle` do nothing."""
        dropped: list[MessageInTransit] = []
        while True:
            busy = [one for one in self.machines.values() if one.working and one.target not in idle]
            if self.in_transit:
                sent = self.in_transit.popleft()
                if drop(sent):
                    dropped.append(sent)
                else:
                    self.deliver(sent)
            elif busy:
                busy[0].work()
            else:
                return dropped

    def tick(self, after_ns: int) -> None:
        self.now_ns += after_ns
        for machine in self.machines.values():
            machine.feed(fx.Tick())


def refusal(rig: Rig, waiter: int) -> RefusalReason:
    reply = rig.replies[waiter]
    assert isinstance(reply, Refused), reply
    return reply.refusal


def is_put(sent: MessageInTransit) -> bool:
    return isinstance(sent.message, Request) and isinstance(sent.message.body, Put)


def is_answer(sent: MessageInTransit) -> bool:
    return isinstance(sent.message, Answer)


def is_done(sent: MessageInTransit) -> bool:
    return isinstance(sent.message, Request) and isinstance(sent.message.body, SyncDone)
