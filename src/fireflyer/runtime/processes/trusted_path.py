"""Who can change what a path names: whoever runs a program as root must know that nobody else can replace it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import Final

__all__ = ["changed_by_others"]

_MAX_LINKS: Final = 40


def changed_by_others(path: str) -> str:
    """Why somebody beside root and the account of this process can change what this absolute path names: the owner or
    the mode of the file, of a directory or of a link on the way. Empty: nobody can. A path that leads nowhere is told
    likewise."""
    try:
        for at, found in _steps(path):
            if found.st_uid not in (0, os.geteuid()):
                return f"{at} belongs to uid {found.st_uid}; it must belong to root"
            if stat.S_ISLNK(found.st_mode):
                continue  # whoever owns its directory may replace it, nobody else
            of_all = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX  # as /tmp: only owners replace files
            if found.st_mode & 0o022 and not of_all:
                return f"others than its owner may write {at} (mode {stat.S_IMODE(found.st_mode):04o})"
    except (OSError, ValueError) as error:
        reason = os.strerror(error.errno or 0).lower() if isinstance(error, OSError) else str(error)
        return f"{path[:200]}: {reason}"
    return ""


def _steps(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Each directory, link and file that the kernel comes to. Raises `OSError`, `ValueError`."""
    if not path.startswith("/"):
        raise ValueError("it is no absolute path")
    at, left, links = "/", [part for part in reversed(path.split("/")) if part], 0
    yield at, os.lstat(at)
    while left:
        part = left.pop()
        if part in (".", ".."):
            at = os.path.dirname(at) if part == ".." else at
            continue
        here = os.path.join(at, part)
        found = os.lstat(here)
        yield here, found
        if not stat.S_ISLNK(found.st_mode):
            at = here
            continue
        if (links := links + 1) > _MAX_LINKS:
            raise ValueError("it has too many links")
        target = os.readlink(here)
        at = "/" if target.startswith("/") else at
        left += [one for one in reversed(target.split("/")) if one]
