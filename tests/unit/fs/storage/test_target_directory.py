"""A target's directory: which target it is, and when it may be the last one to have everything."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from fireflyer.base.errors import DataCorruption, Exists, NotFound, PermissionDenied, UsageError
from fireflyer.fs.service.storage import target_directory
from fireflyer.fs.service.storage.target_directory import TargetDirectory, make_target


@pytest.fixture
def directory(tmp_path: Path) -> str:
    path = str(tmp_path / "disk" / "target")
    make_target(path, "home", 7)
    return path


def opened(path: str, *, boot: str = "boot 1", durable: bool = True) -> TargetDirectory:
    """As a process opens it; the engine's part is one file."""
    one = TargetDirectory(path, "home", 7, boot)
    one.prepare()
    Path(one.chunks, "journal.1").touch()
    one.begin(durable=durable)
    return one


def test_a_directory_is_one_target_for_ever(directory: str, tmp_path: Path) -> None:
    make_target(directory, "home", 7)
    for cluster, target in (("home", 8), ("other", 7)):
        with pytest.raises(Exists, match="is target 7"):
            make_target(directory, cluster, target)
        with pytest.raises(PermissionDenied, match="is target 7 of cluster 'home'"):
            TargetDirectory(directory, cluster, target, "boot").prepare()
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.txt").touch()
    with pytest.raises(Exists, match=r"thesis\.txt"):
        make_target(str(full), "home", 9)
    with pytest.raises(NotFound, match="was the disk mounted"):
        TargetDirectory(str(tmp_path / "absent"), "home", 7, "boot").prepare()
    Path(directory, "target.json").write_bytes(b"{")
    with pytest.raises(DataCorruption):
        TargetDirectory(directory, "home", 7, "boot").prepare()


def test_no_new_target_is_made_in_the_file_system_of_the_root_unless_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount point whose disk is not mounted is there."""
    monkeypatch.setattr(target_directory, "_ROOT", str(tmp_path))
    unmounted = tmp_path / "disk"
    unmounted.mkdir()
    for path in (unmounted, unmounted / "not" / "there"):
        with pytest.raises(UsageError, match="mount its disk first, or write root_disk = true"):
            make_target(str(path), "home", 7, root_disk=False)
    assert not os.listdir(unmounted)
    make_target(str(unmounted), "home", 7, root_disk=True)
    make_target(str(unmounted), "home", 7, root_disk=False)  # it is there already
    monkeypatch.setattr(target_directory, "_ROOT", "/proc")
    make_target(str(tmp_path / "mounted"), "home", 8, root_disk=False)


def test_a_new_target_is_not_sure_until_it_serves(directory: str) -> None:
    one = opened(directory)
    assert not one.clean
    one.mark_clean()
    assert opened(directory).clean
    shutil.rmtree(directory)
    with pytest.raises(NotFound):
        one.check()
    make_target(directory, "home", 7)
    assert not opened(directory).clean


def test_a_directory_that_is_exchanged_under_its_process_is_missed(directory: str) -> None:
    """The files that the process has open are nobody's any more, though there is a target of this number."""

    def made_again(one: TargetDirectory) -> None:
        shutil.rmtree(one.path)
        make_target(one.path, "home", 7)
        os.mkdir(one.chunks)

    def removed(one: TargetDirectory) -> None:
        shutil.rmtree(one.chunks)

    def emptied(one: TargetDirectory) -> None:
        os.unlink(os.path.join(one.chunks, "journal.1"))

    for harm in (made_again, removed, emptied):
        one = opened(directory)
        one.check()
        harm(one)
        with pytest.raises(NotFound):
            one.check()
    opened(directory).check()


@pytest.mark.parametrize(
    ("durable", "ends", "boot", "clean"),
    [
        (True, False, "boot 2", True),
        (False, False, "boot 1", True),
        (False, True, "boot 2", True),
        (False, False, "boot 2", False),
    ],
)
def test_what_was_not_flushed_when_its_machine_went_down_may_be_lost(
    directory: str, durable: bool, ends: bool, boot: str, clean: bool
) -> None:
    one = opened(directory, durable=durable)
    one.mark_clean()
    if ends:
        one.end()
    later = opened(directory, boot=boot)
    assert later.clean is clean
    # What was lost once does not come back by starting again.
    assert opened(directory, boot=boot).clean is clean


def test_chunks_that_were_removed_or_put_aside_are_missed(directory: str) -> None:
    one = opened(directory)
    one.mark_clean()
    shutil.rmtree(one.chunks)
    assert not opened(directory).clean
    one.mark_clean()
    later = TargetDirectory(directory, "home", 7, "boot 1")
    later.prepare()
    later.put_aside()
    assert os.listdir(later.chunks) == []
    later.begin(durable=True)
    assert not later.clean
    with pytest.raises(Exists, match="remove it"):
        later.put_aside()


def test_a_disk_that_failed_one_who_did_not_wait_for_it_leaves_nobody_sure(directory: str) -> None:
    one = opened(directory, durable=False)
    one.mark_clean()
    one.failed()
    one.mark_clean()  # who still serves says so
    assert not one.clean
    assert not opened(directory, durable=False).clean
    waited = opened(directory)
    waited.mark_clean()
    waited.failed()  # nothing was acknowledged that is not there
    assert opened(directory).clean
