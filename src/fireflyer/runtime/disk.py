"""The real disk behind the `Disk` port: POSIX calls, with the kernel's errors translated."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Self

from fireflyer.base.errors import Exists, FireflyerError, PermanentError, UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.ports import Data, Disk, DiskFile

__all__ = ["RealDisk", "RealFile", "translate_os_error"]


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except FireflyerError:
        raise
    except OSError as error:
        raise translate_os_error(error, what) from error


def _checked(path: str) -> str:
    if not path.startswith("/") or "\0" in path:
        raise UsageError(f"path {path!r} is not an absolute POSIX path")
    return path


class RealFile(DiskFile):
    """An open file. Positioned calls only, so that threads can share it. After a failed fsync every call raises:
    the kernel may have dropped the pages that it could not write, and a second fsync would not tell."""

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self._path = path
        self._given_up = False

    def pwrite(self, data: Data, offset: int) -> None:
        fd = self._usable()
        if offset < 0:
            raise UsageError(f"offset {offset} in {self._path} is negative")
        with memoryview(data) as view, view.cast("B") as rest, _translated(f"write {self._path}"):
            done = 0
            while done < len(rest):
                done += os.pwrite(fd, rest[done:], offset + done)

    def pread(self, length: int, offset: int) -> bytes:
        fd = self._usable()
        if length < 0 or offset < 0:
            raise UsageError(f"length {length} or offset {offset} in {self._path} is negative")
        with _translated(f"read {self._path}"):
            data = os.pread(fd, length, offset)
            if len(data) == length or not data:
                return data
            pieces = [data]
            done = len(data)
            while done < length and (data := os.pread(fd, length - done, offset + done)):
                pieces.append(data)
                done += len(data)
            return b"".join(pieces)

    def size(self) -> int:
        with _translated(f"stat {self._path}"):
            return os.fstat(self._usable()).st_size

    def fsync(self) -> None:
        fd = self._usable()
        try:
            with _translated(f"fsync {self._path}"):
                os.fsync(fd)
        except BaseException:
            self._given_up = True
            raise

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with _translated(f"close {self._path}"):
                os.close(fd)

    def _usable(self) -> int:
        if self._fd < 0:
            raise UsageError(f"{self._path} is closed")
        if self._given_up:
            raise PermanentError(f"{self._path}: an earlier fsync failed; write a new file instead")
        return self._fd

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


class RealDisk(Disk):
    """The machine's file systems. New files have mode 0666 and new directories 0777, less the umask."""

    def create(self, path: str) -> RealFile:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with _translated(f"create {path}"):
            return RealFile(os.open(_checked(path), flags, 0o666), path)

    def open(self, path: str) -> RealFile:
        with _translated(f"open {path}"):
            fd = os.open(_checked(path), os.O_RDONLY | os.O_CLOEXEC)
            if os.path.isdir(f"/proc/self/fd/{fd}"):
                os.close(fd)
                raise UsageError(f"open {path}: it is a directory, a file is needed")
            return RealFile(fd, path)

    def mkdir(self, path: str) -> None:
        with _translated(f"mkdir {path}"):
            os.mkdir(_checked(path))

    def rename(self, source: str, target: str) -> None:
        with _translated(f"rename {source} to {target}"):
            # The kernel would replace an empty directory; the port promises never to.
            if os.path.isdir(_checked(target)):
                os.lstat(_checked(source))
                raise Exists(f"rename {source} to {target}: the target is a directory that exists already")
            os.rename(_checked(source), target)

    def remove(self, path: str) -> None:
        with _translated(f"remove {path}"):
            os.unlink(_checked(path))

    def rmdir(self, path: str) -> None:
        with _translated(f"rmdir {path}"):
            os.rmdir(_checked(path))

    def list(self, path: str) -> list[str]:
        with _translated(f"list {path}"):
            return sorted(os.listdir(_checked(path)))

    def exists(self, path: str) -> bool:
        return os.path.exists(_checked(path))

    def is_dir(self, path: str) -> bool:
        return os.path.isdir(_checked(path))

    def sync_dir(self, path: str) -> None:
        with _translated(f"sync directory {path}"):
            fd = os.open(_checked(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def free_bytes(self, path: str) -> int:
        with _translated(f"statvfs {path}"):
            status = os.statvfs(_checked(path))
            return status.f_bavail * status.f_frsize
