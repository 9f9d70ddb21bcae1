"""Storage processes, a manager and a client, all real: updates through a chain, and what goes wrong with processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import time
from pathlib import Path

import msgspec
import pytest
from tests.support.fs.clusters.data_connection import FOUND, MISSING, STALE
from tests.support.fs.clusters.storage_cluster import (
    FAILURE_TIMEOUT_MS,
    FIRST,
    PATIENT_MS,
    SECOND,
    THIRD,
    Node,
    Store,
    in_cluster,
)
from tests.support.patience import allowed_s

from fireflyer.base.errors import FireflyerError, Unreachable, UsageError
from fireflyer.base.units import MIB
from fireflyer.fs.schema.chunks import (
    Change,
    Done,
    Found,
    Missing,
    Operation,
    Query,
    QueryKind,
    Update,
)
from fireflyer.fs.schema.ids import ChunkId
from fireflyer.fs.schema.manager import AddChains, NewChain
from fireflyer.fs.service.storage.config import StorageTarget
from fireflyer.fs.service.storage.target_directory import make_target
from fireflyer.native import crc32c

pytestmark = [pytest.mark.processes]


def test_updates_pass_through_the_chain_and_are_read_at_every_replica(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await store.write(FIRST, 0, b"a" * 100_000)
        await store.write(FIRST, 50_000, b"b" * 100_000)
        await store.write(SECOND, 3, b"holes before")
        await store.remove(SECOND)
        await store.write(THIRD, 0, os.urandom(5 * MIB))
        await store.check(absent=(SECOND,))
        for member in store.serving():
            node = await store.connection(member.node)
            version = store.chain.version
            stat = await node.ask(Query(1, version, QueryKind.STAT, FIRST))
            last = await node.ask(Query(1, version, QueryKind.LAST, ChunkId(2, 1 << 20)))
            listed = await node.ask(Query(1, version, QueryKind.LIST, ChunkId(1, 0), length=10))
            assert isinstance(stat, Found)
            assert stat.entries[0].held is not None
            assert (stat.entries[0].held.length, stat.entries[0].held.crc) == (150_000, crc32c(store.known[FIRST]))
            assert isinstance(last, Found)
            assert last.entries[0].chunk == THIRD
            assert listed == stat
            assert await node.ask(Query(1, version, QueryKind.STAT, SECOND)) == Missing()
        assert not any("has no answer" in node.log() for node in store.nodes.values())

    in_cluster(work, tmp_path, failure_timeout_ms=PATIENT_MS)


@pytest.mark.slow
def test_a_retry_is_answered_and_not_done_again(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await store.write(SECOND, 0, b"routing is known")
        node = await store.connection(store.serving()[0].node)
        version = store.chain.version
        updates = [
            Update(1, version, store.client, 9, 1, FIRST, Change(Operation.WRITE, 0, 3, crc32c(b"one"))),
            Update(1, version, store.client, 8, 1, FIRST, Change(Operation.WRITE, 3, 3, crc32c(b"two"))),
        ]
        first = await node.ask(updates[0], b"one")
        await node.ask(updates[1], b"two")
        again = await node.ask(updates[0], b"one")
        assert isinstance(first, Done)
        assert isinstance(again, Done)
        assert again.id == first.id
        assert await store.read(FIRST, store.serving()[-1].node) == b"onetwo"

    in_cluster(work, tmp_path, failure_timeout_ms=PATIENT_MS, nodes=2, replicas=2)


async def write_all_the_time(store: Store, stop: asyncio.Event) -> int:
    """Returns how many updates were done."""
    count = 0
    while not stop.is_set():
        chunk = ChunkId(3, count % 7)
        await store.write(chunk, (count * 1009) % 60_000, os.urandom(20_000))
        count += 1
    return count


@pytest.mark.parametrize("which", [0, *(pytest.param(one, marks=pytest.mark.slow) for one in (1, 2))])
def test_a_killed_process_is_replaced_in_its_chain_and_synced_while_writes_go_on(tmp_path: Path, which: int) -> None:
    async def work(store: Store) -> None:
        for index in range(20):
            await store.write(ChunkId(9, index), 0, os.urandom(30_000))
        stop = asyncio.Event()
        writing = asyncio.get_running_loop().create_task(write_all_the_time(store, stop))
        victim = store.nodes[store.serving()[which].node]
        await victim.stop()
        await store.until_serving(2, limit_s=FAILURE_TIMEOUT_MS / 1000 * 4 + 20)
        await store.write(ChunkId(9, 5), 0, b"changed while it was away")
        await store.remove(ChunkId(9, 6))
        await victim.start()
        await store.until_serving(3)
        stop.set()
        assert await writing > 0
        await store.check(absent=(ChunkId(9, 6),))

    in_cluster(work, tmp_path)


@pytest.mark.slow
def test_who_is_asked_to_end_is_replaced_at_once_and_comes_back(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await store.write(FIRST, 0, b"x" * 1000)
        victim = store.nodes[store.serving()[0].node]
        begun_s = time.monotonic()
        assert await victim.stop(signal.SIGTERM) == 0, victim.log()
        await store.until_serving(1)
        assert time.monotonic() - begun_s < allowed_s(FAILURE_TIMEOUT_MS / 1000 + 3)
        await store.write(FIRST, 500, b"y" * 1000)
        await victim.start()
        await store.until_serving(2)
        await store.check()

    in_cluster(work, tmp_path, nodes=2, replicas=2)


@pytest.mark.slow
def test_when_all_are_killed_nothing_that_was_acknowledged_is_lost(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        for index in range(10):
            await store.write(ChunkId(4, index), 0, os.urandom(10_000))
        for node in store.nodes.values():
            node.kill()
        for node in store.nodes.values():
            await node.ended()
        for node in store.nodes.values():
            await node.start()
        await store.until_serving(3)
        await store.check()

    in_cluster(work, tmp_path)


@pytest.mark.slow
def test_a_second_process_for_the_same_directories_is_refused(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await store.write(FIRST, 0, b"one at a time")
        config = msgspec.structs.replace(store.nodes[1].config, node=2)
        twin = Node(config, tmp_path / "twin.json")
        with pytest.raises(AssertionError, match="another process has"):
            await twin.start()
        assert await twin.ended() != 0
        await store.check()

    in_cluster(work, tmp_path, failure_timeout_ms=PATIENT_MS, nodes=1, replicas=1)


@pytest.mark.slow
@pytest.mark.parametrize("more", [True, False])
def test_a_second_process_of_a_node_is_refused_whatever_directories_it_has(tmp_path: Path, more: bool) -> None:
    """If it registered, the first one would be taken for dead while it serves."""

    async def work(store: Store) -> None:
        config = store.nodes[1].config
        another = str(tmp_path / "another disk")
        make_target(another, config.cluster, 901)
        targets = (*(config.targets if more else ()), StorageTarget(901, another))
        twin = Node(msgspec.structs.replace(config, targets=targets), tmp_path / "twin.json")
        try:
            with pytest.raises(AssertionError, match="another process on this machine runs node 1"):
                await twin.start()
        finally:
            with contextlib.suppress(ProcessLookupError):
                twin.kill()
        assert await twin.ended() != 0
        await store.write(FIRST, 0, b"nothing has changed")
        assert store.chain.version == 1

    in_cluster(work, tmp_path, failure_timeout_ms=PATIENT_MS, nodes=1, replicas=1)


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_a_process_that_stood_still_shows_nothing_old(tmp_path: Path, which: int) -> None:
    async def work(store: Store) -> None:
        await store.write(FIRST, 0, b"old")
        member = store.serving()[which]
        version = store.chain.version
        frozen = store.nodes[member.node]
        connection = await store.connection(member.node)
        frozen.kill(signal.SIGSTOP)
        await store.until_serving(1)
        await store.write(FIRST, 0, b"new")
        frozen.kill(signal.SIGCONT)
        for _ in range(200):
            with contextlib.suppress(Unreachable):
                answer = await connection.read(1, version, 1, 0, 0, 3)
                assert answer.status == STALE, answer
        await store.until_serving(2)
        await store.check()

    in_cluster(work, tmp_path, nodes=2, replicas=2)


@pytest.mark.slow
def test_targets_of_one_process_have_chains_of_their_own(tmp_path: Path) -> None:
    """Three nodes with two targets each; chains go round, so each node forwards to each other. One disk goes."""

    async def work(store: Store) -> None:
        chains = [NewChain(2, (2, 3, 1)), NewChain(3, (103, 101, 102))]
        await store.manager.ask(AddChains((chains[1],)))
        with pytest.raises(UsageError):
            await store.manager.ask(AddChains((chains[0],)))
        store.chain_id = 3
        await store.until_serving(3)
        await store.write(FIRST, 0, os.urandom(200_000))
        shutil.rmtree(store.nodes[2].config.targets[1].directory)
        await store.until_serving(2)
        await store.write(FIRST, 100, b"y" * 1000)
        await store.check()
        store.chain_id = 1
        await store.look()
        assert len(store.serving()) == 3
        assert await store.read(FIRST, 1) is None
        known, store.known = store.known, {}
        await store.write(SECOND, 0, b"of chain 1")
        await store.check()
        store.chain_id, store.known = 3, known
        await store.nodes[1].stop()
        await store.until_serving(1)
        await store.nodes[1].start()
        await store.until_serving(2)
        await store.check()

    in_cluster(work, tmp_path, targets=2)


async def write_and_read(store: Store, number: int, stop: asyncio.Event) -> int:
    """A client that checks each of its writes at some replica. Returns how many reads said something."""
    rng, seen = random.Random(number), 0
    while not stop.is_set():
        chunk = ChunkId(50 + number, rng.randrange(6))
        if rng.random() < 0.1 and chunk in store.known:
            await store.remove(chunk)
        else:
            await store.write(chunk, rng.choice([0, 0, 100, 70_000]), os.urandom(rng.choice([10, 4096, 300_000])))
        with contextlib.suppress(FireflyerError, TimeoutError):
            await store.look()
            connection = await store.connection(rng.choice(store.serving()).node)
            answer = await connection.read(1, store.chain.version, chunk.file, chunk.index, 0, MIB, timeout_s=2)
            if answer.status in (FOUND, MISSING):
                found = answer.data if answer.status == FOUND else None
                assert found == store.known.get(chunk), f"{chunk} was read as {len(found or b'')} bytes"
                seen += 1
    return seen


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(2))
def test_whatever_happens_to_processes_every_client_reads_what_it_wrote(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)

    async def inject(store: Store) -> None:
        victims = rng.sample(list(store.nodes.values()), rng.choice([1, 1, 1, 2, 3]))
        how = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
        for victim in victims:
            victim.kill(how)
        away_s = rng.random() * 3
        if how == signal.SIGSTOP:
            await asyncio.sleep(away_s)
            for victim in victims:
                victim.kill(signal.SIGCONT)
            return
        for victim in victims:
            assert await victim.ended() == (0 if how == signal.SIGTERM else -how), victim.log()
        await asyncio.sleep(away_s)
        for victim in victims:
            await victim.start()

    async def work(store: Store) -> None:
        stop = asyncio.Event()
        clients = [asyncio.get_running_loop().create_task(write_and_read(store, one, stop)) for one in range(4)]
        for _ in range(8):
            await inject(store)
            await store.until_serving(3)
        stop.set()
        assert min(await asyncio.gather(*clients)) > 0
        await store.check()

    in_cluster(work, tmp_path, limit_s=240)
