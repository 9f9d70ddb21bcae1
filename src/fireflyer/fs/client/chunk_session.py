"""The chunk store as a meta service uses it: a session of a client that lists, cuts and removes the chunks of files.

A meta service decides what has to happen to the chunks of a file and asks for it here, by chain and index of the chunk.
`fs.service` must not import the client, so it declares what it needs as a protocol, `meta.cluster_view.ChunkSession`,
and the command line passes `open_chunk_session` to the process that it starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from typing import Final, TypeVar

from fireflyer.base.errors import Busy
from fireflyer.base.units import SECOND
from fireflyer.fs.client.chunks import Chunks, connect
from fireflyer.fs.schema.chunks import ChunkEntry
from fireflyer.fs.schema.ids import ChunkId
from fireflyer.identity.handshake import Credential

__all__ = ["ClientChunkSession", "open_chunk_session"]

T = TypeVar("T")
MAX_REMOVALS: Final = 64
"""Removals of one request that are under way at the same time."""
OPEN_TIMEOUT_NS: Final = 5 * SECOND


async def open_chunk_session(managers: Sequence[str], credential: Credential) -> ClientChunkSession:
    """A session of this process at the chunk store. Raises `TransientError` when no manager answers as primary."""
    return ClientChunkSession(await connect(managers, credential, name="meta service", timeout_ns=OPEN_TIMEOUT_NS))


class ClientChunkSession:
    """`fireflyer.fs.service.meta.cluster_view.ChunkSession` over a client. All methods raise what `Chunks` raises."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks

    @property
    def session(self) -> int:
        """The client id of the session; another one when the session was replaced."""
        return self._chunks.client

    def chains(self, table: int) -> Sequence[int]:
        """The chains of a chain table, in its order. Raises `NotFound`."""
        return self._chunks.chains(table)

    async def last(self, file: int, chains: Sequence[int]) -> Sequence[tuple[int, int] | None]:
        """Of each chain, index and length in bytes of the last chunk of the file; None: the chain has none."""
        found = await _all(self._chunks.last_chunk(chain, file) for chain in chains)
        return [None if one is None else _stored(one) for one in found]

    async def list(self, chain: int, file: int, start: int, limit: int) -> Sequence[tuple[int, int]]:
        """Index and length in bytes of up to `limit` chunks of the file on this chain, from index `start` on."""
        found = await self._chunks.list(chain, file, start=start, limit=limit)
        return [_stored(one) for one in found]

    async def remove(self, file: int, chunks: Sequence[tuple[int, int]], *, session: int) -> None:
        """`chunks`: (chain, index) of each. Raises `StaleVersion` when `session` is over."""
        for first in range(0, len(chunks), MAX_REMOVALS):
            part = chunks[first : first + MAX_REMOVALS]
            await _all(self._chunks.remove(chain, ChunkId(file, index), session=session) for chain, index in part)

    async def truncate(self, file: int, chain: int, index: int, length: int, *, session: int) -> None:
        """Cuts a chunk to `length` bytes. Raises `StaleVersion` when `session` is over."""
        await self._chunks.truncate(chain, ChunkId(file, index), length, session=session)

    async def write_zeros(
        self, file: int, chain: int, index: int, offset: int, size: int, *, session: int
    ) -> None:  # fmt: skip
        """Writes `size` zero bytes at `offset` of a chunk. Raises `StaleVersion` when `session` is over."""
        await self._chunks.write(chain, ChunkId(file, index), bytes(size), offset, session=session)

    async def close(self) -> None:
        await self._chunks.close()


def _stored(one: ChunkEntry) -> tuple[int, int]:
    """Raises `Busy` for a chunk that is uncommitted or damaged: no decision may depend on its length."""
    if one.held is None:
        raise Busy(f"chunk {one.chunk.index} of file {one.chunk.file} is being written; try again")
    return one.chunk.index, one.held.length


async def _all(works: Iterable[Awaitable[T]]) -> Sequence[T]:
    """All results, in order. Raises the first error, after all have ended."""
    outcomes = await asyncio.gather(*works, return_exceptions=True)
    for one in outcomes:
        if isinstance(one, BaseException):
            raise one
    return [one for one in outcomes if not isinstance(one, BaseException)]
