"""The bodies of the meta service over a store in memory, as a `PathRef`: no client, no network, chunks in a dictionary.

What a client would do is done here in the simplest way: each call is a request or two, every write is reported at once,
each user's process is a client of its own. Nothing ever waits, so coroutines are run to their end in one step.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import stat
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from tests.support.posix.memory_chunks import MemoryChunks
from tests.support.posix.places import Identity

from fireflyer.fs.core.files.meta_requests import refusal
from fireflyer.fs.core.meta import dispatch, procedures, replies
from fireflyer.fs.core.meta.context import ClusterDefaults, Context, Requester
from fireflyer.fs.core.meta.open_files import holds
from fireflyer.fs.core.meta.ports import Answered, ChunkPort, NotAtOnce, Ports
from fireflyer.fs.core.rows import SESSIONS, SessionRow
from fireflyer.fs.schema import meta
from fireflyer.fs.schema.errors import file_error
from fireflyer.fs.schema.ids import ClientId
from fireflyer.fs.schema.inodes import (
    MAX_FILE_BYTES,
    MAX_NAME_BYTES,
    ROOT,
    DeviceDetails,
    DirectoryDetails,
    FileDetails,
    Inode,
    InodeId,
    Kind,
)  # fmt: skip
from fireflyer.kvstore import MemoryEngine
from fireflyer.kvstore.core.rows import encode_row
from fireflyer.kvstore.core.timing import SteppedTiming

__all__ = ["CorePlace"]

T = TypeVar("T")
CHAINS: Final = 3
CHUNK_BYTES: Final = 65536
PAGE: Final = 7
"""Entries of a listing at once."""
SERVICE: Final = 1
"""The session by which chunks are changed."""
STEP_NS: Final = 1_000_000
_FORMATS: Final = {
    Kind.FILE: stat.S_IFREG,
    Kind.DIRECTORY: stat.S_IFDIR,
    Kind.SYMLINK: stat.S_IFLNK,
    Kind.FIFO: stat.S_IFIFO,
    Kind.SOCKET: stat.S_IFSOCK,
    Kind.CHARACTER: stat.S_IFCHR,
    Kind.BLOCK: stat.S_IFBLK,
}
_KINDS: Final = {value: kind for kind, value in _FORMATS.items()} | {0: Kind.FILE}
_LOCKS: Final = {"none": meta.LockKind.NONE, "read": meta.LockKind.READ, "write": meta.LockKind.WRITE}


class _NoWaits(SteppedTiming):
    async def pause(self) -> None:
        return

    async def sleep(self, delay_ns: int) -> None:
        raise AssertionError("a single client has nobody to wait for")


def _finished(work: Awaitable[T]) -> T:
    waiting = work.__await__()
    try:
        next(waiting)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("it waits, and there is nothing to wait for")


@dataclass(slots=True)
class _Open:
    who: Identity
    inode: InodeId
    kind: Kind
    flags: int
    handle: int
    cut: int

    @property
    def reads(self) -> bool:
        return self.flags & os.O_ACCMODE != os.O_WRONLY

    @property
    def writes(self) -> bool:
        return self.flags & os.O_ACCMODE != os.O_RDONLY


class _Ports(Ports):
    """Of one request."""

    def __init__(self, place: CorePlace, requester: Requester, number: int) -> None:
        self._place = place
        self._asker = requester
        self._number = number

    @property
    def session(self) -> ClientId:
        return SERVICE

    @property
    def settle_ns(self) -> int:
        return 0

    @property
    def chunks(self) -> ChunkPort:
        return self._place.chunks

    async def transact(self, body: Callable[[Context], Awaitable[T]]) -> T:
        async def unanswered(context: Context) -> T:
            known = await replies.admit(context.rows, self._asker.client, "", self._number)
            if known is not None:
                raise Answered(known)
            return await body(context)

        return await self._place.transact(self._asker, unanswered, number=self._number, owner=self.session)

    async def together(self, work: Sequence[Callable[[], Awaitable[None]]]) -> None:
        for one in work:
            await one()

    async def pause(self, delay_ns: int, inode: InodeId) -> None:
        raise AssertionError("a single client has nobody to wait for")

    def now_ns(self) -> int:
        return self._place.now_ns

    def claim(self, inode: InodeId) -> bool:
        return True

    def release(self, inode: InodeId) -> None:
        return

    def inodes_in_doubt(self) -> Sequence[InodeId]:
        return ()

    def in_doubt(self, inode: InodeId) -> dict[Any, Any]:  # nothing fails here
        return {}


class CorePlace:
    def __init__(self, name: str = "core") -> None:
        self.name = name
        self.now_ns = time.time_ns()
        self.chunks = MemoryChunks(CHAINS)
        self.engine = MemoryEngine(waits=_NoWaits(lambda: self.now_ns, random.Random(1).randrange))
        self._ids = ROOT
        self._numbers = 0
        self._clients: dict[Identity, ClientId] = {}
        self._open: dict[int, _Open] = {}
        self._top = "/"
        self._base: InodeId = ROOT
        _finished(self.transact(Requester(SERVICE, 0, 0), _begin_session))
        _finished(
            self.engine.transact(lambda rows: dispatch.make_root(rows, now_ns=self.now_ns, uid=0, gid=0, mode=0o755))
        )

    # --- as a place ---

    @property
    def top(self) -> str:
        return self._top

    def renew(self, top: str) -> None:
        who = Identity(0, 0)
        found = self._ask(who, meta.MakeDirectory(meta.PathRef(ROOT, os.fsencode(top)), 0o777))
        self._top, self._base = top, found.inode.id

    def tick(self) -> None:
        self.now_ns += STEP_NS

    def call(self, who: Identity, name: str, arguments: tuple[Any, ...]) -> object:
        self.tick()
        return getattr(self, f"do_{name}")(who, *arguments)

    # --- requests ---

    async def transact(
        self, requester: Requester, body: Callable[[Context], Awaitable[T]], *, number: int = 0, owner: ClientId = 0
    ) -> T:
        cluster = ClusterDefaults(
            chains=CHAINS, chunk_bytes=CHUNK_BYTES, stripe=2, capacity_bytes=1 << 50, free_bytes=1 << 49
        )
        return await self.engine.transact(
            lambda rows: body(
                Context(
                    rows=rows,
                    requester=requester,
                    now_ns=self.now_ns,
                    new_id=self._new_id,
                    cluster=cluster,
                    number=number,
                    owner=owner,
                )
            )
        )

    def _new_id(self) -> InodeId:
        self._ids += 1
        return self._ids

    def _asker(self, who: Identity) -> Requester:
        client = self._clients.get(who)
        requester = Requester(
            client or len(self._clients) + SERVICE + 1, who.uid, who.gid, who.groups, unrestricted=who.uid == 0
        )
        if client is None:
            self._clients[who] = requester.client
            _finished(self.transact(requester, _begin_session))
        return requester

    def _ask(self, who: Identity, request: meta.Request) -> Any:
        requester = self._asker(who)
        self._numbers += 1
        number = self._numbers
        wrong = refusal(meta.Call(request, number))
        if wrong is not None:
            raise wrong
        try:
            answer = _finished(self.transact(requester, partial(dispatch.carry_out, request), number=number))
        except NotAtOnce:
            answer = _finished(procedures.carry_out_long(request, _Ports(self, requester, number)))
        if isinstance(answer, meta.ErrorReply):
            raise file_error(answer.errno, answer.message)
        return answer

    def _place(self, path: bytes) -> meta.PathRef:
        if not path:
            raise file_error(errno.ENOENT)
        return meta.PathRef(self._base, path)

    # --- with paths ---

    def _open_flags(self, flags: int) -> meta.OpenFlag:
        wanted = meta.OpenFlag(0)
        if flags & os.O_ACCMODE != os.O_WRONLY:
            wanted |= meta.OpenFlag.READ
        if flags & os.O_ACCMODE != os.O_RDONLY:
            wanted |= meta.OpenFlag.WRITE
        for theirs, ours in (
            (os.O_CREAT, meta.OpenFlag.CREATE),
            (os.O_EXCL, meta.OpenFlag.EXCLUSIVE),
            (os.O_TRUNC, meta.OpenFlag.TRUNCATE),
            (os.O_DIRECTORY, meta.OpenFlag.DIRECTORY),
        ):
            if flags & theirs == theirs:
                wanted |= ours
        return wanted if flags & os.O_NOFOLLOW else wanted | meta.OpenFlag.FOLLOW

    def do_open(self, who: Identity, number: int, path: bytes, flags: int, mode: int) -> None:
        wanted = self._open_flags(flags)
        handle = number if wanted & meta.OpenFlag.WRITE else 0
        found = self._ask(who, meta.Open(self._place(path), wanted, handle, mode & 0o7777)).inode
        cut = found.body.cut if isinstance(found.body, FileDetails) else 0
        self._open[number] = _Open(who, found.id, found.kind, flags, handle, cut)

    def do_stat(self, who: Identity, path: bytes) -> tuple[int, ...]:
        return _status(self._ask(who, meta.Stat(self._place(path))).inode)

    def do_lstat(self, who: Identity, path: bytes) -> tuple[int, ...]:
        return _status(self._ask(who, meta.Stat(self._place(path), follow=False)).inode)

    def do_mkdir(self, who: Identity, path: bytes, mode: int) -> None:
        self._ask(who, meta.MakeDirectory(self._place(path), mode & 0o1777))

    def do_mknod(self, who: Identity, path: bytes, mode: int, device: int) -> None:
        self._ask(who, meta.MakeNode(self._place(path), _KINDS[stat.S_IFMT(mode)], mode & 0o7777, device))

    def do_link(self, who: Identity, source: bytes, target: bytes, follow: bool) -> None:
        self._ask(who, meta.Link(self._place(source), self._place(target), follow))

    def do_symlink(self, who: Identity, target: bytes, path: bytes) -> None:
        self._ask(who, meta.Symlink(self._place(path), target))

    def do_readlink(self, who: Identity, path: bytes) -> bytes:
        return bytes(self._ask(who, meta.ReadLink(self._place(path))).path)

    def do_unlink(self, who: Identity, path: bytes) -> None:
        self._ask(who, meta.Remove(self._place(path)))

    def do_rmdir(self, who: Identity, path: bytes) -> None:
        self._ask(who, meta.RemoveDirectory(self._place(path)))

    def do_rename(self, who: Identity, source: bytes, target: bytes, flags: int) -> None:
        self._ask(who, meta.Rename(self._place(source), self._place(target), flags))

    def do_truncate(self, who: Identity, path: bytes, size: int) -> None:
        if size < 0:
            raise file_error(errno.EINVAL)
        self._ask(who, meta.Truncate(self._place(path), size))

    def do_chmod(self, who: Identity, path: bytes, mode: int) -> None:
        self._ask(who, meta.SetAttributes(self._place(path), mode=mode))

    def do_chown(self, who: Identity, path: bytes, uid: int, gid: int, follow: bool) -> None:
        self._ask(who, meta.SetAttributes(self._place(path), follow, uid=_given(uid), gid=_given(gid)))

    def do_utimens(
        self, who: Identity, path: bytes, atime: int | str | None, mtime: int | str | None, follow: bool
    ) -> None:
        if (atime, mtime) != (None, None):
            self._ask(who, meta.SetAttributes(self._place(path), follow, **_times(atime, mtime)))

    def do_access(self, who: Identity, path: bytes, mask: int) -> None:
        self._ask(who, meta.Access(self._place(path), mask))

    def _entries(self, who: Identity, path: bytes) -> list[meta.Entry]:
        flags = meta.OpenFlag.READ | meta.OpenFlag.DIRECTORY | meta.OpenFlag.FOLLOW
        directory = self._ask(who, meta.Open(self._place(path), flags)).inode.id
        found: list[meta.Entry] = []
        while True:
            page = self._ask(who, meta.ListDirectory(directory, found[-1].name if found else b"", PAGE))
            found += page.entries
            if not page.more:
                return found

    def do_listdir(self, who: Identity, path: bytes) -> list[bytes]:
        return [entry.name for entry in self._entries(who, path)]

    def do_scandir(self, who: Identity, path: bytes) -> list[tuple[bytes, int]]:
        return [(entry.name, _FORMATS[entry.kind]) for entry in self._entries(who, path)]

    def do_setxattr(self, who: Identity, path: bytes, name: bytes, value: bytes, flags: int, follow: bool) -> None:
        self._ask(who, meta.SetXattr(self._place(path), name, value, meta.XattrFlag(flags), follow))

    def do_getxattr(self, who: Identity, path: bytes, name: bytes, follow: bool) -> bytes:
        return bytes(self._ask(who, meta.GetXattr(self._place(path), name, follow)).value)

    def do_listxattr(self, who: Identity, path: bytes, follow: bool) -> list[bytes]:
        return sorted(self._ask(who, meta.ListXattrs(self._place(path), follow)).names)

    def do_removexattr(self, who: Identity, path: bytes, name: bytes, follow: bool) -> None:
        self._ask(who, meta.RemoveXattr(self._place(path), name, follow))

    def do_name_max(self, who: Identity, path: bytes) -> int:
        inode = self._ask(who, meta.Stat(self._place(path))).inode
        assert self._ask(who, meta.GetSpace(inode.id)).free_bytes > 0
        return MAX_NAME_BYTES

    # --- with what is open ---

    def _inode(self, opened: _Open) -> Inode:
        inode: Inode = self._ask(opened.who, meta.Stat(meta.PathRef(opened.inode))).inode
        return inode

    def do_close(self, who: Identity, number: int) -> None:
        opened = self._open.pop(number)
        if opened.handle:
            self._ask(who, meta.Close(opened.inode, opened.handle, 0, opened.cut, wrote=False))
        self._unlock(who, opened, meta.Window.WHOLE, number)
        self._unlock(who, opened, meta.Window.RANGE, 1)

    def _unlock(self, who: Identity, opened: _Open, window: meta.Window, owner: int) -> None:
        if opened.kind is Kind.FILE:
            self._ask(who, meta.Lock(opened.inode, window, owner, meta.LockKind.NONE))

    def do_pread(self, who: Identity, number: int, size: int, offset: int) -> bytes:
        opened = self._open[number]
        if not opened.reads:
            raise file_error(errno.EBADF)
        if opened.kind is Kind.DIRECTORY:
            raise file_error(errno.EISDIR)
        if offset < 0:
            raise file_error(errno.EINVAL)
        return self.chunks.read(self._inode(opened), size, offset)

    def do_pwrite(self, who: Identity, number: int, data: bytes, offset: int) -> int:
        opened = self._open[number]
        if not opened.writes:
            raise file_error(errno.EBADF)
        if offset < 0:
            raise file_error(errno.EINVAL)
        if offset + len(data) > MAX_FILE_BYTES:
            raise file_error(errno.EFBIG)
        if data:
            inode = self._inode(opened)
            opened.cut = inode.body.cut if isinstance(inode.body, FileDetails) else 0
            self.chunks.write(inode, data, offset)
            self._ask(who, meta.Report(opened.inode, opened.handle, offset + len(data), opened.cut))
        return len(data)

    def do_write(self, who: Identity, number: int, data: bytes) -> int:
        opened = self._open[number]
        assert opened.flags & os.O_APPEND
        if not opened.writes:
            raise file_error(errno.EBADF)
        reserved = self._ask(who, meta.Reserve(opened.inode, opened.handle, len(data)))
        opened.cut = reserved.inode.body.cut
        self.chunks.write(reserved.inode, data, reserved.offset)
        self._ask(who, meta.Report(opened.inode, opened.handle, reserved.offset + len(data), opened.cut))
        return len(data)

    def do_fstat(self, who: Identity, number: int) -> tuple[int, ...]:
        return _status(self._inode(self._open[number]))

    def do_ftruncate(self, who: Identity, number: int, size: int) -> None:
        opened = self._open[number]
        if not opened.writes or size < 0:
            raise file_error(errno.EINVAL)
        found = self._ask(who, meta.Truncate(meta.PathRef(opened.inode), size, opened.handle)).inode
        opened.cut = found.body.cut

    def do_fallocate(self, who: Identity, number: int, mode: int, offset: int, size: int) -> None:
        opened = self._open[number]
        modes = {
            0: meta.AllocateMode.DEFAULT,
            1: meta.AllocateMode.KEEP_SIZE,
            3: meta.AllocateMode.PUNCH_HOLE,
            16: meta.AllocateMode.ZERO_RANGE,
            17: meta.AllocateMode.PUNCH_HOLE,
        }
        if offset < 0 or size <= 0:
            raise file_error(errno.EINVAL)
        if mode not in modes:
            raise file_error(errno.EOPNOTSUPP)
        if not opened.writes:
            raise file_error(errno.EBADF)
        self._ask(who, meta.Allocate(opened.inode, opened.handle, modes[mode], offset, size))

    def do_fsync(self, who: Identity, number: int) -> None:
        assert number in self._open

    def do_fchmod(self, who: Identity, number: int, mode: int) -> None:
        self._ask(who, meta.SetAttributes(meta.PathRef(self._open[number].inode), mode=mode))

    def do_fchown(self, who: Identity, number: int, uid: int, gid: int) -> None:
        self._ask(who, meta.SetAttributes(meta.PathRef(self._open[number].inode), uid=_given(uid), gid=_given(gid)))

    def do_futimens(self, who: Identity, number: int, atime: int | str | None, mtime: int | str | None) -> None:
        self._ask(who, meta.SetAttributes(meta.PathRef(self._open[number].inode), **_times(atime, mtime)))

    def do_flock(self, who: Identity, number: int, operation: int) -> None:
        kinds = {
            fcntl.LOCK_SH: meta.LockKind.READ,
            fcntl.LOCK_EX: meta.LockKind.WRITE,
            fcntl.LOCK_UN: meta.LockKind.NONE,
        }
        kind = kinds[operation & ~fcntl.LOCK_NB]
        self._ask(who, meta.Lock(self._open[number].inode, meta.Window.WHOLE, number, kind))

    def _range(self, number: int, kind: str, start: int, size: int) -> meta.Lock:
        end = start + size if size else meta.END_OF_FILE
        return meta.Lock(self._open[number].inode, meta.Window.RANGE, 1, _LOCKS[kind], start, end)

    def do_lock(self, who: Identity, number: int, kind: str, start: int, size: int) -> None:
        opened = self._open[number]
        if (kind == "read" and not opened.reads) or (kind == "write" and not opened.writes):
            raise file_error(errno.EBADF)
        self._ask(who, self._range(number, kind, start, size))

    def do_get_lock(self, who: Identity, number: int, kind: str, start: int, size: int) -> tuple[str, int, int] | None:
        found = self._ask(who, meta.GetLock(self._range(number, kind, start, size))).lock
        if found is None:
            return None
        names = {value: name for name, value in _LOCKS.items()}
        return names[found.kind], found.start, 0 if found.end == meta.END_OF_FILE else found.end - found.start


async def _begin_session(context: Context) -> None:
    client = context.requester.client
    context.rows.set(SESSIONS.key(client), encode_row(SessionRow(client, "", "nonce")))
    await holds.enrol(context)


def _given(number: int) -> int | None:
    return None if number < 0 else number


def _times(atime: int | str | None, mtime: int | str | None) -> dict[str, Any]:
    given: dict[str, Any] = {"now": 0}
    for name, flag, value in (("atime_ns", meta.Now.ATIME, atime), ("mtime_ns", meta.Now.MTIME, mtime)):
        if isinstance(value, str):
            given["now"] |= flag
        else:
            given[name] = value
    return given


def _status(inode: Inode) -> tuple[int, ...]:
    body = inode.body
    links = inode.links
    if isinstance(body, DirectoryDetails) and links:
        links = 2 + body.subdirectories
    device = body.device if isinstance(body, DeviceDetails) else 0
    mode = _FORMATS[inode.kind] | inode.mode
    times = (inode.atime_ns, inode.mtime_ns, inode.ctime_ns)
    return (inode.id, mode, links, inode.uid, inode.gid, inode.length, device, *times)
