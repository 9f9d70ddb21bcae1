"""A tree as copying sees it below one directory: no symbolic link is followed there, and no name leads out.

The directory itself is the one that a person has named, so links on the way to it are followed, once. Below it others
may be able to write: a link that they plant between the plan of a copy and a step of it, or a name like `../x` that the
other side tells, would have files read or replaced anywhere. So each step goes down from the directory name by name,
and holds what it has reached: by open descriptors on this machine, by inodes in a cluster. A link on the way is an
error (ELOOP) that names it; a link at the end is what is meant, not what it leads to.

Paths are those of the tree, and begin with that of the directory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final, Self, cast

from fireflyer.fs.client.files.attributes import ChildPath
from fireflyer.fs.tools.trees import Attributes, CopyTree, Entry, LocalEntry, LocalFile, LocalTree, OpenFile, Tree

if TYPE_CHECKING:
    from fireflyer.fs.client.files.file_system import FileSystem

__all__ = ["beneath"]

MAX_KNOWN: Final = 4096
"""Directories of a cluster whose inodes are remembered."""
_HOLD: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def beneath(tree: Tree, directory: str) -> Iterator[CopyTree]:
    """What is below `directory` of the tree. Raises `OSError`: it is not there, or no directory."""
    if not isinstance(tree, LocalTree):
        yield _RemoteDirectory(cast("FileSystem", tree), directory)
        return
    with _LocalDirectory(tree.local_path(directory), directory) as local:
        yield local


def _names(directory: str, path: str) -> list[str]:
    """Of `path`, from `directory` on. Raises `OSError` where they would lead out of it."""
    prefix = directory.rstrip("/")
    rest = path.removeprefix(prefix)
    if rest in ("", "/") and path.startswith(prefix):
        return []
    names = rest[1:].split("/")
    if not path.startswith(prefix + "/") or any(name in ("", ".", "..") or "\0" in name for name in names):
        raise OSError(errno.EINVAL, f"the path leads out of {directory}; it is left out", path)
    return names


def _link_on_the_way(path: str) -> OSError:
    return OSError(errno.ELOOP, "a symbolic link is on the path; remove it, or copy to where it leads", path)


class _LocalDirectory:
    def __init__(self, place: str, shown: str) -> None:
        self._shown = shown
        self._root = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._root)

    @contextlib.contextmanager
    def _at(self, path: str) -> Iterator[tuple[int, str]]:
        """The directory that holds the last name, and that name; "." for where all begins. What goes wrong in the body
        is of `path`."""
        *above, last = _names(self._shown, path) or ["."]
        here = self._root
        try:
            for name in above:
                below = os.open(name, _HOLD, dir_fd=here)
                if here != self._root:
                    os.close(here)
                here = below
                mode = os.fstat(here).st_mode
                if stat.S_ISLNK(mode):
                    raise _link_on_the_way(path)
                if not stat.S_ISDIR(mode):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            yield here, last
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise _link_on_the_way(path) from None
            error.filename = path
            raise
        finally:
            if here != self._root:
                os.close(here)

    def stat(self, path: str, follow: bool = True) -> os.stat_result:  # noqa: ARG002
        with self._at(path) as (here, name):
            return os.stat(name, dir_fd=here, follow_symlinks=False)

    def scandir(self, path: str) -> Iterator[LocalEntry]:
        with self._at(path) as (here, name):
            listed = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
        try:
            with os.scandir(listed) as found:
                for one in found:
                    try:
                        attributes = one.stat(follow_symlinks=False)
                    except FileNotFoundError:  # removed in the meantime
                        continue
                    yield LocalEntry(one.name, attributes)
        finally:
            os.close(listed)

    def open(self, path: str, mode: str = "rb", *, permissions: int = 0o666) -> LocalFile:
        def opened(_: str, how: int) -> int:
            with self._at(path) as (here, name):
                # Without O_NONBLOCK a pipe that was put here since would hold us up until somebody writes to it.
                file = os.open(name, how | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, permissions, dir_fd=here)
                if not stat.S_ISREG(os.fstat(file).st_mode):
                    os.close(file)
                    raise OSError(errno.EINVAL, "is not a regular file", path)
                return file

        return LocalFile(path, mode.replace("b", ""), opener=opened)

    def mkdir(self, path: str, permissions: int = 0o777) -> None:
        with self._at(path) as (here, name):
            os.mkdir(name, permissions, dir_fd=here)

    def unlink(self, path: str) -> None:
        with self._at(path) as (here, name):
            os.unlink(name, dir_fd=here)

    def rmtree(self, path: str) -> None:
        with self._at(path) as (here, name):
            shutil.rmtree(name, dir_fd=here)

    def rename(self, source: str, target: str) -> None:
        with self._at(source) as (of, old), self._at(target) as (to, new):
            os.rename(old, new, src_dir_fd=of, dst_dir_fd=to)

    def symlink(self, target: str, path: str) -> None:
        with self._at(path) as (here, name):
            os.symlink(target, name, dir_fd=here)

    def readlink(self, path: str) -> str:
        with self._at(path) as (here, name):
            return os.readlink(name, dir_fd=here)

    def chmod(self, path: str, mode: int) -> None:
        with self._at(path) as (here, name):
            held = os.open(name, _HOLD, dir_fd=here)
            try:
                if stat.S_ISLNK(os.fstat(held).st_mode):
                    raise _link_on_the_way(path)
                os.chmod(f"/proc/self/fd/{held}", mode)  # Linux has no chmod that follows no link
            finally:
                os.close(held)

    def chown(self, path: str, uid: int, gid: int, follow: bool = True) -> None:  # noqa: ARG002
        with self._at(path) as (here, name):
            os.chown(name, uid, gid, dir_fd=here, follow_symlinks=False)

    def utime(self, path: str, *, ns: tuple[int, int] | None = None) -> None:
        with self._at(path) as (here, name):
            if ns is None:
                os.utime(name, dir_fd=here, follow_symlinks=False)
            else:
                os.utime(name, ns=ns, dir_fd=here, follow_symlinks=False)


class _RemoteDirectory:
    """Of a cluster. Directories are remembered by their inodes, as open descriptors would hold them."""

    def __init__(self, files: FileSystem, shown: str) -> None:
        self._files, self._shown = files, shown
        root = files.stat(shown)
        if not stat.S_ISDIR(root.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), shown)
        self._root = root.st_ino
        self._lock = threading.Lock()
        self._known: dict[tuple[str, ...], int] = {}

    def _at(self, path: str) -> ChildPath:
        *above, last = _names(self._shown, path) or [""]
        return ChildPath(self._directory(tuple(above), path), last, path)

    def _directory(self, names: tuple[str, ...], path: str) -> int:
        if not names:
            return self._root
        with self._lock:
            known = self._known.get(names)
        if known is not None:
            return known
        above = self._directory(names[:-1], path)
        found = self._files.stat(ChildPath(above, names[-1], path), False)
        if stat.S_ISLNK(found.st_mode):
            raise _link_on_the_way(path)
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        with self._lock:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[names] = found.st_ino
        return found.st_ino

    def _forget(self) -> None:
        """Directories may have become others."""
        with self._lock:
            self._known.clear()

    def stat(self, path: str, follow: bool = True) -> Attributes:  # noqa: ARG002
        return self._files.stat(self._at(path), False)

    def scandir(self, path: str) -> Iterable[Entry]:
        directory = self._directory(tuple(_names(self._shown, path)), path)
        return self._files.scandir(ChildPath(directory, "", path))

    def open(self, path: str, mode: str = "rb", *, permissions: int = 0o666) -> OpenFile:
        return cast("OpenFile", self._files.open(self._at(path), mode, permissions=permissions, follow=False))

    def mkdir(self, path: str, permissions: int = 0o777) -> None:
        self._files.mkdir(self._at(path), permissions)

    def unlink(self, path: str) -> None:
        self._files.unlink(self._at(path))

    def rmtree(self, path: str) -> None:
        self._files.rmtree(self._at(path))
        self._forget()

    def rename(self, source: str, target: str) -> None:
        self._files.rename(self._at(source), self._at(target))
        self._forget()

    def symlink(self, target: str, path: str) -> None:
        self._files.symlink(target, self._at(path))

    def readlink(self, path: str) -> str:
        return cast("str", self._files.readlink(self._at(path)))

    def chmod(self, path: str, mode: int) -> None:
        self._files.chmod(self._at(path), mode, False)

    def chown(self, path: str, uid: int, gid: int, follow: bool = True) -> None:  # noqa: ARG002
        self._files.chown(self._at(path), uid, gid, False)

    def utime(self, path: str, *, ns: tuple[int, int] | None = None) -> None:
        self._files.utime(self._at(path), ns=ns, follow=False)
