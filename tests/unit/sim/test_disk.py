"""The simulated disk forgets exactly what POSIX lets a disk forget."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fireflyer.base.errors import FireflyerError, NoSpace, NotFound, PermanentError, PermissionDenied, UsageError
from fireflyer.base.ports import Disk
from fireflyer.sim import DataFate, Fault, FaultKind, Outcome, SimCrash, SimDisk, enumerate_outcomes
from fireflyer.sim.files import FateKind


def write(disk: Disk, path: str, data: bytes, *, sync: bool = False) -> None:
    file = disk.create(path)
    file.pwrite(data, 0)
    if sync:
        file.fsync()


def contents(disk: SimDisk, path: str) -> bytes | None:
    return disk.read(path) if disk.mount().exists(path) else None


def after_all_outcomes(disk: SimDisk, path: str) -> list[bytes | None]:
    found: list[bytes | None] = []
    for outcome in enumerate_outcomes(disk.pending(), limit=1000):
        survivor = disk.clone()
        survivor.crash(outcome)
        found.append(contents(survivor, path))
    return found


def test_data_and_name_are_durable_only_after_fsync_and_sync_dir() -> None:
    disk = SimDisk()
    mount = disk.mount()
    write(mount, "/f", b"data", sync=True)
    assert sorted(map(str, after_all_outcomes(disk, "/f"))) == ["None", "b'data'"]
    mount.sync_dir("/")
    assert after_all_outcomes(disk, "/f") == [b"data"]
    mount.open("/f")
    assert disk.pending().files == ()


def test_a_synced_name_without_synced_data_may_hold_anything_of_its_length() -> None:
    disk = SimDisk()
    mount = disk.mount()
    write(mount, "/f", b"abcdef")
    mount.sync_dir("/")
    found = after_all_outcomes(disk, "/f")
    assert b"" in found
    assert b"abc" in found, "torn inside a block"
    assert bytes(6) in found, "the length without the data"
    assert b"abcdef" in found
    assert len({*found}) >= 5


def test_an_overwrite_loses_nothing_that_was_synced_before() -> None:
    disk = SimDisk()
    mount = disk.mount()
    file = mount.create("/f")
    file.pwrite(b"11112222", 0)
    file.fsync()
    mount.sync_dir("/")
    file.pwrite(b"3333", 4)
    found = after_all_outcomes(disk, "/f")
    assert all(data is not None and data[:4] == b"1111" for data in found)
    assert {b"11112222", b"11113333", b"11113322"} <= {*found}


def test_directory_changes_survive_independently_and_a_rename_is_atomic() -> None:
    disk = SimDisk()
    mount = disk.mount()
    write(mount, "/a", b"a", sync=True)
    mount.sync_dir("/")
    mount.rename("/a", "/b")
    write(mount, "/c", b"c", sync=True)
    names = []
    for outcome in enumerate_outcomes(disk.pending(), limit=100):
        survivor = disk.clone()
        survivor.crash(outcome)
        names.append(survivor.mount().list("/"))
    assert sorted(names) == [["a"], ["a", "c"], ["b"], ["b", "c"]]


def test_a_replaced_file_is_the_old_one_or_the_new_one() -> None:
    disk = SimDisk()
    mount = disk.mount()
    write(mount, "/f", b"old", sync=True)
    mount.sync_dir("/")
    write(mount, "/new", b"new", sync=True)
    mount.rename("/new", "/f")
    assert {*after_all_outcomes(disk, "/f")} == {b"old", b"new"}


def test_a_rename_between_directories_is_durable_when_either_is_synced() -> None:
    for synced in ("/x", "/y"):
        disk = SimDisk()
        mount = disk.mount()
        mount.mkdir("/x")
        mount.mkdir("/y")
        write(mount, "/x/f", b"data", sync=True)
        mount.sync_dir("/")
        mount.sync_dir("/x")
        mount.rename("/x/f", "/y/f")
        mount.sync_dir(synced)
        assert after_all_outcomes(disk, "/y/f") == [b"data"]
        assert after_all_outcomes(disk, "/x/f") == [None]


def test_a_lost_directory_takes_what_is_in_it() -> None:
    disk = SimDisk()
    mount = disk.mount()
    mount.mkdir("/d")
    write(mount, "/d/f", b"data", sync=True)
    mount.sync_dir("/d")
    disk.crash(None)
    assert disk.mount().list("/") == []


def test_a_removal_that_is_lost_brings_the_file_back() -> None:
    disk = SimDisk()
    mount = disk.mount()
    write(mount, "/f", b"data", sync=True)
    mount.sync_dir("/")
    mount.remove("/f")
    assert contents(disk, "/f") is None
    assert {*after_all_outcomes(disk, "/f")} == {None, b"data"}


def test_when_one_machine_dies_only_its_unsynced_changes_are_at_stake() -> None:
    disk = SimDisk()
    left, right = disk.mount("left"), disk.mount("right")
    write(left, "/l", b"left")
    write(right, "/r", b"right")
    disk.crash(None, owner="left")
    assert disk.mount().list("/") == ["r"]
    assert disk.read("/r") == b"right"
    right.sync_dir("/")


@pytest.mark.parametrize("kind", [FaultKind.CRASH_BEFORE, FaultKind.CRASH_AFTER])
def test_a_crash_fault_strikes_before_or_after_and_the_mount_stays_dead(kind: FaultKind) -> None:
    disk = SimDisk()
    mount = disk.mount("a")
    disk.faults = [Fault(kind=kind, index=1)]
    mount.mkdir("/one")
    with pytest.raises(SimCrash):
        mount.mkdir("/two")
    with pytest.raises(SimCrash):
        mount.exists("/one")
    assert disk.mount("b").exists("/two") == (kind is FaultKind.CRASH_AFTER)


def test_after_power_loss_old_mounts_and_files_are_dead() -> None:
    disk = SimDisk()
    mount = disk.mount()
    file = mount.create("/f")
    disk.crash(None)
    calls: list[Callable[[], object]] = [lambda: mount.list("/"), lambda: file.pwrite(b"x", 0), lambda: file.size()]
    for call in calls:
        with pytest.raises(SimCrash):
            call()


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (FaultKind.EIO, PermanentError),
        (FaultKind.NO_SPACE, NoSpace),
        (FaultKind.DENIED, PermissionDenied),
    ],
)
def test_faults_can_be_put_on_paths_and_operations(kind: FaultKind, error: type[FireflyerError]) -> None:
    disk = SimDisk()
    mount = disk.mount()
    disk.faults = [Fault(kind=kind, operation="pread", path_contains="secret")]
    for path in ("/secret", "/open"):
        write(mount, path, b"x")
    assert mount.open("/open").pread(1, 0) == b"x"
    with pytest.raises(error):
        mount.open("/secret").pread(1, 0)


def test_after_a_failed_fsync_nothing_of_the_file_becomes_durable() -> None:
    disk = SimDisk()
    mount = disk.mount()
    file = mount.create("/f")
    file.pwrite(b"data", 0)
    mount.sync_dir("/")
    disk.faults = [Fault(kind=FaultKind.EIO, operation="fsync")]
    with pytest.raises(PermanentError):
        file.fsync()
    disk.faults = []
    with pytest.raises(PermanentError):
        file.fsync()
    disk.crash(None)
    assert disk.read("/f") == b""


def test_a_full_disk_takes_what_fits_and_says_so() -> None:
    disk = SimDisk(capacity_bytes=10)
    mount = disk.mount()
    file = mount.create("/f")
    file.pwrite(b"12345678", 0)
    with pytest.raises(NoSpace):
        file.pwrite(b"abcd", 8)
    assert disk.read("/f") == b"12345678ab"
    assert mount.free_bytes("/") == 0
    file.pwrite(b"xx", 0)
    with pytest.raises(NoSpace):
        mount.mkdir("/d")
    mount.remove("/f")
    assert mount.free_bytes("/") == 10


def test_the_hand_of_the_test_corrupts_the_medium() -> None:
    disk = SimDisk()
    write(disk.mount(), "/f", b"\x00\x00", sync=True)
    disk.corrupt("/f", 1, mask=0x10)
    assert disk.read("/f") == b"\x00\x10"
    with pytest.raises(NotFound):
        disk.corrupt("/none", 0)


def test_many_pending_changes_are_sampled_without_repetition_and_always_the_same() -> None:
    disk = SimDisk()
    mount = disk.mount()
    for number in range(12):
        write(mount, f"/{number}", b"data")
    outcomes = list(enumerate_outcomes(disk.pending(), limit=200))
    assert len(outcomes) == len({*outcomes}) == 200
    assert outcomes == list(enumerate_outcomes(disk.pending(), limit=200))
    first = outcomes[0]
    assert not any(first.changes)
    assert all(fate.kind is FateKind.LOST for fate in first.files)


def test_an_outcome_of_another_moment_is_refused() -> None:
    with pytest.raises(UsageError, match="this moment"):
        SimDisk().crash(Outcome((DataFate(FateKind.KEPT),), ()))


def test_a_clone_lives_its_own_life() -> None:
    disk = SimDisk()
    write(disk.mount(), "/f", b"one")
    twin = disk.clone()
    twin.mount().remove("/f")
    assert disk.read("/f") == b"one"
    assert disk.digest() != twin.digest()
