"""Names of things. All are integers with a bound, so that a number from the network is checked where it is decoded."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.units import KIB, MIB

__all__ = [
    "CHUNK_ID_BYTES",
    "MAX_CHUNK_BYTES",
    "MAX_FILE",
    "MAX_INDEX",
    "MIN_CHUNK_BYTES",
    "ChainId",
    "ChainVersion",
    "Channel",
    "ChunkId",
    "ClientId",
    "ContentId",
    "Incarnation",
    "NodeId",
    "RoutingVersion",
    "Sequence",
    "TableId",
    "TargetId",
    "Version",
]

MIN_CHUNK_BYTES: Final = 64 * KIB
MAX_CHUNK_BYTES: Final = 64 * MIB
CHUNK_ID_BYTES: Final = 16
MAX_FILE: Final = (1 << 63) - 1
MAX_INDEX: Final = (1 << 32) - 1
"""Of a chunk's id."""

_U63 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_U32 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]

NodeId: TypeAlias = _U32
"""A storage node; given by the administrator, kept for ever. 0 is no node."""
TargetId: TypeAlias = _U63
"""One directory on one disk of a node, made once; a directory that was lost comes back as another target."""
ChainId: TypeAlias = _U32
TableId: TypeAlias = _U32
ChainVersion: TypeAlias = _U32
"""Grows by one with each change of a chain's targets, their states or their order. The first is 1."""
RoutingVersion: TypeAlias = _U63
Incarnation: TypeAlias = _U63
"""Of a node's process: given by the manager at registration, one more at each start."""
Version: TypeAlias = _U63
"""Of a chunk's content. 0 stands for a chunk that is absent."""
ClientId: TypeAlias = _U63
Channel: TypeAlias = _U32
"""A client's queue of updates, of which one at a time is under way."""
Sequence: TypeAlias = _U63
"""Of an update in its channel, from 1."""


class ChunkId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Chunk `index` of file `file` (an inode number; any number will do for other users of the store)."""

    file: _U63
    index: _U32

    def to_bytes(self) -> bytes:
        """16 bytes whose order is that of (file, index)."""
        return self.file.to_bytes(8, "big") + self.index.to_bytes(8, "big")

    @classmethod
    def from_bytes(cls, data: bytes) -> ChunkId:
        """Raises `UsageError` for what `to_bytes` cannot have made."""
        file, index = int.from_bytes(data[:8], "big"), int.from_bytes(data[8:], "big")
        if len(data) != CHUNK_ID_BYTES or file >> 63 or index >> 32:
            raise UsageError(f"{data[:32].hex()} is not the id of a chunk; it has {CHUNK_ID_BYTES} bytes: file, index")
        return cls(file, index)


class ContentId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Names the content of a chunk for ever: the chain version in which the head made it, and its version."""

    made_in: ChainVersion
    version: Version
