"""The resident process: listens for launchers that have the machine's credential, and keeps its guards.

Started by hand or by systemd as the user whose jobs it runs. It may be killed and started again at any time: guards
live on and are adopted. A machine that has not joined, or whose credential is revoked, lets nobody in.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from typing import Final, NoReturn

import msgspec

from fireflyer.base.errors import Busy, FireflyerError, NotFound, PermissionDenied, UsageError
from fireflyer.base.units import MIB, SECOND
from fireflyer.cluster.agent.accounts import Account, Accounts
from fireflyer.cluster.agent.execs import Execs
from fireflyer.cluster.agent.guards import TICK_S, Guards
from fireflyer.cluster.agent.health import NodeChecks
from fireflyer.cluster.agent.log_shipping import LogShipping
from fireflyer.cluster.agent.records import ISSUER, AgentDirectory, Membership
from fireflyer.cluster.agent.runs import DEFAULT_ACCOUNTS_DIR, DEFAULT_LOGS_BYTES, Runs
from fireflyer.cluster.agent.start import probe_as
from fireflyer.cluster.agent.sync import Managers
from fireflyer.cluster.core.agent import (
    ROOT_REFUSAL,
    Forgotten,
    Guard,
    GuardState,
    Joined,
    Order,
    Revoked,
    StopRequested,
)
from fireflyer.cluster.schema.agent import (
    ASK_AGENT,
    FORGET_GUARD,
    LIST_GUARDS,
    MAX_STATUSES,
    REVOKE_MACHINE,
    START_GUARD,
    STOP_GUARD,
    WAIT_GUARD,
    GuardName,
    GuardOrder,
    GuardStatus,
    GuardStatuses,
)
from fireflyer.cluster.schema.hosts import HostFacts, HostQuestion
from fireflyer.cluster.schema.runner import COPY_MARK
from fireflyer.cluster.schema.tickets import Claims, read_claims
from fireflyer.cluster.schema.wire import Done
from fireflyer.cluster.supervisor.remote import probe
from fireflyer.identity.derived import apply_pad, derive_key, unseal
from fireflyer.identity.handshake import Accepts, UserCredential, token_key
from fireflyer.runtime.processes.service_manager import ServiceManager
from fireflyer.runtime.rpc import Caller, RpcClient, RpcServer, ServerLimits

__all__ = ["serve_agent"]

_log = logging.getLogger(__name__)
_WAIT_S: Final = 10.0
_LAST_LOGS_S: Final = 60.0
_LIMITS: Final = ServerLimits(
    connections=256, handshakes=32, calls_per_connection=256, request_bytes_per_connection=4 * MIB, frame_bytes=MIB
)


async def serve_agent(
    directory: AgentDirectory,
    *,
    on_ready: Callable[[str], None],
    accounts: Accounts | None = None,
    accounts_dir: str = DEFAULT_ACCOUNTS_DIR,
    logs_bytes: int = DEFAULT_LOGS_BYTES,
) -> int | None:
    """Until it is cancelled, or, in a job of a batch system, until the managers want it to go: then the exit code that
    they say. `on_ready` is called with `:port` when it serves. `accounts`: as which it starts ranks; None: its own.
    `accounts_dir`: for the run directories of others. `logs_bytes`: as `Runs` takes it. Raises `UsageError` where the
    machine has not joined or the port is taken, `Busy` where another agent runs."""
    accounts = accounts or Accounts(os.geteuid())
    lock = directory.take()
    try:
        membership = directory.membership()
        if membership is None:
            await _end_all(directory, accounts)
            raise UsageError(
                "this machine has not joined; get a token with `ff agent token NAME`, then `ff agent join`"
            )
        service_manager = ServiceManager()

        def ready(address: str) -> None:
            service_manager.ready()
            on_ready(address)

        return await _Agent(directory, membership, accounts, accounts_dir, logs_bytes).run(ready)
    finally:
        os.close(lock)


async def _end_all(directory: AgentDirectory, accounts: Accounts) -> None:
    """What an earlier agent left when its credential was revoked."""
    changed = asyncio.Event()
    guards = Guards(directory, lambda _: changed.set(), accounts)
    runs = Runs(directory, guards, accounts, key=lambda: b"", on_change=changed.set, leaders=_no_leaders)
    try:
        guards.begin()
        guards.feed(Revoked())
        runs.begin()
        runs.end_all()
        while any(guard.state is not GuardState.ENDED for guard in guards.all()) or not runs.over:
            changed.clear()
            try:
                async with asyncio.timeout(TICK_S):
                    await changed.wait()
            except TimeoutError:
                guards.tick()
                runs.tick()
    finally:
        guards.close()
        runs.close()


def _no_leaders() -> NoReturn:
    raise PermissionDenied("the credential of this machine is revoked")


class _Agent:
    def __init__(
        self,
        directory: AgentDirectory,
        membership: Membership,
        accounts: Accounts,
        accounts_dir: str,
        logs_bytes: int,
    ) -> None:
        self._directory = directory
        self._membership: Membership | None = membership
        self._port = membership.port
        self._changed: dict[str, asyncio.Event] = {}
        self._accounts = accounts
        self._guards = Guards(directory, self._on_change, accounts)
        self._runs = Runs(
            directory,
            self._guards,
            accounts,
            key=lambda: token_key(self._member().credential),
            on_change=self._on_runs,
            leaders=self._leaders,
            accounts_dir=accounts_dir,
            logs_bytes=logs_bytes,
        )
        self._logs = LogShipping(self._runs)
        incarnation = directory.next_incarnation(int(time.time()))
        self._execs = Execs(self._runs, accounts, directory.lease_file, incarnation)
        self._checks = NodeChecks(
            incarnation, lambda: self._managers.changed.set(), any_program=accounts.serves_own,
            state=directory.health_state,
        )  # fmt: skip
        self._managers = Managers(
            directory, self._runs, self._checks, lambda: self._membership, incarnation, self._leader_is
        )
        self._server = RpcServer(Accepts(None, directory.find), identity=f"agent {membership.machine}", limits=_LIMITS)

    async def run(self, on_ready: Callable[[str], None]) -> int:
        server = self._server
        server.register(ASK_AGENT, self._ask)
        server.register(START_GUARD, self._start)
        server.register(WAIT_GUARD, self._wait)
        server.register(STOP_GUARD, self._stop)
        server.register(FORGET_GUARD, self._forget)
        server.register(LIST_GUARDS, self._list)
        server.register(REVOKE_MACHINE, self._revoke)
        self._guards.begin()
        self._runs.begin()
        adopted = sum(guard.state is not GuardState.ENDED for guard in self._guards.all())
        try:
            address = await server.start_everywhere(self._port)
            _log.info("agent serves port=%d adopted=%d uid=%d", address.port, adopted, os.geteuid())
            on_ready(str(address))
            return await self._until_left()
        finally:
            await server.close()
            await self._logs.close()
            self._guards.close()
            self._runs.close()

    def _leader_is(self, client: RpcClient | None) -> None:
        self._logs.leader_is(client)
        membership = self._membership
        self._execs.leader_is(client, None if membership is None else UserCredential(membership.credential))

    async def _until_left(self) -> int:
        """The exit code that managers want."""
        leave = self._managers.leave
        work = asyncio.gather(self._tick(), self._managers.run(), self._execs.run(), self._checks.run())
        work.add_done_callback(lambda _: leave.cancel())
        try:
            await asyncio.wait([leave])
            if work.done():
                await work  # raises
            code = leave.result()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_LOGS_S):
                    await self._logs.sent()
            _log.info("the managers want this agent to go code=%d", code)
            return code
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    def _leaders(self) -> tuple[UserCredential, list[str]]:
        """For threads, too: so nothing is concluded from what is found."""
        membership = self._membership
        return (
            _no_leaders() if membership is None else (UserCredential(membership.credential), self._managers.addresses())
        )

    async def _tick(self) -> None:
        """Another process may let the machine leave or join again, too."""
        while True:
            await asyncio.sleep(TICK_S)
            self._guards.tick()
            self._runs.tick()
            self._logs.look()
            self._execs.look()
            try:
                self._note(self._directory.membership())
            except FireflyerError as error:
                _log.error("the membership cannot be read, so nobody is let in reason=%s", error)

    def _note(self, membership: Membership | None) -> None:
        if (membership is None) != (self._membership is None):
            _log.warning("the machine %s", "has left: its guards are stopped" if membership is None else "has joined")
            self._guards.feed(Revoked() if membership is None else Joined())
            if membership is None:
                self._runs.end_all()
        self._membership = membership

    def _on_runs(self) -> None:
        live = (status.token for status in self._runs.statuses() if status.state != "gone")
        self._checks.runs_are(frozenset(live))
        self._managers.changed.set()
        self._logs.look()
        self._execs.look()

    def _on_change(self, token: str) -> None:
        changed = self._changed.pop(token, None)
        if changed is not None:
            changed.set()
        guard = self._guards.get(token)
        if guard is not None and guard.order.run_token:
            self._runs.guards_changed(guard.order.run_token)

    # -- methods -------------------------------------------------------------------------------------------------------

    def _member(self) -> Membership:
        """Of calls on connections that were opened before."""
        self._note(self._directory.membership())
        if self._membership is None:
            raise PermissionDenied("the credential of this machine is revoked")
        return self._membership

    def _allowed(self, caller: Caller, token: str = "") -> Claims | None:
        """Whether the caller may ask something about the guard of this token: who has the machine's credential, or a
        ticket, which is returned, of the run whose token it begins with. Raises `PermissionDenied`."""
        self._member()
        if caller.identity == ISSUER:
            return None
        claims = read_claims(caller.identity)
        if claims is None or (token and not token.startswith(f"{claims.run_token}.")):
            raise PermissionDenied("this ticket is for guards of another run")
        return claims

    def _admitted(self, claims: Claims | None) -> Account | None:
        """The account of what is started for a ticket. Raises `Busy`, `PermissionDenied`."""
        if claims is None:
            if not self._accounts.serves_own:
                raise PermissionDenied(ROOT_REFUSAL)
            return None
        refusal = self._runs.refusal(claims.run_token)
        if refusal is not None:
            raise (Busy if refusal.busy else PermissionDenied)(f"run {claims.run_token}: {refusal.reason}")
        return self._accounts.of_user(claims.user, claims.account)

    def _workdir(self, claims: Claims | None, asked: str) -> str:
        """On this node, where a launcher asks for the copy of its run. Raises `Busy` while that is made."""
        return self._runs.copy_of(claims.run_token) if claims is not None and asked.startswith(COPY_MARK) else asked

    async def _ask(self, question: HostQuestion, caller: Caller) -> HostFacts:
        claims = self._allowed(caller)
        account = self._admitted(claims)
        client = caller.address.rpartition(":")[0].strip("[]").removeprefix("::ffff:")
        question = msgspec.structs.replace(
            question,
            workdir=self._workdir(claims, question.workdir),
            control_address=question.control_address or client,
        )
        if account is None:
            facts = await asyncio.to_thread(probe, question)
        else:
            facts = await asyncio.to_thread(probe_as, account, question)
        return msgspec.structs.replace(facts, client=client, server="")

    async def _start(self, request: GuardOrder, caller: Caller) -> GuardStatus:
        claims = self._allowed(caller, request.token)
        if self._guards.get(request.token) is not None:
            return self._status(self._known(request.token))  # it is asked for again
        orders = request.orders
        config = orders.config
        if request.token != orders.token or not request.token.endswith(f".{config.node}.{config.incarnation}"):
            raise UsageError(f"the token {request.token} is not that of node {config.node} in these orders")
        if config.lease_ns < SECOND or orders.first_lease_ns < SECOND:
            raise UsageError("a guard that an agent starts needs a lease of a second or more")
        account = self._admitted(claims)
        orders = msgspec.structs.replace(orders, workdir=self._workdir(claims, orders.workdir))
        if request.sealed:
            secret = unseal(request.sealed, self._key_of(caller), request.nonce)
            orders = msgspec.structs.replace(orders, secret=secret.reveal())
        if request.sealed_user_token:
            token = apply_pad(request.sealed_user_token, self._key_of(caller), request.nonce)
            orders = msgspec.structs.replace(orders, user_token=token.decode("ascii", "replace"))
        order = Order(
            token=request.token,
            job=request.job,
            node=config.node,
            incarnation=config.incarnation,
            run_token="" if claims is None else claims.run_token,
            account="" if account is None else account.name,
        )
        until = "" if claims is None else self._directory.lease_file
        refused = self._guards.start(order, orders, account, until)
        if refused is not None:
            raise (Busy if refused.busy else PermissionDenied)(refused.reason)
        if claims is not None:
            self._runs.guards_changed(claims.run_token)
        return self._status(self._known(request.token))

    def _key_of(self, caller: Caller) -> bytes:
        """With which the caller seals."""
        key = token_key(self._member().credential)
        return key if caller.identity == ISSUER else derive_key(key, caller.identity)

    async def _wait(self, request: GuardName, caller: Caller) -> GuardStatus:
        """Answers when the guard has ended, or after a while as it is then."""
        self._allowed(caller, request.token)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _WAIT_S
        while (guard := self._known(request.token)).state is not GuardState.ENDED and loop.time() < until_s:
            changed = self._changed.setdefault(request.token, asyncio.Event())
            try:
                async with asyncio.timeout_at(until_s):
                    await changed.wait()
            except TimeoutError:
                continue
        return self._status(guard)

    async def _stop(self, request: GuardName, caller: Caller) -> GuardStatus:
        self._allowed(caller, request.token)
        self._guards.feed(StopRequested(request.token))
        return self._status(self._known(request.token))

    async def _forget(self, request: GuardName, caller: Caller) -> Done:
        self._allowed(caller, request.token)
        self._guards.feed(Forgotten(request.token))
        return Done()

    async def _list(self, _: Done, caller: Caller) -> GuardStatuses:
        self._issuer_only(caller)
        newest = sorted(self._guards.all(), key=lambda guard: -guard.since_ns)
        return GuardStatuses(tuple(self._status(guard) for guard in newest[:MAX_STATUSES]))

    async def _revoke(self, _: Done, caller: Caller) -> Done:
        self._issuer_only(caller)
        _log.warning("the credential is revoked by=%s", caller.address)
        self._directory.leave()
        self._note(None)
        return Done()

    def _issuer_only(self, caller: Caller) -> None:
        if self._allowed(caller) is not None:
            raise PermissionDenied("a ticket does not allow that; it takes the credential of the machine")

    def _known(self, token: str) -> Guard:
        guard = self._guards.get(token)
        if guard is None:
            raise NotFound(f"no guard {token} is known on this machine")
        return guard

    def _status(self, guard: Guard) -> GuardStatus:
        order, end = guard.order, guard.end
        status = GuardStatus(
            token=order.token,
            job=order.job,
            node=order.node,
            incarnation=order.incarnation,
            state=guard.state.value,
            age_ns=self._guards.age_ns(guard),
        )
        if end is None:
            return status
        return msgspec.structs.replace(
            status, clean=end.clean, exit_code=end.exit_code, reason=" ".join(end.reason.split())[:1000]
        )
