"""The embedded engine as a directory on a disk: killed, full, damaged, opened twice."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.kvstore.engines import put, values
from tests.support.loops import on_loop
from tests.support.patience import allowed_s

from fireflyer import kvstore
from fireflyer.base.errors import Busy, DataCorruption, Exists, NoSpace, NotFound, PermanentError, UsageError
from fireflyer.base.units import GIB, MIB, MS
from fireflyer.kvstore import CommitUnknown, Engine, Transaction
from fireflyer.kvstore.core.overlay import Mutations
from fireflyer.kvstore.embedded import EmbeddedEngine
from fireflyer.kvstore.lmdb_file import LmdbFile


@contextlib.contextmanager
def _loading(path: Path, name: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.support.kvstore.load", f"embedded:{path}", name, "4", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def _check_load(path: Path, acknowledged: set[str]) -> None:
    async with await kvstore.open(f"embedded:{path}") as kv:
        found = await values(kv)
    numbers = {key.removeprefix(b"left/").decode(): value for key, value in found.items() if key.startswith(b"left/")}
    assert acknowledged <= set(numbers)
    for identity, number in numbers.items():
        assert found[b"right/" + identity.encode()] == number * 100
        assert found[b"done/" + identity.encode()] == number
    assert sorted(int(number) for number in numbers.values()) == list(range(1, int(found[b"total"]) + 1))
    assert len(found) == 3 * len(numbers) + 1


def _kill_under_load(path: Path, rounds: int) -> None:
    acknowledged: set[str] = set()
    for number in range(rounds):
        with _loading(path, f"round{number}") as process:
            assert process.stdout is not None
            acknowledged |= {process.stdout.readline().strip() for _ in range(20 + 13 * number)}
            process.kill()
            acknowledged |= {line.strip() for line in process.stdout if line.endswith("\n")}
        on_loop(_check_load)(path, acknowledged)


@pytest.mark.processes
def test_what_was_acknowledged_survives_a_kill_and_nothing_is_half(tmp_path: Path) -> None:
    _kill_under_load(tmp_path / "store", 2)


@pytest.mark.slow
def test_what_was_acknowledged_survives_many_kills(tmp_path: Path) -> None:
    _kill_under_load(tmp_path / "store", 25)


@pytest.mark.processes
def test_a_second_process_is_told_who_owns_the_store(tmp_path: Path) -> None:
    with _loading(tmp_path / "store", "x") as process:
        assert process.stdout is not None
        process.stdout.readline()

        @on_loop
        async def second() -> None:
            with pytest.raises(Busy, match=f"in use by process {process.pid}"):
                await kvstore.open(f"embedded:{tmp_path}/store")

        second()


@on_loop
async def test_a_second_engine_of_the_same_process_is_refused_until_the_first_is_closed(tmp_path: Path) -> None:
    url = f"embedded:{tmp_path}/store"
    async with await kvstore.open(url) as kv:
        with pytest.raises(Busy, match=f"in use by process {os.getpid()}"):
            await kvstore.open(url)
        await put(kv, a=b"1")
    async with await kvstore.open(url) as kv:
        assert await values(kv) == {b"a": b"1"}


@on_loop
async def test_paths_that_cannot_be_stores_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        await kvstore.open(f"embedded:{tmp_path}/missing/store")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is a file; give a directory"):
        await kvstore.open(f"embedded:{tmp_path}/file")
    assert (tmp_path / "file").read_text() == "x"


async def _increment(tx: Transaction) -> None:
    tx.set(b"counter", b"%d" % (int(await tx.get(b"counter") or b"0") + 1))


async def _clear(tx: Transaction, key: bytes) -> None:
    tx.clear(key)


async def _fill(kv: Engine) -> int:
    """Until there is no space; how many values fitted."""
    count = 0

    async def one(tx: Transaction) -> None:
        tx.set(b"big/%d" % count, os.urandom(MIB // 2))
        await _increment(tx)

    with contextlib.suppress(NoSpace):
        while count < 1000:
            await kv.transact(one)
            count += 1
    return count


async def _make_room(tx: Transaction) -> None:
    tx.clear_range(b"big/", b"big0")


@on_loop
async def test_a_full_store_refuses_writes_reads_on_and_goes_on_when_space_was_made(tmp_path: Path) -> None:
    async with EmbeddedEngine(f"{tmp_path}/store", map_bytes=8 * MIB) as kv:
        count = await _fill(kv)
        assert 0 < count < 20
        assert len(await values(kv, b"big/", b"big0")) == count
        assert (await values(kv))[b"counter"] == b"%d" % count
        await kv.transact(_increment)  # which the refused one had written, too
        await kv.transact(_make_room)
        assert await values(kv) == {b"counter": b"%d" % (count + 1)}


@on_loop
async def test_who_makes_room_is_not_refused_with_who_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def too_much(tx: Transaction) -> None:
        tx.set(b"big", os.urandom(MIB))

    async with EmbeddedEngine(f"{tmp_path}/store", map_bytes=8 * MIB) as kv:
        await _fill(kv)
        gate = _Gate(monkeypatch)
        first = asyncio.create_task(kv.transact(_increment))
        await asyncio.to_thread(gate.reached.wait)
        together = [asyncio.create_task(kv.transact(body)) for body in (too_much, _make_room)]
        await asyncio.sleep(0)
        gate.opened.set()
        answers = await asyncio.gather(first, *together, return_exceptions=True)
        assert [type(answer) for answer in answers] == [type(None), NoSpace, type(None)]
        assert list(await values(kv)) == [b"counter"]


_FULL_DISK = """
import asyncio, resource, sys
from tests.e2e.runtime.test_kvstore_embedded import _clear, _fill
from tests.support.kvstore.engines import put, values
from fireflyer.kvstore.embedded import EmbeddedEngine
from fireflyer.kvstore.lmdb_file import LmdbFile
async def main(path, reserve):
    if not reserve:
        LmdbFile._reserve = lambda *_: None
    async with EmbeddedEngine(path) as kv:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (14 << 20, before[1]))
        counts = []
        for _ in range(3 if reserve else 1):
            counts.append(await _fill(kv))
            for number in range(counts[-1] if reserve else 0):
                await kv.transact(lambda tx, number=number: _clear(tx, b"big/%d" % number))
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        await put(kv, more=b"1")
        assert len(await values(kv)) == (2 if reserve else 2 + counts[0])
        print(*counts, (await values(kv))[b"counter"].decode())
asyncio.run(main(sys.argv[1], sys.argv[2] == "reserve"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("reserve", ["reserve", "none"])
def test_a_full_disk_is_no_space_and_clearing_keys_makes_room(tmp_path: Path, reserve: str) -> None:
    """The kernel refuses to let the file grow, as a quota does. Without the reserve LMDB itself runs into it."""
    command = [sys.executable, "-c", _FULL_DISK, str(tmp_path / "store"), reserve]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=allowed_s(60))
    *counts, counter = map(int, done.stdout.split() or (0, 0))
    assert min(counts) > 4, (done.stdout, done.stderr)
    assert counter == sum(counts)


@on_loop
async def test_a_flipped_bit_of_a_record_is_found_and_named(tmp_path: Path) -> None:
    url = f"embedded:{tmp_path}/store"
    async with await kvstore.open(url) as kv:
        await put(kv, sound=b"s" * 100, damaged=b"d" * 100)
    file = tmp_path / "store" / "data.mdb"
    data = bytearray(file.read_bytes())
    assert data.count(b"d" * 100) == 1
    data[data.index(b"d" * 100) + 50] ^= 1
    file.write_bytes(data)
    async with await kvstore.open(url) as kv:
        assert await kv.read(lambda tx: tx.get(b"sound")) == b"s" * 100
        with pytest.raises(DataCorruption, match="b'damaged'"):
            await kv.read(lambda tx: tx.get(b"damaged"))
        with pytest.raises(DataCorruption, match="b'damaged'"):
            await kv.read(lambda tx: tx.get_range(b"", None))


@pytest.mark.parametrize("damage", [lambda data: data[: 4 * 4096], lambda data: b"\x5a" * len(data)])
@on_loop
async def test_a_file_that_is_cut_off_or_none_of_ours_is_refused(tmp_path: Path, damage: object) -> None:
    url = f"embedded:{tmp_path}/store"
    async with await kvstore.open(url) as kv:
        await put(kv, **{f"k{i}": b"v" * 1000 for i in range(100)})
    file = tmp_path / "store" / "data.mdb"
    assert callable(damage)
    file.write_bytes(damage(file.read_bytes()))
    for _ in range(2):  # and its lock is given back each time
        with pytest.raises(DataCorruption, match="restore a backup"):
            await kvstore.open(url)


class _Gate:
    """Holds the writer thread before it writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        write = LmdbFile.write

        def held(file: LmdbFile, version: int, batch: list[Mutations]) -> None:
            self.reached.set()
            assert self.opened.wait(30)
            write(file, version, batch)

        monkeypatch.setattr(LmdbFile, "write", held)


@on_loop
async def test_many_commits_share_one_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with EmbeddedEngine(f"{tmp_path}/store") as kv:
        env = kv._file._env
        assert not env.flags()["sync"]  # what is not synced is in the journal
        assert not env.flags()["writemap"]
        gate, before = _Gate(monkeypatch), env.info()["last_txnid"]
        puts = [asyncio.ensure_future(put(kv, **{f"k{i}": b"v"})) for i in range(200)]
        for _ in range(100):  # turns of the loop, in which all of them ask
            await asyncio.sleep(0)
        assert kv._queued_commits == 200
        gate.opened.set()
        await asyncio.gather(*puts)
        assert env.info()["last_txnid"] - before <= 2  # what came while the first ones were written went together
        assert len(await values(kv)) == 200


@on_loop
async def test_a_commit_waits_for_the_disk_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    fdatasync = os.fdatasync

    def counted(fd: int) -> None:
        synced.append(fd)
        fdatasync(fd)

    async with EmbeddedEngine(f"{tmp_path}/store") as kv:
        monkeypatch.setattr(os, "fdatasync", counted)
        for number in range(50):
            await put(kv, key=b"%d" % number)
            assert len(synced) == number + 1


@on_loop
async def test_no_commit_is_answered_before_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with EmbeddedEngine(f"{tmp_path}/store") as kv:
        gate = _Gate(monkeypatch)
        commit = asyncio.create_task(put(kv, a=b"1"))
        await asyncio.to_thread(gate.reached.wait)
        assert await values(kv) == {}
        assert not commit.done()
        gate.opened.set()
        await commit
        assert await values(kv) == {b"a": b"1"}


@on_loop
async def test_a_deadline_during_the_commit_leaves_doubt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with EmbeddedEngine(f"{tmp_path}/store") as kv:
        gate = _Gate(monkeypatch)
        with pytest.raises(CommitUnknown, match="may or may not be committed"):
            await kv.transact(_increment, timeout_ns=500 * MS)
        cancelled = asyncio.create_task(kv.transact(_increment))
        await asyncio.sleep(0)
        cancelled.cancel()
        gate.opened.set()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
    async with EmbeddedEngine(f"{tmp_path}/store") as kv:
        assert await values(kv) == {b"counter": b"1"}  # the second one began before the first was there


@on_loop
async def test_after_a_failed_write_nothing_is_accepted_until_it_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with EmbeddedEngine(f"{tmp_path}/store") as kv:
        await put(kv, a=b"1")

        def fail(file: LmdbFile, version: int, batch: list[Mutations]) -> None:
            raise PermanentError("write: the device failed (EIO)")

        with monkeypatch.context() as patched:
            patched.setattr(LmdbFile, "write", fail)
            with pytest.raises(PermanentError, match=r"EIO.*opened again"):
                await put(kv, a=b"2")
        with pytest.raises(PermanentError, match=r"EIO.*opened again"):
            await put(kv, a=b"3")
        assert await values(kv) == {b"a": b"1"}
    async with EmbeddedEngine(f"{tmp_path}/store") as kv:
        await put(kv, a=b"4")
        assert await values(kv) == {b"a": b"4"}


@on_loop
async def test_commits_that_wait_when_it_is_closed_are_finished(tmp_path: Path) -> None:
    kv = EmbeddedEngine(f"{tmp_path}/store")
    commits = [asyncio.create_task(put(kv, **{f"k{i}": b"v"})) for i in range(50)]
    await asyncio.sleep(0)
    await kv.close()
    await asyncio.gather(*commits)
    async with EmbeddedEngine(f"{tmp_path}/store") as kv:
        assert len(await values(kv)) == 50


@on_loop
async def test_a_backup_is_a_store_with_what_was_committed(tmp_path: Path) -> None:
    async with EmbeddedEngine(f"{tmp_path}/store") as kv:
        await put(kv, **{f"k{i}": b"v" for i in range(100)})
        await kv.backup(f"{tmp_path}/copy")
        await put(kv, later=b"1")
        with pytest.raises(Exists):
            await kv.backup(f"{tmp_path}/copy")
    async with EmbeddedEngine(f"{tmp_path}/copy") as kv:
        assert await values(kv) == {f"k{i}".encode(): b"v" for i in range(100)}
        await put(kv, a=b"goes on")


@pytest.mark.slow
@pytest.mark.parametrize(("limit_bytes", "expected"), [(8 * GIB, "4"), (900 * MIB, "cannot map")])
def test_a_small_address_space_makes_a_small_map(tmp_path: Path, limit_bytes: int, expected: str) -> None:
    script = """
import asyncio, resource, sys
from fireflyer.base.errors import Busy
from fireflyer.kvstore.embedded import EmbeddedEngine
async def main(path, limit):
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        async with EmbeddedEngine(path) as kv:
            print(kv._file._env.info()["map_size"] >> 30)
    except Busy as error:
        print(error)
asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""
    command = [sys.executable, "-c", script, str(tmp_path / "store"), str(limit_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=allowed_s(60))
    assert expected in done.stdout, done.stderr
