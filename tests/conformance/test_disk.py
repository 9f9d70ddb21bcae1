"""What every disk must do: the contract of the `Disk` port, on the real one, the simulated one, and on 3FS."""

from __future__ import annotations

import mmap
import random
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.disks import DISKS
from tests.support.fs.clusters.local_cluster import LocalCluster

from fireflyer.base.errors import Exists, FireflyerError, NotFound, UsageError
from fireflyer.base.ports import DIRECT_ALIGN_BYTES, Data, Disk, DiskLock, Held
from fireflyer.checkpoint import open_storage
from fireflyer.fs.client.files import disk as disk_of_3fs
from fireflyer.fs.client.files.disk import FileSystemDisk


@dataclass
class Place:
    disk: Disk
    root: str

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def write(self, name: str, data: Data) -> None:
        file = self.disk.create(self.path(name))
        file.pwrite(data, 0)
        file.fsync()
        file.close()

    def read(self, name: str) -> bytes:
        file = self.disk.open(self.path(name))
        data = file.pread(1 << 20, 0)
        file.close()
        return data


@pytest.fixture(params=[*sorted(DISKS), "3FS"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param in DISKS:
        return Place(*DISKS[request.param](tmp_path))
    cluster: LocalCluster = request.getfixturevalue("shared_cluster")
    storage = open_storage(cluster.url(f"/disk-{secrets.token_hex(8)}"))
    storage.disk.mkdir(storage.root)
    return Place(storage.disk, storage.root)


def test_what_was_written_is_read_back_by_another_handle(place: Place) -> None:
    place.write("file", b"some bytes")
    assert place.read("file") == b"some bytes"


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_kind_of_bytes_can_be_written(place: Place, kind: type[Data]) -> None:
    place.write("file", kind(b"\x00\x01\xff"))
    assert place.read("file") == b"\x00\x01\xff"


def test_a_memoryview_of_numbers_is_written_as_its_bytes(place: Place) -> None:
    place.write("file", memoryview(bytes(range(16))).cast("I"))
    assert place.read("file") == bytes(range(16))


def test_a_new_file_reads_what_it_wrote_and_holes_are_zeros(place: Place) -> None:
    file = place.disk.create(place.path("file"))
    assert file.size() == 0
    assert file.pread(10, 0) == b""
    file.pwrite(b"end", 7)
    file.pwrite(b"in", 1)
    assert file.size() == 10
    assert file.pread(100, 0) == b"\0in\0\0\0\0end"
    assert file.pread(3, 8) == b"nd"
    assert file.pread(3, 50) == b""
    file.pwrite(b"", 0)
    file.fsync()
    file.close()


def test_create_refuses_what_exists_and_needs_the_parent(place: Place) -> None:
    place.write("file", b"")
    place.disk.mkdir(place.path("dir"))
    for name in ("file", "dir"):
        with pytest.raises(Exists):
            place.disk.create(place.path(name))
        with pytest.raises(Exists):
            place.disk.mkdir(place.path(name))
    with pytest.raises(NotFound):
        place.disk.create(place.path("no/file"))
    with pytest.raises(NotFound):
        place.disk.mkdir(place.path("no/dir"))
    with pytest.raises(FireflyerError):
        place.disk.create(place.path("file/below"))


def test_open_is_for_files_that_exist_and_for_reading(place: Place) -> None:
    with pytest.raises(NotFound):
        place.disk.open(place.path("file"))
    place.disk.mkdir(place.path("dir"))
    with pytest.raises(FireflyerError):
        place.disk.open(place.path("dir"))
    place.write("file", b"x")
    file = place.disk.open(place.path("file"))
    with pytest.raises(FireflyerError):
        file.pwrite(b"y", 0)
    file.close()
    assert place.read("file") == b"x"


def test_a_closed_file_is_of_no_use_and_may_be_closed_again(place: Place) -> None:
    file = place.disk.create(place.path("file"))
    file.close()
    file.close()
    with pytest.raises(UsageError):
        file.pwrite(b"x", 0)
    with pytest.raises(UsageError):
        file.pread(1, 0)


def test_rename_replaces_a_file_and_never_a_directory(place: Place) -> None:
    disk = place.disk
    place.write("new", b"new")
    place.write("old", b"old")
    disk.rename(place.path("new"), place.path("old"))
    assert place.read("old") == b"new"
    assert disk.list(place.root) == ["old"]
    for name in ("dir", "empty"):
        disk.mkdir(place.path(name))
    place.write("dir/file", b"inside")
    for source in ("dir", "old"):
        with pytest.raises(Exists):
            disk.rename(place.path(source), place.path("empty"))
    disk.rename(place.path("dir"), place.path("moved"))
    assert place.read("moved/file") == b"inside"
    assert disk.list(place.root) == ["empty", "moved", "old"]
    with pytest.raises(NotFound):
        disk.rename(place.path("gone"), place.path("somewhere"))
    with pytest.raises(NotFound):
        disk.rename(place.path("gone"), place.path("empty"))
    with pytest.raises(NotFound):
        disk.rename(place.path("old"), place.path("no/where"))
    assert place.read("old") == b"new"


def test_remove_and_rmdir_take_only_their_own_kind(place: Place) -> None:
    disk = place.disk
    disk.mkdir(place.path("dir"))
    place.write("dir/file", b"")
    with pytest.raises(FireflyerError):
        disk.remove(place.path("dir"))
    with pytest.raises(Exists):
        disk.rmdir(place.path("dir"))
    with pytest.raises(FireflyerError):
        disk.rmdir(place.path("dir/file"))
    disk.remove(place.path("dir/file"))
    disk.rmdir(place.path("dir"))
    assert disk.list(place.root) == []
    with pytest.raises(NotFound):
        disk.remove(place.path("dir/file"))
    with pytest.raises(NotFound):
        disk.rmdir(place.path("dir"))


def test_files_that_are_created_and_synced_together_are_as_those_made_one_by_one(place: Place) -> None:
    names = [place.path(name) for name in ("first", "second")]
    files = place.disk.create_all(names, direct=True)
    for number, file in enumerate(files):
        file.pwrite(b"%d" % number, 0)
    place.disk.sync_files(files)
    for file in files:
        file.close()
    assert (place.read("first"), place.read("second")) == (b"0", b"1")
    with pytest.raises(Exists, match="second"):
        place.disk.create_all([place.path("third"), place.path("second")])
    with pytest.raises(NotFound):
        place.disk.create_all([place.path("no/file")])
    with pytest.raises(UsageError):
        place.disk.sync_files(files)
    with pytest.raises(UsageError):
        place.disk.create_all(["relative"])


def test_a_directory_may_be_removed_with_all_that_is_in_it_by_one_call(place: Place) -> None:
    place.disk.mkdir(place.path("dir"))
    place.disk.mkdir(place.path("dir/below"))
    place.write("dir/below/file", b"x")
    place.write("beside", b"x")
    assert not place.disk.remove_tree(place.path("beside"))
    if place.disk.remove_tree(place.path("dir")):
        assert place.disk.list(place.root) == ["beside"]
        with pytest.raises(NotFound):
            place.disk.remove_tree(place.path("dir"))
    else:
        assert place.disk.list(place.root) == ["beside", "dir"]


def test_an_open_file_outlives_its_name(place: Place) -> None:
    place.write("file", b"still here")
    file = place.disk.open(place.path("file"))
    place.disk.remove(place.path("file"))
    assert file.pread(100, 0) == b"still here"
    file.close()


def test_list_exists_and_is_dir_agree(place: Place) -> None:
    disk = place.disk
    for name in ("b", "a", "c"):
        place.write(name, b"")
    disk.mkdir(place.path("aa"))
    assert disk.list(place.root) == ["a", "aa", "b", "c"]
    assert disk.exists(place.path("a"))
    assert disk.exists(place.path("aa"))
    assert not disk.exists(place.path("d"))
    assert not disk.exists(place.path("a/b"))
    assert disk.is_dir(place.path("aa"))
    assert not disk.is_dir(place.path("a"))
    assert not disk.is_dir(place.path("d"))
    with pytest.raises(NotFound):
        disk.list(place.path("d"))
    with pytest.raises(FireflyerError):
        disk.list(place.path("a"))


def test_directories_can_be_synced_and_have_free_space(place: Place) -> None:
    place.disk.sync_dir(place.root)
    assert place.disk.free_bytes(place.root) > 0
    with pytest.raises(NotFound):
        place.disk.sync_dir(place.path("gone"))


@pytest.mark.parametrize("path", ["", "relative", "./here", "/nul\0"])
def test_paths_are_absolute(place: Place, path: str) -> None:
    with pytest.raises(UsageError):
        place.disk.create(path)
    with pytest.raises(UsageError):
        place.disk.list(path)


@pytest.mark.parametrize("direct", [False, True])
def test_transfers_in_flight_read_what_others_have_written(place: Place, direct: bool) -> None:
    pages, last = 5, 1234
    memory = memoryview(mmap.mmap(-1, (pages + 1) * DIRECT_ALIGN_BYTES))
    whole = pages * DIRECT_ALIGN_BYTES + last
    memory[:whole] = random.Random(1).randbytes(whole)
    file = place.disk.create(place.path("file"), direct=direct)
    file.allocate(whole)
    assert (file.size(), file.pread(3, whole - 2)) == (whole, b"\0\0")
    starts = range(0, whole, 2 * DIRECT_ALIGN_BYTES)
    flight = [file.start_pwrite(memory[at : min(whole, at + 2 * DIRECT_ALIGN_BYTES)], at) for at in starts]
    assert sum(transfer.wait() for transfer in flight) == whole
    assert flight[0].wait() == 2 * DIRECT_ALIGN_BYTES, "to wait once more changes nothing"
    file.fsync()
    file.close()
    assert place.read("file") == memory[:whole]
    file = place.disk.open(place.path("file"), direct=direct)
    target = memoryview(mmap.mmap(-1, (pages + 1) * DIRECT_ALIGN_BYTES))
    flight = [file.start_pread(target[at : at + 2 * DIRECT_ALIGN_BYTES], at) for at in starts]
    assert sum(transfer.wait() for transfer in flight) == whole, "less at the end of the file"
    assert target[:whole] == memory[:whole]
    assert file.start_pread(target[:100], 7).wait() == 100, "what is not aligned is read, too"
    assert target[:100] == memory[7:107]
    assert file.start_pread(target[:100], whole).wait() == 0
    file.close()


def test_a_transfer_raises_what_the_call_would(place: Place) -> None:
    place.write("file", b"x")
    file = place.disk.open(place.path("file"))
    with pytest.raises(FireflyerError):
        file.start_pwrite(memoryview(b"y"), 0).wait()
    file.close()
    with pytest.raises(UsageError):
        file.start_pread(memoryview(bytearray(1)), 0).wait()
    assert place.read("file") == b"x"


_WRITES = st.lists(st.tuples(st.binary(max_size=70), st.integers(0, 200)), max_size=12)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(writes=_WRITES, reads=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=5))
def test_any_writes_leave_what_a_byte_array_would_hold(
    place: Place, writes: list[tuple[bytes, int]], reads: list[tuple[int, int]]
) -> None:
    if place.disk.exists(place.path("file")):
        place.disk.remove(place.path("file"))
    file = place.disk.create(place.path("file"))
    model = bytearray()
    for data, offset in writes:
        file.pwrite(data, offset)
        if data:
            model.extend(bytes(max(0, offset + len(data) - len(model))))
            model[offset : offset + len(data)] = data
    assert file.size() == len(model)
    for length, offset in reads:
        assert file.pread(length, offset) == bytes(model[offset : offset + length])
    file.close()


def test_a_lock_is_held_by_one_and_leaves_no_file(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_of_3fs, "_HOLDER_NS", 1)
    disk, path = place.disk, place.path("lock")
    lock = disk.hold(path)
    assert lock is not None
    with pytest.raises(Held, match=path):
        disk.hold(path)
    lock.release()
    lock.release()
    assert disk.list(place.root) == []
    place.write("lock", b"")  # as one that was killed leaves it
    again = disk.hold(path)
    assert again is not None
    again.release()
    assert disk.list(place.root) == []
    with pytest.raises(NotFound):
        disk.hold(place.path("no/lock"))


def test_a_lock_whose_file_was_replaced_leaves_the_other_file_where_it_is(place: Place) -> None:
    disk, path = place.disk, place.path("lock")
    lock = disk.hold(path)
    assert lock is not None
    disk.remove(path)
    place.write("lock", b"another")
    lock.release()
    assert disk.list(place.root) == ["lock"]
    disk.remove(path)


def test_who_does_not_wait_for_a_lock_is_told_at_once_that_it_is_held(place: Place) -> None:
    lock = place.disk.hold(place.path("lock"))
    assert lock is not None
    with pytest.raises(Held, match=place.path("lock")):  # else after the time of a dead client's session
        place.disk.hold(place.path("lock"), wait=False)
    lock.release()


def test_of_many_threads_one_holds_a_lock_at_a_time(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each removes the file that the next ones may just have opened."""
    monkeypatch.setattr(disk_of_3fs, "_HOLDER_NS", 1)
    disk, path = place.disk, place.path("lock")
    inside, most, wanted = [0], [0], 3 if isinstance(disk, FileSystemDisk) else 200

    def take_turns(_: int) -> None:
        for _ in range(wanted):
            while (lock := hold(disk, path)) is None:
                pass
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0)
            inside[0] -= 1
            lock.release()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(take_turns, range(4)))
    assert most == [1]
    assert disk.list(place.root) == []


def hold(disk: Disk, path: str) -> DiskLock | None:
    try:
        return disk.hold(path)
    except Held:
        return None
