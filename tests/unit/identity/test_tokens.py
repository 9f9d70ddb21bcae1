"""Tokens are shown once, kept as hashes, and refused when wrong, revoked or expired."""

from __future__ import annotations

import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fireflyer.base.errors import DataCorruption, Exists, NotFound, PermissionDenied, UsageError
from fireflyer.identity import Identity, tokens
from fireflyer.identity.tokens import TokenStore
from fireflyer.identity.users import FIRST_UID, MAX_TOKENS_PER_USER, Account

NOW = 1_700_000_000


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "users.json")


@pytest.fixture
def store(path: str) -> TokenStore:
    store = TokenStore(path)
    store.create_user("ada", NOW)
    store.create_user("grace", NOW)
    return store


def test_a_token_names_its_user_now_and_after_a_restart(store: TokenStore, path: str) -> None:
    token = store.issue("ada", NOW, label="laptop")
    assert store.verify(token, NOW).user == "ada"
    assert TokenStore(path).verify(token, NOW + 10**9).user == "ada"
    assert [info.label for info in TokenStore(path).tokens("ada")] == ["laptop"]
    assert TokenStore(path).users() == ["ada", "grace"]


def test_only_a_hash_is_at_rest_in_a_private_file(store: TokenStore, path: str) -> None:
    token = store.issue("ada", NOW)
    content = Path(path).read_text()
    assert token not in content
    assert token.split(".")[2] not in content
    assert token.split(".")[1] in content
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert token not in repr(store.find(token.split(".")[1], NOW))


def test_every_wrong_token_is_refused_in_the_same_words(store: TokenStore) -> None:
    token = store.issue("ada", NOW)
    mark, token_id, secret = token.split(".")
    revoked = store.issue("ada", NOW)
    store.revoke(revoked.split(".")[1])
    expired = store.issue("ada", NOW, lifetime_s=60)
    assert store.verify(expired, NOW + 59).user == "ada"
    wrong = [
        "",
        "nonsense",
        f"{mark}.{token_id}.{secret[:-1]}",
        f"{mark}.{token_id}.{secret}x",
        f"{mark}.{'0' * 16}.{secret}",
        f"{mark}.{token_id}.",
        revoked,
        expired,
        "x" * 10_000,
    ]
    said = set()
    for text in wrong:
        with pytest.raises(PermissionDenied) as caught:
            store.verify(text, NOW + 60)
        said.add(str(caught.value))
    assert said == {"the token is unknown, revoked or expired; ask an administrator for a new one"}
    assert store.verify(token, NOW + 60).user == "ada"


def test_removing_a_user_ends_all_its_tokens(store: TokenStore) -> None:
    token = store.issue("ada", NOW)
    store.remove_user("ada")
    with pytest.raises(PermissionDenied):
        store.verify(token, NOW)
    assert store.users() == ["grace"]
    with pytest.raises(NotFound, match="'ada'"):
        store.issue("ada", NOW)
    with pytest.raises(NotFound):
        store.revoke("0" * 16)


def test_users_get_uids_that_nobody_has_had(store: TokenStore, path: str) -> None:
    ada, grace = store.account("ada"), store.account("grace")
    assert ada == Account("ada", FIRST_UID, FIRST_UID)
    assert grace == Account("grace", FIRST_UID + 1, FIRST_UID + 1)
    store.create_user("alan", NOW, uid=FIRST_UID + 2, gid=5, groups=(9, 7, 9))
    store.remove_user("grace")
    edsger = store.create_user("edsger", NOW)
    assert edsger.uid == FIRST_UID + 3
    assert TokenStore(path).account("alan") == Account("alan", FIRST_UID + 2, 5, (7, 9))
    assert store.account("grace") is None
    with pytest.raises(Exists, match="alan has uid"):
        store.create_user("mallory", NOW, uid=FIRST_UID + 2)
    for wrong in ({"uid": -1}, {"gid": 1 << 32}, {"groups": (1, -5)}, {"groups": tuple(range(1, 70))}):
        with pytest.raises(UsageError):
            store.create_user("mallory", NOW, **wrong)
    assert "mallory" not in store.users()


def test_users_of_a_file_of_version_1_get_the_same_uids_from_every_reader(store: TokenStore, path: str) -> None:
    token = store.issue("ada", NOW)
    content = json.loads(Path(path).read_text())
    content = {"version": 1, "users": [{key: user[key] for key in ("name", "tokens")} for user in content["users"]]}
    for user in content["users"]:
        user["created_s"] = {"ada": 20, "grace": 10}[user["name"]]
    Path(path).write_text(json.dumps(content))
    readers = [TokenStore(path), TokenStore(path)]
    for reader in readers:
        assert reader.verify(token, NOW).user == "ada"
        assert reader.account("grace") == Account("grace", FIRST_UID, FIRST_UID)
        assert reader.account("ada") == Account("ada", FIRST_UID + 1, FIRST_UID + 1)
    readers[0].create_user("alan", NOW)
    for reader in readers:
        assert [reader.account(name).uid for name in ("grace", "ada", "alan")] == [  # type: ignore[union-attr]
            FIRST_UID,
            FIRST_UID + 1,
            FIRST_UID + 2,
        ]


def test_a_file_of_version_2_is_read_and_written_with_roles_and_scopes(store: TokenStore, path: str) -> None:
    token = store.issue("ada", NOW)
    content = json.loads(Path(path).read_text())
    assert content["version"] == 3
    content["version"] = 2
    for user in content["users"]:
        del user["roles"]
        for entry in user["tokens"]:
            del entry["scope"]
    Path(path).write_text(json.dumps(content))
    reader = TokenStore(path)
    assert reader.verify(token, NOW) == Identity("ada", "user", (), token.split(".")[1], "")
    reader.grant_role("ada", "platform:operator")
    assert store.verify(token, NOW).roles == ("platform:operator",)
    assert json.loads(Path(path).read_text())["version"] == 3


def test_tokens_of_runs_are_bounded_beside_those_of_the_user(store: TokenStore, monkeypatch: Any) -> None:
    monkeypatch.setattr(tokens, "max_tokens", lambda scope: 64 if scope == "user" else 2)
    for _ in range(2):
        store.issue("ada", NOW, lifetime_s=10, scope="run")
    with pytest.raises(UsageError, match="tokens of runs, the maximum"):
        store.issue("ada", NOW + 9, lifetime_s=10, scope="run")
    store.issue("ada", NOW + 9)
    store.issue("ada", NOW + 10, lifetime_s=10, scope="run")


@pytest.mark.parametrize(
    "change",
    [
        {"roles": ["x" * 66]},
        {"roles": [f"fs:r{number}" for number in range(33)]},
        {"roles": "fs:admin"},
        {"tokens": [{"id": "a", "sha256": "0" * 64, "label": "", "created_s": 0, "expires_s": None, "scope": "root"}]},
    ],
    ids=str,
)
def test_a_file_with_roles_or_scopes_that_cannot_be_is_refused(path: str, store: TokenStore, change: Any) -> None:
    content = json.loads(Path(path).read_text())
    content["users"][0] |= change
    Path(path).write_text(json.dumps(content))
    with pytest.raises(DataCorruption, match="is damaged"):
        TokenStore(path)


def test_bad_arguments_change_nothing(store: TokenStore, path: str) -> None:
    before = Path(path).read_bytes()
    with pytest.raises(Exists, match="ada"):
        store.create_user("ada", NOW)
    for name in ("", "a b", "a/b", "1st", "a" * 65, "ada\n"):
        with pytest.raises(UsageError, match="user name"):
            store.create_user(name, NOW)
    with pytest.raises(UsageError, match="lifetime_s 0"):
        store.issue("ada", NOW, lifetime_s=0)
    with pytest.raises(UsageError, match="label"):
        store.issue("ada", NOW, label="two\nlines")
    assert Path(path).read_bytes() == before


def test_tokens_per_user_are_bounded_and_expired_ones_make_room(store: TokenStore) -> None:
    for _ in range(MAX_TOKENS_PER_USER):
        store.issue("ada", NOW, lifetime_s=10)
    with pytest.raises(UsageError, match="64 tokens"):
        store.issue("ada", NOW)
    store.issue("ada", NOW + 10)
    assert len(store.tokens("ada")) == 1


def test_a_running_reader_notices_what_another_process_changed(store: TokenStore, path: str) -> None:
    reader = TokenStore(path)
    token = store.issue("ada", NOW)
    assert reader.verify(token, NOW).user == "ada"
    store.revoke(token.split(".")[1])
    with pytest.raises(PermissionDenied):
        reader.verify(token, NOW)


def test_writers_at_the_same_time_lose_nothing(store: TokenStore, path: str) -> None:
    stores = [TokenStore(path) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        tokens = [
            token for part in pool.map(lambda s: [s.issue("ada", NOW) for _ in range(5)], stores) for token in part
        ]
    assert {store.verify(token, NOW).user for token in tokens} == {"ada"}
    assert len(store.tokens("ada")) == 20


def test_a_file_that_is_open_to_others_or_damaged_is_refused(store: TokenStore, path: str) -> None:
    os.chmod(path, 0o644)
    with pytest.raises(PermissionDenied, match="chmod 600"):
        TokenStore(path)
    os.chmod(path, 0o600)
    Path(path).write_text("{")
    with pytest.raises(DataCorruption, match="damaged"):
        TokenStore(path)
    Path(path).write_text('{"version": 9, "users": []}')
    with pytest.raises(DataCorruption, match="version 9"):
        TokenStore(path)
