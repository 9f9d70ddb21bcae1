"""Answers what the kernel asks with what a file system says.

    kernel ──> FuseSession (native threads) ──events──> Serving ──> Operations, one task for each
    kernel <── reply by number <────────────────────────── result, or errno

Each event is answered exactly once, whatever its operation does: with its result, the errno of an `OSError`, EINTR when
who asked was interrupted, EIO for everything else. Interrupted by any signal is who waits for a lock; who waits for
something else, that changes nothing, only by one that ends him: programs do not expect EINTR there.

The descriptor of the events is watched by the event loop, and all that wait are begun in one turn of it, so that a
client that collects the requests of a turn sends them together.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import signal
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from fireflyer.base.errors import FireflyerError, NoSpace
from fireflyer.fs.mount.directories import Directory
from fireflyer.fs.mount.operations import Attributes, Caller, Changes, Opened, Operations, RangeLock
from fireflyer.fs.schema.errors import FileError

if TYPE_CHECKING:
    from fireflyer.native.fuse import FuseMemory, FuseSession

__all__ = ["THREADS", "VALID_S", "Serving", "errno_of"]

_log = logging.getLogger(__name__)
THREADS: Final = 4
"""That receive requests. Reads and writes leave them at once, so this is not how many are under way."""
VALID_S: Final = 1.0
"""How long the kernel may keep names and attributes."""
_EVENTS: Final = 256
_UNLOCKED: Final = fcntl.F_UNLCK
_LOCKS: Final = frozenset(["setlk", "flock"])
_Event = tuple[str, int, int, tuple[int, int, int, tuple[int, ...]], tuple[Any, ...]]


def errno_of(error: BaseException) -> int:
    """What a program is told of it."""
    if isinstance(error, FireflyerError) and not isinstance(error, FileError):
        # Where it has an errno, that may speak of something else than the file.
        return errno.ENOSPC if isinstance(error, NoSpace) else errno.EIO
    return (isinstance(error, OSError) and error.errno) or errno.EIO


def _ends_for(event: _Event) -> bool:
    """A signal has come for who asked this: he is not to wait any more."""
    return event[0] in _LOCKS or _is_ending(event[3][2])


def _is_ending(process: int) -> bool:
    """The kernel makes SIGKILL of any signal that ends a process."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{process}/status", "rb") as file:
        pending = next((line.split()[1] for line in file if line.startswith(b"SigPnd:")), b"0")
        return bool(int(pending, 16) >> (signal.SIGKILL - 1) & 1)
    return False


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
        self._interrupted: set[int] = set()
        self._last = 0
        self._draining = False
        self._directories: dict[int, Directory] = {}
        self._next_directory = 1
        self.ended = asyncio.Event()
        """Set when it is unmounted."""
        self._kinds: dict[str, Callable[..., Awaitable[None]]] = {
            name.removeprefix("_do_"): getattr(self, name) for name in dir(self) if name.startswith("_do_")
        }

    def start(self, threads: int = THREADS) -> None:
        self._loop.add_reader(self._session.event_fd, self._take)
        self._session.start(threads)

    async def drain(self) -> None:
        """Until all that was asked is answered. Who waits for a lock waits no more."""
        self._draining = True
        self._take()
        while self._tasks:
            for number, task in self._tasks.items():
                if self._asked[number][0] in _LOCKS:
                    task.cancel()
            await asyncio.wait(list(self._tasks.values()))
            self._take()

    def close(self) -> None:
        """What is not answered never will be."""
        self._loop.remove_reader(self._session.event_fd)
        for task in self._tasks.values():
            task.cancel()

    def _take(self) -> None:
        for event in self._session.take(_EVENTS):
            kind, number = event[0], event[1]
            if kind == "interrupt":
                self._interrupt(event[4][0])
            elif kind == "ended":
                self.ended.set()
            else:
                self._last = max(self._last, number)
                self._asked[number] = event
                self._tasks[number] = self._loop.create_task(self._answer(event))

    def _interrupt(self, number: int) -> None:
        """It may come before what it is about."""
        task = self._tasks.get(number)
        if task is not None:
            if _ends_for(self._asked[number]):
                task.cancel()
        elif number > self._last:
            self._interrupted.add(number)

    async def _answer(self, event: _Event) -> None:
        kind, number, inode, caller, arguments = event
        try:
            if number in self._interrupted:
                self._interrupted.discard(number)
                if _ends_for(event):
                    raise InterruptedError(errno.EINTR, "interrupted")
            await self._kinds[kind](number, inode, Caller(*caller), *arguments)
        except asyncio.CancelledError:
            self._refuse(number, errno.EINTR)
        except Exception as error:
            self._failed(kind, number, inode, error)
        finally:
            del self._tasks[number], self._asked[number]

    def _failed(self, kind: str, number: int, inode: int, error: Exception) -> None:
        refused = errno_of(error)
        if isinstance(error, FireflyerError) and refused == errno.EIO:
            _log.warning("%s of inode=%d failed reason=%s", kind, inode, error)
        elif not isinstance(error, (FireflyerError, OSError)):
            _log.exception("%s of inode=%d failed", kind, inode)
        self._refuse(number, refused)

    def _refuse(self, number: int, error: int) -> None:
        if error == errno.EINTR and self._draining:
            error = errno.ENOTCONN  # no signal has come for him, so the kernel would tell him a number of its own
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
        self._session.reply_value(number, await self._operations.get_value(caller, inode, name))

    async def _do_listxattr(self, number: int, inode: int, caller: Caller, _size: int) -> None:
        names = await self._operations.list_values(caller, inode)
        self._session.reply_value(number, b"".join(name + b"\0" for name in names))

    async def _do_setxattr(
        self, number: int, inode: int, caller: Caller, name: bytes, value: bytes, flags: int
    ) -> None:
        await self._operations.set_value(caller, inode, name, value, flags)
        self._session.reply_error(number, 0)

    async def _do_removexattr(self, number: int, inode: int, caller: Caller, name: bytes) -> None:
        await self._operations.remove_value(caller, inode, name)
        self._session.reply_error(number, 0)

    # --- directories

    async def _do_opendir(self, number: int, inode: int, caller: Caller) -> None:
        await self._operations.open_directory(caller, inode)
        handle = self._next_directory
        self._next_directory += 1
        self._directories[handle] = Directory(inode)
        self._session.reply_open(number, handle)

    async def _do_readdir(self, number: int, _inode: int, caller: Caller, handle: int, offset: int) -> None:
        await self._list(number, caller, handle, offset, plus=False)

    async def _do_readdirplus(self, number: int, _inode: int, caller: Caller, handle: int, offset: int) -> None:
        await self._list(number, caller, handle, offset, plus=True)

    async def _list(self, number: int, caller: Caller, handle: int, offset: int, *, plus: bool) -> None:
        directory = self._directories[handle]
        entries, first = await directory.entries_from(self._operations, caller, offset, attributes=plus)
        self._session.reply_directory(number, entries, first, offset, plus=plus, valid_s=self._valid_s)  # type: ignore[arg-type]

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

    async def _do_read(
        self, number: int, _inode: int, _caller: Caller, handle: int, offset: int, memory: FuseMemory
    ) -> None:
        count = await self._operations.read(handle, offset, memoryview(memory))
        self._session.reply_data(number, memory, count)

    async def _do_write(
        self, number: int, _inode: int, _caller: Caller, handle: int, offset: int, memory: FuseMemory
    ) -> None:
        self._session.reply_written(number, await self._operations.write(handle, offset, memoryview(memory)))

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
        self, number: int, inode: int, caller: Caller, _handle: int, owner: int, kind: int, start: int, end: int,
        process: int, wait: int,
    ) -> None:  # fmt: skip
        lock = RangeLock(kind, start, end, process)
        await self._operations.lock(caller, inode, owner, lock, wait=bool(wait))
        self._session.reply_error(number, 0)

    async def _do_flock(
        self, number: int, inode: int, caller: Caller, _handle: int, owner: int, operation: int, wait: int
    ) -> None:
        await self._operations.lock_whole(caller, inode, owner, operation, wait=bool(wait))
        self._session.reply_error(number, 0)
