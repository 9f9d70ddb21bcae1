"""The checkpoint manager is crashed at every write, fsync and rename, and what the disk may be left with is tried out.

A fault point is every operation of every rank; the outcomes of a crash are enumerated (all of them up to a limit, the
telling ones first). After each the newest complete checkpoint must be found, byte for byte, and saving must go on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.campaigns import shards
from tests.support.checkpoints.jobs import ROOT, Job, Wrap, check_recovery, restore
from tests.support.checkpoints.weak_disks import WithoutSync

from fireflyer.base.ports import Disk, DiskFile, Transfer
from fireflyer.checkpoint import opening
from fireflyer.checkpoint.core.manifest import ShardRecord
from fireflyer.checkpoint.core.names import MANIFEST_FILE, final_name, trash_name
from fireflyer.checkpoint.engine import image, performing
from fireflyer.checkpoint.engine.image import Share
from fireflyer.checkpoint.engine.steps import Steps
from fireflyer.sim import Fault, FaultKind, OperationRecord, SimDisk, enumerate_outcomes

STEPS = [10, 20, 30]


def prepared(*, durable_names: bool = False) -> SimDisk:
    """A disk on which an earlier attempt has died: one good checkpoint, a half-written save and half-removed trash."""
    disk = SimDisk(durable_names=durable_names)
    Job(disk, 2, [5]).run()
    mount = disk.mount()
    for name in (".tmp-step-00000006-00000-000002", ".trash-step-00000004-0"):
        mount.mkdir(f"{ROOT}/{name}")
        mount.create(f"{ROOT}/{name}/shard-00000-of-00002.safetensors").fsync()
        mount.sync_dir(f"{ROOT}/{name}")
    mount.sync_dir(ROOT)
    return disk


def run_with(fault: Fault | None, start: SimDisk, *, world_size: int, seed: int = 0, wrap: Wrap | None = None) -> Job:
    job = Job(start.clone(), world_size, STEPS, attempt=1, seed=seed, wrap=wrap or (lambda disk: disk))
    first = len(job.disk.operations)
    if fault is not None:
        assert fault.index is not None
        job.disk.faults = [Fault(kind=fault.kind, index=first + fault.index)]
    job.run()
    job.disk.faults = []
    return job


def newest(job: Job, before: int) -> int:
    return max([before, *(step for step, _ in job.committed)])


def survivors(job: Job, *, limit: int) -> Iterator[SimDisk]:
    """The disks that a crash of this job may leave: the process alone dies, its machine dies, or all power is lost."""
    yield job.disk.clone()
    owners = [None] if job.crashed_rank is None else [None, f"rank{job.crashed_rank}"]
    for owner in owners:
        for outcome in enumerate_outcomes(job.disk.pending(owner), limit=limit):
            disk = job.disk.clone()
            disk.crash(outcome, owner=owner)
            yield disk


class Recoveries:
    """Goes through no recovery twice: it depends on nothing but what the disk holds, the size of the job, and the
    manager's code."""

    def __init__(self) -> None:
        self._restored: dict[tuple[bytes, bool, int, int], int] = {}

    def check(self, disk: SimDisk, *, at_least: int, world_size: int, attempt: int) -> bytes:
        """As `check_recovery`. Returns the digest of what the disk held."""
        digest = disk.digest()
        key = (digest, disk.durable_names, world_size, attempt)
        if key not in self._restored:
            found = check_recovery(disk, at_least=at_least, world_size=world_size, attempt=attempt)
            self._restored[key] = found.step if found is not None else 0
        assert self._restored[key] >= at_least
        return digest


UNWEAKENED = Recoveries()
"""Of the manager as it is, for all tests of this module. A test that changes the manager's code takes its own."""


class Campaign:
    """Counts fault points, and disks that differ."""

    def __init__(self, world_size: int, recoveries: Recoveries) -> None:
        self.points = 0
        self._world_size = world_size
        self._recoveries = recoveries
        self._seen: set[bytes] = set()

    @property
    def disks(self) -> int:
        return len(self._seen)

    def check(self, job: Job, *, limit: int, before: int, attempt: int = 2) -> None:
        self.points += 1
        for disk in survivors(job, limit=limit):
            at_least = newest(job, before)
            self._seen.add(
                self._recoveries.check(disk, at_least=at_least, world_size=self._world_size, attempt=attempt)
            )


def campaign(
    start: SimDisk,
    *,
    world_size: int,
    limit: int,
    before: int,
    seeds: range = range(1),
    kinds: tuple[FaultKind, ...] = (FaultKind.CRASH_BEFORE,),
    wrap: Wrap | None = None,
    recoveries: Recoveries = UNWEAKENED,
) -> Campaign:
    """A crash at every fault point."""
    results = Campaign(world_size, recoveries)
    for seed in seeds:
        whole = run_with(None, start, world_size=world_size, seed=seed, wrap=wrap)
        assert [step for step, _ in whole.committed] == STEPS
        count = len(whole.disk.operations) - len(start.operations)
        for index, kind in itertools.product(range(count), kinds):
            job = run_with(Fault(kind=kind, index=index), start, world_size=world_size, seed=seed, wrap=wrap)
            assert job.crashed_rank is not None
            results.check(job, limit=limit, before=before)
    return results


def test_a_single_rank_crashed_at_every_operation_restores_the_newest_complete_checkpoint() -> None:
    results = campaign(SimDisk(), world_size=1, limit=200, before=0)
    assert results.points > 40
    assert results.disks > results.points


def test_two_ranks_crashed_at_every_operation_restore_the_newest_complete_checkpoint() -> None:
    results = campaign(prepared(), world_size=2, limit=60, before=5)
    assert results.points > 70
    assert results.disks > 3 * results.points


@pytest.mark.parametrize("world_size", [1, 2])
def test_where_names_are_durable_at_once_nothing_syncs_them_and_nothing_is_lost(world_size: int) -> None:
    """As on 3FS."""
    start = prepared(durable_names=True)
    results = campaign(start, world_size=world_size, limit=60, before=5)
    assert results.points > 35 * world_size
    assert results.disks > results.points
    saves = run_with(None, start, world_size=world_size).disk.operations[len(start.operations) :]
    assert not [it for it in saves if it.operation == "sync_dir" and "/.tmp-" in it.path]


@pytest.mark.parametrize(
    "world_size",
    [
        pytest.param(1, marks=shards.campaign(expected_s=15)),
        pytest.param(2, marks=pytest.mark.slow),
        pytest.param(3, marks=shards.campaign(expected_s=25)),
    ],
)
def test_every_operation_before_and_after_under_many_schedules(world_size: int) -> None:
    kinds = (FaultKind.CRASH_BEFORE, FaultKind.CRASH_AFTER)
    campaign(prepared(), world_size=world_size, limit=200, before=5, seeds=range(3), kinds=kinds)


def crash_twice(first_at: list[int], *, stride: int, limit: int) -> Campaign:
    """A crash at each of `first_at`, then another at every `stride`-th operation of the attempt that recovers."""
    results = Campaign(2, UNWEAKENED)
    seen: dict[bytes, None] = {}
    for index in first_at:
        first = run_with(Fault(kind=FaultKind.CRASH_BEFORE, index=index), SimDisk(), world_size=2)
        before = newest(first, 0)
        for disk in survivors(first, limit=limit):
            state = repr((disk.digest(), disk.pending())).encode()
            if state in seen:
                continue
            seen[state] = None
            whole = Job(disk.clone(), 2, [40, 50], attempt=5)
            whole.run()
            for again in range(len(disk.operations), len(whole.disk.operations), stride):
                job = Job(disk.clone(), 2, [40, 50], attempt=5)
                job.disk.faults = [Fault(kind=FaultKind.CRASH_BEFORE, index=again)]
                job.run()
                job.disk.faults = []
                results.check(job, limit=limit, before=before, attempt=6)
    return results


def operations_of_a_whole_run() -> list[OperationRecord]:
    return run_with(None, SimDisk(), world_size=2).disk.operations


def test_a_second_crash_while_recovering_from_one_between_a_rename_and_its_sync() -> None:
    delicate = [record.index + 1 for record in operations_of_a_whole_run() if record.operation == "rename"]
    assert len(delicate) >= 5
    assert crash_twice(delicate, stride=1, limit=4).points > 500


@pytest.mark.slow
def test_a_second_crash_anywhere_while_recovering_from_a_first_anywhere() -> None:
    crash_twice(list(range(len(operations_of_a_whole_run()))), stride=2, limit=8)


@pytest.mark.parametrize("kind", [FaultKind.EIO, FaultKind.NO_SPACE, FaultKind.DENIED])
def test_a_save_that_fails_at_any_operation_is_reported_and_loses_nothing(kind: FaultKind) -> None:
    start = prepared()
    whole = run_with(None, start, world_size=2)
    count = len(whole.disk.operations) - len(start.operations)
    opening = next(
        index
        for index, it in enumerate(whole.disk.operations[len(start.operations) :])
        if ".tmp-step-00000010" in it.path
    )
    for index in range(opening, count):
        job = run_with(Fault(kind=kind, index=index), start, world_size=2)
        assert job.crashed_rank is None, "an error of the disk must not kill the job"
        failed = {step for _, step, _ in job.errors}
        assert len(failed) <= 1
        assert {rank for rank, _, _ in job.errors} in (set(), {0, 1}), "every rank hears of the failure"
        assert all("\n" not in message for _, _, message in job.errors)
        assert [step for step, _ in job.committed] == [step for step in STEPS if step not in failed]
        assert failed or job.notes, "nothing goes wrong in silence"
        UNWEAKENED.check(job.disk, at_least=newest(job, 5), world_size=2, attempt=2)


def test_a_full_disk_fails_saves_and_keeps_the_checkpoints_that_are_there() -> None:
    start = prepared()
    used = start.used_bytes()
    for room in (0, 1, 100, 400, 900, 1500):
        job = Job(start.clone(), 2, STEPS, attempt=1)
        job.disk.capacity_bytes = used + room
        job.run()
        assert any("no space left" in message for _, _, message in job.errors), room
        found = restore(job.disk)
        assert found is not None
        assert found.step >= newest(job, 5)
        job.disk.capacity_bytes = None
        check_recovery(job.disk, at_least=newest(job, 5), world_size=2, attempt=2)


# Planted faults: each weakened manager must be caught by the same campaign.


def caught(
    wrap: Wrap | None = None,
    start: SimDisk | None = None,
    *,
    world_size: int = 2,
    recoveries: Recoveries = UNWEAKENED,
) -> bool:
    start = start or prepared()
    try:
        campaign(start, world_size=world_size, limit=60, before=5, wrap=wrap, recoveries=recoveries)
    except (AssertionError, FileNotFoundError):
        return True
    return False


@pytest.mark.parametrize(
    ("operation", "affects"),
    [
        ("fsync", lambda path: "shard-" in path),
        ("fsync", lambda path: path.endswith(MANIFEST_FILE)),
        ("sync_dir", lambda path: "/.tmp-" in path),
        ("sync_dir", lambda path: path == ROOT),
    ],
    ids=["shard not synced", "manifest not synced", "names in the directory not synced", "rename not synced"],
)
def test_a_missing_sync_is_caught(operation: str, affects: Callable[[str], bool]) -> None:
    assert caught(lambda disk: WithoutSync(disk, operation, affects))


class NotWaited(Transfer):
    def wait(self) -> int:
        return 0


@pytest.mark.parametrize("name", ["shard-", MANIFEST_FILE])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_missing_fsync_is_caught_where_names_are_durable_at_once(name: str, world_size: int) -> None:
    """One rank syncs its shard only when it commits."""
    start = prepared(durable_names=True)
    assert caught(lambda disk: WithoutSync(disk, "fsync", lambda path: name in path), start, world_size=world_size)


def test_a_disk_that_claims_durable_names_and_has_none_is_caught() -> None:
    def claiming(disk: Disk) -> Disk:
        disk.durable_names = True
        return disk

    assert caught(claiming)


def test_a_rename_before_the_manifest_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(disk: Disk, root: str, directory: str, step: int, manifest: bytes, **options: Any) -> Steps[str]:
        name = final_name(step, disk.list(root))
        disk.rename(f"{root}/{directory}", f"{root}/{name}")
        yield
        (file,) = options["files"].all()
        file.pwrite(manifest, 0)
        file.fsync()
        disk.sync_dir(f"{root}/{name}")
        disk.sync_dir(root)
        return name

    monkeypatch.setattr(performing, "commit", hasty)
    assert caught(recoveries=Recoveries())


def test_a_removal_before_its_rename_is_durable_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(disk: Disk, root: str, name: str, writer_directory: str) -> Steps[None]:
        place = f"{root}/{writer_directory}"
        trash = trash_name(name.rpartition("/")[2], disk.list(place))
        disk.rename(f"{root}/{name}", f"{place}/{trash}")
        for file in disk.list(f"{place}/{trash}"):
            disk.remove(f"{place}/{trash}/{file}")
            disk.sync_dir(f"{place}/{trash}")
            yield
        disk.rmdir(f"{place}/{trash}")

    monkeypatch.setattr(performing, "discard", hasty)
    monkeypatch.setattr(opening, "discard", hasty)
    assert caught(recoveries=Recoveries())


def test_a_write_that_is_not_waited_for_before_the_fsync_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = image._write_image

    def hasty(file: DiskFile, path: str, share: Share, piece_bytes: int) -> Steps[ShardRecord]:
        started: list[Transfer] = []
        start_pwrite = file.start_pwrite

        def start(data: memoryview, offset: int) -> Transfer:
            started.append(start_pwrite(data, offset))
            return started[-1] if offset + len(data) < len(share.image) else NotWaited()

        monkeypatch.setattr(file, "start_pwrite", start)
        record = yield from whole(file, path, share, piece_bytes)
        file.fsync()
        started[-1].wait()  # it lands, and a crash loses it
        monkeypatch.setattr(file, "fsync", lambda: None)
        return record

    monkeypatch.setattr(image, "_write_image", hasty)
    assert caught(recoveries=Recoveries())


def test_the_unweakened_manager_passes_the_campaign_that_catches_the_others() -> None:
    assert not caught(lambda disk: WithoutSync(disk, "nothing", lambda _path: True))
