"""What every store of users and tokens does: the file, and the key-value store on each engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.support.kvstore.engines import KINDS, place_of
from tests.support.loops import on_loop

from fireflyer.accounts import AccountStore
from fireflyer.base.errors import Exists, NotFound, PermissionDenied, UsageError
from fireflyer.identity import Account, Identity, IdentityStore, TokenFile, TokenStore
from fireflyer.identity.handshake import token_id_of, token_key
from fireflyer.identity.users import (
    FIRST_UID,
    MAX_GROUPS,
    MAX_ID,
    MAX_LIFETIME_S,
    MAX_ROLES,
    MAX_RUN_LIFETIME_S,
    MAX_TOKENS_PER_USER,
    Scope,
)

NOW = 1_700_000_000


class Where:
    """A store that can be opened again."""

    def __init__(self, kind: str, tmp_path: Path, postgres_url: Callable[[], str]) -> None:
        self._file = str(tmp_path / "tokens.json")
        self._place = None if kind == "file" else place_of(kind, tmp_path, postgres_url)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[IdentityStore]:
        if self._place is None:
            yield TokenFile(TokenStore(self._file))
        else:
            async with await self._place.open() as engine:
                yield AccountStore(engine)


@pytest.fixture(params=["file", *KINDS])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Where:
    return Where(request.param, tmp_path, lambda: request.getfixturevalue("postgres_url"))


@on_loop
async def test_users_have_uids_that_nobody_has_had(where: Where) -> None:
    async with where.open() as store:
        assert await store.create_user("ada", NOW) == Account("ada", FIRST_UID, FIRST_UID)
        assert await store.create_user("alan", NOW, uid=FIRST_UID + 1, gid=5, groups=(9, 7, 9)) == Account(
            "alan", FIRST_UID + 1, 5, (7, 9)
        )
        assert (await store.create_user("grace", NOW)).uid == FIRST_UID + 2
        await store.remove_user("grace")
    async with where.open() as store:
        assert (await store.create_user("barbara", NOW)).uid == FIRST_UID + 3
        assert await store.user("grace") is None
        with pytest.raises(Exists, match="user alan has uid 10001 already"):
            await store.create_user("mallory", NOW, uid=FIRST_UID + 1)
        with pytest.raises(Exists, match="user ada exists already"):
            await store.create_user("ada", NOW)
        await store.remove_user("alan")
        assert (await store.create_user("mallory", NOW, uid=FIRST_UID + 1)).uid == FIRST_UID + 1


@on_loop
async def test_users_are_listed_by_name_in_pages(where: Where) -> None:
    async with where.open() as store:
        for name in ("grace", "Ada", "alan", "a.b", "_x"):
            await store.create_user(name, NOW)
        await store.grant_role("alan", "fs:admin")
        names = sorted(("grace", "Ada", "alan", "a.b", "_x"))
        assert [user.account.name for user in await store.users()] == names
        first = await store.users(limit=2)
        assert [user.account.name for user in first] == names[:2]
        rest = await store.users(first[-1].account.name, limit=2)
        assert [user.account.name for user in rest] == names[2:4]
        assert await store.users("zz") == await store.users("z" * 1000) == await store.users(limit=0) == []
        (alan,) = [user for user in await store.users() if user.account.name == "alan"]
        assert alan == await store.user("alan")
        assert (alan.roles, alan.created_s) == (("fs:admin",), NOW)


@on_loop
async def test_roles_are_granted_and_revoked_by_their_words(where: Where) -> None:
    async with where.open() as store:
        await store.create_user("ada", NOW)
        token = await store.issue("ada", NOW)
        for role in ("platform:operator", "fs:admin", "platform:operator"):
            await store.grant_role("ada", role)
        assert (await store.verify(token, NOW)).roles == ("fs:admin", "platform:operator")
    async with where.open() as store:
        await store.revoke_role("ada", "fs:admin")
        await store.revoke_role("ada", "fs:admin")
        assert (await store.verify(token, NOW)).roles == ("platform:operator",)
        await store.remove_user("ada")
        await store.create_user("ada", NOW)
        user = await store.user("ada")
        assert user is not None
        assert user.roles == (), "of the one who had the name before"
        for role in ("", "admin", "fs:", ":admin", "fs:admin:x", "FS:admin", "fs:admin\n", "fs:" + "a" * 33):
            with pytest.raises(UsageError, match="must be OWNER:ROLE"):
                await store.grant_role("ada", role)
        for number in range(MAX_ROLES):
            await store.grant_role("ada", f"fs:r{number}")
        await store.grant_role("ada", "fs:r0")
        with pytest.raises(UsageError, match="32 roles, the maximum"):
            await store.grant_role("ada", "fs:more")
        with pytest.raises(NotFound, match="no user 'alan'"):
            await store.grant_role("alan", "fs:admin")
        with pytest.raises(NotFound, match="no user 'alan'"):
            await store.revoke_role("alan", "fs:admin")


@on_loop
async def test_a_token_names_its_user_until_it_expires_or_is_revoked(where: Where) -> None:
    async with where.open() as store:
        await store.create_user("ada", NOW)
        lasting = await store.issue("ada", NOW, label="laptop")
        short = await store.issue("ada", NOW + 1, lifetime_s=10)
    async with where.open() as store:
        assert await store.verify(lasting, NOW + 10**9) == Identity("ada", "user", (), token_id_of(lasting), "laptop")
        assert (await store.verify(short, NOW + 10)).user == "ada"
        assert [(info.label, info.expires_s, info.scope) for info in await store.tokens("ada")] == [
            ("laptop", None, "user"),
            ("", NOW + 11, "user"),
        ]
        found = await store.find(token_id_of(lasting), NOW)
        assert found is not None
        assert (found.user, found.key) == ("ada", token_key(lasting))
        assert await store.find(token_id_of(short), NOW + 11) is None
        with pytest.raises(PermissionDenied, match="unknown, revoked or expired"):
            await store.verify(short, NOW + 11)
        await store.revoke(token_id_of(lasting))
        with pytest.raises(PermissionDenied, match="unknown, revoked or expired"):
            await store.verify(lasting, NOW)
        with pytest.raises(NotFound, match="no token with id"):
            await store.revoke(token_id_of(lasting))


@on_loop
async def test_every_wrong_token_is_refused_in_the_same_words(where: Where) -> None:
    async with where.open() as store:
        await store.create_user("ada", NOW)
        token = await store.issue("ada", NOW)
        number = token_id_of(token)
        wrong = [token[:-1], token + "x", f"fft1.{number}.x", f"fft1.{'0' * 16}.x", "", "x", f"fft1.{'a' * 200}.x"]
        wrong += [f"fft1.{number}\0.x", "fft1.é.x", f"fft1.{number}/../x.y"]
        told = set()
        for one in wrong:
            with pytest.raises(PermissionDenied) as refused:
                await store.verify(one, NOW)
            told.add(refused.value.message)
        assert len(told) == 1
        for one in ("", "é", "a" * 1000, "\0", number + "0"):
            assert await store.find(one, NOW) is None


@on_loop
async def test_a_token_of_a_run_expires_has_no_role_and_is_found_only_where_it_is_asked_for(where: Where) -> None:
    async with where.open() as store:
        await store.create_user("ada", NOW)
        await store.grant_role("ada", "fs:admin")
        token = await store.issue("ada", NOW, lifetime_s=60, label="task 7 run 0", scope="run")
        number = token_id_of(token)
        assert await store.verify(token, NOW) == Identity("ada", "run", (), number, "task 7 run 0")
        assert [info.scope for info in await store.tokens("ada")] == ["run"]
        assert await store.find(number, NOW) is None
        both: tuple[Scope, ...] = ("user", "run")
        assert await store.find(number, NOW, both) is not None
        assert await store.find(number, NOW + 60, both) is None
        with pytest.raises(UsageError, match="a token of a run must expire"):
            await store.issue("ada", NOW, scope="run")
        for scope, limit_s in (("run", MAX_RUN_LIFETIME_S), ("user", MAX_LIFETIME_S)):
            with pytest.raises(UsageError, match=f"at most {limit_s} are allowed"):
                await store.issue("ada", NOW, lifetime_s=limit_s + 1, scope=scope)  # type: ignore[arg-type]
            await store.issue("ada", NOW, lifetime_s=limit_s, scope=scope)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="token scope 'root'"):
            await store.issue("ada", NOW, lifetime_s=1, scope="root")  # type: ignore[arg-type]


@on_loop
async def test_the_tokens_of_a_user_are_bounded_and_expired_ones_make_room(where: Where) -> None:
    async with where.open() as store:
        await store.create_user("ada", NOW)
        for _ in range(MAX_TOKENS_PER_USER):
            await store.issue("ada", NOW, lifetime_s=10)
        with pytest.raises(UsageError, match="64 tokens, the maximum"):
            await store.issue("ada", NOW + 9)
        await store.issue("ada", NOW, lifetime_s=10, scope="run")
        await store.issue("ada", NOW + 10)
        (left,) = [info for info in await store.tokens("ada") if info.expires_s is None]
        await store.revoke(left.id)


@on_loop
async def test_with_a_user_all_their_tokens_end_and_nobody_elses(where: Where) -> None:
    async with where.open() as store:
        await store.create_user("ada", NOW)
        await store.create_user("adam", NOW)
        kept = await store.issue("adam", NOW)
        ended = [await store.issue("ada", NOW), await store.issue("ada", NOW, lifetime_s=60, scope="run")]
        await store.remove_user("ada")
        await store.create_user("ada", NOW)
        for token in ended:
            with pytest.raises(PermissionDenied):
                await store.verify(token, NOW)
        assert await store.tokens("ada") == []
        assert (await store.verify(kept, NOW)).user == "adam"
        with pytest.raises(NotFound):
            await store.remove_user("nobody")
        with pytest.raises(NotFound):
            await store.tokens("nobody")
        with pytest.raises(NotFound):
            await store.issue("nobody", NOW)


@on_loop
async def test_bad_arguments_change_nothing(where: Where) -> None:
    async with where.open() as store:
        for name in ("", "a b", "a/b", "1st", "a" * 65, "ada\n", "ada\0", "é"):
            with pytest.raises(UsageError, match="user name"):
                await store.create_user(name, NOW)
            assert await store.user(name) is None
        for numbers in ({"uid": -1}, {"gid": MAX_ID + 1}):
            with pytest.raises(UsageError, match="are allowed"):
                await store.create_user("ada", NOW, **numbers)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="groups of user ada"):
            await store.create_user("ada", NOW, groups=range(MAX_GROUPS + 1))
        assert await store.users() == []
        await store.create_user("ada", NOW)
        with pytest.raises(UsageError, match="must be positive"):
            await store.issue("ada", NOW, lifetime_s=0)
        with pytest.raises(UsageError, match="token label"):
            await store.issue("ada", NOW, label="two\nlines")
        assert await store.tokens("ada") == []
