"""The file system as a disk: which error a caller gets, and what is left of a file whose write has failed."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from fireflyer.base.errors import (
    DataCorruption,
    Exists,
    FireflyerError,
    NoSpace,
    NotFound,
    PermanentError,
    PermissionDenied,
    Timeout,
    Unreachable,
    UsageError,
)
from fireflyer.fs.client.files.disk import FileSystemDisk, FileSystemFile
from fireflyer.fs.schema.errors import FileError, file_error


class Inner:
    """An open file: the coroutines, of which `fails` is raised by writes and reads."""

    def __init__(self) -> None:
        self.fails: FireflyerError | None = None
        self.flushed: list[tuple[int, int]] = []
        self.closed = False
        self.file: Any = self

    async def pwrite(self, data: memoryview, _offset: int, *, lent: bool) -> int:
        assert lent, "it is not copied"
        return len(data)

    async def flush(self, begin: int, end: int) -> None:
        self.flushed.append((begin, end))
        if self.fails is not None:
            raise self.fails

    def pread(self, _offset: int, _size: int) -> bytes:
        if self.fails is not None:
            raise self.fails
        return b""

    def fsync(self) -> None:
        raise AssertionError("an fsync after a write that failed would say that all is well")

    def close_lazily(self) -> bool:
        return False  # a write is to be told

    async def close(self) -> None:
        self.closed = True
        if self.fails is not None:
            raise self.fails


class Files:
    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(work)


def opened() -> tuple[FileSystemFile, Inner]:
    inner, files = Inner(), Files()
    return FileSystemFile(files, inner, "ff://host:1/file"), inner  # type: ignore[arg-type]


def of_store(cause: FireflyerError) -> FileError:
    """As open files raise what the chunk store says."""
    error = file_error(errno.EIO, str(cause))
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (of_store(Timeout("late")), Timeout),
        (of_store(Unreachable("away")), Unreachable),
        (of_store(DataCorruption("all replicas")), DataCorruption),
        (of_store(NoSpace("full")), NoSpace),
        (file_error(errno.EDQUOT), NoSpace),
        (file_error(errno.ENOENT), NotFound),
        (file_error(errno.ENOTEMPTY), Exists),
        (file_error(errno.EACCES), PermissionDenied),
        (file_error(errno.EISDIR), UsageError),
        (file_error(errno.ESTALE), PermanentError),
        (Timeout("the meta service is silent"), Timeout),
    ],
)
def test_an_error_says_what_the_caller_must_do(raised: FireflyerError, kind: type[FireflyerError]) -> None:
    file, inner = opened()
    inner.fails = raised
    with pytest.raises(kind) as found:
        file.pread(1, 0)
    assert type(found.value) is kind
    assert not isinstance(found.value, FileError)


def test_a_transfer_waits_for_its_own_bytes_once() -> None:
    file, inner = opened()
    transfers = [file.start_pwrite(memoryview(bytes(100)), 100 * at) for at in range(3)]
    assert inner.flushed == [], "it is under way"
    assert [transfers[1].wait(), transfers[1].wait(), transfers[0].wait()] == [100] * 3
    assert inner.flushed == [(100, 200), (0, 100)]


def test_after_a_write_that_failed_nothing_else_is_done_with_the_file() -> None:
    file, inner = opened()
    first, second = (file.start_pwrite(memoryview(bytes(100)), 100 * at) for at in range(2))
    inner.fails = of_store(Timeout("late"))
    with pytest.raises(Timeout, match="write ff://host:1/file: late"):
        first.wait()
    inner.fails = None
    for call in (second.wait, file.fsync, lambda: file.pwrite(b"x", 0), lambda: file.allocate(1)):
        with pytest.raises(PermanentError, match="write a new file"):
            call()
    assert inner.flushed == [(0, 100), (100, 200)], "but that others are waited for: they read memory of the caller"
    inner.fails = of_store(Timeout("late"))
    file.close()
    assert inner.closed


class Directories:
    """`/a` is inode 1 and `/b` is inode 2, with as many blocks of one byte."""

    def stat(self, path: str) -> Any:
        return SimpleNamespace(st_ino={"/a": 1, "/b": 2}[path])

    def statvfs_inode(self, inode: int) -> Any:
        return SimpleNamespace(f_bavail=inode, f_frsize=1, f_blocks=9)


class Contended(FileSystemDisk):
    """Another thread measures `/b` after each access to what this one remembers."""

    remembered = ("", 0)

    @property
    def _measured(self) -> tuple[str, int]:
        remembered, self.remembered = self.remembered, ("/b", 2)
        return remembered

    @_measured.setter
    def _measured(self, value: tuple[str, int]) -> None:
        self.remembered = ("/b", 2) if value[0] == "/a" else value


def test_threads_that_measure_two_directories_get_each_its_own() -> None:
    disk = Contended(Directories())  # type: ignore[arg-type]
    assert disk.free_bytes("/a") == 1
    disk.remembered = ("/a", 1)
    assert disk.free_bytes("/a") == 1
    assert disk.free_bytes("/b") == 2
