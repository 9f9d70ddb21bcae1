"""Services ask each other whose token it is: over real connections, with what is remembered and what is sealed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

import pytest
from tests.support.loops import on_loop
from tests.support.network.known_users import known

from fireflyer.accounts import remote
from fireflyer.accounts.calls import FIND_TOKEN, FindToken, FoundUser, sealed, unsealed
from fireflyer.accounts.finders import first_of
from fireflyer.accounts.remembered import LIFETIME_NS, RememberedUsers
from fireflyer.accounts.remote import RemoteAccounts
from fireflyer.accounts.serving import serve_accounts, serving_accounts
from fireflyer.base.errors import FireflyerError, PermissionDenied, Unreachable, UsageError
from fireflyer.base.units import SECOND
from fireflyer.identity.account import Account
from fireflyer.identity.handshake import (
    Accepts,
    FindUser,
    NodeCredential,
    UserCredential,
    UserKey,
    token_id_of,
    token_key,
)
from fireflyer.identity.secrets import Secret, new_secret, save_secret
from fireflyer.runtime.rpc import RpcClient, RpcServer
from fireflyer.runtime.token_watch import RECHECK_S

SECRET = Secret(b"s" * 32)
TOKEN = "fft1.0123.secret"
ADA = UserKey("ada", token_key(TOKEN), Account("ada", 1001, 1002, (50,)), ("fs:admin",))
OF_RUN = dataclasses.replace(ADA, roles=(), scope="run")


@contextlib.asynccontextmanager
async def serving(find_user: FindUser | None) -> AsyncIterator[str]:
    """The address of a service that knows these users; whoever has one of their tokens may connect as well."""
    server = RpcServer(Accepts(SECRET, find_user))
    serve_accounts(server, find_user, SECRET)
    address = await server.start("127.0.0.1", 0)
    try:
        yield str(address)
    finally:
        await server.close()


def asking(*servers: str) -> RemoteAccounts:
    return RemoteAccounts(servers, NodeCredential(SECRET, "fs node 1"))


@on_loop
async def test_a_service_is_told_all_that_a_handshake_and_a_file_system_need() -> None:
    async with serving(known({"0123": ADA, "run-1-0": OF_RUN})) as server, asking(server) as accounts:
        assert await accounts.find("0123") == ADA
        assert await accounts.find("run-1-0") == OF_RUN
        assert await accounts.find("4567") is None
        assert await accounts.find("x" * 1000) is None
    async with serving(None) as server, asking(server) as accounts:
        assert await accounts.find("0123") is None


@on_loop
async def test_only_who_has_the_node_secret_is_told() -> None:
    async with serving(known({"0123": ADA})) as server:
        client = await RpcClient.connect(server, UserCredential(TOKEN), SECOND)
        with pytest.raises(PermissionDenied, match="only services"):
            await client.call(FIND_TOKEN, FindToken("0123"), SECOND)
        await client.close()
        async with RemoteAccounts([server], NodeCredential(Secret(b"o" * 32), "thief")) as accounts:
            with pytest.raises(PermissionDenied, match="another node secret"):
                await accounts.find("0123")


def test_the_key_of_a_token_does_not_stand_in_the_answer() -> None:
    answer = sealed(ADA, SECRET, b"n" * 32)
    assert isinstance(answer, FoundUser)
    assert answer.sealed_key != ADA.key
    assert unsealed(answer, SECRET) == ADA
    assert unsealed(answer, Secret(b"o" * 32)).key != ADA.key
    assert sealed(ADA, SECRET, b"m" * 32) != answer, "another nonce, another text"
    assert sealed(UserKey("gpu-1", b"k" * 32), SECRET, b"n" * 32) is None, "machines have no account"


@on_loop
async def test_what_was_found_is_remembered_for_a_moment_and_what_was_not_is_asked_again() -> None:
    users, asked = {"0123": ADA}, list[str]()

    async def find(token_id: str) -> UserKey | None:
        asked.append(token_id)
        return users.get(token_id)

    async with serving(find) as server, asking(server) as accounts:
        accounts._remembered = RememberedUsers(lifetime_ns=3600 * SECOND)
        for _ in range(3):
            assert await accounts.find("0123") == ADA
            assert await accounts.find("4567") is None
        assert asked == ["0123", "4567", "4567", "4567"]
        users["4567"] = ADA
        assert await accounts.find("4567") == ADA, "a token that was just issued counts at once"


@on_loop
async def test_those_who_ask_for_one_token_at_the_same_time_wait_for_one_answer_whoever_leaves() -> None:
    asked, came, go = list[str](), asyncio.Event(), asyncio.Event()

    async def find(token_id: str) -> UserKey | None:
        asked.append(token_id)
        came.set()
        await go.wait()
        return ADA

    async with serving(find) as server, asking(server) as accounts:
        waiting = [asyncio.ensure_future(accounts.find("0123")) for _ in range(3)]
        await came.wait()
        waiting[0].cancel()
        go.set()
        assert [await one for one in waiting[1:]] == [ADA, ADA]
        assert asked == ["0123"]


@on_loop
async def test_another_service_is_asked_where_one_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "ANSWER_NS", 20 * SECOND)
    async with serving(known({"0123": ADA})) as first, serving(known({"0123": ADA})) as second:
        async with asking("127.0.0.1:1", first) as accounts:
            assert await accounts.find("0123") == ADA
            assert accounts._servers[0] == first, "it is asked first from now on"
        async with asking("127.0.0.1:1") as accounts:
            with pytest.raises(Unreachable):
                await accounts.find("0123")
        async with asking(second) as accounts:
            assert await accounts.find("0123") == ADA
    with pytest.raises(UsageError, match="at least one HOST:PORT"):
        asking()


@on_loop
async def test_so_many_tokens_are_asked_for_at_once_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_ASKED", 2)
    go = asyncio.Event()

    async def find(_: str) -> UserKey | None:
        await go.wait()
        return None

    async with serving(find) as server, asking(server) as accounts:
        waiting = [asyncio.ensure_future(accounts.find(one)) for one in "ab"]
        await asyncio.sleep(0)
        with pytest.raises(FireflyerError, match="2 tokens are asked for already"):
            await accounts.find("c")
        go.set()
        await asyncio.gather(*waiting)


def test_what_is_remembered_has_a_bound_and_counts_from_the_question_on() -> None:
    remembered = RememberedUsers(lifetime_ns=10, most=2)
    remembered.keep(0, "a", ADA)
    assert remembered.find(9, "a") == ADA
    assert remembered.find(10, "a") is None
    for at, token in enumerate("abc"):
        remembered.keep(20 + at, token, ADA)
    assert len(remembered) == 2
    assert [remembered.find(22, token) for token in "abc"] == [None, ADA, ADA]
    remembered.keep(23, "c", None)
    assert remembered.find(23, "c") is None, "it was revoked since"


def test_a_token_that_is_revoked_ends_connections_within_what_is_promised() -> None:
    """Two services on the way remember it, and the look at open connections may just have passed."""
    assert RECHECK_S + 2 * LIFETIME_NS / SECOND < 8


@on_loop
async def test_where_several_know_users_the_first_that_knows_the_token_counts() -> None:
    other = UserKey("bob", b"k" * 32, Account("bob", 1, 1))
    find = first_of([known({"0123": ADA}), known({"0123": other, "4567": other})])
    assert [await find(one) for one in ("0123", "4567", "89")] == [ADA, other, None]


@on_loop
async def test_a_component_serves_accounts_on_a_port_of_its_own_only_where_it_is_told_to(tmp_path: object) -> None:
    async with serving_accounts("", "", "manager", known({})):
        pass
    secret = new_secret()
    save_secret(secret, f"{tmp_path}/secret")
    server = RpcServer(Accepts(secret))
    port = (await server.start("127.0.0.1", 0)).port
    await server.close()
    async with (
        serving_accounts(f"127.0.0.1:{port}", f"{tmp_path}/secret", "manager", known({"0123": ADA})),
        RemoteAccounts([f"127.0.0.1:{port}"], NodeCredential(secret, "fs")) as accounts,
    ):
        assert await accounts.find(token_id_of(TOKEN)) == ADA
