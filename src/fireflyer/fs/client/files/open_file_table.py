"""Opening files, and what all open files of a client share: memory, and what is known of each inode."""

from __future__ import annotations

import errno
import time
from typing import Final

import msgspec

from fireflyer.base.errors import FireflyerError, InvariantViolation, NotFound
from fireflyer.base.units import MIB, SECOND
from fireflyer.fs.client.chunks import Options
from fireflyer.fs.client.files.budgets import ReadAheadBudget, WriteBudget
from fireflyer.fs.client.files.open_file import File
from fireflyer.fs.client.files.open_inode import OpenInode, file_of
from fireflyer.fs.client.files.orphaned_handles import OrphanedHandles, UnconfirmedOpen
from fireflyer.fs.client.files.port import Port
from fireflyer.fs.client.fork_safety import ProcessBound
from fireflyer.fs.client.futures import ClientFuture
from fireflyer.fs.core.files.chunk_map import ChunkMap
from fireflyer.fs.schema.errors import FileError, file_error
from fireflyer.fs.schema.ids import ClientId
from fireflyer.fs.schema.inodes import FileDetails, Inode, InodeId
from fireflyer.fs.schema.meta import Actor, Answer, Close, Found, Open, Opened, OpenFlag, PathRef, Stat

__all__ = ["FileOptions", "OpenFileTable"]

_LATE_NS: Final = 5 * SECOND
"""An answer to an open for reading that took longer may be of a file that was collected meanwhile."""


class FileOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a file system client: memory for reads and writes, and the umask."""

    write_bytes: int = 32 * MIB
    """Written and not at the storage nodes yet, of all files; who writes more waits."""
    ahead_bytes: int = 8 * MIB
    """Fetched ahead for one file that is read from front to back; 0: nothing."""
    all_ahead_bytes: int = 64 * MIB
    """... for all files together."""
    umask: int | None = None
    """Taken off the permissions of what is made by path; None: this process's, as it was at `connect`."""
    chunks: Options = Options()


class OpenFileTable(ProcessBound):
    def __init__(self, port: Port, options: FileOptions) -> None:
        ProcessBound.__init__(self)
        self.port = port
        self.options = options
        self.bodies: dict[InodeId, OpenInode] = {}
        self._write_budget = WriteBudget(options.write_bytes, self.bodies.values())
        self._read_ahead_budget = ReadAheadBudget(options.all_ahead_bytes)
        self._closed = False
        self.orphaned = OrphanedHandles(port)
        self._ending: dict[ClientFuture[Answer], None] = {}
        """Lazy closes."""
        port.on_lost(self._session_lost)
        self._session = port.meta.client
        """As heard of here."""

    @property
    def dirty_bytes(self) -> int:
        """Written here, and not at the storage nodes."""
        return self._write_budget.dirty_bytes

    @property
    def is_closed(self) -> bool:
        return self._closed

    def check(self) -> None:
        """Raises `UsageError` in a forked child, EBADF when the client is closed."""
        self.check_process()
        if self._closed:
            raise file_error(errno.EBADF, "the file system client is closed")

    # --- opening ---

    async def open(self, place: PathRef, flags: int, mode: int, actor: Actor | None, path: str | None) -> File:
        """Raises `FileError`. EISDIR for a directory."""
        self.check()
        if flags & OpenFlag.TRUNCATE:  # what this client has written before must not come after the cut
            await self.settle(place, bool(flags & OpenFlag.FOLLOW), actor)
        while True:
            handle = self.port.meta.handle() if flags & OpenFlag.WRITE else 0
            asked_ns = time.monotonic_ns()
            answer, session = await self._asked(Open(place, flags, handle, mode), actor)
            if handle or time.monotonic_ns() - asked_ns < _LATE_NS:
                break
        if not isinstance(answer, Opened):
            raise InvariantViolation(f"Open was answered with {type(answer).__name__}")
        if not isinstance(answer.inode.body, FileDetails):
            raise file_error(errno.EISDIR, "", path)
        return await self._adopt(answer, flags, handle, actor, path, session)

    async def settle(self, place: PathRef, follow: bool, actor: Actor | None) -> None:
        """Nothing waits of the file at this place, if this client has written to it."""
        if not any(body.unreported for body in self.bodies.values()):
            return
        inode_id = place.base
        if place.path:
            try:
                answer = await self.port.call(Stat(place, follow), actor)
            except FileError as error:
                if error.errno == errno.ENOENT:
                    return
                raise
            if not isinstance(answer, Found):
                raise InvariantViolation(f"Stat was answered with {type(answer).__name__}")
            inode_id = answer.inode.id
        body = self.bodies.get(inode_id)
        if body is not None:
            await body.settle()

    async def _asked(self, request: Open, actor: Actor | None) -> tuple[Answer, ClientId]:
        future = self.port.future_of(self.port.meta.call_in_session(request, actor=actor))
        try:
            answered: tuple[Answer, ClientId] = await future
            return answered
        except FileError:
            raise
        except BaseException:  # given up, but it may be done
            if request.handle:
                future.then(lambda: self._opened_unconfirmed(request, actor, future))
            raise

    def _opened_unconfirmed(
        self, request: Open, actor: Actor | None, future: ClientFuture[tuple[Answer, ClientId]]
    ) -> None:
        one = UnconfirmedOpen(request.place, bool(request.flags & OpenFlag.FOLLOW), request.handle, actor)
        if future.error is None:
            answer, session = future.value
            if session != self._session or not isinstance(answer, Opened):
                return
            one.inode = answer.inode
        elif isinstance(future.error, FileError):
            return
        self.orphaned.add(one)

    async def _adopt(
        self, opened: Opened, flags: int, handle: int, actor: Actor | None, path: str | None, session: ClientId
    ) -> File:
        """`session`: in which it was opened."""
        inode = opened.inode
        body = self.bodies.get(inode.id)
        if body is None:
            try:
                where = await self._where(inode)
            except BaseException:
                if handle and session == self._session:
                    self.orphaned.add(UnconfirmedOpen(PathRef(inode.id), False, handle, actor, inode))
                raise
            made = OpenInode(self.port, inode, where, self._write_budget, self._read_ahead_budget)
            body = self.bodies.setdefault(inode.id, made)
        body.learn(inode, writing=handle != 0)
        readable = bool(flags & (OpenFlag.READ | OpenFlag.EXECUTE))
        ahead_bytes = self.options.ahead_bytes
        file = File(self, body, handle, readable=readable, actor=actor, path=path, ahead_bytes=ahead_bytes)
        late = session != self._session
        if late:
            file.lost = handle != 0
            body.needs_revalidation = True
        self.port.meta.hold(inode.id, late=late)
        if opened.capability:
            try:
                await body.present(file, opened)
            except BaseException:
                await file.close()
                raise
        return file

    async def _where(self, inode: Inode) -> ChunkMap:
        layout = file_of(inode).layout
        try:
            chains = self.port.chains(layout.table)
        except NotFound:
            await self.port.future_of(self.port.meta.learn_table(layout.table))
            chains = self.port.chains(layout.table)
        return ChunkMap(layout, chains)

    def end_lazily(self, inode: Inode, handle: int, actor: Actor | None) -> None:
        """A handle, for which there is nothing to be told."""
        session, request = self._session, Close(inode.id, handle, 0, file_of(inode).cut, False, lazy=True)
        future: ClientFuture[Answer] = self.port.future_of(self.port.meta.call(request, actor=actor))
        self._ending[future] = None

        def over() -> None:
            del self._ending[future]
            heard = not isinstance(future.error, FireflyerError) or isinstance(future.error, FileError)
            if not heard and session == self._session:
                self.orphaned.add(UnconfirmedOpen(PathRef(inode.id), False, handle, actor, inode))

        future.then(over)

    async def _ended(self) -> None:
        """What is ended lazily is now: it goes with any other request."""
        if not self._ending:
            return
        for future in [self.port.future_of(self.port.meta.heartbeat()), *self._ending]:
            try:
                await future
            except FireflyerError:
                pass  # the session ends, and with it the handle

    def closed(self, body: OpenInode) -> None:
        """One of its files."""
        self.port.meta.release(body.id)
        self._leave(body)

    def _leave(self, body: OpenInode) -> None:
        if not body.files and not self.orphaned.keeps(body) and self.bodies.get(body.id) is body:
            del self.bodies[body.id]
            body.drop_rights()

    def _session_lost(self, session: ClientId) -> None:
        self._session = session
        bodies = list(self.bodies.values())
        for body in bodies:
            body.lose()
        self.orphaned.clear()
        for body in bodies:
            self._leave(body)

    # --- now and then ---

    async def maintain(self) -> None:
        """Sends what has waited, and reports lengths; an error stays for the program's next call."""
        bodies = [body for body in self.bodies.values() if body.oldest_cut is not None and body.writer is not None]
        for body in bodies:
            body.begin(everything=True)
        await self.port.together([*(self._report(body) for body in bodies if body.durable_end), self._retry_all()])

    async def _report(self, body: OpenInode) -> None:
        if (writer := body.writer) is not None:
            await body.report(writer.handle, actor=writer.actor)  # what fails, fsync and close say again

    async def _retry_all(self) -> None:
        for body in await self.orphaned.retry_all():
            self._leave(body)

    async def close(self) -> None:
        """All files, at once; raises the first error of one."""
        if self._closed or self.elsewhere:
            return
        files = [file for body in self.bodies.values() for file in body.files]
        ends = await self.port.together([*(file.close() for file in files), self._ended()])
        self._closed = True
        first = next((end for end in ends if end is not None), None)
        if first is not None:
            raise first
