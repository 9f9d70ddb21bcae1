"""Which bytes of a file are which bytes of which chunk on which chain. The arithmetic is
`core.meta.inodes.layout`'s."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fireflyer.fs.core.meta.inodes.layout import max_bytes, order_of, pieces
from fireflyer.fs.schema.ids import ChainId
from fireflyer.fs.schema.inodes import Layout

__all__ = ["ChunkMap", "ChunkRange"]


class ChunkRange(NamedTuple):
    """Bytes [offset, offset + size) of chunk `chunk`, which are at `at` of the caller's range."""

    chain: ChainId
    chunk: int
    offset: int
    size: int
    at: int


class ChunkMap:
    """Of one file; kept while it is open."""

    def __init__(self, layout: Layout, chains: tuple[ChainId, ...]) -> None:
        """`chains`: of the layout's table. Raises `DataCorruption`."""
        self.layout = layout
        self.chunk_bytes = layout.chunk_bytes
        self.max_bytes = max_bytes(layout)
        self.order = order_of(layout, chains)

    def parts(self, offset: int, size: int) -> Iterator[ChunkRange]:
        """Of bytes [offset, offset + size), in their order."""
        at, order = 0, self.order
        for piece in pieces(self.layout, offset, size):
            yield ChunkRange(order[piece.chunk % len(order)], piece.chunk, piece.offset, piece.size, at)
            at += piece.size

    def chains(self, offset: int, size: int) -> tuple[ChainId, ...]:
        """That have bytes [offset, offset + size)."""
        first, last = offset // self.chunk_bytes, (offset + max(size, 1) - 1) // self.chunk_bytes
        most = min(last - first + 1, len(self.order))
        return tuple(self.order[chunk % len(self.order)] for chunk in range(first, first + most))
