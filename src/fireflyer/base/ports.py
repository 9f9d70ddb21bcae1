"""Ports: what the pure parts need of the world. `runtime` has the real ones, `sim` the seeded ones.

Paths are absolute POSIX strings. All calls block; they raise `FireflyerError` subclasses, never a bare `OSError`.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["Clock", "Data", "Disk", "DiskFile"]

Data = bytes | bytearray | memoryview
"""Bytes to be written; a memoryview must be contiguous."""


class Clock(Protocol):
    """Monotonic time with bounded drift; nothing may be assumed about wall clocks."""

    def now_ns(self) -> int: ...


class DiskFile(Protocol):
    def pwrite(self, data: Data, offset: int) -> None:
        """Writes all of `data` at `offset` (bytes). Durable only after `fsync`. Raises `NoSpace`."""

    def pread(self, length: int, offset: int) -> bytes:
        """Up to `length` bytes from `offset`; fewer only at the end of the file."""

    def size(self) -> int: ...

    def fsync(self) -> None:
        """What was written before is durable when this returns. After a failed fsync the file must be given up."""

    def close(self) -> None: ...


class Disk(Protocol):
    """A POSIX directory tree. Creations, renames and removals are durable only after `sync_dir` of their directory."""

    def create(self, path: str) -> DiskFile:
        """A new empty file, open for reading and writing. Raises `Exists`, `NotFound` (no parent), `NoSpace`."""

    def open(self, path: str) -> DiskFile:
        """An existing file, for reading. Raises `NotFound`."""

    def mkdir(self, path: str) -> None:
        """Raises `Exists`, `NotFound` (no parent)."""

    def rename(self, source: str, target: str) -> None:
        """Atomic. An existing target file is replaced; an existing target directory raises `Exists`."""

    def remove(self, path: str) -> None:
        """A file. Raises `NotFound`."""

    def rmdir(self, path: str) -> None:
        """An empty directory. Raises `NotFound`."""

    def list(self, path: str) -> list[str]:
        """Names in the directory, sorted. Raises `NotFound`."""

    def exists(self, path: str) -> bool: ...

    def is_dir(self, path: str) -> bool: ...

    def sync_dir(self, path: str) -> None: ...

    def free_bytes(self, path: str) -> int: ...
