"""The checkpoint manager of one rank on a real directory: what is saved comes back."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from tests.support.checkpoints.states import (
    SHARD,
    Gate,
    damage,
    flip,
    listed,
    manager,
    newest,
    same,
    save_all,
    state_of,
)

from fireflyer.base.errors import (
    DataCorruption,
    UsageError,
)
from fireflyer.base.units import SECOND
from fireflyer.checkpoint import (
    State,
    capture,
    capture_rng,
    describe,
    load_into,
    load_rng,
    stored_job_plan,
    verify,
)
from fireflyer.sim import SimDisk


def test_an_empty_directory_restores_nothing(tmp_path: Path) -> None:
    with manager(tmp_path / "new" / "checkpoints") as ours:
        assert ours.restore() is None
        assert ours.stored_plan() is None


def test_what_was_saved_is_restored_and_the_older_ones_beyond_keep_are_gone(tmp_path: Path) -> None:
    save_all(tmp_path, [10, 20, 30], keep=2)
    assert listed(os.listdir(tmp_path)) == ["step-00000020", "step-00000030"]
    restored = newest(tmp_path)
    assert same(restored, 30)
    assert (restored.name, restored.passed_over, restored.world_size) == ("step-00000030", (), 1)
    assert restored.own is not None
    assert restored.own["rng"].tolist() == [30] * 4


def test_a_save_takes_a_name_that_nobody_has(tmp_path: Path) -> None:
    """Also where an earlier attempt has saved that step, and where somebody copies one there meanwhile."""
    save_all(tmp_path, [10])
    os.rename(tmp_path / "step-00000010", tmp_path / "step-00000010.2")
    with manager(tmp_path, keep=9) as ours:
        assert ours.save(10, state_of(10), blocking=True).result() == "step-00000010.3"
        assert ours.save(20, state_of(20), blocking=True).result() == "step-00000020"
        assert ours.save(20, state_of(20), blocking=True).result() == "step-00000020.2"
        shutil.copytree(tmp_path / "step-00000020", tmp_path / "step-00000030")
        assert ours.save(30, state_of(30), blocking=True).result() == "step-00000030.2"


def test_a_training_job_comes_back_bit_for_bit(tmp_path: Path) -> None:
    def make() -> tuple[torch.nn.Module, torch.optim.AdamW]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5), torch.nn.Dropout(0.3))
        model.append(torch.nn.Linear(5, 1).to(torch.float32))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.95))

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for _ in range(5):
            batch = torch.rand(6, 7) + random.random() + float(np.random.rand())
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    model, optimizer = make()
    random.gauss(0, 1)  # leaves half of a pair behind, as numpy's does
    np.random.standard_normal()
    train(model, optimizer)
    with manager(tmp_path) as ours:
        ours.save(5, capture(model, optimizer, values={"position": [1, 2]}), blocking=True).result()
    expected = train(model, optimizer)
    following = (random.gauss(0, 1), float(np.random.standard_normal()), torch.rand(1).item())

    model, optimizer = make()
    random.seed(99)
    restored = newest(tmp_path)
    values = load_into(restored.shared, restored.values, model, optimizer)
    assert restored.own is not None
    load_rng(restored.own)
    assert values == {"position": [1, 2]}
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.95)
    assert train(model, optimizer) == expected
    assert (random.gauss(0, 1), float(np.random.standard_normal()), torch.rand(1).item()) == following


def test_optimizer_state_is_not_rounded_to_the_parameters_type(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    moment = torch.rand(2, 3)
    optimizer.state[model.weight] = {"momentum_buffer": moment, "count": 3}
    with manager(tmp_path) as ours:
        ours.save(1, capture(model, optimizer), blocking=True).result()
    optimizer.state.clear()
    restored = newest(tmp_path)
    load_into(restored.shared, restored.values, model, optimizer)
    assert torch.equal(optimizer.state[model.weight]["momentum_buffer"], moment)
    assert optimizer.state[model.weight]["count"] == 3


def test_an_optimizer_that_was_not_built_like_the_saved_one_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    first, second = (list(layer.parameters()) for layer in model)

    def groups(*order: list[torch.nn.Parameter]) -> list[dict[str, object]]:
        return [{"params": order[0], "weight_decay": 0.1}, {"params": order[1], "weight_decay": 0.0}]

    state = capture(model, torch.optim.AdamW(groups(first, second)), rng=False)
    load_into(state.shared, state.values, model, torch.optim.AdamW(groups(first, second), fused=True))
    swapped = torch.optim.AdamW(groups(second, first))
    with pytest.raises(UsageError, match=r"group 0 of the optimizer has '1.weight' where the saved one had '0.weight'"):
        load_into(state.shared, state.values, model, swapped)
    assert swapped.param_groups[0]["weight_decay"] == 0.1
    with pytest.raises(UsageError, match="the state of AdamW, not of SGD"):
        load_into(state.shared, state.values, model, torch.optim.SGD(groups(first, second)))


def test_a_model_that_was_not_the_saved_one_is_refused(tmp_path: Path) -> None:
    with manager(tmp_path) as ours:
        ours.save(1, capture(torch.nn.Linear(3, 2), rng=False), blocking=True).result()
    restored = newest(tmp_path)
    for other, what in (
        (torch.nn.Linear(3, 3), "in the checkpoint and"),
        (torch.nn.Linear(3, 2, bias=False), "the model has no tensor 'bias'"),
        (torch.nn.Linear(3, 2).double(), "float64"),
    ):
        with pytest.raises(UsageError, match=what):
            load_into(restored.shared, restored.values, other)
    with pytest.raises(UsageError, match="no optimizer"):
        load_into(
            restored.shared, restored.values, torch.nn.Linear(3, 2), torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
        )


def test_random_generators_of_something_else_are_refused() -> None:
    own = capture_rng()
    own["rng/python"] = own["rng/python"][:5]
    with pytest.raises(UsageError, match="random generators"):
        load_rng(own)


def test_training_may_change_the_tensors_as_soon_as_save_returns(tmp_path: Path) -> None:
    state = state_of(3)
    with manager(tmp_path) as ours:
        handle = ours.save(3, state)
        for tensor in state.shared.values():
            tensor.zero_()
        handle.result()
    assert same(newest(tmp_path), 3)


def test_a_save_that_is_due_while_another_is_in_flight_is_skipped_and_counted(tmp_path: Path) -> None:
    disk = Gate()
    with manager(tmp_path, disk=disk, period_steps=10) as ours:
        first = ours.save(10, state_of(10))
        assert disk.reached.wait(30)
        assert ours.due(20, 0)
        second = ours.save(20, state_of(20))
        assert second.skipped
        assert second.result() is None
        assert not ours.due(20, 0), "not asked for again at the same step"
        assert ours.skipped == 1
        disk.open_gate.set()
        assert first.result() == "step-00000010"
        assert ours.save(30, state_of(30), blocking=True).result() == "step-00000030"


def test_a_save_right_after_a_blocking_one_is_not_skipped(tmp_path: Path) -> None:
    with manager(tmp_path, keep=1) as ours:
        for step in (10, 20, 30):
            ours.save(step, state_of(step), blocking=True)
            assert ours.save(step + 5, state_of(step + 5)).result() == f"step-{step + 5:08d}"
            ours.wait()


def test_periods_in_steps_and_in_time() -> None:
    disk = SimDisk().mount()
    now_ns = manager("/a", disk=disk)._clock.now_ns()
    by_steps = manager("/a", disk=disk, period_steps=5)
    assert [step for step in range(1, 16) if by_steps.due(step, now_ns)] == [5, 10, 15]
    by_time = manager("/a", disk=disk, period_ns=3600 * SECOND)
    assert not by_time.due(1, now_ns)
    assert by_time.due(1, now_ns + 3601 * SECOND)
    by_time.save(1, state_of(1), blocking=True).result()
    assert not by_time.due(2, now_ns + 3 * SECOND)
    never = manager("/a", disk=disk)
    assert not never.due(1, now_ns + 10**15)
    for options in ({"period_steps": 0}, {"period_ns": -1}):
        with pytest.raises(UsageError, match="not a period"):
            manager("/a", disk=disk, **options)


def test_a_restored_step_is_not_due_again(tmp_path: Path) -> None:
    save_all(tmp_path, [10])
    with manager(tmp_path, period_steps=10) as ours:
        ours.restore()
        assert not ours.due(10, 0)
        assert ours.due(20, 0)


def test_the_safetensors_library_reads_our_shards(tmp_path: Path) -> None:
    save_all(tmp_path, [7])
    loaded = safetensors.torch.load_file(tmp_path / "step-00000007" / "shard-00000-of-00001.safetensors")
    for name, tensor in state_of(7).shared.items():
        assert torch.equal(loaded[name], tensor)
    assert loaded["own/0/rng"].tolist() == [7] * 4


def test_what_cannot_be_stored_is_refused_before_anything_happens(tmp_path: Path) -> None:
    tensor = torch.zeros(2)
    with manager(tmp_path) as ours:
        for state, what in (
            (State({"w": torch.zeros(2, dtype=torch.complex128)}), "complex128"),
            (State({"w": tensor.to_sparse()}), "sparse"),
            (State({"own/3/w": tensor}), "choose another"),
            (State({"": tensor}), "not allowed"),
            (State({"w": tensor}, {}, {"when": float("nan")}), "state.values"),
            (State({"w": tensor}, {}, {"who": {"a": object()}}), r"state.values\['who'\]\['a'\] is object"),
            (State({"w": tensor}, {}, {"big": 1 << 70}), "integers"),
        ):
            with pytest.raises(UsageError, match=what):
                ours.save(1, state)
        wrong: object = {"model": tensor}
        with pytest.raises(UsageError, match="the state is a dict; give a State"):
            ours.save(1, wrong)  # type: ignore[arg-type]
        assert listed(os.listdir(tmp_path)) == []
    with pytest.raises(UsageError, match="closed"):
        ours.save(1, State({"w": tensor}))
    for options in ({"keep": 0}, {"world_size": 2}, {"rank": 1}, {"rank": -1}):
        with pytest.raises(UsageError):
            manager(tmp_path, **options)
    with pytest.raises(UsageError, match="must be a directory below"):
        manager("/")


# The job's plan.


def test_the_plan_of_the_first_start_is_kept_and_another_is_refused(tmp_path: Path) -> None:
    plan = {"algorithm": "tree", "parents": (1, -1), "chunk_bytes": 4096}
    stored = {"algorithm": "tree", "parents": [1, -1], "chunk_bytes": 4096}
    save_all(tmp_path, [10], job_plan=plan)
    assert stored_job_plan(str(tmp_path)) == stored
    restored = newest(tmp_path, job_plan=plan)
    assert restored.job_plan == stored
    assert newest(tmp_path).step == 10, "a start that gives no plan is not held to one"
    with pytest.raises(UsageError, match="chunk_bytes was '4096', now it is '8192'"):
        manager(tmp_path, job_plan={**plan, "chunk_bytes": 8192})


def test_a_damaged_plan_is_found_again_in_the_manifests(tmp_path: Path) -> None:
    save_all(tmp_path, [10, 20], job_plan={"algorithm": "tree"})
    flip(tmp_path / "job.json", 40)
    assert stored_job_plan(str(tmp_path)) == {"algorithm": "tree"}
    save_all(tmp_path, [30], keep=1)
    assert newest(tmp_path).job_plan == {"algorithm": "tree"}, "also when the resuming start names none"
    damage(tmp_path / "step-00000030", "missing manifest")
    with pytest.raises(DataCorruption, match="remove it to start with another job_plan"):
        stored_job_plan(str(tmp_path))
    (tmp_path / "job.json").unlink()
    assert stored_job_plan(str(tmp_path)) is None


def test_describe_is_quick_and_verify_reads_everything(tmp_path: Path) -> None:
    save_all(tmp_path, [10, 20])
    damage(tmp_path / "step-00000010", "flipped byte in a tensor")
    described = describe(str(tmp_path))
    assert [(info.name, info.step, info.world_size, info.problem) for info in described] == [
        ("step-00000020", 20, 1, None),
        ("step-00000010", 10, 1, None),
    ]
    assert described[0].size_bytes == (tmp_path / "step-00000020" / SHARD).stat().st_size
    assert [info.problem is None for info in verify(str(tmp_path))] == [True, False]


def test_the_manifest_is_plain_json_that_records_every_tensor(tmp_path: Path) -> None:
    save_all(tmp_path, [10])
    body = json.loads((tmp_path / "step-00000010" / "manifest.json").read_text())["body"]
    (shard,) = body["shards"]
    data = (tmp_path / "step-00000010" / SHARD).read_bytes()
    record = {tensor["name"]: tensor for tensor in shard["tensors"]}["w2"]
    raw = data[record["offset"] : record["offset"] + record["size_bytes"]]
    assert torch.equal(torch.frombuffer(bytearray(raw), dtype=torch.float32).view(3, 3), state_of(10).shared["w2"])
