"""Reads files of /sys, /proc and /etc by patterns, bounded in size, number and time."""

from __future__ import annotations

import errno
import fnmatch
import os
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Final

__all__ = ["FilesRead", "matching", "read_files"]

_MAX_FILES: Final = 40_000
_MAX_BYTES: Final = 64 << 10
_MAX_LARGE_BYTES: Final = 1 << 20
_NOTHING_THERE: Final = (errno.ENOENT, errno.ESRCH, errno.EINVAL, errno.EOPNOTSUPP, errno.ENODEV)
"""Drivers say so of what a device has not, as the speed of an interface that is down."""
_LARGE: Final = ("proc/self/mountinfo", "etc/fstab", "proc/meminfo")


class FilesRead:
    """What a thread has read so far: a driver may hold it for ever, and the round goes on."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self.unreadable: dict[str, str] = {}


def read_files(patterns: Iterable[str], *, root: str = "/", limit_s: float = 10.0) -> FilesRead:
    """Contents by path without the leading `/`. Files that do not exist are left out; of others that cannot be read
    the reason is told."""
    found, ended = FilesRead(), threading.Event()
    ends_s = time.monotonic() + limit_s
    wanted = list(dict.fromkeys(patterns))

    def read() -> None:
        for pattern in wanted:
            for path in matching(pattern, root):
                if time.monotonic() > ends_s or len(found.files) + len(found.unreadable) >= _MAX_FILES:
                    return
                _read(root, path, found)
        ended.set()

    thread = threading.Thread(target=read, daemon=True, name="read-files")
    thread.start()
    ended.wait(limit_s)
    if ended.is_set():
        return found
    partial = FilesRead()
    partial.files = dict(found.files)
    partial.unreadable = dict(found.unreadable) | {"sys": f"not all was read within {limit_s:g} s"}
    return partial


def matching(pattern: str, root: str = "/") -> Iterator[str]:
    """Paths of the pattern, whose `*`, `?` and `[…]` stand for names in one directory. In order."""
    yield from _below(root, "", pattern.split("/"))


def _below(root: str, base: str, parts: list[str]) -> Iterator[str]:
    for number, part in enumerate(parts):
        if not any(char in part for char in "*?["):
            base = f"{base}/{part}" if base else part
            continue
        try:
            names = sorted(os.listdir(os.path.join(root, base)))
        except OSError:
            return
        for name in fnmatch.filter(names, part):
            yield from _below(root, f"{base}/{name}" if base else name, parts[number + 1 :])
        return
    if os.path.lexists(os.path.join(root, base)):
        yield base


def _read(root: str, path: str, found: FilesRead) -> None:
    limit = _MAX_LARGE_BYTES if path in _LARGE else _MAX_BYTES
    try:
        fd = os.open(os.path.join(root, path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            data = os.read(fd, limit)
            while path in _LARGE and len(data) < limit and (more := os.read(fd, limit - len(data))):
                data += more  # /proc gives a page or so at a time
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in _NOTHING_THERE:
            found.unreadable[path] = os.strerror(error.errno or 0).lower()
        return
    found.files[path] = data.decode(errors="replace")
