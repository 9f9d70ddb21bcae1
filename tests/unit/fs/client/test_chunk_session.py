"""The chunk store as a meta service uses it: what a session asks of its client, and when it refuses to decide."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.support.loops import on_loop

from fireflyer.base.errors import Busy, Unreachable
from fireflyer.fs.client.chunk_session import MAX_REMOVALS, ClientChunkSession
from fireflyer.fs.schema.chunks import ChunkEntry, ChunkVersion
from fireflyer.fs.schema.ids import ChunkId, ContentId

FILE = 7


class Stored:
    """Answers as `Chunks` does, from a dict of chunks; removals are counted while they are under way."""

    def __init__(self, lengths: dict[int, int | None]) -> None:
        self.listed = [
            ChunkEntry(ChunkId(FILE, index), None if size is None else ChunkVersion(ContentId(1, 1), size, 0))
            for index, size in lengths.items()
        ]
        self.under_way = self.most = 0
        self.removed: list[int] = []
        self.failing: int | None = None

    async def last_chunk(self, chain: int, file: int) -> ChunkEntry | None:
        return self.listed[-1] if chain == 1 and self.listed else None

    async def list(self, chain: int, file: int, *, start: int, limit: int) -> list[ChunkEntry]:
        return [one for one in self.listed if one.chunk.index >= start][:limit]

    async def remove(self, chain: int, chunk: ChunkId, *, session: int) -> None:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        if chunk.index == self.failing:
            raise Unreachable("the node is away")
        await asyncio.sleep(0)
        self.removed.append(chunk.index)


def session_over(stored: Any) -> ClientChunkSession:
    return ClientChunkSession(stored)


@on_loop
async def test_chunks_are_told_by_index_and_length_and_a_chain_without_any_by_none() -> None:
    session = session_over(Stored({0: 10, 3: 4}))
    assert await session.last(FILE, [1, 2]) == [(3, 4), None]
    assert await session.list(1, FILE, 0, 10) == [(0, 10), (3, 4)]
    assert await session.list(1, FILE, 1, 10) == [(3, 4)]


@on_loop
async def test_nothing_is_decided_by_a_chunk_that_is_being_written() -> None:
    session = session_over(Stored({0: 10, 3: None}))
    with pytest.raises(Busy, match="chunk 3 of file 7"):
        await session.last(FILE, [1])
    with pytest.raises(Busy, match="chunk 3 of file 7"):
        await session.list(1, FILE, 0, 10)


@on_loop
async def test_removals_are_bounded_and_all_have_ended_when_one_has_failed() -> None:
    stored = Stored({})
    session = session_over(stored)
    await session.remove(FILE, [(1, index) for index in range(3 * MAX_REMOVALS)], session=5)
    assert stored.most == MAX_REMOVALS
    assert sorted(stored.removed) == list(range(3 * MAX_REMOVALS))

    stored = Stored({})
    stored.failing = 1
    with pytest.raises(Unreachable):
        await session_over(stored).remove(FILE, [(1, index) for index in range(2 * MAX_REMOVALS)], session=5)
    assert len(stored.removed) == MAX_REMOVALS - 1, "the others of its part, and none of a later one"
