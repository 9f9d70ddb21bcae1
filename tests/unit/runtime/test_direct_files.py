"""Files past the page cache: what goes around it, and what happens where a file system refuses."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import logging
import mmap
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.patience import allowed_s

from fireflyer.base.errors import FireflyerError
from fireflyer.base.ports import DIRECT_ALIGN_BYTES
from fireflyer.runtime import disk as disk_module
from fireflyer.runtime.disk import RealDisk
from fireflyer.runtime.transfers import MAX_THREADS, TransferThreads

BYTES = 4 * DIRECT_ALIGN_BYTES


def aligned() -> memoryview:
    memory = memoryview(mmap.mmap(-1, BYTES))
    memory[:] = os.urandom(BYTES)
    return memory


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "_refused", {})


def refusing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "refused")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)


def test_a_file_system_that_refuses_is_named_once_and_serves_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refusing_open(monkeypatch)
    memory = aligned()
    with caplog.at_level(logging.WARNING):
        for name in ("a", "b"):
            with RealDisk().create(f"{tmp_path}/{name}", direct=True) as file:
                file.start_pwrite(memory, 0).wait()
            with RealDisk().open(f"{tmp_path}/{name}", direct=True) as file:
                assert file.pread(BYTES, 0) == memory
    assert [record.message.split(" path=")[0] for record in caplog.records] == [
        "file system refuses O_DIRECT, its page cache is used instead"
    ]


def test_a_refusal_that_comes_with_the_first_write_is_met_in_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, sizes = os.pwrite, list[int]()
    memory = aligned()
    with RealDisk().create(f"{tmp_path}/a", direct=True) as file:
        if file._direct_fd < 0:
            pytest.skip("the file system of the temporary directory has no O_DIRECT")

        def refuse(fd: int, data: memoryview, offset: int) -> int:
            if fd == file._direct_fd:
                raise OSError(errno.EINVAL, "larger blocks")
            sizes.append(len(data))
            return real(fd, data, offset)

        monkeypatch.setattr(os, "pwrite", refuse)
        file.pwrite(memory, 0)
        file.pwrite(memory, BYTES)
        assert sizes == [BYTES, BYTES]
        assert file.pread(2 * BYTES, 0) == bytes(memory) * 2
    assert len(caplog.records) == 1


def test_only_what_is_aligned_goes_past_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, direct = os.pwrite, list[tuple[int, int]]()
    memory = aligned()
    with RealDisk().create(f"{tmp_path}/a", direct=True) as file:
        if file._direct_fd < 0:
            pytest.skip("the file system of the temporary directory has no O_DIRECT")

        def watch(fd: int, data: memoryview, offset: int) -> int:
            if fd == file._direct_fd:
                direct.append((offset, len(data)))
            return real(fd, data, offset)

        monkeypatch.setattr(os, "pwrite", watch)
        file.pwrite(memory[: BYTES - 100], 0)
        file.pwrite(memory[: BYTES // 2], 7)
        file.pwrite(memory[8:], DIRECT_ALIGN_BYTES)
        file.pwrite(bytes(memory), 0)
        assert direct == [(0, BYTES - DIRECT_ALIGN_BYTES)]
        assert file.pread(BYTES, 0) == memory


def test_a_file_system_without_fallocate_gets_a_hole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Libc:
        code = errno.EOPNOTSUPP

        def fallocate(self, *_: int) -> int:
            ctypes.set_errno(self.code)
            return -1

    libc = Libc()
    monkeypatch.setattr(disk_module, "_LIBC", libc)
    with RealDisk().create(f"{tmp_path}/a") as file:
        file.allocate(BYTES)
        assert file.size() == BYTES
        libc.code = errno.ENOSPC
        with pytest.raises(FireflyerError, match="no space left"):
            file.allocate(2 * BYTES)


def test_a_file_that_nobody_refers_to_ends_its_threads(tmp_path: Path) -> None:
    file = RealDisk().create(f"{tmp_path}/a", direct=True)
    for _ in range(2 * MAX_THREADS):
        file.start_pwrite(memoryview(b"x"), 0).wait()
    assert file._transfers is not None
    threads = list(file._transfers._threads)
    assert len(threads) == MAX_THREADS
    del file
    for thread in threads:
        thread.join(allowed_s(10))
        assert not thread.is_alive()


def test_reads_and_writes_of_a_file_begin_while_others_are_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, begun, go_on = aligned(), threading.Semaphore(0), threading.Event()

    def held(real: Callable[..., int]) -> Callable[..., int]:
        def wait_and_call(*arguments: object) -> int:
            begun.release()
            assert go_on.wait(allowed_s(10))
            return real(*arguments)

        return wait_and_call

    with RealDisk().create(f"{tmp_path}/a", direct=True) as file:
        for name, start in (("pwrite", file.start_pwrite), ("preadv", file.start_pread)):
            with monkeypatch.context() as patch:
                patch.setattr(os, name, held(getattr(os, name)))
                started = [start(memory, at * BYTES) for at in range(MAX_THREADS)]
                for _ in started:
                    assert begun.acquire(timeout=allowed_s(10)), f"{name} waits for another to end"
                go_on.set()
                assert [one.wait() for one in started] == [BYTES] * MAX_THREADS
            go_on.clear()


def test_transfers_run_beside_each_other_and_close_waits_for_them() -> None:
    transfers, both, go_on = TransferThreads("test"), threading.Barrier(2), threading.Event()
    done: list[int] = []

    def meet(number: int) -> int:
        both.wait(allowed_s(10))
        go_on.wait(allowed_s(10))
        done.append(number)
        return number

    started = [transfers.start(functools.partial(meet, number)) for number in (1, 2)]
    failing = transfers.start(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failing.wait()
    assert not done
    go_on.set()
    transfers.close()
    assert sorted(done) == [1, 2]
    assert [one.wait() for one in started] == [1, 2]


@pytest.mark.parametrize(("kind", "said"), [("fifo", "a FIFO"), ("socket", "it is a socket"), ("null", "device")])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, kind: str, said: str) -> None:
    """A FIFO without a writer would keep its reader for ever."""
    path = f"{tmp_path}/{kind}"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    else:
        os.symlink("/dev/null", path)
    with pytest.raises(FireflyerError, match=said):
        RealDisk().open(path)


HOLDER = """
import fcntl, os, signal, sys
fd = os.open(sys.argv[1], os.O_RDWR)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGIO])
fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("held", flush=True)
signal.sigwait([signal.SIGIO])
fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
"""


def test_a_file_that_another_process_has_a_lease_of_is_opened_when_it_gives_it_back(tmp_path: Path) -> None:
    """As Samba and servers of NFS have of files that they serve."""
    path = tmp_path / "leased"
    path.write_bytes(b"content")
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with contextlib.closing(RealDisk().open(str(path))) as file:
            assert file.size() == 7
        assert process.wait() == 0
