"""Whether a replica may answer a read, and with what: a function of the published table and the chunk's record.

The native read path does the same; this is its definition, and what the simulation reads through. A decision holds for
the whole time between request and reply: it is enough that it was right at one moment in between, and the fence, the
table and the record are all looked at after the request came in. Data are then read from the block of the content that
was decided upon, which stays until the read is over.

A list of a file is right as a whole: who has nothing pending at some moment has at that moment what the tail has. In a
chain that is written to something is always pending, so a page of all its chunks is not: each of them is right by
itself, and of those with something pending, or damaged, it says that they may be there, and no more.
"""

from __future__ import annotations

from fireflyer.fs.core.chain.effects import ChunkIndex, Entry, TableEntry
from fireflyer.fs.schema.chunks import (
    MAX_PAGE,
    ChunkEntry,
    Found,
    Missing,
    NotCommitted,
    Query,
    QueryKind,
    QueryReply,
    RefusalReason,
    Refused,
)
from fireflyer.fs.schema.ids import MAX_INDEX, ChunkId

__all__ = ["decide"]


def decide(now_ns: int, table: TableEntry | None, index: ChunkIndex, look: Query) -> QueryReply:
    """`now_ns`: the node's clock, read after the request came in. For READ, `Found` says which content to send."""
    if table is None or not table.serving or look.chain != table.chain:
        return Refused(RefusalReason.STALE, "this target does not serve the chain; get the routing again")
    if now_ns >= table.fence_until_ns:
        message = "this node has had no answer from a manager for too long; ask another replica"
        return Refused(RefusalReason.STALE, message, table.chain_version)
    if look.chain_version != table.chain_version:
        message = (
            f"the chain has version {table.chain_version}, the request {look.chain_version}; get the routing again"
        )
        return Refused(RefusalReason.STALE, message, table.chain_version)
    return _look(table, index, look)


def _look(table: TableEntry, index: ChunkIndex, look: Query) -> QueryReply:
    if look.kind is QueryKind.CHAIN:
        return Found(index.chunks(_before(look.chunk), min(look.length, MAX_PAGE)))
    if look.kind is QueryKind.LIST:
        limit, chunks = min(look.length, MAX_PAGE), index.of_file(look.chunk.file, look.chunk.index)
    elif look.kind is QueryKind.LAST:
        limit, chunks = 1, index.of_file(look.chunk.file, look.chunk.index, backwards=True)
    else:
        limit, chunks = 1, iter((look.chunk,))
    found: list[ChunkEntry] = []
    while len(found) < limit and (chunk := next(chunks, None)) is not None:
        entry = index.find(chunk) or Entry()
        if entry.pending is not None and not table.answers_committed:
            return NotCommitted(table.tail)
        if entry.damaged and look.kind is QueryKind.READ:
            return Refused(
                RefusalReason.CORRUPT,
                f"chunk {chunk} is damaged on this target; ask another replica",
                table.chain_version,
            )
        if entry.committed is not None:
            found.append(ChunkEntry(chunk, entry.committed))
    return Found(tuple(found)) if found or look.kind is QueryKind.LIST else Missing()


def _before(chunk: ChunkId) -> ChunkId | None:
    if chunk.index:
        return ChunkId(chunk.file, chunk.index - 1)
    return ChunkId(chunk.file - 1, MAX_INDEX) if chunk.file else None
