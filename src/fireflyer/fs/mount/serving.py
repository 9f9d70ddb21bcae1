"""Answers what the kernel asks with what a file system says.

    kernel ──> FuseSession (native threads) ──events──> Serving ──> Operations, one task for each
    kernel <── reply by number <────────────────────────── result, or errno

Each event is answered exactly once, whatever its operation does: with its result, the errno of an `OSError`, EINTR when
who asked was interrupted, EIO for everything else. Interrupted by any signal is who waits for a lock; who waits for
something else, that changes nothing, only by one that ends it: programs do not expect EINTR there.

The kernel tells of a request's first signal, and never of another one. It may tell so before the request is here, in
the same turn, or while it is under way. Who has got a signal that does not end it is looked at again and again until
it is answered: the next one may.

The descriptor of the events is watched by the event loop, and all that wait are begun in one turn of it, so that a
client that collects the requests of a turn sends them together.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import functools
import itertools
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from fireflyer.base.errors import FireflyerError, NoSpace, PermissionDenied
from fireflyer.fs.mount.directories import Directory
from fireflyer.fs.mount.metrics import MountUsage, mount_series
from fireflyer.fs.mount.operations import Attributes, Caller, Changes, Opened, Operations, RangeLock
from fireflyer.fs.mount.read_memory import ReadMemory
from fireflyer.fs.mount.waiting import in_any_case, in_thread
from fireflyer.fs.schema.errors import FileError
from fireflyer.runtime.metrics import Series

if TYPE_CHECKING:
    from fireflyer.native.fuse import FuseMemory, FuseSession

__all__ = ["PROCESS_VALUE", "THREADS", "VALID_S", "Serving", "errno_of", "is_ending", "process_name"]

_log = logging.getLogger(__name__)
THREADS: Final = 4
"""That receive requests. Reads and writes leave them at once, so this is not how many are under way."""
VALID_S: Final = 1.0
"""How long the kernel may keep names and attributes."""
PROCESS_VALUE: Final = b"user.fireflyer.process"
"""Extended attribute of everything in a mount, on no list: which process serves it."""
_EVENTS: Final = 256
_CLOSE_S: Final = 10.0
_DRAIN_S: Final = 180.0
"""More than any request waits for the cluster."""
_UNLOCKED: Final = fcntl.F_UNLCK
_LOCKS: Final = frozenset(["setlk", "flock"])
_LOOK_AGAIN_S: Final = 0.25
"""At those that a signal has come for, and that were not answered."""
_HARMLESS: Final = functools.reduce(
    lambda mask, number: mask | 1 << (number - 1),
    [
        signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH,
        signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU,
    ],
    0,
)  # fmt: skip
"""Signals that end nobody; all others end who does not catch them."""
_Event = tuple[str, int, int, tuple[int, int, int, tuple[int, ...]], tuple[Any, ...]]


_NUMBERS: Final[tuple[tuple[type[FireflyerError], int], ...]] = (
    (NoSpace, errno.ENOSPC), (PermissionDenied, errno.EACCES),
)  # fmt: skip
"""Permission is denied to the mount itself, whose token was revoked or has expired."""


def errno_of(error: BaseException) -> int:
    """What a program is told of it."""
    if isinstance(error, FireflyerError) and not isinstance(error, FileError):
        # Where it has an errno, that may speak of something else than the file.
        return next((number for kind, number in _NUMBERS if isinstance(error, kind)), errno.EIO)
    return (isinstance(error, OSError) and error.errno) or errno.EIO


def _ends_for(event: _Event) -> bool:
    """A signal has come for who asked this: it is not to wait any more."""
    return event[0] in _LOCKS or is_ending(event[3][2])


def is_ending(process: int) -> bool:
    """The kernel makes SIGKILL of a signal that ends a process, but not where it dumps, or waits behind another one."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{process}/status", "rb") as file:
        told = dict(line.split(maxsplit=1) for line in file if line.startswith((b"Sig", b"Shd", b"TracerPid")))
        own, shared, blocked, ignored, caught = (
            int(told.get(name, b"0"), 16) for name in (b"SigPnd:", b"ShdPnd:", b"SigBlk:", b"SigIgn:", b"SigCgt:")
        )
        traced = int(told.get(b"TracerPid:", b"0")) != 0  # who traces it may take the signal away
        ends = 0 if traced else (own | shared) & ~(_HARMLESS | blocked | ignored | caught)
        return bool(own >> (signal.SIGKILL - 1) & 1 or ends)
    return False


def process_name(process: int) -> str:
    """Its number and when it began: no other one has both. Raises `OSError` when it is gone."""
    with open(f"/proc/{process}/stat", encoding="ascii", errors="replace") as file:
        began = file.read().rpartition(")")[2].split()[19]
    return f"{process} {began}"


class Serving:
    """Of one session, in the running event loop."""

    def __init__(self, session: FuseSession, operations: Operations, *, valid_s: float = VALID_S) -> None:
        self._session = session
        self._operations = operations
        self._valid_s = valid_s
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._asked: dict[int, _Event] = {}
        """What they are about."""
        self._interrupted: dict[int, None] = {}
        """A signal has come for them, and they are waited for all the same. Looked at last: at the end."""
        self._looking: asyncio.TimerHandle | None = None
        self._draining = False
        self._directories: dict[int, Directory] = {}
        self._next_directory = 1
        self._memory = ReadMemory(
            session.read_memory, session.read_cost_bytes, session.read_limit_bytes,
            now_ns=time.monotonic_ns, answered_ns=operations.answered_ns,
        )  # fmt: skip
        self.ended = asyncio.Event()
        """Set when it is unmounted."""
        self._kinds: dict[str, Callable[..., Awaitable[None]]] = {
            name.removeprefix("_do_"): getattr(self, name) for name in dir(self) if name.startswith("_do_")
        }

    def start(self, threads: int = THREADS) -> None:
        self._loop.add_reader(self._session.event_fd, self._take)
        self._session.start(threads)

    def series(self, held: MountUsage) -> Sequence[Series]:
        """For Prometheus."""
        under_way = dict.fromkeys(self._kinds, 0)
        for event in self._asked.values():
            under_way[event[0]] += 1
        return mount_series(self._session, under_way, len(self._directories), held)

    async def drain(self) -> None:
        """Until all that was asked is answered. Who waits for a lock waits no more."""
        self._draining = True
        self._take()
        until_s = self._loop.time() + _DRAIN_S
        while self._tasks and self._loop.time() < until_s:
            for number, task in self._tasks.items():
                if self._asked[number][0] in _LOCKS:
                    task.cancel()
            await asyncio.wait(list(self._tasks.values()), timeout=until_s - self._loop.time())
            self._take()

    async def close(self) -> None:
        """What is not answered never will be."""
        self._draining = True
        self._loop.remove_reader(self._session.event_fd)
        self._interrupted.clear()
        if self._looking is not None:
            self._looking.cancel()
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=_CLOSE_S)

    def _take(self) -> None:
        for event in self._session.take(_EVENTS):
            kind, number = event[0], event[1]
            if kind == "interrupt":
                self._interrupt(event[4][0])
            elif kind == "room":
                self._memory.retry()
            elif kind == "ended":
                self.ended.set()
            else:
                self._asked[number] = event
                task = self._tasks[number] = self._loop.create_task(self._answer(event))
                task.add_done_callback(functools.partial(self._over, number))
                if number in self._interrupted:
                    self._interrupt(number)

    def _interrupt(self, number: int) -> None:
        """It may come before what it is about."""
        self._interrupted.pop(number, None)
        if not self._session.is_open(number):
            return
        task = self._tasks.get(number)
        if task is not None and _ends_for(self._asked[number]):
            task.cancel()
            return
        self._interrupted[number] = None
        if self._looking is None:
            self._looking = self._loop.call_later(_LOOK_AGAIN_S, self._look_again)

    def _look_again(self) -> None:
        self._looking = None
        for number in list(itertools.islice(self._interrupted, _EVENTS)):
            self._interrupt(number)

    async def _answer(self, event: _Event) -> None:
        kind, number, inode, caller, arguments = event
        try:
            await self._kinds[kind](number, inode, Caller(*caller), *arguments)
        except Exception as error:
            self._failed(kind, number, inode, error)

    def _over(self, number: int, task: asyncio.Task[None]) -> None:
        """Not at the end of `_answer`: who is cancelled before it begins never comes there."""
        del self._tasks[number], self._asked[number]
        self._interrupted.pop(number, None)
        if task.cancelled():
            self._refuse(number, errno.EINTR)

    def _failed(self, kind: str, number: int, inode: int, error: Exception) -> None:
        refused = errno_of(error)
        if isinstance(error, FireflyerError) and (refused == errno.EIO or isinstance(error, PermissionDenied)):
            _log.warning("request failed request=%s inode=%d reason=%s", kind, inode, error)
        elif not isinstance(error, (FireflyerError, OSError)):
            _log.exception("%s of inode=%d failed", kind, inode)
        self._refuse(number, refused)

    def _refuse(self, number: int, error: int) -> None:
        if error == errno.EINTR and self._draining:
            error = errno.ENOTCONN  # no signal has come for it, so the kernel would tell it a number of its own
        try:
            self._session.reply_error(number, error)
        except ValueError:
            pass  # it was answered, and failed behind that

    # --- names

    async def _do_lookup(self, number: int, parent: int, caller: Caller, name: bytes) -> None:
        self._entry(number, await self._operations.lookup(caller, parent, name))

    def _entry(self, number: int, found: Attributes) -> None:
        self._session.reply_entry(number, found, self._valid_s)

    async def _do_readlink(self, number: int, inode: int, caller: Caller) -> None:
        self._session.reply_target(number, await self._operations.read_link(caller, inode))

    async def _do_mknod(self, number: int, parent: int, caller: Caller, name: bytes, mode: int, device: int) -> None:
        self._entry(number, await self._operations.make_node(caller, parent, name, mode, device))

    async def _do_mkdir(self, number: int, parent: int, caller: Caller, name: bytes, mode: int) -> None:
        self._entry(number, await self._operations.make_directory(caller, parent, name, mode & 0o7777))

    async def _do_symlink(self, number: int, parent: int, caller: Caller, name: bytes, target: bytes) -> None:
        self._entry(number, await self._operations.make_symlink(caller, parent, name, target))

    async def _do_link(self, number: int, inode: int, caller: Caller, parent: int, name: bytes) -> None:
        self._entry(number, await self._operations.make_link(caller, inode, parent, name))

    async def _do_unlink(self, number: int, parent: int, caller: Caller, name: bytes) -> None:
        await self._operations.remove(caller, parent, name)
        self._session.reply_error(number, 0)

    async def _do_rmdir(self, number: int, parent: int, caller: Caller, name: bytes) -> None:
        await self._operations.remove_directory(caller, parent, name)
        self._session.reply_error(number, 0)

    async def _do_rename(
        self, number: int, parent: int, caller: Caller, name: bytes, new_parent: int, new_name: bytes, flags: int
    ) -> None:
        await self._operations.rename(caller, parent, name, new_parent, new_name, flags)
        self._session.reply_error(number, 0)

    # --- attributes

    async def _do_getattr(self, number: int, inode: int, caller: Caller, handle: int) -> None:
        found = await self._operations.get_attributes(caller, inode, handle)
        self._session.reply_attributes(number, found, self._valid_s)

    async def _do_setattr(self, number: int, inode: int, caller: Caller, handle: int, *fields: int) -> None:
        found = await self._operations.set_attributes(caller, inode, handle, Changes(*fields))
        self._session.reply_attributes(number, found, self._valid_s)

    async def _do_access(self, number: int, inode: int, caller: Caller, mask: int) -> None:
        await self._operations.access(caller, inode, mask)
        self._session.reply_error(number, 0)

    async def _do_statfs(self, number: int, inode: int, caller: Caller) -> None:
        space = await self._operations.space(caller, inode)
        self._session.reply_space(number, **space._asdict())

    async def _do_getxattr(self, number: int, inode: int, caller: Caller, name: bytes, _size: int) -> None:
        if name == PROCESS_VALUE:
            self._session.reply_value(number, process_name(os.getpid()).encode())
            return
        self._session.reply_value(number, await self._operations.get_xattr(caller, inode, name))

    async def _do_listxattr(self, number: int, inode: int, caller: Caller, _size: int) -> None:
        names = await self._operations.list_xattrs(caller, inode)
        self._session.reply_value(number, b"".join(name + b"\0" for name in names))

    async def _do_setxattr(
        self, number: int, inode: int, caller: Caller, name: bytes, value: bytes, flags: int
    ) -> None:
        if name == PROCESS_VALUE:
            raise PermissionError(errno.EPERM, "this extended attribute is read-only: the mount provides it")
        await self._operations.set_xattr(caller, inode, name, value, flags)
        self._session.reply_error(number, 0)

    async def _do_removexattr(self, number: int, inode: int, caller: Caller, name: bytes) -> None:
        await self._operations.remove_xattr(caller, inode, name)
        self._session.reply_error(number, 0)

    # --- directories

    async def _do_opendir(self, number: int, inode: int, caller: Caller) -> None:
        await self._operations.open_directory(caller, inode)
        handle = self._next_directory
        self._next_directory += 1
        self._directories[handle] = Directory(inode, caller)
        self._session.reply_open(number, handle)

    async def _do_readdir(self, number: int, _inode: int, _caller: Caller, handle: int, offset: int, size: int) -> None:
        await self._list(number, handle, offset, size, plus=False)

    async def _do_readdirplus(
        self, number: int, _inode: int, _caller: Caller, handle: int, offset: int, size: int
    ) -> None:
        await self._list(number, handle, offset, size, plus=True)

    async def _list(self, number: int, handle: int, offset: int, size: int, *, plus: bool) -> None:
        directory = self._directories[handle]
        told = await directory.entries_from(self._operations, offset, attributes=plus, size=size)
        self._session.reply_directory(number, told.entries, told.first, told.offset, plus=plus, valid_s=self._valid_s)  # type: ignore[arg-type]

    async def _do_releasedir(self, number: int, _inode: int, _caller: Caller, handle: int) -> None:
        self._directories.pop(handle, None)
        self._session.reply_error(number, 0)

    # --- files

    async def _do_open(self, number: int, inode: int, caller: Caller, flags: int) -> None:
        opened: Opened = await self._operations.open(caller, inode, flags)
        if not opened.keep_pages and opened.fd < 0:
            # The kernel asks for the length again: it may have kept one from before the last close elsewhere.
            self._session.forget_attributes(inode)
        self._session.reply_open(
            number, opened.handle, keep_pages=opened.keep_pages, direct=opened.direct, fd=opened.fd
        )

    async def _do_create(self, number: int, parent: int, caller: Caller, name: bytes, mode: int, flags: int) -> None:
        found, opened = await self._operations.create(caller, parent, name, mode & 0o7777, flags)
        self._session.reply_create(number, found, self._valid_s, opened.handle, direct=opened.direct, fd=opened.fd)

    async def _do_read(self, number: int, _inode: int, _caller: Caller, handle: int, offset: int, size: int) -> None:
        chains = self._operations.chains_of(handle, offset, size)
        memory = await self._memory.take(chains, size)
        try:
            count = await self._operations.read(handle, offset, memoryview(memory))
            self._session.reply_data(number, memory, count)
        finally:
            del memory
            self._memory.give_back(chains, size)

    async def _do_write(
        self, number: int, inode: int, _caller: Caller, handle: int, offset: int, memory: FuseMemory
    ) -> None:
        written = await self._operations.write(handle, offset, memoryview(memory))
        if written.forget:
            await self._forget_pages(inode)
        self._session.reply_written(number, written.size)

    async def _do_flush(self, number: int, _inode: int, _caller: Caller, handle: int, owner: int) -> None:
        await self._operations.flush(handle, owner)
        self._session.reply_error(number, 0)

    async def _do_fsync(self, number: int, _inode: int, _caller: Caller, handle: int, data_only: int) -> None:
        await self._operations.sync(handle, data_only=bool(data_only))
        self._session.reply_error(number, 0)

    async def _do_release(
        self, number: int, _inode: int, _caller: Caller, handle: int, owner: int, unlock: int
    ) -> None:
        await self._operations.release(handle, owner, unlock=bool(unlock))
        self._session.reply_error(number, 0)

    async def _do_fallocate(
        self, number: int, _inode: int, _caller: Caller, handle: int, mode: int, offset: int, size: int
    ) -> None:
        await self._operations.allocate(handle, mode, offset, size)
        self._session.reply_error(number, 0)

    # --- locks

    async def _do_getlk(
        self, number: int, inode: int, caller: Caller, _handle: int, owner: int, kind: int, start: int, end: int
    ) -> None:
        asked = RangeLock(kind, start, end, caller.pid)
        found = await self._operations.find_lock(caller, inode, owner, asked)
        told = found if found is not None else RangeLock(_UNLOCKED, start, end, 0)
        self._session.reply_lock(number, told.type, told.start, told.end, told.process)

    async def _do_setlk(
        self, number: int, inode: int, caller: Caller, handle: int, owner: int, kind: int, start: int, end: int,
        process: int, wait: int,
    ) -> None:  # fmt: skip
        lock = RangeLock(kind, start, end, process)
        changed = await self._operations.lock(caller, inode, owner, lock, handle=handle, wait=bool(wait))
        await self._locked(number, inode, changed)

    async def _do_flock(
        self, number: int, inode: int, caller: Caller, _handle: int, owner: int, operation: int, wait: int
    ) -> None:
        changed = await self._operations.lock_whole(caller, inode, owner, operation, wait=bool(wait))
        await self._locked(number, inode, changed)

    async def _locked(self, number: int, inode: int, changed: bool) -> None:
        if changed:
            await self._forget_pages(inode)
        self._session.reply_error(number, 0)

    async def _forget_pages(self, inode: int) -> None:
        """In a thread: it waits for pages that are being read."""
        await in_any_case(in_thread(lambda: self._session.forget_pages(inode)))
