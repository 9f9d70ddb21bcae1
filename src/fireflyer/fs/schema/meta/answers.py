"""What the meta service answers to one request."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from fireflyer.fs.schema.ids import ClientId
from fireflyer.fs.schema.inodes import Inode, InodeId, Kind
from fireflyer.fs.schema.meta.changing import Lock
from fireflyer.fs.schema.meta.fields import MAX_BATCH, MAX_LISTED, U63, Length, Name, XattrData

__all__ = [
    "Answer",
    "Done",
    "Entry",
    "ErrorReply",
    "Found",
    "FoundMany",
    "Listing",
    "LockState",
    "Opened",
    "QuotaTree",
    "Removed",
    "Reserved",
    "Space",
    "Target",
    "XattrNames",
    "XattrValue",
]


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
    name: Name
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
    value: XattrData


class XattrNames(msgspec.Struct, frozen=True, array_like=True, tag=8):
    names: tuple[bytes, ...]


class Space(msgspec.Struct, frozen=True, array_like=True, tag=9):
    capacity_bytes: U63
    free_bytes: U63
    inodes: U63
    """That are there."""
    free_inodes: U63


class Opened(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """`capability`: for the storage nodes, to be presented before the first read or write (see `schema.sessions`);
    empty for clients with the node secret, which need none, and where the answer comes again after `expires_unix_s`."""

    inode: Inode
    created: bool = False
    capability: bytes = b""
    expires_unix_s: U63 = 0
    rights: Annotated[int, msgspec.Meta(ge=0, le=3)] = 0
    """What was granted, as in `core.capability`, until `expires_unix_s`."""


class Reserved(msgspec.Struct, frozen=True, array_like=True, tag=11):
    offset: Length
    inode: Inode


class Removed(msgspec.Struct, frozen=True, array_like=True, tag=12):
    names: U63
    more: bool


class LockState(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """`lock`: None, nothing is in the way. `client`: whose it is."""

    lock: Lock | None = None
    client: ClientId = 0


class QuotaTree(msgspec.Struct, frozen=True, array_like=True, tag=14):
    head: InodeId
    bytes: U63
    inodes: U63
    """In use."""
    limit_bytes: U63 | None
    limit_inodes: U63 | None


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
