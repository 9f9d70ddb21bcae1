"""Small whole files through the `Disk` port: read with a bound, replaced atomically and durably.

The writer of a new version works under a hidden temporary name that nobody else has (`.name.tmp-TAG`), syncs it,
renames it over the old one and syncs the directory. A reader sees the old file or the new one. A crash leaves at most
a hidden file behind.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import secrets
from collections.abc import Callable

from fireflyer.base.errors import DataCorruption, Exists, FireflyerError
from fireflyer.base.ports import Data, Disk, DiskFile
from fireflyer.runtime.disk import RealDisk

__all__ = ["create_temporary", "default_disk", "make_directories", "publish", "read_file", "replace_file"]


def default_disk(disk: Disk | None) -> Disk:
    return RealDisk() if disk is None else disk


def create_temporary(disk: Disk, path: str) -> tuple[str, DiskFile]:
    """A new file beside `path`, to be renamed to it. Its name is never used again, so that no two writers, of which one
    may think that the other is dead, mean different files by it."""
    directory, name = posixpath.split(path)
    temporary = posixpath.join(directory, f".{name}.tmp-{secrets.token_hex(8)}")
    return temporary, disk.create(temporary)


def make_directories(disk: Disk, path: str) -> None:
    """`path` and what is missing above it, durably. What is there already may have been made by a process that died
    before it could sync, so it is synced again, as far as we may."""
    parent = posixpath.dirname(path)
    made = not disk.is_dir(path)
    if parent == path or (not made and disk.durable_names):
        return
    make_directories(disk, parent)
    if made:
        with contextlib.suppress(Exists):
            disk.mkdir(path)
    if not disk.durable_names:
        with contextlib.nullcontext() if made else contextlib.suppress(FireflyerError):
            disk.sync_dir(parent)


def publish(disk: Disk, temporary: str, path: str) -> None:
    """Gives a synced temporary file its name, durably."""
    disk.rename(temporary, path)
    disk.sync_dir(posixpath.dirname(path))


def replace_file(
    path: str, data: Data, *, disk: Disk | None = None, before_publish: Callable[[], None] | None = None
) -> None:
    """Atomic and durable. `before_publish` is called when all but the new name is done, and may raise. Raises
    `NotFound` (no directory), `NoSpace`; the old file is then still there."""
    disk = default_disk(disk)
    path = os.path.abspath(path)
    temporary, file = create_temporary(disk, path)
    try:
        try:
            file.pwrite(data, 0)
            file.fsync()
        finally:
            file.close()
        if before_publish is not None:
            before_publish()
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
