"""Open files for threads: `OpenFile`, with positions given in each call, and what `open` of Python gives."""

from __future__ import annotations

import io
import os
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Final, Self

from fireflyer.base.errors import UsageError
from fireflyer.fs.client.files.attributes import Attributes
from fireflyer.fs.client.files.open_file import File
from fireflyer.fs.client.fork_safety import refuse_pickling
from fireflyer.fs.client.memory import memory_of
from fireflyer.fs.schema.meta import END_OF_FILE, AllocateMode, LockKind, Window

if TYPE_CHECKING:
    from fireflyer.fs.client.files.engine import ThreadPort

__all__ = ["BUFFER_BYTES", "OpenFile", "RawFile", "Reader", "Updater", "Writer", "wrapped"]

BUFFER_BYTES: Final = 256 << 10
"""Of file objects, by default."""


class OpenFile:
    """As `fireflyer.fs.client.files.open_file.File`, blocking; for any number of threads."""

    __reduce__ = refuse_pickling

    def __init__(self, engine: ThreadPort, file: File) -> None:
        self._engine = engine
        self.file = file

    @property
    def inode_id(self) -> int:
        return self.file.inode_id

    @property
    def attributes(self) -> Attributes:
        """As known here, without asking."""
        return self.file.attributes

    @property
    def path(self) -> str | None:
        return self.file.path

    @property
    def closed(self) -> bool:
        return self.file.closed

    def pread(self, offset: int, size: int) -> bytes:
        """Fewer bytes at the end of the file, none behind it."""
        return self._engine.run(self.file.pread(offset, size))

    def pread_into(self, buffer: Any, offset: int) -> int:
        """How many bytes there were for the buffer."""
        return self._engine.run(self.file.pread_into(buffer, offset))

    def pwrite(self, data: Any, offset: int) -> int:
        """All of it; it may wait in this client until `flush`."""
        if self._engine.busy_here:  # a buffered writer whose last reference has gone
            data = bytes(data)
            self._later(self.file.pwrite(data, offset), len(data))
            return len(data)
        return self._engine.run(self.file.pwrite(data, offset))

    def append(self, data: Any) -> int:
        """Where it was put: at the end of the file, whoever else appends."""
        if self._engine.busy_here:
            data = bytes(data)
            self._later(self.file.append(data), len(data))
            return 0
        return self._engine.run(self.file.append(data))

    def _later(self, work: Coroutine[Any, Any, Any], size: int = 0) -> None:
        file = self.path or f"inode {self.file.inode_id}"
        self._engine.later(work, file=file, size=size, failed=self.file.body.fail)

    def truncate(self, length: int) -> None:
        self._engine.run(self.file.truncate(length))

    def allocate(self, mode: AllocateMode, offset: int, size: int) -> None:
        self._engine.run(self.file.allocate(mode, offset, size))

    def lock(
        self, kind: LockKind, start: int = 0, end: int = END_OF_FILE, *, window: Window = Window.RANGE,
        owner: int | None = None, wait_ns: int = 0,
    ) -> None:  # fmt: skip
        self._engine.run(self.file.lock(kind, start, end, window=window, owner=owner, wait_ns=wait_ns))

    def flush(self) -> None:
        """All that was written is at the storage nodes. Others may not know of the length yet."""
        if self._engine.busy_here:
            return  # closing it does the same
        self._engine.run(self.file.flush())

    def fsync(self) -> None:
        """And everybody who opens the file sees it."""
        self._engine.run(self.file.fsync())

    def stat(self) -> Attributes:
        return self._engine.run(self.file.stat())

    def close(self) -> None:
        """Flushes and tells the length. An error of earlier writes comes here at the latest. Idempotent."""
        if self.file.closed:
            return
        if self._engine.busy_here:
            self._later(self.file.close())
        else:
            self._engine.run(self.file.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RawFile(io.RawIOBase):
    """With a position, and without a buffer of its own; for one thread at a time."""

    def __init__(self, file: OpenFile, mode: str, name: Any, *, append: bool) -> None:
        super().__init__()
        self.file = file
        self.mode = mode
        self.name = name
        self._append = append
        self._at = file.file.length if append else 0

    def readable(self) -> bool:
        self._check_open()
        return self.file.file.readable

    def writable(self) -> bool:
        self._check_open()
        return self.file.file.writable

    def seekable(self) -> bool:
        self._check_open()
        return True

    def readinto(self, buffer: Any) -> int:
        self._check_open()
        if not self.file.file.readable:
            raise io.UnsupportedOperation("not readable")
        count = self.file.pread_into(buffer, self._at)
        self._at += count
        return count

    def readall(self) -> bytes:
        self._check_open()
        parts = []
        while part := self.read(max(self.file.file.length - self._at, 1 << 16)):
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def write(self, data: Any) -> int:
        self._check_open()
        if not self.file.file.writable:
            raise io.UnsupportedOperation("not writable")
        size = memory_of(data, writable=False).nbytes
        if self._append:
            self._at = self.file.append(data) + size if size else self._at
        else:
            self._at += self.file.pwrite(data, self._at)
        return size

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._check_open()
        if whence == os.SEEK_CUR:
            offset += self._at
        elif whence == os.SEEK_END:
            offset += self.file.stat().st_size
        elif whence != os.SEEK_SET:
            raise UsageError(f"whence {whence} is not supported; use SEEK_SET, SEEK_CUR or SEEK_END")
        if offset < 0:
            raise UsageError(f"position {offset} is before the beginning of the file")
        self._at = offset
        return offset

    def tell(self) -> int:
        self._check_open()
        return self._at

    def truncate(self, size: int | None = None) -> int:
        self._check_open()
        if not self.file.file.writable:
            raise io.UnsupportedOperation("not writable")
        length = self._at if size is None else size
        self.file.truncate(length)
        return length

    def flush(self) -> None:
        """To the storage nodes."""
        self._check_open()
        if self.file.file.writable and not self.file.closed:  # the base class flushes after `close` below
            self.file.flush()

    def fsync(self) -> None:
        self._check_open()
        self.file.fsync()

    def close(self) -> None:
        if not self.closed:
            try:
                self.file.close()
            finally:
                super().close()

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file")


class Reader(io.BufferedReader):
    raw: RawFile

    @property
    def file(self) -> OpenFile:
        return self.raw.file

    def fsync(self) -> None:
        self.raw.fsync()


class Writer(io.BufferedWriter):
    raw: RawFile

    @property
    def file(self) -> OpenFile:
        return self.raw.file

    def flush(self) -> None:
        """To the storage nodes."""
        super().flush()
        self.raw.flush()

    def fsync(self) -> None:
        super().flush()
        self.raw.fsync()


class Updater(io.BufferedRandom):
    raw: RawFile

    @property
    def file(self) -> OpenFile:
        return self.raw.file

    def flush(self) -> None:
        """To the storage nodes."""
        super().flush()
        self.raw.flush()

    def fsync(self) -> None:
        super().flush()
        self.raw.fsync()


class Text(io.TextIOWrapper):
    @property
    def file(self) -> OpenFile:
        raw: Any = self.buffer
        found: OpenFile = raw.file
        return found

    def fsync(self) -> None:
        self.flush()
        buffer: Any = self.buffer
        buffer.fsync()


def wrapped(
    raw: RawFile, mode: str, buffering: int, encoding: str | None, errors: str | None, newline: str | None
) -> Any:
    """As the builtin `open` would give it."""
    text = "b" not in mode
    if buffering == 0:
        if text:
            raise UsageError("buffering=0 needs a binary mode; add b to the mode, or leave `buffering` out")
        return raw
    size = BUFFER_BYTES if buffering < 2 else buffering  # 1: by lines, which is of text
    if "+" in mode:
        buffered: Any = Updater(raw, size)
    else:
        buffered = Reader(raw, size) if "r" in mode else Writer(raw, size)
    if not text:
        return buffered
    return Text(buffered, encoding or "utf-8", errors, newline, line_buffering=buffering == 1)
