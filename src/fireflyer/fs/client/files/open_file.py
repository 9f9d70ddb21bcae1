"""One open of a file, for coroutines: what is asked of it is checked here, and done by the `OpenInode` that all
opens of the
inode share."""

from __future__ import annotations

import errno
import time
from typing import Any, Protocol, Self

from fireflyer.base.errors import (
    FireflyerError,
    InvariantViolation,
)
from fireflyer.base.units import SECOND
from fireflyer.fs.client.files.attributes import Attributes
from fireflyer.fs.client.files.open_inode import LOST, BegunRead, OpenInode, as_file_error, file_of
from fireflyer.fs.client.files.orphaned_handles import OrphanedHandles, UnansweredClose
from fireflyer.fs.client.futures import ClientFuture
from fireflyer.fs.client.memory import memory_of
from fireflyer.fs.core.files.readahead import ReadAhead, block_of
from fireflyer.fs.schema.errors import FileError, file_error
from fireflyer.fs.schema.inodes import Inode
from fireflyer.fs.schema.meta import (
    END_OF_FILE,
    Actor,
    Allocate,
    AllocateMode,
    Found,
    Lock,
    LockKind,
    PathRef,
    Reserve,
    Reserved,
    Stat,
    Truncate,
    Window,
)

__all__ = ["File", "FileTable"]


class FileTable(Protocol):
    """What an open file needs of the table that it is in: `client.files.open_file_table.OpenFileTable`."""

    orphaned: OrphanedHandles

    def check(self) -> None:
        """Raises `UsageError` in a forked child, EBADF when the client is closed."""

    def end_lazily(self, inode: Inode, handle: int, actor: Actor | None) -> None: ...

    def closed(self, body: OpenInode) -> None:
        """One of its files."""


class File:
    """One open file, for coroutines. Made by `Files.open`; close it, or use it with `async with`."""

    def __init__(
        self, table: FileTable, body: OpenInode, handle: int,
        *, readable: bool, actor: Actor | None, path: str | None, ahead_bytes: int,
    ) -> None:  # fmt: skip
        """`ahead_bytes`: to be fetched ahead, if it is read from front to back."""
        self._table = table
        self._body = body
        self.handle = handle
        """0: it cannot be written."""
        self.readable = readable
        self.writable = handle != 0
        self.actor = actor
        self.path = path
        self.lost = False
        """The session in which it was opened for writing is over."""
        self.closed = False
        self.ended: ClientFuture[None] = ClientFuture(body.port.wait)
        """When it is closed, and forgotten."""
        self.ahead = ReadAhead(block_of(body.where.chunk_bytes), ahead_bytes if readable else 0)
        self._seen = body.errors
        body.files[self] = None

    @property
    def inode_id(self) -> int:
        return self._body.id

    @property
    def attributes(self) -> Attributes:
        """As last heard of the service, with what was written here since."""
        inode = self._body.told(self._body.inode)
        return Attributes(inode, inode.length)

    @property
    def length(self) -> int:
        """As known here."""
        return self._body.length

    @property
    def body(self) -> OpenInode:
        return self._body

    # --- reading ---

    def check_readable(self) -> None:
        self._check(self.readable)

    async def pread(self, offset: int, size: int) -> bytes:
        """Fewer bytes at the end of the file, none behind it."""
        self._check(self.readable)
        await self._body.refresh(offset + size)
        memory = bytearray(max(0, min(size, self._body.length - offset)))
        count = await self.pread_into(memory, offset)
        return bytes(memoryview(memory)[:count])

    async def pread_into(self, buffer: Any, offset: int) -> int:
        """How many bytes there were for the buffer."""
        self._check(self.readable)
        if offset < 0:
            raise file_error(errno.EINVAL, f"offset {offset} is negative", self.path)
        try:
            return await self._body.read(memory_of(buffer, writable=True), offset, self.ahead)
        except FireflyerError as error:
            raise as_file_error(error, self.path) from error

    async def begin_read(self, buffer: Any, offset: int) -> BegunRead:
        """As `pread_into`, and returns when it is asked for: for reads of which several are under way. What its `end`
        raises is a `FireflyerError` of the chunk store."""
        self._check(self.readable)
        if offset < 0:
            raise file_error(errno.EINVAL, f"offset {offset} is negative", self.path)
        return await self._body.begin_read(memory_of(buffer, writable=True), offset)

    # --- writing ---

    async def pwrite(self, data: Any, offset: int, *, lent: bool = False) -> int:
        """All of it; it may wait in this client until `flush`. `lent`: nobody changes `data` any more, so that this
        client need not copy it."""
        self._check(self.writable)
        if offset < 0:
            raise file_error(errno.EINVAL, f"offset {offset} is negative", self.path)
        self._raise_error()
        memory = memory_of(data, writable=False)
        try:
            await self._body.write(memory, offset, lent=lent)
        except FileError as error:
            raise as_file_error(error, self.path) from None
        return len(memory)

    async def append(self, data: Any) -> int:
        """Where it was put: at the end of the file, whoever else appends."""
        self._check(self.writable)
        self._raise_error()
        memory, body = memory_of(data, writable=False), self._body
        if not len(memory):
            return body.length
        if body.written_end > file_of(body.inode).length:
            await self._settled()
        answer = await self._call(Reserve(body.id, self.handle, len(memory), time.time_ns()))
        if not isinstance(answer, Reserved):
            raise InvariantViolation(f"Reserve was answered with {type(answer).__name__}")
        body.learn(answer.inode, writing=True)
        await self.pwrite(memory, answer.offset)
        return answer.offset

    async def flush(self, begin: int = 0, end: int = END_OF_FILE) -> None:
        """All that was written, of these bytes, is at the storage nodes. Others may not know of the length yet."""
        self._check(open_=True)
        await self._body.flush(begin, end)
        if self.lost:
            raise self._lost()
        self._raise_error()

    async def fsync(self) -> None:
        """And everybody who opens the file sees it, whichever open of this client has written it."""
        self._check(open_=True)
        body = self._body
        await body.flush()
        if self.lost:
            raise self._lost()
        try:
            await (body.report(self.handle, actor=self.actor) if self.handle else body.settle())
        except FireflyerError as error:
            raise as_file_error(error, self.path) from error
        self._raise_error(also_reading=True)

    async def truncate(self, length: int) -> None:
        self._check(self.writable)
        await self._settled()
        await self._found(Truncate(PathRef(self._body.id), length, self.handle))
        self._body.forget(0, END_OF_FILE)

    async def allocate(self, mode: AllocateMode, offset: int, size: int) -> None:
        self._check(self.writable)
        await self._settled()
        await self._found(Allocate(self._body.id, self.handle, mode, offset, size))
        self._body.forget(0, END_OF_FILE)

    # --- more ---

    async def stat(self) -> Attributes:
        self._check(open_=True)
        answer = await self._call(Stat(PathRef(self._body.id)))
        if isinstance(answer, Found):
            self._body.learn(answer.inode, writing=False)
        return self.attributes

    async def lock(
        self, kind: LockKind, start: int = 0, end: int = END_OF_FILE, *, window: Window = Window.RANGE,
        owner: int | None = None, wait_ns: int = 0,
    ) -> None:  # fmt: skip
        """Of bytes [start, end), or with `Window.WHOLE` of the file. `owner`: by default this one. `LockKind.NONE`
        unlocks. EAGAIN when another's lock is in the way after `wait_ns`."""
        self._check(open_=True)
        until_ns = time.monotonic_ns() + wait_ns
        mine = self.owner if owner is None else owner
        while True:
            left_ns = min(10 * SECOND, max(0, until_ns - time.monotonic_ns()))
            try:
                await self._call(Lock(self._body.id, window, mine, kind, start, end, left_ns))
                return
            except BlockingIOError:
                if time.monotonic_ns() >= until_ns:
                    raise

    @property
    def owner(self) -> int:
        """Of its locks."""
        return id(self) & ((1 << 62) - 1)

    async def close(self) -> None:
        """Flushes, tells the length, and ends it. An error of earlier writes comes here at the latest; it is closed all
        the same."""
        if self.closed:
            return
        self.closed = True
        body, answered = self._body, self.handle == 0
        try:
            if self.handle:
                await body.flush()
                if self.lost:
                    raise self._lost()
                try:
                    await body.report(self.handle, closing=True, actor=self.actor)
                    answered = True
                except FireflyerError as error:
                    answered = isinstance(error, FileError)
                    raise as_file_error(error, self.path) from error
                self._raise_error()
        finally:
            if not answered and not self.lost:
                self._table.orphaned.add(UnansweredClose(body, self.handle, self.actor))
            self._leave()

    def close_lazily(self) -> bool:
        """As `close`, for who waits for nothing and has nothing to tell: it is ended some time later. False, and
        nothing is done, where there is nothing to end, or something to be told: `close` it."""
        body = self._body
        if self.closed or self.lost or not self.handle or not body.all_told:
            return False
        self.closed = True
        self._leave()
        self._table.end_lazily(body.inode, self.handle, self.actor)
        return True

    def _leave(self) -> None:
        body = self._body
        del body.files[self]
        body.forget_ahead(self)
        self._table.closed(body)
        self.ended.finish(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _settled(self) -> None:
        """For what has to come after all that was written."""
        try:
            await self._body.settle()
        except FireflyerError as error:
            raise as_file_error(error, self.path) from error
        self._raise_error()

    async def _call(self, request: Any) -> Any:
        try:
            return await self._body.port.call(request, self.actor)
        except FileError as error:
            raise as_file_error(error, self.path) from None

    async def _found(self, request: Any) -> None:
        answer = await self._call(request)
        if isinstance(answer, Found):
            self._body.learn(answer.inode, writing=True)

    def _check(self, may: bool = True, *, open_: bool = False) -> None:
        self._table.check()
        if self.closed or not (may or open_):
            raise file_error(errno.EBADF, "the file is closed, or not open for this (reading or writing)", self.path)
        if self.lost and not open_:
            raise self._lost()

    def _lost(self) -> FileError:
        return file_error(errno.ESTALE, LOST, self.path)

    def _raise_error(self, *, also_reading: bool = False) -> None:
        body = self._body
        if (self.handle or also_reading) and body.error is not None and self._seen < body.errors:
            self._seen = body.errors
            raise as_file_error(body.error, self.path) from body.error.__cause__
