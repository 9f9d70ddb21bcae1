"""The meta service in a manager's process: over the manager's store, at the manager's address."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from fireflyer.fs.core.rows import LEASE_KEY
from fireflyer.fs.service.manager.config import ManagerConfig
from fireflyer.fs.service.meta.cluster_view import ClusterView, OpenChunks
from fireflyer.fs.service.meta.registry import LiveServices, Registration
from fireflyer.fs.service.meta.service import MetaService
from fireflyer.identity import NodeCredential, Secret
from fireflyer.kvstore import Engine
from fireflyer.kvstore.core.fenced import LeaseRow
from fireflyer.kvstore.core.rows import decode_row

__all__ = ["ManagerFiles"]

_log = logging.getLogger(__name__)
CLOSE_S: Final = 4.0
"""Of the ten seconds that a service manager gives a process; the lease is to be given up too."""


class ManagerFiles:
    def __init__(
        self,
        config: ManagerConfig,
        engine: Engine,
        secret: Secret,
        open_chunks: OpenChunks,
    ) -> None:
        self._config = config
        self._engine = engine
        self._heard = LiveServices(engine)
        self._address = ""
        self._registering: asyncio.Task[None] | None = None
        self.service = MetaService(
            engine,
            config.files,
            secret,
            cluster_view=ClusterView(NodeCredential(secret, f"meta {config.name}"), self._managers, open_chunks),
            shared_store=config.shared_store,
        )

    def start(self, address: str) -> None:
        """Returns at once; requests wait until it can serve."""
        self._address = address
        self.service.start_soon()
        if self._config.shared_store:
            registration = Registration(self._engine, self._config.name, address, manager=True)
            self._registering = asyncio.get_running_loop().create_task(registration.keep())

    async def close(self) -> None:
        """Clients are told to ask elsewhere. What hangs is left to the end of the process: nobody has been told that it
        was done."""
        if self._registering is not None:
            self._registering.cancel()
            await asyncio.wait([self._registering])
        try:
            async with asyncio.timeout(CLOSE_S):
                await self.service.close()
        except TimeoutError:
            _log.warning("meta requests did not finish within %.0f s and are cancelled", CLOSE_S)

    async def _managers(self) -> Sequence[str]:
        if not self._config.shared_store:
            return (self._address,)
        found = {row.address: None for row in await self._heard.services() if row.manager}
        found[self._address] = None
        lease = await self._engine.read(lambda reader: reader.get(LEASE_KEY))
        if lease is not None and (address := decode_row(LEASE_KEY, lease, LeaseRow).address):
            found[address] = None
        return list(found)
