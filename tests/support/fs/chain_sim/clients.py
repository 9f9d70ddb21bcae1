"""Clients of a simulated chain: they update and read chunks, retry as real ones do, and write down what they saw."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from tests.support.fs.chain_sim.engine_model import changed

from fireflyer.base.units import MS
from fireflyer.fs.schema import manager
from fireflyer.fs.schema.chunks import (
    Change,
    Done,
    Found,
    Missing,
    NotCommitted,
    Operation,
    Query,
    QueryKind,
    QueryReply,
    Refused,
    Update,
    UpdateReply,
)
from fireflyer.fs.schema.ids import ChunkId, TargetId
from fireflyer.fs.schema.routing import Chain, TargetState
from fireflyer.native import crc32c
from fireflyer.sim import SimNode, Timer
from fireflyer.sim.linearizability import HistoryOperation

__all__ = ["Client", "Histories", "State", "Wire"]

ATTEMPT_NS = 150 * MS
DEADLINE_NS = 1500 * MS
State = tuple[bytes | None]
"""Of one chunk: its content, None when it is absent. (The checker's states are never None themselves.)"""
Wire = Callable[[TargetId, msgspec.Struct, bytes, int], None]
"""(target, message, data, number of the request): sends to the node of the target; 0 is the manager."""


@dataclass
class Histories:
    """Of each chunk, what was seen of it."""

    of: dict[ChunkId, list[HistoryOperation[State]]] = field(default_factory=dict)
    updates: int = 0
    reads: int = 0
    unknown: int = 0

    def update(
        self,
        label: str,
        chunk: ChunkId,
        change: Change,
        data: bytes,
        begun_ns: int,
        ended_ns: int | None,
        done: Done | None,
    ) -> None:
        def apply(state: State) -> State | None:
            after = changed(state[0], change, data)
            if done is not None and done.held is not None:
                fits = after is not None and (len(after), crc32c(after)) == (done.held.length, done.held.crc)
                return (after,) if fits else None
            return (after,)

        self.updates += done is not None
        self.unknown += done is None
        self.of.setdefault(chunk, []).append(HistoryOperation(label, begun_ns, ended_ns, apply))

    def read(self, label: str, chunk: ChunkId, content: bytes | None, begun_ns: int, ended_ns: int) -> None:
        def apply(state: State) -> State | None:
            return state if state[0] == content else None

        self.reads += 1
        label = f"{label} {content!r}"
        self.of.setdefault(chunk, []).append(HistoryOperation(label, begun_ns, ended_ns, apply, observes=True))

    def stat(self, label: str, chunk: ChunkId, sizes: tuple[int, int] | None, begun_ns: int, ended_ns: int) -> None:
        def apply(state: State) -> State | None:
            content = state[0]
            return state if sizes == (None if content is None else (len(content), crc32c(content))) else None

        self.reads += 1
        label = f"{label} {sizes}"
        self.of.setdefault(chunk, []).append(HistoryOperation(label, begun_ns, ended_ns, apply, observes=True))


@dataclass
class _Call:
    """One operation of a channel, in its attempts. `change` is None for a look."""

    channel: int
    chunk: ChunkId
    begun_ns: int
    change: Change | None = None
    data: bytes = b""
    sequence: int = 0
    kind: QueryKind = QueryKind.READ
    asks: TargetId = 0
    number: int = 0
    timer: Timer | None = None


class Client:
    """`channels` channels for updates, and one more that reads; each does `count` operations, one after the other."""

    def __init__(
        self,
        node: SimNode,
        number: int,
        wire: Wire,
        chain: Chain,
        histories: Histories,
        *,
        chunks: list[ChunkId],
        channels: int,
        count: int,
        span_ns: int,
    ) -> None:
        self._node, self._number, self._wire, self._chain, self._histories = node, number, wire, chain, histories
        self._chunks, self._rng = chunks, node.world.fork_random(f"client {number}")
        self._left = [count] * (channels + 1)
        self._readers = channels
        self._sequences = [0] * channels
        self._requests = 0
        self._calls: dict[int, _Call] = {}
        self._pause_ns = span_ns // count
        for channel in range(channels + 1):
            self._think(channel)

    @property
    def finished(self) -> bool:
        return not self._calls and not any(self._left)

    def hurry(self) -> None:
        """What was not begun is not."""
        self._left = [min(left, 1) for left in self._left]

    def _think(self, channel: int) -> None:
        self._node.after(self._rng.randrange(2 * self._pause_ns), lambda: self._begin(channel))

    def _begin(self, channel: int) -> None:
        if not self._left[channel]:
            return
        self._left[channel] -= 1
        chunk = self._chunks[0] if self._rng.random() < 0.5 else self._rng.choice(self._chunks)
        call = _Call(channel, chunk, self._node.world.now_ns)
        if channel < self._readers:
            self._sequences[channel] += 1
            call.sequence = self._sequences[channel]
            call.change, call.data = _some_change(self._rng, f"{self._number}{channel}{call.sequence:02d}")
        elif self._rng.random() < 0.3:
            call.kind = QueryKind.STAT
        self._attempt(call)

    def _attempt(self, call: _Call) -> None:
        self._requests += 1
        call.number = self._requests
        self._calls[call.number] = call
        call.timer = self._node.after(ATTEMPT_NS, lambda: self._late(call))
        serving = [one.target for one in self._chain.members if one.state is TargetState.SERVING]
        if not serving:
            self._wire(0, self._chain, b"", 0)
            return
        if call.change is not None:
            update = Update(
                self._chain.id, self._chain.version, self._number, call.channel, call.sequence, call.chunk, call.change
            )
            self._wire(serving[0], update, call.data, call.number)
            return
        target = call.asks if call.asks in serving else self._rng.choice(serving)
        self._wire(target, Query(self._chain.id, self._chain.version, call.kind, call.chunk), b"", call.number)

    def _late(self, call: _Call) -> None:
        del self._calls[call.number]
        self._wire(0, self._chain, b"", 0)
        self._again(call, 0)

    def _again(self, call: _Call, delay_ns: int) -> None:
        if self._node.world.now_ns - call.begun_ns < DEADLINE_NS:
            self._calls[-call.channel - 1] = call
            self._node.after(delay_ns, lambda: self._attempt(self._calls.pop(-call.channel - 1)))
            return
        if call.change is not None:
            self._histories.update(self._label(call), call.chunk, call.change, call.data, call.begun_ns, None, None)
        self._think(call.channel)

    def told(self, number: int, answer: manager.Answer) -> None:
        """It asks no manager."""

    def routing(self, chain: Chain) -> None:
        if chain.version > self._chain.version:
            self._chain = chain

    def reply(self, number: int, reply: UpdateReply | QueryReply, data: bytes) -> None:
        call = self._calls.pop(number, None)
        if call is None:
            return
        assert call.timer is not None
        call.timer.cancel()
        now_ns, label = self._node.world.now_ns, self._label(call)
        call.asks = 0
        match reply:
            case Done():
                assert call.change is not None
                self._histories.update(label, call.chunk, call.change, call.data, call.begun_ns, now_ns, reply)
            case Found((entry,)) if call.kind is QueryKind.STAT:
                assert entry.held is not None
                self._histories.stat(label, call.chunk, (entry.held.length, entry.held.crc), call.begun_ns, now_ns)
            case Found((entry,)):
                assert entry.held is not None
                assert crc32c(data) == entry.held.crc, "a replica sent what does not match its checksum"
                self._histories.read(label, call.chunk, data, call.begun_ns, now_ns)
            case Missing() if call.kind is QueryKind.STAT:
                self._histories.stat(label, call.chunk, None, call.begun_ns, now_ns)
            case Missing():
                self._histories.read(label, call.chunk, None, call.begun_ns, now_ns)
            case NotCommitted(tail):
                call.asks = tail
                self._again(call, self._rng.randrange(1, 5) * MS)
                return
            case Refused():
                self._wire(0, self._chain, b"", 0)
                self._again(call, self._rng.randrange(5, 50) * MS)
                return
        self._think(call.channel)

    def _label(self, call: _Call) -> str:
        what = call.kind.value if call.change is None else f"{call.change.operation.value} {call.data!r}"
        return f"client {self._number}/{call.channel} #{call.sequence} {what}"


def _some_change(rng: random.Random, name: str) -> tuple[Change, bytes]:
    data = name.encode() * rng.randrange(1, 3)
    kind = rng.random()
    if kind < 0.15:
        return Change(Operation.REMOVE), b""
    if kind < 0.25:
        return Change(Operation.TRUNCATE, 0, rng.randrange(12)), b""
    offset = 0 if kind < 0.6 else rng.randrange(16)
    return Change(Operation.WRITE, offset, len(data), crc32c(data)), data
