"""A tree of files, wherever it is: what copying and comparing need of a file system.

A connected `fireflyer.fs` file system is one, and `LocalTree` makes one of a directory of this machine. So a copy
is the same code in all directions. Paths are absolute in the tree; names that are no UTF-8 are as `os.fsdecode` says.
All methods raise `OSError` with the errno of POSIX, and may be called from several threads at once.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Protocol

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.runtime.content import open_content

__all__ = [
    "NO_REPLACE",
    "Attributes",
    "CopyTree",
    "Entry",
    "LocalEntry",
    "LocalFile",
    "LocalTree",
    "OpenFile",
    "Space",
    "Tree",
    "Walked",
    "join",
    "walk",
]

NO_REPLACE: Final = 1
"""Of `rename`: as `fireflyer.fs.schema.meta.RenameFlag`."""


class Attributes(Protocol):
    """Of `os.stat_result`, what is asked for here."""

    @property
    def st_mode(self) -> int: ...
    @property
    def st_ino(self) -> int: ...
    @property
    def st_nlink(self) -> int: ...
    @property
    def st_uid(self) -> int: ...
    @property
    def st_gid(self) -> int: ...
    @property
    def st_size(self) -> int: ...
    @property
    def st_atime_ns(self) -> int: ...
    @property
    def st_mtime_ns(self) -> int: ...
    @property
    def st_ctime_ns(self) -> int: ...


class Entry(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def attributes(self) -> Attributes:
        """Of the entry itself, where it is a symbolic link."""
        ...


class Space(Protocol):
    """Of `os.statvfs_result`, what is asked for here."""

    @property
    def f_frsize(self) -> int: ...
    @property
    def f_blocks(self) -> int: ...
    @property
    def f_bfree(self) -> int: ...
    @property
    def f_bavail(self) -> int: ...
    @property
    def f_files(self) -> int: ...
    @property
    def f_ffree(self) -> int: ...


class OpenFile(Protocol):
    """Bytes. `write` may take only a part, as of `io.RawIOBase`."""

    def read(self, size: int = -1, /) -> bytes | None: ...
    def readinto(self, buffer: bytearray | memoryview, /) -> int | None: ...
    def readline(self, size: int = -1, /) -> bytes: ...
    def write(self, data: bytes | memoryview, /) -> int | None: ...
    def seek(self, offset: int, whence: int = 0, /) -> int: ...
    def tell(self) -> int: ...
    def truncate(self, size: int | None = None, /) -> int: ...
    def flush(self) -> None: ...
    def fsync(self) -> None: ...
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...


class CopyTree(Protocol):
    """What copying needs of a tree; `beneath.beneath` makes one that no symbolic link leads out of."""

    def stat(self, path: str, follow: bool = True) -> Attributes: ...
    def scandir(self, path: str) -> Iterable[Entry]: ...
    def open(self, path: str, mode: str = "rb", *, permissions: int = 0o666) -> OpenFile: ...
    def mkdir(self, path: str, permissions: int = 0o777) -> None: ...
    def unlink(self, path: str) -> None: ...
    def rmtree(self, path: str) -> None: ...
    def rename(self, source: str, target: str) -> None: ...
    def symlink(self, target: str, path: str) -> None: ...
    def readlink(self, path: str) -> str: ...
    def chmod(self, path: str, mode: int) -> None: ...
    def chown(self, path: str, uid: int, gid: int, follow: bool = True) -> None: ...
    def utime(self, path: str, *, ns: tuple[int, int] | None = None) -> None: ...


class Tree(CopyTree, Protocol):
    def makedirs(self, path: str, *, exist_ok: bool = False) -> None: ...
    def rmdir(self, path: str) -> None: ...
    def rmtree(self, path: str, progress: Callable[[int], None] | None = None) -> None: ...
    def rename(self, source: str, target: str, flags: int = 0) -> None: ...
    def link(self, existing: str, path: str) -> None: ...
    def utime(self, path: str, *, ns: tuple[int, int] | None = None, follow: bool = True) -> None: ...
    def truncate(self, path: str, length: int) -> None: ...
    def statvfs(self, path: str) -> Space: ...


class LocalFile(io.FileIO):
    """Unbuffered."""

    def fsync(self) -> None:
        os.fsync(self.fileno())


class LocalEntry(msgspec.Struct, frozen=True):
    name: str
    attributes: os.stat_result


class LocalTree:
    """The files of this machine below `root`. "/" is `root` itself; symbolic links lead where they say."""

    def __init__(self, root: str = "") -> None:
        self._root = root.rstrip("/")

    def local_path(self, path: str) -> str:
        """Where it is on this machine."""
        return f"{self._root}{path}" if self._root else path

    def stat(self, path: str, follow: bool = True) -> os.stat_result:
        return os.stat(self.local_path(path), follow_symlinks=follow)

    def scandir(self, path: str) -> Iterator[LocalEntry]:
        with os.scandir(self.local_path(path)) as found:
            for one in found:
                try:
                    attributes = one.stat(follow_symlinks=False)
                except FileNotFoundError:  # removed in the meantime
                    continue
                yield LocalEntry(one.name, attributes)

    def open(self, path: str, mode: str = "rb", *, permissions: int = 0o666) -> LocalFile:
        return LocalFile(
            self.local_path(path), mode.replace("b", ""), opener=lambda name, how: os.open(name, how, permissions)
        )

    def mkdir(self, path: str, permissions: int = 0o777) -> None:
        os.mkdir(self.local_path(path), permissions)

    def makedirs(self, path: str, *, exist_ok: bool = False) -> None:
        os.makedirs(self.local_path(path), exist_ok=exist_ok)

    def rmdir(self, path: str) -> None:
        os.rmdir(self.local_path(path))

    def unlink(self, path: str) -> None:
        os.unlink(self.local_path(path))

    def rmtree(self, path: str, progress: Callable[[int], None] | None = None) -> None:
        shutil.rmtree(self.local_path(path))
        if progress is not None:
            progress(1)

    def rename(self, source: str, target: str, flags: int = 0) -> None:
        old, new = self.local_path(source), self.local_path(target)
        if flags == NO_REPLACE and os.path.isdir(old) and os.path.lexists(new):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
        if flags == NO_REPLACE and not os.path.isdir(old):
            os.link(old, new, follow_symlinks=False)
            os.unlink(old)
        else:
            os.rename(old, new)

    def link(self, existing: str, path: str) -> None:
        os.link(self.local_path(existing), self.local_path(path), follow_symlinks=False)

    def symlink(self, target: str, path: str) -> None:
        os.symlink(target, self.local_path(path))

    def readlink(self, path: str) -> str:
        return os.readlink(self.local_path(path))

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(self.local_path(path), mode)

    def chown(self, path: str, uid: int, gid: int, follow: bool = True) -> None:
        os.chown(self.local_path(path), uid, gid, follow_symlinks=follow)

    def utime(self, path: str, *, ns: tuple[int, int] | None = None, follow: bool = True) -> None:
        if ns is None:
            os.utime(self.local_path(path), follow_symlinks=follow)
        else:
            os.utime(self.local_path(path), ns=ns, follow_symlinks=follow)

    def truncate(self, path: str, length: int) -> None:
        os.truncate(self.local_path(path), length)

    def statvfs(self, path: str) -> os.statvfs_result:
        return os.statvfs(self.local_path(path))

    def read_batch(self, reads: Sequence[tuple[LocalFile, int, memoryview]]) -> list[int]:
        """How many bytes each of (file, offset, buffer) got: fewer than asked for at the end of its file."""
        return [_read_all(file.fileno(), buffer, offset) for file, offset, buffer in reads]

    def write_batch(self, writes: Sequence[tuple[LocalFile, int, memoryview]]) -> list[int]:
        """(file, offset, data)."""
        return [os.pwrite(file.fileno(), data, offset) for file, offset, data in writes]

    def open_file(self, path: str, flags: int = os.O_RDONLY) -> LocalFile:
        """`flags`: of `os.open`. What has no content at offsets, as a FIFO, is refused with EINVAL."""
        try:
            fd = open_content(self.local_path(path), flags)
        except UsageError as error:
            raise OSError(errno.EINVAL, "it is no regular file", path) from error
        return LocalFile(fd, "r+" if flags & os.O_ACCMODE else "r")

    def close(self) -> None:
        pass


def _read_all(fd: int, buffer: memoryview, offset: int) -> int:
    """The kernel reads at most 2 GiB at a time, and some file systems less."""
    done = os.preadv(fd, [buffer], offset)
    while 0 < done < len(buffer) and (count := os.preadv(fd, [buffer[done:]], offset + done)):
        done += count
    return done


def join(directory: str, name: str) -> str:
    """Nothing is added for an empty name."""
    if not name:
        return directory
    return f"{directory}{name}" if directory.endswith("/") else f"{directory}/{name}"


class Walked(msgspec.Struct, frozen=True):
    path: str
    relative: str
    """To where the walk began; empty for that itself."""
    attributes: Attributes
    depth: int


def walk(
    tree: CopyTree,
    path: str,
    *,
    follow: bool = False,
    failed: Callable[[OSError], None] | None = None,
    max_depth: int = -1,
) -> Iterator[Walked]:
    """What is at `path` and below it, a directory before what is in it, names in the order of their bytes. `follow`: a
    symbolic link at `path` itself. A directory that cannot be read is told to `failed`, or raises. `max_depth`: of
    what is reported, -1 for all."""
    waiting = [Walked(path, "", tree.stat(path, follow), 0)]
    while waiting:
        here = waiting.pop()
        yield here
        if not stat.S_ISDIR(here.attributes.st_mode) or here.depth == max_depth:
            continue
        try:
            entries = sorted(tree.scandir(here.path), key=lambda entry: os.fsencode(entry.name), reverse=True)
        except OSError as error:
            if failed is None:
                raise
            failed(error)
            continue
        waiting += [
            Walked(
                join(here.path, entry.name),
                f"{here.relative}/{entry.name}" if here.relative else entry.name,
                entry.attributes,
                here.depth + 1,
            )
            for entry in entries
        ]
