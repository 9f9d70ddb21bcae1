"""Opening a file for what it holds at offsets, and nothing else of its name."""

from __future__ import annotations

import errno
import os
import stat

from fireflyer.base.errors import UsageError

__all__ = ["open_content"]


def open_content(path: str, flags: int) -> int:
    """A descriptor of a regular file or a block device. `flags`: of `os.open`. Raises `OSError`, and `UsageError` for a
    directory, FIFO, socket or character device: at once, where a FIFO without a writer would keep its reader for ever.
    """
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENXIO:
            _refuse(os.stat(path).st_mode, path)
        if error.errno != errno.EAGAIN:
            raise
        _refuse(os.stat(path).st_mode, path)
        return os.open(path, flags | os.O_CLOEXEC)  # the kernel asks who has a lease of it (Samba, NFS) to give it back
    try:
        _refuse(os.fstat(fd).st_mode, path)
    except UsageError:
        os.close(fd)
        raise
    return fd


def _refuse(mode: int, path: str) -> None:
    if stat.S_ISREG(mode) or stat.S_ISBLK(mode):
        return
    if stat.S_ISDIR(mode):
        raise UsageError(f"open {path}: it is a directory, a file is needed")
    kind = {stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket"}.get(stat.S_IFMT(mode), "character device")
    raise UsageError(f"open {path}: it is a {kind}, a regular file is needed")
