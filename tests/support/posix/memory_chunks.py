"""Chunks in memory, for what the meta service does with them. Each is on the chain that its layout says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from fireflyer.fs.core.meta.inodes.layout import order_of
from fireflyer.fs.core.meta.ports import Stored
from fireflyer.fs.schema.ids import ChainId, ClientId, TableId
from fireflyer.fs.schema.inodes import FileDetails, Inode, InodeId

__all__ = ["MemoryChunks"]

Listed: TypeAlias = list[Stored]


class MemoryChunks:
    """A `ChunkPort`."""

    def __init__(self, chains: int) -> None:
        self._chains = tuple(range(1, chains + 1))
        self._chunks: dict[tuple[InodeId, int], tuple[ChainId, bytearray]] = {}

    def chains(self, table: TableId) -> Sequence[ChainId]:
        assert table == 1
        return self._chains

    async def last(self, file: InodeId, chains: Sequence[ChainId]) -> Sequence[Stored | None]:
        found = [self._of(file, chain) for chain in chains]
        return [of_chain[-1] if of_chain else None for of_chain in found]

    async def list(self, chain: ChainId, file: InodeId, start: int, limit: int) -> Sequence[Stored]:
        return [stored for stored in self._of(file, chain) if stored[0] >= start][:limit]

    async def remove(self, file: InodeId, chunks: Sequence[tuple[ChainId, int]], *, session: ClientId) -> None:
        for chain, index in chunks:
            there = self._chunks.pop((file, index), None)
            assert there is None or there[0] == chain

    async def truncate(self, file: InodeId, chain: ChainId, index: int, length: int, *, session: ClientId) -> None:
        where, data = self._chunks.get((file, index), (chain, bytearray()))
        assert where == chain
        del data[length:]

    async def write_zeros(
        self, file: InodeId, chain: ChainId, index: int, offset: int, size: int, *, session: ClientId
    ) -> None:
        where, data = self._chunks[file, index]
        assert where == chain
        assert offset + size <= len(data)
        data[offset : offset + size] = bytes(size)

    def write(self, inode: Inode, data: bytes, offset: int) -> None:
        for index, begin, piece in _pieces(inode, data, offset):
            chunk = self._chunks.setdefault((inode.id, index), (self._chain_of(inode, index), bytearray()))[1]
            chunk.extend(bytes(max(0, begin - len(chunk))))
            chunk[begin : begin + len(piece)] = piece

    def read(self, inode: Inode, size: int, offset: int) -> bytes:
        data = bytes(max(0, min(size, inode.length - offset)))
        out = bytearray()
        for index, begin, piece in _pieces(inode, data, offset):
            chain, chunk = self._chunks.get((inode.id, index), (self._chain_of(inode, index), bytearray()))
            assert chain == self._chain_of(inode, index)
            out += bytes(chunk[begin : begin + len(piece)]).ljust(len(piece), b"\0")
        return bytes(out)

    def _chain_of(self, inode: Inode, index: int) -> ChainId:
        assert isinstance(inode.body, FileDetails)
        layout = inode.body.layout
        return order_of(layout, self._chains)[index % layout.stripe]

    def _of(self, file: InodeId, chain: ChainId) -> Listed:
        return sorted(
            (index, len(data))
            for (owner, index), (where, data) in self._chunks.items()
            if owner == file and where == chain
        )


def _pieces(inode: Inode, data: bytes, offset: int) -> list[tuple[int, int, bytes]]:
    """(chunk, place in it, what is there)."""
    assert isinstance(inode.body, FileDetails)
    chunk_bytes = inode.body.layout.chunk_bytes
    found, done = [], 0
    while done < len(data):
        index, begin = divmod(offset + done, chunk_bytes)
        piece = data[done : done + chunk_bytes - begin]
        found.append((index, begin, piece))
        done += len(piece)
    return found
