"""What clients say to the meta service, and what it answers.

`Calls` carries requests of one client, which the service carries out at the same time and answers together; those that
may take long (`Truncate`, `Allocate`, `Lock` that waits, `RemoveTree`) are sent alone. A request that changes anything
has a number of its client's: sent again, to whichever meta service, it is answered as the first time, not done again.

A *handle* is a number that the client chooses when it opens for writing, and never uses twice: while the handle is open
the service knows that there may be bytes of which it has not heard. Opening for reading leaves nothing at the service.

All errors are `ErrorReply`, with an errno of POSIX. 0 as errno: `code` and `message` are an error of
`fireflyer.base.errors` (try again where that is transient).
"""

from __future__ import annotations

import enum
from typing import Annotated, ClassVar, Final, TypeAlias

import msgspec

from fireflyer.fs.schema.ids import ClientId
from fireflyer.fs.schema.inodes import MAX_FILE_BYTES, MAX_NAME_BYTES, MAX_PATH_BYTES, Defaults, Inode, InodeId, Kind

__all__ = ["END_OF_FILE", "MAX_BATCH", "MAX_CALLS", "MAX_GROUPS", "MAX_HELD", "MAX_LISTED", "MAX_NUMBERS"]
__all__ += ["MAX_UNDER_WAY", "MAX_VALUE_BYTES", "MAX_VALUE_NAME_BYTES", "UNKNOWN_CUT", "Access", "Actor", "Allocate"]
__all__ += [
    "AllocateMode",
    "Answer",
    "Answers",
    "Call",
    "Calls",
    "Changing",
    "ClientHeartbeat",
    "Close",
    "Done",
    "QuotaTree",
]
__all__ += ["Entry", "Found", "FoundMany", "GetLock", "GetQuota", "GetSpace", "GetXattr", "Link", "ListDirectory"]
__all__ += ["ListXattrs"]
__all__ += ["Listing", "Lock", "LockKind", "LockState", "MakeDirectory", "MakeNode", "Now", "Open", "XattrNames"]
__all__ += ["ErrorReply", "OpenFlag", "Opened", "PathRef", "ReadLink", "Remove", "RemoveDirectory", "RemoveTree"]
__all__ += ["RemoveXattr", "Removed", "Rename", "RenameFlag", "Renew", "Report", "Request", "Reserve", "Reserved"]
__all__ += ["SetAttributes", "SetDefaults", "SetQuota", "SetXattr", "Space", "Stat", "StatMany", "Symlink", "Target"]
__all__ += ["Truncate", "Window", "XattrFlag", "XattrValue"]

MAX_CALLS: Final = 64
"""Of one `Calls`."""
MAX_UNDER_WAY: Final = 256
"""Numbered requests of a client that are not answered yet."""
MAX_NUMBERS: Final = 8192
"""They have numbers from `done_below` to less than so many more. So many answers may be kept for one client, as long as
it has not had the first of them."""
MAX_BATCH: Final = 1024
"""Places of one `StatMany`."""
MAX_LISTED: Final = 1024
MAX_HELD: Final = 1024
MAX_GROUPS: Final = 64
MAX_VALUE_BYTES: Final = 65536
"""Of one extended attribute; of all of a file's twice as much."""
MAX_VALUE_NAME_BYTES: Final = 1024
"""That can be sent; more than 255 are ERANGE."""
END_OF_FILE: Final = (1 << 63) - 1
"""As the end of a lock: however long the file is or will be."""
UNKNOWN_CUT: Final = (1 << 63) - 1
"""As the `cut` of a report: the client does not know what its last writes have done. The chains are asked."""

_U63 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_U32 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
_Mode = Annotated[int, msgspec.Meta(ge=0, le=0o7777)]
_Time = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_Offset = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Length = Annotated[int, msgspec.Meta(ge=0, le=MAX_FILE_BYTES)]
_Handle = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
_Name = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_NAME_BYTES)]
_ValueName = Annotated[bytes, msgspec.Meta(max_length=MAX_VALUE_NAME_BYTES)]
_Value = Annotated[bytes, msgspec.Meta(max_length=MAX_VALUE_BYTES)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_LISTED)]


class PathRef(msgspec.Struct, frozen=True, array_like=True):
    """Where: a path from the directory `base`; b"" is `base` itself, whatever its kind. A path that begins with "/"
    begins at the root. Longer ones, and longer names, are ENAMETOOLONG: so they are allowed to come here."""

    base: InodeId
    path: Annotated[bytes, msgspec.Meta(max_length=2 * MAX_PATH_BYTES)] = b""


class Actor(msgspec.Struct, frozen=True, array_like=True):
    """Who asks, as a trusted mount says. Users do not say: they are who they have proven to be."""

    uid: _U32
    gid: _U32
    groups: Annotated[tuple[_U32, ...], msgspec.Meta(max_length=MAX_GROUPS)] = ()


# --- reading ---


class Stat(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Answered by `Found`. `follow`: a symbolic link at the end of the path is followed."""

    place: PathRef
    follow: bool = True


class StatMany(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Answered by `FoundMany`, in this order."""

    places: Annotated[tuple[PathRef, ...], msgspec.Meta(max_length=MAX_BATCH)]
    follow: bool = True


class ListDirectory(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Entries behind the name `after`, in the order of their bytes; "." and ".." are not among them. A page is right by
    itself, and what is there all the time is in some page once. Answered by `Listing`. `opened`: read permission was
    checked for an earlier page of this open directory; users with tokens are not believed that."""

    directory: InodeId
    after: Annotated[bytes, msgspec.Meta(max_length=MAX_NAME_BYTES)] = b""
    limit: _Count = MAX_LISTED
    inodes: bool = False
    """With each entry its inode, as `Stat` would find it without following."""
    opened: bool = False


class ReadLink(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Answered by `Target`. EINVAL where it is no symbolic link."""

    place: PathRef


class Access(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """`mask`: 4 read, 2 write, 1 execute or search; 0: is it there. Answered by `Done`."""

    place: PathRef
    mask: Annotated[int, msgspec.Meta(ge=0, le=7)]
    follow: bool = True


class GetXattr(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """An extended attribute, named with its namespace: b"user.colour". Answered by `XattrValue`; ENODATA."""

    label: ClassVar[str] = "GetValue"

    place: PathRef
    name: _ValueName
    follow: bool = True


class ListXattrs(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Answered by `XattrNames`."""

    label: ClassVar[str] = "ListValues"

    place: PathRef
    follow: bool = True


class GetSpace(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Answered by `Space`: of the innermost quota area that `inode` is in where that is less."""

    inode: InodeId


class GetLock(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """The first lock that would be in the way of `lock`. Answered by `LockState`."""

    lock: Lock


class GetQuota(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Answered by `QuotaTree`; ENODATA where the directory is not the head of one."""

    label: ClassVar[str] = "GetArea"

    place: PathRef


class Renew(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Another capability for a file that is open, before the old one ends. Answered by `Opened`. `rights`: as in
    `core.capability`. `handle`: one of this client's, which proves that it may write; what it may read is looked at
    again."""

    inode: InodeId
    rights: Annotated[int, msgspec.Meta(ge=1, le=3)]
    handle: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0


# --- changing ---


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
    mode: _Mode = 0o666
    """Of what is created; the client has taken its umask off."""


class Report(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """Bytes were written, and are durable, up to `end` (0: none beyond the length known), when the file was at `cut`.
    Answered by `Found`, whose length is right for everything that was reported. `wrote`: since the last report, so
    that times change, and set-user-id falls. `written_ns`: when that was, by the client's clock (Unix); 0: now. Sent at
    fsync and now and then."""

    inode: InodeId
    handle: _Handle
    end: _Length
    cut: _U63
    wrote: bool = True
    written_ns: _U63 = 0


class Close(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """The last `Report` of this handle, and its end. Answered by `Found`. `lazy`: there is nothing to be reported, and
    nobody waits: `end`, `cut`, `wrote` and `written_ns` mean nothing, and it is done together with the next request, or
    some time later."""

    inode: InodeId
    handle: _Handle
    end: _Length
    cut: _U63
    wrote: bool = True
    written_ns: _U63 = 0
    lazy: bool = False


class Reserve(msgspec.Struct, frozen=True, array_like=True, tag=23):
    """`size` bytes at the end of the file, for O_APPEND: the length grows at once, to be written by this client alone.
    Answered by `Reserved`."""

    inode: InodeId
    handle: _Handle
    size: Annotated[int, msgspec.Meta(ge=1, le=MAX_FILE_BYTES)]
    written_ns: _U63 = 0
    """As in `Report`."""


class Truncate(msgspec.Struct, frozen=True, array_like=True, tag=24):
    """Answered by `Found` when the chunks behind `length` are gone. `handle`: an open one of this client, whose right
    to write was checked when it was opened; 0: the right is checked now."""

    place: PathRef
    length: _Offset
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
    handle: _Handle
    mode: AllocateMode
    offset: _Offset
    size: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]


class MakeDirectory(msgspec.Struct, frozen=True, array_like=True, tag=26):
    """Answered by `Found`."""

    place: PathRef
    mode: _Mode = 0o777


class MakeNode(msgspec.Struct, frozen=True, array_like=True, tag=27):
    """A fifo, a socket, a device (root only) or an empty file. Answered by `Found`."""

    place: PathRef
    kind: Kind
    mode: _Mode = 0o666
    device: _U63 = 0


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
    mode: _Mode | None = None
    uid: _U32 | None = None
    gid: _U32 | None = None
    atime_ns: _Time | None = None
    mtime_ns: _Time | None = None
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
    name: _ValueName
    value: _Value
    flag: XattrFlag = XattrFlag.ANY
    follow: bool = True


class RemoveXattr(msgspec.Struct, frozen=True, array_like=True, tag=36):
    label: ClassVar[str] = "RemoveValue"

    place: PathRef
    name: _ValueName
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
    owner: _U63
    """Chosen by the client: one open file or one process of it."""
    kind: LockKind
    start: _Offset = 0
    end: _Offset = END_OF_FILE
    wait_ns: Annotated[int, msgspec.Meta(ge=0, le=10_000_000_000)] = 0
    process: _U32 = 0
    """For `GetLock`: the process that owns it on its machine."""


class ClientHeartbeat(msgspec.Struct, frozen=True, array_like=True, tag=38):
    """Every few seconds, the `count`-th from 1: files which this client has had open since before its last beat, those
    that it has not named before (`held`) and those of them that it has closed (`closed`). Not more than `MAX_HELD` at
    once; `whole` is False while there are more of them to come. Answered by `Done`."""

    label: ClassVar[str] = "Beat"

    count: _U63
    held: Annotated[tuple[InodeId, ...], msgspec.Meta(max_length=MAX_HELD)] = ()
    closed: Annotated[tuple[InodeId, ...], msgspec.Meta(max_length=MAX_HELD)] = ()
    whole: bool = True


class SetQuota(msgspec.Struct, frozen=True, array_like=True, tag=39):
    """Makes a directory the head of a quota area, or changes its limits; both None: it is none any more. By
    administrators (uid 0). A directory with entries can become one while it is small enough to be counted in one
    transaction: else EFBIG, with how to do it. Answered by `QuotaTree`."""

    label: ClassVar[str] = "SetArea"

    place: PathRef
    bytes: _U63 | None = None
    inodes: _U63 | None = None


class SetDefaults(msgspec.Struct, frozen=True, array_like=True, tag=40):
    """Of a directory, for what is made in it from now on; by its owner. Answered by `Found`."""

    place: PathRef
    defaults: Defaults


# --- answers ---


class Done(msgspec.Struct, frozen=True, array_like=True, tag=1):
    pass


class ErrorReply(msgspec.Struct, frozen=True, array_like=True, tag=2):
    errno: Annotated[int, msgspec.Meta(ge=0, le=4095)]
    message: Annotated[str, msgspec.Meta(max_length=4096)]
    code: Annotated[str, msgspec.Meta(max_length=64)] = ""


class Found(msgspec.Struct, frozen=True, array_like=True, tag=3):
    inode: Inode


class FoundMany(msgspec.Struct, frozen=True, array_like=True, tag=4):
    inodes: Annotated[tuple[Inode | int, ...], msgspec.Meta(max_length=MAX_BATCH)]
    """An int is the errno."""


class Entry(msgspec.Struct, frozen=True, array_like=True):
    name: _Name
    id: InodeId
    kind: Kind
    inode: Inode | None = None


class Listing(msgspec.Struct, frozen=True, array_like=True, tag=5):
    entries: Annotated[tuple[Entry, ...], msgspec.Meta(max_length=MAX_LISTED)]
    more: bool
    parent: InodeId
    """Of the directory, for "..": 1 of the root."""


class Target(msgspec.Struct, frozen=True, array_like=True, tag=6):
    path: bytes


class XattrValue(msgspec.Struct, frozen=True, array_like=True, tag=7):
    value: _Value


class XattrNames(msgspec.Struct, frozen=True, array_like=True, tag=8):
    names: tuple[bytes, ...]


class Space(msgspec.Struct, frozen=True, array_like=True, tag=9):
    capacity_bytes: _U63
    free_bytes: _U63
    inodes: _U63
    """That are there."""
    free_inodes: _U63


class Opened(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """`capability`: for the storage nodes, to be presented before the first read or write (see `schema.sessions`);
    empty for clients with the node secret, which need none, and where the answer comes again after `expires_unix_s`."""

    inode: Inode
    created: bool = False
    capability: bytes = b""
    expires_unix_s: _U63 = 0
    rights: Annotated[int, msgspec.Meta(ge=0, le=3)] = 0
    """What was granted, as in `core.capability`, until `expires_unix_s`."""


class Reserved(msgspec.Struct, frozen=True, array_like=True, tag=11):
    offset: _Length
    inode: Inode


class Removed(msgspec.Struct, frozen=True, array_like=True, tag=12):
    names: _U63
    more: bool


class LockState(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """`lock`: None, nothing is in the way. `client`: whose it is."""

    lock: Lock | None = None
    client: ClientId = 0


class QuotaTree(msgspec.Struct, frozen=True, array_like=True, tag=14):
    head: InodeId
    bytes: _U63
    inodes: _U63
    """In use."""
    limit_bytes: _U63 | None
    limit_inodes: _U63 | None


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
Reading: TypeAlias = (
    Stat | StatMany | ListDirectory | ReadLink | Access | GetXattr | ListXattrs | GetSpace | GetLock | GetQuota | Renew
)
Request: TypeAlias = Reading | Open | Changing
Answer: TypeAlias = (
    Done
    | ErrorReply
    | Found
    | FoundMany
    | Listing
    | Target
    | XattrValue
    | XattrNames
    | Space
    | Opened
    | Reserved
    | Removed
    | LockState
    | QuotaTree
)


class Call(msgspec.Struct, frozen=True, array_like=True):
    """`number`: of what changes something, one more with each; 0 of what only reads."""

    request: Request
    number: _U63 = 0
    actor: Actor | None = None


class Calls(msgspec.Struct, frozen=True, array_like=True):
    client: ClientId
    """Its session at the manager. ESTALE when that is over: what it held is lost, and a new one must be opened."""
    done_below: _U63
    """The answers to all numbers below have been received: they may be forgotten."""
    calls: Annotated[tuple[Call, ...], msgspec.Meta(min_length=1, max_length=MAX_CALLS)]


class Answers(msgspec.Struct, frozen=True, array_like=True):
    answers: Annotated[tuple[Answer, ...], msgspec.Meta(max_length=MAX_CALLS)]
