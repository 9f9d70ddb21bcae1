"""Whose users the file system of `ff up` has, as its configuration says it; nothing is started."""

from __future__ import annotations

import socket
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fireflyer.base.errors import UsageError
from fireflyer.cli import main
from fireflyer.cli.platform.storage import LocalStorage, storage_of
from fireflyer.cluster.local.config import StorageWish, UpConfig
from fireflyer.cluster.local.layout import PlatformLayout, new_platform
from fireflyer.fs.service.local.layout import Layout, new_cluster


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
    assert not storage.layout.has_own_users
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


def test_one_of_an_earlier_release_keeps_its_users_until_their_file_is_removed(layout: PlatformLayout) -> None:
    old = Layout(layout.storage_directory)
    old.make_directory()
    old.make_identity()
    cluster = new_cluster(
        nodes=1, replicas=1, targets_per_node=1, managers=1, store="", durable=True, failure_timeout_ms=6000
    )
    old.save(cluster)
    storage = started(layout)
    assert storage.accounts is None
    manager, node = settings(storage)
    assert "accounts" not in manager
    assert manager["tokens_file"] == node["tokens_file"] == old.tokens_file
    assert storage.task_environment()["FIREFLYER_FS"].startswith("ff://%2F")

    Path(old.tokens_file).unlink()
    assert started(layout).accounts is not None


def test_its_users_are_changed_and_it_is_started_by_the_words_of_the_platform(
    layout: PlatformLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = started(layout, new=True)
    storage.layout.save(storage.cluster)
    assert main(["fs", "admin", "user", "list", "--dir", layout.storage_directory]) == 2
    assert "are those of its platform: ff user add" in capsys.readouterr().err
    assert main(["fs", "up", "--dir", layout.storage_directory]) == 2
    assert f"start both: ff up --dir {layout.directory}" in capsys.readouterr().err


def test_it_is_not_made_where_nobody_wants_one(layout: PlatformLayout) -> None:
    assert storage_of(layout, StorageWish(nodes=0), new=True) is None
    assert storage_of(layout, StorageWish(), new=False) is None
    started(layout, new=True)
    with pytest.raises(UsageError, match=r"the file system in .* has 1"):
        storage_of(layout, StorageWish(nodes=2), new=False)
