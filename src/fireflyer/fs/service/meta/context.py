"""What all requests of one meta service share: the store, its commit queues, new ids, what is known of the cluster,
chunks.

What is known of the cluster (the chain table of new files, which key signs, how long T is, how much space there is) is
read from the store and asked of the managers now and then; a request is given what was found last.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

from fireflyer.base.errors import Busy
from fireflyer.base.units import SECOND
from fireflyer.fs.core.capability import Capability, derive_key, sign
from fireflyer.fs.core.meta.context import SYSTEM, ClusterDefaults, Context, Requester, Rows
from fireflyer.fs.core.rows import STATE_KEY, TABLES, StateRow
from fireflyer.fs.schema.ids import ClientId
from fireflyer.fs.schema.inodes import InodeId
from fireflyer.fs.schema.meta import Opened
from fireflyer.fs.service.meta.cluster_view import ChunkSession, ClusterView
from fireflyer.fs.service.meta.config import MetaSettings
from fireflyer.fs.service.meta.group_commit import CommitQueues, Later, Prefetch, Reads, in_loop
from fireflyer.fs.service.meta.inode_estimate import about_inodes
from fireflyer.fs.service.meta.inode_ids import Ids
from fireflyer.identity import Secret
from fireflyer.kvstore import Engine, Reader
from fireflyer.kvstore.core.rows import decode_row

__all__ = ["ServiceContext"]

DEFAULT_T_NS: Final = 6 * SECOND
"""Before the manager has written down what T is."""


async def _yield_to_loop() -> None:
    await asyncio.sleep(0)


class ServiceContext:
    """`secret`: the node secret, for capabilities. `later`: as of `CommitQueues`."""

    def __init__(
        self,
        engine: Engine,
        settings: MetaSettings,
        secret: Secret,
        cluster_view: ClusterView | None,
        *,
        commit_queues: int,
        prefetch: Prefetch | None = None,
        later: Later = in_loop,
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.ids = Ids(engine)
        self.commit_queues = CommitQueues(
            engine, width=commit_queues, prepare=self.ids.prepare, prefetch=prefetch, later=later
        )
        self.reads = Reads(engine, prefetch)
        self.cluster = ClusterDefaults(table=settings.table, chains=0, chunk_bytes=settings.chunk_bytes)
        self._inodes = 0
        self.settle_ns = DEFAULT_T_NS
        self.cluster_view = cluster_view
        self.claimed: dict[InodeId, None] = {}
        """Inodes of which a procedure of this process changes chunks."""
        self.in_doubt: dict[InodeId, dict[Any, Any]] = {}
        """Of `core.meta.open_files.truncate`: updates of chunks whose outcome is not known."""
        self._secret = secret
        self._key_ids: tuple[int, ...] = ()
        self._keys: dict[int, bytes] = {}
        self._waiting: dict[InodeId, dict[asyncio.Future[None], None]] = {}

    # --- what bodies are given ---

    def context(
        self, rows: Rows, requester: Requester = SYSTEM, number: int = 0, owner: ClientId = 0, digest: bytes = b""
    ) -> Context:
        return Context(
            rows=rows,
            requester=requester,
            now_ns=time.time_ns(),
            new_id=self.ids.take,
            cluster=self.cluster,
            number=number,
            owner=owner,
            yield_to_loop=_yield_to_loop,
            digest=digest,
        )

    @property
    def chunks(self) -> ChunkSession:
        """Raises `Busy` before the chunk store has been reached."""
        session = None if self.cluster_view is None else self.cluster_view.chunk_session
        if session is None:
            raise Busy("the meta service is not connected to the chunk store yet; try again later")
        return session

    @property
    def has_chunks(self) -> bool:
        return self.cluster_view is not None and self.cluster_view.chunk_session is not None

    # --- what is known of the cluster ---

    async def look(self) -> None:
        """Reads what may have changed."""
        chains, state = await self.engine.read(self._read)
        capacity_bytes, free_bytes = (0, 0) if self.cluster_view is None else self.cluster_view.space
        self.cluster = ClusterDefaults(
            table=self.settings.table,
            chains=chains,
            chunk_bytes=self.settings.chunk_bytes,
            stripe=max(1, min(self.settings.stripe, chains)),
            capacity_bytes=capacity_bytes,
            free_bytes=free_bytes,
            inodes=self._inodes,
        )
        if state is not None:
            self.settle_ns = state.failure_timeout_ns
            self._key_ids = state.key_ids

    async def count(self) -> None:
        """About how many inodes there are, which is told from the next look on."""
        self._inodes = await about_inodes(self.engine)

    async def _read(self, reader: Reader) -> tuple[int, StateRow | None]:
        table_key = TABLES.key(self.settings.table)
        table, state = await reader.get(table_key), await reader.get(STATE_KEY)
        return (
            0 if table is None else len(TABLES.decode(table_key, table)[1].chains),
            None if state is None else decode_row(STATE_KEY, state, StateRow),
        )

    def capability(self, user: str, client: ClientId, opened: Opened) -> bytes:
        """Signed. Raises `Busy` before the first key is known."""
        if not self._key_ids:
            raise Busy("the meta service has no key for capabilities yet; try again later")
        key_id = self._key_ids[0]
        key = self._keys.get(key_id)
        if key is None:
            key = self._keys[key_id] = derive_key(self._secret.reveal(), key_id)
        file = opened.inode.id
        return sign(Capability(key_id, user, client, file, file, opened.rights, opened.expires_unix_s), key)

    # --- waiting for an inode ---

    async def pause(self, delay_ns: int, inode: InodeId) -> None:
        """Or until `changed`."""
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(inode, {})
        waiting[changed] = None
        try:
            await asyncio.wait([changed], timeout=delay_ns / SECOND)
        finally:
            del waiting[changed]
            if not waiting and self._waiting.get(inode) is waiting:
                del self._waiting[inode]

    def changed(self, inode: InodeId) -> None:
        """Who waits for it looks again."""
        for one in self._waiting.get(inode, {}):
            if not one.done():
                one.set_result(None)
