"""The real disk behind the `Disk` port: POSIX calls, with the kernel's errors translated.

A file that is opened with `direct` has a second descriptor with O_DIRECT. What is aligned goes through it, the rest
through the first. Where a file system refuses O_DIRECT (some FUSE and network file systems, tmpfs before Linux 6.6),
everything goes through the first, and the log says so once.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import stat
from collections.abc import Callable, Iterator
from typing import Final, Self

from fireflyer.base.errors import Exists, FireflyerError, PermanentError, UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.ports import DIRECT_ALIGN_BYTES, Data, Disk, DiskFile, DiskLock, Held, Transfer
from fireflyer.runtime.content import open_content
from fireflyer.runtime.transfers import TransferThreads

__all__ = ["RealDisk", "RealFile", "translate_os_error"]

_log = logging.getLogger(__name__)
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_NOT_SUPPORTED: Final = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""What a file system says that has no fallocate. glibc's posix_fallocate would write into every block instead."""
_NO_LOCKS: Final = (errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL, errno.EBADF)
"""What flock says where there are no locks, and on NFS (EBADF) of a file that may only be read."""
_LOCK_TRIES: Final = 100
_UNKNOWN_BYTES: Final = 1 << 62
_refused: dict[int, None] = {}
"""Devices that were said to refuse O_DIRECT."""


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


def _is_aligned(view: memoryview) -> bool:
    """In memory. What is read-only counts as not aligned: its address is not told."""
    if view.readonly or len(view) < DIRECT_ALIGN_BYTES:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % DIRECT_ALIGN_BYTES == 0


def _say_refused(fd: int, path: str) -> None:
    """Once for each file system."""
    device = os.fstat(fd).st_dev
    if device not in _refused:
        _refused[device] = None
        _log.warning("file system refuses O_DIRECT, its page cache is used instead path=%s", path)


class RealFile(DiskFile):
    """An open file. Positioned calls only, so that threads can share it. After a failed fsync every call raises:
    the kernel may have dropped the pages that it could not write, and a second fsync would not tell. `direct_fd` is of
    the same file, with O_DIRECT; -1: there is none."""

    def __init__(self, fd: int, path: str, direct_fd: int = -1) -> None:
        self._fd = fd
        self._path = path
        self._direct_fd = direct_fd
        self._direct = direct_fd >= 0
        self._given_up = False
        self._transfers: TransferThreads | None = None

    def pwrite(self, data: Data, offset: int) -> None:
        fd = self._usable()
        if offset < 0:
            raise UsageError(f"offset {offset} in {self._path} is negative")
        with memoryview(data) as view, view.cast("B") as rest, _translated(f"write {self._path}"):
            done = self._directly(os.pwrite, rest, offset)
            while done < len(rest):
                done += os.pwrite(fd, rest[done:], offset + done)

    def _directly(self, call: Callable[[int, memoryview, int], int], view: memoryview, offset: int) -> int:
        """Transfers what can go past the page cache. Returns how many bytes from the start of `view` have gone."""
        done, whole = 0, len(view) - len(view) % DIRECT_ALIGN_BYTES
        if not self._direct or offset % DIRECT_ALIGN_BYTES or not _is_aligned(view):
            return 0
        while done < whole and done % DIRECT_ALIGN_BYTES == 0:
            try:
                moved = call(self._direct_fd, view[done:whole], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._direct = False  # blocks of the device are larger, or it is refused now and not by open
                _say_refused(self._fd, self._path)
                break
            if not moved:
                break
            done += moved
        return done

    def _read_into(self, target: memoryview, offset: int) -> int:
        fd = self._usable()
        with _translated(f"read {self._path}"):
            done = self._directly(_preadv, target, offset)
            while done < len(target) and (moved := _preadv(fd, target[done:], offset + done)):
                done += moved
            return done

    def _write_all(self, data: memoryview, offset: int) -> int:
        self.pwrite(data, offset)
        return len(data)

    def start_pwrite(self, data: memoryview, offset: int) -> Transfer:
        return self._start(lambda: self._write_all(data, offset), offset)

    def start_pread(self, target: memoryview, offset: int) -> Transfer:
        return self._start(lambda: self._read_into(target, offset), offset)

    def _start(self, operation: Callable[[], int], offset: int) -> Transfer:
        self._usable()
        if offset < 0:
            raise UsageError(f"offset {offset} in {self._path} is negative")
        if self._transfers is None:
            self._transfers = TransferThreads("disk-transfer")
        return self._transfers.start(operation)

    def allocate(self, size_bytes: int) -> None:
        fd = self._usable()
        with _translated(f"allocate {self._path}"):
            if size_bytes and _LIBC.fallocate(fd, 0, 0, size_bytes):
                code = ctypes.get_errno()
                if code not in _NOT_SUPPORTED:
                    raise OSError(code, os.strerror(code))
                os.ftruncate(fd, size_bytes)

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
        transfers, self._transfers = self._transfers, None
        if transfers is not None:
            transfers.close()
        direct_fd, self._direct_fd, self._direct = self._direct_fd, -1, False
        if direct_fd >= 0:
            os.close(direct_fd)  # what could fail does on the other descriptor, too
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


def _preadv(fd: int, target: memoryview, offset: int) -> int:
    return os.preadv(fd, [target], offset)


def _open_direct(fd: int, path: str, flags: int) -> int:
    """A descriptor with O_DIRECT of the file that `fd` is open on; -1 where there can be none."""
    try:
        return os.open(f"/proc/self/fd/{fd}", flags | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.EINVAL:
            _say_refused(fd, path)
        return -1  # a umask that takes the owner's own rights away, no /proc: the first descriptor serves


class _RealLock(DiskLock):
    """flock of a file: the kernel releases it when the last descriptor is closed, so at the latest with the process."""

    def __init__(self, fd: int, path: str) -> None:
        self._fd, self._path = fd, path

    def in_place(self) -> bool:
        """Who held it before may have removed the file that was opened here."""
        return _is_at(self._fd, self._path)

    def release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        try:
            with _translated(f"remove {self._path}"), contextlib.suppress(FileNotFoundError):
                if _is_at(fd, self._path):
                    os.unlink(self._path)
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile has the same descriptor
            os.close(fd)


def _is_at(fd: int, path: str) -> bool:
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        return False
    held = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)


def _open_lock(path: str) -> int:
    """-1: it is another user's, who lets nobody open it. Who owns it may remove it meanwhile."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    for _ in range(_LOCK_TRIES):
        with contextlib.suppress(PermissionError):
            return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666)
        try:
            return os.open(path, os.O_RDONLY | flags)
        except PermissionError:
            return -1
        except FileNotFoundError:
            continue
    return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666)


class RealDisk(Disk):
    """The machine's file systems. New files have mode 0666 and new directories 0777, less the umask."""

    def create(self, path: str, *, direct: bool = False) -> RealFile:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with _translated(f"create {path}"):
            fd = os.open(_checked(path), flags, 0o666)
            return RealFile(fd, path, _open_direct(fd, path, os.O_RDWR) if direct else -1)

    def open(self, path: str, *, direct: bool = False) -> RealFile:
        with _translated(f"open {path}"):
            fd = open_content(_checked(path), os.O_RDONLY)
            return RealFile(fd, path, _open_direct(fd, path, os.O_RDONLY) if direct else -1)

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
        return self._mode(path) is not None

    def is_dir(self, path: str) -> bool:
        mode = self._mode(path)
        return mode is not None and stat.S_ISDIR(mode)

    def _mode(self, path: str) -> int | None:
        try:
            return os.stat(_checked(path)).st_mode
        except PermissionError as error:  # it may be there
            raise translate_os_error(error, f"stat {path}") from error
        except OSError:
            return None

    def hold(self, path: str, *, wait: bool = True) -> DiskLock | None:  # noqa: ARG002 - a dead holder has none here
        with _translated(f"lock {path}"):
            for _ in range(_LOCK_TRIES):
                fd = _open_lock(_checked(path))
                if fd < 0:
                    return None
                with contextlib.ExitStack() as unless_held:
                    unless_held.callback(os.close, fd)
                    try:
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        break
                    except OSError as error:
                        if error.errno not in _NO_LOCKS:
                            raise
                        if error.errno != errno.EBADF:  # of another user, who may have locks
                            os.unlink(path)
                        return None
                    lock = _RealLock(fd, path)
                    if lock.in_place():
                        unless_held.pop_all()
                        return lock
            raise Held(f"lock {path}: another process holds it")

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
            return status.f_bavail * status.f_frsize if status.f_blocks else _UNKNOWN_BYTES
