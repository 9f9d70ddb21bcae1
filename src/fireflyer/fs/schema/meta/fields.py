"""Limits of the messages to and from the meta service, and the types of their fields."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from fireflyer.fs.schema.inodes import MAX_FILE_BYTES, MAX_NAME_BYTES, MAX_PATH_BYTES, InodeId

__all__ = [
    "END_OF_FILE",
    "MAX_BATCH",
    "MAX_CALLS",
    "MAX_GROUPS",
    "MAX_HELD",
    "MAX_LISTED",
    "MAX_NUMBERS",
    "MAX_UNDER_WAY",
    "MAX_VALUE_BYTES",
    "MAX_VALUE_NAME_BYTES",
    "U32",
    "U63",
    "UNKNOWN_CUT",
    "Actor",
    "Count",
    "Handle",
    "Length",
    "Mode",
    "Name",
    "Offset",
    "PathRef",
    "Time",
    "XattrData",
    "XattrName",
]

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

U63 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
U32 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
Mode = Annotated[int, msgspec.Meta(ge=0, le=0o7777)]
Time = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Offset = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Length = Annotated[int, msgspec.Meta(ge=0, le=MAX_FILE_BYTES)]
Handle = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
Name = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_NAME_BYTES)]
XattrName = Annotated[bytes, msgspec.Meta(max_length=MAX_VALUE_NAME_BYTES)]
XattrData = Annotated[bytes, msgspec.Meta(max_length=MAX_VALUE_BYTES)]
Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_LISTED)]


class PathRef(msgspec.Struct, frozen=True, array_like=True):
    """Place: a path from the directory `base`; b"" is `base` itself, whatever its kind. A path that begins with "/"
    begins at the root. Longer ones, and longer names, are ENAMETOOLONG: so they are allowed to come here."""

    base: InodeId
    path: Annotated[bytes, msgspec.Meta(max_length=2 * MAX_PATH_BYTES)] = b""


class Actor(msgspec.Struct, frozen=True, array_like=True):
    """User who asks, as a trusted mount says. Users do not say: they are who they have proven to be."""

    uid: U32
    gid: U32
    groups: Annotated[tuple[U32, ...], msgspec.Meta(max_length=MAX_GROUPS)] = ()
