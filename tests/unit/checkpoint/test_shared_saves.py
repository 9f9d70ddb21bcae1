"""The checkpoint managers of several ranks: each checkpoint is of all of them, or of none."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.support.checkpoints.ranks import Ranks
from tests.support.checkpoints.states import Gate, damage, flip, listed, manager, same, save_all, state_of

from fireflyer.base.errors import (
    Aborted,
    DataCorruption,
    Fenced,
    InvariantViolation,
    NoSpace,
    Timeout,
)
from fireflyer.base.events import CheckpointReport
from fireflyer.base.launch import RankEnvironment
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.ports import Data, Disk
from fireflyer.base.units import SECOND
from fireflyer.checkpoint import (
    CheckpointManager,
    State,
    capture,
    joining,
    verify,
)
from fireflyer.checkpoint.core.manifest import ShardRecord
from fireflyer.checkpoint.engine import performing
from fireflyer.checkpoint.engine.image import Share, write_shard
from fireflyer.checkpoint.engine.save import BackgroundSave
from fireflyer.checkpoint.engine.steps import Steps
from fireflyer.runtime.disk import RealDisk, RealFile
from fireflyer.runtime.store import LocalStore
from fireflyer.sim import Fault, FaultKind, SimDisk

# Several ranks.


def own_of(rank: int, step: int) -> dict[str, torch.Tensor]:
    return {"rng": torch.full((4,), 10 * step + rank, dtype=torch.int64)}


def rank_state(rank: int, step: int) -> State:
    return State(state_of(step).shared, own_of(rank, step), {"step": step})


def test_a_second_manager_of_a_job_has_keys_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script with two phases makes two: the ranks of the second would read what rank 0 said in the first."""
    monkeypatch.setattr(joining, "open_store", lambda _: LocalStore())
    env = RankEnvironment(world_size=2, local_world_size=2, control="a:1", secret_file="secret")
    ranks = []
    for _ in range(2):
        monkeypatch.setattr(joining, "_made_here", itertools.count(1))  # each rank is a process
        ranks.append([joining.find_peers(env).name for _ in range(3)])
    assert ranks[0] == ranks[1]
    assert len(set(ranks[0])) == 3


class RecordingStore(LocalStore):
    def __init__(self) -> None:
        super().__init__()
        self.waits: dict[str, int] = {}

    def get(self, key: str, timeout_ns: int) -> bytes:
        self.waits[key.partition("/0/")[2]] = timeout_ns
        return super().get(key, timeout_ns)


def test_ranks_wait_for_what_rank_0_does_as_long_as_a_save_may_take(tmp_path: Path) -> None:
    """It reads a whole checkpoint to verify it, and removes old ones before the last save: minutes, for large ones."""
    store = RecordingStore()
    ranks = Ranks(str(tmp_path), 2, RealDisk(), store=store, timeout_ns=777 * SECOND)
    ranks.together(lambda ours: ours.restore())
    ranks.together(lambda ours: ours.save(1, rank_state(ours.rank, 1), blocking=True).result())
    ranks.close()
    assert (store.waits["restore/1"], store.waits["1/go"]) == (777 * SECOND, 777 * SECOND)


@pytest.fixture
def disk() -> Disk:
    return RealDisk()


def test_ranks_share_the_work_and_each_gets_its_own_back(tmp_path: Path, disk: Disk) -> None:
    ranks = Ranks(str(tmp_path), 3, disk)
    for step in (10, 20, 30):
        results = ranks.together(lambda ours, step=step: ours.save(step, rank_state(ours.rank, step)).result())  # type: ignore[misc]
        assert {*results} == {f"step-{step:08d}"}
        ranks.together(lambda ours: ours.wait())
    ranks.close()
    assert sorted((report.rank, report.step) for report in ranks.reports if report.error is None) == [
        (rank, step) for rank in range(3) for step in (10, 20, 30)
    ]
    shards = sorted((tmp_path / "step-00000030").glob("*.safetensors"))
    stored = [{*safetensors.torch.load_file(shard)} for shard in shards]
    assert sum(len(names) for names in stored) == len({name for names in stored for name in names}) == 5 + 3
    assert all(len(names) > 1 for names in stored), "every rank writes shared tensors"

    again = Ranks(str(tmp_path), 3, disk, attempt=1)
    for rank, restored in enumerate(again.together(lambda ours: ours.restore())):
        assert same(restored, 30)
        assert restored is not None
        assert restored.own is not None
        assert torch.equal(restored.own["rng"], own_of(rank, 30)["rng"])
    again.close()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_another_number_of_ranks_can_resume(tmp_path: Path, disk: Disk, world_size: int) -> None:
    ranks = Ranks(str(tmp_path), 3, disk)
    ranks.together(lambda ours: ours.save(10, rank_state(ours.rank, 10)).result())
    ranks.close()
    again = Ranks(str(tmp_path), world_size, disk, attempt=1)
    for rank, restored in enumerate(again.together(lambda ours: ours.restore())):
        assert same(restored, 10)
        assert restored is not None
        assert (restored.own is None) == (rank >= 3)
    again.together(lambda ours: ours.save(20, rank_state(ours.rank, 20)).result())
    again.close()


def test_a_rank_that_cannot_write_fails_the_save_on_every_rank() -> None:
    device = SimDisk()
    disk = device.mount()
    ranks = Ranks("/c", 3, disk)
    ranks.together(lambda ours: ours.save(10, rank_state(ours.rank, 10), blocking=True).result())
    device.faults = [Fault(kind=FaultKind.NO_SPACE, operation="pwrite", path_contains="shard-00002")]
    errors = ranks.together(lambda ours: ours.save(20, rank_state(ours.rank, 20)).error())
    assert all(isinstance(error, NoSpace) for error in errors)
    assert str(errors[0]).startswith("rank 2: ")
    device.faults = []
    names = ranks.together(lambda ours: ours.save(30, rank_state(ours.rank, 30), blocking=True).result())
    assert names == ["step-00000030"] * 3
    ranks.close()
    assert listed(disk.list("/c")) == ["step-00000010", "step-00000030"]


def test_where_ranks_differ_in_buffers_rank_0s_are_stored(tmp_path: Path, disk: Disk) -> None:
    def model_of(rank: int) -> torch.nn.Module:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        model(torch.rand(8, 3) + rank)
        return model

    models = [model_of(rank) for rank in range(4)]
    ranks = Ranks(str(tmp_path), 4, disk)
    ranks.together(lambda ours: ours.save(10, capture(models[ours.rank])).result())
    restored = ranks.together(lambda ours: ours.restore())
    ranks.close()
    for one in restored:
        assert one is not None
        for name, value in models[0].state_dict().items():
            assert torch.equal(one.shared[f"model/{name}"], value), name
    assert all(info.problem is None for info in verify(str(tmp_path)))
    shards = sorted((tmp_path / "step-00000010").glob("*.safetensors"))
    assert all(any("model/" in name for name in safetensors.torch.load_file(shard)) for shard in shards)


class SessionFile(RealFile):
    """Lost with the session in which it was opened."""

    disk: SessionDisk
    session: int

    def pwrite(self, data: Data, offset: int) -> None:
        if self.session != self.disk.session:
            raise translate_os_error(OSError(errno.ESTALE, "lost"), "write")
        super().pwrite(data, offset)


class SessionDisk(RealDisk):
    def __init__(self) -> None:
        self.session = 0

    def create(self, path: str, *, direct: bool = False) -> RealFile:
        file = super().create(path, direct=direct)
        ours = SessionFile(file._fd, path, file._direct_fd)
        file._fd = file._direct_fd = -1
        ours.disk, ours.session = self, self.session
        return ours


class EndingSession(LocalStore):
    """The session of the disk is replaced when rank 0 has the record of the other rank: all shards are durable."""

    def __init__(self, disk: SessionDisk) -> None:
        super().__init__()
        self._disk = disk

    def get(self, key: str, timeout_ns: int) -> bytes:
        value = super().get(key, timeout_ns)
        if key.endswith("record/1"):
            self._disk.session += 1
        return value


def test_a_session_that_ends_while_rank_0_waits_for_the_others_takes_no_manifest_with_it(tmp_path: Path) -> None:
    disk = SessionDisk()
    ranks = Ranks(str(tmp_path), 2, disk, store=EndingSession(disk))
    names = ranks.together(lambda ours: ours.save(10, rank_state(ours.rank, 10), blocking=True).result())
    ranks.close()
    assert disk.session == 1
    assert names == ["step-00000010"] * 2


class Gated(RealDisk):
    """Stops before it creates the manifest of step 20."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def create(self, path: str, *, direct: bool = False) -> RealFile:
        if path.endswith("manifest.json") and "00000020" in path:
            self.reached.set()
            assert self.go_on.wait(30)
        return super().create(path, direct=direct)


def test_a_launch_that_is_not_quite_dead_cannot_commit_what_the_next_one_writes(tmp_path: Path) -> None:
    old_disk, new_disk = Gated(), Gated()
    old = manager(tmp_path, disk=old_disk, keep=1)
    old.save(10, state_of(10), blocking=True).result()
    late = old.save(20, state_of(20))
    assert old_disk.reached.wait(30)
    new = manager(tmp_path, disk=new_disk, keep=1)
    new.save(15, state_of(15), blocking=True).result()
    ours = new.save(20, state_of(20))  # the same step, attempt and number of the save
    assert new_disk.reached.wait(30)
    old_disk.go_on.set()
    assert isinstance(late.error(), Fenced)
    with pytest.raises(Fenced, match="this process is left over"):
        old.save(30, state_of(30))
    new_disk.go_on.set()
    assert ours.result() == "step-00000020"
    old.close()
    new.close()
    assert [(info.name, info.problem) for info in verify(str(tmp_path))] == [("step-00000020", None)]


def test_a_fenced_attempt_ends_on_all_ranks_at_the_same_save(tmp_path: Path, disk: Disk) -> None:
    ranks = Ranks(str(tmp_path), 2, disk, launch="one")
    ranks.together(lambda ours: ours.save(10, rank_state(ours.rank, 10), blocking=True).result())
    with manager(tmp_path, attempt=1, launch="one") as later:
        assert same(later.restore(), 10)
        handles = ranks.together(lambda ours: ours.save(20, rank_state(ours.rank, 20)))
        assert all(isinstance(handle.error(), Fenced) for handle in handles)

        def told(ours: CheckpointManager) -> str:
            with pytest.raises(Fenced) as caught:
                ours.save(30, rank_state(ours.rank, 30))
            return str(caught.value)

        assert {*ranks.together(told)} == {str(handles[0].error())}
        later.save(15, state_of(15), blocking=True).result()
    with pytest.raises(Fenced, match=r"attempt 0 may no longer change .* attempt 1 of launch .* has begun there"):
        manager(tmp_path, launch="one")
    ranks.close()
    assert [(info.step, info.problem) for info in verify(str(tmp_path))] == [(15, None), (10, None)]


def test_a_launch_of_later_counts_attempts_from_0_and_goes_on(tmp_path: Path) -> None:
    for attempt, launch in ((0, "one"), (3, "one"), (0, "two"), (1, "two"), (0, ""), (0, "")):
        with manager(tmp_path, attempt=attempt, launch=launch) as ours:
            ours.save(10 * attempt, state_of(10), blocking=True).result()


def test_every_rank_passes_over_the_same_checkpoints(tmp_path: Path, disk: Disk) -> None:
    ranks = Ranks(str(tmp_path), 2, disk)
    for step in (10, 20):
        ranks.together(lambda ours, step=step: ours.save(step, rank_state(ours.rank, step), blocking=True).result())  # type: ignore[misc]
    ranks.close()
    flip(tmp_path / "step-00000020" / "shard-00001-of-00002.safetensors", -1)
    again = Ranks(str(tmp_path), 2, disk, attempt=1)
    restored = again.together(lambda ours: ours.restore())
    assert all(same(one, 10) for one in restored)
    assert len({one.passed_over for one in restored if one is not None}) == 1
    again.close()


def test_when_rank_0_cannot_restore_the_others_hear_why(tmp_path: Path, disk: Disk) -> None:
    save_all(tmp_path, [10])
    damage(tmp_path / "step-00000010", "missing shard")
    ranks = Ranks(str(tmp_path), 2, disk)

    def failing(ours: CheckpointManager) -> str:
        with pytest.raises(DataCorruption) as caught:
            ours.restore()
        return str(caught.value)

    messages = ranks.together(failing)
    assert all("none of the 1 checkpoints" in message for message in messages)
    ranks.close()


def test_whatever_ends_the_restore_of_rank_0_the_others_hear_of_it(tmp_path: Path, disk: Disk) -> None:
    save_all(tmp_path, [10])
    ranks = Ranks(str(tmp_path), 2, disk, timeout_ns=20 * SECOND)

    def failing(ours: CheckpointManager) -> str:
        with pytest.raises((ZeroDivisionError, InvariantViolation)) as caught:
            ours.restore(wanted=lambda _: 1 // ours.rank == 1)
        return str(caught.value)

    assert "rank 0 could not restore: unexpected ZeroDivisionError" in ranks.together(failing)[1]
    ranks.close()


def test_ranks_agree_on_a_period_in_time_and_on_skipping(tmp_path: Path) -> None:
    disk = Gate()
    ranks = Ranks(str(tmp_path), 2, disk, period_ns=SECOND)
    late = [manager._clock.now_ns() + 10 * SECOND * (manager.rank == 0) for manager in ranks.managers]
    assert ranks.together(lambda ours: ours.due(1, late[ours.rank])) == [True, True]
    first = ranks.together(lambda ours: ours.save(1, rank_state(ours.rank, 1)))
    assert disk.reached.wait(30)
    second = ranks.together(lambda ours: ours.save(2, rank_state(ours.rank, 2)))
    assert [handle.skipped for handle in second] == [True, True]
    disk.open_gate.set()
    assert [handle.result() for handle in first] == ["step-00000001"] * 2
    ranks.together(lambda ours: ours.wait())
    third = ranks.together(lambda ours: ours.save(3, rank_state(ours.rank, 3)).result())
    assert third == ["step-00000003"] * 2
    ranks.close()


class SlowRank1(RealDisk):
    """Rank 1 gets stuck in the first file it creates, rank 0 cannot write its first."""

    def __init__(self) -> None:
        self.stuck = threading.Event()
        self.go_on = threading.Event()

    def create(self, path: str, *, direct: bool = False) -> RealFile:
        if "00000010" in path and "shard-00000" in path:
            assert self.stuck.wait(30)
            raise NoSpace(f"create {path}: no space left")
        file = super().create(path, direct=direct)
        if "00000010" in path:
            self.stuck.set()
            assert self.go_on.wait(30)
        return file


def test_a_writer_of_a_save_that_was_given_up_stops_when_the_next_one_begins(tmp_path: Path) -> None:
    disk = SlowRank1()
    ranks = Ranks(str(tmp_path), 2, disk)
    first = ranks.together(lambda ours: ours.save(10, rank_state(ours.rank, 10)))
    assert isinstance(first[0].error(), NoSpace)
    ranks.managers[0].wait()
    assert not first[1].done()

    def go_on_when_given_up(stuck: BackgroundSave) -> None:
        assert stuck._given_up.wait(30)
        disk.go_on.set()

    def save(ours: CheckpointManager) -> str | None:
        if ours.rank == 1:
            threading.Thread(target=go_on_when_given_up, args=(ours._saving._current,)).start()
        return ours.save(20, rank_state(ours.rank, 20)).result()

    assert ranks.together(save) == ["step-00000020"] * 2
    assert isinstance(first[1].error(), Aborted)
    ranks.close()
    assert listed(os.listdir(tmp_path)) == ["step-00000020"]
    assert [info.problem for info in verify(str(tmp_path))] == [None]


def test_a_record_may_be_longer_than_the_store_takes(tmp_path: Path, disk: Disk) -> None:
    shared = {f"{'x' * 900}/{index}": torch.full((1,), index) for index in range(9000)}
    ranks = Ranks(str(tmp_path), 2, disk)
    handles = ranks.together(lambda ours: ours.save(10, State(shared), blocking=True))
    assert [handle.error() for handle in handles] == [None, None]
    for restored in ranks.together(lambda ours: ours.restore()):
        assert restored is not None
        assert all(torch.equal(restored.shared[name], tensor) for name, tensor in shared.items())
    ranks.close()


def test_what_rank_0_said_before_a_save_was_given_up_is_heard(tmp_path: Path, disk: Disk) -> None:
    store = LocalStore()
    kept: list[CheckpointReport] = []

    class Late:
        """Rank 1's store: the outcome comes at the very end of a wait, and the next save begins right then."""

        def get(self, key: str, timeout_ns: int) -> bytes:
            value = store.get(key, 30 * SECOND)
            if key.endswith("/1/outcome") and not self.told:
                self.told = True
                follower._saving._current._given_up.set()  # type: ignore[union-attr]
                raise Timeout("nothing yet")
            return value

        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

        told = False

    def make(rank: int, store: object) -> CheckpointManager:
        return manager(tmp_path, rank=rank, world_size=2, store=store, on_event=kept.append)

    leader, follower = make(0, store), make(1, Late())
    with ThreadPoolExecutor() as pool:
        handles = list(pool.map(lambda one: one.save(10, rank_state(one.rank, 10)), (leader, follower)))
    assert [handle.result(60 * SECOND) for handle in handles] == ["step-00000010"] * 2
    assert [report.error for report in kept] == [None, None]
    leader.close()
    follower.close()


def test_a_rank_that_never_answers_ends_the_save_by_its_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk
) -> None:
    answer = threading.Event()

    def hanging(disk: Disk, path: str, share: Share, **options: Any) -> Steps[ShardRecord]:
        if share.rank == 1:
            answer.wait()
        return (yield from write_shard(disk, path, share, **options))

    monkeypatch.setattr(performing, "write_shard", hanging)
    ranks = Ranks(str(tmp_path), 2, disk, timeout_ns=SECOND // 5)
    handles = ranks.together(lambda ours: ours.save(10, rank_state(ours.rank, 10)))
    error = handles[0].error()
    assert error is not None
    assert "a rank has ended, or its disk hangs" in str(error)
    answer.set()
    ranks.close()
    assert listed(os.listdir(tmp_path)) == []


def test_a_rank_that_does_not_come_to_a_save_is_missed_by_all(tmp_path: Path, disk: Disk) -> None:
    """Who writes what depends on what each rank has."""
    ranks = Ranks(str(tmp_path), 2, disk, timeout_ns=SECOND // 5)
    with pytest.raises(Timeout, match="the rank that sets it is late or has ended"):
        ranks.managers[0].save(10, rank_state(0, 10), blocking=True)
    ranks.close()


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_a_save_that_one_rank_cannot_finish_in_time_is_given_up_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_rank: int
) -> None:
    def endless(disk: Disk, path: str, share: Share, **options: Any) -> Steps[ShardRecord]:
        while share.rank == slow_rank:
            threading.Event().wait(0.001)
            yield
        return (yield from write_shard(disk, path, share, **options))

    ranks = Ranks(str(tmp_path), 2, None)
    ranks.together(lambda ours: ours.save(1, state_of(1), blocking=True).result())
    monkeypatch.setattr(performing, "write_shard", endless)
    handles = ranks.together(lambda ours: ours.save(2, state_of(2), blocking=True, timeout_ns=SECOND // 2))
    assert all(isinstance(handle.error(), Aborted) for handle in handles)
    ranks.close()
    assert [info.step for info in verify(str(tmp_path))] == [1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rank_may_have_two_hundred_thousand_tensors(tmp_path: Path) -> None:
    """Its record is longer than the store takes."""
    count, names = 200_000, [f"layers.{number}.attention.weight" for number in range(200_000)]
    rows = torch.arange(3 * count, dtype=torch.float32).view(count, 3)
    states = [State({"w": torch.ones(2)}, own, {}) for own in ({}, dict(zip(names, rows.unbind(0), strict=True)))]
    ranks = Ranks(str(tmp_path), 2, None)
    handles = ranks.together(lambda ours: ours.save(1, states[ours.rank], blocking=True))
    assert {handle.result() for handle in handles} == {"step-00000001"}
    restored = ranks.together(lambda ours: ours.restore())[1]
    assert restored is not None
    assert restored.own is not None
    assert torch.equal(torch.stack([restored.own[name] for name in names]), rows)
    ranks.close()
