"""`ff fs admin user`: users are made, shown and removed, and keep who they are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.support.accounts.served import ServedUsers, served_users

from fireflyer.cli import main
from fireflyer.fs.service.local.layout import ADMIN, Layout, new_cluster
from fireflyer.identity import Account, TokenInfo, load_secret
from fireflyer.identity.users import FIRST_UID
from fireflyer.runtime.processes.run_lock import RunLock


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    layout = Layout(str(tmp_path / "fs"))
    layout.make_directory()
    layout.make_secret()
    return layout


@pytest.fixture
def users(layout: Layout) -> Iterator[ServedUsers]:
    """Of a cluster that seems to run: a service of this process has its users."""
    cluster = new_cluster(
        nodes=3, replicas=2, targets_per_node=4, managers=1, store="", durable=True, failure_timeout_ms=6000
    )
    with served_users(load_secret(layout.secret_file)) as users:
        layout.save(msgspec.structs.replace(cluster, managers=(users.address,)))
        users.ask(lambda store: store.create_user(ADMIN, 0))
        layout.write_admin_token(users.ask(lambda store: store.issue(ADMIN, 0)))
        lock = RunLock(layout.lock_file)
        yield users
        lock.release()


@pytest.fixture
def directory(layout: Layout, users: ServedUsers) -> str:
    return layout.directory


def user(*arguments: str) -> int:
    return main(["fs", "admin", "user", *arguments])


def test_users_are_added_listed_and_removed(
    directory: str, users: ServedUsers, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--dir", directory)
    assert user("add", "ada", *where) == 0
    assert capsys.readouterr().out == f"User ada has uid {FIRST_UID + 1} and gid {FIRST_UID + 1}.\n"
    assert user("add", "alan", "--uid", "1000", "--gid", "100", "--group", "7", "--group", "5", "--token", *where) == 0
    token = capsys.readouterr().out.strip()
    assert users.ask(lambda store: store.verify(token, 0)).user == "alan"
    assert user("list", "--json", *where) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=list[Account]) == [
        Account("ada", FIRST_UID + 1, FIRST_UID + 1),
        Account(ADMIN, FIRST_UID, FIRST_UID),
        Account("alan", 1000, 100, (5, 7)),
    ]
    users.ask(lambda store: store.grant_role("alan", "platform:operator"))
    assert user("grant-role", "alan", "fs:admin", *where) == 0
    capsys.readouterr()
    assert user("list", *where) == 0
    shown = " ".join(capsys.readouterr().out.splitlines()[2].split())
    assert shown == "alan uid 1000 gid 100 tokens 1 groups 5,7 roles fs:admin,platform:operator"
    assert user("revoke-role", "alan", "fs:admin", *where) == 0
    assert users.ask(lambda store: store.verify(token, 0)).roles == ("platform:operator",)
    assert user("rm", "ada", *where) == 0
    assert [one.account.name for one in users.ask(lambda store: store.users())] == [ADMIN, "alan"]


def test_who_is_no_administrator_changes_nobody(
    users: ServedUsers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    users.ask(lambda store: store.create_user("ada", 0))
    file = tmp_path / "token"
    file.write_text(users.ask(lambda store: store.issue("ada", 0)))
    file.chmod(0o600)
    where = ("--manager", users.address, "--token-file", str(file))
    for command in (("add", "eve"), ("token", ADMIN), ("grant-role", "ada", "fs:admin"), ("list",)):
        assert user(*command, *where) == 1
        assert "only administrators may see and change users, and ada is not one" in capsys.readouterr().err
    users.ask(lambda store: store.grant_role("ada", "fs:admin"))
    assert user("token", "ada", *where) == 0
    token = capsys.readouterr().out.strip()
    assert users.ask(lambda store: store.verify(token, 0)).roles == ("fs:admin",)


def test_the_node_secret_makes_the_first_administrator(
    layout: Layout, users: ServedUsers, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--manager", users.address, "--secret-file", layout.secret_file)
    assert user("add", "ada", "--token", *where) == 0
    token = capsys.readouterr().out.strip()
    assert users.ask(lambda store: store.verify(token, 0)).user == "ada"


def test_users_of_a_cluster_that_is_not_running_cannot_be_changed(
    layout: Layout, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = new_cluster(
        nodes=1, replicas=1, targets_per_node=1, managers=1, store="", durable=True, failure_timeout_ms=6000
    )
    layout.save(msgspec.structs.replace(cluster, managers=("127.0.0.1:1",)))
    layout.write_admin_token("fft1.0123.secret")
    assert user("list", "--dir", layout.directory) == 1
    assert f"the cluster in {layout.directory} is not running; start it: ff fs up" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("add", "admin"), 1, "user admin exists already"),
        (("add", "ada", "--uid", f"{FIRST_UID}"), 1, f"user admin has uid {FIRST_UID} already"),
        (("add", "no good"), 2, "user name 'no good' must be"),
        (("rm", "ada"), 1, "there is no user 'ada'"),
        (("rm", "admin"), 2, "user admin cannot be removed: the commands of this cluster use it"),
        (("list", "--manager", "a:1"), 2, "--dir and --manager cannot be combined"),
        (("grant-role", "ada", "fs:admin"), 1, "there is no user 'ada'"),
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
    monkeypatch.delenv("FF_TOKEN_FILE", raising=False)
    assert user("list") == 2
    assert "the managers at host:7000 ask who you are" in capsys.readouterr().err


def test_tokens_have_the_words_of_the_platform(
    directory: str, users: ServedUsers, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--dir", directory)

    def tokens() -> list[TokenInfo]:
        return users.ask(lambda store: store.tokens("ada"))

    def said(*arguments: str, code: int = 0) -> str:
        assert user(*arguments, *where) == code
        out, err = capsys.readouterr()
        return (err if code else out).strip()

    said("add", "ada")
    first, second = said("token", "ada"), said("token", "ada", "--expires", "90d", "--label", "laptop")
    for token in (first, second):
        assert users.ask(lambda store, token=token: store.verify(token, 0)).user == "ada"  # type: ignore[misc]
    by_label = {token.label: token.id for token in tokens()}
    one, two = by_label[""], by_label["laptop"]
    shown = said("tokens", "ada").splitlines()
    assert shown[0].split() == ["TOKEN", "LABEL", "FOR", "ISSUED", "EXPIRES"]
    assert sorted(line.split()[:3] for line in shown[1:]) == sorted([[one, "-", "user"], [two, "laptop", "user"]])
    assert next(line for line in shown if one in line).endswith("never")
    told = [msgspec.json.decode(line, type=TokenInfo) for line in said("tokens", "ada", "--json").splitlines()]
    assert {token.id for token in told} == {one, two}
    assert said("revoke-token", "ada", one) == f"Token {one} of ada is revoked."
    assert f"user ada has no token '{one}'" in said("revoke-token", "ada", one, code=1)
    assert said("expire-token", "ada", two, "--after", "2h") == f"Token {two} of ada expires in 2 h 00 min."
    left_s = (tokens()[0].expires_s or 0) - int(time.time())
    assert 7100 < left_s <= 7200
    assert "expires earlier already" in said("expire-token", "ada", two, "--after", "90d", code=2)
    assert "there is no user 'alan'" in said("token", "alan", code=1)


@pytest.mark.parametrize("command", [("revoke-token",), ("expire-token", "--after", "1h")])
def test_the_token_of_the_cluster_itself_stays(
    layout: Layout, users: ServedUsers, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    own = users.ask(lambda store: store.tokens(ADMIN))[0].id
    assert user(*command, ADMIN, own, "--dir", layout.directory) == 2
    assert "is the one that the commands of this cluster use" in capsys.readouterr().err
    assert users.ask(lambda store: store.verify(layout.admin_token(), int(time.time()))).user == ADMIN
