"""What the guard looks at, and what it answers on one rank and to wrong use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fireflyer.base.errors import DataCorruption, UsageError
from fireflyer.base.events import CorruptionReport, decode_log
from fireflyer.base.launch import RankEnvironment
from fireflyer.runtime.reporter import Reporter
from fireflyer.training.guard import CorruptionFound, Guard, GuardVerdict, compare
from fireflyer.training.guard.guard import check_same_look
from fireflyer.training.guard.state import Item, describe, items_of, replica_group


def trained() -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def fake_world() -> Iterator[None]:
    """Four ranks, of which this process is the first; nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def test_parameters_gradients_and_all_that_the_optimizer_keeps_are_looked_at() -> None:
    model, optimizer = trained()
    names = [name for name, _ in items_of(model, optimizer, gradients=True)]
    assert names == [
        f"{kind} {name}{key}"
        for name in ("weight", "bias")
        for kind, key in (
            ("parameter", ""),
            ("gradient", ""),
            ("optimizer", " exp_avg"),
            ("optimizer", " exp_avg_sq"),
            ("optimizer", " step"),
        )
    ]
    assert not any("gradient" in name for name, _ in items_of(model, optimizer, gradients=False))


def test_numbers_that_are_no_tensors_are_looked_at_too() -> None:
    model, optimizer = trained()
    optimizer.state[model.weight] = {"steps": 3, "scale": 0.5, "name": "unused"}
    items = dict(items_of(model, optimizer, gradients=False))
    assert items["optimizer weight steps"] == 3
    assert "optimizer weight scale" in items
    assert "optimizer weight name" not in items


def test_a_layout_differs_by_names_shapes_and_dtypes_and_not_by_gradients() -> None:
    weight = torch.zeros(2, 3)
    items: list[Item] = [("parameter a", weight), ("gradient a", weight)]
    assert describe(items) == describe([("parameter a", weight + 1), ("gradient a", None)])
    for other in (weight.T, weight.bfloat16()):
        assert describe(items) != describe([("parameter a", other), ("gradient a", weight)])
    assert describe(items) != describe([("parameter b", weight), ("gradient a", weight)])


def test_a_rank_without_replicas_is_told_so() -> None:
    guard = Guard(*trained(), every=2)
    assert guard.before_commit(1) is None
    verdict = guard.before_commit(2)
    assert verdict is not None
    assert (verdict.finding, verdict.corrupt) == ("no_replicas", False)
    assert "cannot be found" in str(verdict)


def test_a_checkpoint_is_looked_at_whatever_the_period_is() -> None:
    guard = Guard(*trained(), every=100)
    assert guard.after_commit(7) is None
    assert str(guard.before_save(7)).startswith("step 7, before save: no other rank holds this state")
    with pytest.raises(UsageError, match="step 5 is before step 7"):
        guard.before_save(5)


def test_after_a_rewind_the_guard_starts_anew() -> None:
    guard = Guard(*trained(), every=1)
    guard.after_commit(7)
    with pytest.raises(UsageError, match=r"step 5 is before step 7; call start_anew\(\)"):
        guard.before_commit(5)
    guard.start_anew()
    verdict = guard.before_commit(5)
    assert verdict is not None
    assert verdict.agreed_step is None


def test_replicas_of_sharded_parameters_are_a_dimension_of_their_mesh(fake_world: None) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    both, sharded_only = nn.Linear(4, 4), nn.Linear(4, 4)
    fully_shard(both, mesh=mesh)
    fully_shard(sharded_only, mesh=mesh["shard"])
    group = replica_group(both, None)
    assert group is not None
    assert dist.get_process_group_ranks(group) == [0, 2]
    assert replica_group(sharded_only, None) is None
    assert replica_group(nn.Linear(4, 4), None) is dist.group.WORLD
    with pytest.raises(UsageError, match="different groups of replicas"):
        replica_group(nn.Sequential(nn.Linear(2, 2), sharded_only), None)


def test_replicas_at_different_steps_are_refused() -> None:
    check_same_look({0: [4, 0, 99, 1], 1: [4, 0, 99, 2]})
    with pytest.raises(UsageError, match=r"rank 2: step 5, before_commit"):
        check_same_look({0: [4, 0, 99, 1], 2: [5, 0, 99, 1]})
    with pytest.raises(UsageError, match="differently named tensors"):
        check_same_look({0: [4, 0, 99, 1], 2: [4, 0, 98, 1]})


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match="every 0"):
        Guard(*trained(), every=0)
    with pytest.raises(UsageError, match="on_corruption 'stop'"):
        Guard(*trained(), on_corruption="stop")  # type: ignore[arg-type]


def test_the_error_carries_the_verdict_and_says_what_to_do() -> None:
    verdict = compare(9, "after_commit", ["parameter a"], {0: [1], 4: [1], 8: [2]}, agreed_step=8)
    error = CorruptionFound(verdict)
    assert isinstance(error, DataCorruption)
    assert error.verdict is verdict
    assert str(error).startswith(
        "step 9, after commit: ranks [8] differ from the majority of [0, 4, 8]: parameter a; they agreed at step 8; "
    )
    assert isinstance(verdict, GuardVerdict)


class Replicas:
    """Three ranks, of which the last one has another digest."""

    def size(self) -> int:
        return 3


@pytest.mark.parametrize("on_corruption", ["raise", "return"])
def test_what_the_guard_finds_is_told_to_the_launcher(
    on_corruption: Literal["raise", "return"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fireflyer.training.guard.guard.replica_group", lambda *_: Replicas())
    digests = {0: (1,), 1: (1,), 2: (1,)}
    monkeypatch.setattr(Guard, "_compare", lambda _, step, point, *__: compare(step, point, ["w"], digests))
    env = RankEnvironment(rank=0, attempt=4, run_dir=str(tmp_path))
    reporter = Reporter.from_environment(env)
    guard = Guard(*trained(), every=1, on_corruption=on_corruption, reporter=reporter)
    guard.after_commit(1)
    digests[2] = (9,)
    with pytest.raises(CorruptionFound) if on_corruption == "raise" else contextlib.nullcontext():
        guard.after_commit(2)
    reporter.close()
    log = [
        entry.event
        for path in tmp_path.rglob("*.jsonl")
        for entry in decode_log(path.read_bytes().splitlines(keepends=True))
    ]
    (told,) = (event for event in log if isinstance(event, CorruptionReport))
    assert (told.rank, told.step, told.suspects, told.decided) == (0, 2, (2,), True)
    assert "ranks [2] differ from the majority" in told.reason
