"""Files with names beside the blobs: in a directory, and behind fsspec's URLs."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fireflyer.base.errors import DataCorruption, NotFound
from fireflyer.cluster.objects.named_files import DirectoryFiles, NamedFiles, UrlFiles, open_files

_numbers = itertools.count()
MAKERS: dict[str, Callable[[Path], NamedFiles]] = {
    "directory": lambda path: DirectoryFiles(str(path / "files")),
    "file url": lambda path: UrlFiles(f"file://{path}/files"),
    "memory url": lambda _: UrlFiles(f"memory://files-{next(_numbers)}"),
}


@pytest.fixture(params=MAKERS)
def files(request: pytest.FixtureRequest, tmp_path: Path) -> NamedFiles:
    return MAKERS[request.param](tmp_path)


def names(files: NamedFiles, folder: str = "") -> list[str]:
    return [one.name for one in files.list(folder) if one.name != "parts"]


def test_a_file_is_there_with_its_folders_until_it_is_removed(files: NamedFiles) -> None:
    assert names(files) == names(files, "1/0") == []
    files.put("1/0/rank-0@a-1", b"one")
    files.put("1/0/rank-0@a-2", b"two")
    files.put("12/3/launcher@b-1", b"three")
    assert files.get("1/0/rank-0@a-2", 3) == b"two"
    assert names(files) == ["1", "12"]
    assert names(files, "1") == ["0"]
    assert names(files, "1/0") == ["rank-0@a-1", "rank-0@a-2"]
    assert all(one.changed_ns > 0 for one in files.list("1/0"))
    files.remove("1/0/rank-0@a-1")
    files.remove("1/0/rank-0@a-1")
    assert names(files, "1/0") == ["rank-0@a-2"]
    files.remove("1")
    files.remove("1")
    assert names(files) == ["12"]


def test_what_is_not_there_and_what_is_too_long_is_said(files: NamedFiles) -> None:
    with pytest.raises(NotFound):
        files.get("1/0/none", 10)
    files.put("1/0/long", b"x" * 11)
    with pytest.raises(DataCorruption, match="longer than 10 bytes"):
        files.get("1/0/long", 10)


def test_it_is_for_its_owner_alone(tmp_path: Path) -> None:
    files = open_files(str(tmp_path / "files"))
    files.put("1/0/x", b"")
    assert os.stat(tmp_path / "files").st_mode & 0o077 == 0
    assert os.stat(tmp_path / "files" / "1" / "0" / "x").st_mode & 0o077 == 0
