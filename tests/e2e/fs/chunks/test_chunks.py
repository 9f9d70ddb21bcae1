"""Clients of a chunk store of real processes: what they read is what was written, whoever is killed meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from tests.support.fs.clusters.processes import CHAIN, RetryingWriter, Running, running
from tests.support.patience import allowed_s

from fireflyer.base.errors import Aborted, NotFound, PermissionDenied, Timeout, UsageError
from fireflyer.base.units import MIB, MS, SECOND
from fireflyer.fs.client import MISSING, READ, Chunks, Options, PerProcess, Read, Ring, Write, connect, open_ring
from fireflyer.fs.core.capability import Rights
from fireflyer.fs.core.requests.effects import Limits
from fireflyer.fs.schema.chunks import ChunkEntry, ChunkVersion
from fireflyer.fs.schema.ids import ChunkId
from fireflyer.fs.schema.sessions import EndSession, GetSessions, SessionList

pytestmark = pytest.mark.processes
RANDOM = np.random.default_rng(5)
ONE_SENDER = Options(limits=Limits(senders=1, large_bytes=8192, grant_bytes=65536))
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
    with pytest.raises(NotFound, match="the newest"):
        await chunks.write(77, chunk, b"x", timeout_ns=600 * SECOND)
    with pytest.raises(UsageError, match="exceed the maximum chunk size"):
        await chunks.write(CHAIN, chunk, b"x", 64 * MIB)


async def truncate(chunks: Chunks) -> None:
    """Its outcome may be unknown, when the session is over meanwhile."""
    with contextlib.suppress(Timeout):
        await chunks.truncate(CHAIN, ChunkId(7, 1), 1)


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


def a_ring_does_the_same(ring: Ring) -> None:
    """Batches of plain reads, odd answers among them, and updates beside them."""
    count, size = 300, 4096
    content = RANDOM.integers(0, 256, (count, size), dtype=np.uint8)
    for at in range(count):
        ring.prepare_write(at, CHAIN, ChunkId(20, at // 100), content[at], at % 100 * size)
    written = 0
    while written < count:
        over = ring.wait(1)
        assert not over.errors
        assert len(over.values) == len(over.tags)
        written += len(over.tags)
    memory = np.zeros((count + 2, size), dtype=np.uint8)
    reads = np.zeros(count + 2, READ)
    order = RANDOM.permutation(count)
    reads["chain"], reads["file"], reads["length"], reads["at"] = CHAIN, 20, size, np.arange(count + 2) * size
    reads["index"][:count], reads["offset"][:count] = order // 100, order % 100 * size
    reads["index"][count:] = 50, 2
    reads["offset"][count + 1] = 100 * size - 10
    ring.prepare_reads(1000, reads, memory)
    ring.prepare_stat(1, CHAIN, ChunkId(20, 1))
    over = ring.wait(count + 3)
    counts = dict(zip(over.tags.tolist(), over.counts.tolist(), strict=True))
    assert counts == dict.fromkeys(range(1000, 1000 + count), size) | {1000 + count: MISSING, 1001 + count: 10, 1: 0}
    held = over.values[1]
    assert isinstance(held, ChunkVersion)
    assert held.length == 100 * size
    assert np.array_equal(memory[:count], content[order])
    assert ring.under_way == 0
    assert len(ring.wait(5, 0).tags) == 0
    reads["chain"] = 77
    ring.prepare_reads(0, reads[:2], memory, timeout_ns=600 * SECOND)
    assert [type(one) for one in ring.wait(2).errors.values()] == [NotFound, NotFound]
    with pytest.raises(UsageError, match="a buffer of"):
        ring.prepare_reads(0, reads, memory[:2])


def read_while_a_node_is_killed(run: Running, ring: Ring) -> None:
    memory = np.zeros((64, 4096), dtype=np.uint8)
    reads = np.zeros(64, READ)
    reads["chain"], reads["file"], reads["length"], reads["at"] = CHAIN, 20, 4096, np.arange(64) * 4096
    for turn in range(20):
        if turn == 5:
            run.nodes[2].kill()
        ring.prepare_reads(turn * 64, reads, memory)
        if turn % 2:
            over = ring.wait(128)
            assert not over.errors
            assert (over.counts == 4096).all()
            assert len(over.tags) == 128


@pytest.mark.timeout(120)
def test_both_faces_do_all_operations_and_a_ring_goes_on_when_a_node_is_killed(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, nodes=2, replicas=2) as run:
            async with await run.connect() as chunks:
                await everything_works(chunks)
                await batches_work(chunks)
            with pytest.raises(Aborted):
                await chunks.stat(CHAIN, ChunkId(7, 0))
            async with await run.connect() as chunks:
                first = chunks.client
                await run.asking.ask(EndSession(first))
                while chunks.client == first:
                    await truncate(chunks)
                await chunks.truncate(CHAIN, ChunkId(7, 1), 1)
            async with await run.connect(ONE_SENDER) as chunks:
                await batches_work(chunks)
            with open_ring([run.manager.address], run.site.service, options=QUICK) as ring:
                a_ring_does_the_same(ring)
                read_while_a_node_is_killed(run, ring)

    asyncio.run(main())


def test_users_touch_the_files_that_a_capability_names(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, nodes=1, replicas=1) as run:
            await run.until_all_serve()
            admin = await run.site.user(run.manager, "admin")
            async with await connect([run.manager.address], admin) as chunks:
                with pytest.raises(PermissionDenied):
                    await chunks.write(CHAIN, ChunkId(5, 0), b"no")
                await chunks.acquire(5, 6, Rights.READ | Rights.WRITE)
                await chunks.write(CHAIN, ChunkId(5, 0), b"yes")
                assert await chunks.read(CHAIN, ChunkId(5, 0)) == b"yes"
                with pytest.raises(PermissionDenied):
                    await chunks.read_into(CHAIN, ChunkId(7, 0), bytearray(3))
                await run.nodes[1].stop()
                await run.nodes[1].start()
                await run.until_all_serve()  # on a busy machine that takes longer than a read waits
                assert await chunks.read(CHAIN, ChunkId(5, 0)) == b"yes"
                with open_ring([run.manager.address], admin) as ring:
                    ring.acquire(5, 6, Rights.READ)
                    ring.prepare_list(1, CHAIN, 5)
                    ring.prepare_last_chunk(2, CHAIN, 5)
                    ring.prepare_last_chunk(3, CHAIN, 6)
                    ring.prepare_list(4, CHAIN, 5, start=1)
                    ring.prepare_list(5, CHAIN, 7)
                    ring.prepare_write(6, CHAIN, ChunkId(5, 0), b"no")
                    over = ring.wait(6)
                    listed = over.values[2]
                    assert isinstance(listed, ChunkEntry)
                    assert listed.chunk == ChunkId(5, 0)
                    assert over.values == {1: (listed,), 2: listed, 4: ()}
                    assert dict(zip(over.tags.tolist(), over.counts.tolist(), strict=True))[3] == MISSING
                    assert [type(over.errors[tag]) for tag in sorted(over.errors)] == [PermissionDenied] * 2
                    with pytest.raises(UsageError, match="chunks at a time"):
                        ring.prepare_list(7, CHAIN, 5, limit=5000)
            async with await connect([run.manager.address], await run.site.user(run.manager, "eve")) as chunks:
                with pytest.raises(PermissionDenied):
                    await chunks.acquire(5, 6, Rights.READ)

    asyncio.run(main())


async def time_out(chunks: Chunks, index: int) -> None:
    with pytest.raises(Timeout, match="may or may not"):
        await chunks.write(CHAIN, ChunkId(5, index), b"unknown", timeout_ns=300 * MS)


@pytest.mark.timeout(60)
def test_a_client_with_too_many_unknown_outcomes_goes_on_in_another_session(tmp_path: Path) -> None:
    options = Options(limits=Limits(channels=8, unknown=3))

    async def main() -> None:
        async with running(tmp_path, nodes=1, replicas=1) as run:
            await run.until_all_serve()
            user = await run.site.user(run.manager, "admin")
            async with await connect([run.manager.address], user, options=options) as chunks:
                await chunks.acquire(5, 6, Rights.READ | Rights.WRITE)
                await chunks.write(CHAIN, ChunkId(5, 9), b"connected")
                with open_ring([run.manager.address], user, options=options) as ring:
                    ring.acquire(5, 5, Rights.WRITE)
                    first, second = chunks.client, ring.client
                    run.nodes[1].kill(signal.SIGSTOP)
                    for index in range(3):
                        ring.prepare_write(index, CHAIN, ChunkId(5, index), b"unknown", timeout_ns=300 * MS)
                    await asyncio.gather(*(time_out(chunks, index) for index in range(3)))
                    assert [type(one) for one in ring.wait(3).errors.values()] == [Timeout] * 3
                    run.nodes[1].kill(signal.SIGCONT)
                    for index in range(3):
                        await chunks.write(CHAIN, ChunkId(5, index), b"known")
                        assert await chunks.read(CHAIN, ChunkId(5, index), 0, 5) == b"known"
                    assert chunks.client > second > first
                    ring.prepare_write(0, CHAIN, ChunkId(5, 7), b"ring")
                    assert not ring.wait(1).errors
                    assert ring.client > second
                    assert await chunks.read(CHAIN, ChunkId(5, 7)) == b"ring"
                    sessions = await run.asking.ask(GetSessions())
                    assert isinstance(sessions, SessionList)
                    assert [one.client for one in sessions.sessions] == sorted([ring.client, chunks.client])

    asyncio.run(main())


def write_in_a_child(rings: PerProcess[Ring], ring: Ring, chunks: Chunks, said: Connection) -> None:
    """With what the parent opened, then with a ring of its own."""
    try:
        ring.prepare_write(0, CHAIN, ChunkId(4, 0), b"mixed")
    except UsageError as error:
        said.send(str(error))
    try:
        chunks.write(CHAIN, ChunkId(4, 0), b"mixed").send(None)
    except UsageError as error:
        said.send(str(error))
    ring.close()
    with pytest.raises(StopIteration):
        chunks.close().send(None)
    own = rings.get()
    assert own is rings.get()
    gc.collect()
    own.prepare_write(0, CHAIN, ChunkId(4, 1), b"own")
    said.send((own.client, own.wait(1).errors))


@pytest.mark.timeout(60)
def test_a_forked_child_may_not_use_its_parents_client_and_opens_its_own(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, nodes=1, replicas=1) as run:
            await run.until_all_serve()
            rings = PerProcess(open_ring, [run.manager.address], run.site.service)
            async with await run.connect() as chunks:
                ours, theirs = multiprocessing.Pipe()
                before = rings.get()
                given = (rings, before, chunks, theirs)
                child = multiprocessing.get_context("fork").Process(target=write_in_a_child, args=given)
                child.start()
                for _ in range(2):
                    assert ours.recv() == (
                        f"this client belongs to process {os.getpid()}; a forked child must open its own, with "
                        "fireflyer.fs.client.PerProcess"
                    )
                client, errors = ours.recv()
                assert client not in (before.client, chunks.client)
                assert not errors
                child.join()
                assert child.exitcode == 0
                assert await chunks.read(CHAIN, ChunkId(4, 1)) == b"own"
                before.prepare_write(0, CHAIN, ChunkId(4, 0), b"parent's")
                assert not before.wait(1).errors
                assert await chunks.read(CHAIN, ChunkId(4, 0)) == b"parent's"
                sessions = await run.asking.ask(GetSessions())
                assert isinstance(sessions, SessionList)
                assert [one.client for one in sessions.sessions] == sorted([before.client, chunks.client])
                before.close()

    asyncio.run(main())


async def kill_everybody_in_turn(run: Running) -> None:
    version = await run.until_all_serve()
    for node in (2, 1, 3):
        await run.nodes[node].stop()
        if node != 1:  # the others go on without it; the first one comes back before anybody has noticed
            await run.until(lambda status, seen=version: status.chains[0].version > seen)  # type: ignore[misc]
        await run.nodes[node].start()
        version = await run.until_all_serve(version)
    await asyncio.to_thread(run.manager.kill)
    await asyncio.to_thread(run.manager.start)
    await asyncio.to_thread(run.manager.kill)
    await run.nodes[1].stop()
    await asyncio.to_thread(run.manager.start)
    await run.nodes[1].start()
    await run.until_all_serve(version)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nothing_acknowledged_is_lost_while_nodes_and_the_manager_are_killed(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, nodes=3, replicas=3) as run, await run.connect(QUICK) as chunks:
            until = asyncio.Event()
            workers = [RetryingWriter(chunks, 10 + number, number) for number in range(6)]
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
            assert min(one.done for one in workers) >= 5  # how many more depends on the machine
            assert longest_s < allowed_s(15)

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_node_that_hangs_is_read_around_and_an_update_through_it_is_unknown_at_its_deadline(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, nodes=2, replicas=2) as run, await run.connect(QUICK) as chunks:
            chunk, back = ChunkId(3, 0), bytearray(5)
            await chunks.write(CHAIN, chunk, b"hello")
            with open_ring([run.manager.address], run.site.service, options=QUICK) as ring:
                run.nodes[2].kill(signal.SIGSTOP)
                with pytest.raises(Timeout, match="may or may not"):
                    await chunks.write(CHAIN, chunk, b"there", timeout_ns=500 * MS)
                reads, memory = np.zeros(8, READ), bytearray(5)
                reads["chain"], reads["file"], reads["length"] = CHAIN, chunk.file, 5
                ring.prepare_reads(0, reads, memory)
                over = ring.wait(8)
                assert over.counts.tolist() == [5] * 8
                assert bytes(memory) in (b"hello", b"there")
            assert await chunks.read_into(CHAIN, chunk, back) == 5
            await chunks.write(CHAIN, chunk, b"again")
            assert await chunks.read(CHAIN, chunk) == b"again"

    asyncio.run(main())
