"""How a machine joins: `issue` waits on the machine of a user for the machines that were given a join token, `join` is
what such a machine does. Both prove that they have the token; the credential that it buys is computed by both."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from typing import Final

from fireflyer.base.errors import FireflyerError, PermissionDenied, Timeout, TransientError, Unreachable, UsageError
from fireflyer.base.units import SECOND
from fireflyer.cluster.agent.records import AgentDirectory, Membership
from fireflyer.cluster.schema.agent import (
    JOIN_MACHINE,
    LIST_GUARDS,
    REVOKE_MACHINE,
    STOP_GUARD,
    Admitted,
    GuardName,
    GuardStatus,
    JoinMachine,
)
from fireflyer.cluster.schema.wire import Done
from fireflyer.identity.derived import derive_credential
from fireflyer.identity.handshake import Accepts, TokenRefused, UserCredential, UserKey, token_id_of, token_key
from fireflyer.identity.machines import JoinedMachine, MachineStore
from fireflyer.runtime.address import Address
from fireflyer.runtime.rpc import Caller, RpcClient, RpcServer, ServerLimits

__all__ = ["Issuer", "join", "local_guards", "revoke", "stop_local"]

_CALL_NS: Final = 10 * SECOND
_LIMITS: Final = ServerLimits(connections=64, handshakes=16, calls_per_connection=4, frame_bytes=64 << 10)
_LOOK_S: Final = 1.0
_VALID: Final = (
    "A join token is valid once, until it expires or another one is made for the same machine, and at managers over "
    "the store of the one that made it; make another one: ff node token NAME, or ff agent token NAME"
)

_WHERE: Final = "Give HOST:PORT of listen_agents of a manager, or that at which `ff agent token` waits"


class Issuer:
    """Lets machines join that have a token of `store`, until all of `names` have, or their tokens have expired."""

    def __init__(self, store: MachineStore, names: Collection[str], *, on_joined: Callable[[JoinedMachine], None]):
        self._store = store
        self._missing = set(names)
        self._on_joined = on_joined
        self._changed = asyncio.Event()

        async def find(token_id: str) -> UserKey | None:
            return store.find(token_id, int(time.time()))

        self._server = RpcServer(Accepts(None, find), identity="issuer", limits=_LIMITS)
        self._server.register(JOIN_MACHINE, self._join)

    async def listen(self, port: int) -> Address:
        """Raises `UsageError` where the port is taken."""
        return await self._server.start_everywhere(port)

    def issue(self, lifetime_s: int) -> dict[str, str]:
        """A join token of each machine, by name. Raises `UsageError`: then no token is valid."""
        try:
            return {name: self._store.issue(name, int(time.time()), lifetime_s) for name in sorted(self._missing)}
        except FireflyerError:
            for name in self._missing:
                self._store.withdraw(name)
            raise

    async def wait(self, until_s: int) -> list[str]:
        """Names of those that have not joined when the tokens expire (Unix time `until_s`), which are withdrawn."""
        try:
            while self._missing and time.time() < until_s:
                self._changed.clear()
                try:
                    async with asyncio.timeout(_LOOK_S):
                        await self._changed.wait()
                except TimeoutError:
                    continue
        finally:
            for name in self._missing:
                self._store.withdraw(name)
            await self._server.close()
        return sorted(self._missing)

    async def _join(self, request: JoinMachine, caller: Caller) -> Admitted:
        address = request.address or caller.address.rpartition(":")[0].strip("[]").removeprefix("::ffff:")
        bought = await asyncio.to_thread(
            self._store.redeem,
            request.token_id,
            machine=caller.identity,
            address=address,
            port=request.port,
            now_s=int(time.time()),
        )
        self._missing.discard(bought.machine)
        self._on_joined(self._store.machines()[bought.machine])
        # The answer is to leave before the listener closes: the token is used up, and nobody could ask again.
        asyncio.get_running_loop().call_later(_LOOK_S / 10, self._changed.set)
        return Admitted(machine=bought.machine, token_id=bought.token_id, nonce=bought.nonce)


async def join(
    directory: AgentDirectory, token: str, *, issuer: str, port: int, address: str, node: str = ""
) -> Membership:
    """Raises `PermissionDenied` where the token is used, expired or unknown, and where another service listens,
    `Unreachable` where nobody waits."""
    try:
        client = await RpcClient.connect(issuer, UserCredential(token), _CALL_NS)
    except TokenRefused as error:
        raise PermissionDenied(f"{error.message}. {_VALID}") from None
    except (PermissionDenied, Unreachable, Timeout) as error:
        who = f"no manager or `ff agent token` waits for agents at {issuer}"
        raise type(error)(f"{who}: {error.message}. {_WHERE}") from None
    try:
        request = JoinMachine(token_id=token_id_of(token), port=port, address=address, node=node)
        admitted = await client.call(JOIN_MACHINE, request, _CALL_NS)
    finally:
        await client.close()
    credential = derive_credential(token_key(token), token_id=admitted.token_id, nonce=admitted.nonce)
    membership = Membership(
        machine=admitted.machine,
        issuer=issuer,
        credential=credential,
        port=port,
        address=address,
        managers=admitted.managers,
    )
    directory.join(membership)
    return membership


async def revoke(store: MachineStore, name: str) -> str:
    """The machine is not used any more, and its agent is told. Returns why it could not be told, if so. Raises
    `NotFound`."""
    machine = await asyncio.to_thread(store.revoke, name)
    try:
        client = await RpcClient.connect(
            Address(machine.address, machine.port), UserCredential(machine.credential), _CALL_NS
        )
        try:
            await client.call(REVOKE_MACHINE, Done(), _CALL_NS)
        finally:
            await client.close()
    except (TransientError, PermissionDenied) as error:
        return str(error)
    return ""


async def local_guards(directory: AgentDirectory) -> tuple[GuardStatus, ...]:
    """Of the agent that runs on this machine. Raises `UsageError` where it has not joined, `Unreachable`."""
    client = await _connect_here(directory)
    try:
        return (await client.call(LIST_GUARDS, Done(), _CALL_NS)).guards
    finally:
        await client.close()


async def stop_local(directory: AgentDirectory, token: str) -> None:
    """Asks the guard to kill its ranks and end. Raises as `local_guards`, `UsageError` where no such guard lives."""
    client = await _connect_here(directory)
    try:
        known = {guard.token for guard in (await client.call(LIST_GUARDS, Done(), _CALL_NS)).guards}
        if token not in known:
            raise UsageError(f"no guard {token[:80]!r} is known here; `ff agent list` shows them")
        await client.call(STOP_GUARD, GuardName(token), _CALL_NS)
    finally:
        await client.close()


async def _connect_here(directory: AgentDirectory) -> RpcClient:
    membership = directory.membership()
    if membership is None:
        raise UsageError("this machine has not joined; get a token with `ff agent token NAME`, then `ff agent join`")
    return await RpcClient.connect(
        Address("127.0.0.1", membership.port), UserCredential(membership.credential), _CALL_NS
    )
