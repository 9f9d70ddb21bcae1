"""Where files can be, for tests: a `Place` carries out system calls, each in the name of somebody.

The same test runs on a directory of this machine's file system, on the bodies of the meta service over a store in
memory, on the client library and on a mount; `both.Both` is two of them that must agree after every call. Tests do not
call a place themselves but through a `User`, which has a method for each call.

Errors are `OSError` with their errno. The umask is 0. Paths may be relative to the working directory, `top`.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from typing import Final, NamedTuple, ParamSpec, Protocol, cast

__all__ = ["ALICE", "BOB", "CAROL", "NOW", "ROOT", "TEAM", "Identity", "Place", "Stat", "User", "errno_of"]

P = ParamSpec("P")

NOW: Final = "now"
TEAM: Final = 2000
"""A group that Carol is in too."""


class Identity(NamedTuple):
    uid: int
    gid: int
    groups: tuple[int, ...] = ()
    process: int = 0
    """Tells processes of one user apart; locks do."""


ROOT: Final = Identity(0, 0)
ALICE: Final = Identity(1001, 1001)
BOB: Final = Identity(1002, 1002)
CAROL: Final = Identity(1003, 1003, (TEAM, 1001))
"""In Alice's group."""


class Stat(NamedTuple):
    inode: int
    mode: int
    """With the kind."""
    links: int
    uid: int
    gid: int
    size: int
    """0 of directories: file systems differ."""
    device: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int

    @property
    def permissions(self) -> int:
        return self.mode & 0o7777

    @property
    def kind(self) -> int:
        """S_IFREG and so on."""
        return self.mode & 0o170000


class Place(Protocol):
    @property
    def top(self) -> str:
        """The working directory, absolute; of root and open to all."""

    def renew(self, top: str) -> None:
        """An empty working directory of this name, which was not there yet."""

    def call(self, who: Identity, name: str, arguments: tuple[object, ...]) -> object: ...

    def tick(self) -> None:
        """Times of what happens from here on are later than those before."""


_descriptors: Final = itertools.count(1)


class User:
    """Somebody at a place."""

    def __init__(self, place: Place, who: Identity) -> None:
        self.place = place
        self.who = who

    def process(self, number: int) -> User:
        """Another process of the same user."""
        return User(self.place, self.who._replace(process=number))

    # --- with paths ---

    def open(self, path: str, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
        """A number for the calls below; never given twice."""
        number = next(_descriptors)
        self._do("open", number, _path(path), flags, mode)
        return number

    def create(self, path: str, data: bytes = b"", mode: int = 0o644) -> None:
        """A new file with this in it."""
        number = self.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        if data:
            assert self.pwrite(number, data, 0) == len(data)
        self.close(number)

    def read(self, path: str) -> bytes:
        number = self.open(path)
        data = self.pread(number, 1 << 20, 0)
        self.close(number)
        return data

    def stat(self, path: str) -> Stat:
        return self._stat("stat", _path(path))

    def lstat(self, path: str) -> Stat:
        return self._stat("lstat", _path(path))

    def exists(self, path: str) -> bool:
        return errno_of(self.lstat, path) == 0

    def mkdir(self, path: str, mode: int = 0o755) -> None:
        self._do("mkdir", _path(path), mode)

    def mknod(self, path: str, mode: int, device: int = 0) -> None:
        self._do("mknod", _path(path), mode, device)

    def link(self, source: str, target: str, *, follow: bool = False) -> None:
        self._do("link", _path(source), _path(target), follow)

    def symlink(self, target: str, path: str) -> None:
        self._do("symlink", _path(target), _path(path))

    def readlink(self, path: str) -> str:
        return os.fsdecode(cast("bytes", self._do("readlink", _path(path))))

    def unlink(self, path: str) -> None:
        self._do("unlink", _path(path))

    def rmdir(self, path: str) -> None:
        self._do("rmdir", _path(path))

    def rename(self, source: str, target: str, flags: int = 0) -> None:
        """`flags`: 1 RENAME_NOREPLACE, 2 RENAME_EXCHANGE."""
        self._do("rename", _path(source), _path(target), flags)

    def truncate(self, path: str, size: int) -> None:
        self._do("truncate", _path(path), size)

    def chmod(self, path: str, mode: int) -> None:
        self._do("chmod", _path(path), mode)

    def chown(self, path: str, uid: int = -1, gid: int = -1, *, follow: bool = True) -> None:
        self._do("chown", _path(path), uid, gid, follow)

    def utimens(
        self, path: str, atime_ns: int | str | None, mtime_ns: int | str | None, *, follow: bool = True
    ) -> None:
        """None: stays; NOW."""
        self._do("utimens", _path(path), atime_ns, mtime_ns, follow)

    def access(self, path: str, mask: int) -> None:
        self._do("access", _path(path), mask)

    def listdir(self, path: str) -> list[str]:
        """In order."""
        return [os.fsdecode(name) for name in cast("list[bytes]", self._do("listdir", _path(path)))]

    def scandir(self, path: str) -> list[tuple[str, int]]:
        """With the kind of each, in order."""
        found = cast("list[tuple[bytes, int]]", self._do("scandir", _path(path)))
        return [(os.fsdecode(name), kind) for name, kind in found]

    def setxattr(self, path: str, name: str, value: bytes, flags: int = 0, *, follow: bool = True) -> None:
        """`flags`: 1 XATTR_CREATE, 2 XATTR_REPLACE."""
        self._do("setxattr", _path(path), name.encode(), value, flags, follow)

    def getxattr(self, path: str, name: str, *, follow: bool = True) -> bytes:
        return cast("bytes", self._do("getxattr", _path(path), name.encode(), follow))

    def listxattr(self, path: str, *, follow: bool = True) -> list[str]:
        return [name.decode() for name in cast("list[bytes]", self._do("listxattr", _path(path), follow))]

    def removexattr(self, path: str, name: str, *, follow: bool = True) -> None:
        self._do("removexattr", _path(path), name.encode(), follow)

    def name_max(self, path: str) -> int:
        """Of statvfs."""
        return cast("int", self._do("name_max", _path(path)))

    # --- with what is open ---

    def close(self, number: int) -> None:
        self._do("close", number)

    def pread(self, number: int, size: int, offset: int) -> bytes:
        return cast("bytes", self._do("pread", number, size, offset))

    def pwrite(self, number: int, data: bytes, offset: int) -> int:
        return cast("int", self._do("pwrite", number, data, offset))

    def write(self, number: int, data: bytes) -> int:
        """At the end, with O_APPEND; the calls here keep no other position."""
        return cast("int", self._do("write", number, data))

    def map_read(self, number: int, size: int, offset: int) -> bytes:
        """Through mapped memory; of places with a kernel."""
        return cast("bytes", self._do("map_read", number, size, offset))

    def map_write(self, number: int, data: bytes, offset: int) -> None:
        """Into bytes that the file has."""
        self._do("map_write", number, data, offset)

    def fstat(self, number: int) -> Stat:
        return self._stat("fstat", number)

    def ftruncate(self, number: int, size: int) -> None:
        self._do("ftruncate", number, size)

    def fallocate(self, number: int, mode: int, offset: int, size: int) -> None:
        """`mode`: 0, or of FALLOC_FL_: 1 KEEP_SIZE, 3 PUNCH_HOLE with it, 16 ZERO_RANGE, 17 that with KEEP_SIZE."""
        self._do("fallocate", number, mode, offset, size)

    def fsync(self, number: int) -> None:
        self._do("fsync", number)

    def fchmod(self, number: int, mode: int) -> None:
        self._do("fchmod", number, mode)

    def fchown(self, number: int, uid: int = -1, gid: int = -1) -> None:
        self._do("fchown", number, uid, gid)

    def futimens(self, number: int, atime_ns: int | str | None, mtime_ns: int | str | None) -> None:
        self._do("futimens", number, atime_ns, mtime_ns)

    def flock(self, number: int, operation: int) -> None:
        """Does not wait: LOCK_NB is in it."""
        self._do("flock", number, operation)

    def lock(self, number: int, kind: str, start: int = 0, size: int = 0) -> None:
        """Of fcntl, F_SETLK: "read", "write" or "none"; size 0: to the end, wherever that will be."""
        self._do("lock", number, kind, start, size)

    def get_lock(self, number: int, kind: str, start: int = 0, size: int = 0) -> tuple[str, int, int] | None:
        """Of fcntl, F_GETLK: what is in the way."""
        return cast("tuple[str, int, int] | None", self._do("get_lock", number, kind, start, size))

    def _stat(self, name: str, where: bytes | int) -> Stat:
        return Stat(*cast("tuple[int, ...]", self._do(name, where)))

    def _do(self, name: str, *arguments: object) -> object:
        return self.place.call(self.who, name, arguments)


def _path(path: str) -> bytes:
    return os.fsencode(path)


def errno_of(act: Callable[P, object], *arguments: P.args, **named: P.kwargs) -> int:
    """0: it went well."""
    try:
        act(*arguments, **named)
    except OSError as error:
        return error.errno or errno.EIO
    return 0
