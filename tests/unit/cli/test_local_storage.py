"""Whose users the file system of `ff up` has, as its configuration says it; nothing is started."""

from __future__ import annotations

import asyncio
import socket
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.loops import on_loop

from fireflyer.base.errors import UsageError
from fireflyer.cli import main
from fireflyer.cli.platform.storage import LocalStorage, storage_of
from fireflyer.cluster.local.config import StorageWish, UpConfig
from fireflyer.cluster.local.layout import PlatformLayout, new_platform
from fireflyer.fs.service.local.layout import Layout, new_cluster
from fireflyer.identity import TokenStore
from fireflyer.runtime.processes.run_lock import RunLock


@pytest.fixture
def layout(tmp_path: Path) -> PlatformLayout:
    made = PlatformLayout(str(tmp_path / "platform"))
    made.make_directory()
    return made


def started(layout: PlatformLayout, *, new: bool = False) -> LocalStorage:
    """As the next `ff up` finds it."""
    found = storage_of(layout, StorageWish(nodes=1), new=new)
    assert found is not None
    found._lock.release()
    found.cluster = msgspec.structs.replace(found.cluster, managers=("127.0.0.1:7000",))
    return found


def settings(storage: LocalStorage) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of its manager, and of its node."""
    cluster = storage.cluster
    paths = (
        storage.layout.write_manager(cluster, 1, "127.0.0.1:0"),
        storage.layout.write_storage(cluster, cluster.nodes[0]),
    )
    manager, node = (tomllib.loads(Path(path).read_text()) for path in paths)
    return manager, node


def test_a_new_one_asks_the_platform_and_tasks_are_told_no_directory(layout: PlatformLayout) -> None:
    storage = started(layout, new=True)
    assert storage.accounts is not None
    manager, node = settings(storage)
    assert (manager["accounts"], manager["tokens_file"], node["tokens_file"]) == ([storage.accounts.listen], "", "")
    assert not storage.had_own_users
    assert storage.task_environment() == {"FIREFLYER_FS": "ff://127.0.0.1:7000"}
    config, _ = layout.write_manager(new_platform(1, 1, 0), UpConfig(), "127.0.0.1:0", "127.0.0.1:0", storage.accounts)
    assert (config.listen_accounts, config.accounts_secret_file) == storage.accounts


def test_the_platform_says_it_at_the_same_port_unless_that_is_taken(layout: PlatformLayout) -> None:
    first = started(layout, new=True).cluster.accounts
    assert started(layout).cluster.accounts == first
    with socket.create_server(("127.0.0.1", int(first.rpartition(":")[2]))):
        second = started(layout).cluster.accounts
        assert second != first
    assert Layout(layout.storage_directory).load().accounts == second


@on_loop
async def test_one_of_an_earlier_release_gets_the_users_of_the_platform_beside_its_own(layout: PlatformLayout) -> None:
    old = Layout(layout.storage_directory)
    old.make_directory()
    old.make_secret()
    TokenStore(old.tokens_file).create_user("admin", 0)
    cluster = new_cluster(
        nodes=1, replicas=1, targets_per_node=1, managers=1, store="", durable=True, failure_timeout_ms=6000
    )
    old.save(cluster)
    storage = started(layout)
    manager, node = settings(storage)
    assert manager["accounts"] == [storage.accounts.listen]
    assert (manager["tokens_file"], node["tokens_file"]) == (old.tokens_file, ""), "the manager imports it"
    assert storage.task_environment() == {"FIREFLYER_FS": "ff://127.0.0.1:7000"}, "without the directory of the secret"
    assert await said_by(storage) == [
        f"the file system in {old.directory} has the users of the platform from now on, and tasks no longer get its "
        "secret: they are their users, so give these what tasks have written before (ff fs chown UID PATH, with the "
        "UID that `ff user list` shows)"
    ]
    assert await said_by(started(layout)) == [], "once"


async def said_by(storage: LocalStorage) -> list[str]:
    """Before anything is started."""
    said: list[str] = []

    async def platform(_: Any) -> None:
        await asyncio.Event().wait()

    async def nothing_runs(*_: Any, **__: Any) -> None:
        return None

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("fireflyer.fs.service.local.run.run_local", nothing_runs)
        await storage.run(platform, said.append, lambda: "")
    return said


@on_loop
async def test_the_file_system_serves_until_the_platform_has_ended(layout: PlatformLayout) -> None:
    """Runs and agents that end may still save."""
    running, ended = {"platform": asyncio.Event(), "file system": asyncio.Event()}, []

    async def until_cancelled(name: str) -> None:
        running[name].set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # the other one would end meanwhile
            ended.append(name)

    async def file_system(*_: Any, **__: Any) -> None:
        await until_cancelled("file system")

    async def platform(_: Any) -> None:
        await until_cancelled("platform")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("fireflyer.fs.service.local.run.run_local", file_system)
        both = asyncio.ensure_future(started(layout, new=True).run(platform, print, lambda: ""))
        for event in running.values():
            await event.wait()
        both.cancel()
        with pytest.raises(asyncio.CancelledError):
            await both
    assert ended == ["platform", "file system"]


def test_its_users_are_changed_and_it_is_started_by_the_words_of_the_platform(
    layout: PlatformLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = started(layout, new=True)
    storage.layout.save(storage.cluster)
    storage.layout.write_admin_token("fft1.0123.secret")
    assert main(["fs", "admin", "user", "list", "--dir", layout.storage_directory]) == 2
    assert "are those of its platform: ff user add" in capsys.readouterr().err
    with RunLock(storage.layout.lock_file, "ff"):  # also while it runs: `ff fs down` would not end it
        assert main(["fs", "up", "--dir", layout.storage_directory]) == 2
    assert f"start both: ff up --dir {layout.directory}" in capsys.readouterr().err


def test_it_is_not_made_where_nobody_wants_one(layout: PlatformLayout) -> None:
    assert storage_of(layout, StorageWish(nodes=0), new=True) is None
    assert storage_of(layout, StorageWish(), new=False) is None
    started(layout, new=True)
    with pytest.raises(UsageError, match=r"the file system in .* has 1"):
        storage_of(layout, StorageWish(nodes=2), new=False)


@pytest.mark.parametrize("options", [[], ["-d"]])
@pytest.mark.parametrize(
    ("storage", "said"),
    [
        ("nodes = 2\nreplicas = 4", "storage: 4 replicas need 4 nodes"),
        ('store = "sqlite:x"', "storage: store is not the URL of a PostgreSQL database"),
        ('nodes = "3"', "FILE 'up.toml', line 2: storage.nodes: expected `int`, got `str`\n"),
    ],
)
def test_a_file_system_that_is_refused_leaves_nothing_behind(
    storage: str,
    said: str,
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("up.toml").write_text(f"[storage]\n{storage}\n")
    assert main(["up", *options, "up.toml"]) == 2
    assert f"error: {said}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["up.toml"]
