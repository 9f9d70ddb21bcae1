"""Requests to the meta service that change something, and the opening of files."""

from __future__ import annotations

import enum
from typing import Annotated, ClassVar, TypeAlias

import msgspec

from fireflyer.fs.schema.inodes import MAX_FILE_BYTES, MAX_PATH_BYTES, Defaults, InodeId, Kind
from fireflyer.fs.schema.meta.fields import (
    END_OF_FILE,
    MAX_HELD,
    U32,
    U63,
    Handle,
    Length,
    Mode,
    Offset,
    PathRef,
    Time,
    XattrData,
    XattrName,
)

__all__ = [
    "Allocate",
    "AllocateMode",
    "Changing",
    "ClientHeartbeat",
    "Close",
    "Link",
    "Lock",
    "LockKind",
    "MakeDirectory",
    "MakeNode",
    "Now",
    "Open",
    "OpenFlag",
    "Remove",
    "RemoveDirectory",
    "RemoveTree",
    "RemoveXattr",
    "Rename",
    "RenameFlag",
    "Report",
    "Reserve",
    "SetAttributes",
    "SetDefaults",
    "SetQuota",
    "SetXattr",
    "Symlink",
    "Truncate",
    "Window",
    "XattrFlag",
]


class OpenFlag(enum.IntFlag):
    READ = 1
    WRITE = 2
    CREATE = 4
    EXCLUSIVE = 8
    """With CREATE: EEXIST when there is anything, a symbolic link too."""
    TRUNCATE = 16
    FOLLOW = 32
    """A symbolic link at the end; without it ELOOP."""
    EXECUTE = 64
    """Checked instead of READ, for the mount's `execve`."""
    DIRECTORY = 128
    """ENOTDIR for anything else. A directory is opened for reading only: EISDIR."""


class Open(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """Answered by `Opened`. Numbered if it creates, truncates or opens for writing. Opening fifos, sockets and devices
    is the client's kernel's: ENXIO here."""

    place: PathRef
    flags: Annotated[int, msgspec.Meta(ge=0, le=255)]
    handle: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0
    """With WRITE: not 0."""
    mode: Mode = 0o666
    """Of what is created; the client has taken its umask off."""


class Report(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """Bytes were written, and are durable, up to `end` (0: none beyond the length known), when the file was at `cut`.
    Answered by `Found`, whose length is right for everything that was reported. `wrote`: since the last report, so
    that times change, and set-user-id falls. `written_ns`: when that was, by the client's clock (Unix); 0: now. Sent at
    fsync and now and then."""

    inode: InodeId
    handle: Handle
    end: Length
    cut: U63
    wrote: bool = True
    written_ns: U63 = 0


class Close(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """The last `Report` of this handle, and its end. Answered by `Found`. `lazy`: there is nothing to be reported, and
    nobody waits: `end`, `cut`, `wrote` and `written_ns` mean nothing, and it is done together with the next request, or
    some time later."""

    inode: InodeId
    handle: Handle
    end: Length
    cut: U63
    wrote: bool = True
    written_ns: U63 = 0
    lazy: bool = False


class Reserve(msgspec.Struct, frozen=True, array_like=True, tag=23):
    """`size` bytes at the end of the file, for O_APPEND: the length grows at once, to be written by this client alone.
    Answered by `Reserved`."""

    inode: InodeId
    handle: Handle
    size: Annotated[int, msgspec.Meta(ge=1, le=MAX_FILE_BYTES)]
    written_ns: U63 = 0
    """As in `Report`."""


class Truncate(msgspec.Struct, frozen=True, array_like=True, tag=24):
    """Answered by `Found` when the chunks behind `length` are gone. `handle`: an open one of this client, whose right
    to write was checked when it was opened; 0: the right is checked now."""

    place: PathRef
    length: Offset
    handle: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0


class AllocateMode(enum.IntEnum):
    DEFAULT = 0
    """The length is at least the end of the range. Space is promised as far as the quota goes, not on the disks."""
    KEEP_SIZE = 1
    PUNCH_HOLE = 2
    """The range reads as zeros; the length stays."""
    ZERO_RANGE = 3
    """Like PUNCH_HOLE, but the length is at least the end of the range."""


class Allocate(msgspec.Struct, frozen=True, array_like=True, tag=25):
    """Answered by `Found`."""

    inode: InodeId
    handle: Handle
    mode: AllocateMode
    offset: Offset
    size: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]


class MakeDirectory(msgspec.Struct, frozen=True, array_like=True, tag=26):
    """Answered by `Found`."""

    place: PathRef
    mode: Mode = 0o777


class MakeNode(msgspec.Struct, frozen=True, array_like=True, tag=27):
    """A fifo, a socket, a device (root only) or an empty file. Answered by `Found`."""

    place: PathRef
    kind: Kind
    mode: Mode = 0o666
    device: U63 = 0


class Symlink(msgspec.Struct, frozen=True, array_like=True, tag=28):
    """Answered by `Found`."""

    place: PathRef
    target: Annotated[bytes, msgspec.Meta(max_length=2 * MAX_PATH_BYTES)]


class Link(msgspec.Struct, frozen=True, array_like=True, tag=29):
    """A second name `place` for what is at `existing`. Answered by `Found`."""

    existing: PathRef
    place: PathRef
    follow: bool = False


class Remove(msgspec.Struct, frozen=True, array_like=True, tag=30):
    """unlink: EISDIR for a directory. Answered by `Done`."""

    place: PathRef


class RemoveDirectory(msgspec.Struct, frozen=True, array_like=True, tag=31):
    """Answered by `Done`."""

    place: PathRef


class RemoveTree(msgspec.Struct, frozen=True, array_like=True, tag=32):
    """Removes up to `limit` names below, deepest first, with the rights that removing each of them needs, and in the
    end the directory itself. Answered by `Removed`; again while `more`."""

    place: PathRef
    limit: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1024


class RenameFlag(enum.IntFlag):
    NO_REPLACE = 1
    EXCHANGE = 2


class Rename(msgspec.Struct, frozen=True, array_like=True, tag=33):
    """Answered by `Done`."""

    source: PathRef
    target: PathRef
    flags: Annotated[int, msgspec.Meta(ge=0, le=3)] = 0


class Now(enum.IntFlag):
    """Times to be set to the service's clock. The right to write is enough for both; one alone is the owner's."""

    ATIME = 1
    MTIME = 2


class SetAttributes(msgspec.Struct, frozen=True, array_like=True, tag=34):
    """chmod, chown, utimens; None: stays. Answered by `Found`. `report`: of the same inode, and the same user, done
    before; where one of the two is refused, none is done."""

    place: PathRef
    follow: bool = True
    mode: Mode | None = None
    uid: U32 | None = None
    gid: U32 | None = None
    atime_ns: Time | None = None
    mtime_ns: Time | None = None
    now: Annotated[int, msgspec.Meta(ge=0, le=3)] = 0
    report: Report | None = None


class XattrFlag(enum.IntEnum):
    ANY = 0
    CREATE = 1
    REPLACE = 2


class SetXattr(msgspec.Struct, frozen=True, array_like=True, tag=35):
    """Answered by `Done`."""

    label: ClassVar[str] = "SetValue"

    place: PathRef
    name: XattrName
    value: XattrData
    flag: XattrFlag = XattrFlag.ANY
    follow: bool = True


class RemoveXattr(msgspec.Struct, frozen=True, array_like=True, tag=36):
    label: ClassVar[str] = "RemoveValue"

    place: PathRef
    name: XattrName
    follow: bool = True


class LockKind(enum.IntEnum):
    NONE = 0
    """Unlock."""
    READ = 1
    WRITE = 2


class Window(enum.IntEnum):
    """Two families that do not see each other, as on Linux."""

    WHOLE = 1
    """flock: of an open file; start and end are not looked at."""
    RANGE = 2
    """fcntl: of a process."""


class Lock(msgspec.Struct, frozen=True, array_like=True, tag=37):
    """Bytes [start, end). Answered by `Done`, or EAGAIN when another's lock is still in the way after `wait_ns` (which
    the service may cut short: ask again). EDEADLK where waiting would never end. A client's locks end with its
    session."""

    inode: InodeId
    window: Window
    owner: U63
    """Chosen by the client: one open file or one process of it."""
    kind: LockKind
    start: Offset = 0
    end: Offset = END_OF_FILE
    wait_ns: Annotated[int, msgspec.Meta(ge=0, le=10_000_000_000)] = 0
    process: U32 = 0
    """For `GetLock`: the process that owns it on its machine."""


class ClientHeartbeat(msgspec.Struct, frozen=True, array_like=True, tag=38):
    """Every few seconds, the `count`-th from 1: files which this client has had open since before its last heartbeat,
    those that it has not named before (`held`) and those of them that it has closed (`closed`). Not more than
    `MAX_HELD` at once; `whole` is False while there are more of them to come. Answered by `Done`."""

    label: ClassVar[str] = "Beat"

    count: U63
    held: Annotated[tuple[InodeId, ...], msgspec.Meta(max_length=MAX_HELD)] = ()
    closed: Annotated[tuple[InodeId, ...], msgspec.Meta(max_length=MAX_HELD)] = ()
    whole: bool = True


class SetQuota(msgspec.Struct, frozen=True, array_like=True, tag=39):
    """Makes a directory the root of a quota tree, or changes its limits; both None: it is none any more. By
    administrators (uid 0). A directory with entries can become one while it is small enough to be counted in one
    transaction: else EFBIG, with how to do it. Answered by `QuotaTree`."""

    label: ClassVar[str] = "SetArea"

    place: PathRef
    bytes: U63 | None = None
    inodes: U63 | None = None


class SetDefaults(msgspec.Struct, frozen=True, array_like=True, tag=40):
    """Set the defaults of a directory, for what is made in it from now on; by its owner. Answered by `Found`."""

    place: PathRef
    defaults: Defaults


Changing: TypeAlias = (
    Report
    | Close
    | Reserve
    | Truncate
    | Allocate
    | MakeDirectory
    | MakeNode
    | Symlink
    | Link
    | Remove
    | RemoveDirectory
    | RemoveTree
    | Rename
    | SetAttributes
    | SetXattr
    | RemoveXattr
    | Lock
    | ClientHeartbeat
    | SetQuota
    | SetDefaults
)
"""These are numbered, and `Open` where it changes anything."""
