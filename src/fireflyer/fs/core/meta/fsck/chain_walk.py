"""The chunks of all chains in the order of their files, out of pages of each chain: a merge that holds few pages.

    wanted()            pages that are to be asked for now: of this chain, from this chunk on, `page` chunks at most
    take(chain, …)      the answer
    pieces()            what can be told now: chunks of one file on one chain, files in order; the next file is told
                        when every chain has said what it has of it
    over                all is told

A page is asked for when half of the one before is told, so at most one and a half are held of each chain, and of all
together a bounded number while there are fewer chains than that.

A chain is listed behind the last chunk that it told, so what is there all the time is told once, whatever comes and
goes meanwhile. Pages that are not in order would undo that, and are refused.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from fireflyer.base.errors import DataCorruption
from fireflyer.fs.schema.chunks import MAX_PAGE, ChunkEntry
from fireflyer.fs.schema.ids import MAX_FILE, MAX_INDEX, ChainId, ChunkId
from fireflyer.fs.schema.inodes import InodeId

__all__ = ["HELD", "ChainWalk", "Piece", "behind"]

HELD: Final = 1 << 17
"""Chunks of all chains, some 50 MB."""
LEAST_PAGE: Final = 32
FIRST: Final = ChunkId(0, 0)


class Piece(NamedTuple):
    """Chunks of a file on a chain, in order; there may be more of them in the next piece."""

    file: InodeId
    chain: ChainId
    chunks: tuple[ChunkEntry, ...]


@dataclass(slots=True)
class _Stream:
    chain: ChainId
    page: int
    next: ChunkId | None = FIRST
    """Where the next page begins; None: there is none."""
    wanted: bool = True
    """Its next page is on the way, or will be asked for."""
    held: deque[ChunkEntry] = field(default_factory=deque)

    @property
    def file(self) -> InodeId | None:
        """What comes next is of this file, or of a later one. None: nothing comes."""
        if self.held:
            return self.held[0].chunk.file
        return self.next.file if self.next is not None else None

    @property
    def needs_pages(self) -> bool:
        return self.next is not None and not self.wanted and len(self.held) <= self.page // 2


class ChainWalk:
    """`held`: chunks of all chains together that may be in memory."""

    def __init__(self, chains: Sequence[ChainId], *, held: int = HELD) -> None:
        self.page = max(LEAST_PAGE, min(MAX_PAGE, held * 2 // 3 // max(1, len(chains))))
        self._streams = {chain: _Stream(chain, self.page) for chain in chains}
        self._order: list[tuple[InodeId, ChainId]] = [(0, chain) for chain in sorted(self._streams)]
        self._needing_pages = list(self._streams.values())

    @property
    def over(self) -> bool:
        return not self._order

    def wanted(self) -> list[tuple[ChainId, ChunkId]]:
        """Each is said once."""
        needs_pages, self._needing_pages = self._needing_pages, []
        return [(stream.chain, stream.next) for stream in needs_pages if stream.next is not None]

    def take(self, chain: ChainId, listed: Sequence[ChunkEntry]) -> None:
        """The page of the chain that was wanted. Raises `DataCorruption` for one that cannot be."""
        stream = self._streams[chain]
        if len(listed) > self.page or not _in_order(stream.next, listed):
            raise DataCorruption(f"chain {chain} answered with chunks that are out of order, or more than requested")
        stream.held.extend(listed)
        stream.wanted = False
        stream.next = behind(listed[-1].chunk) if len(listed) == self.page else None

    def pieces(self) -> Iterator[Piece]:
        """Pages may be wanted and taken between two pieces."""
        while self._order:
            file, chain = self._order[0]
            stream = self._streams[chain]
            if stream.file != file or not stream.held:
                if not self._place(stream, file):
                    return
                continue
            chunks = []
            while stream.held and stream.held[0].chunk.file == file:
                chunks.append(stream.held.popleft())
            self._place(stream, None)
            if stream.needs_pages:
                stream.wanted = True
                self._needing_pages.append(stream)
            yield Piece(file, chain, tuple(chunks))

    def _place(self, stream: _Stream, file: InodeId | None) -> bool:
        """Puts the first stream where it belongs. False: it stays, and its page has to come first."""
        following = stream.file
        if following is None:
            heapq.heappop(self._order)
        elif following == file:
            return False
        else:
            heapq.heapreplace(self._order, (following, stream.chain))
        return True


def behind(chunk: ChunkId) -> ChunkId | None:
    """The id that follows."""
    if chunk.index < MAX_INDEX:
        return ChunkId(chunk.file, chunk.index + 1)
    return ChunkId(chunk.file + 1, 0) if chunk.file < MAX_FILE else None


def _in_order(start: ChunkId | None, listed: Iterable[ChunkEntry]) -> bool:
    for one in listed:
        if start is None or one.chunk < start:
            return False
        start = behind(one.chunk)
    return True
