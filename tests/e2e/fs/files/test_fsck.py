"""`ff fs fsck` on a cluster of this machine: finds what was damaged, and nothing in what is busy."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
from tests.support.fs.clusters.local_cluster import LocalCluster

import fireflyer.fs
from fireflyer.fs import usrbio
from fireflyer.fs.client import ChunkId, open_ring_to
from fireflyer.fs.client.ring import Ring
from fireflyer.fs.core.meta.inodes.layout import order_of
from fireflyer.fs.schema.chunks import MAX_PAGE, ChunkEntry
from fireflyer.fs.schema.ids import ChainId
from fireflyer.fs.schema.inodes import Defaults, FileDetails
from fireflyer.fs.tools.fsck import Fsck

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]
MIB = 1 << 20


@pytest.fixture(scope="module")
def cluster(module_path: Path) -> Iterator[LocalCluster]:
    found = LocalCluster(module_path)
    try:
        found.ff("up", "--detach", "--relaxed", "--nodes", "2", "--targets-per-node", "1")
        yield found
    finally:
        found.close()


def test_what_is_damaged_is_found_and_what_nobody_owns_is_removed(cluster: LocalCluster) -> None:
    with fireflyer.fs.connect(f"ff://{cluster.directory}") as files:
        files.makedirs("/a/b")
        for name in ("x", "y"):
            with files.open(f"/a/{name}", "wb") as file:
                file.write(os.urandom(3 * MIB + 5))
        files.link("/a/x", "/a/b/z")
        assert "0 faults" in cluster.ff("fsck")
        inode = files.stat("/a/y").inode
        body = inode.body
        assert isinstance(body, FileDetails)
        with open_ring_to(str(cluster.directory)) as ring:
            chain = order_of(body.layout, ring.chains())[9 % body.layout.stripe]
            ring.prepare_write(1, chain, ChunkId(inode.id, 9), b"behind")
            ring.prepare_write(2, chain, ChunkId(inode.id + 100, 0), b"nobody's")
            ring.prepare_write(3, chain, ChunkId(inode.id + 100, 7), b"nobody's")
            ring.prepare_write(4, chain, ChunkId(files.stat("/a/b").inode.id, 0), b"a directory's")
            left = 4
            while left:
                over = ring.wait(1)
                assert not over.errors
                left -= len(over.tags)
        said = cluster.ff("fsck", "--repair", "--yes", code=1)
        assert said == ""
        with open_ring_to(str(cluster.directory)) as ring:
            shown = dict[str, int]()
            found = Fsck(files, ring, progress=lambda what, done, _: shown.update({what: done})).run(settle_s=0)
        assert [(fault.kind, fault.path) for fault in found.faults] == [("behind", "/a/y")]
        assert shown == {"Chunks": found.chunks, "Names": found.directories + found.others}
        files.truncate("/a/y", 20 * MIB)
        files.unlink("/a/y")
        assert "0 faults" in cluster.ff("fsck", "--names-only")


def test_asks_are_as_many_as_chunks_need_however_many_files_there_were(cluster: LocalCluster) -> None:
    with fireflyer.fs.connect(f"ff://{cluster.directory}") as files, open_ring_to(str(cluster.directory)) as ring:

        def asks() -> tuple[int, int]:
            found = Fsck(files, ring, progress=lambda what, done, total: None).run(settle_s=0)
            assert not found.faults
            return found.asks, found.chunks

        cluster.ff("gc", "--wait", "60")
        files.makedirs("/many")
        before, chunks = asks()
        assert before <= len(ring.chains()) + chunks // MAX_PAGE
        first = files.open_file("/many/first", "xb").inode_id
        for number in range(500):
            files.mkdir(f"/many/{number}")
        files.rmtree("/many")
        files.mkdir("/many")
        files.set_defaults("/many", Defaults(stripe=1))
        assert files.open_file("/many/last", "xb").inode_id >= first + 500
        assert asks()[0] == before
        with files.open_file("/many/large", "xb") as file:
            for at in range(MAX_PAGE + 1):
                file.pwrite(b"chunk", at * MIB)
        after, chunks = asks()
        assert chunks > MAX_PAGE
        assert after == before + 1
        files.unlink("/many/large")


class Passing:
    """Chunks on a chain that are made and removed all the time, and pages of that chain between them."""

    def __init__(self, ring: Ring, chain: ChainId, chunks: list[ChunkId]) -> None:
        self._ring, self._chain = ring, chain
        self._chunks = dict(enumerate(chunks, 1))
        self._there = dict.fromkeys(self._chunks, False)
        for number in self._chunks:
            self._change(number)

    def _change(self, number: int) -> None:
        if self._there[number]:
            self._ring.prepare_remove(number, self._chain, self._chunks[number])
        else:
            self._ring.prepare_write(number, self._chain, self._chunks[number], b"goes")

    def hear(self, *, goes_on: bool = True) -> tuple[ChunkEntry, ...] | None:
        """The page, if it came."""
        over = self._ring.wait(1)
        assert not over.errors
        for number in over.tags.tolist():
            if number:
                self._there[number] = not self._there[number]
                if goes_on or self._there[number]:
                    self._change(number)
        page = over.values.get(0)
        assert page is None or isinstance(page, tuple)
        return page

    def every(self, start: ChunkId, *, page_chunks: int) -> list[ChunkId]:
        told: list[ChunkId] = []
        while True:
            self._ring.prepare_list_all(0, self._chain, start, limit=page_chunks)
            while (page := self.hear()) is None:
                pass
            told += [one.chunk for one in page]
            if len(page) < page_chunks:
                return told
            start = ChunkId(told[-1].file, told[-1].index + 1)


def test_the_chunks_of_a_chain_are_told_once_while_others_come_and_go(cluster: LocalCluster) -> None:
    base = 1 << 40
    lasting = [ChunkId(base + number, number % 3) for number in range(100)]
    with open_ring_to(str(cluster.directory)) as ring:
        chain = ring.chains()[0]
        for number, one in enumerate(lasting):
            ring.prepare_write(number, chain, one, b"stays")
        assert not ring.wait(len(lasting)).errors
        passing = [ChunkId(base + number % 100, 10 + number // 100) for number in range(200)]
        changes = Passing(ring, chain, passing)
        for _ in range(20):
            told = changes.every(ChunkId(base, 0), page_chunks=7)
            assert told == sorted(set(told))
            assert set(lasting) <= set(told) <= {*lasting, *passing}
        while ring.under_way:
            changes.hear(goes_on=False)
        for number, one in enumerate(lasting):
            ring.prepare_remove(number, chain, one)
        assert not ring.wait(len(lasting)).errors


def test_a_busy_file_system_has_no_faults(cluster: LocalCluster) -> None:
    stop = threading.Event()
    with fireflyer.fs.connect(f"ff://{cluster.directory}") as files:
        files.mkdir("/busy")

        def work(own: int) -> None:
            step = 0
            while not stop.is_set():
                step += 1
                path = f"/busy/{own}-{step % 10}"
                with files.open(path, "wb") as file:
                    file.write(bytes(step % 7 * MIB // 4 + 1))
                files.rename(path, f"/busy/{own}.now")
                if step % 5 == 0:
                    files.unlink(f"/busy/{own}.now")

        threads = [threading.Thread(target=work, args=(own,)) for own in range(3)]
        for one in threads:
            one.start()
        try:
            assert "0 faults" in cluster.ff("fsck")
        finally:
            stop.set()
            for one in threads:
                one.join()


def test_rings_of_the_user_space_interface_reach_files_by_their_inodes(cluster: LocalCluster, tmp_path: Path) -> None:
    """A directory here stands for the mount: its files have the names of those in the cluster."""
    with fireflyer.fs.connect(f"ff://{cluster.directory}") as files:
        usrbio.attach(str(tmp_path), files, by_path=True)
        with files.open("/pages", "wb") as file:
            file.truncate(8 * MIB)
        (tmp_path / "pages").touch()
        fd = os.open(tmp_path / "pages", os.O_RDWR)
        memory = SharedMemory(create=True, size=2 * MIB)
        vector = usrbio.make_iovec(memory, str(tmp_path))
        memory.unlink()
        try:
            usrbio.register_fd(fd)
            writes = usrbio.make_ioring(str(tmp_path), 16, for_read=False)
            data = os.urandom(MIB)
            vector[:MIB] = data
            for at in range(16):
                writes.prepare(vector[at << 16 : (at + 1) << 16], False, fd, (at * 5 % 16) << 19)
            assert [one.result for one in writes.submit().wait(min_results=16)] == [1 << 16] * 16
            reads = usrbio.make_ioring(str(tmp_path), 16)
            for at in range(16):
                reads.prepare(vector[MIB + (at << 16) : MIB + ((at + 1) << 16)], True, fd, (at * 5 % 16) << 19)
            assert [one.result for one in reads.submit().wait(min_results=16)] == [1 << 16] * 16
            assert bytes(vector[MIB:]) == data
            usrbio.force_fsync(fd)
            assert files.stat("/pages").st_size == 8 * MIB
            with files.open_inode(files.stat("/pages").st_ino) as again:
                assert again.pread(5 << 19, 1 << 16) == data[1 << 16 : 2 << 16]
        finally:
            usrbio.deregister_fd(fd)
            os.close(fd)
            usrbio.detach(str(tmp_path))
            del vector
            memory.close()
