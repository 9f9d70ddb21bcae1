"""The client library as a `PathRef`: each user's process is a client of its own, with the token of its user.

So what one writes another one sees after close or fsync, and not before: that is the promise. Paths are absolute there.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from dataclasses import dataclass
from typing import Any, Final

from tests.support.fs.clusters.local_cluster import LocalCluster
from tests.support.posix.places import NOW, ROOT, Identity

import fireflyer.fs
from fireflyer.fs.client.files.attributes import Attributes
from fireflyer.fs.client.files.file_objects import OpenFile
from fireflyer.fs.client.files.file_system import FileSystem
from fireflyer.fs.client.files.open_file_table import FileOptions
from fireflyer.fs.schema.errors import file_error
from fireflyer.fs.schema.inodes import MAX_PATH_BYTES, Inode, InodeId, Kind
from fireflyer.fs.schema.meta import (
    END_OF_FILE,
    AllocateMode,
    Found,
    GetLock,
    Lock,
    LockKind,
    LockState,
    Now,
    PathRef,
    SetAttributes,
    Stat,
    Window,
    XattrFlag,
)

__all__ = ["ClientPlace"]

_KINDS: Final = {
    0: Kind.FILE,
    stat.S_IFREG: Kind.FILE,
    stat.S_IFIFO: Kind.FIFO,
    stat.S_IFSOCK: Kind.SOCKET,
    stat.S_IFCHR: Kind.CHARACTER,
    stat.S_IFBLK: Kind.BLOCK,
    stat.S_IFDIR: Kind.DIRECTORY,
    stat.S_IFLNK: Kind.SYMLINK,
}
_LOCKS: Final = {"none": LockKind.NONE, "read": LockKind.READ, "write": LockKind.WRITE}
_FLOCKS: Final = {fcntl.LOCK_SH: LockKind.READ, fcntl.LOCK_EX: LockKind.WRITE, fcntl.LOCK_UN: LockKind.NONE}
_MODES: Final = {
    0: AllocateMode.DEFAULT,
    1: AllocateMode.KEEP_SIZE,
    3: AllocateMode.PUNCH_HOLE,
    16: AllocateMode.ZERO_RANGE,
    17: AllocateMode.PUNCH_HOLE,
}
_OWNER: Final = 1
"""Of the ranges that a process has locked."""


@dataclass(slots=True)
class _Directory:
    inode: InodeId


class ClientPlace:
    def __init__(self, cluster: LocalCluster) -> None:
        self.name = "client"
        self._cluster = cluster
        self._systems: dict[Identity, FileSystem] = {}
        self._open: dict[int, OpenFile | _Directory] = {}
        self._tokens: dict[int, str] = {}
        self._top = "/"

    @property
    def top(self) -> str:
        return self._top

    def renew(self, top: str) -> None:
        self.of(ROOT).mkdir(top, 0o777)
        self._top = top

    def tick(self) -> None:
        """Its times are to the nanosecond."""

    def call(self, who: Identity, name: str, arguments: tuple[Any, ...]) -> object:
        return getattr(self, f"do_{name}")(self.of(who), *arguments)

    def close(self) -> None:
        for system in self._systems.values():
            system.close()

    def of(self, who: Identity) -> FileSystem:
        if who not in self._systems:
            where = f"ff://{self._cluster.directory}"
            token = None if who.uid == 0 else self.token(who)
            self._systems[who] = fireflyer.fs.connect(where, token=token, options=FileOptions(umask=0))
        return self._systems[who]

    def token(self, who: Identity) -> str:
        if who.uid not in self._tokens:
            groups = [word for group in who.groups for word in ("--group", str(group))]
            words = ["admin", "user", "add", f"user-{who.uid}", "--uid", str(who.uid), "--gid", str(who.gid), *groups]
            self._tokens[who.uid] = self._cluster.ff(*words, "--token").strip().splitlines()[-1].split()[-1]
        return self._tokens[who.uid]

    def _at(self, path: bytes) -> str:
        if not path:
            raise file_error(errno.ENOENT)
        if len(path) > MAX_PATH_BYTES:
            raise file_error(errno.ENAMETOOLONG)
        name = os.fsdecode(path)
        return name if name.startswith("/") else f"{self._top}/{name}"

    def _file(self, number: int) -> OpenFile:
        found = self._open[number]
        if isinstance(found, _Directory):
            raise file_error(errno.EISDIR)
        return found

    # --- with paths ---

    def do_open(self, fs: FileSystem, number: int, path: bytes, flags: int, mode: int) -> None:
        follow = not flags & os.O_NOFOLLOW
        if flags & os.O_DIRECTORY:  # the library opens files
            found = fs.stat(self._at(path), follow)
            if not found.is_dir():
                raise file_error(errno.ENOTDIR)
        try:
            self._open[number] = fs.open_file(self._at(path), flags, mode, follow=follow)
        except IsADirectoryError:
            if flags & (os.O_ACCMODE | os.O_CREAT | os.O_TRUNC):
                raise
            self._open[number] = _Directory(fs.stat(self._at(path)).st_ino)

    def do_stat(self, fs: FileSystem, path: bytes) -> tuple[int, ...]:
        return _status(fs.stat(self._at(path)))

    def do_lstat(self, fs: FileSystem, path: bytes) -> tuple[int, ...]:
        return _status(fs.lstat(self._at(path)))

    def do_mkdir(self, fs: FileSystem, path: bytes, mode: int) -> None:
        fs.mkdir(self._at(path), mode & 0o1777)

    def do_mknod(self, fs: FileSystem, path: bytes, mode: int, device: int) -> None:
        fs.mknod(self._at(path), _KINDS[stat.S_IFMT(mode)], mode & 0o7777, device)

    def do_link(self, fs: FileSystem, source: bytes, target: bytes, follow: bool) -> None:
        fs.link(self._at(source), self._at(target), follow)

    def do_symlink(self, fs: FileSystem, target: bytes, path: bytes) -> None:
        fs.symlink(target, self._at(path))

    def do_readlink(self, fs: FileSystem, path: bytes) -> bytes:
        return os.fsencode(fs.readlink(self._at(path)))

    def do_unlink(self, fs: FileSystem, path: bytes) -> None:
        fs.unlink(self._at(path))

    def do_rmdir(self, fs: FileSystem, path: bytes) -> None:
        fs.rmdir(self._at(path))

    def do_rename(self, fs: FileSystem, source: bytes, target: bytes, flags: int) -> None:
        fs.rename(self._at(source), self._at(target), flags)

    def do_truncate(self, fs: FileSystem, path: bytes, size: int) -> None:
        if size < 0:
            raise file_error(errno.EINVAL)
        fs.truncate(self._at(path), size)

    def do_chmod(self, fs: FileSystem, path: bytes, mode: int) -> None:
        fs.chmod(self._at(path), mode)

    def do_chown(self, fs: FileSystem, path: bytes, uid: int, gid: int, follow: bool) -> None:
        fs.chown(self._at(path), uid, gid, follow)

    def do_utimens(self, fs: FileSystem, path: bytes, atime: Any, mtime: Any, follow: bool) -> None:
        where = self._at(path)
        if (atime, mtime) == (NOW, NOW):
            fs.utime(where, follow=follow)
        elif isinstance(atime, int) and isinstance(mtime, int):
            fs.utime(where, ns=(atime, mtime), follow=follow)
        elif (atime, mtime) != (None, None):
            change = SetAttributes(PathRef(1, os.fsencode(where)), follow, **_times(atime, mtime))
            fs.run(fs.files.set_attributes(change))

    def do_access(self, fs: FileSystem, path: bytes, mask: int) -> None:
        if not fs.access(self._at(path), mask):
            fs.stat(self._at(path))
            raise file_error(errno.EACCES)

    def do_listdir(self, fs: FileSystem, path: bytes) -> list[bytes]:
        return [os.fsencode(name) for name in fs.listdir(self._at(path))]

    def do_scandir(self, fs: FileSystem, path: bytes) -> list[tuple[bytes, int]]:
        return [
            (os.fsencode(entry.name), stat.S_IFMT(entry.attributes.st_mode)) for entry in fs.scandir(self._at(path))
        ]

    def do_setxattr(self, fs: FileSystem, path: bytes, name: bytes, value: bytes, flags: int, follow: bool) -> None:
        fs.setxattr(self._at(path), name, value, XattrFlag(flags), follow)

    def do_getxattr(self, fs: FileSystem, path: bytes, name: bytes, follow: bool) -> bytes:
        return fs.getxattr(self._at(path), name, follow)

    def do_listxattr(self, fs: FileSystem, path: bytes, follow: bool) -> list[bytes]:
        return sorted(os.fsencode(name) for name in fs.listxattr(self._at(path), follow))

    def do_removexattr(self, fs: FileSystem, path: bytes, name: bytes, follow: bool) -> None:
        fs.removexattr(self._at(path), name, follow)

    def do_name_max(self, fs: FileSystem, path: bytes) -> int:
        return fs.statvfs(self._at(path)).f_namemax

    # --- with what is open ---

    def do_close(self, fs: FileSystem, number: int) -> None:
        opened = self._open.pop(number)
        if isinstance(opened, OpenFile):
            opened.lock(LockKind.NONE, window=Window.WHOLE, owner=number + _OWNER)
            opened.lock(LockKind.NONE, owner=_OWNER)
            opened.close()

    def do_pread(self, fs: FileSystem, number: int, size: int, offset: int) -> bytes:
        if offset < 0:
            raise file_error(errno.EINVAL)
        return self._file(number).pread(offset, size)

    def do_pwrite(self, fs: FileSystem, number: int, data: bytes, offset: int) -> int:
        return self._file(number).pwrite(data, offset)

    def do_write(self, fs: FileSystem, number: int, data: bytes) -> int:
        self._file(number).append(data)
        return len(data)

    def do_fstat(self, fs: FileSystem, number: int) -> tuple[int, ...]:
        opened = self._open[number]
        if isinstance(opened, _Directory):
            return _status(Attributes(fs.run(_found(fs, opened.inode)), 0))
        return _status(opened.stat())

    def do_ftruncate(self, fs: FileSystem, number: int, size: int) -> None:
        opened = self._open[number]
        if isinstance(opened, _Directory) or not opened.file.writable or size < 0:
            raise file_error(errno.EINVAL)
        opened.truncate(size)

    def do_fallocate(self, fs: FileSystem, number: int, mode: int, offset: int, size: int) -> None:
        if offset < 0 or size <= 0:
            raise file_error(errno.EINVAL)
        if mode not in _MODES:
            raise file_error(errno.EOPNOTSUPP)
        opened = self._open[number]
        if isinstance(opened, _Directory):
            raise file_error(errno.EBADF)
        opened.allocate(_MODES[mode], offset, size)

    def do_fsync(self, fs: FileSystem, number: int) -> None:
        if isinstance(self._open[number], OpenFile):
            self._file(number).fsync()

    def _change(self, fs: FileSystem, number: int, **given: Any) -> None:
        opened = self._open[number]
        inode = opened.inode if isinstance(opened, _Directory) else opened.inode_id
        fs.run(fs.files.set_attributes(SetAttributes(PathRef(inode), **given)))

    def do_fchmod(self, fs: FileSystem, number: int, mode: int) -> None:
        self._change(fs, number, mode=mode)

    def do_fchown(self, fs: FileSystem, number: int, uid: int, gid: int) -> None:
        self._change(fs, number, uid=None if uid < 0 else uid, gid=None if gid < 0 else gid)

    def do_futimens(self, fs: FileSystem, number: int, atime: Any, mtime: Any) -> None:
        self._change(fs, number, **_times(atime, mtime))

    def do_flock(self, fs: FileSystem, number: int, operation: int) -> None:
        kind = _FLOCKS[operation & ~fcntl.LOCK_NB]
        self._file(number).lock(kind, window=Window.WHOLE, owner=number + _OWNER)

    def do_lock(self, fs: FileSystem, number: int, kind: str, start: int, size: int) -> None:
        opened = self._file(number)
        if (kind == "read" and not opened.file.readable) or (kind == "write" and not opened.file.writable):
            raise file_error(errno.EBADF)
        opened.lock(_LOCKS[kind], start, start + size if size else END_OF_FILE, owner=_OWNER)

    def do_get_lock(self, fs: FileSystem, number: int, kind: str, start: int, size: int) -> tuple[str, int, int] | None:
        end = start + size if size else END_OF_FILE
        wanted = Lock(self._file(number).inode_id, Window.RANGE, _OWNER, _LOCKS[kind], start, end)
        found = fs.run(_in_the_way(fs, wanted))
        if found is None:
            return None
        names = {value: name for name, value in _LOCKS.items()}
        return names[found.kind], found.start, 0 if found.end == END_OF_FILE else found.end - found.start


async def _in_the_way(fs: FileSystem, wanted: Lock) -> Lock | None:
    answer = await fs.files.open_files.port.call(GetLock(wanted))
    assert isinstance(answer, LockState)
    return answer.lock


async def _found(fs: FileSystem, inode: InodeId) -> Inode:
    answer = await fs.files.open_files.port.call(Stat(PathRef(inode)))
    assert isinstance(answer, Found)
    return answer.inode


def _times(atime: Any, mtime: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"now": 0}
    for name, flag, value in (("atime_ns", Now.ATIME, atime), ("mtime_ns", Now.MTIME, mtime)):
        if isinstance(value, str):
            given["now"] |= flag
        else:
            given[name] = value
    return given


def _status(found: Attributes) -> tuple[int, ...]:
    size = 0 if stat.S_ISDIR(found.st_mode) else found.st_size
    times = (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)
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
