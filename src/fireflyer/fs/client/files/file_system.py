"""Files for threads: the names of `fireflyer.fs.client.files.asyncio_files.Files`, blocking, and file objects like
those of `open`.

    with fireflyer.fs.connect("ff:///dir") as fs:
        fs.makedirs("/data/train", exist_ok=True)
        with fs.open("/data/train/a", "wb") as file:
            file.write(array)

May be called from any number of threads. What a parent has opened is not for its forked children: each opens its own,
with `fireflyer.fs.client.PerProcess(connect, "ff:///dir")`.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, Self, TypeVar

import numpy as np

from fireflyer.base.errors import FireflyerError, UsageError
from fireflyer.fs.client.files.asyncio_files import Files, Path
from fireflyer.fs.client.files.attributes import Attributes, DirEntry, Statvfs
from fireflyer.fs.client.files.engine import ThreadPort
from fireflyer.fs.client.files.file_objects import OpenFile, RawFile, wrapped
from fireflyer.fs.client.files.modes import flags_of, is_append
from fireflyer.fs.client.files.open_file import File
from fireflyer.fs.client.files.records import read_rows, read_together
from fireflyer.fs.client.fork_safety import refuse_pickling
from fireflyer.fs.schema.errors import FileError
from fireflyer.fs.schema.inodes import Defaults, Kind
from fireflyer.fs.schema.meta import PathRef, QuotaTree, XattrFlag

__all__ = ["FileSystem"]

_T = TypeVar("_T")


class FileSystem:
    """Made by `fireflyer.fs.connect`."""

    __reduce__ = refuse_pickling

    def __init__(self, engine: ThreadPort, files: Files, close: Callable[[], None]) -> None:
        """`close`: of what the engine uses."""
        self.files = files
        """The coroutines; `run` runs them."""
        self._engine = engine
        self._close = close
        self._objects: weakref.WeakSet[Any] = weakref.WeakSet()
        atexit.register(self._at_exit)

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Of `files`, or of one of its `File`s."""
        return self._engine.run(work)

    # --- what there is ---

    def stat(self, path: Path, follow: bool = True) -> Attributes:
        return self.run(self.files.stat(path, follow))

    def lstat(self, path: Path) -> Attributes:
        return self.run(self.files.lstat(path))

    def exists(self, path: Path) -> bool:
        return self.run(self.files.exists(path))

    def stat_many(self, paths: Iterable[Path], follow: bool = True) -> list[Attributes | FileError]:
        """In their order; an error in the place of what it is of."""
        return self.run(self.files.stat_many(paths, follow))

    def stat_inodes(self, inodes: Iterable[int]) -> list[Attributes | FileError]:
        """The same of inodes, whatever their names, and those that have none any more."""
        return self.run(self.files.stat_inodes(inodes))

    def listdir(self, path: Path = "/") -> list[Any]:
        """Names, in the order of their bytes: str, or bytes where the path is bytes."""
        return self.run(self.files.listdir(path))

    def scandir(self, path: Path = "/") -> Iterator[DirEntry]:
        """Entries with their attributes."""
        return self._each(self.files.scandir(path))

    def walk(self, top: Path = "/") -> Iterator[tuple[str, list[DirEntry], list[DirEntry]]]:
        """From the top down: (directory, its directories, all else). The caller may take some directories out."""
        return self._each(self.files.walk(top))

    def access(self, path: Path, mask: int, follow: bool = True) -> bool:
        return self.run(self.files.access(path, mask, follow))

    def readlink(self, path: Path) -> Any:
        return self.run(self.files.readlink(path))

    def statvfs(self, path: Path = "/") -> Statvfs:
        return self.run(self.files.statvfs(path))

    def statvfs_inode(self, inode: int) -> Statvfs:
        """As `statvfs`, of what has this number. ESTALE when it is gone."""
        return self.run(self.files.statvfs_inode(inode))

    def _each(self, of: Any) -> Iterator[Any]:
        while True:
            try:
                yield self.run(anext(of))
            except StopAsyncIteration:
                return

    # --- changing ---

    def mkdir(self, path: Path, permissions: int = 0o777) -> None:
        self.run(self.files.mkdir(path, permissions))

    def makedirs(self, path: Path, permissions: int = 0o777, exist_ok: bool = False) -> None:
        self.run(self.files.makedirs(path, permissions, exist_ok))

    def rmdir(self, path: Path) -> None:
        self.run(self.files.rmdir(path))

    def unlink(self, path: Path) -> None:
        self.run(self.files.unlink(path))

    def rmtree(self, path: Path, progress: Callable[[int], None] | None = None) -> None:
        """With all that is in it. `progress` hears how many names are gone."""
        self.run(self.files.rmtree(path, progress))

    def rename(self, source: Path, target: Path, flags: int = 0) -> None:
        self.run(self.files.rename(source, target, flags))

    def link(self, existing: Path, path: Path, follow: bool = False) -> None:
        self.run(self.files.link(existing, path, follow))

    def symlink(self, target: Path, path: Path) -> None:
        self.run(self.files.symlink(target, path))

    def mknod(self, path: Path, kind: Kind, permissions: int = 0o666, device: int = 0) -> None:
        self.run(self.files.mknod(path, kind, permissions, device))

    def chmod(self, path: Path, mode: int, follow: bool = True) -> None:
        self.run(self.files.chmod(path, mode, follow))

    def chown(self, path: Path, uid: int, gid: int, follow: bool = True) -> None:
        """-1: stays."""
        self.run(self.files.chown(path, uid, gid, follow))

    def utime(
        self, path: Path, times: tuple[float, float] | None = None, *, ns: tuple[int, int] | None = None,
        follow: bool = True,
    ) -> None:  # fmt: skip
        self.run(self.files.utime(path, times, ns=ns, follow=follow))

    def truncate(self, path: Path, length: int) -> None:
        self.run(self.files.truncate(path, length))

    def getxattr(self, path: Path, name: str | bytes, follow: bool = True) -> bytes:
        return self.run(self.files.getxattr(path, name, follow))

    def setxattr(
        self, path: Path, name: str | bytes, value: bytes, flag: XattrFlag = XattrFlag.ANY, follow: bool = True
    ) -> None:
        self.run(self.files.setxattr(path, name, value, flag, follow))

    def listxattr(self, path: Path, follow: bool = True) -> list[str]:
        return self.run(self.files.listxattr(path, follow))

    def removexattr(self, path: Path, name: str | bytes, follow: bool = True) -> None:
        self.run(self.files.removexattr(path, name, follow))

    def get_quota(self, path: Path) -> QuotaTree:
        return self.run(self.files.get_quota(path))

    def set_quota(self, path: Path, *, bytes: int | None = None, inodes: int | None = None) -> QuotaTree:  # noqa: A002
        return self.run(self.files.set_quota(path, bytes=bytes, inodes=inodes))

    def set_defaults(self, path: Path, defaults: Defaults) -> None:
        self.run(self.files.set_defaults(path, defaults))

    # --- open files ---

    def open(
        self, path: Path, mode: str = "rb", buffering: int = -1, encoding: str | None = None,
        errors: str | None = None, newline: str | None = None, *, permissions: int = 0o666, follow: bool = True,
    ) -> Any:  # fmt: skip
        """A file object as the builtin `open` makes it: binary with "b", else text (UTF-8 by default). Its `flush`
        brings all to the storage nodes, its `fsync` and `close` make the length known to everybody. `.file` is the
        `OpenFile` below it."""
        if not isinstance(mode, str):
            raise UsageError(f"mode {mode!r} is not a str; flags of os are for open_file")
        raw = RawFile(
            self.open_file(path, mode, permissions, follow=follow), mode, os.fspath(path), append=is_append(mode)
        )
        try:
            made = wrapped(raw, mode, buffering, encoding, errors, newline)
        except BaseException:
            raw.close()
            raise
        self._objects.add(made)
        return made

    def open_file(
        self, path: Path, mode: str | int = "rb", permissions: int = 0o666, *, follow: bool = True
    ) -> OpenFile:
        """Without a position. `mode`: as of `open`, or flags of `os`."""
        return self.opened(self.run(self.files.open(path, mode, permissions, follow=follow)))

    def opened(self, file: File) -> OpenFile:
        """For threads, what a coroutine of `files` has opened."""
        return OpenFile(self._engine, file)

    def open_inode(self, inode: int, mode: str | int = "rb") -> OpenFile:
        """What has this number, whatever its names: for descriptors of a mount."""
        return OpenFile(self._engine, self.run(self.files.open_at(PathRef(inode), flags_of(mode))))

    def read_batch(self, reads: Sequence[tuple[Any, int, Any]]) -> list[int]:
        """Of each (file, offset, buffer) how many bytes there were, all at once. `file`: an `OpenFile`, or what `open`
        gave; of one that was written through a buffer, flush it before. Many small ones cost least as one array: see
        `read_records`."""
        wanted = [(_file(file), offset, buffer) for file, offset, buffer in reads]
        return self.run(read_together(self._engine, wanted))

    def read_records(self, file: Any, offsets: Any, into: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Record `i` of `into` (any array or tensor whose first dimension counts records) becomes the bytes at
        `offsets[i]` of the file. How many bytes of each there were: fewer at the end of the file."""
        return self.run(read_rows(self._engine, _file(file), offsets, into))

    def write_batch(self, writes: Sequence[tuple[Any, int, Any]]) -> list[int]:
        """(file, offset, data). When it returns all of it is at the storage nodes."""
        return self.run(self.files.write_batch([(_file(file), offset, data) for file, offset, data in writes]))

    # --- the end ---

    def close(self) -> None:
        """Closes all files (which writes what waits) and ends the session. Raises the first error of one. Idempotent;
        nothing in a forked child."""
        if self.files.open_files.elsewhere or self.files.open_files.is_closed:
            return
        atexit.unregister(self._at_exit)
        first: BaseException | None = None
        for one in list(self._objects):
            try:
                one.close()
            except (FireflyerError, OSError, ValueError) as error:
                first = first or error
        try:
            self.run(self.files.open_files.close())
        finally:
            self._engine.close()
            self._close()
        if first is not None:
            raise first

    def _at_exit(self) -> None:
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _file(given: Any) -> File:
    if isinstance(given, File):
        return given
    found = given if isinstance(given, OpenFile) else getattr(given, "file", None)
    if not isinstance(found, OpenFile):
        raise UsageError(f"a {type(given).__name__} is not an open file of this file system")
    return found.file
