"""Files that are open: what all opens of one inode by this client share.

Reading: the length is known; chunks that are not there, or end early, are zeros up to it. What is asked for comes
straight into the caller's memory, but for blocks that were fetched ahead; what this client has written and the storage
nodes do not have yet lies over it.

Writing: bytes are copied and sent when a unit is full, when the client keeps too much, at flush, fsync and close, and
after some seconds. An error of that comes once, at the next write, flush, fsync or close of each open that could write.

    written ──> pending ──sent──> durable ──Report──> the length that everybody knows

Coroutines of this module await futures only, so between two of them nothing else of this client runs.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

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
from fireflyer.fs.client.control.capabilities import Right
from fireflyer.fs.client.files.budgets import ReadAheadBudget, WriteBudget
from fireflyer.fs.client.files.port import MISSING, ChunkBytes, Port
from fireflyer.fs.client.futures import ClientFuture
from fireflyer.fs.core.capability import Rights
from fireflyer.fs.core.files.chunk_map import ChunkMap
from fireflyer.fs.core.files.readahead import Block, ReadAhead
from fireflyer.fs.core.files.write_behind import Extent, WriteBehindBuffer, unit_of
from fireflyer.fs.core.meta.inodes.times import times_of_write
from fireflyer.fs.schema.errors import FileError, file_error
from fireflyer.fs.schema.ids import ChunkId
from fireflyer.fs.schema.inodes import FileDetails, Inode
from fireflyer.fs.schema.meta import (
    END_OF_FILE,
    UNKNOWN_CUT,
    Actor,
    Answer,
    Close,
    Found,
    Opened,
    PathRef,
    Renew,
    Report,
    Request,
    SetAttributes,
    Stat,
)
from fireflyer.fs.schema.sessions import CapabilityAnswer
from fireflyer.native import crc32c_joined

__all__ = ["LOST", "BegunRead", "OpenFile", "OpenInode", "as_file_error", "file_of", "zero_behind"]

_FRESH_NS: Final = SECOND
"""A length is believed for so long by who reads beyond it."""
LOST: Final = "the session of this client has ended, so the file is no longer open; open it again"
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


class OpenFile(Protocol):
    """What a body needs to know of each open of its inode: `client.files.open_file.File`."""

    handle: int
    """0: it cannot be written."""
    readable: bool
    actor: Actor | None
    lost: bool
    """The session in which it was opened for writing is over."""
    closed: bool
    ended: ClientFuture[None]
    """When it is closed, and forgotten."""
    ahead: ReadAhead

    async def close(self) -> None: ...


class BegunRead:
    """A read that is on its way. Its memory must stay until `end` has returned or raised, or `give_up`."""

    def __init__(self, size: int, asked: Sequence[tuple[ClientFuture[ChunkBytes], memoryview]]) -> None:
        self.size = size
        """Bytes that the file has there, fewer than were asked for at its end."""
        self.crc32c: int | None = None
        """Of these bytes, as they were verified, from `end` on. None: not all of them are in chunks."""
        self._asked = asked

    async def end(self) -> int:
        """`size`, when all of it is there. Raises `FireflyerError`; then nothing of it is on its way any more."""
        crc: int | None = 0
        try:
            for future, view in self._asked:
                arrived = await future
                zero_behind(view, arrived.length)
                whole = arrived.length == len(view)
                crc = crc32c_joined(crc, arrived.crc32c, len(view)) if whole and crc is not None else None
            self.crc32c = crc
        except BaseException:
            self.give_up()
            raise
        return self.size

    def give_up(self) -> None:
        for future, _ in self._asked:
            future.give_up()


class OpenInode:
    """An inode that is open here. All inodes that a client has open share both budgets."""

    def __init__(
        self, port: Port, inode: Inode, where: ChunkMap, write_budget: WriteBudget, read_ahead_budget: ReadAheadBudget
    ) -> None:
        self.port = port
        self._write_budget = write_budget
        self._read_ahead_budget = read_ahead_budget
        self.id = inode.id
        self.inode = inode
        self.where = where
        self.cut = file_of(inode).cut
        """As the last answer to a request of this client that writes has said it."""
        unit = unit_of(where.chunk_bytes)
        self.pending = WriteBehindBuffer(unit, buffers=write_budget.buffers(unit))
        self.in_flight: dict[Extent, ClientFuture[None]] = {}
        self.durable_end = 0
        """Of what was written since the last report began and is at the storage nodes."""
        self.reporting_end = 0
        self._reporting: ClientFuture[None] | None = None
        self._expected: tuple[int, int] | None = None
        """mtime and ctime that a report of writes, which is under way, makes if nobody else has changed the file."""
        self._latest = self.inode
        """Of what the service has answered."""
        self.oldest_cut: int | None = None
        """Known when the oldest write began that is not reported; None: there is none."""
        self.unknown = False
        """The outcome of a write is not known, and not reported."""
        self.files: dict[OpenFile, None] = {}
        self.rights: dict[Right, None] = {}
        """That were presented, and are renewed."""
        self.asked_ns = time.monotonic_ns()
        self.error: FileError | None = None
        self.errors = 0
        self.needs_revalidation = False
        """The session was exchanged: the inode may be gone."""
        self.losses = 0
        """Sessions whose end has taken what waited here."""
        self.written_ns = 0
        """Unix time of the last write."""

    @property
    def length(self) -> int:
        return max(file_of(self.inode).length, self.written_end)

    @property
    def written_end(self) -> int:
        """Of what the service has not heard of."""
        return max(self.durable_end, self.reporting_end, self.pending.end() if self.pending else 0)

    @property
    def writer(self) -> OpenFile | None:
        return next((one for one in self.files if one.handle and not one.lost and not one.closed), None)

    @property
    def unreported(self) -> bool:
        """Something was written that the service has not heard of."""
        return self.oldest_cut is not None or self._reporting is not None

    @property
    def all_told(self) -> bool:
        """All that was written is known to the service."""
        return not (self.unreported or self.unknown or self.pending or self.in_flight)

    def told(self, inode: Inode) -> Inode:
        """An answer of the service, perhaps to what was asked before others, with what is known here: the length and
        times that everybody will see when all that was written is reported."""
        if inode.ctime_ns > self._latest.ctime_ns and self._reporting is None:
            self._latest = inode
        new, old = file_of(inode), file_of(self.inode)
        if new.cut < old.cut:
            inode, new = self.inode, old
        length = max(new.length, self.length if new.cut == old.cut else self.written_end)
        if length != new.length:
            inode = msgspec.structs.replace(inode, body=msgspec.structs.replace(new, length=length))
        if self._is_older_than_written(inode):
            mtime_ns, ctime_ns = times_of_write(inode, self.written_ns)
            inode = msgspec.structs.replace(inode, mtime_ns=mtime_ns, ctime_ns=ctime_ns)
        return inode

    def _is_older_than_written(self, inode: Inode) -> bool:
        """Its times will change when the service hears of what was written; it may have, with its answer on the way."""
        if self.oldest_cut is not None:
            return True
        heard = inode.mtime_ns == self.written_ns or (inode.mtime_ns, inode.ctime_ns) == self._expected
        return self._expected is not None and not heard

    def learn(self, inode: Inode, *, writing: bool) -> None:
        """An answer; perhaps to what was asked before others. Under one cut a length only grows. Other times may be of
        other bytes, also where this client has written in between."""
        new, old = file_of(inode), file_of(self.inode)
        if new.cut < old.cut:
            return
        if new.cut > old.cut or (inode.mtime_ns, inode.ctime_ns) != (self.inode.mtime_ns, self.inode.ctime_ns):
            self.forget(0, END_OF_FILE)
        if new.cut == old.cut and new.length < old.length:
            inode = msgspec.structs.replace(inode, body=msgspec.structs.replace(new, length=old.length))
        self.inode, self._latest, self.asked_ns = inode, inode, time.monotonic_ns()
        if writing:
            self.cut = file_of(inode).cut

    def forget(self, begin: int, end: int) -> None:
        """What was fetched ahead of these bytes."""
        for file in self.files:
            if file.ahead.blocks:
                self._read_ahead_budget.give_back(file.ahead.forget(begin, end))

    def forget_ahead(self, file: OpenFile) -> None:
        """All that was fetched ahead for this open."""
        self._read_ahead_budget.give_back(file.ahead.forget(0, END_OF_FILE))

    # --- writing ---

    async def write(self, data: memoryview, offset: int, *, lent: bool = False) -> None:
        """`lent`: nobody changes it any more."""
        end = offset + len(data)
        if end > self.where.max_bytes:
            raise file_error(errno.EFBIG)
        losses = self.losses
        for at in range(0, len(data), _SLICE_BYTES):
            part = data[at : at + _SLICE_BYTES]
            await self._write_budget.room(len(part), self)
            if self.losses != losses:
                raise file_error(errno.ESTALE, LOST)
            now_ns = time.time_ns()
            self.written_ns = now_ns if now_ns != self.written_ns else now_ns + 1
            if self.oldest_cut is None:
                self.oldest_cut = self.cut
            self.forget(offset + at, offset + at + len(part))
            before = self.pending.kept_bytes
            self.pending.write(offset + at, part, self.cut, lent=lent)
            self._write_budget.dirty_bytes += self.pending.kept_bytes - before
            self.begin(everything=False)

    def begin(self, *, everything: bool) -> None:
        """Sends what is ready, or all."""
        extents = self.pending.ready(everything=everything)
        for extent in extents:
            piece = next(self.where.parts(extent.begin, extent.size))
            view = memoryview(extent.data)[: extent.size]
            future = self.port.write(piece.chain, ChunkId(self.id, piece.chunk), view, piece.offset)
            self.in_flight[extent] = future
            future.then(partial(self._ended, extent, future, view))
        if extents:
            self.port.send()

    def _ended(self, extent: Extent, future: ClientFuture[None], view: memoryview) -> None:
        self.pending.ended(extent)
        self.in_flight.pop(extent, None)
        self._write_budget.dirty_bytes -= extent.size
        self._write_budget.use_again(self.pending, extent, view)
        if future.error is None:
            self.durable_end = max(self.durable_end, extent.end)
        else:
            self.unknown = self.unknown or isinstance(future.error, Timeout)
            self.fail(future.error)

    def fail(self, error: BaseException) -> None:
        """Something that was written is lost: each open that could write is told once."""
        self.error = as_file_error(error, None)
        self.error.__cause__ = error
        self.errors += 1

    def lose(self) -> None:
        """The session is over. What is not written yet must not be: somebody else may have written since. What was sent
        is given up: of an ended session nothing is done any more."""
        self.needs_revalidation = True
        writers = [one for one in self.files if one.handle]
        for file in writers:
            file.lost = True
        self.forget(0, END_OF_FILE)
        self.losses += 1
        self._write_budget.dirty_bytes -= self.pending.drop()
        for future in list(self.in_flight.values()):
            future.give_up()
        self.durable_end, self.oldest_cut, self.unknown = 0, None, False
        if self.error is not None:
            self.error = file_error(errno.ESTALE, LOST)

    async def flush(self, begin: int = 0, end: int = END_OF_FILE) -> None:
        """All that was written until now of these bytes is at the storage nodes, or in `error`."""
        self.begin(everything=True)
        for future in [future for one, future in self.in_flight.items() if one.begin < end and begin < one.end]:
            try:
                await future
            except FireflyerError:
                pass  # `_ended` has kept it

    async def report(self, handle: int, *, closing: bool = False, actor: Actor | None = None) -> None:
        """Everybody knows the length of what is durable. `actor`: a mount speaks for who wrote, since set-id bits fall
        unless that was root."""
        while self._reporting is not None:
            await self._reporting
        if self.oldest_cut is not None or closing:
            await self._tell(handle, Close if closing else Report, actor)

    async def set_attributes(self, change: SetAttributes, actor: Actor | None) -> Inode:
        """All that was written comes before it, and together with it where the same user has."""
        await self._flush_all()
        while self._reporting is not None:
            await self._reporting
        writer = self.writer
        if writer is not None and self.oldest_cut is not None and writer.actor == actor:
            answer = await self._tell(
                writer.handle, lambda *told: msgspec.structs.replace(change, report=Report(*told)), actor
            )
        else:
            await self.settle()
            answer = await self.port.call(change, actor)
        if not isinstance(answer, Found):
            raise InvariantViolation(f"SetAttributes was answered with {type(answer).__name__}")
        self.learn(answer.inode, writing=False)
        return answer.inode

    async def _tell(self, handle: int, request: Callable[..., Request], actor: Actor | None) -> Answer:
        """`request`: made of what there is to be told, in the order of `Report`."""
        oldest, wrote = self.oldest_cut, self.oldest_cut is not None
        cut = self.cut if oldest is None else oldest
        unknown, end, losses = self.unknown, self.durable_end, self.losses
        self.reporting_end, self.durable_end, self.unknown = end, 0, False
        self.oldest_cut = min((one.cut for one in self.pending.extents), default=None)
        self._reporting = ClientFuture(self.port.wait)
        self._expected = times_of_write(self._latest, self.written_ns) if wrote else None
        cut = UNKNOWN_CUT if unknown else cut
        try:
            answer: Answer = await self.port.call(
                request(self.id, handle, end, cut, wrote, self.written_ns if wrote else 0), actor
            )
        except BaseException:
            if self.losses == losses:
                self.durable_end, self.unknown = max(self.durable_end, end), self.unknown or unknown
                self.oldest_cut = oldest if wrote else self.oldest_cut
            raise
        finally:
            self.reporting_end, self._expected = 0, None
            reporting, self._reporting = self._reporting, None
            reporting.finish(None)
        if isinstance(answer, Found):
            self.learn(answer.inode, writing=True)
        return answer

    async def _flush_all(self) -> None:
        """And whoever is closing it has told what they had to."""
        await self.flush()
        while (closing := next((one for one in self.files if one.closed), None)) is not None:
            await closing.ended

    async def settle(self) -> None:
        """Nothing that was written waits or is unreported: for what has to come after it."""
        await self._flush_all()
        if (writer := self.writer) is not None:
            await self.report(writer.handle, actor=writer.actor)

    # --- rights ---

    async def present(self, file: OpenFile, opened: Opened) -> None:
        """To the storage nodes, and again before it expires: the capability with which `file` was opened."""
        rights = (Rights.READ if file.readable else 0) | (Rights.WRITE if file.handle else 0)
        right = Right(self.id, self.id, int(rights))
        if right in self.rights:
            return
        self.rights[right] = None
        try:
            await self.port.present(right, opened.capability)
        except BaseException:
            self.rights.pop(right, None)
            raise
        handle, actor, meta = file.handle, file.actor, self.port.meta

        async def again(wanted: Right) -> CapabilityAnswer:
            answer = await meta.call(Renew(wanted.first_file, wanted.rights, handle), actor=actor)
            if not isinstance(answer, Opened):
                raise InvariantViolation(f"Renew was answered with {type(answer).__name__}")
            return CapabilityAnswer(answer.capability, answer.expires_unix_s)

        self.port.renew(right, opened.expires_unix_s, again)

    def drop_rights(self) -> None:
        for right in self.rights:
            self.port.drop(right)
        self.rights.clear()

    async def _recover(self) -> None:
        """There is another session: is the inode still there, and may it be read?"""
        reader = next((one for one in self.files if not one.lost), None)
        if reader is None:
            return
        had_rights = bool(self.rights)
        self.rights.clear()
        # In this order: what is found after it is held was not collected before, nor will be.
        await self.port.future_of(self.port.meta.heartbeat())
        answer = await self.port.call(Stat(PathRef(self.id)), reader.actor)
        if isinstance(answer, Found):
            if answer.inode.links == 0 and file_of(answer.inode).cutting is not None:
                raise file_error(errno.ESTALE, "the file was removed while this client had no session")
            self.learn(answer.inode, writing=False)
        if had_rights:
            opened = await self.port.call(Renew(self.id, int(Rights.READ), 0), reader.actor)
            if isinstance(opened, Opened) and opened.capability:
                await self.present(reader, opened)
        self.needs_revalidation = False

    # --- reading ---

    async def refresh(self, beyond: int) -> None:
        """Who reads beyond the end asks whether it is still the end."""
        if self.needs_revalidation:
            await self._recover()
        if beyond > self.length and time.monotonic_ns() - self.asked_ns > _FRESH_NS:
            answer = await self.port.call(Stat(PathRef(self.id)), next((one.actor for one in self.files), None))
            if isinstance(answer, Found):
                self.learn(answer.inode, writing=False)

    async def read(self, into: memoryview, offset: int, ahead: ReadAhead | None) -> int:
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
            self._read_ahead_budget.give_back(passed)
        for at, data in lying:  # in their order; some have ended meanwhile, but after the chunk was read
            into[at : at + len(data)] = data
        if self.pending:
            self.pending.over(offset, into)
        return size

    async def begin_read(self, into: memoryview, offset: int) -> BegunRead:
        """As `read`, nothing of it fetched ahead: what is asked for is on its way when this returns."""
        await self.refresh(offset + len(into))
        size = max(0, min(len(into), self.length - offset))
        if self.pending.overlaps(offset, size):
            await self.flush(offset, offset + size)
        return BegunRead(size, self._ask(into[:size], offset))

    async def _fill(
        self, into: memoryview, offset: int, ahead: ReadAhead | None, passed: list[Block], fetch: list[Block]
    ) -> None:
        end, at = offset + len(into), offset
        direct: list[tuple[ClientFuture[ChunkBytes], memoryview]] = []
        blocks: list[tuple[Block, int, int]] = []
        try:
            while at < end:
                block = ahead.find(at, passed) if ahead is not None else None
                if block is not None and block.future is not None:
                    until = min(end, block.end)
                    blocks.append((block, at, until))
                    block.users += 1
                else:
                    until = end if ahead is None else min(end, (at // ahead.block + 1) * ahead.block)
                    direct += self._ask(into[at - offset : until - offset], at)
                at = until
            if ahead is not None:
                self._fetch(ahead, fetch)
            for future, view in direct:
                zero_behind(view, (await future).length)
            for block, begin, until in blocks:
                await self._copy(block, begin, into[begin - offset : until - offset], ahead)
        except BaseException:
            for future, _ in direct:
                future.give_up()
            raise
        finally:
            for block, _, _ in blocks:
                block.users -= 1
            self._read_ahead_budget.give_back([block for block, _, _ in blocks if block.dropped])

    def _ask(self, into: memoryview, offset: int) -> list[tuple[ClientFuture[ChunkBytes], memoryview]]:
        asked = []
        for piece in self.where.parts(offset, len(into)):
            view = into[piece.at : piece.at + piece.size]
            asked.append((self.port.read(piece.chain, ChunkId(self.id, piece.chunk), view, piece.offset), view))
        return asked

    def _fetch(self, ahead: ReadAhead, fetch: Sequence[Block]) -> None:
        for block in fetch:
            if self.pending.overlaps(block.begin, block.end - block.begin) or not self._read_ahead_budget.lend(block):
                ahead.forget(block.begin, block.end)
                continue
            block.future, view = self._ask(block.memory[: block.end - block.begin], block.begin)[0]
            block.future.then(lambda block=block, view=view: _zero_block(block, view))

    async def _copy(self, block: Block, begin: int, into: memoryview, ahead: ReadAhead | None) -> None:
        """From a block that was fetched ahead. Its memory is lent to it until it is given back."""
        memory, future = block.memory, block.future
        try:
            await future
        except FireflyerError:  # perhaps long ago
            if ahead is not None:
                self._read_ahead_budget.give_back(ahead.forget(block.begin, block.end))
            for other, view in self._ask(into, begin):
                zero_behind(view, (await other).length)
            return
        into[:] = memory[begin - block.begin : begin - block.begin + len(into)]


def zero_behind(view: memoryview, count: int) -> None:
    """A chunk that is not there, or ends early, is zeros."""
    count = 0 if count == MISSING else count
    if count < len(view):
        view[count:] = bytes(len(view) - count)


def _zero_block(block: Block, view: memoryview) -> None:
    if block.future is not None and block.future.error is None and block.memory is not None:
        zero_behind(view, block.future.value.length)


def file_of(inode: Inode) -> FileDetails:
    if not isinstance(inode.body, FileDetails):
        raise InvariantViolation(f"inode {inode.id} is not a regular file")
    return inode.body
