"""Programs written for 3FS's user-space interface run over ours, here with a directory in the place of a mount."""

from __future__ import annotations

import datetime
import errno
import gc
import importlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest

from fireflyer.base.errors import UsageError
from fireflyer.fs import usrbio
from fireflyer.fs.tools.trees import LocalTree

PAGE = 4096


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[str]:
    usrbio.attach(str(tmp_path), LocalTree(str(tmp_path)), by_path=True)
    yield str(tmp_path)
    usrbio.detach(str(tmp_path))


@pytest.fixture
def fd(mount: str) -> Iterator[int]:
    found = os.open(f"{mount}/file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(found, 64 * PAGE)
    usrbio.register_fd(found)
    yield found
    usrbio.deregister_fd(found)
    os.close(found)


@pytest.fixture
def io() -> Iterator[Any]:
    usrbio.register()
    yield importlib.import_module("hf3fs_fuse.io")
    for name in usrbio.PACKAGES:
        sys.modules.pop(name, None)


def test_a_cache_of_pages_as_inference_servers_keep_it(mount: str, io: Any) -> None:
    """Shared memory, two rings, one file; as the public clients do it."""
    path, entries = f"{mount}/pages", 8
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 32 * PAGE)
    io.register_fd(fd)
    found = io.extract_mount_point(path)
    written, read = (SharedMemory(size=PAGE * entries, create=True) for _ in range(2))
    writes = io.make_ioring(found, entries, for_read=False, timeout=1, numa=-1)
    reads = io.make_ioring(found, entries, for_read=True, timeout=1, numa=-1)
    from_memory, into_memory = io.make_iovec(written, found), io.make_iovec(read, found)
    written.unlink()
    read.unlink()
    pages = [bytes([number]) * PAGE for number in range(entries)]
    offsets = [number * 3 % 32 * PAGE for number in range(entries)]
    from_memory[:] = b"".join(pages)
    for at, offset in enumerate(offsets):
        writes.prepare(from_memory[at * PAGE : (at + 1) * PAGE], False, fd, offset)
    results = writes.submit().wait(min_results=entries, timeout=datetime.timedelta(seconds=60))
    assert [one.result for one in results] == [PAGE] * entries
    for at, offset in enumerate(offsets):
        into = into_memory[at * PAGE : (at + 1) * PAGE]
        reads.prepare(into, True, fd, offset, userdata=(into, pages[at]))
        del into
    results = reads.submit().wait(min_results=entries)
    assert [one.result for one in results] == [PAGE] * entries
    assert all(memoryview(one.userdata[0]) == one.userdata[1] for one in results)
    io.deregister_fd(fd)
    os.close(fd)
    del reads, writes, from_memory, into_memory, results
    gc.collect()
    written.close()
    read.close()


def test_what_was_given_back_is_kept_by_nobody_while_the_ring_waits_for_more(mount: str, fd: int) -> None:
    class Page: ...

    ring, page = usrbio.make_ioring(mount, 4), Page()
    kept = weakref.ref(page)
    memory = bytearray(PAGE)
    ring.prepare(memory, True, fd, 0, userdata=page)
    del page
    assert [one.result for one in ring.submit().wait(min_results=1)] == [PAGE]
    assert kept() is None
    memory.clear()  # BufferError while there is a view of it


def test_the_end_of_a_file_gives_fewer_bytes_and_errors_are_numbers_below_zero(mount: str, fd: int) -> None:
    memory = bytearray(2 * PAGE)
    ring = usrbio.make_ioring(mount, 4)
    ring.prepare(memory, True, fd, 63 * PAGE)
    ring.prepare(memory, True, fd, 70 * PAGE)
    assert [one.result for one in ring.submit().wait(min_results=2)] == [PAGE, 0]
    only_read = os.open(f"{mount}/file", os.O_RDONLY)
    usrbio.register_fd(only_read)
    writes = usrbio.make_ioring(mount, 4, for_read=False)
    writes.prepare(b"x", False, fd, 5)
    writes.prepare(b"y", False, only_read, 6)
    assert [one.result for one in writes.submit().wait(min_results=2)] == [1, -errno.EBADF]
    usrbio.deregister_fd(only_read)
    os.close(only_read)
    assert os.pread(fd, 3, 4) == b"\0x\0"


def test_what_a_ring_does_not_take(mount: str, fd: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    ring = usrbio.make_ioring(mount, 1)
    with pytest.raises(UsageError, match="for_read=True"):
        ring.prepare(bytearray(1), False, fd, 0)
    with pytest.raises(UsageError, match="is read-only"):
        ring.prepare(b"1", True, fd, 0)
    with pytest.raises(OSError, match="not registered"):
        ring.prepare(bytearray(1), True, fd + 1000, 0)
    assert ring.prepare(bytearray(1), True, fd, 0) == 1
    with pytest.raises(BlockingIOError):
        ring.prepare(bytearray(1), True, fd, 0)
    assert len(ring.submit().wait()) == 1
    assert ring.prepare(bytearray(1), True, fd, 0) == 1
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    with pytest.raises(FileNotFoundError):
        usrbio.extract_mount_point(str(elsewhere / "x"))
    with pytest.raises(UsageError, match="is not a mount"):
        usrbio.make_ioring(str(elsewhere), 1)
    with pytest.raises(UsageError, match="would ever be full"):
        usrbio.make_ioring(mount, 4, io_depth=5)
    with pytest.raises(UsageError, match="holes"):
        usrbio.make_ioring(mount, 4, flags=2)


class Batches(LocalTree):
    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.sizes: list[int] = []
        self.at_s: list[float] = []

    def read_batch(self, reads: Any) -> list[int]:
        self.sizes.append(len(reads))
        self.at_s.append(time.monotonic())
        return super().read_batch(reads)


@pytest.fixture
def batches(tmp_path: Path) -> Iterator[Batches]:
    found = Batches(str(tmp_path))
    usrbio.attach(str(tmp_path), found, by_path=True)
    (tmp_path / "file").write_bytes(bytes(PAGE))
    yield found
    usrbio.detach(str(tmp_path))


def prepared(ring: usrbio.ioring, fd: int, count: int) -> usrbio.ioring:
    for _ in range(count):
        ring.prepare(bytearray(1), True, fd, 0)
    return ring.submit()


def test_io_depth_says_how_many_go_together(batches: Batches, tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    usrbio.register_fd(fd)
    try:
        prepared(usrbio.make_ioring(str(tmp_path), 10), fd, 7).wait(min_results=7)
        assert batches.sizes == [7]
        batches.sizes.clear()
        exact = usrbio.make_ioring(str(tmp_path), 10, io_depth=3)
        prepared(exact, fd, 7).wait(min_results=6)
        assert batches.sizes == [3, 3]
        assert exact.wait(min_results=1, timeout=0.01) == []
        prepared(exact, fd, 2).wait(min_results=3)
        assert batches.sizes == [3, 3, 3]
        batches.sizes.clear()
        prepared(usrbio.make_ioring(str(tmp_path), 10, io_depth=-3), fd, 7).wait(min_results=7)
        assert batches.sizes == [3, 3, 1]
    finally:
        usrbio.deregister_fd(fd)
        os.close(fd)


def test_a_batch_that_stays_small_goes_when_its_time_is_up(batches: Batches, tmp_path: Path) -> None:
    """Also when looks at the ring come more often than the time is long."""
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    usrbio.register_fd(fd)
    try:
        ring = usrbio.make_ioring(str(tmp_path), 10, io_depth=-8, timeout=200)
        began_s = time.monotonic()
        prepared(ring, fd, 2)
        while not batches.sizes:
            ring.submit()  # wakes the ring, with nothing new
            threading.Event().wait(0.01)
            assert time.monotonic() < began_s + 60
        assert batches.sizes == [2]
        assert batches.at_s[0] >= began_s + 0.2
        assert len(ring.wait(min_results=2)) == 2
        prepared(ring, fd, 8).wait(min_results=8)
        assert batches.sizes == [2, 8]
    finally:
        usrbio.deregister_fd(fd)
        os.close(fd)


def test_a_ring_that_is_gone_leaves_no_thread(mount: str) -> None:
    ring = usrbio.make_ioring(mount, 1)
    threads = [one for one in threading.enumerate() if one.name == "ioring"]
    del ring
    gc.collect()
    for one in threads:
        one.join(60)
    assert not [one for one in threading.enumerate() if one.name == "ioring"]


def test_whole_files_at_once_and_in_blocks(mount: str, fd: int) -> None:
    os.pwrite(fd, b"abc" * 100, 0)
    os.ftruncate(fd, 300)
    whole = usrbio.read_file(f"{mount}/file", off=3)
    assert whole is not None
    assert bytes(whole) == b"abc" * 99
    seen: list[tuple[bytes, int]] = []
    usrbio.read_file(f"{mount}/file", mount, block_size=128, cb=lambda part, at: seen.append((bytes(part), at)))
    assert [(len(part), at) for part, at in seen] == [(128, 0), (128, 128), (44, 256)]


def test_a_package_of_that_name_that_is_there_already_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hf3fs_fuse", type(sys)("hf3fs_fuse"))
    with pytest.raises(ImportError, match="imported already"):
        usrbio.register()


def test_a_descriptor_that_is_another_files_now_is_registered_anew(mount: str) -> None:
    first = os.open(f"{mount}/first", os.O_RDWR | os.O_CREAT)
    os.write(first, b"1" * 10)
    usrbio.register_fd(first)
    other = os.open(f"{mount}/second", os.O_RDWR | os.O_CREAT)
    second = os.dup2(other, first)
    os.close(other)
    os.write(second, b"2" * 10)
    usrbio.register_fd(second)
    into = bytearray(10)
    ring = usrbio.make_ioring(mount, 1)
    ring.prepare(into, True, second, 0)
    assert [one.result for one in ring.submit().wait()] == [10]
    assert into == b"2" * 10
    usrbio.deregister_fd(second)
    os.close(second)


def test_whatever_goes_wrong_is_a_result_and_the_ring_goes_on(mount: str, fd: int, monkeypatch: Any) -> None:
    ring = usrbio.make_ioring(mount, 2)
    for offset in (-1, 1 << 63):
        with pytest.raises(UsageError, match="offset"):
            ring.prepare(bytearray(1), True, fd, offset)
    files = importlib.import_module("fireflyer.fs.usrbio.mounts").file_of(fd).files

    def broken(_: Any) -> Any:
        raise OverflowError("too large")

    with monkeypatch.context() as patch:
        patch.setattr(files, "read_batch", broken)
        ring.prepare(bytearray(1), True, fd, 0)
        assert [one.result for one in ring.submit().wait(timeout=60)] == [-errno.EIO]
    ring.prepare(bytearray(1), True, fd, 0)
    assert [one.result for one in ring.submit().wait(timeout=60)] == [1]


@pytest.mark.parametrize("module", ["fireflyer.fs.usrbio.mounts", "fireflyer.fs.tools.connections"])
def test_a_child_that_is_forked_while_a_thread_has_the_lock_does_not_wait_for_it(module: str) -> None:
    lock = importlib.import_module(module)._lock
    with lock:
        child = os.fork()
        if not child:
            free = importlib.import_module(module)._lock.acquire(timeout=1)
            os._exit(0 if free else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
