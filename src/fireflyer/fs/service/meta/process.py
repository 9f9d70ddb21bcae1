"""`ff fs meta`: a meta service in a process of its own, beside others, over PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from fireflyer.base.errors import UsageError
from fireflyer.fs.control import META
from fireflyer.fs.service.finding_users import asking_managers
from fireflyer.fs.service.meta.cluster_view import ClusterView, OpenChunks
from fireflyer.fs.service.meta.config import MetaConfig
from fireflyer.fs.service.meta.registry import Registration
from fireflyer.fs.service.meta.service import MetaService
from fireflyer.identity import Accepts, NodeCredential, load_secret
from fireflyer.kvstore import open as open_store
from fireflyer.runtime.address import parse_listen
from fireflyer.runtime.metrics import Series, serving_metrics
from fireflyer.runtime.rpc import RpcServer

__all__ = ["run_meta"]


async def run_meta(config: MetaConfig, *, open_chunks: OpenChunks, on_ready: Callable[[str], None]) -> None:
    """Runs until it is cancelled. `on_ready` is called with its address once it serves. Raises `FireflyerError` when it
    cannot begin."""
    if not config.store.startswith(("postgresql:", "postgres:")):
        raise UsageError(
            f"store {config.store.partition(':')[0]!r}: a separate meta service needs "
            "postgresql://user@host/database; with an embedded store the manager process contains it"
        )
    secret = load_secret(config.secret_file)
    credential = NodeCredential(secret, f"meta {config.name}")
    host, port = parse_listen(config.listen)

    async def managers() -> Sequence[str]:
        return config.managers

    async with (
        await open_store(config.store) as engine,
        asking_managers(config.managers, credential, config.tokens_file) as find_user,
    ):
        service = MetaService(
            engine,
            config.files,
            secret,
            cluster_view=ClusterView(credential, managers, open_chunks),
            shared_store=True,
        )
        accepts, limits = Accepts(secret, find_user), config.limits.of_server()
        server = RpcServer(accepts, identity=f"meta {config.name}", limits=limits, recheck_tokens=True)
        server.register(META, service.serve)

        async def metrics() -> Sequence[Series]:
            return [*service.metrics(), *server.metrics()]

        try:
            await service.start()
            address = config.advertise or str(await server.start(host, port))
            registration = Registration(engine, config.name, address, manager=False)
            await registration.heartbeat()
            async with serving_metrics(config.metrics_listen, metrics):
                on_ready(address)
                await registration.keep()
        finally:
            await server.close()
            await asyncio.shield(service.close())
