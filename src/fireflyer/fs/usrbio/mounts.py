"""Mounts and their open files: which file of which cluster a descriptor is.

A mount says its cluster in /proc/self/mountinfo (`fuse.fireflyer`, source `ff://…`); `attach` says it elsewhere.
A descriptor's file is found by its inode, which the mount shows as the cluster knows it, and opened once more past the
mount: so it is the same file even when it was renamed or unlinked since.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from typing import Any, Final

import msgspec

from fireflyer.base.errors import UsageError

__all__ = ["FUSE_TYPE", "Registered", "attach", "deregister_fd", "detach", "extract_mount_point", "file_of", "files_of"]
__all__ += ["force_fsync", "register_fd"]

FUSE_TYPE: Final = "fuse.fireflyer"
_lock = threading.Lock()
_mounts: dict[str, _Mount] = {}
_registered: dict[int, Registered] = {}


def _in_child() -> None:
    """Another thread may have had the lock when this process was forked, and is not there to let it go."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_in_child)


class _Mount(msgspec.Struct, frozen=True):
    files: Any
    """A `fireflyer.fs.client.files.file_system.FileSystem`."""
    by_path: bool


class Registered(msgspec.Struct, frozen=True):
    files: Any
    file: Any
    """Its `OpenFile`."""
    what: tuple[int, int, int]
    """Device, inode, and what it was opened for: a number that was closed is soon another file's."""


def attach(mount_point: str, files: Any, *, by_path: bool = False) -> None:
    """`files`: of `fireflyer.fs.connect`, for what is below this directory. `by_path`: the directory is no mount, and
    its files are found by their paths in it."""
    with _lock:
        _mounts[os.path.realpath(mount_point)] = _Mount(files, by_path)


def detach(mount_point: str) -> None:
    """Forget the mount at `mount_point`."""
    with _lock:
        _mounts.pop(os.path.realpath(mount_point), None)


def extract_mount_point(path: str) -> str:
    """Mount point that `path` is in, whether or not the path is there. Raises `FileNotFoundError` outside of all."""
    found = _above(os.path.realpath(path))
    if found is None:
        raise FileNotFoundError(errno.ENOENT, "not in a mount of Fire-Flyer; attach() adds other directories", path)
    return found


def _above(path: str) -> str | None:
    known = {**dict.fromkeys(_mounts), **dict.fromkeys(_mounted())}
    while True:
        if path in known:
            return path
        if path == "/":
            return None
        path = os.path.dirname(path)


def _mounted() -> dict[str, str]:
    """Mount points and their sources."""
    found = {}
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            words, kind = before.split(" "), after.split(" ")
            if len(words) > 4 and len(kind) > 1 and kind[0] == FUSE_TYPE:
                found[_unescaped(words[4])] = _unescaped(kind[1])
    return found


def _unescaped(text: str) -> str:
    """Space, tab, line end and backslash are octal there."""
    for code in ("040", "011", "012", "134"):
        text = text.replace(f"\\{code}", chr(int(code, 8)))
    return text


def files_of(mount_point: str) -> Any:
    """Its file system; connects when it is wanted for the first time. Raises `UsageError`."""
    return _mount_of(os.path.realpath(mount_point)).files


def _mount_of(mount_point: str) -> _Mount:
    with _lock:
        found = _mounts.get(mount_point)
        if found is None:
            source = _mounted().get(mount_point)
            if source is None:
                raise UsageError(
                    f"{mount_point} is not a mount of Fire-Flyer; give the result of extract_mount_point()"
                )
            from fireflyer.fs import connect

            found = _mounts[mount_point] = _Mount(connect(source), False)
        return found


def register_fd(fd: int) -> None:
    """Register an open file of a mount; rings know it from then on, for what it was opened for. Once is enough.
    Raises `OSError`, `UsageError`."""
    access = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    found = os.fstat(fd)
    what = found.st_dev, found.st_ino, access
    with _lock:
        known = _registered.get(fd)
    if known is not None:
        if known.what == what:
            return
        deregister_fd(fd)
    path = os.readlink(f"/proc/self/fd/{fd}")
    mount_point = extract_mount_point(path.removesuffix(" (deleted)"))
    mount = _mount_of(mount_point)
    if mount.by_path:
        file = mount.files.open_file(f"/{os.path.relpath(path, mount_point)}", access)
    else:
        file = mount.files.open_inode(found.st_ino, access)
    with _lock:
        _registered[fd] = Registered(mount.files, file, what)


def deregister_fd(fd: int) -> None:
    """Deregister a descriptor before it is closed: what was written is at the storage nodes then, and its length is
    known. One that is not registered is left alone."""
    with _lock:
        found = _registered.pop(fd, None)
    if found is not None:
        found.file.close()


def file_of(fd: int) -> Registered:
    with _lock:
        found = _registered.get(fd)
    if found is None:
        raise OSError(errno.EBADF, f"descriptor {fd} is not registered; call register_fd() first")
    return found


def force_fsync(fd: int) -> None:
    """Everybody sees the length of what was written through rings."""
    file_of(fd).file.fsync()
