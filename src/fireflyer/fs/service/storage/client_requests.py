"""What clients ask of a storage process over a data connection, beside reads: who may, and what is answered.

An update is answered by the replica machine, a look at once, a capability is checked and counts for its connection from
then on: reads of its files are granted to native code, updates and looks are compared with it. Peers that hold the node
secret (services, administrators, trusted mounts) need none.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from fireflyer.base.errors import PermissionDenied
from fireflyer.base.units import SECOND
from fireflyer.fs.core import capability
from fireflyer.fs.core.capability import Rights
from fireflyer.fs.core.chain import reads
from fireflyer.fs.core.chain.connection_capabilities import MAX_RANGE_CAPABILITIES
from fireflyer.fs.core.chain.effects import ChunkIndex, TableEntry
from fireflyer.fs.core.chain.storage_node import ClientUpdateReceived
from fireflyer.fs.schema import data
from fireflyer.fs.schema.chunks import (
    Operation,
    Query,
    QueryKind,
    QueryReply,
    RefusalReason,
    Refused,
    Update,
    UpdateReply,
)
from fireflyer.fs.schema.ids import ChainId, ChunkId
from fireflyer.fs.service.storage.connections import DataConnection
from fireflyer.identity.secrets import Secret
from fireflyer.native import ChunkNode
from fireflyer.runtime.clock import BootClock
from fireflyer.runtime.limited_log import LimitedLog

__all__ = ["MAX_WAITERS", "ClientRequests"]

_log = logging.getLogger(__name__)
MAX_WAITERS: Final = 1 << 16
"""Updates without an answer, of all connections."""
FOR_EVER_NS: Final = 3600 * SECOND
"""Said to a peer that needs no capability."""

Told = UpdateReply | QueryReply | data.Granted


class ClientRequests:
    """`find` gives the published table's entry and the index of a chain here, `verify_soon` looks at a chunk soon.

    It is told who could not verify it.
    """

    def __init__(
        self,
        native: ChunkNode,
        secret: Secret,
        *,
        post: Callable[[ClientUpdateReceived], None],
        find: Callable[[ChainId], tuple[TableEntry, ChunkIndex] | None],
        verify_soon: Callable[[ChainId, ChunkId, str], None],
    ) -> None:
        self._native = native
        self._secret = secret
        self._post, self._find, self._verify_soon = post, find, verify_soon
        self._said = LimitedLog(_log)
        self._clock = BootClock()
        """As native code looks at fences and rights."""
        self._keys: dict[int, bytes] = {}
        self._waiters: dict[int, tuple[int, int]] = {}
        self._numbers = 0

    def use_keys(self, key_ids: tuple[int, ...]) -> bool:
        """Capabilities signed with these count. Whether they are others than before."""
        if tuple(self._keys) == key_ids:
            return False
        self._keys = {one: capability.derive_key(self._secret.reveal(), one) for one in key_ids}
        return True

    def asked(self, link: DataConnection, ask: data.DataRequest, handle: int) -> None:
        """`handle`: the data that came with it, or 0; they are this method's to give on or back."""
        body = ask.body
        if isinstance(body, Update):
            if (refused := self._refusal(link, body, handle)) is None:
                self._numbers += 1
                self._waiters[self._numbers] = (link.number, ask.number)
                self._post(ClientUpdateReceived(self._numbers, body, handle))
                return
            self._tell(link.number, ask.number, refused)
        elif isinstance(body, Query):
            self._tell(link.number, ask.number, self._look(link, body))
        elif isinstance(body, data.Present):
            self._tell(link.number, ask.number, self._present(link, body.capability))
        elif _allows(link, body.chunk.file, Rights.READ):
            self._verify_soon(body.chain, body.chunk, link.peer)
        if handle:
            self._native.release(handle)

    def reply(self, waiter: int, reply: UpdateReply) -> None:
        """Of the machine, to who asked."""
        link, number = self._waiters.pop(waiter)
        self._tell(link, number, reply)

    def _tell(self, link: int, number: int, reply: Told) -> None:
        self._native.send(link, data.encode(data.DataReply(number, reply)))

    def _refusal(self, link: DataConnection, update: Update, handle: int) -> Refused | None:
        change = update.change
        if change.operation is Operation.REPLACE:
            return Refused(RefusalReason.USAGE, "clients cannot replace chunks; write them")
        given = self._native.length(handle) if handle else 0
        wanted = change.length if change.carries_data else 0
        if given != wanted:
            return Refused(RefusalReason.USAGE, f"{given} bytes of data came with an update of {wanted} bytes")
        if not _allows(link, update.chunk.file, Rights.WRITE, update.client):
            return Refused(
                RefusalReason.DENIED, f"present a capability to write file {update.chunk.file} as this client"
            )
        if len(self._waiters) >= MAX_WAITERS:
            return Refused(RefusalReason.BUSY, f"the node is overloaded: {MAX_WAITERS} updates are running; try again")
        return None

    def _look(self, link: DataConnection, look: Query) -> QueryReply:
        if look.kind is QueryKind.READ:
            return Refused(RefusalReason.USAGE, "data must be read with read frames, not messages")
        if look.kind is QueryKind.CHAIN and not link.trusted:
            return Refused(RefusalReason.DENIED, "listing the chunks of all files needs the node secret")
        if not _allows(link, look.chunk.file, Rights.READ):
            return Refused(RefusalReason.DENIED, f"present a capability to read file {look.chunk.file}")
        found = self._find(look.chain)
        now_ns = self._clock.now_ns()
        if found is None:
            return Refused(RefusalReason.STALE, "this node has no target that serves the chain; get the routing again")
        return reads.decide(now_ns, found[0], found[1], look)

    def _present(self, link: DataConnection, token: bytes) -> data.Granted | Refused:
        if link.trusted:
            return data.Granted(FOR_EVER_NS)
        now_s = time.time()
        try:
            one = capability.verify(token, self._keys, link.peer, now_s)
        except PermissionDenied as error:
            self._said.warning("capability refused peer=%s reason=%s", link.peer, error)
            return Refused(RefusalReason.DENIED, error.message)
        if not link.capabilities.add(one, now_s):
            text = (
                f"this connection has {MAX_RANGE_CAPABILITIES} capabilities for ranges of files, the maximum; open "
                "another connection"
            )
            return Refused(RefusalReason.BUSY, text)
        left_ns = int((one.expires_s - now_s) * SECOND)
        if one.rights & Rights.READ:
            try:
                self._native.grant(link.number, one.first_file, one.last_file + 1, self._clock.now_ns() + left_ns)
            except ValueError as error:
                link.capabilities.drop(one)
                return Refused(RefusalReason.BUSY, f"{error}; open another connection")
        return data.Granted(left_ns)


def _allows(link: DataConnection, file: int, rights: Rights, client: int | None = None) -> bool:
    return link.trusted or link.capabilities.allows(file, rights, client, time.time())
