"""Ports: what the pure parts need of the world. `runtime` has the real ones, `sim` the seeded ones.

Paths are absolute POSIX strings. All calls block; they raise `FireflyerError` subclasses, never a bare `OSError`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Final, Protocol

from fireflyer.base.errors import Busy

__all__ = ["DIRECT_ALIGN_BYTES", "Clock", "Data", "Disk", "DiskFile", "DiskLock", "Held", "Transfer"]

Data = bytes | bytearray | memoryview
"""Bytes to be written; a memoryview must be contiguous."""
DIRECT_ALIGN_BYTES: Final = 4096
"""Of a file opened with `direct`, what begins at a multiple of this in the file and in memory goes past the page cache;
the rest, such as the end of a file, goes through it."""


class Clock(Protocol):
    """Monotonic time with bounded drift; nothing may be assumed about wall clocks."""

    def now_ns(self) -> int: ...


class Transfer(Protocol):
    """A read or a write in flight. Its memory belongs to the disk until `wait` has returned or raised."""

    crc32c: int | None = None
    """Of the bytes that were read, once `wait` has returned, where the disk has verified them as they came; None: the
    disk has no sum of them."""

    def wait(self) -> int:
        """Bytes that were read or written; fewer than were asked for only when a read met the end of the file. Raises
        what `pread` or `pwrite` raises."""


class DiskFile(Protocol):
    any_memory: bool = False
    """Whether `start_pread` is as fast into any memory, from any offset, as where both are aligned to
    `DIRECT_ALIGN_BYTES`."""

    def pwrite(self, data: Data, offset: int) -> None:
        """Writes all of `data` at `offset` (bytes). Durable only after `fsync`. Raises `NoSpace`."""

    def pread(self, length: int, offset: int) -> bytes:
        """Up to `length` bytes from `offset`; fewer only at the end of the file."""

    def start_pwrite(self, data: memoryview, offset: int) -> Transfer:
        """As `pwrite`, beside other transfers and in any order with them. Not covered by an `fsync` that begins before
        its `wait` has returned."""

    def start_pread(self, target: memoryview, offset: int) -> Transfer:
        """Fills `target`, which must be contiguous and writable, from `offset`, beside other transfers."""

    def allocate(self, size_bytes: int) -> None:
        """Makes an empty file so long, of zeros, and reserves the space where the file system can. Raises `NoSpace`."""

    def size(self) -> int: ...

    def fsync(self) -> None:
        """What was written before is durable when this returns. After a failed fsync the file must be given up."""

    def close(self) -> None:
        """No transfer is in flight afterwards; one that was not waited for may not have happened."""


class Held(Busy):
    """Another process holds a lock."""


class DiskLock(Protocol):
    """Held until `release`, or until the process has ended, however it ends."""

    def release(self) -> None:
        """Its file is removed. Idempotent."""


class Disk(Protocol):
    """A POSIX directory tree. Creations, renames and removals are durable only after `sync_dir` of their directory."""

    durable_names: bool = False
    """Creations, renames and removals are durable when they return: nothing is left to `sync_dir`."""

    def create(self, path: str, *, direct: bool = False) -> DiskFile:
        """A new empty file, open for reading and writing; with `direct` past the page cache where the file system
        allows it. Raises `Exists`, `NotFound` (no parent), `NoSpace`."""

    def create_all(self, paths: Sequence[str], *, direct: bool = False) -> list[DiskFile]:
        """`create` of each, at once where that takes less time. Raises what one of them raised; the others are closed
        then."""
        with contextlib.ExitStack() as stack:
            made = [stack.enter_context(contextlib.closing(self.create(path, direct=direct))) for path in paths]
            stack.pop_all()
        return made

    def sync_files(self, files: Sequence[DiskFile]) -> None:
        """`fsync` of each, at once where that takes less time. Raises what one of them raised."""
        for file in files:
            file.fsync()

    def open(self, path: str, *, direct: bool = False) -> DiskFile:
        """An existing file, for reading; `direct` as for `create`. Raises `NotFound`."""

    def mkdir(self, path: str) -> None:
        """Raises `Exists`, `NotFound` (no parent)."""

    def rename(self, source: str, target: str) -> None:
        """Atomic. An existing target file is replaced; an existing target directory raises `Exists`."""

    def remove(self, path: str) -> None:
        """A file. Raises `NotFound`."""

    def rmdir(self, path: str) -> None:
        """An empty directory. Raises `NotFound`."""

    def remove_tree(self, path: str) -> bool:  # noqa: ARG002
        """Removes the directory `path` with all that is in it, by fewer calls than each name takes. False: nothing was
        done, it is no directory, or this disk has no such call. Raises `NotFound`."""
        return False

    def list(self, path: str) -> list[str]:
        """Names in the directory, sorted. Raises `NotFound`."""

    def exists(self, path: str) -> bool:
        """Raises `PermissionDenied` where that may not be known, as `is_dir`."""

    def is_dir(self, path: str) -> bool: ...

    def hold(self, path: str, *, wait: bool = True) -> DiskLock | None:  # noqa: ARG002
        """Makes the file `path`, or takes the one that a dead process has left, and locks it against other processes.
        None: this file system has no locks, or the file belongs to another user who lets nobody lock it. Raises `Held`,
        on 3FS after the time in which the session of a dead client ends, without `wait` at once; `NotFound` (no
        parent), `NoSpace`."""
        return None

    def shown(self, path: str) -> str:
        """For messages: a path that other programs of the user take."""
        return path

    def sync_dir(self, path: str) -> None: ...

    def free_bytes(self, path: str) -> int:
        """What may still be written where `path` is; a number above all sizes where the file system does not tell."""
