"""Performs what the machine of a client's requests decides, over the native ring. For one thread, without any waiting.

    begin ──> machine ──SendRequest──> ring  at once, where there is a connection that may be used
                                       held  else, until `connected`
    take(completions of the ring) ──> machine ──Finish──> done(result)

Connections are made by others (`connect` asks for one), who bring them with `connected` or say why not. On a new one
all capabilities are presented first, and it is used when they are granted: reads are answered by native threads, which
do not wait for what was said before. Where one is refused, the connection waits for another, which `ask_right` asks
for, or for `forget`. So it does where the life of one has passed: rights are renewed long before, but not by a machine
that is suspended, and the nodes would deny what its manager still allows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

from fireflyer.base.errors import DataCorruption, FireflyerError, error_from_wire
from fireflyer.fs.client.control.capabilities import Right
from fireflyer.fs.core.requests.effects import (
    AskRouting,
    Begin,
    CancelOperation,
    ConnectionLost,
    DataArrived,
    Effect,
    End,
    Finish,
    Limits,
    NewSession,
    QuerySpec,
    ReplyReceived,
    RoutingConfirmed,
    RoutingLearned,
    SendCorruptionHint,
    SendRequest,
    SessionOpened,
    SessionOver,
    Tick,
    Withdraw,
)
from fireflyer.fs.core.requests.state_machine import Requests
from fireflyer.fs.schema import data
from fireflyer.fs.schema.chunks import (
    Change,
    Missing,
    NotCommitted,
    Query,
    QueryKind,
    QueryReply,
    RefusalReason,
    Refused,
)
from fireflyer.fs.schema.ids import ChainId, ChunkId, ClientId, ContentId, NodeId
from fireflyer.fs.schema.routing import Node, Routing
from fireflyer.native import ChunkRing
from fireflyer.runtime.clock import BootClock
from fireflyer.runtime.driver import InlineDriver

__all__ = ["Dispatch", "Done", "Presented", "ReadStatus"]

_log = logging.getLogger(__name__)
Done: TypeAlias = Callable[[Any], None]
"""Called once, with `Finish.result`."""
Presented: TypeAlias = Callable[[FireflyerError | None], None]
_CLOCK: Final = BootClock()
_OWN_NUMBERS: Final = 1 << 62
"""Asks from this number on are not the machine's."""


class ReadStatus:
    """Of the ring's completions, as in `storage/wire/wire.hpp`."""

    LOST: Final = 0
    FOUND: Final = 1
    MISSING: Final = 2
    NOT_COMMITTED: Final = 3
    STALE: Final = 4
    DAMAGED: Final = 5
    DENIED: Final = 6
    USAGE: Final = 7


_REFUSED: Final = {
    ReadStatus.STALE: (
        RefusalReason.STALE,
        "the replica has another chain version or role; get the routing again",
    ),
    ReadStatus.DAMAGED: (RefusalReason.CORRUPT, "the data do not match their checksums"),
    ReadStatus.DENIED: (RefusalReason.DENIED, "no capability for this file was presented, or it has expired"),
    ReadStatus.USAGE: (RefusalReason.USAGE, "the node refused the read"),
}


@dataclass(slots=True)
class _Open:
    memory: memoryview | None
    done: Done


class _PresentedCapability(NamedTuple):
    """A capability on its way to a node. `presented`: who waits for the answer; nobody, where it is shown again."""

    right: Right
    capability: bytes
    presented: Presented | None
    shown_ns: int


@dataclass(slots=True)
class _Link:
    """To one process of a node. `server`: its number in the ring, None while it is being connected."""

    node: Node
    server: int | None = None
    presenting: dict[int, _PresentedCapability] = field(default_factory=dict)
    granted_ns: dict[Right, int] = field(default_factory=dict)
    """Until when, by `CLOCK_BOOTTIME`: nodes count the time in which this machine is suspended."""
    ends_ns: int = 0
    """No right that counts here ends before."""
    lacks: dict[Right, None] = field(default_factory=dict)
    """Rights that the node has refused, or whose life has passed, and that are asked for anew."""
    held: dict[int, SendRequest] = field(default_factory=dict)
    lost: bool = False
    """The ring has said so; what it said before that is taken first."""

    @property
    def usable(self) -> bool:
        return self.server is not None and not self.presenting and not self.lacks and not self.lost

    def ended(self, now_ns: int) -> list[Right]:
        """Rights whose life has passed; each once."""
        if now_ns < self.ends_ns or not self.granted_ns:
            return []
        ended = [right for right, until_ns in self.granted_ns.items() if until_ns <= now_ns]
        for right in ended:
            del self.granted_ns[right]
        self.ends_ns = min(self.granted_ns.values(), default=0)
        return ended


class Dispatch:
    def __init__(
        self, client: ClientId, *, limits: Limits, seed: int, connect: Callable[[Node], None],
        ask_routing: Callable[[], None], ask_right: Callable[[Right], None],
        exchange: Callable[[ClientId], None],
    ) -> None:  # fmt: skip
        """`connect`, `ask_routing`, `ask_right` and `exchange` (end this session, then open another) return at once;
        what comes of it is told by `connected`, `not_connected`, `learned`, `present`, `forget` and `exchanged`, in the
        thread of this object."""
        self.ring = ChunkRing()
        self._machine = Requests(client, limits, seed=seed)
        self._connect, self._ask_routing, self._ask_right = connect, ask_routing, ask_right
        self._exchange = exchange
        self._links: dict[NodeId, _Link] = {}
        self._of_server: dict[int, _Link] = {}
        self._open: dict[int, _Open] = {}
        self._reads: dict[int, int] = {}
        """Of asks under way, the ring's numbers."""
        self._capabilities: dict[Right, bytes] = {}
        self._operations = 0
        self._own = _OWN_NUMBERS
        self._submit = False
        self._feed = InlineDriver(self._machine, self._perform).feed
        self.changed = True
        """Routing or connections are others than when somebody set this to False."""

    @property
    def routing(self) -> Routing:
        return self._machine.routing

    @property
    def open(self) -> int:
        """Operations under way."""
        return len(self._open)

    @property
    def due_ns(self) -> int | None:
        """When `tick` is to be called, by `time.monotonic_ns`."""
        return self._machine.due_ns

    def servers(self) -> dict[NodeId, int]:
        """The ring's numbers of the connections that may be used now."""
        return {one: link.server for one, link in self._links.items() if link.usable and link.server is not None}

    # --- operations ---

    def begin(
        self, chain: ChainId, chunk: ChunkId, what: Change | QuerySpec, memory: memoryview | None, timeout_ns: int,
        done: Done, session: ClientId = 0,
    ) -> int:  # fmt: skip
        """The operation's number. It is sent with the next `flush`; `done` may be called before this returns.
        `session`: of an update that is for it alone."""
        self._operations += 1
        operation, now_ns = self._operations, time.monotonic_ns()
        self._open[operation] = _Open(memory, done)
        self._feed(Begin(operation, now_ns + timeout_ns, chain, chunk, what, session), now_ns)
        return operation

    def give_up(self, operation: int) -> None:
        """`done` will not be called, and the memory of a read is not touched any more."""
        if self._open.pop(operation, None) is not None:
            self._feed(CancelOperation(operation))
            self.flush()

    def flush(self) -> None:
        """Sends what was prepared."""
        if self._submit:
            self._submit = False
            self.ring.submit()

    def tick(self) -> None:
        self._feed(Tick())
        self.flush()

    def end(self, reason: str) -> None:
        """The session is over: all that is open fails."""
        self._feed(End(reason))

    def close(self) -> None:
        self.end("the client was closed")
        self.ring.close()

    # --- routing and connections ---

    def learned(self, routing: Routing) -> None:
        self.changed = True
        nodes = {one.id: one for one in routing.nodes}
        for node_id, link in list(self._links.items()):
            if nodes.get(node_id) != link.node:  # another process has the node
                self._drop(link, "the storage process was restarted")
        self._feed(RoutingLearned(routing))
        self.flush()

    def confirmed(self, asked_ns: int) -> None:
        """The primary was asked then, by `time.monotonic_ns`, and all that it knew has been learned."""
        self._feed(RoutingConfirmed(asked_ns))
        self.flush()

    def connected(self, node: Node, fd: int) -> None:
        """`fd`: authenticated, and the ring's from now on."""
        link = self._links.get(node.id)
        server = self.ring.add(fd)
        if link is None or link.node != node or link.server is not None:
            self.ring.remove(server)
            return
        link.server = server
        self._of_server[server] = link
        for right in self._capabilities:
            self._present(link, right, None)
        self._release(link)
        self.flush()

    def not_connected(self, node: Node, error: FireflyerError) -> None:
        link = self._links.get(node.id)
        if link is not None and link.node == node and link.server is None:
            del self._links[node.id]
            self._feed(ConnectionLost(node.id, sent=False, reason=str(error)))
            self.flush()

    def warm(self) -> None:
        """Asks for connections with all nodes that there are."""
        for node in self.routing.nodes:
            self._link(node.id)

    def present(self, right: Right, capability: bytes, presented: Presented | None = None) -> None:
        """On all connections, now and later, in the place of the one before. `presented`: with the first refusal, or
        None when all have granted it."""
        self._capabilities[right] = capability
        if presented is None:
            for link in [one for one in self._links.values() if one.server is not None]:
                self._present(link, right, None)
            self.flush()
        else:
            self._present_to_all(right, presented)

    def _present_to_all(self, right: Right, presented: Presented) -> None:
        waits = [link for link in self._links.values() if link.server is not None]
        if not waits:
            presented(None)
            return
        answers: list[FireflyerError | None] = []

        def answered(error: FireflyerError | None) -> None:
            answers.append(error)
            if len(answers) == len(waits):
                presented(next((one for one in answers if one is not None), None))

        for link in waits:
            self._present(link, right, answered)
        self.flush()

    def forget(self, right: Right) -> None:
        """There is no such right any more."""
        self._capabilities.pop(right, None)
        for link in list(self._links.values()):
            link.lacks.pop(right, None)
            link.granted_ns.pop(right, None)
            self._release(link)
        self.flush()

    def over(self, client: ClientId) -> None:
        """The manager says that the session of this client is over."""
        self._feed(SessionOver(client))
        self.flush()

    def exchanged(self, client: ClientId, capabilities: Mapping[Right, bytes]) -> None:
        """There is another session, with these rights and no others."""
        for link in self._links.values():
            link.granted_ns.clear()
        for right in [one for one in self._capabilities if one not in capabilities]:
            self.forget(right)
        for right, capability in capabilities.items():
            self.present(right, capability)
        self._feed(SessionOpened(client))
        self.flush()

    def _present(self, link: _Link, right: Right, presented: Presented | None) -> None:
        self._own += 1
        capability = self._capabilities[right]
        link.presenting[self._own] = _PresentedCapability(right, capability, presented, _CLOCK.now_ns())
        link.lacks.pop(right, None)
        self._say(link, data.DataRequest(self._own, data.Present(capability)), None)

    def _link(self, node_id: NodeId) -> _Link | None:
        link = self._links.get(node_id)
        if link is None:
            node = next((one for one in self.routing.nodes if one.id == node_id), None)
            if node is None:
                return None
            link = self._links[node_id] = _Link(node)
            self._connect(node)
        return link

    def _drop(self, link: _Link, reason: str) -> None:
        """What the ring still says of it is nobody's."""
        self.changed = True
        del self._links[link.node.id]
        sent = link.server is not None
        if link.server is not None:
            del self._of_server[link.server]
            self.ring.remove(link.server)
        for shown in link.presenting.values():
            if shown.presented is not None:
                shown.presented(None)
        self._feed(ConnectionLost(link.node.id, sent=sent, reason=reason))

    # --- effects ---

    def _perform(self, effect: Effect) -> None:
        match effect:
            case SendRequest(ask, _, node):
                link = self._link(node)
                if link is None:
                    self._feed(ConnectionLost(node, sent=False, reason="the node is not in the routing"))
                elif self._may_use(link):
                    self._ask(link, effect)
                else:
                    link.held[ask] = effect
            case Finish(operation, result):
                opened = self._open.pop(operation, None)
                if opened is not None:
                    opened.done(result)
            case Withdraw(ask):
                self._withdraw(ask)
            case AskRouting():
                self._ask_routing()
            case NewSession(client):
                _log.info("the session is replaced by another one client=%d", client)
                self._exchange(client)
            case SendCorruptionHint(node, _, chain, chunk):
                link = self._links.get(node)
                if link is not None and link.usable:
                    self._own += 1
                    self._say(link, data.DataRequest(self._own, data.CorruptionHint(chain, chunk)), None)

    def _ask(self, link: _Link, ask: SendRequest) -> None:
        opened, body = self._open.get(ask.operation), ask.body
        if opened is None or link.server is None:
            return
        if isinstance(body, Query) and body.kind is QueryKind.READ:
            chunk = body.chunk
            self._reads[ask.ask] = self.ring.prepare_read(
                link.server, ask.ask, body.chain, body.chain_version, chunk.file, chunk.index, body.offset,
                body.length, opened.memory if opened.memory is not None else bytearray(),
            )  # fmt: skip
            self._submit = True
        else:
            self._say(link, data.DataRequest(ask.ask, body), opened.memory)

    def _say(self, link: _Link, message: data.DataRequest, memory: memoryview | None) -> None:
        if link.server is not None and not link.lost:
            self.ring.prepare_message(link.server, data.encode(message), memory)
            self._submit = True

    def _withdraw(self, ask: int) -> None:
        read = self._reads.pop(ask, None)
        if read is not None:
            self.ring.cancel(read)
        for link in self._links.values():
            link.held.pop(ask, None)

    def _may_use(self, link: _Link) -> bool:
        """Now; else what is held for it is released later."""
        if link.usable:
            for right in link.ended(_CLOCK.now_ns()):
                _log.info("a capability expired node=%s files=%d to %d", link.node.id, *right[:2])
                self.changed = True
                link.lacks[right] = None
                self._ask_right(right)
        return link.usable

    def _release(self, link: _Link) -> None:
        if self._may_use(link):
            self.changed = True
            held, link.held = link.held, {}
            for ask in held.values():
                self._ask(link, ask)

    # --- completions ---

    def take(self, completions: Sequence[tuple[Any, ...]]) -> None:
        """Those of one `ring.wait`, but for the packed ones."""
        for completion in completions:
            if completion[0] == "lost" and (link := self._of_server.get(completion[1])) is not None:
                link.lost = True  # what is answered before the loss still counts, but nothing more can be said there
        for completion in completions:
            self._take(completion)

    def _take(self, completion: tuple[Any, ...]) -> None:
        kind = completion[0]
        if kind == "read":
            _, ask, status, length, made_in, version, chunk_length, chain_version, where, crc = completion
            if self._reads.pop(ask, None) is not None and status != ReadStatus.LOST:
                content = ContentId(made_in, version)
                reply = read_reply(status, length, content, chunk_length, chain_version, where, crc)
                self._feed(ReplyReceived(ask, reply))
        elif kind == "message":
            link = self._of_server.get(completion[1])
            if link is not None:
                self._hear(link, completion[2])
        elif kind == "lost":
            link = self._of_server.get(completion[1])
            if link is not None:
                _log.info("connection lost node=%s reason=%s", link.node.id, completion[2])
                self._drop(link, completion[2])

    def _hear(self, link: _Link, body: bytes) -> None:
        try:
            message = data.decode(body)
            if not isinstance(message, data.DataReply):
                raise DataCorruption("the node sent a message that only clients or replicas send")
        except DataCorruption as error:
            self._drop(link, f"the node sent a malformed message: {error}")
            return
        if message.number >= _OWN_NUMBERS:
            self._answered(link, message)
        elif not isinstance(message.body, data.Granted):
            self._feed(ReplyReceived(message.number, message.body))

    def _answered(self, link: _Link, message: data.DataReply) -> None:
        if message.number not in link.presenting:
            return
        shown = link.presenting.pop(message.number)
        right, error = shown.right, None
        if isinstance(message.body, data.Granted):
            if right in self._capabilities:
                # Not from now on: the node has counted since it had the question.
                link.granted_ns[right] = shown.shown_ns + message.body.left_ns
                link.ends_ns = min(link.granted_ns.values())
        elif isinstance(message.body, Refused):
            error = error_from_wire(message.body.refusal.value, message.body.message)
            _log.warning("a capability was refused node=%s reason=%s", link.node.id, error)
            newest = self._capabilities.get(right) == shown.capability
            if message.body.refusal is RefusalReason.DENIED and newest and shown.presented is None:
                if link.granted_ns.get(right, 0) <= _CLOCK.now_ns():
                    link.lacks[right] = None
                self._ask_right(right)
        if shown.presented is not None:
            shown.presented(error)
        self._release(link)


def read_reply(
    status: int, length: int, content: ContentId, chunk_length: int, chain_version: int, where: int, crc: int
) -> QueryReply | DataArrived:
    """What a completion of the ring says to the machine."""
    if status == ReadStatus.FOUND:
        return DataArrived(length, content, chunk_length, crc)
    if status == ReadStatus.MISSING:
        return Missing()
    if status == ReadStatus.NOT_COMMITTED:
        return NotCommitted(where)
    refusal, message = _REFUSED.get(status, _REFUSED[ReadStatus.USAGE])
    return Refused(refusal, message, chain_version)
