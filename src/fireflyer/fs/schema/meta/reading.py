"""Requests to the meta service that only read."""

from __future__ import annotations

from typing import Annotated, ClassVar, TypeAlias

import msgspec

from fireflyer.fs.schema.inodes import MAX_NAME_BYTES, InodeId
from fireflyer.fs.schema.meta.changing import Lock
from fireflyer.fs.schema.meta.fields import MAX_BATCH, MAX_LISTED, Count, PathRef, XattrName

__all__ = [
    "Access",
    "GetLock",
    "GetQuota",
    "GetSpace",
    "GetXattr",
    "ListDirectory",
    "ListXattrs",
    "ReadLink",
    "Reading",
    "Renew",
    "Stat",
    "StatMany",
]


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
    limit: Count = MAX_LISTED
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
    name: XattrName
    follow: bool = True


class ListXattrs(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Answered by `XattrNames`."""

    label: ClassVar[str] = "ListValues"

    place: PathRef
    follow: bool = True


class GetSpace(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Answered by `Space`: of the innermost quota tree that `inode` is in where that is less."""

    inode: InodeId


class GetLock(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """The first lock that would be in the way of `lock`. Answered by `LockState`."""

    lock: Lock


class GetQuota(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Answered by `QuotaTree`; ENODATA where the directory is not the root of one."""

    label: ClassVar[str] = "GetArea"

    place: PathRef


class Renew(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Another capability for a file that is open, before the old one ends. Answered by `Opened`. `rights`: as in
    `core.capability`. `handle`: one of this client's, which proves that it may write; what it may read is looked at
    again."""

    inode: InodeId
    rights: Annotated[int, msgspec.Meta(ge=1, le=3)]
    handle: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0


Reading: TypeAlias = (
    Stat | StatMany | ListDirectory | ReadLink | Access | GetXattr | ListXattrs | GetSpace | GetLock | GetQuota | Renew
)
