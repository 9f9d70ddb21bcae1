"""Small whole files through the `Disk` port: read with a bound, replaced atomically and durably.

The writer of a new version works under a hidden temporary name (`.name.tmp-N`), syncs it, renames it over the old one
and syncs the directory. A reader sees the old file or the new one. A crash leaves at most a hidden file behind.
"""

from __future__ import annotations

import contextlib
import os
import posixpath

from fireflyer.base.errors import Busy, DataCorruption, Exists
from fireflyer.base.ports import Data, Disk, DiskFile
from fireflyer.runtime.disk import RealDisk

__all__ = ["create_temporary", "default_disk", "make_directories", "publish", "read_file", "replace_file"]

_MAX_TEMPORARIES = 1000


def default_disk(disk: Disk | None) -> Disk:
    return RealDisk() if disk is None else disk


def create_temporary(disk: Disk, path: str) -> tuple[str, DiskFile]:
    """A new file beside `path`, to be renamed to it; its own for this caller, also among several processes."""
    directory, name = posixpath.split(path)
    for number in range(_MAX_TEMPORARIES):
        temporary = posixpath.join(directory, f".{name}.tmp-{number}")
        try:
            return temporary, disk.create(temporary)
        except Exists:
            continue
    raise Busy(f"{path}: {_MAX_TEMPORARIES} old temporary files beside it; remove {directory}/.{name}.tmp-*")


def make_directories(disk: Disk, path: str) -> None:
    """`path` and what is missing above it; nothing where it is there."""
    if not disk.is_dir(path):
        make_directories(disk, posixpath.dirname(path))
        with contextlib.suppress(Exists):
            disk.mkdir(path)


def publish(disk: Disk, temporary: str, path: str) -> None:
    """Gives a synced temporary file its name, durably."""
    disk.rename(temporary, path)
    disk.sync_dir(posixpath.dirname(path))


def replace_file(path: str, data: Data, *, disk: Disk | None = None) -> None:
    """Atomic and durable. Raises `NotFound` (no directory), `NoSpace`; the old file is then still there."""
    disk = default_disk(disk)
    path = os.path.abspath(path)
    temporary, file = create_temporary(disk, path)
    try:
        try:
            file.pwrite(data, 0)
            file.fsync()
        finally:
            file.close()
        publish(disk, temporary, path)
    except BaseException:
        if disk.exists(temporary):
            disk.remove(temporary)
        raise


def read_file(path: str, *, max_bytes: int, disk: Disk | None = None) -> bytes:
    """The whole file. Raises `NotFound`, and `DataCorruption` if it is larger than such a file ever is."""
    file = default_disk(disk).open(os.path.abspath(path))
    try:
        size = file.size()
        if size > max_bytes:
            raise DataCorruption(f"{path}: {size} bytes, valid files have at most {max_bytes}; restore it from a copy")
        return file.pread(size, 0)
    finally:
        file.close()
