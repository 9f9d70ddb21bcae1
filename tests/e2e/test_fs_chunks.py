"""Clients of a chunk store of real processes: what they read is what was written, whoever is killed meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from tests.support.fs_processes import CHAIN, Insisting, Running, running

from fireflyer.base.errors import Aborted, NotFound, Timeout, UsageError
from fireflyer.base.units import MIB, MS, SECOND
from fireflyer.fs.client import Chunks, Options, Read, Write
from fireflyer.fs.core.request_effects import Limits
from fireflyer.fs.schema.ids import ChunkId

pytestmark = pytest.mark.serial
RANDOM = np.random.default_rng(5)
QUICK = Options(limits=Limits(attempt_ns=SECOND, suspect_ns=200 * MS))


async def everything_works(chunks: Chunks) -> None:
    content = RANDOM.integers(0, 256, 3 * MIB, dtype=np.uint8)
    chunk, other = ChunkId(7, 0), ChunkId(7, 5)
    done = await chunks.write(CHAIN, chunk, content)
    assert done.held is not None
    assert done.held.length == content.nbytes
    back = np.zeros(2 * MIB, dtype=np.uint8)
    assert await chunks.read_into(CHAIN, chunk, back, 1_000_001) == back.nbytes
    assert np.array_equal(back, content[1_000_001:][: back.nbytes])
    assert await chunks.read_into(CHAIN, chunk, back, 3 * MIB - 10) == 10
    assert await chunks.read_into(CHAIN, chunk, back, 4 * MIB) == 0
    with pytest.raises(NotFound):
        await chunks.read_into(CHAIN, other, back)

    await chunks.write(CHAIN, other, b"end", 70_000)
    assert await chunks.read(CHAIN, other, 69_990) == b"\0" * 10 + b"end"
    assert (await chunks.stat(CHAIN, other)).length == 70_003
    await chunks.truncate(CHAIN, other, 70_001)
    assert await chunks.read(CHAIN, other, 70_000) == b"e"
    last = await chunks.last_chunk(CHAIN, 7)
    assert last is not None
    assert last.chunk == other
    before = await chunks.last_chunk(CHAIN, 7, below=5)
    assert before is not None
    assert before.chunk == chunk
    assert [one.chunk for one in await chunks.list(CHAIN, 7)] == [chunk, other]
    await chunks.remove(CHAIN, other)
    assert [one.chunk for one in await chunks.list(CHAIN, 7, start=0, limit=5)] == [chunk]
    with pytest.raises(UsageError, match="do not fit into a chunk"):
        await chunks.write(CHAIN, chunk, b"x", 64 * MIB)


async def batches_work(chunks: Chunks) -> None:
    parts = [RANDOM.integers(0, 256, 1 + 997 * at, dtype=np.uint8) for at in range(40)]
    done = await chunks.write_batch([Write(CHAIN, ChunkId(8, at), part) for at, part in enumerate(parts)])
    assert not [one for one in done if isinstance(one, Exception)]
    back = [np.zeros_like(part) for part in parts]
    reads = [Read(CHAIN, ChunkId(8, at), into) for at, into in enumerate(back)]
    found = await chunks.read_batch([*reads, Read(CHAIN, ChunkId(9, 9), bytearray(3))])
    assert found[:-1] == [part.nbytes for part in parts]
    assert isinstance(found[-1], NotFound)
    assert all(np.array_equal(one, part) for one, part in zip(back, parts, strict=True))
    order = [Write(CHAIN, ChunkId(8, 99), bytes([at]) * 10) for at in range(20)]
    await chunks.write_batch(order)
    assert await chunks.read(CHAIN, ChunkId(8, 99)) == bytes([19]) * 10


@pytest.mark.timeout(120)
def test_chunks_are_written_read_changed_listed_and_removed(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, nodes=2, replicas=2) as run:
            async with await run.connect() as chunks:
                await everything_works(chunks)
                await batches_work(chunks)
            with pytest.raises(Aborted):
                await chunks.stat(CHAIN, ChunkId(7, 0))

    asyncio.run(main())


async def kill_everybody_in_turn(run: Running) -> None:
    for node in (2, 1, 3):
        run.nodes[node].kill()
        await asyncio.sleep(1)
        await run.nodes[node].ended()
        await run.nodes[node].start()
        await run.until_all_serve()
    run.manager.kill()
    await asyncio.sleep(1)
    run.manager.start()
    await asyncio.sleep(1)
    run.manager.kill()
    run.nodes[1].kill()
    await run.nodes[1].ended()
    run.manager.start()
    await run.nodes[1].start()
    await run.until_all_serve()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nothing_acknowledged_is_lost_while_nodes_and_the_manager_are_killed(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, nodes=3, replicas=3) as run, await run.connect(QUICK) as chunks:
            until = asyncio.Event()
            workers = [Insisting(chunks, 10 + number, number) for number in range(6)]
            async with asyncio.TaskGroup() as group:
                for worker in workers:
                    group.create_task(worker.work(until))
                await kill_everybody_in_turn(run)
                until.set()
            async with await run.connect() as other:
                for worker in workers:
                    worker._chunks = other
                    for index in range(3):
                        await worker.check(index)
            done, unknown = sum(one.done for one in workers), sum(one.unknown for one in workers)
            longest_s = max(one.longest_ns for one in workers) / SECOND
            print(f"{done} updates, {unknown} unknown, {sum(one.reads for one in workers)} reads, {longest_s:.1f} s")
            assert not [one for worker in workers for one in worker.failures if not one.startswith(("Busy", "Unreach"))]
            assert done > 200
            assert longest_s < 15

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_node_that_hangs_is_read_around_and_an_update_through_it_is_unknown_at_its_deadline(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, nodes=2, replicas=2) as run, await run.connect(QUICK) as chunks:
            chunk, back = ChunkId(3, 0), bytearray(5)
            await chunks.write(CHAIN, chunk, b"hello")
            run.nodes[2].kill(19)  # SIGSTOP
            for _ in range(4):
                assert await chunks.read_into(CHAIN, chunk, back) == 5
            with pytest.raises(Timeout, match="may or may not"):
                await chunks.write(CHAIN, chunk, b"there", timeout_ns=500 * MS)
            await chunks.write(CHAIN, chunk, b"again")
            assert await chunks.read(CHAIN, chunk) == b"again"

    asyncio.run(main())
