"""`ff fs meta`: a meta service of its own. And the chunk store as meta services use it, by the client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

import click

from fireflyer.base.errors import Busy
from fireflyer.cli.fs_processes import read_config, run_process

if TYPE_CHECKING:
    from fireflyer.fs.client import Chunks
    from fireflyer.fs.schema.chunks import Listed
    from fireflyer.runtime.rpc import Credential

__all__ = ["ClientChunks", "meta_command", "open_chunks"]

T = TypeVar("T")
AT_ONCE: Final = 64
"""Updates of one request that are under way at the same time."""


class ClientChunks:
    """`fireflyer.fs.service.meta_surroundings.ChunkSession` over a client."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks

    @property
    def session(self) -> int:
        return self._chunks.client

    def chains(self, table: int) -> Sequence[int]:
        return self._chunks.chains(table)

    async def last(self, file: int, chains: Sequence[int]) -> Sequence[tuple[int, int] | None]:
        found = await _all(self._chunks.last_chunk(chain, file) for chain in chains)
        return [None if one is None else _stored(one) for one in found]

    async def list(self, chain: int, file: int, start: int, limit: int) -> Sequence[tuple[int, int]]:
        found = await self._chunks.list(chain, file, start=start, limit=limit)
        return [_stored(one) for one in found]

    async def remove(self, file: int, chunks: Sequence[tuple[int, int]], *, session: int) -> None:
        from fireflyer.fs.schema.ids import ChunkId

        for first in range(0, len(chunks), AT_ONCE):
            part = chunks[first : first + AT_ONCE]
            await _all(self._chunks.remove(chain, ChunkId(file, index), session=session) for chain, index in part)

    async def truncate(self, file: int, chain: int, index: int, length: int, *, session: int) -> None:
        from fireflyer.fs.schema.ids import ChunkId

        await self._chunks.truncate(chain, ChunkId(file, index), length, session=session)

    async def write_zeros(
        self, file: int, chain: int, index: int, offset: int, size: int, *, session: int
    ) -> None:  # fmt: skip
        from fireflyer.fs.schema.ids import ChunkId

        await self._chunks.write(chain, ChunkId(file, index), bytes(size), offset, session=session)

    async def close(self) -> None:
        await self._chunks.close()


def _stored(one: Listed) -> tuple[int, int]:
    """Raises `Busy` for a chunk that may be there and may not: nobody may decide anything by its length."""
    if one.held is None:
        raise Busy(f"chunk {one.chunk.index} of file {one.chunk.file} is being written; ask again")
    return one.chunk.index, one.held.length


async def _all(works: Iterable[Awaitable[T]]) -> Sequence[T]:
    """All of them come to their end, before the first error is raised."""
    outcomes = await asyncio.gather(*works, return_exceptions=True)
    for one in outcomes:
        if isinstance(one, BaseException):
            raise one
    return [one for one in outcomes if not isinstance(one, BaseException)]


async def open_chunks(managers: Sequence[str], credential: Credential) -> ClientChunks:
    """A session of this process at the chunk store. Raises `TransientError` when no manager answers as primary."""
    from fireflyer.base.units import SECOND
    from fireflyer.fs.client import connect

    return ClientChunks(await connect(managers, credential, name="meta service", timeout_ns=5 * SECOND))


@click.command("meta", short_help="Run a meta service.")
@click.argument("config_file", metavar="CONFIG")
def meta_command(*, config_file: str) -> int:
    """Run a meta service in the foreground, as the TOML file CONFIG says, until SIGTERM. Only where managers share a
    PostgreSQL: else the manager's process serves files itself."""
    from fireflyer.fs.service.meta_config import MetaConfig
    from fireflyer.fs.service.meta_process import run_meta

    config = read_config(config_file, MetaConfig)
    return run_process(lambda on_ready: run_meta(config, open_chunks=open_chunks, on_ready=on_ready))
