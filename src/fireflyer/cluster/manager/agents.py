"""What agents ask of a manager: to join, and what should be on their node."""

from __future__ import annotations

import logging
import time

import msgspec

import fireflyer
from fireflyer.base.errors import Busy, PermissionDenied
from fireflyer.cluster.core.platform.orders import orders_of_retired
from fireflyer.cluster.core.revisions import check_agent
from fireflyer.cluster.manager.execs import Execs
from fireflyer.cluster.manager.logs import Logs
from fireflyer.cluster.manager.machines import JOIN_MARK, Machines
from fireflyer.cluster.manager.platform import Platform
from fireflyer.cluster.manager.snapshots import Snapshots
from fireflyer.cluster.schema.agent import JOIN_MACHINE, Admitted, JoinMachine
from fireflyer.cluster.schema.execs import (
    RECEIVE_FRAMES,
    SEND_FRAMES,
    WAIT_EXECS,
    ExecOrders,
    FramesHere,
    FramesWanted,
    Taken,
    WaitExecs,
)
from fireflyer.cluster.schema.logs import APPEND_LOG, END_LOG, AppendLog, EndLog, LogAnswer
from fireflyer.cluster.schema.sync import FETCH_BLOB, REVISION, SYNC, BlobPiece, FetchBlob, Orders, Sync
from fireflyer.runtime.rpc import Caller, RpcServer

__all__ = ["AgentService"]

_log = logging.getLogger(__name__)


class AgentService:
    """Who may ask is decided by what the connection has proven: a join token buys one credential, and a credential
    speaks for its machine alone."""

    def __init__(self, machines: Machines) -> None:
        self._machines = machines
        self._platform: Platform | None = None
        self._logs: Logs | None = None
        self._snapshots: Snapshots | None = None
        self._execs: Execs | None = None
        self._managers: tuple[str, ...] = ()
        self._refused: dict[str, int] = {}
        """Revisions of agents, by their machines, of which the log has a line."""

    @property
    def managers(self) -> tuple[str, ...]:
        """`host:port` of all of them."""
        return self._managers

    def register(self, server: RpcServer) -> None:
        server.register(SYNC, self._sync)
        server.register(JOIN_MACHINE, self._join)
        server.register(APPEND_LOG, self._append_log)
        server.register(END_LOG, self._end_log)
        server.register(FETCH_BLOB, self._fetch)
        server.register(WAIT_EXECS, self._wait_execs)
        server.register(RECEIVE_FRAMES, self._receive_frames)
        server.register(SEND_FRAMES, self._send_frames)
        server.on_disconnect(self._disconnected)

    def begin(
        self, platform: Platform, logs: Logs, snapshots: Snapshots, execs: Execs, managers: tuple[str, ...]
    ) -> None:
        """`managers`: `host:port` of all of them, for agents that join."""
        self._platform, self._logs, self._snapshots, self._managers = platform, logs, snapshots, managers
        self._execs = execs

    async def _sync(self, said: Sync, caller: Caller) -> Orders:
        if self._machines.is_retired(caller.identity):
            orders = orders_of_retired(said, self._managers)
            return msgspec.structs.replace(orders, revision=REVISION, release=fireflyer.__version__)
        name = self._machine(caller)
        if self._platform is None:
            raise Busy("the manager is starting; try again")
        if not said.inventory.address:
            address = caller.address.rpartition(":")[0].strip("[]").removeprefix("::ffff:")
            said = msgspec.structs.replace(said, inventory=msgspec.structs.replace(said.inventory, address=address))
        self._check_revision(name, said)
        orders = await self._platform.sync(name, said)
        return msgspec.structs.replace(orders, revision=REVISION, release=fireflyer.__version__)

    def _check_revision(self, name: str, said: Sync) -> None:
        try:
            check_agent(name, said, fireflyer.__version__)
        except PermissionDenied as error:
            if self._refused.get(name) != said.revision:
                _log.warning("an agent is refused reason=%s", error)
            self._refused[name] = said.revision
            raise
        self._refused.pop(name, None)

    async def _append_log(self, request: AppendLog, caller: Caller) -> LogAnswer:
        return await self._logs_there().append(self._machine(caller), request)

    async def _end_log(self, request: EndLog, caller: Caller) -> LogAnswer:
        return await self._logs_there().end(self._machine(caller), request)

    def _logs_there(self) -> Logs:
        if self._logs is None:
            raise Busy("the manager is starting; try again")
        return self._logs

    async def _fetch(self, asked: FetchBlob, caller: Caller) -> BlobPiece:
        name = self._machine(caller)
        if self._snapshots is None:
            raise Busy("the manager is starting; try again")
        return await self._snapshots.piece(name, caller.connection, asked)

    def _disconnected(self, caller: Caller) -> None:
        if self._snapshots is not None:
            self._snapshots.disconnected(caller.connection)
        if self._execs is not None:
            self._execs.disconnected(caller.connection)

    async def _wait_execs(self, _: WaitExecs, caller: Caller) -> ExecOrders:
        name = self._machine(caller)
        return await self._execs_there().wait(name)

    async def _receive_frames(self, asked: FramesWanted, caller: Caller) -> FramesHere:
        name = self._machine(caller)
        return await self._execs_there().wanted(name, caller.connection, asked)

    async def _send_frames(self, frames: FramesHere, caller: Caller) -> Taken:
        name = self._machine(caller)
        return await self._execs_there().here(name, caller.connection, frames)

    def _execs_there(self) -> Execs:
        if self._execs is None:
            raise Busy("the manager is starting; try again")
        return self._execs

    def _machine(self, caller: Caller) -> str:
        """Its name. Raises `PermissionDenied`."""
        if self._machines.key_of(caller.identity) is None:
            raise PermissionDenied(f"the credential of {caller.identity[:80]} is revoked, or it is no machine's")
        return caller.identity

    async def _join(self, request: JoinMachine, caller: Caller) -> Admitted:
        if not caller.identity.startswith(JOIN_MARK):
            raise PermissionDenied("only who has a join token may join; make one: ff node token NAME")
        name = caller.identity.removeprefix(JOIN_MARK)
        admission = await self._machines.admit(request.token_id, name, int(time.time()), request.node)
        return Admitted(
            machine=admission.machine, token_id=admission.token_id, nonce=admission.nonce, managers=self._managers
        )
