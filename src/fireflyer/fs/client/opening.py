"""Opening files, and what all open files of a client share: memory, rights, what is known of each inode."""

from __future__ import annotations

import collections
import errno
import time
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from fireflyer.base.errors import FireflyerError, InvariantViolation
from fireflyer.base.units import MIB, SECOND
from fireflyer.fs.client.chunks import Options
from fireflyer.fs.client.opened import Body, File
from fireflyer.fs.client.port import Port
from fireflyer.fs.client.processes import OfOneProcess
from fireflyer.fs.client.rights import Right
from fireflyer.fs.core.capability import Rights
from fireflyer.fs.core.files.ahead import MAX_BLOCK_BYTES, Block
from fireflyer.fs.core.files.pending import Extent, Pending
from fireflyer.fs.core.files.pieces import Where
from fireflyer.fs.schema.errors import file_error
from fireflyer.fs.schema.inodes import FileBody, Inode, InodeId
from fireflyer.fs.schema.meta import Actor, Found, Open, Opened, OpenFlag, Place, Renew, Stat
from fireflyer.fs.schema.sessions import CapabilityAnswer

__all__ = ["FileOptions", "Opening"]

MAX_EXTENTS: Final = 1024
"""Of one file that are not at the storage nodes."""
_LATE_NS: Final = 5 * SECOND
"""An answer to an open for reading that took longer may be of a file that was collected meanwhile."""


class FileOptions(msgspec.Struct, frozen=True, kw_only=True):
    write_bytes: int = 32 * MIB
    """Written and not at the storage nodes yet, of all files; who writes more waits."""
    ahead_bytes: int = 8 * MIB
    """Fetched ahead for one file that is read from front to back; 0: nothing."""
    all_ahead_bytes: int = 64 * MIB
    """... for all files together."""
    umask: int | None = None
    """Taken off the permissions of what is made by path; None: this process's, as it was at `connect`."""
    chunks: Options = Options()


class Opening(OfOneProcess):
    def __init__(self, port: Port, options: FileOptions) -> None:
        OfOneProcess.__init__(self)
        self.port = port
        self.options = options
        self.bodies: dict[InodeId, Body] = {}
        self.dirty_bytes = 0
        """Written here, and not at the storage nodes."""
        self.buffers: dict[int, list[bytearray]] = {}
        """For what is written, by size."""
        self._free: collections.deque[memoryview] = collections.deque()
        self._lent = 0
        self._closed = False
        port.meta.on_lost.append(self._session_lost)

    @property
    def is_closed(self) -> bool:
        return self._closed

    def check(self) -> None:
        """Raises `UsageError` in a forked child, EBADF when the client is closed."""
        self.check_process()
        if self._closed:
            raise file_error(errno.EBADF, "the file system client is closed")

    # --- opening ---

    async def open(self, place: Place, flags: int, mode: int, actor: Actor | None, path: str | None) -> File:
        """Raises `FileError`. EISDIR for a directory."""
        self.check()
        while True:
            handle = self.port.meta.handle() if flags & OpenFlag.WRITE else 0
            asked_ns = time.monotonic_ns()
            answer = await self.port.call(Open(place, flags, handle, mode), actor)
            if handle or time.monotonic_ns() - asked_ns < _LATE_NS:
                break
        if not isinstance(answer, Opened):
            raise InvariantViolation(f"Open was answered with {type(answer).__name__}")
        if not isinstance(answer.inode.body, FileBody):
            raise file_error(errno.EISDIR, "", path)
        return await self.adopt(answer, flags, handle, actor, path)

    async def adopt(self, opened: Opened, flags: int, handle: int, actor: Actor | None, path: str | None) -> File:
        """A file that the service has opened for this client already, for whoever asked for it himself."""
        inode = opened.inode
        body = self.bodies.get(inode.id)
        if body is None:
            body = self.bodies[inode.id] = Body(self, inode, self._where(inode))
        else:
            body.learn(inode, writing=handle != 0)
        readable = bool(flags & (OpenFlag.READ | OpenFlag.EXECUTE))
        file = File(body, handle, readable=readable, actor=actor, path=path)
        self.port.meta.hold(inode.id)
        if opened.capability:
            try:
                await self._show(body, file, opened)
            except BaseException:
                await file.close()
                raise
        return file

    def _where(self, inode: Inode) -> Where:
        if not isinstance(inode.body, FileBody):
            raise InvariantViolation(f"inode {inode.id} is no file")
        layout = inode.body.layout
        return Where(layout, self.port.chains(layout.table))

    def closed(self, body: Body) -> None:
        """One of its files."""
        self.port.meta.release(body.id)
        if not body.files and self.bodies.get(body.id) is body:
            del self.bodies[body.id]
            for right in body.rights:
                self.port.drop(right)
            body.rights.clear()

    # --- rights ---

    async def _show(self, body: Body, file: File, opened: Opened) -> None:
        rights = (Rights.READ if file.readable else 0) | (Rights.WRITE if file.handle else 0)
        right = Right(body.id, body.id, int(rights))
        if right in body.rights:
            return
        body.rights[right] = None
        try:
            await self.port.present(right, opened.capability)
        except BaseException:
            body.rights.pop(right, None)
            raise
        handle, actor, meta = file.handle, file.actor, self.port.meta

        async def again(wanted: Right) -> CapabilityAnswer:
            answer = await meta.call(Renew(wanted.first_file, wanted.rights, handle), actor=actor)
            if not isinstance(answer, Opened):
                raise InvariantViolation(f"Renew was answered with {type(answer).__name__}")
            return CapabilityAnswer(answer.capability, answer.expires_unix_s)

        self.port.renew(right, opened.expires_unix_s, again)

    async def recover(self, body: Body) -> None:
        """There is another session: is the inode still there, and may it be read?"""
        reader = next((one for one in body.files if not one.lost), None)
        if reader is None:
            return
        had_rights = bool(body.rights)
        body.rights.clear()
        answer = await self.port.call(Stat(Place(body.id)), reader.actor)
        if isinstance(answer, Found):
            body.learn(answer.inode, writing=False)
        if had_rights:
            opened = await self.port.call(Renew(body.id, int(Rights.READ), 0), reader.actor)
            if isinstance(opened, Opened) and opened.capability:
                await self._show(body, reader, opened)
        body.doubtful = False

    def _session_lost(self) -> None:
        for body in list(self.bodies.values()):
            body.doubtful = True
            for file in list(body.files):
                file.lost = file.handle != 0

    def actor_of(self, body: Body) -> Actor | None:
        return next((one.actor for one in body.files), None)

    # --- memory ---

    async def room(self, size: int, body: Body) -> None:
        """Waits until so much may be written."""
        while self.dirty_bytes + size > self.options.write_bytes or len(body.pending.extents) >= MAX_EXTENTS:
            body.begin(everything=True)
            flying = self._oldest([body]) or self._oldest(self.bodies.values())
            if flying is None:
                for other in list(self.bodies.values()):
                    other.begin(everything=True)
                flying = self._oldest(self.bodies.values())
                if flying is None:
                    return
            try:
                await flying
            except FireflyerError:
                pass  # the file that it belongs to says so

    def _oldest(self, bodies: Iterable[Body]) -> Any:
        return next((ticket for body in bodies for ticket in body.flying.values()), None)

    def use_again(self, pending: Pending, extent: Extent, view: memoryview) -> None:
        """The memory of what is at the storage nodes."""
        if len(extent.data) != pending.unit or len(pending.buffers) * pending.unit >= self.options.write_bytes:
            return
        try:
            view.release()
        except BufferError:
            return  # an attempt that was given up is still on its way
        pending.buffers.append(extent.data)

    def lend(self, block: Block) -> bool:
        """Memory for it; False: there is none now."""
        if (self._lent + 1) * MAX_BLOCK_BYTES > self.options.all_ahead_bytes:
            return False
        self._lent += 1
        block.memory = self._free.pop() if self._free else memoryview(bytearray(MAX_BLOCK_BYTES))
        return True

    def give_back(self, blocks: Iterable[Block]) -> None:
        """Blocks that nobody will look for any more."""
        for block in blocks:
            block.dropped = True
            if block.users or block.memory is None:
                continue
            if block.ticket is not None:
                block.ticket.give_up()
            self._free.append(block.memory)
            block.memory = None
            self._lent -= 1

    # --- now and then ---

    async def look_after(self) -> None:
        """Sends what has waited, and reports lengths; an error stays for the program's next call."""
        for body in list(self.bodies.values()):
            if body.oldest_cut is None or (writer := body.writer) is None:
                continue
            body.begin(everything=True)
            if body.durable_end:
                try:
                    await body.report(writer.handle)
                except FireflyerError:
                    pass  # fsync and close say it again

    async def close(self) -> None:
        """All files; raises the first error of one."""
        if self._closed or self.elsewhere:
            return
        first: BaseException | None = None
        for body in list(self.bodies.values()):
            for file in list(body.files):
                try:
                    await file.close()
                except FireflyerError as error:
                    first = first or error
        self._closed = True
        if first is not None:
            raise first
