"""The machine of real clients before simulated replicas: what it says about each operation must explain what is seen.

A failure that is not a `Timeout` says that the update was not done and never will be, so it is left out of the history.
One whose outcome is unknown may be done at any time, but not after a later update of the same client and chunk is done.
Connections break now and then; what had been sent may arrive all the same.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import msgspec
from tests.support.fs.chain_sim.clients import Histories, Wire, _some_change
from tests.support.fs.chain_sim.managed import ManagedWorld
from tests.support.fs.chain_sim.world import AnyClient, ReplicaWorld

from fireflyer.base.errors import Timeout
from fireflyer.base.units import MS
from fireflyer.fs.core.requests.effects import (
    AskRouting,
    Begin,
    CancelOperation,
    ConnectionLost,
    Effect,
    Event,
    Failed,
    Finish,
    Limits,
    NewSession,
    QuerySpec,
    ReplyReceived,
    RoutingLearned,
    SendRequest,
    SessionOpened,
    SessionOver,
    Tick,
)
from fireflyer.fs.core.requests.state_machine import Requests
from fireflyer.fs.schema import manager
from fireflyer.fs.schema.chunks import Change, ChunkVersion, Done, Found, QueryKind, QueryReply, UpdateReply
from fireflyer.fs.schema.ids import ChunkId, ClientId
from fireflyer.fs.schema.routing import Chain, Routing
from fireflyer.fs.schema.sessions import EndSession, KeepSession, OpenSession, Session
from fireflyer.fs.schema.sessions import SessionOver as SessionIsOver
from fireflyer.native import crc32c
from fireflyer.sim import SimNode, Timer

__all__ = ["LIMITS", "ExchangingClient", "RequestClient", "RequestWorld", "WholeWorld", "run_seed"]

LIMITS = Limits(
    channels=2, node_asks=2, senders=1, large_bytes=64, grant_bytes=200, grant_ns=30 * MS, attempt_ns=150 * MS,
    pause_ns=4 * MS, max_pause_ns=60 * MS, suspect_ns=100 * MS, routing_ns=20 * MS,
)  # fmt: skip
DEADLINES_NS = [10 * MS, 300 * MS, 1500 * MS]
GIVES_UP = 0.04
"""Of operations, by the caller, before the end."""
BREAKS = 0.02
"""Of asks, with the whole connection, some time after."""
ENDED = 0.03
"""The chance of a session, with each operation, to be ended by an administrator."""
READ_BYTES = 64


@dataclass
class _Call:
    worker: int
    chunk: ChunkId
    begun_ns: int
    what: Change | QuerySpec
    data: bytes


class RequestClient:
    """`channels` workers that update, and two that look, each `count` operations one after the other."""

    machine_type: type[Requests] = Requests
    limits: Limits = LIMITS
    looks: tuple[QueryKind, ...] = (QueryKind.READ, QueryKind.STAT, QueryKind.LAST, QueryKind.LIST)

    def __init__(
        self, node: SimNode, number: int, wire: Wire, chain: Chain, histories: Histories, *, chunks: list[ChunkId],
        channels: int, count: int, span_ns: int,
    ) -> None:  # fmt: skip
        self._node, self._number, self._wire, self._histories = node, number, wire, histories
        self._chunks, self._rng = chunks, node.world.fork_random(f"client {number}")
        self._chain = chain
        self._machine = self.machine_type(number, self.limits, seed=self._rng.getrandbits(64))
        self._writers, self._left = channels, [count] * (channels + 2)
        self._pause_ns = span_ns // count
        self._calls: dict[int, _Call] = {}
        self._numbers = 0
        self._asked: dict[int, int] = {}
        self._data: dict[int, bytes] = {}
        self._unknown: dict[ChunkId, list[int]] = {}
        """Of a chunk, places in its history of updates that were given up."""
        self._timer: Timer | None = None
        self.exchanges = 0
        """Sessions that were exchanged for others."""
        self.ended = 0
        self._insists: msgspec.Struct | None = None
        self.client: ClientId = number
        self.routing(chain)
        for worker in range(len(self._left)):
            self._think(worker)

    @property
    def finished(self) -> bool:
        return not self._calls and not any(self._left)

    def hurry(self) -> None:
        """What was not begun is not."""
        self._left = [min(left, 1) for left in self._left]

    def routing(self, chain: Chain) -> None:
        self._feed(RoutingLearned(Routing(chain.version, chains=(chain,))))

    def reply(self, number: int, reply: UpdateReply | QueryReply, data: bytes) -> None:
        operation = self._asked.get(number)
        if operation is not None:
            self._data[operation] = data
            self._feed(ReplyReceived(number, reply))

    def told(self, number: int, answer: manager.Answer) -> None:
        """By a manager."""
        if isinstance(answer, SessionIsOver):
            self._feed(SessionOver(answer.client))
        if number != self.exchanges or self._insists is None:
            return
        if isinstance(self._insists, EndSession) and isinstance(answer, manager.Done):
            self._retry(OpenSession(f"client {self._number} {self.exchanges}"))
        elif isinstance(self._insists, OpenSession) and isinstance(answer, Session):
            self._insists, self.client = None, answer.client
            self._feed(SessionOpened(answer.client))

    def ask_routing(self) -> None:
        self._wire(0, self._chain, b"", 0)

    def exchange(self, client: ClientId) -> None:
        self.exchanges += 1
        self._retry(EndSession(client))

    def _retry(self, request: msgspec.Struct) -> None:
        self._insists = request
        self._ask_again(request)

    def _ask_again(self, request: msgspec.Struct) -> None:
        if self._insists is request:
            self._wire(0, request, b"", self.exchanges)
            self._node.after(50 * MS, lambda: self._ask_again(request))

    # --- work ---

    def _think(self, worker: int) -> None:
        self._node.after(self._rng.randrange(2 * self._pause_ns), lambda: self._begin(worker))

    def _begin(self, worker: int) -> None:
        if not self._left[worker]:
            return
        self._left[worker] -= 1
        self._numbers += 1
        operation, now_ns = self._numbers, self._node.world.now_ns
        chunk = self._chunks[0] if self._rng.random() < 0.5 else self._rng.choice(self._chunks)
        what: Change | QuerySpec = _some_query(self._rng, self.looks)
        data = b""
        if worker < self._writers:
            what, data = _some_change(self._rng, f"{self._number}{worker}{operation:02d}")
        self._calls[operation] = _Call(worker, chunk, now_ns, what, data)
        deadline_ns = now_ns + self._rng.choice(DEADLINES_NS)
        if self._rng.random() < GIVES_UP:
            self._node.after(self._rng.randrange(50) * MS, lambda: self._give_up(operation))
        self._feed(Begin(operation, deadline_ns, self._chain.id, chunk, what))

    def _give_up(self, operation: int) -> None:
        call = self._calls.pop(operation, None)
        if call is not None:
            self._feed(CancelOperation(operation))
            self._record(operation, call, Failed(Timeout.code, "given up"))
            self._think(call.worker)

    # --- the machine ---

    def _feed(self, event: Event) -> None:
        for effect in self._machine.handle(self._node.world.now_ns, event):
            self._perform(effect)
        assert self._machine.senders <= LIMITS.senders
        if self._timer is not None:
            self._timer.cancel()
        due_ns = self._machine.due_ns
        if due_ns is not None:
            self._timer = self._node.after(max(0, due_ns - self._node.world.now_ns), lambda: self._feed(Tick()))

    def _perform(self, effect: Effect) -> None:
        match effect:
            case SendRequest(ask, operation, node, target, body):
                self._asked[ask] = operation
                self._wire(target, body, self._calls[operation].data, ask)
                if self._rng.random() < BREAKS:
                    self._node.after(self._rng.randrange(30) * MS, lambda: self._feed(ConnectionLost(node)))
            case NewSession(client):
                self.exchange(client)
            case AskRouting():
                self.ask_routing()
            case Finish(operation, result):
                call = self._calls.pop(operation, None)
                if call is not None:
                    self._record(operation, call, result)
                    self._think(call.worker)
            case _:
                pass

    # --- what was seen ---

    def _record(self, operation: int, call: _Call, result: msgspec.Struct) -> None:
        what, now_ns = call.what, self._node.world.now_ns
        label = f"client {self._number}/{call.worker} {what} {call.data!r}"
        if isinstance(what, Change):
            self._record_update(label, call, what, result, now_ns)
        elif not isinstance(result, Failed):
            self._record_look(label, call, what, result, self._data.get(operation, b""), now_ns)

    def _record_update(self, label: str, call: _Call, what: Change, result: msgspec.Struct, now_ns: int) -> None:
        histories, chunk = self._histories, call.chunk
        if isinstance(result, Done):
            histories.update(label, chunk, what, call.data, call.begun_ns, now_ns, result)
            for at in self._unknown.pop(chunk, []):
                histories.of[chunk][at] = replace(histories.of[chunk][at], returned_ns=now_ns, maybe=True)
        elif isinstance(result, Failed) and result.code == Timeout.code:
            histories.update(label, chunk, what, call.data, call.begun_ns, None, None)
            self._unknown.setdefault(chunk, []).append(len(histories.of[chunk]) - 1)

    def _record_look(
        self, label: str, call: _Call, what: QuerySpec, result: msgspec.Struct, data: bytes, now_ns: int
    ) -> None:
        entries = result.entries if isinstance(result, Found) else ()
        found = {one.chunk: one.held for one in entries}
        if what.kind is QueryKind.READ:
            content = data if call.chunk in found else None
            held = found.get(call.chunk)
            assert held is None or crc32c(data) == held.crc, "a replica sent what does not match its checksum"
            self._histories.read(label, call.chunk, content, call.begun_ns, now_ns)
            return
        if what.kind is QueryKind.CHAIN:  # nothing is said of what is under way
            said = [one for one in self._chunks if one >= call.chunk and found.get(one, one) is not None]
        else:
            said = self._seen(what.kind, call.chunk, list(found))
        for chunk in said:
            self._histories.stat(label, chunk, _sizes(found.get(chunk)), call.begun_ns, now_ns)

    def _seen(self, kind: QueryKind, chunk: ChunkId, found: list[ChunkId]) -> list[ChunkId]:
        """Of which chunks this answer says something."""
        of_file = [one for one in self._chunks if one.file == chunk.file]
        if kind is QueryKind.STAT:
            return [chunk]
        if kind is QueryKind.LIST:
            return [one for one in of_file if one >= chunk]
        return [one for one in of_file if one <= chunk and (not found or one >= found[0])]


def _sizes(held: ChunkVersion | None) -> tuple[int, int] | None:
    return None if held is None else (held.length, held.crc)


def _some_query(rng: random.Random, looks: tuple[QueryKind, ...]) -> QuerySpec:
    kind = rng.choice([QueryKind.READ, QueryKind.READ, QueryKind.READ, *looks])
    return QuerySpec(kind, 0, READ_BYTES if kind is QueryKind.READ else 100)


class _RealClients(ReplicaWorld):
    """Its clients are the real machine. Their connections neither alter nor repeat what is sent."""

    make_client = RequestClient

    def _client(self, number: int) -> AnyClient:
        client = super()._client(number)
        slow_probability = self.rng.choice([self.link.slow_probability, 0.2])
        link = msgspec.structs.replace(self.link, duplication=0.0, slow_probability=slow_probability)
        for node in self.nodes:
            self.net.set_link(f"c{number}", node.node.name, link)
            self.net.set_link(node.node.name, f"c{number}", link)
        return client


class RequestWorld(_RealClients):
    """Real clients and real replicas."""


class ListingClient(RequestClient):
    """Half of what it looks at are pages of all chunks of the chain."""

    looks = (QueryKind.CHAIN,) * 3


class ListedWorld(_RealClients):
    make_client = ListingClient


class ExchangingClient(RequestClient):
    """Exchanges its session for another one after each update of unknown outcome, and when somebody has ended it."""

    limits = msgspec.structs.replace(LIMITS, unknown=1)

    def ask_routing(self) -> None:
        super().ask_routing()
        self._wire(0, KeepSession(self.client, 1 << 40), b"", 0)

    def _begin(self, worker: int) -> None:
        super()._begin(worker)
        if self._rng.random() < ENDED:
            self.ended += 1
            self._wire(0, EndSession(self.client), b"", 0)


class WholeWorld(_RealClients, ManagedWorld):
    """Real managers and storage processes too."""

    make_client = ExchangingClient


def run_seed(seed: int, world_type: type[ReplicaWorld] = RequestWorld) -> ReplicaWorld:
    """Raises what the checkers find."""
    world = world_type(seed)
    world.plan_faults()
    world.run()
    world.check()
    return world
