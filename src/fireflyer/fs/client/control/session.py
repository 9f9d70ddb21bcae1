"""A client's session at the manager, the routing it learns there, and its connections to nodes. For asyncio."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, Protocol

from fireflyer.base.errors import (
    FireflyerError,
    InvariantViolation,
    PermissionDenied,
    StaleVersion,
    TransientError,
    UsageError,
)
from fireflyer.base.units import MS, SECOND
from fireflyer.fs.client.control.capabilities import Renewals, Right
from fireflyer.fs.control import ManagerClient
from fireflyer.fs.core.routing import apply_delta
from fireflyer.fs.schema import data
from fireflyer.fs.schema.ids import ClientId, TableId
from fireflyer.fs.schema.manager import Answer, GetMetaServices, MetaServices, Request
from fireflyer.fs.schema.routing import Node, Routing, RoutingDelta
from fireflyer.fs.schema.sessions import (
    CapabilityAnswer,
    EndSession,
    GetCapability,
    KeepSession,
    OpenSession,
    Session,
    SessionKept,
    SessionOver,
)
from fireflyer.identity.handshake import Credential
from fireflyer.runtime.raw_connections import connect_raw

__all__ = ["ControlEvents", "ManagerSession"]

_log = logging.getLogger(__name__)
_BEATS_PER_LIFETIME: Final = 8
_CONNECT_NS: Final = 3 * SECOND
_ROUTING_NS: Final = 5 * SECOND
_CLOSE_NS: Final = 500 * MS
_TABLE_S: Final = 5.0
_TABLE_PAUSE_S: Final = 0.05


class ControlEvents(Protocol):
    """Called in the loop."""

    def learned(self, routing: Routing) -> None: ...
    def confirmed(self, asked_ns: int) -> None: ...
    def connected(self, node: Node, fd: int) -> None: ...
    def not_connected(self, node: Node, error: FireflyerError) -> None: ...
    def renewed(self, right: Right, capability: bytes) -> None: ...
    def denied(self, right: Right) -> None: ...
    def over(self, client: ClientId) -> None: ...
    def exchanged(self, client: ClientId, capabilities: Mapping[Right, bytes]) -> None: ...
    def end(self, reason: str) -> None: ...


class ManagerSession:
    def __init__(self, managers: Sequence[str], credential: Credential, *, name: str = "") -> None:
        self._managers = ManagerClient(managers, credential)
        self._addresses = tuple(managers)
        self._credential = credential
        self._name = name or f"{socket.gethostname()}/{os.getpid()}"
        self._routing = Routing(0)
        self._session: Session | None = None
        self._exchange_lock = asyncio.Lock()
        """Held while there is no session, or another one."""
        self._hears: ControlEvents | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._keeping: asyncio.Task[None] | None = None
        self._answered = True
        self._evicted: ClientId = 0
        self.on_exchange: list[Callable[[], None]] = []
        """Called in the loop when there is another session, before anybody uses it."""
        self.rights = Renewals(self.capability, spawn=self.spawn, renewed=self._renewed, denied=self._denied)

    async def open(self, timeout_ns: int) -> Session:
        """Opens the session. Raises `Timeout` when no manager answers as primary, `PermissionDenied`."""
        answer = await self._managers.ask(self._opening(), timeout_ns=timeout_ns)
        if not isinstance(answer, Session):
            raise InvariantViolation(f"the manager answered OpenSession with {type(answer).__name__}")
        self._session = answer
        return answer

    @property
    def client(self) -> ClientId:
        """Of the session as it is now."""
        if self._session is None:
            raise UsageError("open the session first")
        return self._session.client

    @property
    def credential(self) -> Credential:
        return self._credential

    @property
    def managers(self) -> ManagerClient:
        return self._managers

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of the managers."""
        return self._addresses

    async def meta_services(self) -> tuple[str, ...]:
        """Addresses of those who serve files. Raises `Timeout`, `PermissionDenied`."""
        answer = await self._managers.ask(GetMetaServices())
        if not isinstance(answer, MetaServices):
            raise InvariantViolation(f"the manager answered GetMetaServices with {type(answer).__name__}")
        return answer.addresses

    @property
    def exchanging(self) -> bool:
        """One session is over, and there is no other yet."""
        return self._exchange_lock.locked()

    def _opening(self) -> OpenSession:
        return OpenSession(secrets.token_hex(16), self._name[:128])

    def exchange(self, client: ClientId) -> None:
        """Ends the session of this client, and opens another when it is over: `exchanged`, or `end`."""
        self.spawn(self._exchange(client))

    async def _exchange(self, client: ClientId) -> None:
        if self._hears is None:
            return
        async with self._exchange_lock:
            try:
                session, capabilities = await self._another(client)
            except FireflyerError as error:
                self._hears.end(f"the session expired, and no other can be opened: {error}")
                return
        for tell in self.on_exchange:
            tell()
        self._hears.exchanged(session.client, capabilities)
        self.want_routing()

    async def _another(self, client: ClientId) -> tuple[Session, dict[Right, bytes]]:
        """And its rights. Nobody keeps it before that, so it may be over by then; then there is another one."""
        while True:
            # In this order, and each only when the one before is committed: see `core.requests.channels`.
            await self._retry(EndSession(client))
            answer = await self._retry(self._opening())
            if not isinstance(answer, Session):
                raise InvariantViolation(f"the manager answered OpenSession with {type(answer).__name__}")
            self._session = answer
            try:
                return answer, await self.rights.anew(self._capability)
            except StaleVersion as error:
                _log.warning("the new session is replaced as well reason=%s", error)
                client = answer.client

    async def _retry(self, request: Request) -> Answer:
        while True:
            try:
                return await self._managers.ask(request)
            except TransientError as error:
                _log.warning("the session is not replaced yet reason=%s", error)

    def start(self, hears: ControlEvents) -> None:
        """From now on the session is kept, and routing is told."""
        self._hears = hears
        self.spawn(self._heartbeats())

    def want_routing(self) -> None:
        if self._keeping is None:
            self._keeping = self.spawn(self._keep())

    def evicted(self, client: ClientId) -> None:
        """A service does nothing for this session any more, though it lives: there is to be another one."""
        session = self._session
        if self._hears is None or session is None or session.client != client or self._exchange_lock.locked():
            return
        if self._evicted != client:
            self._evicted = client
            _log.warning(
                "session expired: no heartbeat reached a manager in time client=%d; opening another one", client
            )
            self._hears.over(client)

    async def learn_table(self, table: TableId) -> None:
        """Waits until the routing has this chain table, but for some seconds only: a service may know it first."""
        until_s = time.monotonic() + _TABLE_S
        while all(one.id != table for one in self._routing.tables) and time.monotonic() < until_s:
            self.want_routing()
            await asyncio.sleep(_TABLE_PAUSE_S)

    def connect(self, node: Node) -> None:
        self.spawn(self._connect(node))

    async def capability(self, right: Right) -> CapabilityAnswer:
        """Of this session, for these files. Raises `PermissionDenied`; `StaleVersion` when the session is over."""
        async with self._exchange_lock:
            return await self._capability(right)

    async def _capability(self, right: Right) -> CapabilityAnswer:
        if self._session is None:
            raise UsageError("open the session first")
        answer = await self._managers.ask(GetCapability(self._session.client, *right))
        if isinstance(answer, SessionOver):
            self.want_routing()
            raise StaleVersion(f"session {answer.client} has expired, and another one is being opened; try again")
        if not isinstance(answer, CapabilityAnswer):
            raise InvariantViolation(f"the manager answered GetCapability with {type(answer).__name__}")
        return answer

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Work that ends with this object."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._session is not None:
            try:
                await self._managers.ask(EndSession(self._session.client), timeout_ns=_CLOSE_NS)
            except FireflyerError as error:
                _log.info("the session could not be ended; it expires by itself reason=%s", error)
        await self._managers.close()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if task is self._keeping:
            self._keeping = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a background task of the client failed", exc_info=error)
            if self._hears is not None:
                self._hears.end(f"internal error of the client: {error}")

    async def _heartbeats(self) -> None:
        if self._session is None:
            return
        while True:
            self.want_routing()
            await asyncio.sleep(self._session.lifetime_ns / _BEATS_PER_LIFETIME / SECOND)

    async def _keep(self) -> None:
        if self._session is None or self._hears is None or self._exchange_lock.locked():
            return
        session, asked_ns = self._session, time.monotonic_ns()
        try:
            request = KeepSession(session.client, self._routing.version)
            answer = await self._managers.ask(request, timeout_ns=min(_ROUTING_NS, session.lifetime_ns // 4))
        except FireflyerError as error:
            # Whether the session lives is the manager's to say: one that was away for long has not counted the time.
            if self._answered:
                _log.warning("no manager answers the heartbeat of the session reason=%s", error)
            self._answered = False
            return
        self._answered = True
        if isinstance(answer, SessionOver):
            if session is not self._session or self._exchange_lock.locked():
                return  # it was this client that has ended it
            _log.warning("the manager ended the session client=%d; opening another one", session.client)
            self._hears.over(session.client)
        elif isinstance(answer, SessionKept):
            self._take(self._hears, answer.routing, asked_ns)

    def _take(self, hears: ControlEvents, delta: RoutingDelta | None, asked_ns: int) -> None:
        if delta is not None:
            try:
                routing = apply_delta(self._routing, delta)
            except StaleVersion:
                return  # an answer to what was asked before another answer
            if routing is not self._routing:
                self._routing = routing
                hears.learned(routing)
        hears.confirmed(asked_ns)

    def _renewed(self, right: Right, capability: bytes) -> None:
        if self._hears is not None:
            self._hears.renewed(right, capability)

    def _denied(self, right: Right) -> None:
        if self._hears is not None:
            self._hears.denied(right)

    async def _connect(self, node: Node) -> None:
        if self._hears is None:
            return
        try:
            connection = await connect_raw(node.address, self._credential, purpose=data.PURPOSE, timeout_ns=_CONNECT_NS)
            if connection.session.peer != data.node_identity(node.id):
                connection.socket.close()
                raise PermissionDenied(
                    f"the process at {node.address} is {connection.session.peer!r}, not node {node.id}"
                )
        except FireflyerError as error:
            self._hears.not_connected(node, error)
            return
        self._hears.connected(node, connection.socket.detach())
