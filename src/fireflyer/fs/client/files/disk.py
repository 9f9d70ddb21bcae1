"""A connected file system behind the `Disk` port: what works on a disk of this machine works in a cluster.

Bytes of transfers are not copied: whole units of a write are sent from the caller's memory, and reads come straight
into it, several at once. A change of names is durable when the meta service has answered (`durable_names`), so
`sync_dir` only looks whether the directory is there. Errors are those of the port, by what the caller must do: a chain
that does not answer in time is a `TransientError`, never a file that is damaged or missing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, Final

from fireflyer.base.errors import (
    Exists,
    FireflyerError,
    InvariantViolation,
    NoSpace,
    PermanentError,
    UsageError,
    error_from_wire,
)
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.ports import Data, Disk, DiskFile, DiskLock, Held, Transfer
from fireflyer.base.units import MIB, SECOND
from fireflyer.fs.client.chunks import Options
from fireflyer.fs.client.files.attributes import Statvfs
from fireflyer.fs.client.files.file_objects import OpenFile
from fireflyer.fs.client.files.file_system import FileSystem
from fireflyer.fs.client.files.open_file import File
from fireflyer.fs.client.files.open_file_table import FileOptions
from fireflyer.fs.client.files.open_inode import BegunRead
from fireflyer.fs.schema.errors import FileError
from fireflyer.fs.schema.meta import END_OF_FILE, AllocateMode, LockKind, RenameFlag, Window

__all__ = ["DISK_OPTIONS", "FileSystemDisk", "FileSystemFile"]

_PATIENCE_NS: Final = 300 * SECOND
"""For a chunk: a node that died is noticed, and its chain goes on without it, long before. No write is given up for
that."""
DISK_OPTIONS: Final = FileOptions(write_bytes=96 * MIB, ahead_bytes=0, chunks=Options(timeout_ns=_PATIENCE_NS))
"""For `connect`: several large writes of one file under way, nothing fetched that was not asked for."""
_HOLDER_NS: Final = 80 * SECOND
"""For a lock: a killed client's session ends after a minute without a heartbeat, and its locks with it."""
_LOCK_WAIT_NS: Final = SECOND // 2
"""In one request, so that a signal is heard meanwhile."""
_UNKNOWN_BYTES: Final = 1 << 62


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except FileError as error:
        raise _translate(error, what) from error


def _translate(error: FileError, what: str) -> FireflyerError:
    cause = error.__cause__
    if isinstance(cause, NoSpace):
        return NoSpace(
            f"{what}: the storage nodes have no space left; remove old checkpoints or files, or add a node "
            "(`ff fs status` shows what is free)"
        )
    if isinstance(cause, FireflyerError) and not isinstance(cause, FileError):
        return error_from_wire(cause.code, f"{what}: {cause.message}")  # what the chunk store said, and not just EIO
    return translate_os_error(OSError(error.errno, error.strerror), what)


class _Write(Transfer):
    def __init__(self, file: FileSystemFile, offset: int, size: int) -> None:
        self._file, self._offset, self._size = file, offset, size
        self._waited = False

    def wait(self) -> int:
        if not self._waited:
            self._file.wait_written(self._offset, self._size)
            self._waited = True
        return self._size


class _Read(Transfer):
    def __init__(self, file: FileSystemFile, begun: BegunRead) -> None:
        self._file, self._begun = file, begun
        self._waited = False

    def wait(self) -> int:
        if not self._waited:
            self._file.wait_read(self._begun)
            self._waited = True
            self.crc32c = self._begun.crc32c
        return self._begun.size


class FileSystemFile(DiskFile):
    """After a write or an fsync that failed every call raises, as for a file of this machine: what is in the file is
    not known."""

    any_memory = True

    def __init__(self, files: FileSystem, file: OpenFile, shown: str) -> None:
        self._files, self._file, self._shown = files, file, shown
        self._given_up = False
        self._reads: dict[BegunRead, None] = {}

    def pwrite(self, data: Data, offset: int) -> None:
        self._check(offset)
        with self._writing("write"):
            self._file.pwrite(data, offset)

    def start_pwrite(self, data: memoryview, offset: int) -> Transfer:
        self._check(offset)
        with self._writing("write"):
            self._files.run(self._file.file.pwrite(data, offset, lent=True))
        return _Write(self, offset, len(data))

    def wait_written(self, offset: int, size: int) -> None:
        """Nobody reads the memory of the write any more when this returns or raises."""
        if self._given_up and not self._file.closed:
            with contextlib.suppress(FireflyerError):
                self._files.run(self._file.file.flush(offset, offset + size))
        self._check(offset)
        with self._writing("write"):
            self._files.run(self._file.file.flush(offset, offset + size))

    def pread(self, length: int, offset: int) -> bytes:
        self._check(offset)
        if length < 0:
            raise UsageError(f"length {length} in {self._shown} is negative")
        with _translated(f"read {self._shown}"):
            return self._file.pread(offset, length)

    def start_pread(self, target: memoryview, offset: int) -> Transfer:
        self._check(offset)
        with _translated(f"read {self._shown}"):
            begun = self._files.run(self._file.file.begin_read(target, offset))
        self._reads[begun] = None
        return _Read(self, begun)

    def wait_read(self, begun: BegunRead) -> None:
        self._check(0)
        self._reads.pop(begun, None)
        try:
            self._files.run(begun.end())
        except FireflyerError as error:
            raise error_from_wire(error.code, f"read {self._shown}: {error.message}") from error

    def allocate(self, size_bytes: int) -> None:
        self._check(0)
        if size_bytes:
            with self._writing("allocate"):
                self._file.allocate(AllocateMode.DEFAULT, 0, size_bytes)

    def size(self) -> int:
        """As the service has said within the last second, by opening it at the latest; as of reads."""
        self._check(0)
        with _translated(f"stat {self._shown}"):
            self._files.run(self._file.file.body.refresh(END_OF_FILE))
            return self._file.file.length

    def fsync(self) -> None:
        self._check(0)
        with self._writing("fsync"):
            self._file.fsync()

    def check_usable(self) -> None:
        """Raises as every call does where the file is closed, or given up."""
        self._check(0)

    def begin_fsync(self) -> Coroutine[Any, Any, None]:
        """Of one that is usable, for who runs it beside others, and then says how it ended: `fsynced`."""
        return self._file.file.fsync()

    def fsynced(self, error: BaseException | None) -> None:
        with self._writing("fsync"):
            if error is not None:
                raise error

    def close(self) -> None:
        reads, self._reads = self._reads, {}
        if reads:
            self._files.run(_give_up(reads))
        if not self._file.closed:
            with contextlib.suppress(FileError) if self._given_up else _translated(f"close {self._shown}"):
                self._files.run(_close(self._file.file))

    @contextlib.contextmanager
    def _writing(self, verb: str) -> Iterator[None]:
        try:
            with _translated(f"{verb} {self._shown}"):
                yield
        except UsageError:  # nothing was written
            raise
        except BaseException:
            self._given_up = True
            raise

    def _check(self, offset: int) -> None:
        if self._file.closed:
            raise UsageError(f"{self._shown} is closed")
        if offset < 0:
            raise UsageError(f"offset {offset} in {self._shown} is negative")
        if self._given_up:
            raise PermanentError(f"{self._shown}: an earlier write failed; write a new file instead")


class _Lock(DiskLock):
    """Of a whole file, as flock: it ends with the session of this client, at the latest."""

    def __init__(self, files: FileSystem, file: OpenFile, path: str, shown: str) -> None:
        self._files, self._file, self._path, self._shown = files, file, path, shown

    def take(self, until_ns: int) -> bool:
        """Whether the file is still at its path then: who held it before may have removed it."""
        while True:
            left_ns = until_ns - time.monotonic_ns()
            try:
                self._file.lock(LockKind.WRITE, window=Window.WHOLE, wait_ns=min(max(0, left_ns), _LOCK_WAIT_NS))
                break
            except BlockingIOError:
                if time.monotonic_ns() >= until_ns:
                    raise Held(f"lock {self._shown}: another client holds it") from None
        try:
            return self._files.lstat(self._path).st_ino == self._file.file.inode_id
        except FileNotFoundError:
            return False

    def release(self) -> None:
        if self._file.file.closed:
            return
        try:
            with _translated(f"remove {self._shown}"), contextlib.suppress(FileNotFoundError):
                if self._holds():
                    self._files.unlink(self._path)
        finally:
            self.give_up()

    def _holds(self) -> bool:
        """The session may have ended, and with it the lock: then the file is that of who has the lock now."""
        return not self._file.file.lost and self._files.lstat(self._path).st_ino == self._file.file.inode_id

    def give_up(self) -> None:
        """Leaves the file where it is."""
        with contextlib.suppress(FireflyerError):  # an end of the session ends the lock, too
            self._file.lock(LockKind.NONE, window=Window.WHOLE)
        with contextlib.suppress(FireflyerError):
            self._file.close()


def _check_path(path: str) -> None:
    if not path.startswith("/") or "\0" in path:
        raise UsageError(f"path {path!r} is not an absolute POSIX path")


async def _close_all(files: Sequence[File]) -> None:
    for file in files:
        with contextlib.suppress(FireflyerError):
            await file.close()


async def _close(file: File) -> None:
    """After an fsync nothing is left to be told: the service ends it with whatever is asked next, and nobody waits."""
    if not file.close_lazily():
        await file.close()


async def _give_up(reads: dict[BegunRead, None]) -> None:
    for begun in reads:
        begun.give_up()


class FileSystemDisk(Disk):
    """`prefix` stands before paths in messages, like `ff://host:7000`. Connect `files` with `DISK_OPTIONS`; it is its
    owner's, and belongs to one process. For any number of threads, each file for one at a time."""

    durable_names = True

    def __init__(self, files: FileSystem, prefix: str = "ff://") -> None:
        self._files, self._prefix = files, prefix
        self._measured = ("", 0)
        """The directory whose free space was asked for last, and its inode."""

    def shown(self, path: str) -> str:
        return f"{self._prefix}{path}"

    @contextlib.contextmanager
    def _of(self, verb: str, *paths: str) -> Iterator[None]:
        for path in paths:
            _check_path(path)
        with _translated(f"{verb} {' to '.join(map(self.shown, paths))}"):
            yield

    def create(self, path: str, *, direct: bool = False) -> FileSystemFile:  # noqa: ARG002 - no page cache here
        with self._of("create", path):
            return self._open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def create_all(self, paths: Sequence[str], *, direct: bool = False) -> list[DiskFile]:  # noqa: ARG002
        for path in paths:
            _check_path(path)
        made: list[File | None] = [None] * len(paths)

        async def make(at: int) -> None:
            made[at] = await self._files.files.open(paths[at], os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)

        ends = self._files.run(self._together([make(at) for at in range(len(paths))]))
        for at, end in enumerate(ends):
            if end is not None:
                self._files.run(_close_all([file for file in made if file is not None]))
                with _translated(f"create {self.shown(paths[at])}"):
                    raise end
        files = [self._files.opened(file) for file in made if file is not None]
        return [FileSystemFile(self._files, file, self.shown(path)) for path, file in zip(paths, files, strict=True)]

    def sync_files(self, files: Sequence[DiskFile]) -> None:
        ours = [file for file in files if isinstance(file, FileSystemFile)]
        if len(ours) < len(files):
            raise InvariantViolation("a file of another disk")
        for file in ours:
            file.check_usable()
        ends = self._files.run(self._together([file.begin_fsync() for file in ours]))
        failed: FireflyerError | None = None
        for file, end in zip(ours, ends, strict=True):
            try:
                file.fsynced(end)
            except FireflyerError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    async def _together(self, work: Sequence[Coroutine[Any, Any, None]]) -> list[BaseException | None]:
        return await self._files.files.open_files.port.together(work)

    def open(self, path: str, *, direct: bool = False) -> FileSystemFile:  # noqa: ARG002
        with self._of("open", path):
            return self._open(path, os.O_RDONLY)

    def _open(self, path: str, flags: int) -> FileSystemFile:
        return FileSystemFile(self._files, self._files.open_file(path, flags, 0o666), self.shown(path))

    def mkdir(self, path: str) -> None:
        with self._of("mkdir", path):
            self._files.mkdir(path)

    def rename(self, source: str, target: str) -> None:
        with self._of("rename", source, target):
            try:
                self._files.rename(source, target, RenameFlag.NO_REPLACE)
            except FileExistsError:
                # Without the flag an empty directory would be replaced; the port promises never to.
                if self.is_dir(target):
                    raise Exists(
                        f"rename {self.shown(source)} to {self.shown(target)}: the target is a directory that exists "
                        "already"
                    ) from None
                self._files.rename(source, target)

    def remove(self, path: str) -> None:
        with self._of("remove", path):
            self._files.unlink(path)

    def rmdir(self, path: str) -> None:
        with self._of("rmdir", path):
            self._files.rmdir(path)

    def remove_tree(self, path: str) -> bool:
        with self._of("remove", path):
            try:
                self._files.rmtree(path)
            except NotADirectoryError:
                return False
            return True

    def list(self, path: str) -> list[str]:
        with self._of("list", path):
            return sorted(self._files.listdir(path))

    def exists(self, path: str) -> bool:
        with self._of("stat", path):
            return self._files.exists(path)

    def is_dir(self, path: str) -> bool:
        with self._of("stat", path):
            try:
                return self._files.stat(path).is_dir()
            except (FileNotFoundError, NotADirectoryError):
                return False

    def hold(self, path: str, *, wait: bool = True) -> DiskLock | None:
        until_ns = time.monotonic_ns() + (_HOLDER_NS if wait else 0)
        with self._of("lock", path):
            while True:
                try:
                    file = self._files.open_file(path, os.O_RDWR | os.O_CREAT, 0o666, follow=False)
                except PermissionError:
                    if not self._files.exists(path):
                        raise
                    return None
                lock = _Lock(self._files, file, path, self.shown(path))
                try:
                    if lock.take(until_ns):
                        return lock
                except BaseException:
                    lock.give_up()
                    raise
                lock.give_up()

    def sync_dir(self, path: str) -> None:
        with self._of("sync directory", path):
            if not self._files.stat(path).is_dir():
                raise translate_os_error(OSError(errno.ENOTDIR, ""), f"sync directory {self.shown(path)}")

    def free_bytes(self, path: str) -> int:
        """Of the cluster, divided by its replicas, or what the quota of the directory leaves. Its inode is looked up
        once, and again when that is gone."""
        with self._of("statvfs", path):
            status = self._status(path)
            return status.f_bavail * status.f_frsize if status.f_blocks else _UNKNOWN_BYTES

    def _status(self, path: str) -> Statvfs:
        measured, inode = self._measured  # another thread may set it meanwhile
        if path == measured:
            try:
                return self._files.statvfs_inode(inode)
            except FileError as error:
                if error.errno != errno.ESTALE:
                    raise
        inode = self._files.stat(path).st_ino
        self._measured = path, inode
        return self._files.statvfs_inode(inode)
