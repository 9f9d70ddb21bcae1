"""Files for asyncio: names, attributes, open files, over the meta service and the chunk store.

    async with await connect_async("ff:///dir") as files:
        await files.makedirs("/data/train")
        async with await files.open("/data/train/a", "wb") as file:
            await file.pwrite(array, 0)

Paths are str, bytes or PathLike, from the root of the file system. Errors are `FileError`: an `OSError` with errno and
filename. `fireflyer.fs.client.files.file_system` has the same names for threads.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import Any, Final, Self, TypeAlias, TypeVar

from fireflyer.base.errors import InvariantViolation
from fireflyer.fs.client.files.attributes import Attributes, ChildPath, DirEntry, Statvfs, path_bytes, text_of
from fireflyer.fs.client.files.modes import flags_of
from fireflyer.fs.client.files.open_file import File
from fireflyer.fs.client.files.open_file_table import FileOptions, OpenFileTable
from fireflyer.fs.client.files.open_inode import as_file_error
from fireflyer.fs.client.files.port import Port
from fireflyer.fs.client.fork_safety import refuse_pickling
from fireflyer.fs.schema.errors import FileError, file_error
from fireflyer.fs.schema.ids import ChainId
from fireflyer.fs.schema.inodes import MAX_PATH_BYTES, ROOT, Defaults, Inode, Kind
from fireflyer.fs.schema.meta import (
    MAX_LISTED,
    MAX_VALUE_NAME_BYTES,
    Access,
    Actor,
    Answer,
    Entry,
    Found,
    FoundMany,
    GetQuota,
    GetSpace,
    GetXattr,
    Link,
    ListDirectory,
    Listing,
    ListXattrs,
    MakeDirectory,
    MakeNode,
    Now,
    PathRef,
    QuotaTree,
    ReadLink,
    Remove,
    Removed,
    RemoveDirectory,
    RemoveTree,
    RemoveXattr,
    Rename,
    Request,
    SetAttributes,
    SetDefaults,
    SetQuota,
    SetXattr,
    Space,
    Stat,
    StatMany,
    Symlink,
    Target,
    Truncate,
    XattrFlag,
    XattrNames,
    XattrValue,
)

__all__ = ["Files", "Path"]

Path: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]
_T = TypeVar("_T")
_STATS: Final = 256
"""Of one request."""
_BLOCK: Final = 4096
_LOOK_S: Final = 5.0
_NANO: Final = 1_000_000_000


class Files:
    """Made by `connect_async`; for one event loop. (`FileSystem` drives the same coroutines in threads.)"""

    __reduce__ = refuse_pickling

    def __init__(self, port: Port, options: FileOptions, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """`close`: of what the port uses."""
        self.meta = port.meta
        self.open_files = OpenFileTable(port, options)
        self._port = port
        self._close = close
        self._umask = process_umask() if options.umask is None else options.umask
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to look after what has been written, in this event loop."""
        self._looking = asyncio.get_running_loop().create_task(self._maintain())

    async def _maintain(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            await self.open_files.maintain()

    def answered_ns(self, chain: ChainId) -> int:
        """When it has last answered a read of this client, by `time.monotonic_ns`; 0: never."""
        return self._port.answered_ns.get(chain, 0)

    # --- what there is ---

    async def stat(self, path: Path, follow: bool = True) -> Attributes:
        return self._attributes(await self._found(Stat(_place(path), follow), path))

    async def lstat(self, path: Path) -> Attributes:
        return await self.stat(path, follow=False)

    async def exists(self, path: Path) -> bool:
        try:
            await self.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    async def stat_many(self, paths: Iterable[Path], follow: bool = True) -> list[Attributes | FileError]:
        """In their order; an error in the place of what it is of."""
        asked = list(paths)
        found = await self._stat_places([_place(one) for one in asked], follow)
        return [
            file_error(one, "", _shown(path)) if isinstance(one, int) else self._attributes(one)
            for path, one in zip(asked, found, strict=True)
        ]

    async def stat_inodes(self, inodes: Iterable[int]) -> list[Attributes | FileError]:
        """The same of inodes, whatever their names, and those that have none any more."""
        found = await self._stat_places([PathRef(one) for one in inodes], False)
        return [file_error(one) if isinstance(one, int) else self._attributes(one) for one in found]

    async def _stat_places(self, places: list[PathRef], follow: bool) -> list[Inode | int]:
        futures = [
            self._port.call(StatMany(tuple(places[at : at + _STATS]), follow)) for at in range(0, len(places), _STATS)
        ]
        found: list[Inode | int] = []
        for future in futures:
            found += _as(FoundMany, await future).inodes
        return found

    def told(self, inode: Inode) -> Inode:
        """As the service has answered, with the length and times of what was written by this client and is not reported
        yet, and not older than what is known of an open file."""
        body = self.open_files.bodies.get(inode.id)
        return inode if body is None else body.told(inode)

    def known(self, inode: Inode) -> int:
        """Its length by `told`."""
        return self.told(inode).length

    def _attributes(self, inode: Inode) -> Attributes:
        inode = self.told(inode)
        return Attributes(inode, inode.length)

    async def listdir(self, path: Path = "/") -> list[Any]:
        """Names, in the order of their bytes: str, or bytes where the path is bytes."""
        raw = isinstance(path, bytes)
        return [one.name if raw else text_of(one.name) async for one in self._entries(path, inodes=False)]

    async def scandir(self, path: Path = "/") -> AsyncIterator[DirEntry]:
        """Entries with their attributes."""
        prefix = text_of(path_bytes(path)).rstrip("/") + "/"
        async for one in self._entries(path, inodes=True):
            if one.inode is not None:
                name = text_of(one.name)
                yield DirEntry(name, prefix + name, self._attributes(one.inode))

    async def walk(self, top: Path = "/") -> AsyncIterator[tuple[str, list[DirEntry], list[DirEntry]]]:
        """From the top down: (directory, its directories, all else). Symbolic links are not followed. The caller may
        take directories out of the list."""
        waiting = [text_of(path_bytes(top))]
        while waiting:
            path = waiting.pop()
            directories: list[DirEntry] = []
            others: list[DirEntry] = []
            async for one in self.scandir(path):
                (directories if one.is_dir() else others).append(one)
            yield path, directories, others
            waiting += [one.path for one in reversed(directories)]

    async def _entries(self, path: Path, *, inodes: bool) -> AsyncIterator[Entry]:
        directory = await self._found(Stat(_place(path)), path)
        if directory.kind is not Kind.DIRECTORY:
            raise file_error(errno.ENOTDIR, "", _shown(path))
        after, more = b"", True
        while more:
            page = _as(Listing, await self._call(ListDirectory(directory.id, after, MAX_LISTED, inodes), path))
            for one in page.entries:
                if one.name in (b".", b"..") or b"/" in one.name or b"\0" in one.name:
                    raise file_error(errno.EIO, f"the service lists {one.name!r}, which is no name", _shown(path))
                yield one
            more = page.more and bool(page.entries)
            after = page.entries[-1].name if page.entries else after

    async def access(self, path: Path, mask: int, follow: bool = True) -> bool:
        """`mask`: of `os.R_OK`, `os.W_OK`, `os.X_OK`; 0: is it there?"""
        try:
            await self._call(Access(_place(path), mask, follow), path)
        except (PermissionError, FileNotFoundError, NotADirectoryError):
            return False
        return True

    async def readlink(self, path: Path) -> Any:
        target = _as(Target, await self._call(ReadLink(_place(path)), path)).path
        return target if isinstance(path, bytes) else text_of(target)

    async def statvfs(self, path: Path = "/") -> Statvfs:
        inode = await self._found(Stat(_place(path)), path)
        return await self.statvfs_inode(inode.id, path=path)

    async def statvfs_inode(self, inode: int, *, path: Path | None = None) -> Statvfs:
        """As `statvfs`, of what has this number. ESTALE when it is gone."""
        space = _as(Space, await self._call(GetSpace(inode), path))
        free = space.free_bytes // _BLOCK
        files = space.inodes + space.free_inodes
        return Statvfs(
            1 << 20, _BLOCK, space.capacity_bytes // _BLOCK, free, free,
            files, space.free_inodes, space.free_inodes, 0, 255,
        )  # fmt: skip

    # --- changing names ---

    async def mkdir(self, path: Path, permissions: int = 0o777) -> None:
        await self._call(MakeDirectory(_place(path), _mode(permissions & ~self._umask)), path)

    async def makedirs(self, path: Path, permissions: int = 0o777, exist_ok: bool = False) -> None:
        """With what is missing of the directories above, which get the same permissions."""
        try:
            await self.mkdir(path, permissions)
        except FileNotFoundError:
            above = path_bytes(path).rstrip(b"/").rpartition(b"/")[0]
            if not above:
                raise
            await self.makedirs(above, permissions, exist_ok=True)
            await self.makedirs(path, permissions, exist_ok)
        except FileExistsError:
            if not exist_ok or not (await self.stat(path)).is_dir():
                raise

    async def rmdir(self, path: Path) -> None:
        await self._call(RemoveDirectory(_place(path)), path)

    async def unlink(self, path: Path) -> None:
        await self._call(Remove(_place(path)), path)

    async def rmtree(self, path: Path, progress: Callable[[int], None] | None = None) -> None:
        """With all that is in it. `progress` hears how many names are gone."""
        removed, more = 0, True
        while more:
            answer = _as(Removed, await self._call(RemoveTree(_place(path)), path))
            removed, more = removed + answer.names, answer.more
            if progress is not None:
                progress(removed)

    async def rename(self, source: Path, target: Path, flags: int = 0) -> None:
        """`flags`: `schema.meta.RenameFlag`. Replaces what is at `target`, as `os.rename` does."""
        try:
            await self._call(Rename(_place(source), _place(target), flags), source)
        except FileError as error:
            error.filename2 = _shown(target)
            raise

    async def link(self, existing: Path, path: Path, follow: bool = False) -> None:
        await self._call(Link(_place(existing), _place(path), follow), path)

    async def symlink(self, target: Path, path: Path) -> None:
        await self._call(Symlink(_place(path), _sendable(path_bytes(target))), path)

    async def mknod(self, path: Path, kind: Kind, permissions: int = 0o666, device: int = 0) -> None:
        await self._call(MakeNode(_place(path), kind, _mode(permissions & ~self._umask), device), path)

    # --- changing attributes ---

    async def chmod(self, path: Path, mode: int, follow: bool = True) -> None:
        await self.set_attributes(SetAttributes(_place(path), follow, mode=_mode(mode)), path=path)

    async def chown(self, path: Path, uid: int, gid: int, follow: bool = True) -> None:
        """-1: stays."""
        owner, group = None if uid == -1 else uid, None if gid == -1 else gid
        await self.set_attributes(SetAttributes(_place(path), follow, uid=owner, gid=group), path=path)

    async def utime(
        self, path: Path, times: tuple[float, float] | None = None, *, ns: tuple[int, int] | None = None,
        follow: bool = True,
    ) -> None:  # fmt: skip
        """Of access and of modification; now where neither is given. As `os.utime`."""
        if ns is None and times is not None:
            ns = int(times[0] * _NANO), int(times[1] * _NANO)
        if ns is None:
            change = SetAttributes(_place(path), follow, now=Now.ATIME | Now.MTIME)
        else:
            change = SetAttributes(_place(path), follow, atime_ns=ns[0], mtime_ns=ns[1])
        await self.set_attributes(change, path=path)

    async def set_attributes(
        self, change: SetAttributes, *, actor: Actor | None = None, path: Path | None = None
    ) -> Inode:
        """What this client has written to the file, and not told yet, comes before it."""
        body = None if change.place.path else self.open_files.bodies.get(change.place.base)
        if body is not None and body.unreported:
            try:
                return await body.set_attributes(change, actor)
            except FileError as error:
                raise as_file_error(error, None if path is None else _shown(path)) from None
        await self.open_files.settle(change.place, change.follow, actor)
        inode = _as(Found, await self._call(change, path, actor)).inode
        body = self.open_files.bodies.get(inode.id)
        if body is not None:
            body.learn(inode, writing=False)
        return inode

    async def truncate(self, path: Path, length: int) -> None:
        """The file has `length` bytes then; new ones are zeros."""
        if length < 0:
            raise file_error(errno.EINVAL, f"length {length} is negative", _shown(path))
        await self.truncate_at(_place(path), length, path=path)

    async def truncate_at(
        self, place: PathRef, length: int, *, actor: Actor | None = None, path: Path | None = None
    ) -> Inode:
        await self.open_files.settle(place, True, actor)
        inode = _as(Found, await self._call(Truncate(place, length), path, actor)).inode
        body = self.open_files.bodies.get(inode.id)
        if body is not None:
            body.learn(inode, writing=True)
            body.forget(0, 1 << 62)
        return inode

    # --- extended attributes, areas, defaults ---

    async def getxattr(self, path: Path, name: str | bytes, follow: bool = True) -> bytes:
        return _as(XattrValue, await self._call(GetXattr(_place(path), _xattr_name(name), follow), path)).value

    async def setxattr(
        self, path: Path, name: str | bytes, value: bytes, flag: XattrFlag = XattrFlag.ANY, follow: bool = True
    ) -> None:
        await self._call(SetXattr(_place(path), _xattr_name(name), bytes(value), flag, follow), path)

    async def listxattr(self, path: Path, follow: bool = True) -> list[str]:
        names = _as(XattrNames, await self._call(ListXattrs(_place(path), follow), path)).names
        return [text_of(one) for one in names]

    async def removexattr(self, path: Path, name: str | bytes, follow: bool = True) -> None:
        await self._call(RemoveXattr(_place(path), _xattr_name(name), follow), path)

    async def get_quota(self, path: Path) -> QuotaTree:
        """Use and limits of the quota tree of which this directory is the root. ENODATA if it is none."""
        return _as(QuotaTree, await self._call(GetQuota(_place(path)), path))

    async def set_quota(self, path: Path, *, bytes: int | None = None, inodes: int | None = None) -> QuotaTree:  # noqa: A002
        """Both None: it is none any more."""
        return _as(QuotaTree, await self._call(SetQuota(_place(path), bytes, inodes), path))

    async def set_defaults(self, path: Path, defaults: Defaults) -> None:
        await self._call(SetDefaults(_place(path), defaults), path)

    # --- open files ---

    async def open(self, path: Path, mode: str | int = "rb", permissions: int = 0o666, *, follow: bool = True) -> File:
        """`mode`: as of the builtin (binary; "a" counts as "w" without truncating: use `append`), or flags of `os`."""
        return await self.open_at(
            _place(path), flags_of(mode, follow=follow), _mode(permissions & ~self._umask), path=path
        )

    async def open_at(
        self,
        place: PathRef,
        flags: int,
        permissions: int = 0o666,
        *,
        actor: Actor | None = None,
        path: Path | None = None,
    ) -> File:
        """`flags`: `schema.meta.OpenFlag`."""
        shown = None if path is None else _shown(path)
        try:
            return await self.open_files.open(place, flags, permissions, actor, shown)
        except FileError as error:
            raise as_file_error(error, shown) from None

    async def read_batch(self, reads: Sequence[tuple[File, int, Any]]) -> list[int]:
        """Of each (file, offset, buffer) how many bytes there were; all at once, straight into the buffers."""
        futures = [self._begin(file.pread_into(buffer, offset)) for file, offset, buffer in reads]
        return [await one for one in futures]

    async def write_batch(self, writes: Sequence[tuple[File, int, Any]]) -> list[int]:
        """(file, offset, data). When it returns all of it is at the storage nodes."""
        counts = [await file.pwrite(data, offset) for file, offset, data in writes]
        for file in dict.fromkeys(file for file, _, _ in writes):
            await file.flush()
        return counts

    def _begin(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        return asyncio.get_running_loop().create_task(work)

    # --- the end ---

    async def close(self) -> None:
        """Closes all files (which writes what waits) and ends the session. Raises the first error of a file."""
        if self._looking is not None:
            self._looking.cancel()
        try:
            await self.open_files.close()
        finally:
            await self._close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _call(self, request: Request, path: Path | None, actor: Actor | None = None) -> Answer:
        self.open_files.check()
        try:
            return await self._port.call(request, actor)
        except FileError as error:
            raise file_error(error.errno or errno.EIO, error.message, None if path is None else _shown(path)) from None

    async def _found(self, request: Request, path: Path) -> Inode:
        return _as(Found, await self._call(request, path)).inode


def _place(path: Path) -> PathRef:
    """From the root, with or without a slash in front. An empty path is ENOENT, as everywhere."""
    directory = path.directory if isinstance(path, ChildPath) else None
    name = path_bytes(path.name if isinstance(path, ChildPath) else path)
    if not name and directory is None:
        raise file_error(errno.ENOENT, "the path is empty", "")
    if b"\0" in name:
        raise file_error(errno.EINVAL, "the path contains a zero byte", text_of(name.replace(b"\0", b"\\0")))
    return PathRef(ROOT if directory is None else directory, _sendable(name))


def _sendable(path: bytes) -> bytes:
    """Of one that is much too long as much as can be sent: the service has the right error for it."""
    return path[: 2 * MAX_PATH_BYTES]


def _mode(permissions: int) -> int:
    """What of it chmod looks at: programs give the kind as well, as `stat` told it."""
    return permissions & 0o7777


def _xattr_name(name: str | bytes) -> bytes:
    return path_bytes(name)[:MAX_VALUE_NAME_BYTES]


def process_umask() -> int:
    """Without setting it, which other threads would see."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o022


def _shown(path: Path) -> str:
    return text_of(path_bytes(path))


def _as(kind: type[_T], answer: Any) -> _T:
    if not isinstance(answer, kind):
        raise InvariantViolation(f"the meta service answered with {type(answer).__name__}, not {kind.__name__}")
    return answer
