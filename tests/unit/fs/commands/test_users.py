"""`ff fs admin user`: users are made, shown and removed, and keep who they are."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from fireflyer.cli import main
from fireflyer.fs.service.local.layout import ADMIN, Layout, new_cluster
from fireflyer.identity import Account, TokenInfo, TokenStore
from fireflyer.identity.users import FIRST_UID


@pytest.fixture
def directory(tmp_path: Path) -> str:
    layout = Layout(str(tmp_path / "fs"))
    layout.make_directory()
    layout.make_identity()
    layout.save(
        new_cluster(
            nodes=3, replicas=2, targets_per_node=4, managers=1, store="", durable=True, failure_timeout_ms=6000
        )
    )
    return layout.directory


def user(*arguments: str) -> int:
    return main(["fs", "admin", "user", *arguments])


def test_users_are_added_listed_and_removed(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--dir", directory)
    assert user("add", "ada", *where) == 0
    assert capsys.readouterr().out == f"User ada has uid {FIRST_UID + 1} and gid {FIRST_UID + 1}.\n"
    assert user("add", "alan", "--uid", "1000", "--gid", "100", "--group", "7", "--group", "5", "--token", *where) == 0
    token = capsys.readouterr().out.strip()
    store = TokenStore(Layout(directory).tokens_file)
    assert store.verify(token, 0).user == "alan"
    assert user("list", "--json", *where) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=list[Account]) == [
        Account("ada", FIRST_UID + 1, FIRST_UID + 1),
        Account(ADMIN, FIRST_UID, FIRST_UID),
        Account("alan", 1000, 100, (5, 7)),
    ]
    store.grant_role("alan", "platform:operator")
    store.grant_role("alan", "fs:admin")
    assert user("list", *where) == 0
    shown = " ".join(capsys.readouterr().out.splitlines()[2].split())
    assert shown == "alan uid 1000 gid 100 tokens 1 groups 5,7 roles fs:admin,platform:operator"
    assert user("rm", "ada", *where) == 0
    assert store.users() == [ADMIN, "alan"]


def test_a_file_of_users_can_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "tokens.json")
    assert main(["fs", "admin", "issue-token", "--tokens-file", file, "ada"]) == 0
    assert user("list", "--tokens-file", file) == 0
    assert "ada" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("add", "admin"), 1, "user admin exists already"),
        (("add", "ada", "--uid", f"{FIRST_UID}"), 1, f"user admin has uid {FIRST_UID} already"),
        (("add", "no good"), 2, "user name 'no good' must be"),
        (("rm", "ada"), 1, "there is no user 'ada'"),
        (("rm", "admin"), 2, "user admin cannot be removed: the commands of this cluster use it"),
        (("list", "--tokens-file", "/tmp/x"), 2, "--dir and --tokens-file cannot be combined"),
    ],
)
def test_what_cannot_be_is_one_line(
    directory: str, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, message: str
) -> None:
    assert user(*arguments, "--dir", directory) == code
    text = capsys.readouterr().err
    assert text.startswith(f"error: {message}")
    assert text.count("\n") == 1


def test_the_environment_names_the_cluster_here_too(
    directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path.parent)
    for target in (f"ff://{directory}", f"ff://{directory.replace('/', '%2F')}"):
        monkeypatch.setenv("FIREFLYER_FS", target)
        assert user("list") == 0
        assert capsys.readouterr().out.startswith("admin ")
    monkeypatch.setenv("FIREFLYER_FS", "ff://host:7000")
    assert user("list") == 2
    assert "FIREFLYER_FS names managers" in capsys.readouterr().err


def test_tokens_have_the_words_of_the_platform(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    where, store = ("--dir", directory), TokenStore(Layout(directory).tokens_file)

    def said(*arguments: str, code: int = 0) -> str:
        assert user(*arguments, *where) == code
        out, err = capsys.readouterr()
        return (err if code else out).strip()

    said("add", "ada")
    first, second = said("token", "ada"), said("token", "ada", "--expires", "90d", "--label", "laptop")
    assert [store.verify(token, 0).user for token in (first, second)] == ["ada", "ada"]
    one, two = [token.id for token in store.tokens("ada")]
    shown = said("tokens", "ada").splitlines()
    assert shown[0].split() == ["TOKEN", "LABEL", "FOR", "ISSUED", "EXPIRES"]
    assert [line.split()[:3] for line in shown[1:]] == [[one, "-", "user"], [two, "laptop", "user"]]
    assert shown[1].endswith("never")
    told = [msgspec.json.decode(line, type=TokenInfo) for line in said("tokens", "ada", "--json").splitlines()]
    assert [token.id for token in told] == [one, two]
    assert said("revoke-token", "ada", one) == f"Token {one} of ada is revoked."
    assert f"user ada has no token '{one}'" in said("revoke-token", "ada", one, code=1)
    assert said("expire-token", "ada", two, "--after", "2h") == f"Token {two} of ada expires in 2 h 00 min."
    left_s = (store.tokens("ada")[0].expires_s or 0) - int(time.time())
    assert 7100 < left_s <= 7200
    assert "expires earlier already" in said("expire-token", "ada", two, "--after", "90d", code=2)
    assert "there is no user 'alan'" in said("token", "alan", code=1)


@pytest.mark.parametrize("command", [("revoke-token",), ("expire-token", "--after", "1h")])
def test_the_token_of_the_cluster_itself_stays(
    directory: str, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    layout = Layout(directory)
    own = TokenStore(layout.tokens_file).tokens(ADMIN)[0].id
    assert user(*command, ADMIN, own, "--dir", directory) == 2
    assert "is the one that the commands of this cluster use" in capsys.readouterr().err
    assert TokenStore(layout.tokens_file).verify(layout.admin_token(), int(time.time())).user == ADMIN
