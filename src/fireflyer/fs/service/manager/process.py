"""The manager process: `core.manager.state_machine.Manager` between the network and the key-value store.

    connection ──fs.ask──> Asked ──┐                       ┌──> Reply ──> the call that waits for it
    every L/8 ─────────────> Tick ──┼──> Manager.handle ───┼──> Transact ──> the engine ──> one outcome ──┐
    SIGTERM ──────────────> Leave ──┘          ^           └──> LogDecision ──> the log                   │
                                               └──────────────────────────────────────────────────────────┘

Ticks, transactions and the end are `kvstore.fenced_driver`.

Who may ask for what is decided here, by what the connection has proven, before the machine hears of it: services
(the node secret) everything, administrators (`fs.service.rights`) everything but what storage processes say, other
users what concerns routing, status and their own sessions.

Capabilities are signed here, since the machine knows no secrets and no time of day.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from fireflyer.accounts import AccountStore
from fireflyer.accounts.importing import import_users
from fireflyer.accounts.managing import serve_users
from fireflyer.accounts.serving import serve_accounts
from fireflyer.base.errors import Aborted, Busy, PermissionDenied, UsageError
from fireflyer.base.units import MS
from fireflyer.fs.control import ASK, META
from fireflyer.fs.core.capability import LIFETIME_S, Capability, derive_key, sign
from fireflyer.fs.core.manager.state_machine import (
    Effect,
    Event,
    Leave,
    LogDecision,
    Manager,
    Reply,
    RequestReceived,
    Settings,
    Tick,
)
from fireflyer.fs.core.rows import LEASE_KEY
from fireflyer.fs.schema.manager import (
    Answer,
    FilesStatus,
    GetFilesStatus,
    GetMetaServices,
    GetMoves,
    GetRouting,
    GetStatus,
    Heartbeat,
    MetaServices,
    NotPrimary,
    Register,
    Request,
    Status,
)
from fireflyer.fs.schema.sessions import (
    CapabilityAnswer,
    EndSession,
    GetCapability,
    KeepSession,
    OpenSession,
    SessionKept,
)
from fireflyer.fs.service.finding_users import finding_users
from fireflyer.fs.service.manager.config import ManagerConfig
from fireflyer.fs.service.manager.embedded_meta import ManagerFiles
from fireflyer.fs.service.manager.file_counts import Counter
from fireflyer.fs.service.manager.metrics import cluster_series, files_series
from fireflyer.fs.service.meta.cluster_view import OpenChunks
from fireflyer.fs.service.meta.registry import LiveServices
from fireflyer.fs.service.rights import FS_ADMIN, is_administrator
from fireflyer.identity import Accepts, NodeCredential, Secret, load_secret
from fireflyer.kvstore import Engine
from fireflyer.kvstore import open as open_store
from fireflyer.kvstore.fenced_driver import FencedDriver
from fireflyer.runtime.address import parse_listen
from fireflyer.runtime.metrics import Series, serving_metrics
from fireflyer.runtime.rpc import Caller, RpcServer

__all__ = ["MAX_WAITING", "check_role", "run_manager"]

_log = logging.getLogger(__name__)
MAX_WAITING: Final = 4096
"""Requests that wait for an answer of the machine."""

_OF_STORAGE: Final = (Register, Heartbeat)
_OF_USERS: Final = (
    GetRouting,
    GetStatus,
    GetMoves,
    GetMetaServices,
    GetFilesStatus,
    OpenSession,
    KeepSession,
    EndSession,
)


def check_role(request: Request, caller: Caller) -> bool:
    """Whether the caller is a service or an administrator. Raises `PermissionDenied` for what it may not ask."""
    if caller.role == "node":
        return True
    name = type(request).__name__
    if isinstance(request, _OF_STORAGE):
        raise PermissionDenied(f"only storage processes, authenticated with the node secret, may send {name}")
    if is_administrator(caller):
        return True
    if not isinstance(request, _OF_USERS):
        raise PermissionDenied(
            f"only administrators may do this, and user {caller.identity} is not one: the role {FS_ADMIN} (or the "
            "configuration of the manager, for users in its store) makes one, and the token of a run has no role"
        )
    return False


async def run_manager(
    config: ManagerConfig, *, on_ready: Callable[[str], None], open_chunks: OpenChunks | None = None
) -> None:
    """Runs until it is cancelled, then gives the lease up and ends. `on_ready` is called with its address once it
    listens. `open_chunks`: for the meta service, which runs in this process unless the configuration says otherwise.
    Raises `FireflyerError` when it cannot begin or go on."""
    secret = load_secret(config.secret_file)
    host, port = parse_listen(config.listen)
    credential = NodeCredential(secret, f"manager {config.name}")
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(await open_store(config.store))
        await import_users(engine, config.tokens_file)
        users = AccountStore(engine)
        find_user = await stack.enter_async_context(
            finding_users(users, config.administrators, config.accounts, credential)
        )
        accepts, limits = Accepts(secret, find_user), config.limits.of_server()
        server = RpcServer(accepts, identity=f"manager {config.name}", limits=limits, recheck_tokens=True)
        started: asyncio.Future[_Service] = asyncio.get_running_loop().create_future()

        async def ask(request: Request, caller: Caller) -> Answer:
            return await (await asyncio.shield(started)).ask(request, caller)

        server.register(ASK, ask)
        serve_accounts(server, find_user, secret)
        serve_users(server, users, secret, find_user, is_administrator)
        files = None
        if config.serve_files and open_chunks is not None:
            files = ManagerFiles(config, engine, secret, open_chunks)
            server.register(META, files.service.serve)
        listening = await server.start(host, port)
        address = config.advertise or str(listening)
        started.set_result(service := _Service(config, engine, secret, address, files))
        if files is not None:
            files.start(address)

        async def metrics() -> Sequence[Series]:
            return [*await service.metrics(), *server.metrics()]

        try:
            async with serving_metrics(config.metrics_listen, metrics):
                on_ready(address)
                await service.run(None if files is None else files.close)
        finally:
            await server.close()


class _Service:
    """Lives in the loop in which it is made."""

    def __init__(
        self, config: ManagerConfig, engine: Engine, secret: Secret, address: str, files: ManagerFiles | None
    ) -> None:
        self._config = config
        self._secret = secret
        self._engine = engine
        self._address = address
        self._heard = LiveServices(engine)
        self._counter = Counter(engine)
        self._files = files
        settings = Settings(
            holder=f"{config.name}/{secrets.token_hex(8)}",
            address=address,
            failure_timeout_ns=config.failure_timeout_ms * MS,
            lease_ns=config.lease_ms * MS,
            cluster=config.cluster,
            session_ns=config.session_ms * MS,
        )
        self._manager = Manager(settings)
        self._driver: FencedDriver[Event, Effect] = FencedDriver(
            self._manager,
            self._perform,
            engine=engine,
            lease_key=LEASE_KEY,
            lease_ns=config.lease_ms * MS,
            tick=Tick,
            leave=Leave(),
        )
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._numbers = 0

    async def run(self, before_end: Callable[[], Awaitable[None]] | None) -> None:
        """Until it is cancelled; then `before_end`, while it still answers, and the lease is given up. Raises what the
        machine or the store cannot live with."""
        try:
            await self._driver.run(before_end)
        finally:
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(Aborted("the manager is stopping; ask another one"))

    # --- requests ---

    async def ask(self, request: Request, caller: Caller) -> Answer:
        trusted = check_role(request, caller)
        user = caller.identity if caller.role == "user" else ""
        if isinstance(request, GetCapability):
            return await self._mint(request, user)
        if isinstance(request, GetMetaServices):
            return MetaServices(await self._meta_services())
        if isinstance(request, GetFilesStatus):
            return await self._files_status()
        return await self._put(RequestReceived(0, request, user, trusted))

    async def _meta_services(self) -> tuple[str, ...]:
        if not self._config.shared_store:
            return (self._address,) if self._config.serve_files else ()
        return tuple(row.address for row in await self._heard.services())

    async def metrics(self) -> Sequence[Series]:
        """For Prometheus. Of the cluster only as primary: else each manager would tell it."""
        status = await self._put(RequestReceived(0, GetStatus()))
        more: list[Series] = []
        if isinstance(status, Status):
            more = cluster_series(status) + files_series(await self._files_status())
        return [
            Series.one(
                "fireflyer_manager_primary", "gauge", "1 if this manager is primary, else 0", isinstance(status, Status)
            ),
            Series.one("fireflyer_manager_waiting", "gauge", "Requests that are not answered yet", len(self._waiting)),
            *more,
            *([] if self._files is None else self._files.service.metrics()),
        ]

    async def _files_status(self) -> FilesStatus:
        last_error = "" if self._files is None else self._files.service.last_error
        return await self._counter.status(len(await self._meta_services()), last_error)

    async def _mint(self, request: GetCapability, user: str) -> Answer:
        """Raises `UsageError` for a service: it needs none."""
        if not user:
            raise UsageError("services authenticated with the node secret need no capability")
        kept = await self._put(
            RequestReceived(0, KeepSession(request.client, self._manager.routing_version), user, False)
        )
        key_ids = self._manager.key_ids
        if not isinstance(kept, SessionKept) or not key_ids:
            return kept if not isinstance(kept, SessionKept) else NotPrimary("")
        expires_s = int(time.time()) + LIFETIME_S
        capability = Capability(
            key_ids[0], user, request.client, request.first_file, request.last_file, request.rights, expires_s
        )
        return CapabilityAnswer(sign(capability, derive_key(self._secret.reveal(), key_ids[0])), expires_s)

    async def _put(self, asked: RequestReceived) -> Answer:
        if self._driver.leaving:
            raise Busy("the manager is stopping; ask another one")
        if len(self._waiting) >= MAX_WAITING:
            raise Busy(f"the manager is overloaded: {MAX_WAITING} requests are waiting; try again later")
        self._numbers += 1
        number = self._numbers
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._driver.post(RequestReceived(number, asked.request, asked.user, asked.trusted))
            return await answer
        finally:
            del self._waiting[number]

    # --- effects ---

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Reply(request_id, answer):
                waits = self._waiting.get(request_id)
                if waits is not None and not waits.done():
                    waits.set_result(answer)
            case LogDecision(text):
                _log.info("%s", text)
