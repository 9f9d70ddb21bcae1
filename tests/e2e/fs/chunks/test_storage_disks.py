"""Storage processes whose disks, directories and limits of the system fail them, in a chain of real processes."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.fs.clusters.data_connection import MESSAGE, frame
from tests.support.fs.clusters.storage_cluster import (
    FIRST,
    PATIENT_MS,
    SECOND,
    Node,
    Store,
    in_cluster,
)

from fireflyer.base.errors import UsageError
from fireflyer.base.units import KIB, MIB
from fireflyer.fs.schema import data
from fireflyer.fs.schema.ids import ChunkId
from fireflyer.fs.service.storage.targets import LOOK_S
from fireflyer.runtime.address import Address

pytestmark = [pytest.mark.processes]


@pytest.mark.slow
def test_a_directory_that_is_removed_takes_its_target_out_of_the_chain(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await store.write(FIRST, 0, b"x" * 1000)
        victim = store.nodes[store.serving()[-1].node]
        shutil.rmtree(victim.target_directory)
        await store.until_serving(2)
        await store.write(FIRST, 0, b"y" * 1000)
        await store.check()
        await victim.stop()
        await store.check()

    in_cluster(work, tmp_path)


@pytest.mark.slow
def test_a_full_disk_refuses_writes_and_goes_on_with_reads_and_removals(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        async def fill() -> None:
            for index in range(200):
                await store.write(ChunkId(5, index), 0, os.urandom(MIB))

        with pytest.raises(UsageError, match="no_space"):
            await fill()
        filled = list(store.known)
        assert len(filled) > 8
        await store.check()
        for chunk in filled:
            await store.remove(chunk)
        await store.write(FIRST, 0, b"there is space again")
        await store.check(absent=(ChunkId(5, 0),))
        assert len(store.serving()) == 2

    in_cluster(work, tmp_path, failure_timeout_ms=PATIENT_MS, nodes=2, replicas=2, capacity_bytes=64 * MIB)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 150 MiB where node 2 has its disk."""
    path = tmp_path / "disk2.0"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=150m", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this user may not mount file systems")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.mark.slow
def test_a_disk_that_is_really_full_refuses_and_goes_on(tmp_path: Path, small_disk: Path) -> None:
    async def work(store: Store) -> None:
        async def fill() -> None:
            for index in range(200):
                await store.write(ChunkId(5, index), 0, os.urandom(MIB))

        with pytest.raises(UsageError, match="no_space"):
            await fill()
        assert len(store.known) > 40
        assert len(store.serving()) == 2
        await store.check()
        assert os.statvfs(small_disk).f_bavail * 4096 < 70 * MIB
        for chunk in list(store.known):
            await store.remove(chunk)
        await store.write(FIRST, 0, b"removed chunks leave space")
        await store.check()
        victim = store.nodes[2]
        await victim.stop()
        await store.until_serving(1)
        await victim.start()
        await store.until_serving(2)
        await store.check()

    in_cluster(work, tmp_path, nodes=2, replicas=2)


@pytest.mark.slow
def test_a_journal_that_is_damaged_is_put_aside_and_the_target_synced(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        for index in range(50):
            await store.write(ChunkId(5, index), 0, os.urandom(1000))
        victim = store.nodes[store.serving()[0].node]
        await victim.stop()
        (journal,) = victim.target_directory.glob("chunks/journal*")
        with journal.open("r+b") as file:
            file.seek(3 * 4096 + 100)
            file.write(b"\0\1\2\3" * 5)
        await store.until_serving(1)
        await victim.start()
        await store.until_serving(2)
        await store.check()
        assert (victim.target_directory / "chunks.damaged").is_dir()
        assert "starts empty" in victim.log()

    in_cluster(work, tmp_path, nodes=2, replicas=2)


@pytest.mark.slow
def test_a_process_without_descriptors_keeps_its_targets(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await store.write(FIRST, 0, b"before the load")
        node = store.nodes[1]
        node.kill(signal.SIGTERM)
        await node.ended()
        await node.start(NOFILE=90)
        await store.until_serving(1)
        address = Address.parse(store.routing.nodes[0].address)
        workload = [socket.create_connection(address) for _ in range(150)]
        await store.until(lambda: _has_open(node, 88))  # half-open connections give way to new ones, one by one
        await asyncio.sleep(2 * LOOK_S)  # so that its directory was looked at meanwhile
        for one in workload:
            one.close()
        assert "given up" not in node.log()
        await store.write(SECOND, 0, b"after it")
        await store.check()

    in_cluster(work, tmp_path, nodes=1, replicas=1)


async def _has_open(node: Node, descriptors: int) -> bool:
    assert node.process is not None
    return len(os.listdir(f"/proc/{node.process.pid}/fd")) >= descriptors


@pytest.mark.slow
def test_a_limit_of_the_system_is_a_full_disk(tmp_path: Path) -> None:
    """Files of one replica may not grow any more: what is refused is refused everywhere, and nothing is lost."""

    async def work(store: Store) -> None:
        await store.write(FIRST, 0, b"x" * 1000)
        victim = store.nodes[store.serving()[-1].node]
        victim.kill(signal.SIGTERM)
        await victim.ended()
        await victim.start(FSIZE=80 * MIB)
        await store.until_serving(2)

        async def fill() -> None:
            for index in range(200):
                await store.write(ChunkId(5, index), 0, os.urandom(MIB))
                if len(store.serving()) < 2:
                    raise UsageError("it has left the chain")

        with pytest.raises(UsageError):
            await fill()
        await store.check()
        assert len(store.known) > 8

    in_cluster(work, tmp_path, nodes=2, replicas=2)


def flip(directory: Path, content: bytes) -> int:
    """Turns a bit over in every copy of these bytes below the directory; returns how many there were."""
    found = 0
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.stat().st_size:
            held = path.read_bytes()
            at = held.find(content)
            while at >= 0:
                found += 1
                with path.open("r+b") as file:
                    file.seek(at + 100)
                    file.write(bytes([held[at + 100] ^ 4]))
                at = held.find(content, at + 1)
    return found


@pytest.mark.parametrize("finder", [pytest.param("scrub", marks=pytest.mark.slow), "doubt"])
def test_flipped_bits_are_found_and_mended_from_another_replica(tmp_path: Path, finder: str) -> None:
    async def work(store: Store) -> None:
        content = os.urandom(64 * KIB)
        await store.write(FIRST, 0, content)
        await store.write(SECOND, 0, os.urandom(64 * KIB))
        member = store.serving()[1]
        version = store.chain.version
        assert flip(store.nodes[member.node].target_directory, content) == 1
        if finder == "doubt":
            node = await store.connection(member.node)
            node.send(frame(MESSAGE, data.encode(data.DataRequest(1, data.CorruptionHint(1, FIRST)))))

        async def mended() -> bool:
            await store.look()
            return store.chain.version >= version + 3 and len(store.serving()) == 2

        await store.until(mended)
        await store.check()
        assert "is damaged" in store.nodes[member.node].log()

    rate = 64 * MIB if finder == "scrub" else 0
    in_cluster(
        work, tmp_path, failure_timeout_ms=PATIENT_MS, nodes=2, replicas=2, scrub_bytes_per_s=rate, scrub_rest_s=1
    )
