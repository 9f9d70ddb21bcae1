"""Writes a file to a directory, syncs it, and reads it back from the disk."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Sequence
from typing import Final

from fireflyer.base.units import MIB
from fireflyer.runtime.node_counters import Mount
from fireflyer.validators.core.evidence import DirectoryTest

__all__ = ["distinct_directories", "write_and_read_file"]

_FILE_BYTES: Final = 4 * MIB
_OF_OTHER_MACHINES: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "beegfs", "gpfs", "9p", "virtiofs", "afs", "glusterfs",
     "orangefs", "ocfs2", "gfs2", "ncpfs", "fuse"}
)  # fmt: skip


def distinct_directories(paths: Sequence[str]) -> list[str]:
    """Those that are there, one of each file system."""
    found: dict[int, str] = {}
    for path in paths:
        try:
            found.setdefault(os.stat(path).st_dev, path)
        except OSError:  # a run directory that only the launcher's machine has
            continue
    return list(found.values())


def write_and_read_file(path: str, mounts: Sequence[Mount]) -> DirectoryTest:
    """Never raises: what failed is part of the evidence."""
    kind = _kind(path, mounts)
    if kind in _OF_OTHER_MACHINES or kind.startswith("fuse."):
        return DirectoryTest(path=path, kind=kind, local=False)
    try:
        room = os.statvfs(path)
    except OSError as error:
        return DirectoryTest(path=path, kind=kind, error=_name_of(error))
    read_only = bool(room.f_flag & os.ST_RDONLY)
    error_name, same = ("", True) if read_only else _write_and_read(path)
    return DirectoryTest(
        path=path,
        kind=kind,
        free_bytes=room.f_bavail * room.f_frsize if room.f_blocks else None,
        free_inodes=room.f_favail if room.f_files else None,
        read_only=read_only,
        error=error_name,
        same=same,
    )


def _kind(path: str, mounts: Sequence[Mount]) -> str:
    """Of the file system, from the last mount that covers the path."""
    real = os.path.realpath(path)
    kind, length = "", -1
    for mount in mounts:
        covers = real == mount.point or real.startswith(mount.point.rstrip("/") + "/")
        if covers and len(mount.point) >= length:
            kind, length = mount.kind, len(mount.point)
    return kind


def _write_and_read(path: str) -> tuple[str, bool]:
    """Name of the errno, and whether the file was as it was written."""
    written = os.urandom(_FILE_BYTES)
    try:
        with tempfile.TemporaryFile(prefix=".fireflyer-check-", dir=path, buffering=0) as file:
            view = memoryview(written)
            while view:
                view = view[os.write(file.fileno(), view) :]
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # lest the page cache answers
            file.seek(0)
            return "", _read(file.fileno()) == written
    except OSError as error:
        return _name_of(error), True


def _read(fd: int) -> bytes:
    pieces = []
    while piece := os.read(fd, MIB):
        pieces.append(piece)
    return b"".join(pieces)


def _name_of(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, str(error.errno))
