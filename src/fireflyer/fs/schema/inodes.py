"""What the meta service keeps of a file, a directory or anything else that has a name: see
`docs/design/0028-meta-transactions.md`.

The same structs are rows of the store and parts of answers. Times are Unix time in nanoseconds, lengths are bytes.
"""

from __future__ import annotations

import enum
from typing import Annotated, Final, TypeAlias

import msgspec

from fireflyer.fs.schema.ids import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, TableId

__all__ = [
    "MAX_DEPTH",
    "MAX_FILE_BYTES",
    "MAX_LINKS",
    "MAX_NAME_BYTES",
    "MAX_PATH_BYTES",
    "MAX_STRIPE",
    "MAX_SYMLINKS",
    "ROOT",
    "Defaults",
    "DeviceDetails",
    "DirectoryDetails",
    "FileDetails",
    "Inode",
    "InodeId",
    "Kind",
    "Layout",
    "SymlinkDetails",
]

MAX_NAME_BYTES: Final = 255
MAX_PATH_BYTES: Final = 4095
"""PATH_MAX of Linux, less its closing zero. Also of the target of a symbolic link."""
MAX_SYMLINKS: Final = 40
"""That one path may lead through, as on Linux."""
MAX_DEPTH: Final = 2048
"""Of directories below the root: as many names as a path can have. What is in a directory that is moved may come to lie
deeper by that."""
MAX_LINKS: Final = 1 << 20
MAX_STRIPE: Final = 1024
MAX_FILE_BYTES: Final = 1 << 47
"""128 TiB; less where chunks are small, since a file has at most 2^32 of them."""
ROOT: Final = 1
"""The inode of "/"."""

_U63 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_U32 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
_Mode = Annotated[int, msgspec.Meta(ge=0, le=0o7777)]
_Time = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_Length = Annotated[int, msgspec.Meta(ge=0, le=MAX_FILE_BYTES)]
_ChunkBytes = Annotated[int, msgspec.Meta(ge=MIN_CHUNK_BYTES, le=MAX_CHUNK_BYTES)]
_Stripe = Annotated[int, msgspec.Meta(ge=1, le=MAX_STRIPE)]

InodeId: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
"""Given once, never again. It is the `file` of the chunks too."""


class Kind(enum.IntEnum):
    FILE = 1
    DIRECTORY = 2
    SYMLINK = 3
    FIFO = 4
    SOCKET = 5
    CHARACTER = 6
    BLOCK = 7


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """Where the chunks of a file are. Bytes [i * chunk_bytes, (i + 1) * chunk_bytes) are chunk (inode, i), which is on
    chain `core.meta.inodes.layout.order_of(layout, chains)[i % stripe]`. Fixed when the file is made."""

    table: TableId
    chunk_bytes: _ChunkBytes
    """A power of two."""
    stripe: _Stripe
    """Chains that hold the file; at most as many as the table has."""
    seed: _U63


class Defaults(msgspec.Struct, frozen=True, array_like=True):
    """What a directory gives to what is made in it; directories made in it have the same. 0: the cluster's."""

    chunk_bytes: _U32 = 0
    stripe: _U32 = 0
    trash_s: _U32 = 0
    """What is removed in it is kept for so long; 0: not at all."""


class FileDetails(msgspec.Struct, frozen=True, array_like=True, tag=1):
    layout: Layout
    length: _Length = 0
    cut: _U63 = 0
    """Counts truncations: a length that a client reports was found under one of them."""
    cutting: _Length | None = None
    """A truncation to this length has begun; chunks behind it may still be there. Nobody extends the file before they
    are gone."""


class DirectoryDetails(msgspec.Struct, frozen=True, array_like=True, tag=2):
    parent: InodeId
    """Of the root: itself. Of one that is removed but open: still the last one."""
    entries: _U63 = 0
    subdirectories: _U63 = 0
    defaults: Defaults = Defaults()
    depth: _U32 = 0
    """Directories above it when it was made, or moved itself; 0 of the root."""


class SymlinkDetails(msgspec.Struct, frozen=True, array_like=True, tag=3):
    target: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_PATH_BYTES)]


class DeviceDetails(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Of FIFO, SOCKET, CHARACTER and BLOCK. `device`: as `st_rdev`, 0 for the first two."""

    device: _U63 = 0


class Inode(msgspec.Struct, frozen=True, array_like=True):
    id: InodeId
    kind: Kind
    mode: _Mode
    """Permission bits, with set-user-id, set-group-id and sticky."""
    uid: _U32
    gid: _U32
    links: Annotated[int, msgspec.Meta(ge=0, le=MAX_LINKS)]
    """Names of it; for a directory 1, or 0 when it is removed (`st_nlink` of a directory is 2 + its subdirectories).
    0: unlinked, kept while it is open."""
    atime_ns: _Time
    mtime_ns: _Time
    ctime_ns: _Time
    quota_tree: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    """The innermost quota tree that it is in: the inode of that directory; 0: none. A directory that is the head of an
    area is in it."""
    body: FileDetails | DirectoryDetails | SymlinkDetails | DeviceDetails
    home: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0
    """Of what is no directory: the one in which it got its last name. 0: not known."""
    xattr_bytes: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0
    """Of its extended attributes with their names, and of a symbolic link the target: what its area counts besides the
    length of a file."""

    @property
    def length(self) -> int:
        """As `st_size`, of files and symbolic links; 0 of others."""
        if isinstance(self.body, FileDetails):
            return self.body.length
        return len(self.body.target) if isinstance(self.body, SymlinkDetails) else 0

    @property
    def charged_bytes(self) -> int:
        """What its area counts."""
        return self.xattr_bytes + (self.body.length if isinstance(self.body, FileDetails) else 0)
