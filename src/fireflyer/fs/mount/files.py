"""The mount's operations on a file client: names by the meta service, bytes by its `File`s.

*Who.* A trusted mount names uid, gid and groups of the process that asks with each request; any other acts as the user
whose token it has, whoever asks.

*Close-to-open.* `flush`, which the kernel sends at each close, returns when the bytes are stored and the length is
known to everybody. At an open the kernel drops the pages that it has, unless length, times and `cut` are what they were
when it began to keep them, and nothing was written through this mount since. Between that, all descriptors of this
mount see the same bytes.

*Writing a file from its beginning*, as copies do: who opens an empty file only to write it has no pages in the kernel,
which would be made, filled and dropped at the next open. Whoever opens it meanwhile may have some: they are dropped
behind each write.

*Appending.* The place is the meta service's to give, so a file that is opened with O_APPEND has no pages in the kernel:
what it believes about the place may be wrong.

*Locks* protect what is read and written under them: before one is given up or becomes weaker, the bytes of the file are
stored and its length is told; behind one that was granted, the kernel keeps no pages that others may have changed.
Unlocks that are not answered are asked again until they are (`UnlockRetrier`).

*Locks that wait* ask again and again: an attempt that is under way when its program is interrupted is waited for, and
if it was granted, so the program is told.

*Locks of whole files and of open files (F_OFD_SETLK) end with the last close*, which the kernel tells when `close` has
returned already. Who is refused one while such an end is under way asks once more behind it.
"""

from __future__ import annotations

import asyncio
import collections
import errno
import fcntl
import logging
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import msgspec

from fireflyer.base.errors import FireflyerError, InvariantViolation, TransientError
from fireflyer.base.units import MS
from fireflyer.fs.client.files.asyncio_files import Files
from fireflyer.fs.client.files.open_file import File
from fireflyer.fs.client.files.unlock_retrier import UnlockRetrier
from fireflyer.fs.mount.flock_closes import FlockCloses
from fireflyer.fs.mount.metrics import MountUsage
from fireflyer.fs.mount.operations import (
    Attributes,
    Caller,
    Changes,
    Listing,
    Opened,
    RangeLock,
    Set,
    Space,
    Written,
)
from fireflyer.fs.mount.waiting import in_any_case
from fireflyer.fs.schema import meta
from fireflyer.fs.schema.errors import FileError, file_error
from fireflyer.fs.schema.inodes import DeviceDetails, DirectoryDetails, FileDetails, Inode, Kind
from fireflyer.fs.schema.meta import AllocateMode, LockKind, Now, OpenFlag, PathRef, Window, XattrFlag

__all__ = ["MountedFiles"]

_log = logging.getLogger(__name__)
_A = TypeVar("_A")
_EXECUTED: Final = 0o40
"""In the flags of an open by execve (__FMODE_EXEC of Linux)."""
_LOCK_WAIT_NS: Final = 500 * MS
_FINISH_S: Final = 120.0
"""For all that is open when it is unmounted."""
_MAX_REMEMBERED: Final = 1 << 16
"""Files whose pages may be kept over an open."""
_BLOCK_BYTES: Final = 4096
_HIDDEN: Final = b"trusted."
_KINDS: Final = {
    Kind.FILE: stat.S_IFREG,
    Kind.DIRECTORY: stat.S_IFDIR,
    Kind.SYMLINK: stat.S_IFLNK,
    Kind.FIFO: stat.S_IFIFO,
    Kind.SOCKET: stat.S_IFSOCK,
    Kind.CHARACTER: stat.S_IFCHR,
    Kind.BLOCK: stat.S_IFBLK,
}
_KIND_OF: Final = {mode: kind for kind, mode in _KINDS.items()}
_ALLOCATE: Final = {
    0: AllocateMode.DEFAULT,
    0x01: AllocateMode.KEEP_SIZE,
    0x03: AllocateMode.PUNCH_HOLE,
    0x10: AllocateMode.ZERO_RANGE,
    0x11: AllocateMode.PUNCH_HOLE,  # ZERO_RANGE | KEEP_SIZE: reserves nothing, as all of them
}
_LOCK_KINDS: Final = {fcntl.F_RDLCK: LockKind.READ, fcntl.F_WRLCK: LockKind.WRITE, fcntl.F_UNLCK: LockKind.NONE}
_LOCK_TYPES: Final = {kind: number for number, kind in _LOCK_KINDS.items()}
_WHOLE_KINDS: Final = {fcntl.LOCK_SH: LockKind.READ, fcntl.LOCK_EX: LockKind.WRITE, fcntl.LOCK_UN: LockKind.NONE}
_State = tuple[int, int, int, int]


def _expect(answer: object, kind: type[_A]) -> _A:
    if not isinstance(answer, kind):
        raise InvariantViolation(f"the meta service answered {type(answer).__name__}, not {kind.__name__}")
    return answer


def attributes_of(inode: Inode) -> Attributes:
    body, links, device = inode.body, inode.links, 0
    if isinstance(body, DirectoryDetails):
        links = 2 + body.subdirectories if links else 0
    elif isinstance(body, DeviceDetails):
        device = body.device
    return Attributes(
        inode.id, _KINDS[inode.kind] | inode.mode, links, inode.uid, inode.gid, device, inode.length,
        inode.atime_ns, inode.mtime_ns, inode.ctime_ns,
    )  # fmt: skip


def _state_of(inode: Inode) -> _State:
    cut = inode.body.cut if isinstance(inode.body, FileDetails) else 0
    return inode.length, inode.mtime_ns, inode.ctime_ns, cut


@dataclass(slots=True)
class _Handle:
    file: File
    inode: int
    appends: bool
    writes: bool
    direct: bool
    """It has no pages in the kernel."""


@dataclass(slots=True)
class _Inode:
    """That is open here. `owners`: of range locks, and the handle by which each has asked last. A process loses its own
    at each of its closes; what is left when the handle ends is an open file's (F_OFD_SETLK): the kernel says nothing.
    `writes`: how many there were; `stored` of them are known to everybody. The kernel sends what was written through a
    mapping by any descriptor, so this is not of one."""

    handles: dict[int, _Handle] = field(default_factory=dict)
    owners: dict[int, int] = field(default_factory=dict)
    writes: int = 0
    stored: int = 0

    @property
    def dirty(self) -> bool:
        return self.stored < self.writes


class MountedFiles:
    """As `Mounted`, over one client; it is closed with `finish`."""

    def __init__(self, files: Files, *, trusted: bool) -> None:
        self._files = files
        self._trusted = trusted
        self._handles: dict[int, _Handle] = {}
        self._inodes: dict[int, _Inode] = {}
        self._next = 1
        self._kept: collections.OrderedDict[int, _State] = collections.OrderedDict()
        self._unlock_retrier = UnlockRetrier(files.meta)
        self._released = FlockCloses()

    @property
    def held(self) -> MountUsage:
        return MountUsage(len(self._inodes), len(self._handles), self._files.open_files.dirty_bytes)

    async def finish(self) -> None:
        """Raises nothing that only says that bytes are lost."""
        handles, self._handles = self._handles, {}
        try:
            async with asyncio.timeout(_FINISH_S):
                await asyncio.gather(*(self._finish(handle) for handle in handles.values()))
        except TimeoutError:
            _log.warning("unwritten data may be lost: the cluster did not answer in time")
        await self._unlock_retrier.close()
        await self._files.close()

    async def _finish(self, handle: _Handle) -> None:
        try:
            await handle.file.close()
        except (FireflyerError, OSError) as error:
            _log.warning("unwritten data may be lost inode=%d reason=%s", handle.inode, error)

    # --- asking

    def _actor(self, caller: Caller) -> meta.Actor | None:
        return meta.Actor(caller.uid, caller.gid, caller.groups[: meta.MAX_GROUPS]) if self._trusted else None

    async def _ask(self, caller: Caller, request: meta.Request) -> meta.Answer:
        return await self._files.meta.call(request, actor=self._actor(caller))

    async def _found(self, caller: Caller, request: meta.Request) -> Attributes:
        return self._told(_expect(await self._ask(caller, request), meta.Found).inode)

    def _told(self, inode: Inode) -> Attributes:
        """With what was written here and is not known there yet."""
        return attributes_of(self._files.told(inode))

    # --- names

    async def lookup(self, caller: Caller, parent: int, name: bytes) -> Attributes:
        return await self._found(caller, meta.Stat(PathRef(parent, name), False))

    async def get_attributes(self, caller: Caller, inode: int, handle: int) -> Attributes:  # noqa: ARG002
        return await self._found(caller, meta.Stat(PathRef(inode), False))

    async def set_attributes(self, caller: Caller, inode: int, handle: int, changes: Changes) -> Attributes:
        which = Set(changes.which)
        if Set.SIZE in which:
            await self._truncate(caller, inode, handle, changes.size)
        rest = which & ~Set.SIZE
        if not rest:
            return await self.get_attributes(caller, inode, handle)
        now = Now(0)
        if Set.ATIME_NOW in which:
            now |= Now.ATIME
        if Set.MTIME_NOW in which:
            now |= Now.MTIME
        change = meta.SetAttributes(
            PathRef(inode),
            False,
            mode=changes.mode if Set.MODE in which else None,
            uid=changes.uid if Set.UID in which else None,
            gid=changes.gid if Set.GID in which else None,
            atime_ns=changes.atime_ns if Set.ATIME in which and Now.ATIME not in now else None,
            mtime_ns=changes.mtime_ns if Set.MTIME in which and Now.MTIME not in now else None,
            now=now,
        )
        clean = self._when_stored(inode)
        try:
            changed = await self._files.set_attributes(change, actor=self._actor(caller))
        except PermissionError:
            if rest != Set.MODE:
                raise
            return await self._before_a_write(caller, inode, changes.mode)
        clean()
        return self._told(changed)

    async def _before_a_write(self, caller: Caller, inode: int, mode: int) -> Attributes:
        """Before somebody writes to another one's file, the kernel takes its set-id bits away in the writer's name.
        (A chmod by the writer it refuses itself.) The service does the same when it hears of the write."""
        found = await self._found(caller, meta.Stat(PathRef(inode), False))
        given = found.mode & 0o7777
        if mode not in (given & ~stat.S_ISUID, given & ~stat.S_ISGID, given & ~(stat.S_ISUID | stat.S_ISGID)):
            raise file_error(errno.EPERM)
        return found._replace(mode=stat.S_IFMT(found.mode) | mode)

    async def _truncate(self, caller: Caller, inode: int, handle: int, size: int) -> None:
        self._kept.pop(inode, None)
        opened = self._handles.get(handle)
        if opened is not None and opened.writes:
            await opened.file.truncate(size)
            return
        clean = self._when_stored(inode)
        await self._files.truncate_at(PathRef(inode), size, actor=self._actor(caller))
        clean()

    def _when_stored(self, inode: int) -> Callable[[], None]:
        """To be called when all that has been written here until now is known to the service."""
        here = self._inodes.get(inode)
        writes = 0 if here is None else here.writes

        def clean() -> None:
            if here is not None:
                here.stored = max(here.stored, writes)

        return clean

    async def read_link(self, caller: Caller, inode: int) -> bytes:
        return _expect(await self._ask(caller, meta.ReadLink(PathRef(inode))), meta.Target).path

    async def make_node(self, caller: Caller, parent: int, name: bytes, mode: int, device: int) -> Attributes:
        kind = _KIND_OF.get(stat.S_IFMT(mode) or stat.S_IFREG)
        if kind is None or kind in (Kind.DIRECTORY, Kind.SYMLINK):
            raise file_error(errno.EINVAL)
        device = device if kind in (Kind.CHARACTER, Kind.BLOCK) else 0
        return await self._found(caller, meta.MakeNode(PathRef(parent, name), kind, stat.S_IMODE(mode), device))

    async def make_directory(self, caller: Caller, parent: int, name: bytes, mode: int) -> Attributes:
        return await self._found(caller, meta.MakeDirectory(PathRef(parent, name), mode))

    async def make_symlink(self, caller: Caller, parent: int, name: bytes, target: bytes) -> Attributes:
        return await self._found(caller, meta.Symlink(PathRef(parent, name), target))

    async def make_link(self, caller: Caller, inode: int, parent: int, name: bytes) -> Attributes:
        return await self._found(caller, meta.Link(PathRef(inode), PathRef(parent, name)))

    async def remove(self, caller: Caller, parent: int, name: bytes) -> None:
        await self._ask(caller, meta.Remove(PathRef(parent, name)))

    async def remove_directory(self, caller: Caller, parent: int, name: bytes) -> None:
        await self._ask(caller, meta.RemoveDirectory(PathRef(parent, name)))

    async def rename(
        self, caller: Caller, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int
    ) -> None:
        if flags & ~(meta.RenameFlag.NO_REPLACE | meta.RenameFlag.EXCHANGE):
            raise file_error(errno.EINVAL)
        await self._ask(caller, meta.Rename(PathRef(parent, name), PathRef(new_parent, new_name), flags))

    async def access(self, caller: Caller, inode: int, mask: int) -> None:
        await self._ask(caller, meta.Access(PathRef(inode), mask, False))

    # --- directories

    async def open_directory(self, caller: Caller, inode: int) -> None:
        """The first page is checked when it is asked for; where the kernel does not check rights, this too."""
        if not self._trusted:
            await self._ask(caller, meta.Access(PathRef(inode), 4, False))

    async def list_directory(
        self, caller: Caller, inode: int, after: bytes, limit: int, *, attributes: bool, opened: bool
    ) -> Listing:
        request = meta.ListDirectory(inode, after, min(limit, meta.MAX_LISTED), attributes, opened)
        listing = _expect(await self._ask(caller, request), meta.Listing)
        return Listing([(one.name, self._entry(one)) for one in listing.entries], listing.more, listing.parent)

    def _entry(self, entry: meta.Entry) -> Attributes:
        if entry.inode is not None:
            return self._told(entry.inode)
        return Attributes(entry.id, _KINDS[entry.kind], 1, 0, 0, 0, 0, 0, 0, 0)

    async def space(self, caller: Caller, inode: int) -> Space:
        found = _expect(await self._ask(caller, meta.GetSpace(inode)), meta.Space)
        return Space(
            _BLOCK_BYTES, found.capacity_bytes // _BLOCK_BYTES, found.free_bytes // _BLOCK_BYTES,
            found.inodes + found.free_inodes, found.free_inodes,
        )  # fmt: skip

    # --- files

    async def open(self, caller: Caller, inode: int, flags: int) -> Opened:
        if flags & os.O_TRUNC:
            self._kept.pop(inode, None)
        try:
            file = await self._files.open_at(PathRef(inode), _open_flags(flags), 0, actor=self._actor(caller))
        except FileNotFoundError:
            raise file_error(errno.ESTALE) from None  # the kernel looks for the name again, and tries that
        if not file.attributes.inode.links and inode not in self._inodes:
            await file.close()
            raise file_error(errno.ESTALE)  # somebody has put another file under its name
        return self._opened(file, flags)

    async def create(
        self, caller: Caller, parent: int, name: bytes, mode: int, flags: int
    ) -> tuple[Attributes, Opened]:
        wanted = _open_flags(flags) | OpenFlag.CREATE | (OpenFlag.EXCLUSIVE if flags & os.O_EXCL else 0)
        file = await self._files.open_at(PathRef(parent, name), wanted, mode, actor=self._actor(caller))
        return attributes_of(file.attributes.inode), self._opened(file, flags)

    def _opened(self, file: File, flags: int) -> Opened:
        number, inode = self._next, file.inode_id
        self._next += 1
        writes = flags & os.O_ACCMODE != os.O_RDONLY
        appends = writes and bool(flags & os.O_APPEND)
        here = self._inodes.setdefault(inode, _Inode())
        begins = flags & os.O_ACCMODE == os.O_WRONLY and not file.length and not here.handles
        direct = appends or begins
        here.handles[number] = self._handles[number] = _Handle(file, inode, appends, writes, direct)
        return Opened(number, keep_pages=not direct and self._may_keep(file), direct=direct)

    def _may_keep(self, file: File) -> bool:
        state = _state_of(file.attributes.inode)
        kept = self._kept.get(file.inode_id)
        self._keep(file.inode_id, state)
        return kept == state

    def _keep(self, inode: int, state: _State) -> None:
        self._kept[inode] = state
        self._kept.move_to_end(inode)
        if len(self._kept) > _MAX_REMEMBERED:
            self._kept.popitem(last=False)

    def _handle(self, number: int) -> _Handle:
        handle = self._handles.get(number)
        if handle is None:
            raise file_error(errno.EBADF)
        return handle

    async def read(self, handle: int, offset: int, memory: memoryview) -> int:
        return await self._handle(handle).file.pread_into(memory, offset)

    def chains_of(self, handle: int, offset: int, size: int) -> tuple[int, ...]:
        opened = self._handles.get(handle)
        return () if opened is None else opened.file.body.where.chains(offset, size)

    def answered_ns(self, chain: int) -> int:
        return self._files.answered_ns(chain)

    async def write(self, handle: int, offset: int, memory: memoryview) -> Written:
        opened = self._handle(handle)
        here = self._inodes[opened.inode]
        self._kept.pop(opened.inode, None)
        try:
            if opened.appends:
                await opened.file.append(memory)
                return Written(len(memory))
            count = await opened.file.pwrite(memory, offset, lent=True)
            return Written(count, opened.direct and not all(one.direct for one in here.handles.values()))
        finally:
            here.writes += 1  # behind it: until then it may have waited for room, and nobody can have stored it

    async def flush(self, handle: int, owner: int) -> None:
        opened = self._handle(handle)
        here = self._inodes[opened.inode]
        try:
            if opened.writes and (here.dirty or not opened.file.lost):  # who lost nothing is told of nothing
                await self._store(opened)
            elif owner in here.owners:
                await self._settle(opened.inode)
        finally:
            if owner in here.owners:
                await self._unlock(meta.Lock(opened.inode, Window.RANGE, owner, LockKind.NONE))
                here.owners.pop(owner, None)

    async def _store(self, opened: _Handle) -> None:
        """Also what another descriptor's close is storing: a close that returns has it behind it."""
        clean = self._when_stored(opened.inode)
        await opened.file.fsync()
        if opened.writes:
            clean()

    async def _settle(self, inode: int) -> None:
        """For somebody else who is to see it. An error is told to who writes, at the next write, sync or close."""
        here = self._inodes.get(inode)
        if here is None or not here.dirty:
            return
        try:
            await next(iter(here.handles.values())).file.body.settle()
        except FireflyerError as error:
            _log.warning("flushing before unlock failed, data are not stored yet inode=%d reason=%s", inode, error)

    async def sync(self, handle: int, *, data_only: bool) -> None:  # noqa: ARG002
        await self._store(self._handle(handle))

    async def release(self, handle: int, owner: int, *, unlock: bool) -> None:
        """Who has told everything before, as a program's close does, waits for nothing; but for a lock."""
        opened = self._handle(handle)
        del self._handles[handle]
        owners = self._inodes[opened.inode].owners
        ending = [meta.Lock(opened.inode, Window.WHOLE, owner, LockKind.NONE)] if unlock else []
        for one in [one for one, by in owners.items() if by == handle]:
            del owners[one]
            ending.append(meta.Lock(opened.inode, Window.RANGE, one, LockKind.NONE))
        if not ending:
            await self._release(opened, handle, ())
            return
        with self._released.of(opened.inode):
            await self._release(opened, handle, ending)

    async def _release(self, opened: _Handle, handle: int, unlock: Sequence[meta.Lock]) -> None:
        try:
            if unlock or not opened.file.close_lazily():
                await opened.file.close()
        finally:
            here = self._inodes[opened.inode]
            del here.handles[handle]
            if not here.handles:
                del self._inodes[opened.inode]
            for one in unlock:
                await self._unlock(one)

    async def allocate(self, handle: int, mode: int, offset: int, size: int) -> None:
        wanted = _ALLOCATE.get(mode)
        if wanted is None:
            raise file_error(errno.EOPNOTSUPP)
        opened = self._handle(handle)
        self._kept.pop(opened.inode, None)
        await opened.file.allocate(wanted, offset, size)

    # --- extended attributes

    async def get_xattr(self, caller: Caller, inode: int, name: bytes) -> bytes:
        return _expect(await self._ask(caller, meta.GetXattr(PathRef(inode), name, False)), meta.XattrValue).value

    async def set_xattr(self, caller: Caller, inode: int, name: bytes, value: bytes, flags: int) -> None:
        if flags & ~3 or flags == 3:
            raise file_error(errno.EINVAL)
        if len(value) > meta.MAX_VALUE_BYTES:
            raise file_error(errno.E2BIG, "argument list too long")
        await self._ask(caller, meta.SetXattr(PathRef(inode), name, value, XattrFlag(flags), False))

    async def list_xattrs(self, caller: Caller, inode: int) -> list[bytes]:
        names = _expect(await self._ask(caller, meta.ListXattrs(PathRef(inode), False)), meta.XattrNames).names
        return [name for name in names if caller.uid == 0 or not name.startswith(_HIDDEN)]

    async def remove_xattr(self, caller: Caller, inode: int, name: bytes) -> None:
        await self._ask(caller, meta.RemoveXattr(PathRef(inode), name, False))

    # --- locks

    async def find_lock(self, caller: Caller, inode: int, owner: int, lock: RangeLock) -> RangeLock | None:
        asked = meta.Lock(inode, Window.RANGE, owner, _LOCK_KINDS[lock.type], lock.start, lock.end)
        found = _expect(await self._ask(caller, meta.GetLock(asked)), meta.LockState).lock
        if found is None:
            return None
        return RangeLock(_LOCK_TYPES[found.kind], found.start, found.end, found.process)

    async def lock(self, caller: Caller, inode: int, owner: int, lock: RangeLock, *, handle: int, wait: bool) -> bool:
        kind = _LOCK_KINDS.get(lock.type)
        if kind is None:
            raise file_error(errno.EINVAL)
        state = self._inodes.get(inode)
        if kind is not LockKind.NONE and state is not None:
            state.owners[owner] = handle
        asked = meta.Lock(inode, Window.RANGE, owner, kind, lock.start, lock.end, 0, lock.process)
        return await self._lock(caller, asked, wait=wait)

    async def lock_whole(self, caller: Caller, inode: int, owner: int, operation: int, *, wait: bool) -> bool:
        kind = _WHOLE_KINDS.get(operation)
        if kind is None:
            raise file_error(errno.EINVAL)
        return await self._lock(caller, meta.Lock(inode, Window.WHOLE, owner, kind, process=caller.pid), wait=wait)

    async def _lock(self, caller: Caller, asked: meta.Lock, *, wait: bool) -> bool:
        if asked.kind is not LockKind.WRITE:
            await self._settle(asked.inode)
        await self._unlock_retrier.ended(_owner_of(asked))
        if asked.kind is LockKind.NONE:
            await self._unlock_retrier.end(asked, self._actor(caller), key=_owner_of(asked))
            return False
        await self._take(asked, self._actor(caller), wait=wait)
        return await in_any_case(self._changed_elsewhere(asked.inode))

    async def _take(self, asked: meta.Lock, actor: meta.Actor | None, *, wait: bool) -> None:
        wanted = msgspec.structs.replace(asked, wait_ns=_LOCK_WAIT_NS if wait else 0)
        before: int | None = self._released.seen(asked.inode)
        while True:
            attempt = asyncio.ensure_future(self._files.meta.call(wanted, actor=actor))
            interrupted = False
            try:
                await asyncio.shield(attempt)
                return
            except asyncio.CancelledError:
                interrupted = True
            except BlockingIOError:
                if not wait and (before is None or not await self._released.since(asked.inode, before)):
                    raise
                before = None
            if interrupted:
                try:
                    await attempt
                except FileError:
                    raise InterruptedError(errno.EINTR, "interrupted") from None
                return

    async def _changed_elsewhere(self, inode: int) -> bool:
        """Since the kernel began to keep its pages, as far as we know: what was written here counts as well."""
        here = self._inodes.get(inode)
        if here is None or not here.handles:
            return False
        file = next(iter(here.handles.values())).file
        try:
            state = _state_of((await file.stat()).inode)
        except FireflyerError as error:
            _log.warning("locked, but the length is not known inode=%d reason=%s", inode, error)
            self._kept.pop(inode, None)
            return True
        if self._kept.get(inode) == state:
            return False
        file.body.forget(0, meta.END_OF_FILE)
        self._keep(inode, state)
        return True

    async def _unlock(self, lock: meta.Lock) -> None:
        """At a close, whoever closes. It is not the closer's error when that takes longer."""
        try:
            await self._unlock_retrier.end(lock, key=_owner_of(lock))
        except FireflyerError as error:
            if not isinstance(error, TransientError):  # those go on by themselves
                _log.warning("unlock failed inode=%d reason=%s", lock.inode, error)


def _owner_of(lock: meta.Lock) -> tuple[int, Window, int]:
    return lock.inode, lock.window, lock.owner


def _open_flags(flags: int) -> OpenFlag:
    wanted = {
        os.O_RDONLY: OpenFlag.EXECUTE if flags & _EXECUTED else OpenFlag.READ,
        os.O_WRONLY: OpenFlag.WRITE,
        os.O_RDWR: OpenFlag.READ | OpenFlag.WRITE,
    }.get(flags & os.O_ACCMODE)
    if wanted is None:
        raise file_error(errno.EINVAL)
    return wanted | (OpenFlag.TRUNCATE if flags & os.O_TRUNC else OpenFlag(0))
