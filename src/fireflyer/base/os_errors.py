"""From the kernel's errno to the error class that says what to do.

Pure (a table). Whoever makes the system call translates its error: `identity`, `runtime`, `kvstore`, `collectives`,
`cluster`, `fs`, `data` and `cli` do. `fireflyer.runtime` offers it too.
"""

from __future__ import annotations

import errno

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

__all__ = ["translate_os_error"]

_ADVICE: dict[int, tuple[type[FireflyerError], str]] = {
    errno.ENOENT: (NotFound, "no such file or directory"),
    errno.ENOTDIR: (NotFound, "a component of the path is not a directory"),
    errno.EEXIST: (Exists, "it already exists"),
    errno.ENOTEMPTY: (Exists, "the directory is not empty"),
    errno.ENOSPC: (NoSpace, "no space left on the device; free some or choose another directory"),
    errno.EDQUOT: (NoSpace, "the disk quota is used up; free some space or ask for more"),
    errno.EFBIG: (NoSpace, "the file would be larger than the file system or `ulimit -f` allows"),
    errno.EACCES: (PermissionDenied, "permission denied; check the owner and mode of the path"),
    errno.EPERM: (PermissionDenied, "operation not permitted; check the owner and mode of the path"),
    errno.EROFS: (PermissionDenied, "the file system is read-only; choose another directory"),
    errno.EISDIR: (UsageError, "it is a directory, a file is needed"),
    errno.EINVAL: (UsageError, "invalid argument"),
    errno.EBADF: (UsageError, "the file is closed or was not opened for this"),
    errno.ENAMETOOLONG: (UsageError, "the name is too long"),
    errno.ELOOP: (UsageError, "too many symbolic links"),
    errno.EMFILE: (Busy, "too many open files; close some or raise `ulimit -n`"),
    errno.ENFILE: (Busy, "too many files are open on this machine (ENFILE); raise fs.file-max"),
    errno.ENOMEM: (Busy, "out of memory"),
    errno.EAGAIN: (Busy, "a resource is temporarily used up (EAGAIN); try again"),
    errno.EBUSY: (Busy, "it is in use"),
    errno.EADDRINUSE: (UsageError, "the address is in use; choose another port, or 0 for any free one"),
    errno.EADDRNOTAVAIL: (UsageError, "this machine does not have that address; choose one of its own"),
    errno.ETIMEDOUT: (Timeout, "timed out"),
    errno.ECONNREFUSED: (Unreachable, "connection refused: no process listens there"),
    errno.ECONNRESET: (Unreachable, "connection reset by the other side"),
    errno.ECONNABORTED: (Unreachable, "the connection was aborted"),
    errno.EPIPE: (Unreachable, "the other side closed the connection"),
    errno.ENOTCONN: (Unreachable, "not connected"),
    errno.EHOSTUNREACH: (Unreachable, "no route to the host"),
    errno.ENETUNREACH: (Unreachable, "no route to the network"),
    errno.EHOSTDOWN: (Unreachable, "the host is down"),
    errno.EIO: (PermanentError, "the device failed (EIO); check it before using it again"),
}


def translate_os_error(error: OSError, what: str) -> FireflyerError:
    """The error to raise instead of `error`; `what` says what was attempted, as in `"create /data/x"`.

    An error that is ours already comes back unchanged. Use it as `raise translate_os_error(error, "...") from error`.
    """
    if isinstance(error, FireflyerError):
        return error
    if isinstance(error, TimeoutError):
        return Timeout(f"{what}: timed out")
    number = error.errno
    if number is None:
        return PermanentError(f"{what}: {error}")
    if number < 0:  # getaddrinfo numbers its errors below zero
        return Unreachable(f"{what}: the host name cannot be resolved ({error.strerror})")
    if number in _ADVICE:
        cls, advice = _ADVICE[number]
        return cls(f"{what}: {advice}")
    return PermanentError(f"{what}: {error.strerror or error} ({errno.errorcode.get(number, str(number))})")
