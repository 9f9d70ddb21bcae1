"""Files that are open: what all opens of one inode by this client share (`Body`), and one open (`File`).

Reading: the length is known; chunks that are not there, or end early, are zeros up to it. What is asked for comes
straight into the caller's memory, but for blocks that were fetched ahead; what this client has written and the storage
nodes do not have yet lies over it.

Writing: bytes are copied and sent when a unit is full, when the client keeps too much, at flush, fsync and close, and
after some seconds. An error of that comes once, at the next write, flush, fsync or close of each open that could write.

    written ──> pending ──sent──> durable ──Report──> the length that everybody knows

Coroutines of this module await tickets only, so between two of them nothing else of this client runs.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from fireflyer.base.errors import (
    DataCorruption,
    FireflyerError,
    InvariantViolation,
    NoSpace,
    PermissionDenied,
    Timeout,
    UsageError,
)
from fireflyer.base.units import SECOND
from fireflyer.fs.client.attributes import Attributes
from fireflyer.fs.client.memory import memory_of
from fireflyer.fs.client.port import MISSING, Port
from fireflyer.fs.client.rights import Right
from fireflyer.fs.client.tickets import Ticket
from fireflyer.fs.core.files.ahead import Ahead, Block, block_of
from fireflyer.fs.core.files.pending import Extent, Pending, unit_of
from fireflyer.fs.core.files.pieces import Where
from fireflyer.fs.schema.errors import FileError, file_error
from fireflyer.fs.schema.ids import ChunkId
from fireflyer.fs.schema.inodes import FileBody, Inode
from fireflyer.fs.schema.meta import (
    END_OF_FILE,
    Actor,
    Allocate,
    AllocateMode,
    Close,
    Found,
    Lock,
    LockKind,
    Place,
    Report,
    Reserve,
    Reserved,
    Stat,
    Truncate,
    Window,
)

if TYPE_CHECKING:
    from fireflyer.fs.client.opening import Opening

__all__ = ["UNKNOWN_CUT", "Body", "File", "as_file_error"]

UNKNOWN_CUT: Final = (1 << 63) - 1
"""In a report: nobody knows what was written, ask the chains."""
_FRESH_NS: Final = SECOND
"""A length is believed for so long by who reads beyond it."""
_SLICE_BYTES: Final = 4 << 20
"""Of one large write, copied at once."""
_NUMBERS: Final[tuple[tuple[type[FireflyerError], int], ...]] = (
    (NoSpace, errno.ENOSPC), (PermissionDenied, errno.EACCES), (DataCorruption, errno.EIO), (UsageError, errno.EINVAL),
)  # fmt: skip


def as_file_error(error: BaseException, path: str | None) -> FileError:
    """What a program that works with files expects."""
    if isinstance(error, FileError):
        return file_error(error.errno or errno.EIO, error.message, error.filename or path)
    number = next((number for kind, number in _NUMBERS if isinstance(error, kind)), errno.EIO)
    return file_error(number, str(error), path)


class Body:
    """An inode that is open here."""

    def __init__(self, opening: Opening, inode: Inode, where: Where) -> None:
        self.opening = opening
        self.port: Port = opening.port
        self.id = inode.id
        self.inode = inode
        self.where = where
        self.cut = _file(inode).cut
        """As the last answer to a request of this client that writes has said it."""
        unit = unit_of(where.chunk_bytes)
        self.pending = Pending(unit, buffers=opening.buffers.setdefault(unit, []))
        self.flying: dict[Extent, Ticket[None]] = {}
        self.durable_end = 0
        """Of what was written since the last report began and is at the storage nodes."""
        self.reporting_end = 0
        self._reporting: Ticket[None] | None = None
        self.oldest_cut: int | None = None
        """Known when the oldest write began that is not reported; None: there is none."""
        self.unknown = False
        """The outcome of a write is not known, and not reported."""
        self.files: dict[File, None] = {}
        self.rights: dict[Right, None] = {}
        """That were presented, and are renewed."""
        self.asked_ns = time.monotonic_ns()
        self.error: FileError | None = None
        self.errors = 0
        self.doubtful = False
        """The session was exchanged: the inode may be gone."""

    @property
    def length(self) -> int:
        return max(_file(self.inode).length, self.written_end)

    @property
    def written_end(self) -> int:
        """Of what the service has not heard of."""
        return max(self.durable_end, self.reporting_end, self.pending.end() if self.pending else 0)

    @property
    def writer(self) -> File | None:
        return next((one for one in self.files if one.handle and not one.lost), None)

    def learn(self, inode: Inode, *, writing: bool) -> None:
        """An answer; perhaps to what was asked before others. Under one cut a length only grows."""
        new, old = _file(inode), _file(self.inode)
        if new.cut < old.cut:
            return
        if new.cut > old.cut:
            self.forget(0, END_OF_FILE)
        elif new.length < old.length:
            inode = msgspec.structs.replace(inode, body=msgspec.structs.replace(new, length=old.length))
        self.inode, self.asked_ns = inode, time.monotonic_ns()
        if writing:
            self.cut = _file(inode).cut

    def forget(self, begin: int, end: int) -> None:
        """What was fetched ahead of these bytes."""
        for file in self.files:
            if file.ahead.blocks:
                self.opening.give_back(file.ahead.forget(begin, end))

    # --- writing ---

    async def write(self, data: memoryview, offset: int) -> None:
        end = offset + len(data)
        if end > self.where.max_bytes:
            raise file_error(errno.EFBIG)
        for at in range(0, len(data), _SLICE_BYTES):
            part = data[at : at + _SLICE_BYTES]
            await self.opening.room(len(part), self)
            if self.oldest_cut is None:
                self.oldest_cut = self.cut
            self.forget(offset + at, offset + at + len(part))
            before = self.pending.kept_bytes
            self.pending.write(offset + at, part, self.cut)
            self.opening.dirty_bytes += self.pending.kept_bytes - before
            self.begin(everything=False)

    def begin(self, *, everything: bool) -> None:
        """Sends what is ready, or all."""
        extents = self.pending.ready(everything=everything)
        for extent in extents:
            piece = next(self.where.parts(extent.begin, extent.size))
            view = memoryview(extent.data)[: extent.size]
            ticket = self.port.write(piece.chain, ChunkId(self.id, piece.chunk), view, piece.offset)
            self.flying[extent] = ticket
            ticket.then(partial(self._ended, extent, ticket, view))
        if extents:
            self.port.send()

    def _ended(self, extent: Extent, ticket: Ticket[None], view: memoryview) -> None:
        self.pending.ended(extent)
        self.flying.pop(extent, None)
        self.opening.dirty_bytes -= extent.size
        self.opening.use_again(self.pending, extent, view)
        if ticket.error is None:
            self.durable_end = max(self.durable_end, extent.end)
        else:
            self.unknown = self.unknown or isinstance(ticket.error, Timeout)
            self.error = as_file_error(ticket.error, None)
            self.errors += 1

    async def flush(self) -> None:
        """All that was written until now is at the storage nodes, or in `error`."""
        self.begin(everything=True)
        for ticket in list(self.flying.values()):
            try:
                await ticket
            except FireflyerError:
                pass  # `_ended` has kept it

    async def report(self, handle: int) -> None:
        """Everybody knows the length of what is durable."""
        await self._report(handle, closing=False)

    async def _report(self, handle: int, *, closing: bool) -> None:
        while self._reporting is not None:
            await self._reporting
        wrote, cut = self.oldest_cut is not None, self.oldest_cut if self.oldest_cut is not None else self.cut
        unknown, end = self.unknown, self.durable_end
        if not wrote and not closing:
            return
        self.reporting_end, self.durable_end, self.unknown = end, 0, False
        self.oldest_cut = min((one.cut for one in self.pending.extents), default=None)
        self._reporting = Ticket(self.port.wait)
        # A mount speaks for who wrote: set-id bits fall unless that was root.
        actor = next((one.actor for one in self.files if one.handle == handle), None)
        request = (Close if closing else Report)(self.id, handle, end, UNKNOWN_CUT if unknown else cut, wrote)
        try:
            answer = await self.port.call(request, actor)
        except BaseException:
            self.durable_end, self.unknown = max(self.durable_end, end), self.unknown or unknown
            self.oldest_cut = cut if wrote else self.oldest_cut
            raise
        finally:
            self.reporting_end = 0
            reporting, self._reporting = self._reporting, None
            reporting.finish(None)
        if isinstance(answer, Found):
            self.learn(answer.inode, writing=True)

    async def settle(self) -> None:
        """Nothing that was written waits or is unreported: for what has to come after it."""
        await self.flush()
        if self.oldest_cut is not None and (writer := self.writer) is not None:
            await self._report(writer.handle, closing=False)

    # --- reading ---

    async def refresh(self, beyond: int) -> None:
        """Who reads beyond the end asks whether it is still the end."""
        if self.doubtful:
            await self.opening.recover(self)
        if beyond > self.length and time.monotonic_ns() - self.asked_ns > _FRESH_NS:
            answer = await self.port.call(Stat(Place(self.id)), self.opening.actor_of(self))
            if isinstance(answer, Found):
                self.learn(answer.inode, writing=False)

    async def read(self, into: memoryview, offset: int, ahead: Ahead | None) -> int:
        await self.refresh(offset + len(into))
        length = self.length
        size = max(0, min(len(into), length - offset))
        if not size:
            return 0
        into = into[:size]
        lying = self.pending.cut_out(offset, size)
        if lying and self.pending.covers(offset, size):
            self.pending.over(offset, into)
            return size
        fetch, passed = ahead.due(offset, size, length) if ahead is not None else ([], [])
        try:
            await self._fill(into, offset, ahead, passed, fetch)
        finally:
            self.opening.give_back(passed)
        for at, data in lying:  # in their order; some have ended meanwhile, but after the chunk was read
            into[at : at + len(data)] = data
        if self.pending:
            self.pending.over(offset, into)
        return size

    async def _fill(
        self, into: memoryview, offset: int, ahead: Ahead | None, passed: list[Block], fetch: list[Block]
    ) -> None:
        end, at = offset + len(into), offset
        direct: list[tuple[Ticket[int], memoryview]] = []
        blocks: list[tuple[Block, int, int]] = []
        try:
            while at < end:
                block = ahead.find(at, passed) if ahead is not None else None
                if block is not None and block.ticket is not None:
                    until = min(end, block.end)
                    blocks.append((block, at, until))
                    block.users += 1
                else:
                    until = end if ahead is None else min(end, (at // ahead.block + 1) * ahead.block)
                    direct += self._ask(into[at - offset : until - offset], at)
                at = until
            if ahead is not None:
                self._fetch(ahead, fetch)
            for ticket, view in direct:
                zero_behind(view, await ticket)
            for block, begin, until in blocks:
                await self._copy(block, begin, into[begin - offset : until - offset], ahead)
        except BaseException:
            for ticket, _ in direct:
                ticket.give_up()
            raise
        finally:
            for block, _, _ in blocks:
                block.users -= 1
            self.opening.give_back([block for block, _, _ in blocks if block.dropped])

    def _ask(self, into: memoryview, offset: int) -> list[tuple[Ticket[int], memoryview]]:
        asked = []
        for piece in self.where.parts(offset, len(into)):
            view = into[piece.at : piece.at + piece.size]
            asked.append((self.port.read(piece.chain, ChunkId(self.id, piece.chunk), view, piece.offset), view))
        return asked

    def _fetch(self, ahead: Ahead, fetch: Sequence[Block]) -> None:
        for block in fetch:
            if self.pending.overlaps(block.begin, block.end - block.begin) or not self.opening.lend(block):
                ahead.forget(block.begin, block.end)
                continue
            block.ticket, view = self._ask(block.memory[: block.end - block.begin], block.begin)[0]
            block.ticket.then(lambda block=block, view=view: _zero_block(block, view))

    async def _copy(self, block: Block, begin: int, into: memoryview, ahead: Ahead | None) -> None:
        """From a block that was fetched ahead. Its memory is lent to it until it is given back."""
        memory, ticket = block.memory, block.ticket
        try:
            await ticket
        except FireflyerError:  # perhaps long ago
            if ahead is not None:
                self.opening.give_back(ahead.forget(block.begin, block.end))
            for other, view in self._ask(into, begin):
                zero_behind(view, await other)
            return
        into[:] = memory[begin - block.begin : begin - block.begin + len(into)]


class File:
    """One open file, for coroutines. Made by `Files.open`; close it, or use it with `async with`."""

    def __init__(self, body: Body, handle: int, *, readable: bool, actor: Actor | None, path: str | None) -> None:
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
        self.ahead = Ahead(block_of(body.where.chunk_bytes), body.opening.options.ahead_bytes if readable else 0)
        self._seen = body.errors
        body.files[self] = None

    @property
    def inode_id(self) -> int:
        return self._body.id

    @property
    def attributes(self) -> Attributes:
        """As last heard of the service, with what was written here since."""
        return Attributes(self._body.inode, self._body.length)

    @property
    def length(self) -> int:
        """As known here."""
        return self._body.length

    @property
    def body(self) -> Body:
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

    # --- writing ---

    async def pwrite(self, data: Any, offset: int) -> int:
        """All of it; it may wait in this client until `flush`."""
        self._check(self.writable)
        if offset < 0:
            raise file_error(errno.EINVAL, f"offset {offset} is negative", self.path)
        self._raise_error()
        memory = memory_of(data, writable=False)
        try:
            await self._body.write(memory, offset)
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
        if body.written_end > _file(body.inode).length:
            await self._settled()
        answer = await self._call(Reserve(body.id, self.handle, len(memory)))
        if not isinstance(answer, Reserved):
            raise InvariantViolation(f"Reserve was answered with {type(answer).__name__}")
        body.learn(answer.inode, writing=True)
        await self.pwrite(memory, answer.offset)
        return answer.offset

    async def flush(self) -> None:
        """All that was written is at the storage nodes. Others may not know of the length yet."""
        self._check(open_=True)
        await self._body.flush()
        if self.lost:
            raise self._lost()
        self._raise_error()

    async def fsync(self) -> None:
        """And everybody who opens the file sees it."""
        self._check(open_=True)
        await self._body.flush()
        if self.lost:
            raise self._lost()
        if self.handle:
            try:
                await self._body.report(self.handle)
            except FireflyerError as error:
                raise as_file_error(error, self.path) from error
        self._raise_error()

    async def truncate(self, length: int) -> None:
        self._check(self.writable)
        await self._settled()
        await self._found(Truncate(Place(self._body.id), length, self.handle))
        self._body.forget(0, END_OF_FILE)

    async def allocate(self, mode: AllocateMode, offset: int, size: int) -> None:
        self._check(self.writable)
        await self._settled()
        await self._found(Allocate(self._body.id, self.handle, mode, offset, size))
        self._body.forget(0, END_OF_FILE)

    # --- more ---

    async def stat(self) -> Attributes:
        self._check(open_=True)
        answer = await self._call(Stat(Place(self._body.id)))
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
        body = self._body
        try:
            if self.handle:
                await body.flush()
                if self.lost:
                    raise self._lost()
                try:
                    await body._report(self.handle, closing=True)  # noqa: SLF001
                except FireflyerError as error:
                    raise as_file_error(error, self.path) from error
                self._raise_error()
        finally:
            del body.files[self]
            body.opening.give_back(self.ahead.forget(0, END_OF_FILE))
            body.opening.closed(body)

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
        self._body.opening.check()
        if self.closed or not (may or open_):
            raise file_error(errno.EBADF, "the file is closed, or was not opened for this", self.path)
        if self.lost and not open_:
            raise self._lost()

    def _lost(self) -> FileError:
        return file_error(
            errno.ESTALE, "the session of this client has ended, and the open file with it; open it again", self.path
        )

    def _raise_error(self) -> None:
        body = self._body
        if self.handle and body.error is not None and self._seen < body.errors:
            self._seen = body.errors
            raise as_file_error(body.error, self.path)


def zero_behind(view: memoryview, count: int) -> None:
    """A chunk that is not there, or ends early, is zeros."""
    count = 0 if count == MISSING else count
    if count < len(view):
        view[count:] = bytes(len(view) - count)


def _zero_block(block: Block, view: memoryview) -> None:
    if block.ticket is not None and block.ticket.error is None and block.memory is not None:
        zero_behind(view, block.ticket.value)


def _file(inode: Inode) -> FileBody:
    if not isinstance(inode.body, FileBody):
        raise InvariantViolation(f"inode {inode.id} is no file")
    return inode.body
