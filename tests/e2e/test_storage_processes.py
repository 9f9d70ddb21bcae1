"""Storage processes, a manager and a client, all real: updates through a chain, and what goes wrong with machines."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.loops import on_loop
from tests.support.storage_cluster import cluster

from fireflyer.fs.schema.ids import ChunkId

pytestmark = [pytest.mark.serial]


def test_updates_pass_through_the_chain_and_are_read_at_every_replica(tmp_path: Path) -> None:
    @on_loop
    async def work() -> None:
        async with cluster(tmp_path, nodes=3, replicas=3) as store:
            first, second = ChunkId(1, 0), ChunkId(1, 1)
            await store.write(first, 0, b"a" * 100_000)
            await store.write(first, 50_000, b"b" * 100_000)
            await store.write(second, 3, b"holes before")
            await store.remove(second)
            await store.write(ChunkId(2, 7), 0, b"")
            await store.check(absent=(second,))

    work()
