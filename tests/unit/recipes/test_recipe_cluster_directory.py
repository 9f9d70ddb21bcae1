"""The directory in which a recipe makes its cluster anew: only what a recipe has made is removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fireflyer.base.errors import Busy, PermanentError, UsageError
from fireflyer.cluster.local.layout import PlatformLayout, new_platform
from fireflyer.recipes.testbed import cluster
from fireflyer.recipes.testbed.plan import ClusterPlan
from fireflyer.runtime.processes.run_lock import RunLock


@pytest.fixture
def layout(tmp_path: Path) -> PlatformLayout:
    """A platform that was made, with something in its store."""
    found = PlatformLayout(str(tmp_path / "platform"))
    found.make_directory()
    found.save(new_platform(4, 1, 0))
    (tmp_path / "platform" / "manager").mkdir()
    (tmp_path / "platform" / "manager" / "store").write_text("all tasks")
    return found


def start(layout: PlatformLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to where `ff up` would be started."""

    def refuse(_settings: str) -> None:
        raise PermanentError("not started here")

    monkeypatch.setattr(cluster, "_start", refuse)
    with cluster.running_cluster(ClusterPlan(), layout.directory, lambda _: None):
        pass


def note_made(layout: PlatformLayout) -> None:
    Path(cluster._own_directory(layout)).mkdir()
    cluster._note_made(layout)


def store_of(layout: PlatformLayout) -> Path:
    return Path(layout.directory) / "manager" / "store"


def test_a_platform_of_ff_up_is_not_replaced(layout: PlatformLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no recipe is known to have made"):
        start(layout, monkeypatch)
    assert store_of(layout).read_text() == "all tasks"


def test_nor_is_one_that_took_the_place_of_what_a_recipe_made(
    layout: PlatformLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_made(layout)
    layout.save(new_platform(4, 1, 0))
    with pytest.raises(UsageError, match="no recipe is known to have made"):
        start(layout, monkeypatch)
    assert store_of(layout).exists()


def test_what_a_recipe_made_is_replaced_and_settings_of_the_user_stay(
    layout: PlatformLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "up.toml").write_text("agents = 2\n")
    note_made(layout)
    with pytest.raises(PermanentError, match="not started here"):
        start(layout, monkeypatch)
    assert not store_of(layout).exists()
    assert (tmp_path / "up.toml").read_text() == "agents = 2\n"


def test_what_is_in_use_is_not_replaced(layout: PlatformLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    note_made(layout)
    monkeypatch.setattr(cluster, "STOP_S", 0.0)
    with RunLock(layout.lock_file, "ff"), pytest.raises(Busy, match="ff down --dir"):
        start(layout, monkeypatch)
    assert store_of(layout).exists()
