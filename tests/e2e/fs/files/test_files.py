"""Files through the library, over a cluster of real processes: what programs are promised, also when nodes die."""

from __future__ import annotations

import asyncio
import errno
import gc
import io
import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.support.fs.clusters.local_cluster import LocalCluster
from tests.support.patience import allowed_s

import fireflyer.fs
from fireflyer.base.errors import UsageError
from fireflyer.base.units import KIB, MIB
from fireflyer.fs.client.files.asyncio_files import Files
from fireflyer.fs.client.files.file_system import FileSystem
from fireflyer.fs.schema.inodes import Defaults
from fireflyer.fs.schema.meta import LockKind

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def local(module_path: Path) -> Iterator[LocalCluster]:
    cluster = LocalCluster(module_path)
    try:
        cluster.ff("up", "--detach", "--failure-timeout", "2", "--targets-per-node", "2")
        yield cluster
    finally:
        cluster.close()


def opened(local: LocalCluster) -> FileSystem:
    return fireflyer.fs.connect(f"ff://{local.directory}")


@pytest.fixture
def fs(local: LocalCluster) -> Iterator[FileSystem]:
    with opened(local) as found:
        yield found


def test_file_objects_are_those_of_python(fs: FileSystem, tmp_path: Path) -> None:
    """The same program on a file of this machine and on ours."""

    def program(open_: object, name: str) -> list[object]:
        made: list[object] = []
        with open_(name, "w+b") as file:  # type: ignore[operator]
            made += [file.write(b"0123456789" * 1000), file.seek(5), file.read(7), file.write(b"abc"), file.tell()]
            made += [file.seek(-3, os.SEEK_END), file.read(), file.truncate(9000), file.seek(0, os.SEEK_END)]
            file.seek(20_000)
            made += [file.write(b"far"), file.flush()]
        with open_(name, "ab") as file:  # type: ignore[operator]
            made += [file.tell(), file.write(b"appended"), file.tell()]
        with open_(name, "rb", buffering=0) as file:  # type: ignore[operator]
            made += [file.readall(), file.read(1), isinstance(file, io.RawIOBase)]
        with open_(name, "w", encoding="utf-8") as file:  # type: ignore[operator]
            print("grün", 7, file=file)
            made += [file.write("zwei\ndrei")]
        with open_(name, encoding="utf-8", mode="r") as file:  # type: ignore[operator]
            made += [list(file), file.seek(0), file.readline()]
        with pytest.raises(FileExistsError):
            open_(name, "xb")  # type: ignore[operator]
        with open_(name, "rb") as file, pytest.raises(io.UnsupportedOperation):  # type: ignore[operator]
            file.write(b"x")
        return made

    assert program(fs.open, "/program") == program(open, str(tmp_path / "program"))
    with pytest.raises(FileNotFoundError) as caught:
        fs.open("/nowhere/x", "wb")
    assert caught.value.filename == "/nowhere/x"


def test_what_one_has_closed_another_opens(fs: FileSystem, local: LocalCluster) -> None:
    content = np.random.default_rng(1).integers(0, 256, 5 * MIB + 77, dtype=np.uint8)
    with opened(local) as other:
        for size in (0, 5, len(content)):
            with fs.open("/shared", "wb") as file:
                file.write(content[:size])
            assert other.stat("/shared").st_size == size
            with other.open("/shared") as file:
                assert file.read() == content[:size].tobytes()
        file = fs.open("/shared", "wb")
        file.write(b"told")
        file.fsync()
        with other.open("/shared") as read:
            assert read.read() == b"told"
        file.close()


def test_two_clients_append_and_nothing_is_lost(fs: FileSystem, local: LocalCluster) -> None:
    with opened(local) as other:

        def append(client: FileSystem, letter: bytes) -> None:
            with client.open_file("/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND) as file:
                for number in range(40):
                    file.append(letter * 99 + b"%03d\n" % number)

        with ThreadPoolExecutor(2) as threads:
            for done in [threads.submit(append, fs, b"a"), threads.submit(append, other, b"b")]:
                done.result()
    with fs.open("/log") as file:
        lines = file.read().splitlines()
    assert sorted(lines) == sorted(letter * 99 + b"%03d" % number for letter in (b"a", b"b") for number in range(40))


def test_batches_go_straight_into_arrays(fs: FileSystem) -> None:
    fs.mkdir("/small")
    fs.set_defaults("/small", Defaults(chunk_bytes=64 * KIB))
    content = np.random.default_rng(2).integers(0, 256, 3 * MIB, dtype=np.uint8)
    content[512 * KIB : 640 * KIB] = 0
    with fs.open_file("/small/records", "w+b") as file:
        fs.write_batch([(file, 0, content[: 512 * KIB]), (file, 640 * KIB, content[640 * KIB :])])
        file.pwrite(b"pending", 100)
        content[100:107] = np.frombuffer(b"pending", dtype=np.uint8)
        offsets = np.array([0, 90, 64 * KIB - 7, 511 * KIB, 600 * KIB, len(content) - 5, len(content) + 9])
        into = np.full((len(offsets), 4096), 7, dtype=np.uint8)
        assert fs.read_records(file, offsets, into).tolist() == [4096] * 5 + [5, 0]
        for offset, row in zip(offsets.tolist(), into, strict=True):
            part = content[offset : offset + 4096]
            assert np.array_equal(row[: len(part)], part)
            assert (row[len(part) :] == 7).all()
        buffers: list[Any] = [
            bytearray(3),
            np.zeros(200 * KIB, dtype=np.uint8),
            memoryview(bytearray(10)),
            np.zeros(0, dtype=np.int8),
        ]
        counts = fs.read_batch(list(zip([file] * 4, [99, 500 * KIB, len(content) - 4, 5], buffers, strict=True)))
        assert counts == [3, 200 * KIB, 4, 0]
        assert bytes(buffers[0]) == content[99:102].tobytes()
        assert np.array_equal(buffers[1], content[500 * KIB : 700 * KIB])
        assert bytes(buffers[2]) == content[-4:].tobytes() + bytes(6)


def test_what_cannot_be_meant_is_refused(fs: FileSystem) -> None:
    with fs.open("/meant", "wb") as file:
        file.write(bytes(100))
    with fs.open_file("/meant") as file:
        into = np.zeros((3, 4), dtype=np.uint8)
        with pytest.raises(UsageError, match="2 offsets and 3 rows; give as many rows as offsets"):
            fs.read_records(file, [0, 4], into)
        with pytest.raises(UsageError, match="offsets have dtype float64; give integers"):
            fs.read_records(file, [0, 0.5, 4], into)
        assert fs.read_records(file, [0, 4, 98], into).tolist() == [4, 4, 2]
    with pytest.raises(OSError, match="length -1 is negative"):
        fs.truncate("/meant", -1)
    with pytest.raises(FileNotFoundError) as missing:
        fs.rename("/meant", "/none/meant")
    assert (missing.value.filename, missing.value.filename2) == ("/meant", "/none/meant")


def test_a_writer_whose_last_reference_goes_in_the_middle_of_another_call_writes_all(fs: FileSystem) -> None:
    for mode in ("wb", "ab"):
        held = [fs.open("/left", mode)]
        held[0].write(b"0123456789")

        async def work(held: list[Any] = held) -> None:
            held.clear()
            gc.collect()

        fs.run(work())
    with fs.open("/left") as file:
        assert file.read() == b"0123456789" * 2


def test_many_threads_use_one_client(fs: FileSystem) -> None:
    def one(number: int) -> None:
        rng, path = random.Random(number), f"/thread{number}"
        content = rng.randbytes(700_000)
        with fs.open(path, "w+b") as file:
            for at in range(0, len(content), 70_000):
                file.write(content[at : at + 70_000])
            file.seek(0)
            assert file.read() == content
        for _ in range(20):
            offset = rng.randrange(len(content))
            with fs.open(path) as file:
                file.seek(offset)
                assert file.read(999) == content[offset : offset + 999]
        assert fs.stat(path).st_size == len(content)
        fs.unlink(path)

    with ThreadPoolExecutor(6) as threads:
        for done in [threads.submit(one, number) for number in range(6)]:
            done.result()


def test_locks_are_between_clients(fs: FileSystem, local: LocalCluster) -> None:
    with opened(local) as other, fs.open_file("/locked", "w+b") as mine, other.open_file("/locked", "r+b") as theirs:
        mine.lock(LockKind.WRITE, 0, 10)
        theirs.lock(LockKind.WRITE, 10, 20)
        with pytest.raises(BlockingIOError):
            theirs.lock(LockKind.READ, 5, 15)
        waits = threading.Thread(target=lambda: theirs.lock(LockKind.READ, 5, 15, wait_ns=20_000_000_000))
        waits.start()
        mine.lock(LockKind.NONE)
        waits.join(allowed_s(20))
        assert not waits.is_alive()


def test_a_forked_child_may_not_use_it(fs: FileSystem) -> None:
    file = fs.open("/parents", "wb")
    file.write(b"the parent's")
    child = os.fork()
    if not child:
        try:
            fs.stat("/")
        except UsageError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    file.close()
    assert fs.stat("/parents").st_size == 12


def test_both_faces_have_the_same_names() -> None:
    coroutines = {name for name in vars(Files) if not name.startswith("_")}
    of_mounts = {"start", "known", "told", "set_attributes", "truncate_at", "open_at", "answered_ns"}
    assert coroutines - of_mounts <= set(vars(FileSystem))


def test_a_user_with_a_token_may_do_what_his_rights_say(fs: FileSystem, local: LocalCluster) -> None:
    token = local.ff("admin", "user", "add", "--uid", "5001", "--token", "ada").strip()
    managers = msgspec.json.decode((local.directory / "cluster.json").read_bytes())["managers"]
    fs.mkdir("/home")
    fs.mkdir("/home/ada", 0o700)
    fs.chown("/home/ada", 5001, 5001)
    with fs.open("/secret", "wb", permissions=0o600) as file:
        file.write(b"not for ada")
    with fireflyer.fs.connect("ff://" + ",".join(managers), token=token) as ada:
        with ada.open("/home/ada/mine", "w+b") as file:
            file.write(b"hers" * 100_000)
            file.seek(0)
            assert file.read() == b"hers" * 100_000
        assert ada.stat("/home/ada/mine").st_uid == 5001
        for refused in (lambda: ada.open("/secret"), lambda: ada.open("/x", "wb"), lambda: ada.unlink("/secret")):
            with pytest.raises(PermissionError):
                refused()


def _came_back(local: LocalCluster, node: int, status: dict[str, Any]) -> bool:
    incarnation = next(one["incarnation"] for one in status["status"]["nodes"] if one["id"] == node)
    return bool(incarnation > 1 and local.whole(status))


def test_names_wait_while_the_manager_is_killed(fs: FileSystem, local: LocalCluster) -> None:
    fs.mkdir("/many")
    file = fs.open("/many/file", "wb")
    file.write(b"before")
    os.kill(local.process("manager-1"), signal.SIGKILL)
    for number in range(30):
        fs.mkdir(f"/many/{number}")
    file.write(b" and after")
    file.close()
    assert fs.stat("/many/file").st_size == 16
    assert len(fs.listdir("/many")) == 31


def test_when_the_session_is_ended_files_that_write_are_lost_and_all_else_goes_on(local: LocalCluster) -> None:
    with opened(local) as fs:
        with fs.open("/ended", "wb") as file:
            file.write(b"x" * 100_000)
        read, write = fs.open_file("/ended"), fs.open_file("/ended", "r+b")
        write.pwrite(b"y", 200_000)
        write.flush()
        local.ff("admin", "end-session", str(fs.files.meta.client))
        fs.mkdir("/after")
        with pytest.raises(OSError, match="open it again") as caught:
            write.fsync()
        assert caught.value.errno == errno.ESTALE
        with pytest.raises(OSError, match="open it again"):
            write.close()
        assert read.pread(0, 10) == b"x" * 10
        assert fs.exists("/after")
        with fs.open("/ended", "ab") as file:
            file.write(b"z")
        read.close()


async def _written_and_read(local: LocalCluster) -> None:
    """One file is written and read at random while nodes are killed, and compared with plain bytes."""
    rng, length = random.Random(5), 12 * MIB
    twin = np.zeros(length, dtype=np.uint8)
    stop = asyncio.Event()
    async with await fireflyer.fs.connect_async(f"ff://{local.directory}") as files:
        file = await files.open("/fire", "w+b")

        async def work(first: int, last: int) -> None:
            buffer = np.empty(300_000, dtype=np.uint8)
            while not stop.is_set():
                begin = rng.randrange(first, last)
                size = min(rng.choice([100, 5000, 300_000]), last - begin)
                if rng.random() < 0.5:
                    data = np.frombuffer(rng.randbytes(size), dtype=np.uint8)
                    assert await file.pwrite(data, begin) == size
                    twin[begin : begin + size] = data
                else:
                    count = await file.pread_into(buffer[:size], begin)
                    assert np.array_equal(buffer[:count], twin[begin : begin + count]), begin
                if rng.random() < 0.02:
                    await file.fsync()

        await file.truncate(length)
        workers = [asyncio.create_task(work(at * length // 4, (at + 1) * length // 4)) for at in range(4)]
        for victim in (1, 2):
            os.kill(await asyncio.to_thread(local.process, f"node-{victim}"), signal.SIGKILL)
            await asyncio.to_thread(local.wait, partial(_came_back, local, victim))
        stop.set()
        await asyncio.gather(*workers)
        await file.close()
    back = np.empty(length + 1, dtype=np.uint8)
    other = await fireflyer.fs.connect_async(f"ff://{local.directory}")
    async with other, await other.open("/fire") as read:
        assert await read.pread_into(back, 0) == length
        assert np.array_equal(back[:length], twin)


def test_nodes_die_while_a_file_is_written_and_read(local: LocalCluster) -> None:
    asyncio.run(_written_and_read(local))
