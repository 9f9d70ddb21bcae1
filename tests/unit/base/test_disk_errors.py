"""The kernel's errors come out of the real disk as ours, in one line that names the path and says what to do."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest
from tests.support.descriptors import only_free

from fireflyer.base.errors import (
    Busy,
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
from fireflyer.runtime.disk import RealDisk, RealFile, translate_os_error


@pytest.mark.parametrize(
    ("number", "cls", "advice"),
    [
        (errno.ENOSPC, NoSpace, "free some or choose another directory"),
        (errno.EDQUOT, NoSpace, "quota"),
        (errno.ENOENT, NotFound, "no such file"),
        (errno.EEXIST, Exists, "already exists"),
        (errno.EACCES, PermissionDenied, "check the owner and mode"),
        (errno.EROFS, PermissionDenied, "read-only"),
        (errno.EMFILE, Busy, "ulimit -n"),
        (errno.EADDRINUSE, UsageError, "choose another port"),
        (errno.ECONNREFUSED, Unreachable, "no process listens"),
        (errno.EIO, PermanentError, "device failed"),
        (errno.EXDEV, PermanentError, "EXDEV"),
    ],
)
def test_each_errno_has_its_class_and_advice(number: int, cls: type[FireflyerError], advice: str) -> None:
    error = translate_os_error(OSError(number, os.strerror(number)), "write /data/x")
    assert type(error) is cls
    assert error.message.startswith("write /data/x: ")
    assert advice in error.message
    assert "\n" not in error.message


def test_timeouts_names_and_our_own_errors_are_understood() -> None:
    assert type(translate_os_error(TimeoutError(), "x")) is Timeout
    assert type(translate_os_error(socket.gaierror(-2, "Name or service not known"), "x")) is Unreachable
    assert type(translate_os_error(OSError("no number"), "x")) is PermanentError
    ours = NotFound("ours")
    assert translate_os_error(ours, "x") is ours


def test_a_full_disk_is_no_space_with_advice() -> None:
    file = RealFile(os.open("/dev/full", os.O_WRONLY), "/dev/full")
    with pytest.raises(NoSpace, match=r"write /dev/full: no space left .* free some") as caught:
        file.pwrite(b"x", 0)
    assert caught.value.errno == errno.ENOSPC
    assert isinstance(caught.value.__cause__, OSError)
    file.close()


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:3], offset))
    file = RealDisk().create(str(tmp_path / "file"))
    file.pwrite(b"0123456789", 2)
    assert file.pread(100, 0) == b"\0\x000123456789"
    file.close()


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RealDisk().create(str(tmp_path / "file"))
    file.pwrite(b"0123456789", 0)
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, length, offset: pread(fd, min(length, 3), offset))
    assert file.pread(8, 1) == b"12345678"
    assert file.pread(100, 0) == b"0123456789"
    file.close()


def test_after_a_failed_fsync_the_file_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RealDisk().create(str(tmp_path / "file"))
    file.pwrite(b"x", 0)

    def fails(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        with pytest.raises(PermanentError, match="device failed"):
            file.fsync()
    with pytest.raises(PermanentError, match="earlier fsync failed"):
        file.fsync()
    with pytest.raises(PermanentError, match="earlier fsync failed"):
        file.pwrite(b"y", 0)
    file.close()


def test_no_descriptor_stays_open_when_a_directory_is_opened_as_a_file(tmp_path: Path) -> None:
    disk = RealDisk()
    count = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(UsageError, match="a file is needed"):
            disk.open(str(tmp_path))
    assert len(os.listdir("/proc/self/fd")) == count


def test_too_many_open_files_says_so(tmp_path: Path) -> None:
    disk = RealDisk()
    held: list[RealFile] = []

    def open_many() -> None:
        for number in range(64):
            held.append(disk.create(str(tmp_path / str(number))))  # noqa: PERF401

    with only_free(7), pytest.raises(Busy, match="ulimit -n"):
        open_many()
    for file in held:
        file.close()
