"""A service that lets administrators change the users in its store, and how they ask it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Final, Self, TypeVar

from fireflyer.accounts.store import AccountStore
from fireflyer.accounts.user_calls import (
    CHANGE_USERS,
    AddToken,
    AddUser,
    Changed,
    ChangeRole,
    ExpireToken,
    FoundUsers,
    GetTokens,
    GetUser,
    GetUsers,
    RemoveUser,
    RevokeToken,
    TokensOfUser,
    UserAdded,
    UserAnswer,
    UserRequest,
    sealed_key,
    unsealed_key,
)
from fireflyer.base.errors import InvariantViolation, PermissionDenied, TransientError, Unreachable, UsageError
from fireflyer.base.units import SECOND
from fireflyer.identity.account import Account
from fireflyer.identity.handshake import NONCE_BYTES, FindUser, NodeCredential, UserCredential, token_id_of, token_key
from fireflyer.identity.secrets import Secret
from fireflyer.identity.users import TokenInfo, UserInfo, check_label, new_token
from fireflyer.runtime.rpc.client import RpcClient
from fireflyer.runtime.rpc.server import Caller, RpcServer

__all__ = ["UsersClient", "serve_users"]

T = TypeVar("T")
CONNECT_NS: Final = 3 * SECOND


def serve_users(
    server: RpcServer,
    store: AccountStore,
    secret: Secret,
    find_user: FindUser,
    may_change: Callable[[Caller], bool],
) -> None:
    """With `server`, which has this node secret and `find_user`. `may_change`: of callers that are users; services
    may."""

    async def change(request: UserRequest, caller: Caller) -> UserAnswer:
        if caller.role != "node" and not may_change(caller):
            raise PermissionDenied(f"only administrators may see and change users, and {caller.identity} is not one")
        if isinstance(request, AddToken):
            sealing = await _sealing_key(request.sealed_by, caller, secret, find_user)
            return await _add_token(store, request, sealing)
        return await _perform(store, request)

    server.register(CHANGE_USERS, change)


async def _sealing_key(token_id: str, caller: Caller, secret: Secret, find_user: FindUser) -> bytes:
    if caller.role == "node":
        return secret.reveal()
    user = await find_user(token_id)
    if user is None or user.user != caller.identity:
        raise PermissionDenied("the new token is not sealed with the token of who asks; connect again")
    return user.key


async def _add_token(store: AccountStore, request: AddToken, sealing: bytes) -> UserAnswer:
    key = unsealed_key(request.sealed_key, sealing, request.nonce)
    await store.add_token(
        request.name, int(time.time()), request.id, key, lifetime_s=request.lifetime_s, label=request.label
    )
    return Changed()


async def _perform(store: AccountStore, request: UserRequest) -> UserAnswer:
    now_s = int(time.time())
    match request:
        case AddUser(name, uid, gid, groups):
            return UserAdded(await store.create_user(name, now_s, uid=uid, gid=gid, groups=groups))
        case GetUser(name):
            user = await store.user(name)
            return FoundUsers([] if user is None else [user])
        case GetUsers(after):
            return FoundUsers(await store.users(after))
        case GetTokens(name):
            return TokensOfUser(await store.tokens(name))
        case RemoveUser(name):
            await store.remove_user(name)
        case ChangeRole(name, role, granted):
            await (store.grant_role if granted else store.revoke_role)(name, role)
        case RevokeToken(token_id):
            await store.revoke(token_id)
        case ExpireToken(token_id, after_s):
            await store.expire(token_id, now_s + after_s)
        case AddToken():
            raise InvariantViolation("AddToken needs a key")
    return Changed()


class UsersClient:
    """Users of a service, as an administrator changes them; use it with `async with`, in one loop.

    The first of `servers` that is reached is asked. A call that raises `Timeout` or `Unreachable` may have changed
    what it was to change: it is not tried again."""

    def __init__(
        self, servers: Sequence[str], credential: NodeCredential | UserCredential, *, timeout_ns: int = 10 * SECOND
    ) -> None:
        """`servers`: HOST:PORT of each. `timeout_ns`: of each call. Raises `UsageError` where there is none."""
        if not servers:
            raise UsageError("nobody is named who keeps the users; give at least one HOST:PORT")
        self._servers = list(servers)
        self._credential = credential
        self._timeout_ns = timeout_ns
        self._client: RpcClient | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def create_user(
        self, name: str, *, uid: int | None = None, gid: int | None = None, groups: Sequence[int] = ()
    ) -> Account:
        """Raises as `AccountStore.create_user`, and `PermissionDenied`, like the methods below."""
        return _expect(await self._ask(AddUser(name, uid, gid, tuple(groups))), UserAdded).account

    async def remove_user(self, name: str) -> None:
        await self._ask(RemoveUser(name))

    async def user(self, name: str) -> UserInfo | None:
        found = _expect(await self._ask(GetUser(name)), FoundUsers).users
        return found[0] if found else None

    async def users(self) -> list[UserInfo]:
        """All, sorted by name."""
        users: list[UserInfo] = []
        while page := _expect(await self._ask(GetUsers(users[-1].account.name if users else "")), FoundUsers).users:
            users += page
        return users

    async def grant_role(self, name: str, role: str) -> None:
        await self._ask(ChangeRole(name, role, granted=True))

    async def revoke_role(self, name: str, role: str) -> None:
        await self._ask(ChangeRole(name, role, granted=False))

    async def issue(self, name: str, *, lifetime_s: int | None = None, label: str = "") -> str:
        """A new token, which nobody else is told."""
        check_label(label)
        made, nonce = new_token(), secrets.token_bytes(NONCE_BYTES)
        if isinstance(self._credential, NodeCredential):
            sealed_by, sealing = "", self._credential.secret.reveal()
        else:
            sealed_by, sealing = token_id_of(self._credential.token), token_key(self._credential.token)
        await self._ask(
            AddToken(
                name=name,
                id=made.id,
                nonce=nonce,
                sealed_key=sealed_key(made.key, sealing, nonce),
                sealed_by=sealed_by,
                lifetime_s=lifetime_s,
                label=label,
            )
        )
        return made.token

    async def tokens(self, name: str) -> list[TokenInfo]:
        return _expect(await self._ask(GetTokens(name)), TokensOfUser).tokens

    async def revoke(self, token_id: str) -> None:
        await self._ask(RevokeToken(token_id))

    async def expire(self, token_id: str, after_s: int) -> None:
        await self._ask(ExpireToken(token_id, after_s))

    async def _ask(self, request: UserRequest) -> UserAnswer:
        client = self._client
        if client is None or client.lost is not None:
            await self.close()
            client = self._client = await self._connect()
        return await client.call(CHANGE_USERS, request, self._timeout_ns)

    async def _connect(self) -> RpcClient:
        reason: TransientError = Unreachable("nobody was asked")
        for server in self._servers:
            try:
                return await RpcClient.connect(server, self._credential, min(self._timeout_ns, CONNECT_NS))
            except TransientError as error:
                reason = error
        raise reason


def _expect(answer: UserAnswer, answer_type: type[T]) -> T:
    if not isinstance(answer, answer_type):
        raise InvariantViolation(
            f"the service answered with {type(answer).__name__} instead of {answer_type.__name__}; install the same "
            "release of Fire-Flyer here and there"
        )
    return answer
