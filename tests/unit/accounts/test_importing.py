"""A file of users and tokens comes into the key-value store once, whole, whoever dies when."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.accounts.histories import problems_in
from tests.support.loops import on_loop

from fireflyer.accounts import AccountStore, importing
from fireflyer.accounts.importing import IMPORTED_SUFFIX, import_users, rows_of
from fireflyer.base.errors import DataCorruption, Exists, PermissionDenied, UsageError
from fireflyer.identity import Account, TokenStore
from fireflyer.identity.handshake import token_id_of
from fireflyer.identity.private_files import rename_private_file
from fireflyer.identity.users import FIRST_UID, Scope
from fireflyer.kvstore import CommitFault, MemoryEngine, MemoryStore

NOW = 1_700_000_000
BOTH: tuple[Scope, ...] = ("user", "run")
Damage = Callable[[dict[str, Any]], object]


class Old:
    """A file as an earlier release left it."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        users = TokenStore(self.path)
        for name in ("ada", "bob", "gone"):
            users.create_user(name, NOW, groups=(7, 5))
        users.create_user("uid", NOW, uid=1000, gid=100)
        users.remove_user("gone")
        users.grant_role("ada", "fs:admin")
        self.ada, self.bob = users.issue("ada", NOW, label="laptop"), users.issue("bob", NOW, lifetime_s=10**9)
        self.expired = users.issue("bob", NOW, lifetime_s=1)
        self.of_run = users.issue("bob", NOW, lifetime_s=60, scope="run")

    @property
    def there(self) -> bool:
        return os.path.exists(self.path)

    @property
    def imported(self) -> bool:
        return os.path.exists(self.path + IMPORTED_SUFFIX)

    def change(self, damage: Damage) -> None:
        content = json.loads(Path(self.path).read_text())
        damage(content)
        Path(self.path).write_text(json.dumps(content))


@pytest.fixture
def old(tmp_path: Path) -> Old:
    return Old(tmp_path / "tokens.json")


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fireflyer.accounts.importing.time.time", lambda: float(NOW + 2))


async def check_whole(old: Old, kept: MemoryStore) -> None:
    async with MemoryEngine(kept) as engine:
        users = AccountStore(engine)
        assert [one.account for one in await users.users()] == [
            Account("ada", FIRST_UID, FIRST_UID, (5, 7)),
            Account("bob", FIRST_UID + 1, FIRST_UID + 1, (5, 7)),
            Account("uid", 1000, 100),
        ]
        verified = await users.verify(old.ada, NOW + 2)
        assert (verified.user, verified.roles, verified.label) == ("ada", ("fs:admin",), "laptop")
        assert (await users.verify(old.bob, NOW + 2)).user == "bob"
        assert (await users.verify(old.of_run, NOW + 2)).scope == "run"
        with pytest.raises(PermissionDenied):
            await users.verify(old.expired, NOW)
        assert [one.scope for one in await users.tokens("bob")].count("run") == 1
    assert problems_in(kept) == []


@on_loop
async def test_users_roles_and_tokens_are_in_the_store_and_no_uid_is_given_twice(old: Old) -> None:
    kept = MemoryStore()
    async with MemoryEngine(kept) as engine:
        await import_users(engine, old.path)
        await check_whole(old, kept)
        assert (await AccountStore(engine).create_user("new", NOW)).uid == FIRST_UID + 3, "gone had the one before"
        await AccountStore(engine).revoke(token_id_of(old.ada))
        await AccountStore(engine).remove_user("bob")
        await import_users(engine, old.path)
        assert await AccountStore(engine).user("bob") is None, "a start changes nothing any more"
    assert not old.there
    assert old.imported


@pytest.mark.parametrize("fault", list(CommitFault))
@on_loop
async def test_a_commit_of_which_nobody_knows_leaves_the_file_or_the_whole_of_it(old: Old, fault: CommitFault) -> None:
    kept, faults = MemoryStore(), [fault]
    async with MemoryEngine(kept, faults=lambda: faults.pop() if faults else CommitFault.NONE) as engine:
        await import_users(engine, old.path)
    await check_whole(old, kept)
    assert not old.there


class Killed(BaseException):
    pass


@pytest.mark.parametrize("point", ["before the commit", "after the commit", "after the rename"])
@on_loop
async def test_a_manager_that_is_killed_leaves_the_old_or_the_new_whole(
    old: Old, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = MemoryStore()
    commit, rename = importing._commit, rename_private_file

    async def dying_commit(*arguments: Any) -> Any:
        if point == "after the commit":
            await commit(*arguments)
        raise Killed

    def dying_rename(path: str, new_path: str) -> None:
        rename(path, new_path)
        raise Killed

    with monkeypatch.context() as patched:
        if point == "after the rename":
            patched.setattr(importing, "rename_private_file", dying_rename)
        else:
            patched.setattr(importing, "_commit", dying_commit)
        async with MemoryEngine(kept) as engine:
            with pytest.raises(Killed):
                await import_users(engine, old.path)
    if point == "before the commit":
        async with MemoryEngine(kept) as engine:
            assert await AccountStore(engine).users() == []
    else:
        await check_whole(old, kept)
    assert old.there == (point != "after the rename")
    async with MemoryEngine(kept) as engine:
        await import_users(engine, old.path)
    await check_whole(old, kept)
    assert not old.there


@on_loop
async def test_of_managers_that_start_at_once_one_imports_and_both_have_all(old: Old, tmp_path: Path) -> None:
    """Each has its own copy, as a cluster of several machines does; then both have the same file."""
    copy = str(tmp_path / "copy.json")
    await asyncio.to_thread(shutil.copy, old.path, copy)
    for paths in ((old.path, copy), (old.path + IMPORTED_SUFFIX,) * 2):
        kept = MemoryStore()
        async with MemoryEngine(kept) as one, MemoryEngine(kept) as other:
            await asyncio.gather(import_users(one, paths[0]), import_users(other, paths[1]))
        await check_whole(old, kept)
        assert not old.there


@on_loop
async def test_a_file_with_other_users_than_the_store_stays_and_counts_for_nothing(
    old: Old, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = MemoryStore()
    other = Old(tmp_path / "other.json")
    async with MemoryEngine(kept) as engine:
        await import_users(engine, old.path)
        await import_users(engine, other.path)
        await check_whole(old, kept)
        with pytest.raises(PermissionDenied):
            await AccountStore(engine).verify(other.ada, NOW + 2)
    assert other.there
    assert "is not read: the key-value store has users already" in caplog.text


@on_loop
async def test_users_that_were_all_removed_do_not_come_back(old: Old) -> None:
    async with MemoryEngine() as engine:
        users = AccountStore(engine)
        await users.create_user("eve", NOW)
        await users.remove_user("eve")
        with pytest.raises(UsageError, match="ada, bob, uid"):
            await import_users(engine, old.path)
        assert await users.users() == []


@on_loop
async def test_a_file_with_users_whom_the_store_does_not_know_is_refused_and_names_them(
    old: Old, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "_PAGE", 2)
    other = TokenStore(str(tmp_path / "other.json"))
    for name in ("ada", "uid", "late", *(f"u{at}" for at in range(6))):
        other.create_user(name, NOW)
    async with MemoryEngine() as engine:
        await import_users(engine, old.path)
        with pytest.raises(UsageError, match=r"does not know: late, u0, u1, u2, u3 and 2 more\..*ff fs admin user add"):
            await import_users(engine, str(tmp_path / "other.json"))
        for name in ("late", *(f"u{at}" for at in range(6))):
            await AccountStore(engine).create_user(name, NOW)
        await import_users(engine, str(tmp_path / "other.json"))


@pytest.mark.parametrize("engine_has_users", [True, False])
@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.write_bytes(b"{"),
        lambda path: path.chmod(0o644),
        lambda path: path.write_text(path.read_text().replace('"ada"', '"no good"')),
    ],
    ids=["damaged", "readable", "impossible"],
)
@on_loop
async def test_a_renamed_file_does_not_stop_a_start(
    old: Old, harm: Callable[[Path], object], engine_has_users: bool, caplog: pytest.LogCaptureFixture
) -> None:
    kept = MemoryStore()
    async with MemoryEngine(kept) as engine:
        await import_users(engine, old.path)
    await asyncio.to_thread(harm, Path(old.path + IMPORTED_SUFFIX))
    async with MemoryEngine(kept if engine_has_users else MemoryStore()) as engine:
        await import_users(engine, old.path)
        assert len(await AccountStore(engine).users()) == (3 if engine_has_users else 0)
    assert "is a copy of what was imported, and not read" in caplog.text


@on_loop
async def test_a_store_that_is_made_anew_gets_them_from_the_renamed_file(old: Old) -> None:
    async with MemoryEngine() as first:
        await import_users(first, old.path)
    kept = MemoryStore()
    async with MemoryEngine(kept) as engine:
        await import_users(engine, old.path)
        await check_whole(old, kept)
    assert old.imported


@on_loop
async def test_what_an_older_release_changes_meanwhile_is_not_lost_with_the_file(
    old: Old, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    commit = importing._commit

    async def slow_commit(*arguments: Any) -> Any:
        outcome = await commit(*arguments)
        TokenStore(old.path).create_user("late", NOW)
        return outcome

    monkeypatch.setattr(importing, "_commit", slow_commit)
    async with MemoryEngine() as engine:
        await import_users(engine, old.path)
        assert await AccountStore(engine).user("late") is None
    assert TokenStore(old.path).user("late") is not None
    assert "was changed while it was imported" in caplog.text


@on_loop
async def test_nothing_to_import_changes_nothing(tmp_path: Path) -> None:
    async with MemoryEngine() as engine:
        await import_users(engine, "")
        await import_users(engine, str(tmp_path / "none.json"))
        assert (await AccountStore(engine).create_user("ada", NOW)).uid == FIRST_UID


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file["users"][0].update(name="no good"),
        lambda file: file["users"][0].update(name="a" * 65),
        lambda file: file["users"][0].update(roles=["fs:admin\n"]),
        lambda file: file["users"][0].update(created_s=-1),
        lambda file: file["users"][0].update(created_s=1 << 60),
        lambda file: file["users"][0].update(uid=file["users"][1]["uid"]),
        lambda file: file["users"][0]["tokens"][0].update(id=""),
        lambda file: file["users"][0]["tokens"][0].update(id="a.b"),
        lambda file: file["users"][0]["tokens"][0].update(id="é"),
        lambda file: file["users"][0]["tokens"][0].update(label="two\nlines"),
        lambda file: file["users"][0]["tokens"][0].update(expires_s=1 << 60),
        lambda file: file["users"][0]["tokens"].append(file["users"][1]["tokens"][0]),
        lambda file: file["users"][0].update(
            tokens=[{**file["users"][0]["tokens"][0], "id": f"{at:04}"} for at in range(65)]
        ),
        lambda file: file.update(version=9),
        lambda file: file.update(users=[{**file["users"][2], "name": f"u{at}", "uid": at} for at in range(10_001)]),
    ],
)
@on_loop
async def test_a_file_that_no_release_has_written_is_refused_and_leaves_no_row(old: Old, damage: Damage) -> None:
    old.change(damage)
    kept = MemoryStore()
    async with MemoryEngine(kept) as engine:
        with pytest.raises(DataCorruption, match="token file"):
            await import_users(engine, old.path)
        assert await AccountStore(engine).users() == []
        await AccountStore(engine).create_user("ada", NOW)
    assert old.there


@on_loop
async def test_a_file_that_others_may_read_is_refused(old: Old) -> None:
    await asyncio.to_thread(os.chmod, old.path, 0o644)
    async with MemoryEngine() as engine:
        with pytest.raises(PermissionDenied, match="chmod 600"):
            await import_users(engine, old.path)


def test_a_file_that_is_too_large_for_a_transaction_is_refused_before_it_begins(
    old: Old, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = TokenStore(old.path).content()
    assert content is not None
    monkeypatch.setattr(importing, "MAX_ENTRIES", importing._SPARE_ENTRIES + len(rows_of("f", content, NOW + 2)))
    rows_of("f", content, NOW + 2)
    with pytest.raises(UsageError, match="revoke unused tokens"):
        rows_of("f", content, NOW)  # one more token has not expired


@on_loop
async def test_a_token_is_added_once_and_its_number_is_nobody_elses() -> None:
    async with MemoryEngine() as engine:
        users = AccountStore(engine)
        for name in ("ada", "bob"):
            await users.create_user(name, NOW)
        await users.add_token("ada", NOW, "0123", b"k" * 32)
        await users.add_token("ada", NOW + 1, "0123", b"k" * 32)
        assert len(await users.tokens("ada")) == 1
        for name, key in (("ada", b"x" * 32), ("bob", b"k" * 32)):
            with pytest.raises(Exists, match="another token with id 0123"):
                await users.add_token(name, NOW, "0123", key)
        await users.expire("0123", NOW + 5)
        await users.expire("0123", NOW + 5)
        with pytest.raises(UsageError, match="expires earlier already"):
            await users.expire("0123", NOW + 6)
        assert await users.find("0123", NOW + 4, BOTH) is not None
        assert await users.find("0123", NOW + 5, BOTH) is None
        await users.issue("ada", NOW + 5)
        assert len(await users.tokens("ada")) == 1, "the expired one has made room"
