"""A local directory, mounted: what the mount's layer costs by itself, and a file system whose behaviour is known.

    python -m tests.support.fs.mounts.local_directory SOURCE PLACE natively|events|held

mounts SOURCE on PLACE, says "Mounted", and "finished" when it is unmounted.

Reads and writes are native, names go through Python: so this has the same path as a mount of files, but for their
client. Its numbers of inodes are the directory's own; each inode that was seen is held open, so none is used again.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import resource
import stat
import sys
from typing import Final

from fireflyer.fs.mount.daemon import MountOptions, serve_mount
from fireflyer.fs.mount.metrics import MountUsage
from fireflyer.fs.mount.operations import Attributes, Caller, Changes, Listing, Opened, RangeLock, Set, Space, Written

__all__ = ["LocalFiles"]

_ROOT: Final = 1


class LocalFiles:
    """As `Operations`. `natively`: reads and writes do not come here. One file system; no other below the directory."""

    def __init__(self, directory: str, *, natively: bool = True) -> None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._natively = natively
        self._nodes = {_ROOT: os.open(directory, os.O_PATH | os.O_DIRECTORY)}
        self._root_number = os.fstat(self._nodes[_ROOT]).st_ino
        self._files: dict[int, int] = {}
        self._next = 1
        self._whole: dict[int, dict[int, int]] = {}
        self._changed = asyncio.Condition()

    # --- names

    def _attributes(self, found: os.stat_result) -> Attributes:
        number = _ROOT if found.st_ino == self._root_number else found.st_ino
        return Attributes(
            number, found.st_mode, found.st_nlink, found.st_uid, found.st_gid, found.st_rdev, found.st_size,
            found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns,
        )  # fmt: skip

    def _see(self, parent: int, name: bytes) -> Attributes:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self._nodes[parent])
        found = self._attributes(os.fstat(fd))
        if found.inode in self._nodes:
            os.close(fd)
        else:
            self._nodes[found.inode] = fd
        return found

    def _path(self, inode: int) -> str:
        return f"/proc/self/fd/{self._nodes[inode]}"

    def _own(self, caller: Caller, parent: int, name: bytes) -> Attributes:
        """What was made belongs to who made it."""
        if (caller.uid, caller.gid) != (0, 0):
            above = os.fstat(self._nodes[parent])
            gid = above.st_gid if above.st_mode & stat.S_ISGID else caller.gid
            os.chown(name, caller.uid, gid, dir_fd=self._nodes[parent], follow_symlinks=False)
        return self._see(parent, name)

    async def lookup(self, caller: Caller, parent: int, name: bytes) -> Attributes:
        return self._see(parent, name)

    async def get_attributes(self, caller: Caller, inode: int, handle: int) -> Attributes:
        return self._attributes(os.fstat(self._nodes[inode]))

    async def set_attributes(self, caller: Caller, inode: int, handle: int, changes: Changes) -> Attributes:
        which = Set(changes.which)
        path, fd = self._path(inode), self._nodes[inode]
        if Set.UID in which or Set.GID in which:
            uid, gid = (changes.uid if Set.UID in which else -1), (changes.gid if Set.GID in which else -1)
            os.chown(path, uid, gid)
        if Set.MODE in which:
            os.chmod(path, changes.mode)
        if Set.SIZE in which:
            os.truncate(path, changes.size)
        if which & (Set.ATIME | Set.MTIME):
            now = os.fstat(fd)
            atime = changes.atime_ns if Set.ATIME in which else now.st_atime_ns
            mtime = changes.mtime_ns if Set.MTIME in which else now.st_mtime_ns
            os.utime(path, ns=(atime, mtime))
        return self._attributes(os.fstat(fd))

    async def access(self, caller: Caller, inode: int, mask: int) -> None:
        pass

    async def read_link(self, caller: Caller, inode: int) -> bytes:
        return os.readlink(b"", dir_fd=self._nodes[inode])

    async def make_node(self, caller: Caller, parent: int, name: bytes, mode: int, device: int) -> Attributes:
        os.mknod(name, mode, device, dir_fd=self._nodes[parent])
        return self._own(caller, parent, name)

    async def make_directory(self, caller: Caller, parent: int, name: bytes, mode: int) -> Attributes:
        os.mkdir(name, mode, dir_fd=self._nodes[parent])
        return self._own(caller, parent, name)

    async def make_symlink(self, caller: Caller, parent: int, name: bytes, target: bytes) -> Attributes:
        os.symlink(target, name, dir_fd=self._nodes[parent])
        return self._own(caller, parent, name)

    async def make_link(self, caller: Caller, inode: int, parent: int, name: bytes) -> Attributes:
        os.link(self._path(inode), name, dst_dir_fd=self._nodes[parent], follow_symlinks=True)
        return self._see(parent, name)

    async def remove(self, caller: Caller, parent: int, name: bytes) -> None:
        os.unlink(name, dir_fd=self._nodes[parent])

    async def remove_directory(self, caller: Caller, parent: int, name: bytes) -> None:
        os.rmdir(name, dir_fd=self._nodes[parent])

    async def rename(
        self, caller: Caller, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int
    ) -> None:
        if flags:
            raise OSError(errno.EINVAL, "no flags of rename here")
        os.rename(name, new_name, src_dir_fd=self._nodes[parent], dst_dir_fd=self._nodes[new_parent])

    async def open_directory(self, caller: Caller, inode: int) -> None:
        pass

    async def list_directory(
        self, caller: Caller, inode: int, after: bytes, limit: int, *, attributes: bool, opened: bool
    ) -> Listing:
        names = sorted(name for name in map(os.fsencode, os.listdir(self._path(inode))) if name > after)
        above = self._attributes(os.stat("..", dir_fd=self._nodes[inode]))
        entries = [(name, self._see(inode, name)) for name in names[:limit]]
        return Listing(entries, len(names) > limit, _ROOT if inode == _ROOT else above.inode)

    async def space(self, caller: Caller, inode: int) -> Space:
        found = os.statvfs(self._path(_ROOT))
        return Space(found.f_frsize, found.f_blocks, found.f_bavail, found.f_files, found.f_favail, found.f_namemax)

    # --- files

    def _opened(self, inode: int, flags: int) -> Opened:
        kept = flags & ~(os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_DIRECT)
        fd = os.open(self._path(inode), kept | os.O_CLOEXEC)
        handle = self._next
        self._next += 1
        self._files[handle] = fd
        return Opened(handle, fd=os.dup(fd)) if self._natively else Opened(handle)

    async def open(self, caller: Caller, inode: int, flags: int) -> Opened:
        return self._opened(inode, flags)

    async def create(
        self, caller: Caller, parent: int, name: bytes, mode: int, flags: int
    ) -> tuple[Attributes, Opened]:
        os.close(os.open(name, os.O_CREAT | os.O_WRONLY | (flags & os.O_EXCL), mode, dir_fd=self._nodes[parent]))
        made = self._own(caller, parent, name)
        return made, self._opened(made.inode, flags)

    def chains_of(self, handle: int, offset: int, size: int) -> tuple[int, ...]:
        return ()

    def answered_ns(self, chain: int) -> int:
        return 0

    async def read(self, handle: int, offset: int, memory: memoryview) -> int:
        return os.preadv(self._files[handle], [memory], offset)

    async def write(self, handle: int, offset: int, memory: memoryview) -> Written:
        return Written(os.pwritev(self._files[handle], [memory], offset))

    async def flush(self, handle: int, owner: int) -> None:
        pass

    async def sync(self, handle: int, *, data_only: bool) -> None:
        os.fsync(self._files[handle])

    async def release(self, handle: int, owner: int, *, unlock: bool) -> None:
        os.close(self._files.pop(handle))
        if unlock:
            await self._unlock(owner)

    async def allocate(self, handle: int, mode: int, offset: int, size: int) -> None:
        if mode:
            raise OSError(errno.EOPNOTSUPP, "no such kind of allocation here")
        os.posix_fallocate(self._files[handle], offset, size)

    # --- extended attributes

    async def get_xattr(self, caller: Caller, inode: int, name: bytes) -> bytes:
        return os.getxattr(self._path(inode), name)

    async def set_xattr(self, caller: Caller, inode: int, name: bytes, value: bytes, flags: int) -> None:
        os.setxattr(self._path(inode), name, value, flags)

    async def list_xattrs(self, caller: Caller, inode: int) -> list[bytes]:
        return [os.fsencode(name) for name in os.listxattr(self._path(inode))]

    async def remove_xattr(self, caller: Caller, inode: int, name: bytes) -> None:
        os.removexattr(self._path(inode), name)

    # --- locks: of whole files, by this table; of ranges, by the kernel

    async def find_lock(self, caller: Caller, inode: int, owner: int, lock: RangeLock) -> RangeLock | None:
        raise OSError(errno.ENOSYS, "the kernel's own are enough here")

    async def lock(self, caller: Caller, inode: int, owner: int, lock: RangeLock, *, handle: int, wait: bool) -> bool:
        raise OSError(errno.ENOSYS, "the kernel's own are enough here")

    async def lock_whole(self, caller: Caller, inode: int, owner: int, operation: int, *, wait: bool) -> bool:
        if operation == fcntl.LOCK_UN:
            await self._unlock(owner)
            return False
        held = self._whole.setdefault(inode, {})
        async with self._changed:
            while any(other != owner and fcntl.LOCK_EX in (operation, kind) for other, kind in held.items()):
                if not wait:
                    raise BlockingIOError(errno.EAGAIN, "it is locked")
                await self._changed.wait()
            held[owner] = operation
        return False

    async def _unlock(self, owner: int) -> None:
        async with self._changed:
            for held in self._whole.values():
                held.pop(owner, None)
            self._changed.notify_all()


class Finishing(LocalFiles):
    @property
    def held(self) -> MountUsage:
        return MountUsage(0, 0, 0)

    async def finish(self) -> None:
        print("finished", flush=True)


class Waiting(Finishing):
    """Reads, and who looks for "held", wait until somebody looks for "go"; "read" is there when as many reads are under
    way as there is memory for."""

    def __init__(self, source: str) -> None:
        super().__init__(source, natively=False)
        self.go, self.waiting = asyncio.Event(), 0

    async def read(self, handle: int, offset: int, memory: memoryview) -> int:
        self.waiting += 1
        await self.go.wait()
        return await super().read(handle, offset, memory)

    async def lookup(self, caller: Caller, parent: int, name: bytes) -> Attributes:
        if name == b"go":
            self.go.set()
        if name == b"held":
            await self.go.wait()
        return await super().lookup(caller, parent, b"file" if name == b"read" and self.waiting >= 96 else name)


async def _main(source: str, place: str, how: str) -> None:
    files = Waiting(source) if how == "held" else Finishing(source, natively=how == "natively")
    await serve_mount(place, files, MountOptions(allow_other=True), on_ready=lambda _: print("Mounted", flush=True))


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
