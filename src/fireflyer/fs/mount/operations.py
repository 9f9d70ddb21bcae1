"""What a file system says to the kernel: the operations that `serving` calls, and what they get and give.

Whoever implements `Operations` raises `OSError` with an errno; any other error is EIO to the program that asked. An
inode's number is used for one thing only, ever. All methods are called in one event loop, and run at the same time.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple, Protocol, TypeAlias

__all__ = [
    "MAX_LISTED", "Attributes", "Caller", "Changes", "Listing", "Opened", "Operations", "RangeLock", "Set", "Space",
    "Written",
]  # fmt: skip

MAX_LISTED: Final = 1024
"""Entries of one page of a directory."""


class Attributes(NamedTuple):
    """In the order in which the native side takes them. `mode`: with the kind, as `st_mode`."""

    inode: int
    mode: int
    links: int
    uid: int
    gid: int
    device: int
    size: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int


class Caller(NamedTuple):
    """The process that asks. `groups`: its supplementary ones; not looked up for uid 0."""

    uid: int
    gid: int
    pid: int
    groups: tuple[int, ...]


class Set(enum.IntFlag):
    """Which fields of `Changes` count: FUSE_SET_ATTR_*."""

    MODE = 1
    UID = 2
    GID = 4
    SIZE = 8
    ATIME = 16
    MTIME = 32
    ATIME_NOW = 128
    MTIME_NOW = 256


class Changes(NamedTuple):
    which: int
    mode: int
    uid: int
    gid: int
    size: int
    atime_ns: int
    mtime_ns: int


class Opened(NamedTuple):
    """`keep_pages`: what the kernel has of the file is still right. `direct`: it keeps none. `fd`: what is read and
    written there is natively done."""

    handle: int
    keep_pages: bool = False
    direct: bool = False
    fd: int = -1


class Listing(NamedTuple):
    """Without "." and "..", in an order that stays. `more`: behind the last of them."""

    entries: list[tuple[bytes, Attributes]]
    more: bool
    parent: int


class Space(NamedTuple):
    block_bytes: int
    blocks: int
    free_blocks: int
    files: int
    free_files: int
    name_bytes: int = 255


class RangeLock(NamedTuple):
    """`type`: F_RDLCK, F_WRLCK, F_UNLCK. Bytes [start, end); the largest end is that of any file."""

    type: int
    start: int
    end: int
    process: int


class Written(NamedTuple):
    """`forget`: the kernel has pages of the file that may be older."""

    size: int
    forget: bool = False


Buffer: TypeAlias = memoryview


class Operations(Protocol):
    async def lookup(self, caller: Caller, parent: int, name: bytes) -> Attributes: ...
    async def get_attributes(self, caller: Caller, inode: int, handle: int) -> Attributes: ...
    async def set_attributes(self, caller: Caller, inode: int, handle: int, changes: Changes) -> Attributes: ...
    async def access(self, caller: Caller, inode: int, mask: int) -> None:
        """Not asked where the kernel checks rights."""
        ...

    async def read_link(self, caller: Caller, inode: int) -> bytes: ...
    async def make_node(self, caller: Caller, parent: int, name: bytes, mode: int, device: int) -> Attributes: ...
    async def make_directory(self, caller: Caller, parent: int, name: bytes, mode: int) -> Attributes: ...
    async def make_symlink(self, caller: Caller, parent: int, name: bytes, target: bytes) -> Attributes: ...
    async def make_link(self, caller: Caller, inode: int, parent: int, name: bytes) -> Attributes: ...
    async def remove(self, caller: Caller, parent: int, name: bytes) -> None: ...
    async def remove_directory(self, caller: Caller, parent: int, name: bytes) -> None: ...
    async def rename(
        self, caller: Caller, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int
    ) -> None: ...
    async def open_directory(self, caller: Caller, inode: int) -> None: ...
    async def list_directory(
        self, caller: Caller, inode: int, after: bytes, limit: int, *, attributes: bool, opened: bool
    ) -> Listing:
        """At most `limit` entries behind the name `after`. Without `attributes` only inode and kind are right.
        `caller`: who opened it; `opened`: the caller has been told a page before."""
        ...

    async def space(self, caller: Caller, inode: int) -> Space: ...

    async def open(self, caller: Caller, inode: int, flags: int) -> Opened: ...
    async def create(
        self, caller: Caller, parent: int, name: bytes, mode: int, flags: int
    ) -> tuple[Attributes, Opened]: ...
    async def read(self, handle: int, offset: int, memory: Buffer) -> int: ...
    def chains_of(self, handle: int, offset: int, size: int) -> tuple[int, ...]:
        """That such a read may wait for."""
        ...

    def answered_ns(self, chain: int) -> int:
        """When it has last answered a read, by `time.monotonic_ns`; 0: never."""
        ...

    async def write(self, handle: int, offset: int, memory: Buffer) -> Written:
        """`memory` may be kept: nobody changes it any more."""
        ...

    async def flush(self, handle: int, owner: int) -> None:
        """A descriptor of the open file is closed: its errors are told here."""
        ...

    async def sync(self, handle: int, *, data_only: bool) -> None: ...
    async def release(self, handle: int, owner: int, *, unlock: bool) -> None:
        """The open file is over. `unlock`: its whole-file lock of that owner is, too."""
        ...

    async def allocate(self, handle: int, mode: int, offset: int, size: int) -> None: ...

    async def get_xattr(self, caller: Caller, inode: int, name: bytes) -> bytes: ...
    async def set_xattr(self, caller: Caller, inode: int, name: bytes, value: bytes, flags: int) -> None: ...
    async def list_xattrs(self, caller: Caller, inode: int) -> list[bytes]: ...
    async def remove_xattr(self, caller: Caller, inode: int, name: bytes) -> None: ...

    async def find_lock(self, caller: Caller, inode: int, owner: int, lock: RangeLock) -> RangeLock | None:
        """That is in the way of this one."""
        ...

    async def lock(self, caller: Caller, inode: int, owner: int, lock: RangeLock, *, handle: int, wait: bool) -> bool:
        """Cancelled when who waits is interrupted. Granted: what the kernel has of the file may be old."""
        ...

    async def lock_whole(self, caller: Caller, inode: int, owner: int, operation: int, *, wait: bool) -> bool:
        """`operation`: LOCK_SH, LOCK_EX, LOCK_UN."""
        ...
