"""Errors of file operations: each has an errno of POSIX, and is the Python error of that errno as well as ours.

`file_error(errno.ENOENT, "...")` is a `FileError` and a `FileNotFoundError`. On the wire: the number and a message.
"""

from __future__ import annotations

import errno as numbers
from typing import Final

from fireflyer.base.errors import PermanentError

__all__ = ["FileError", "file_error"]


class FileError(PermanentError, OSError):
    """The operation was refused, and changed nothing. Made by `file_error`. `errno` says why; `filename` is set by who
    knows the path."""

    code = "file"

    def __init__(
        self, number: int | str, message: str = "", path: str | None = None, target: str | None = None
    ) -> None:
        """`target`: the second path of an operation that has two. One argument alone is a message, as of any `OSError`:
        who raises anew what another process has met (torch does, of a loader's) has no more than type and text."""
        if isinstance(number, str):
            message = number
            number = _number_of(type(self))
        PermanentError.__init__(self, message)
        self.errno = number
        self.strerror = message
        self.filename = path
        self.filename2 = target

    def __str__(self) -> str:
        where = "" if self.filename is None else f": {self.filename!r}"
        to = "" if self.filename2 is None else f" -> {self.filename2!r}"
        return f"[Errno {self.errno}] {self.message}{where}{to}"

    def __reduce__(self) -> tuple[object, ...]:
        return file_error, (self.errno, self.message, self.filename, self.filename2)


class _Missing(FileError, FileNotFoundError): ...


class _Exists(FileError, FileExistsError): ...


class _NotADirectory(FileError, NotADirectoryError): ...


class _IsADirectory(FileError, IsADirectoryError): ...


class _Denied(FileError, PermissionError): ...


class _Blocking(FileError, BlockingIOError): ...


class _TimedOut(FileError, TimeoutError): ...


class _Interrupted(FileError, InterruptedError): ...


_WORDS: Final = {
    numbers.EPERM: "operation not permitted",
    numbers.ENOENT: "no such file or directory",
    numbers.EIO: "input/output error",
    numbers.ENXIO: "no such device or address",
    numbers.EBADF: "bad file descriptor",
    numbers.EAGAIN: "resource temporarily unavailable",
    numbers.EACCES: "permission denied",
    numbers.EBUSY: "device or resource busy",
    numbers.EEXIST: "file exists",
    numbers.EXDEV: "cross-device link",
    numbers.ENODEV: "no such device",
    numbers.ENOTDIR: "not a directory",
    numbers.EISDIR: "is a directory",
    numbers.EINVAL: "invalid argument",
    numbers.EFBIG: "file too large",
    numbers.ENOSPC: "no space left",
    numbers.EROFS: "read-only file system",
    numbers.EMLINK: "too many links",
    numbers.ERANGE: "result too large for the buffer",
    numbers.EDEADLK: "deadlock would occur",
    numbers.ENAMETOOLONG: "file name too long",
    numbers.ENOLCK: "no locks available",
    numbers.ENOSYS: "function not implemented",
    numbers.ENOTEMPTY: "directory not empty",
    numbers.ELOOP: "too many levels of symbolic links",
    numbers.ENODATA: "no data available",
    numbers.EOPNOTSUPP: "operation not supported",
    numbers.ESTALE: "stale file handle",
    numbers.EDQUOT: "disk quota exceeded",
}
_BY_NUMBER: Final[dict[int, type[FileError]]] = {
    numbers.ENOENT: _Missing,
    numbers.EEXIST: _Exists,
    numbers.ENOTDIR: _NotADirectory,
    numbers.EISDIR: _IsADirectory,
    numbers.EACCES: _Denied,
    numbers.EPERM: _Denied,
    numbers.EAGAIN: _Blocking,
    numbers.ETIMEDOUT: _TimedOut,
    numbers.EINTR: _Interrupted,
}


def _number_of(kind: type[FileError]) -> int:
    return next((number for number, each in _BY_NUMBER.items() if each is kind), numbers.EIO)


def file_error(number: int, message: str = "", path: str | None = None, target: str | None = None) -> FileError:
    """The error with this errno. `message`: one line, by default the usual words for the number."""
    return _BY_NUMBER.get(number, FileError)(number, message or _WORDS.get(number, f"error {number}"), path, target)
