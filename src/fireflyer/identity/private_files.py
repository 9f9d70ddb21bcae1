"""Small files that hold credentials: read only when nobody else can, written whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator

from fireflyer.base.errors import DataCorruption, FireflyerError, PermissionDenied, UsageError
from fireflyer.base.os_errors import translate_os_error

__all__ = ["lock_file", "read_private_file", "rename_private_file", "require_own_directory", "write_private_file"]


@contextlib.contextmanager
def lock_file(path: str) -> Iterator[None]:
    """Holds the lock file `path`, made with mode 0600, while this lasts; waits for who has it. Raises
    `PermissionDenied`, `NotFound`."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise translate_os_error(error, f"lock {path}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def read_private_file(path: str, max_bytes: int) -> bytes:
    """The whole file. Raises `NotFound`, `PermissionDenied` when group or others have any right on it or another
    user owns it, `DataCorruption` when it is longer than `max_bytes`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise translate_os_error(error, f"read {path}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{path} is not a regular file")
        if stat.S_IMODE(status.st_mode) & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            raise PermissionDenied(f"{path} can be read by other users (mode {mode:04o}); run: chmod 600 {path}")
        if status.st_uid not in (0, os.geteuid()):
            raise PermissionDenied(
                f"{path} belongs to uid {status.st_uid}; it must belong to you (uid {os.geteuid()}) or root"
            )
        data = b""
        while len(data) <= max_bytes and (piece := os.read(fd, max_bytes + 1 - len(data))):
            data += piece
    except FireflyerError:
        raise
    except OSError as error:
        raise translate_os_error(error, f"read {path}") from error
    finally:
        os.close(fd)
    if len(data) > max_bytes:
        raise DataCorruption(f"{path} is longer than {max_bytes} bytes, so it is not the expected file; check the path")
    return data


def require_own_directory(path: str) -> None:
    """That nobody but this user (and root) decides what is in the directory `path`.

    Raises `UsageError` where it is a symbolic link or no directory, `PermissionDenied` where it is another user's or
    others may write in it, `NotFound`. A group with the number of the user is that user's own.
    """
    try:
        status = os.lstat(path)
    except OSError as error:
        raise translate_os_error(error, f"look at directory {path}") from error
    if stat.S_ISLNK(status.st_mode):
        raise UsageError(f"{path} is a symbolic link; give the directory that it leads to ({os.path.realpath(path)})")
    if not stat.S_ISDIR(status.st_mode):
        raise UsageError(f"{path} is not a directory")
    if status.st_uid != os.geteuid():
        raise PermissionDenied(f"{path} belongs to uid {status.st_uid}; it must belong to you (uid {os.geteuid()})")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o002 or (mode & 0o020 and status.st_gid != status.st_uid):
        raise PermissionDenied(f"{path} can be written by other users (mode {mode:04o}); run: chmod go-w {path}")


def write_private_file(path: str, data: bytes) -> None:
    """Replaces `path` atomically and durably, mode 0600. After a crash it holds the old content or the new."""
    directory = os.path.dirname(os.path.abspath(path))
    temporary = os.path.join(directory, f".{os.path.basename(path)}.{secrets.token_hex(8)}.tmp")
    try:
        _write_new(temporary, data)
        try:
            os.rename(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
        _sync_directory(directory)
    except OSError as error:
        raise translate_os_error(error, f"write {path}") from error


def rename_private_file(path: str, new_path: str) -> None:
    """Durably, in the same directory; replaces what has the new name. Raises `NotFound`, `PermissionDenied`."""
    try:
        os.rename(path, new_path)
        _sync_directory(os.path.dirname(os.path.abspath(new_path)))
    except OSError as error:
        raise translate_os_error(error, f"rename {path} to {new_path}") from error


def _write_new(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(fd)


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
