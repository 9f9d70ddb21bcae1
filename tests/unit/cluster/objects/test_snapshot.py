"""From a directory to its manifest: what is in it, what is not read again, what is refused."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from tests.support.objects.memory import make_tree

from fireflyer.base.errors import Busy, PermissionDenied, UsageError
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.objects.blobs import hash_of
from fireflyer.cluster.core.objects.manifest import FileEntry, LinkEntry, Manifest, ManifestLimits, encode_manifest
from fireflyer.cluster.objects import StatCache, open_pieces, snapshot, take_snapshot


def paths(manifest: Manifest) -> list[str]:
    return [entry.path for entry in manifest.entries]


def cache_of(tmp_path: Path, root: Path) -> StatCache:
    return StatCache.below(str(tmp_path / "cache"), str(root))


def made_old(root: Path) -> None:
    """As if nothing had been written for an hour, and the clock were exact: the change time cannot be set."""
    old_ns = time.time_ns() - 3600 * SECOND
    for path in root.rglob("*"):
        os.utime(path, ns=(old_ns, old_ns), follow_symlinks=False)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files that were read to be hashed."""
    found: list[str] = []
    hashed = snapshot._hashed

    def noted(path: str) -> tuple[os.stat_result, str]:
        found.append(os.path.basename(path))
        return hashed(path)

    monkeypatch.setattr(snapshot, "_hashed", noted)
    return found


@pytest.fixture
def exact_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that were written a moment ago are kept in the cache, too."""
    monkeypatch.setattr("fireflyer.cluster.objects.stat_cache.RACY_NS", -10 * SECOND)


def test_files_links_directories_and_modes_are_in_a_snapshot(tmp_path: Path) -> None:
    root = make_tree(
        tmp_path / "work", {"train.py": "print()", "sub/a": "a", "sub/link": "-> ../train.py", "none/": ""}
    )
    (root / "train.py").chmod(0o755)
    manifest = take_snapshot(str(root))
    assert paths(manifest) == ["none", "sub", "sub/a", "sub/link", "train.py"]
    by_path = {entry.path: entry for entry in manifest.entries}
    assert by_path["train.py"] == FileEntry("train.py", 0o755, 7, hash_of(b"print()"))
    assert by_path["sub/link"] == LinkEntry("sub/link", "../train.py")
    assert b"".join(open_pieces(str(root), "sub/a")) == b"a"


def test_a_snapshot_does_not_depend_on_when_and_where_it_is_taken(tmp_path: Path) -> None:
    files = {"b": "2", "a/x": "1", "a-b": "3"}
    one, two = make_tree(tmp_path / "one", files), make_tree(tmp_path / "two", dict(reversed(files.items())))
    made_old(two)
    assert encode_manifest(take_snapshot(str(one))) == encode_manifest(take_snapshot(str(two)))


def test_ignored_files_are_neither_in_it_nor_read(tmp_path: Path, reads: list[str]) -> None:
    files = {"a.py": "", "a.log": "", ".git/x": "", ".venv/bin/python": "", "data/big": "", "sub/keep.log": ""}
    root = make_tree(tmp_path / "work", {**files, ".ffignore": "*.log\n/data/\n", "sub/.ffignore": "!keep.log\n"})
    assert paths(take_snapshot(str(root))) == [".ffignore", "a.py", "sub", "sub/.ffignore", "sub/keep.log"]
    assert "big" not in reads


def test_a_default_rule_can_be_taken_back_and_rules_can_be_added(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "work", {".venv/x": "", "a": "", "b": "", ".ffignore": "!.venv"})
    assert paths(take_snapshot(str(root), ignore=["b"])) == [".ffignore", ".venv", ".venv/x", "a"]


def test_gitignore_counts_only_if_asked_for(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "work", {".gitignore": "a", "a": ""})
    assert "a" in paths(take_snapshot(str(root)))
    assert "a" not in paths(take_snapshot(str(root), git_ignore=True))


def test_an_unchanged_file_is_not_read_again(tmp_path: Path, reads: list[str], exact_clock: None) -> None:
    root = make_tree(tmp_path / "work", {"a": "1", "b": "2"})
    first = take_snapshot(str(root), cache=cache_of(tmp_path, root))
    reads.clear()
    assert take_snapshot(str(root), cache=cache_of(tmp_path, root)) == first
    assert reads == []


def test_a_file_that_keeps_its_size_and_modification_time_is_still_read_again(
    tmp_path: Path, reads: list[str], exact_clock: None
) -> None:
    root = make_tree(tmp_path / "work", {"a": "1", "b": "2"})
    made_old(root)
    first = take_snapshot(str(root), cache=cache_of(tmp_path, root))
    status = (root / "a").stat()
    reads.clear()
    while (root / "a").stat().st_ctime_ns == status.st_ctime_ns:  # the file system's clock has steps
        (root / "a").write_text("3")
    os.utime(root / "a", ns=(status.st_atime_ns, status.st_mtime_ns))
    second = take_snapshot(str(root), cache=cache_of(tmp_path, root))
    assert reads == ["a"]
    assert second != first


def test_a_file_that_changed_a_moment_ago_is_read_again(tmp_path: Path, reads: list[str]) -> None:
    """It could change once more without another time."""
    root = make_tree(tmp_path / "work", {"a": "1"})
    for _ in range(2):
        reads.clear()
        take_snapshot(str(root), cache=cache_of(tmp_path, root))
        assert reads == ["a"]


def test_a_file_that_is_gone_is_forgotten(tmp_path: Path, exact_clock: None) -> None:
    root = make_tree(tmp_path / "work", {"a": "1", "b": "2"})
    take_snapshot(str(root), cache=cache_of(tmp_path, root))
    (root / "b").unlink()
    take_snapshot(str(root), cache=cache_of(tmp_path, root))
    assert list(cache_of(tmp_path, root)._known) == ["a"]


@pytest.mark.parametrize("data", [b"", b"\x00", b"\xc1" * 100, b"\x93" * 5000])
def test_a_cache_that_cannot_be_read_is_an_empty_one(tmp_path: Path, data: bytes) -> None:
    root = make_tree(tmp_path / "work", {"a": "1"})
    cache_of(tmp_path, root).save()
    path = Path(cache_of(tmp_path, root)._path)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    path.chmod(0o600)
    assert paths(take_snapshot(str(root), cache=cache_of(tmp_path, root))) == ["a"]


def test_what_is_no_file_is_refused_by_name(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "work", {"a": ""})
    os.mkfifo(root / "pipe")
    with pytest.raises(UsageError, match=r"pipe is no file.*\.ffignore"):
        take_snapshot(str(root))
    (root / ".ffignore").write_text("pipe")
    assert paths(take_snapshot(str(root))) == [".ffignore", "a"]


def test_a_link_to_data_elsewhere_is_refused_with_advice(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "work", {"data": "-> /datasets"})
    with pytest.raises(UsageError, match=r"'data' leads out of the directory .*; ignore it in \.ffignore"):
        take_snapshot(str(root))


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "work", {})
    (root / os.fsdecode(b"caf\xe9")).write_text("")
    with pytest.raises(UsageError, match="is not UTF-8"):
        take_snapshot(str(root))


def test_too_many_or_too_large_files_are_refused_before_they_are_read(tmp_path: Path, reads: list[str]) -> None:
    root = make_tree(tmp_path / "work", {"big": ""})
    os.truncate(root / "big", 1 << 40)
    with pytest.raises(UsageError, match=r"'big' has 1.0 TiB"):
        take_snapshot(str(root))
    with pytest.raises(UsageError, match=r"the snapshot has 1.0 TiB"):
        take_snapshot(str(root), limits=ManifestLimits(file_bytes=1 << 45))
    make_tree(root, {f"f{number}": "" for number in range(10)})
    with pytest.raises(UsageError, match="more than 5 files"):
        take_snapshot(str(root), limits=ManifestLimits(entries=5, file_bytes=1 << 45, total_bytes=1 << 45))
    assert "big" not in reads


def test_a_file_that_is_being_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_tree(tmp_path / "work", {"a": "1"})
    read = os.read

    def read_and_write(fd: int, count: int) -> bytes:
        with (root / "a").open("a") as file:
            file.write("more")
        return read(fd, 1 << 30) and b""

    monkeypatch.setattr(os, "read", read_and_write)
    with pytest.raises(Busy, match=r"a is being written"):
        take_snapshot(str(root))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "work", {"a": "1"})
    (root / "a").chmod(0)
    with pytest.raises(PermissionDenied, match=r"ignore it in \.ffignore"):
        take_snapshot(str(root))


def test_rules_without_end_are_refused(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "work", {".ffignore": "x\n" * 5000})
    with pytest.raises(UsageError, match="more than 2000 lines"):
        take_snapshot(str(root))
