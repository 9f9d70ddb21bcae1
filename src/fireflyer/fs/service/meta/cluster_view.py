"""The rest of the cluster, as a meta service needs it: a session at the chunk store, and how much space there is."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol, TypeAlias

from fireflyer.base.errors import FireflyerError
from fireflyer.base.units import SECOND
from fireflyer.fs.control import ManagerClient
from fireflyer.fs.core.manager.disk_space import files_space
from fireflyer.fs.core.meta.ports import ChunkPort
from fireflyer.fs.schema.ids import ClientId
from fireflyer.runtime.rpc import Credential

__all__ = ["ChunkSession", "ClusterView", "FindManagers", "OpenChunks", "Space"]

_log = logging.getLogger(__name__)
ASK_NS: Final = 5 * SECOND
SPACE_EVERY: Final = 5
"""Looks between two questions for space: the answer is long in a large cluster."""

Space: TypeAlias = tuple[int, int]
"""Bytes that files can have in all, and that are free."""


class ChunkSession(ChunkPort, Protocol):
    """The chunk store, by a session that this process holds."""

    @property
    def session(self) -> ClientId:
        """Another one when this has ended: what `ChunkPort` promises holds over that."""

    async def close(self) -> None: ...


FindManagers: TypeAlias = Callable[[], Awaitable[Sequence[str]]]
OpenChunks: TypeAlias = Callable[[Sequence[str], Credential], Awaitable[ChunkSession]]
"""Given managers; raises `TransientError` when none answers as primary."""


class ClusterView:
    """`managers`: the addresses of those that live, as far as is known."""

    def __init__(self, credential: Credential, managers: FindManagers, open_chunks: OpenChunks) -> None:
        self._credential = credential
        self._find = managers
        self._open = open_chunks
        self._known: frozenset[str] = frozenset()
        self._client: ManagerClient | None = None
        self._looks = 0
        self.chunk_session: ChunkSession | None = None
        self.space: Space = (0, 0)

    async def look(self) -> None:
        """Raises `TransientError` while the cluster cannot be reached."""
        found = await self._find()
        if not found:
            return
        if not self._known.issuperset(found):
            await self._forget()
            self._known = frozenset(found)
        if self._client is None:
            self._client = ManagerClient(sorted(self._known), self._credential)
        if self.chunk_session is None:
            self.chunk_session = await self._open(sorted(self._known), self._credential)
            _log.info("connected to the chunk store managers=%s", ",".join(sorted(self._known)))
        if self._looks % SPACE_EVERY == 0 or not any(self.space):
            self.space = files_space(await self._client.status(timeout_ns=ASK_NS))
        self._looks += 1

    async def _forget(self) -> None:
        """There is a manager that the clients do not know."""
        client, self._client = self._client, None
        session, self.chunk_session = self.chunk_session, None
        for one in (client, session):
            if one is not None:
                try:
                    await one.close()
                except FireflyerError as error:
                    _log.info("closing failed reason=%s", error)

    async def close(self) -> None:
        await self._forget()
