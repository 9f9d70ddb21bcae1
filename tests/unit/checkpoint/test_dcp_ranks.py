"""`torch.distributed.checkpoint` on two ranks: its calls in its order, one rank after the other in this process."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from fireflyer.base.errors import DataCorruption, FireflyerError, NoSpace, NotFound, StaleVersion, UsageError
from fireflyer.base.ports import DiskLock
from fireflyer.checkpoint.core import manifest
from fireflyer.checkpoint.core.names import shard_name
from fireflyer.checkpoint.dcp import FireFlyerReader, FireFlyerWriter, load, save, writer
from fireflyer.runtime.disk import RealDisk


@pytest.fixture(autouse=True)
def without_a_process_group() -> Iterator[None]:
    """DCP warns that it saves in a single process, which is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@pytest.fixture(autouse=True)
def without_kept_plans() -> Iterator[None]:
    yield
    for kept in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
        getattr(SavePlanner, f"_cached_{kept}").clear()


class Full(FireFlyerWriter):
    """Of a rank whose disk is full."""

    def _expect_space(self, needed_bytes: int) -> None:
        raise NoSpace(f"no room for {needed_bytes} bytes")


class WithoutLocks(RealDisk):
    """As a file system on which nobody can tell whether there are other writers."""

    def hold(self, path: str, *, wait: bool = True) -> DiskLock | None:
        return None


def state_of(rank: int, step: int) -> dict[str, Any]:
    return {f"of rank {rank}": torch.full((3,), float(10 * step + rank))}


def save_together(
    writers: Sequence[FireFlyerWriter], step: int, before_finish: Callable[[], object] = lambda: None
) -> None:
    """As `dcp.save` does where plans are kept: each rank's planner has what that rank's process has kept."""
    planners = [DefaultSavePlanner(enable_plan_caching=True) for _ in writers]
    plans = []
    for rank, (ours, planner) in enumerate(zip(writers, planners, strict=True)):
        planner._cached_plans_key = f"rank {rank}"
        planner.set_up_planner(state_of(rank, step), ours.storage_meta(), rank == 0)
        ours.set_up_storage_writer(rank == 0)
        plans.append(ours.prepare_local_plan(planner.create_local_plan()))
    told, metadata = planners[0].create_global_plan(plans)
    told = pickle.loads(pickle.dumps(writers[0].prepare_global_plan(told)))
    finals = [planner.finish_plan(plan) for planner, plan in zip(planners, told, strict=True)]
    results: list[list[WriteResult]] = [
        ours.write_data(plan, planner).wait() for ours, plan, planner in zip(writers, finals, planners, strict=True)
    ]
    before_finish()
    writers[0].finish(metadata, results)


def is_saved(path: Path, step: int) -> bool:
    found = {name: torch.zeros(3) for rank in (0, 1) for name in state_of(rank, step)}
    load(found, path)
    return all(torch.equal(found[name], value) for rank in (0, 1) for name, value in state_of(rank, step).items())


@pytest.mark.parametrize("second", ["step-00000002", "step-00000001"], ids=["another name", "the same name"])
def test_after_a_save_that_failed_kept_plans_lead_to_the_directory_of_the_next(tmp_path: Path, second: str) -> None:
    first = tmp_path / "step-00000001"
    with pytest.raises(NoSpace):
        save_together([FireFlyerWriter(first), Full(first)], 1)
    assert list(tmp_path.glob(".tmp-step-00000001-*")), "what failed is there, and ranks have kept its name"
    for step, path in ((2, tmp_path / second), (3, tmp_path / "step-00000003")):
        save_together([FireFlyerWriter(path), FireFlyerWriter(path)], step)
        assert is_saved(path, step)


def test_where_nobody_can_tell_what_was_left_a_kept_plan_is_no_answer(tmp_path: Path) -> None:
    path, disk = tmp_path / "a", WithoutLocks()
    with pytest.raises(NoSpace):
        save_together([FireFlyerWriter(path, disk=disk), Full(path, disk=disk)], 1)
    with pytest.raises(NotFound, match=r"2 saves of .*/a are in progress"):
        save_together([FireFlyerWriter(path, disk=disk), FireFlyerWriter(path, disk=disk)], 2)
    for kept in ("save_plan", "final_save_plan", "all_plans", "global_plan"):
        getattr(SavePlanner, f"_cached_{kept}").clear()
    save_together([FireFlyerWriter(path, disk=disk), FireFlyerWriter(path, disk=disk)], 3)
    assert is_saved(path, 3)


@pytest.mark.parametrize(
    ("change", "error"),
    [(Path.unlink, NotFound), (lambda shard: shard.write_bytes(shard.read_bytes()[:-1]), DataCorruption)],
    ids=["missing", "shorter"],
)
def test_a_shard_that_is_not_where_the_coordinator_commits_is_missed(
    tmp_path: Path, change: Callable[[Path], object], error: type[FireflyerError]
) -> None:
    def damage() -> None:
        change(next(tmp_path.glob(".tmp-a-*")) / shard_name(1, 2))

    with pytest.raises(error, match="shard-00001-of-00002"):
        save_together([FireFlyerWriter(tmp_path / "a") for _ in range(2)], 1, damage)
    assert not (tmp_path / "a").exists()


def test_a_state_that_no_manifest_can_list_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_FEW", 1)
    monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(UsageError, match=r"manifest of 2 tensors and slices of tensors .* above 100; shard over fewer"):
        save_together([FireFlyerWriter(tmp_path / "a") for _ in range(2)], 1)
    assert list(tmp_path.iterdir()) == []


def prepared(readers: Sequence[FireFlyerReader], between: Callable[[], object]) -> list[LoadPlan]:
    """As `dcp.load` does, up to the plans for all ranks; `between` happens after the first has opened a checkpoint."""
    plans = []
    planners = [DefaultLoadPlanner() for _ in readers]
    for rank, (reader, planner) in enumerate(zip(readers, planners, strict=True)):
        metadata = reader.read_metadata()
        planner.set_up_planner({"w": torch.zeros(2)}, metadata, rank == 0)
        reader.set_up_storage_reader(metadata, rank == 0)
        plans.append(reader.prepare_local_plan(planner.create_local_plan()))
        if rank == 0:
            between()
    return readers[0].prepare_global_plan(planners[0].create_global_plan(plans))


def test_ranks_that_have_found_different_checkpoints_do_not_load_them(tmp_path: Path) -> None:
    def commit(step: int) -> None:
        save({"w": torch.full((2,), float(step))}, tmp_path, step=step)

    def write_again() -> None:
        (tmp_path / "step-00000002").rename(tmp_path / "old")
        save({"w": torch.zeros(2)}, tmp_path, step=2)

    commit(1)
    assert len(prepared([FireFlyerReader(tmp_path) for _ in range(2)], lambda: None)) == 2
    with pytest.raises(StaleVersion, match=r"\(step-00000001, step-00000002\): one was written meanwhile; load again"):
        prepared([FireFlyerReader(tmp_path) for _ in range(2)], lambda: commit(2))
    with pytest.raises(StaleVersion, match="step-00000002"):
        prepared([FireFlyerReader(tmp_path) for _ in range(2)], write_again)
    one = [FireFlyerReader(tmp_path / "step-00000002") for _ in range(2)]
    assert len(prepared(one, lambda: commit(3))) == 2, "who names one loads it"
