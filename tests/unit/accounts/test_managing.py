"""Administrators change the users of a service over its port, and nobody else does."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from tests.support.accounts.served import serving_users
from tests.support.loops import on_loop

from fireflyer.accounts import AccountStore
from fireflyer.accounts.managing import UsersClient
from fireflyer.accounts.remembered import RememberedUsers
from fireflyer.accounts.remote import RemoteAccounts
from fireflyer.accounts.user_calls import (
    CHANGE_USERS,
    AddToken,
    AddUser,
    ChangeRole,
    ExpireToken,
    GetTokens,
    GetUser,
    RevokeToken,
    UserRequest,
    sealed_key,
)
from fireflyer.base.errors import FireflyerError, NotFound, PermissionDenied, Unreachable, UsageError
from fireflyer.base.units import SECOND
from fireflyer.identity import NodeCredential, Secret, UserCredential
from fireflyer.identity.handshake import token_id_of, token_key
from fireflyer.identity.users import MAX_TOKENS_PER_USER
from fireflyer.kvstore import MemoryEngine
from fireflyer.runtime.rpc import RpcClient

SECRET = Secret(b"s" * 32)
SERVICE = NodeCredential(SECRET, "test")


@contextlib.asynccontextmanager
async def service() -> AsyncIterator[tuple[str, AccountStore]]:
    async with MemoryEngine() as engine, serving_users(SECRET, engine) as address:
        yield address, AccountStore(engine)


@on_loop
async def test_a_token_that_was_issued_over_a_connection_is_a_token() -> None:
    """With either credential the sealed key is opened to the one of the token that the client has made."""
    async with service() as (address, store), UsersClient([address], SERVICE) as users:
        await users.create_user("admin")
        own = await users.issue("admin", label="first")
        assert (await store.verify(own, 0)).label == "first"
        async with UsersClient([address], UserCredential(own)) as admin:
            await admin.create_user("ada", uid=7, gid=8, groups=(3, 2))
            token = await admin.issue("ada", lifetime_s=10**6)
            async with RemoteAccounts([address], SERVICE) as accounts:
                found = await accounts.find(token_id_of(token))
            assert found is not None
            assert (found.user, found.key) == ("ada", token_key(token))
            user = await admin.user("ada")
            assert user is not None
            assert (user.account.uid, user.account.gid, user.account.groups) == (7, 8, (2, 3))
            assert [one.account.name for one in await admin.users()] == ["ada", "admin"]
            assert await admin.user("nobody") is None


@on_loop
async def test_what_goes_over_the_connection_is_neither_the_token_nor_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    call = RpcClient.call

    async def seen(self: RpcClient, method: Any, request: Any, timeout_ns: int) -> Any:
        sent.append(msgspec.msgpack.encode(request))
        return await call(self, method, request, timeout_ns)

    async with service() as (address, _), UsersClient([address], SERVICE) as users:
        await users.create_user("ada")
        monkeypatch.setattr(RpcClient, "call", seen)
        token = await users.issue("ada")
    assert len(sent) == 1
    for part in (token.rpartition(".")[2].encode(), token_key(token)):
        assert part not in sent[0]


@on_loop
async def test_only_administrators_change_users() -> None:
    async with service() as (address, store):
        for name in ("admin", "ada"):
            await store.create_user(name, 0)
        ada = UserCredential(await store.issue("ada", 0))
        of_run = UserCredential(await store.issue("admin", int(time.time()), lifetime_s=3600, scope="run"))
        for credential in (ada, of_run):
            async with UsersClient([address], credential) as users:
                for change in (
                    users.create_user("eve"),
                    users.issue("admin"),
                    users.grant_role("ada", "fs:admin"),
                    users.users(),
                    users.tokens("admin"),
                    users.remove_user("admin"),
                    users.revoke("0123"),
                    users.expire("0123", 1),
                ):
                    with pytest.raises(PermissionDenied, match="only administrators may see and change users"):
                        await change
        assert [one.account.name for one in await store.users()] == ["ada", "admin"]


@on_loop
async def test_a_key_that_is_sealed_with_the_token_of_somebody_else_is_refused() -> None:
    async with service() as (address, store):
        for name in ("admin", "ada"):
            await store.create_user(name, 0)
        own, other = await store.issue("admin", 0), await store.issue("ada", 0)
        client = await RpcClient.connect(address, UserCredential(own), 5 * SECOND)
        for sealed_by in (token_id_of(other), "", "nobody's", "é"):
            request = AddToken(
                name="ada",
                id="0123",
                nonce=b"n" * 32,
                sealed_key=sealed_key(b"k" * 32, token_key(own), b"n" * 32),
                sealed_by=sealed_by,
                lifetime_s=None,
                label="",
            )
            with pytest.raises(PermissionDenied, match="not sealed with the token of who asks"):
                await client.call(CHANGE_USERS, request, 5 * SECOND)
        await client.close()
        assert len(await store.tokens("ada")) == 1


def token(token_id: str, **changes: Any) -> AddToken:
    fields: dict[str, Any] = {"nonce": b"n" * 32, "sealed_key": b"k" * 32, "lifetime_s": None, "label": ""}
    return AddToken(name="admin", id=token_id, sealed_by="", **(fields | changes))


@pytest.mark.parametrize(
    "request_",
    [
        AddUser("a" * 65),
        AddUser("no good"),
        AddUser("a" * 1000),
        AddUser("ada", uid=1 << 40),
        AddUser("ada", groups=tuple(range(100))),
        AddUser("ada", groups=tuple(range(1000))),
        ChangeRole("admin", "fs", granted=True),
        ChangeRole("admin", "x" * 100, granted=True),
        GetTokens("nobody"),
        RevokeToken("é"),
        RevokeToken(""),
        ExpireToken("0123", 0),
        ExpireToken("0123", 1 << 60),
        token("0" * 100),
        token("a.b"),
        token("1", nonce=b"n"),
        token("1", sealed_key=b"k" * 33),
        token("1", label="\n"),
        token("1", lifetime_s=0),
    ],
)
@on_loop
async def test_hostile_requests_change_nothing_and_end_no_connection(request_: UserRequest) -> None:
    async with service() as (address, store):
        await store.create_user("admin", 0)
        client = await RpcClient.connect(address, SERVICE, 5 * SECOND)
        with pytest.raises(FireflyerError):
            await client.call(CHANGE_USERS, request_, 5 * SECOND)
        await client.call(CHANGE_USERS, GetUser("admin"), 5 * SECOND)
        await client.close()
        assert [one.account.name for one in await store.users()] == ["admin"]
        assert await store.tokens("admin") == []


@on_loop
async def test_the_tokens_of_a_user_are_bounded() -> None:
    async with service() as (address, store), UsersClient([address], SERVICE) as users:
        await users.create_user("ada")
        for _ in range(MAX_TOKENS_PER_USER):
            await store.issue("ada", 0)
        with pytest.raises(UsageError, match="64 tokens, the maximum"):
            await users.issue("ada")
        await users.revoke((await users.tokens("ada"))[0].id)
        await users.issue("ada")
        with pytest.raises(NotFound):
            await users.revoke("0123")


@on_loop
async def test_the_next_one_is_asked_where_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    async with service() as (address, _), UsersClient(["127.0.0.1:1", address], SERVICE) as users:
        await users.create_user("ada")
    with pytest.raises(Unreachable):
        async with UsersClient(["127.0.0.1:1"], SERVICE) as users:
            await users.users()
    with pytest.raises(UsageError, match="give at least one"):
        UsersClient([], SERVICE)


@on_loop
async def test_a_revoked_token_counts_for_nobody_who_asks_afterwards() -> None:
    async with service() as (address, _), UsersClient([address], SERVICE) as users:
        await users.create_user("ada")
        token = await users.issue("ada")
        async with RemoteAccounts([address], SERVICE) as accounts:
            accounts._remembered = RememberedUsers(lifetime_ns=0)
            assert await accounts.find(token_id_of(token)) is not None
            await users.revoke(token_id_of(token))
            assert await accounts.find(token_id_of(token)) is None
