"""The data connections of a storage process: who is at the other end, and over which one a replica is reached.

A node is connected to by who has requests for it (the successor of one of its targets), and answers where it was asked.
Connections are tried again until routing says that they are not needed, or leads elsewhere. What is sent where there is
none is lost: replicas send again, and soon, because a new connection is told like a broken one.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from fireflyer.base.errors import Busy, FireflyerError, PermissionDenied
from fireflyer.base.units import MS, SECOND
from fireflyer.fs.core.chain.connection_capabilities import ConnectionCapabilities
from fireflyer.fs.schema import data
from fireflyer.fs.schema.chunks import PeerMessage, Request
from fireflyer.fs.schema.ids import ChunkId, ContentId, NodeId, TargetId
from fireflyer.identity.handshake import FindUser, NodeCredential, Role, Session
from fireflyer.identity.secrets import Secret
from fireflyer.native import ChunkNode
from fireflyer.runtime.limited_log import LimitedLog
from fireflyer.runtime.pauses import spread
from fireflyer.runtime.raw_connections import RawConnection, connect_raw
from fireflyer.runtime.token_watch import TokenWatch

__all__ = ["MAX_LINKS", "DataConnection", "DataConnections"]

_log = logging.getLogger(__name__)
MAX_LINKS: Final = 8192
"""Connections that others have made; one more is closed."""
USERS_SHARE: Final = 0.9
"""Of them: users cannot keep the replicas of a chain from each other. Nor can one of them keep the others out: a user
gets one more while they have fewer than are free."""
CONNECT_NS: Final = 3 * SECOND
PAUSE_NS: Final = 50 * MS
MAX_PAUSE_NS: Final = SECOND


@dataclass(slots=True)
class DataConnection:
    """A connection that native code has."""

    number: int
    role: Role
    peer: str
    """As the other end has proven."""
    node: NodeId = 0
    """Where this process has made it."""
    token_id: str = ""
    """Of a user: with which token they came."""
    capabilities: ConnectionCapabilities = field(default_factory=ConnectionCapabilities)

    @property
    def trusted(self) -> bool:
        return self.role == "node"


class _Path:
    """To a node. `link` is 0 while there is none."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.link = 0
        self.since_s = 0.0
        """When the last connection was made, by the loop's clock."""
        self.task: asyncio.Task[None] | None = None


class DataConnections:
    """`on_changed` is called when the connection to a node broke, or is a new one. `find_user`: whose token it is, as
    for new connections; `tokens.run` looks at those of open ones again."""

    def __init__(
        self,
        native: ChunkNode,
        me: NodeId,
        secret: Secret,
        on_changed: Callable[[NodeId], None],
        most: int = MAX_LINKS,
        find_user: FindUser | None = None,
    ) -> None:
        self._native = native
        self._credential = NodeCredential(secret, data.node_identity(me))
        self._on_changed = on_changed
        self._links: dict[int, DataConnection] = {}
        self._paths: dict[NodeId, _Path] = {}
        self._heard_on: dict[TargetId, int] = {}
        self._closed = False
        self.tokens = TokenWatch(find_user, self._cut)
        self._said = LimitedLog(_log)
        """What peers may cause as often as they like."""
        self.refused = 0
        """Connections that were too many."""
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # The rest is for the files of the targets: a disk that has no descriptor left is a disk that has failed.
        self._most = min(most, descriptors // 2)

    def __len__(self) -> int:
        return len(self._links)

    def find(self, number: int) -> DataConnection | None:
        return self._links.get(number)

    def full(self, session: Session) -> Busy | None:
        """Why this peer gets no further connection."""
        role, peer = session.role, session.peer
        free = int(self._most * (1 if role == "node" else USERS_SHARE)) - len(self._links)
        own = 0 if role == "node" else sum(one.peer == peer and not one.trusted for one in self._links.values())
        if free > own:
            return None
        self.refused += 1
        if own:
            return Busy(f"user {peer} has {own} connections here and only {max(free, 0)} are free; close some of them")
        return Busy(f"the node has its {len(self._links)} connections already; try again later")

    def accept(self, connection: RawConnection) -> None:
        """Somebody has connected."""
        session = connection.session
        if self._closed or (busy := self.full(session)) is not None:
            reason = "the process ends" if self._closed else busy
            self._said.warning("connection closed peer=%s reason=%s", session.peer, reason)
            connection.socket.close()
            return
        link = self._adopt(
            connection, DataConnection(0, session.role, session.peer, token_id=session.token_id), reads=True
        )
        self.tokens.add(session, link.number)

    def _adopt(self, connection: RawConnection, link: DataConnection, *, reads: bool) -> DataConnection:
        link.number = self._native.connect(
            connection.socket.detach(), reads=reads, trusted=link.trusted, owner="" if link.trusted else link.peer
        )
        self._links[link.number] = link
        return link

    def lost(self, number: int, reason: str) -> None:
        link = self._links.pop(number, None)
        if link is None:
            return
        self.tokens.remove(link.token_id, number)
        self._said.info("connection ended peer=%s reason=%s", link.peer, reason)
        self._heard_on = {target: one for target, one in self._heard_on.items() if one != number}
        path = self._paths.get(link.node)
        if path is not None and path.link == number:
            path.link = 0
            self._on_changed(link.node)
            # Who closes at once what it has accepted must not be asked without a pause.
            lived_s = asyncio.get_running_loop().time() - path.since_s
            self._start(link.node, path, pause_ns=PAUSE_NS if lived_s < MAX_PAUSE_NS / SECOND else 0)

    def refuse(self, number: int, reason: str) -> None:
        """The other end does not keep the protocol."""
        link = self._links.get(number)
        self._said.warning("connection closed peer=%s reason=%s", link.peer if link else "unknown", reason)
        self._native.disconnect(number)

    def _cut(self, number: int) -> None:
        self.refuse(number, "the token of this user was revoked or has expired")

    def end_revoked(self, key_ids: tuple[int, ...], now_s: float) -> None:
        """Connections on which a capability counts that none of these keys has signed: what native code lets them read
        ends with them."""
        for number, link in list(self._links.items()):
            if link.capabilities.any_but_of(key_ids, now_s):
                self.refuse(number, "a capability of this connection was revoked; the client must connect again")

    # --- to other nodes ---

    def want(self, addresses: Mapping[NodeId, str]) -> None:
        """Connections to these nodes and to no others."""
        for node in [one for one, path in self._paths.items() if addresses.get(one) != path.address]:
            path = self._paths.pop(node)
            if path.task is not None:
                path.task.cancel()
            if path.link:
                self._native.disconnect(path.link)
        for node, address in addresses.items():
            if node not in self._paths and not self._closed:
                self._paths[node] = _Path(address)
                self._start(node, self._paths[node])

    def _start(self, node: NodeId, path: _Path, *, pause_ns: int = 0) -> None:
        if not self._closed:
            path.task = asyncio.get_running_loop().create_task(self._connect(node, path, pause_ns))

    async def _connect(self, node: NodeId, path: _Path, first_ns: int) -> None:
        if first_ns:
            await asyncio.sleep(first_ns / SECOND)
        pause_ns, said = PAUSE_NS, ""
        while True:
            try:
                connection = await connect_raw(
                    path.address, self._credential, purpose=data.PURPOSE, timeout_ns=CONNECT_NS
                )
                if connection.session.peer != data.node_identity(node):
                    connection.socket.close()
                    raise PermissionDenied(
                        f"the process at {path.address} is {connection.session.peer}, not node {node}"
                    )
                path.task = None
                link = self._adopt(connection, DataConnection(0, "node", connection.session.peer, node), reads=False)
                path.link, path.since_s = link.number, asyncio.get_running_loop().time()
                self._on_changed(node)
                return
            except (FireflyerError, OSError) as error:
                if str(error) != said:
                    said = str(error)
                    _log.warning("node is unreachable node=%d reason=%s", node, said)
            except Exception:  # a fault of ours: without this the node would never be connected to again
                _log.exception("connecting failed on an unexpected error node=%d", node)
            await asyncio.sleep(spread(pause_ns / SECOND))
            pause_ns = min(2 * pause_ns, MAX_PAUSE_NS)

    # --- messages ---

    def heard(self, source: TargetId, number: int) -> None:
        """This replica speaks over this connection: it is answered there."""
        self._heard_on[source] = number

    def send(self, source: TargetId, peer: TargetId, node: NodeId, message: PeerMessage, handle: int) -> None:
        """From a target of this process to `peer`, which is on `node`; not at all where there is no connection."""
        number = self._towards(peer, node, message)
        if number:
            self._native.send(number, data.encode(data.PeerEnvelope(source, peer, message)), handle)

    def send_content(
        self, source: TargetId, peer: TargetId, node: NodeId, message: PeerMessage, chunk: ChunkId, content: ContentId
    ) -> None:
        number = self._towards(peer, node, message)
        if number:
            body = data.encode(data.PeerEnvelope(source, peer, message))
            made_in, version = content.made_in, content.version
            self._native.send_content(number, body, source, chunk.file, chunk.index, made_in, version)

    def _towards(self, peer: TargetId, node: NodeId, message: PeerMessage) -> int:
        if not isinstance(message, Request):
            return self._heard_on.get(peer, 0)
        path = self._paths.get(node)
        return path.link if path is not None else 0

    async def close(self) -> None:
        """No more connections are made; those that are open end with the native node."""
        self._closed = True
        tasks = [path.task for path in self._paths.values() if path.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
