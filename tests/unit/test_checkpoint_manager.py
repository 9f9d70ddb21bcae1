"""The checkpoint manager on a real directory: what is saved comes back, and what is broken is passed over."""

from __future__ import annotations

import json
import math
import os
import random
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
import safetensors.torch
import torch
from tests.support.checkpoint_ranks import Ranks

from fireflyer.base.errors import (
    Aborted,
    Busy,
    DataCorruption,
    NoSpace,
    NotFound,
    PermissionDenied,
    Timeout,
    UsageError,
)
from fireflyer.base.events import CheckpointReport
from fireflyer.base.ports import Disk
from fireflyer.base.units import SECOND
from fireflyer.checkpoint import (
    CheckpointManager,
    Restored,
    State,
    capture,
    capture_rng,
    describe,
    load_into,
    load_rng,
    stored_job_plan,
    verify,
)
from fireflyer.checkpoint.background import BackgroundSave
from fireflyer.checkpoint.core.manifest import TensorRecord, decode_manifest
from fireflyer.native import crc32c
from fireflyer.runtime.disk import RealDisk, RealFile
from fireflyer.runtime.store import LocalStore
from fireflyer.sim import Fault, FaultKind, SimDisk


def manager(directory: Path | str, **options: object) -> CheckpointManager:
    arguments: dict[str, object] = {"rank": 0, "world_size": 1, "store": None, "disk": RealDisk(), **options}
    return CheckpointManager(directory, **arguments)  # type: ignore[arg-type]


def state_of(step: int) -> State:
    generator = torch.Generator().manual_seed(step)
    shared = {f"w{index}": torch.rand(3, index + 1, generator=generator) for index in range(5)}
    return State(shared, {"rng": torch.full((4,), step, dtype=torch.uint8)}, {"step": step})


def same(restored: Restored | None, step: int) -> bool:
    assert restored is not None
    expected = state_of(step)
    assert restored.step == restored.values["step"] == step
    assert sorted(restored.shared) == sorted(expected.shared)
    return all(torch.equal(restored.shared[name], tensor) for name, tensor in expected.shared.items())


def save_all(directory: Path | str, steps: list[int], **options: object) -> None:
    with manager(directory, **options) as ours:
        for step in steps:
            ours.save(step, state_of(step), blocking=True).result()


def newest(directory: Path | str, **options: object) -> Restored:
    with manager(directory, **options) as ours:
        restored = ours.restore()
    assert restored is not None
    return restored


def test_an_empty_directory_restores_nothing(tmp_path: Path) -> None:
    with manager(tmp_path / "new" / "checkpoints") as ours:
        assert ours.restore() is None
        assert ours.stored_plan() is None


def test_what_was_saved_is_restored_and_the_older_ones_beyond_keep_are_gone(tmp_path: Path) -> None:
    save_all(tmp_path, [10, 20, 30], keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step-00000020", "step-00000030"]
    restored = newest(tmp_path)
    assert same(restored, 30)
    assert (restored.name, restored.passed_over, restored.world_size) == ("step-00000030", (), 1)
    assert restored.own is not None
    assert restored.own["rng"].tolist() == [30] * 4


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


class Gate(RealDisk):
    """A disk whose `create` waits until it is let through."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open_gate = threading.Event()

    def mkdir(self, path: str) -> None:
        self.reached.set()
        assert self.open_gate.wait(30)
        super().mkdir(path)


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


# Damage.

SHARD = "shard-00000-of-00001.safetensors"


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def damage(directory: Path, kind: str) -> None:
    shard, manifest = directory / SHARD, directory / "manifest.json"
    if kind == "flipped byte in a tensor":
        flip(shard, -3)
    elif kind == "flipped byte in the header":
        flip(shard, 20)
    elif kind == "truncated shard":
        os.truncate(shard, shard.stat().st_size - 1)
    elif kind == "longer shard":
        shard.write_bytes(shard.read_bytes() + b"x")
    elif kind == "missing shard":
        shard.unlink()
    elif kind == "missing manifest":
        manifest.unlink()
    elif kind == "garbage manifest":
        manifest.write_bytes(b"\xff\x00 garbage")
    elif kind == "empty manifest":
        manifest.write_bytes(b"")
    elif kind == "flipped byte in the manifest":
        flip(manifest, 60)
    elif kind == "manifest of another step":
        manifest.write_bytes((directory.parent / "step-00000010" / "manifest.json").read_bytes())
    else:
        directory.rename(directory.with_name("aside"))
        directory.write_bytes(b"a file")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("flipped byte in a tensor", "tensor 'own/0/rng' in .* does not match its checksum"),
        ("flipped byte in the header", "the header of .* does not match"),
        ("truncated shard", "bytes instead of"),
        ("longer shard", "bytes instead of"),
        ("missing shard", "no such file"),
        ("missing manifest", "no such file"),
        ("garbage manifest", "is not readable"),
        ("empty manifest", "is not readable"),
        ("flipped byte in the manifest", "does not match its checksum|is not readable"),
        ("manifest of another step", "is of step 10"),
        ("a file with its name", "not a directory"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_with_the_reason(tmp_path: Path, kind: str, reason: str) -> None:
    save_all(tmp_path, [10, 20])
    damage(tmp_path / "step-00000020", kind)
    restored = newest(tmp_path)
    assert same(restored, 10)
    (passed_over,) = restored.passed_over
    assert passed_over.name == "step-00000020"
    assert "\n" not in passed_over.reason
    with pytest.raises(AssertionError, match=reason):  # pytest's match, for a readable failure
        raise AssertionError(passed_over.reason)
    problems = {info.name: info.problem for info in verify(str(tmp_path))}
    assert problems == {"step-00000020": passed_over.reason, "step-00000010": None}


def test_after_a_damaged_one_the_same_step_can_be_saved_again_and_replaces_it(tmp_path: Path) -> None:
    save_all(tmp_path, [10, 20])
    damage(tmp_path / "step-00000020", "flipped byte in a tensor")
    with manager(tmp_path, attempt=1) as ours:
        assert same(ours.restore(), 10)
        assert ours.save(20, state_of(20), blocking=True).result() == "step-00000020.2"
    assert sorted(os.listdir(tmp_path)) == ["step-00000010", "step-00000020.2"]
    assert same(newest(tmp_path), 20)


def test_a_damaged_newer_one_does_not_count_among_the_kept(tmp_path: Path) -> None:
    save_all(tmp_path, [10, 20, 30])
    damage(tmp_path / "step-00000030", "missing manifest")
    with manager(tmp_path, keep=2, attempt=1) as ours:
        assert same(ours.restore(), 20)
        ours.save(25, state_of(25), blocking=True).result()
    assert sorted(os.listdir(tmp_path)) == ["step-00000020", "step-00000025", "step-00000030"]


def test_a_checkpoint_that_was_moved_and_linked_to_is_not_emptied(tmp_path: Path) -> None:
    save_all(tmp_path / "c", [10, 20])
    (tmp_path / "c" / "step-00000010").rename(tmp_path / "archive")
    (tmp_path / "c" / "step-00000010").symlink_to(tmp_path / "archive")
    save_all(tmp_path / "c", [30], keep=2)
    assert sorted(os.listdir(tmp_path / "c")) == ["step-00000020", "step-00000030"], "the link is gone, nothing else"
    assert sorted(os.listdir(tmp_path / "archive")) == ["manifest.json", "shard-00000-of-00001.safetensors"]


@pytest.mark.parametrize("shape", [(1 << 45,), (0, 1 << 62, 1 << 62)])
def test_a_manifest_that_claims_absurd_sizes_is_passed_over(tmp_path: Path, shape: tuple[int, ...]) -> None:
    save_all(tmp_path, [10, 20])
    path = tmp_path / "step-00000020" / "manifest.json"
    manifest = decode_manifest(path.read_bytes())
    shard = manifest.shards[0]
    claimed = TensorRecord("huge", "U8", shape, shard.file_bytes, math.prod(shape), 0)
    shard = msgspec.structs.replace(
        shard, tensors=(*shard.tensors, claimed), file_bytes=shard.file_bytes + claimed.size_bytes
    )
    body = msgspec.json.encode(msgspec.structs.replace(manifest, shards=(shard,)))
    path.write_bytes(b'{"crc32c":"%08x","body":%b}' % (crc32c(body), body))
    restored = newest(tmp_path)
    assert same(restored, 10)
    assert [entry.name for entry in restored.passed_over] == ["step-00000020"]


def test_a_state_too_large_to_be_read_again_does_not_replace_what_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_all(tmp_path, [10], keep=1)
    monkeypatch.setattr("fireflyer.checkpoint.core.manifest.MAX_MANIFEST_BYTES", 5000)
    with manager(tmp_path, keep=1) as ours:
        error = ours.save(20, State({}, {}, {"order": list(range(5000))}), blocking=True).error()
    assert isinstance(error, UsageError)
    assert "above 5000; keep long lists of values as tensors" in str(error)
    assert os.listdir(tmp_path) == ["step-00000010"]


def test_when_all_are_damaged_the_job_does_not_start_over_in_silence(tmp_path: Path) -> None:
    save_all(tmp_path, [10])
    damage(tmp_path / "step-00000010", "truncated shard")
    with manager(tmp_path) as ours, pytest.raises(DataCorruption, match="move them away to start over"):
        ours.restore()


def test_a_checkpoint_that_may_not_be_read_is_passed_over() -> None:
    device = SimDisk()
    disk = device.mount()
    save_all("/c", [10, 20], disk=disk)
    device.faults = [Fault(kind=FaultKind.DENIED, operation="open", path_contains="step-00000020/shard")]
    restored = newest("/c", disk=disk)
    assert same(restored, 10)
    assert "permission denied" in restored.passed_over[0].reason


class OutOfDescriptors(RealDisk):
    def open(self, path: str) -> RealFile:
        if "step-00000020/shard" in path:
            raise Busy(f"open {path}: too many open files")
        return super().open(path)


def test_an_error_that_may_pass_does_not_throw_a_good_checkpoint_away(tmp_path: Path) -> None:
    save_all(tmp_path, [10, 20])
    with manager(tmp_path, disk=OutOfDescriptors()) as ours, pytest.raises(Busy, match="too many open files"):
        ours.restore()
    assert newest(tmp_path).step == 20


def test_a_directory_that_may_not_be_written_is_one_clear_error() -> None:
    device = SimDisk()
    device.faults = [Fault(kind=FaultKind.DENIED, operation="mkdir")]
    with pytest.raises(PermissionDenied, match="permission denied"):
        manager("/c", disk=device.mount())


def test_a_job_that_is_to_save_hears_at_the_start_that_it_may_not() -> None:
    device = SimDisk()
    device.mount().mkdir("/c")
    device.faults = [Fault(kind=FaultKind.DENIED, path_contains=".tmp-trial")]
    with pytest.raises(PermissionDenied, match=r"/c/\.tmp-trial: permission denied"):
        manager("/c", disk=device.mount(), period_steps=10)
    manager("/c", disk=device.mount()).close()  # nothing is to be saved: it may be read-only


def test_a_job_that_starts_on_a_full_disk_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    device = SimDisk()
    device.mount().mkdir("/c")
    device.faults = [Fault(kind=FaultKind.NO_SPACE, path_contains=".tmp-trial")]
    manager("/c", disk=device.mount(), period_steps=10).close()
    assert "no space left" in caplog.text


def test_a_full_disk_is_told_at_once_and_loses_nothing() -> None:
    device = SimDisk()
    disk = device.mount()
    reports: list[CheckpointReport] = []
    with manager("/c", disk=disk, on_event=reports.append) as ours:
        ours.save(10, state_of(10), blocking=True).result()
        device.capacity_bytes = device.used_bytes() + 500
        handle = ours.save(20, state_of(20))
        with pytest.raises(NoSpace, match="no space left"):
            handle.result()
        assert isinstance(handle.error(), NoSpace)
        ours.wait()
        assert disk.list("/c") == ["step-00000010"], "the failed attempt is cleared away"
        device.capacity_bytes = None
        ours.save(30, state_of(30), blocking=True).result()
    assert [(report.step, report.error is None) for report in reports] == [(10, True), (20, False), (30, True)]
    assert reports[0].bytes > 0
    assert same(newest("/c", disk=disk), 30)


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
        assert os.listdir(tmp_path) == []
    with pytest.raises(UsageError, match="closed"):
        ours.save(1, State({"w": tensor}))
    for options in ({"keep": 0}, {"world_size": 2}, {"rank": 1}, {"rank": -1}):
        with pytest.raises(UsageError):
            manager(tmp_path, **options)
    with pytest.raises(UsageError, match="absolute"):
        manager("relative")


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
    with pytest.raises(DataCorruption, match="remove it to start with another plan"):
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


# Several ranks.


def own_of(rank: int, step: int) -> dict[str, torch.Tensor]:
    return {"rng": torch.full((4,), 10 * step + rank, dtype=torch.int64)}


def rank_state(rank: int, step: int) -> State:
    return State(state_of(step).shared, own_of(rank, step), {"step": step})


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
    assert disk.list("/c") == ["step-00000010", "step-00000030"]


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


class Gated(RealDisk):
    """Stops before it creates the manifest of step 20."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def create(self, path: str) -> RealFile:
        if path.endswith("manifest.json") and "00000020" in path:
            self.reached.set()
            assert self.go_on.wait(30)
        return super().create(path)


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
    assert isinstance(late.error(), NotFound)
    new_disk.go_on.set()
    assert ours.result() == "step-00000020"
    old.close()
    new.close()
    assert [(info.name, info.problem) for info in verify(str(tmp_path))] == [("step-00000020", None)]


def test_ranks_with_different_shared_tensors_do_not_make_a_checkpoint(tmp_path: Path, disk: Disk) -> None:
    ranks = Ranks(str(tmp_path), 2, disk)

    def save(ours: CheckpointManager) -> object:
        shared = {"w": torch.zeros(4), "x": torch.zeros(4 + ours.rank)}
        return ours.save(10, State(shared)).error()

    errors = ranks.together(save)
    assert all(isinstance(error, UsageError) for error in errors)
    assert "rank 1 has other shared tensors" in str(errors[0])
    ranks.close()
    assert os.listdir(tmp_path) == []


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

    def create(self, path: str) -> RealFile:
        if "00000010" in path and "shard-00000" in path:
            assert self.stuck.wait(30)
            raise NoSpace(f"create {path}: no space left")
        file = super().create(path)
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
            threading.Thread(target=go_on_when_given_up, args=(ours._current,)).start()
        return ours.save(20, rank_state(ours.rank, 20)).result()

    assert ranks.together(save) == ["step-00000020"] * 2
    assert isinstance(first[1].error(), Aborted)
    ranks.close()
    assert os.listdir(tmp_path) == ["step-00000020"]
    assert [info.problem for info in verify(str(tmp_path))] == [None]


def test_a_record_too_long_for_the_store_fails_the_save_at_once(tmp_path: Path, disk: Disk) -> None:
    def save(ours: CheckpointManager) -> str:
        shared = {f"{'x' * 900}/{index}": torch.zeros(1) for index in range(9000)}
        return str(ours.save(10, State(shared), blocking=True).error())

    ranks = Ranks(str(tmp_path), 2, disk)
    for error in ranks.together(save):
        assert "at most 4194304 are allowed" in error
    ranks.close()
    assert os.listdir(tmp_path) == []


def test_what_rank_0_said_before_a_save_was_given_up_is_heard(tmp_path: Path, disk: Disk) -> None:
    store = LocalStore()
    kept: list[CheckpointReport] = []

    class Late:
        """Rank 1's store: the outcome comes at the very end of a wait, and the next save begins right then."""

        def get(self, key: str, timeout_ns: int) -> bytes:
            value = store.get(key, 30 * SECOND)
            if key.endswith("/1/outcome") and not self.told:
                self.told = True
                follower._current._given_up.set()  # type: ignore[union-attr]
                raise Timeout("nothing yet")
            return value

        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

        told = False

    def make(rank: int, store: object) -> CheckpointManager:
        return manager(tmp_path, rank=rank, world_size=2, store=store, on_event=kept.append)

    leader, follower = make(0, store), make(1, Late())
    handles = [one.save(10, rank_state(one.rank, 10)) for one in (leader, follower)]
    assert [handle.result(60 * SECOND) for handle in handles] == ["step-00000010"] * 2
    assert [report.error for report in kept] == [None, None]
    leader.close()
    follower.close()


def test_a_rank_that_never_answers_ends_the_save_by_its_timeout(tmp_path: Path, disk: Disk) -> None:
    ranks = Ranks(str(tmp_path), 2, disk, timeout_ns=SECOND // 5)
    handle = ranks.managers[0].save(10, rank_state(0, 10))
    error = handle.error()
    assert error is not None
    assert "another rank is gone" in str(error)
    ranks.managers[0].close()
    assert os.listdir(tmp_path) == []
    ranks.close()
