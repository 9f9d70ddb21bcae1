"""System calls in the name of somebody: run as root, `python -I -S local_helper.py FD DIRECTORY UID GID GROUPS`.

It shuts itself into the directory (so that "/" is the place's), becomes that user, and carries out one call after the
other that comes over the socket: marshalled (name, arguments), answered by (0, value) or (errno, None). Only the
standard library: it starts in the time of a bare interpreter, and there is one for each user.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import marshal
import mmap
import os
import socket
import stat
import struct
import sys
from collections.abc import Callable
from typing import Any

__all__: list[str] = []

_libc = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD = -100
_AT_NO_FOLLOW = 0x100
_AT_FOLLOW = 0x400
_UTIME_NOW = (1 << 30) - 1
_UTIME_OMIT = (1 << 30) - 2
_LOCK = struct.Struct("hhqqi4x")
_KINDS = {"read": fcntl.F_RDLCK, "write": fcntl.F_WRLCK, "none": fcntl.F_UNLCK}
_descriptors: dict[int, int] = {}
"""By the number that our user has given."""


class _Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result


def _status(found: os.stat_result) -> tuple[int, ...]:
    times = (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)
    size = 0 if stat.S_ISDIR(found.st_mode) else found.st_size
    return (
        found.st_ino,
        found.st_mode,
        found.st_nlink,
        found.st_uid,
        found.st_gid,
        size,
        found.st_rdev,
        *times,
    )


def _open(number: int, path: bytes, flags: int, mode: int) -> None:
    _descriptors[number] = os.open(path, flags | os.O_NONBLOCK, mode)


def _close(number: int) -> None:
    os.close(_descriptors.pop(number))


class _Entry(ctypes.Structure):
    _fields_ = [
        ("inode", ctypes.c_uint64),
        ("next", ctypes.c_int64),
        ("size", ctypes.c_ushort),
        ("kind", ctypes.c_ubyte),
        ("name", ctypes.c_char * 256),
    ]


_libc.fdopendir.restype = ctypes.c_void_p
_libc.readdir.restype = ctypes.POINTER(_Entry)


def _listing(path: bytes) -> list[tuple[bytes, int]]:
    """With the kinds that the directory says: asking each file needs the right to search, this does not."""
    stream = ctypes.c_void_p(_libc.fdopendir(os.open(path, os.O_RDONLY | os.O_DIRECTORY)))
    found = []
    while entry := _libc.readdir(stream):
        if entry.contents.name not in (b".", b".."):
            found.append((entry.contents.name, entry.contents.kind << 12))
    _libc.closedir(stream)
    return sorted(found)


def _names(path: bytes) -> list[bytes]:
    return sorted(os.listdir(path))


def _time(nanoseconds: int | str | None) -> _Time:
    if nanoseconds is None:
        return _Time(0, _UTIME_OMIT)
    if isinstance(nanoseconds, str):
        return _Time(0, _UTIME_NOW)
    return _Time(*divmod(nanoseconds, 10**9))


def _utimens(path: bytes, atime_ns: int | str | None, mtime_ns: int | str | None, follow: bool) -> None:
    times = (_Time * 2)(_time(atime_ns), _time(mtime_ns))
    _checked(_libc.utimensat(_AT_FDCWD, path, times, 0 if follow else _AT_NO_FOLLOW))


def _futimens(number: int, atime_ns: int | str | None, mtime_ns: int | str | None) -> None:
    _checked(_libc.futimens(_descriptors[number], (_Time * 2)(_time(atime_ns), _time(mtime_ns))))


def _fallocate(number: int, mode: int, offset: int, size: int) -> None:
    _checked(_libc.fallocate(_descriptors[number], mode, ctypes.c_long(offset), ctypes.c_long(size)))


def _access(path: bytes, mask: int) -> None:
    _checked(_libc.access(path, mask))


def _link(source: bytes, target: bytes, follow: bool) -> None:
    _checked(_libc.linkat(_AT_FDCWD, source, _AT_FDCWD, target, _AT_FOLLOW if follow else 0))


def _rename(source: bytes, target: bytes, flags: int) -> None:
    _checked(_libc.renameat2(_AT_FDCWD, source, _AT_FDCWD, target, ctypes.c_uint(flags)))


def _lock(number: int, kind: str, start: int, size: int) -> None:
    order = _LOCK.pack(_KINDS[kind], os.SEEK_SET, start, size, 0)
    fcntl.fcntl(_descriptors[number], fcntl.F_SETLK, order)


def _get_lock(number: int, kind: str, start: int, size: int) -> tuple[str, int, int] | None:
    order = _LOCK.pack(_KINDS[kind], os.SEEK_SET, start, size, 0)
    found, _, begin, length, _ = _LOCK.unpack(fcntl.fcntl(_descriptors[number], fcntl.F_GETLK, order))
    names = {value: name for name, value in _KINDS.items()}
    return None if found == fcntl.F_UNLCK else (names[found], begin, length)


def _map_read(number: int, size: int, offset: int) -> bytes:
    with mmap.mmap(_descriptors[number], offset + size, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        return mapped[offset : offset + size]


def _map_write(number: int, data: bytes, offset: int) -> None:
    with mmap.mmap(_descriptors[number], offset + len(data), mmap.MAP_SHARED) as mapped:
        mapped[offset : offset + len(data)] = data


def _space(path: bytes) -> int:
    return os.statvfs(path).f_namemax


def _flock(number: int, operation: int) -> None:
    fcntl.flock(_descriptors[number], operation)


_CALLS: dict[str, Callable[..., Any]] = {
    "open": _open,
    "close": _close,
    "pread": lambda number, size, offset: os.pread(_descriptors[number], size, offset),
    "pwrite": lambda number, data, offset: os.pwrite(_descriptors[number], data, offset),
    "write": lambda number, data: os.write(_descriptors[number], data),
    "map_read": _map_read,
    "map_write": _map_write,
    "fstat": lambda number: _status(os.fstat(_descriptors[number])),
    "ftruncate": lambda number, size: os.ftruncate(_descriptors[number], size),
    "fallocate": _fallocate,
    "fsync": lambda number: os.fsync(_descriptors[number]),
    "fchmod": lambda number, mode: os.fchmod(_descriptors[number], mode),
    "fchown": lambda number, uid, gid: os.fchown(_descriptors[number], uid, gid),
    "futimens": _futimens,
    "flock": _flock,
    "lock": _lock,
    "get_lock": _get_lock,
    "stat": lambda path: _status(os.stat(path)),
    "lstat": lambda path: _status(os.lstat(path)),
    "mkdir": os.mkdir,
    "mknod": os.mknod,
    "link": _link,
    "symlink": os.symlink,
    "readlink": os.readlink,
    "unlink": os.unlink,
    "rmdir": os.rmdir,
    "rename": _rename,
    "truncate": os.truncate,
    "chmod": os.chmod,
    "chown": lambda path, uid, gid, follow: os.chown(path, uid, gid, follow_symlinks=follow),
    "utimens": _utimens,
    "access": _access,
    "listdir": _names,
    "scandir": _listing,
    "setxattr": lambda path, name, value, flags, follow: os.setxattr(path, name, value, flags, follow_symlinks=follow),
    "getxattr": lambda path, name, follow: os.getxattr(path, name, follow_symlinks=follow),
    "listxattr": lambda path, follow: sorted(os.fsencode(name) for name in os.listxattr(path, follow_symlinks=follow)),
    "removexattr": lambda path, name, follow: os.removexattr(path, name, follow_symlinks=follow),
    "name_max": _space,
    "chdir": os.chdir,
}


def _carry_out(name: str, arguments: tuple[Any, ...]) -> tuple[int, Any]:
    try:
        return 0, _CALLS[name](*arguments)
    except OSError as error:
        return error.errno or errno.EIO, None


def _become(directory: str, uid: int, gid: int, groups: list[int]) -> None:
    os.chroot(directory)
    os.chdir("/")
    os.umask(0)
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def main() -> None:
    fd, directory, uid, gid, groups = sys.argv[1:]
    with socket.socket(fileno=int(fd)) as control, control.makefile("rwb") as stream:
        _become(directory, int(uid), int(gid), [int(group) for group in groups.split(",") if group])
        while True:
            try:
                name, arguments = marshal.load(stream)
            except EOFError:
                return
            marshal.dump(_carry_out(name, arguments), stream)
            stream.flush()


if __name__ == "__main__":
    main()
