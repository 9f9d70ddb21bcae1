"""`ff fs fsck` on a cluster of this machine: finds what is planted, and nothing in what is busy."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
from tests.support.fs_local import LocalCluster

import fireflyer.fs
from fireflyer.fs import usrbio
from fireflyer.fs.client import ChunkId, open_ring_to
from fireflyer.fs.core.meta.layout import order_of
from fireflyer.fs.schema.inodes import FileBody
from fireflyer.fs.tools.fsck import Fsck

pytestmark = [pytest.mark.serial, pytest.mark.slow, pytest.mark.timeout(300)]
MIB = 1 << 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    found = LocalCluster(tmp_path_factory.mktemp("cluster"))
    try:
        found.ff("up", "--detach", "--relaxed", "--nodes", "2", "--targets-per-node", "1")
        yield found
    finally:
        found.close()


def test_what_is_planted_is_found_and_what_nobody_owns_is_removed(cluster: LocalCluster) -> None:
    with fireflyer.fs.connect(f"ff://{cluster.directory}") as files:
        files.makedirs("/a/b")
        for name in ("x", "y"):
            with files.open(f"/a/{name}", "wb") as file:
                file.write(os.urandom(3 * MIB + 5))
        files.link("/a/x", "/a/b/z")
        assert "0 faults" in cluster.ff("fsck")
        inode = files.stat("/a/y").inode
        body = inode.body
        assert isinstance(body, FileBody)
        with open_ring_to(str(cluster.directory)) as ring:
            chain = order_of(body.layout, ring.chains())[9 % body.layout.stripe]
            ring.prepare_write(1, chain, ChunkId(inode.id, 9), b"behind")
            ring.prepare_write(2, chain, ChunkId(inode.id + 100, 0), b"nobody's")
            ring.prepare_write(3, chain, ChunkId(inode.id + 100, 7), b"nobody's")
            left = 3
            while left:
                over = ring.wait(1)
                assert not over.errors
                left -= len(over.tags)
        said = cluster.ff("fsck", "--repair", "--yes", code=1)
        assert said == ""
        with open_ring_to(str(cluster.directory)) as ring:
            found = Fsck(files, ring, progress=lambda what, done, total: None).run(settle_s=0)
        assert [(fault.kind, fault.path) for fault in found.faults] == [("behind", "/a/y")]
        files.truncate("/a/y", 20 * MIB)
        files.unlink("/a/y")
        assert "0 faults" in cluster.ff("fsck", "--no-sweep")


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
