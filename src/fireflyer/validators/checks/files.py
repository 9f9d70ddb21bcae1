"""Reads files of /sys, /proc and /etc by patterns, bounded in size, number and time."""

from __future__ import annotations

import errno
import fnmatch
import os
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Final

__all__ = ["FilesRead", "matching", "read_files", "read_links"]

_MAX_FILES: Final = 40_000
_MAX_BYTES: Final = 64 << 10
_MAX_LARGE_BYTES: Final = 8 << 20
_NOTHING_THERE: Final = (errno.ENOENT, errno.ESRCH, errno.EINVAL, errno.EOPNOTSUPP, errno.ENODEV, errno.ENOTDIR)
"""Drivers say so of what a device has not, as the speed of an interface that is down."""
_LARGE: Final = (
    "proc/self/mountinfo", "etc/fstab", "proc/meminfo", "proc/cpuinfo", "proc/interrupts", "proc/modules",
)  # fmt: skip


class FilesRead:
    """What a thread has read so far: a driver may hold it for ever, and the round goes on."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self.unreadable: dict[str, str] = {}
        self.incomplete: dict[str, str] = {}
        """Why not all files of a pattern were looked for, by pattern."""
        self.late: set[str] = set()
        """Patterns of which that is because it took too long, or there are too many."""


def read_files(
    patterns: Iterable[str], *, root: str = "/", limit_s: float = 10.0, max_files: int = _MAX_FILES
) -> FilesRead:
    """Contents by path without the leading `/`. Files that do not exist are left out; of others that cannot be read
    the reason is told."""
    found, ended = FilesRead(), threading.Event()
    wanted = list(dict.fromkeys(patterns))
    done: list[str] = []
    ends_s = time.monotonic() + limit_s

    def read() -> None:
        for pattern in wanted:
            try:
                for path in matching(pattern, root):
                    if time.monotonic() > ends_s:
                        return
                    if len(found.files) + len(found.unreadable) >= max_files:
                        found.incomplete[pattern] = f"there are more than {max_files} files"
                        found.late.add(pattern)
                        break
                    _read(root, path, found)
            except OSError as error:
                found.incomplete[pattern] = os.strerror(error.errno or 0).lower()
            done.append(pattern)
        ended.set()

    thread = threading.Thread(target=read, daemon=True, name="read-files")
    thread.start()
    if ended.wait(limit_s):
        return found
    partial = FilesRead()
    late = set(wanted).difference(done)  # before the files are copied: of what is done, all are there
    partial.files = dict(found.files)
    partial.unreadable = dict(found.unreadable)
    partial.incomplete = dict(found.incomplete) | dict.fromkeys(late, f"it took longer than {limit_s:g} s")
    partial.late = found.late | late
    return partial


def read_links(paths: Iterable[str], *, root: str = "/", limit_s: float = 2.0) -> tuple[dict[str, str], dict[str, str]]:
    """Of absolute paths: where those lead that are links, and why it is not known of others. A server that is gone
    holds a thread and not the round."""
    wanted = list(dict.fromkeys(paths))
    found: dict[str, str] = {}
    ended = threading.Event()
    above = os.path.realpath(root).rstrip("/")

    def read() -> None:
        for path in wanted:
            found[path] = os.path.realpath(f"{above}{path}").removeprefix(above) or "/"
        ended.set()

    threading.Thread(target=read, daemon=True, name="read-links").start()
    ended.wait(limit_s)
    known = dict(found)
    late = dict.fromkeys(
        (path for path in wanted if path not in known), f"where it leads was not found within {limit_s:g} s"
    )
    return {path: leads for path, leads in known.items() if leads != path}, late


def matching(pattern: str, root: str = "/") -> Iterator[str]:
    """Paths of the pattern, whose `*`, `?` and `[…]` stand for names in one directory. In order. Raises `OSError` for a
    directory that is there and cannot be listed."""
    yield from _below(root, "", pattern.split("/"))


def _below(root: str, base: str, parts: list[str]) -> Iterator[str]:
    for number, part in enumerate(parts):
        if not any(char in part for char in "*?["):
            base = f"{base}/{part}" if base else part
            continue
        try:
            names = sorted(os.listdir(os.path.join(root, base)))
        except OSError as error:
            if error.errno in _NOTHING_THERE:
                return
            raise
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
    if len(data) == _MAX_LARGE_BYTES:
        found.unreadable[path] = f"it has {_MAX_LARGE_BYTES >> 20} MiB or more"
        return
    found.files[path] = data.decode(errors="replace")
