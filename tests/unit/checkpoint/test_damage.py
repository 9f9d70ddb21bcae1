"""The checkpoint manager where files are damaged, disks full and directories closed: what is broken is passed over."""

from __future__ import annotations

import math
import os
from pathlib import Path

import msgspec
import pytest
from tests.support.checkpoints.states import damage, listed, manager, newest, same, save_all, state_of

from fireflyer.base.errors import (
    Busy,
    DataCorruption,
    NoSpace,
    PermissionDenied,
    UsageError,
)
from fireflyer.base.events import CheckpointReport
from fireflyer.checkpoint import (
    State,
    verify,
)
from fireflyer.checkpoint.core.manifest import Manifest, TensorRecord, decode_manifest
from fireflyer.checkpoint.core.names import shard_name
from fireflyer.checkpoint.core.safetensors import TensorSpec, place
from fireflyer.checkpoint.engine.image import header_of
from fireflyer.checkpoint.engine.stream import write_stream
from fireflyer.checkpoint.fresh import commit_manifest
from fireflyer.native import crc32c
from fireflyer.runtime.disk import RealDisk, RealFile
from fireflyer.sim import Fault, FaultKind, SimDisk


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
    assert listed(os.listdir(tmp_path)) == ["step-00000010", "step-00000020.2"]
    assert same(newest(tmp_path), 20)


def test_a_damaged_newer_one_does_not_count_among_the_kept(tmp_path: Path) -> None:
    save_all(tmp_path, [10, 20, 30])
    damage(tmp_path / "step-00000030", "missing manifest")
    with manager(tmp_path, keep=2, attempt=1) as ours:
        assert same(ours.restore(), 20)
        ours.save(25, state_of(25), blocking=True).result()
    assert listed(os.listdir(tmp_path)) == ["step-00000020", "step-00000025", "step-00000030"]


def test_a_checkpoint_that_was_moved_and_linked_to_is_not_emptied(tmp_path: Path) -> None:
    save_all(tmp_path / "c", [10, 20])
    (tmp_path / "c" / "step-00000010").rename(tmp_path / "archive")
    (tmp_path / "c" / "step-00000010").symlink_to(tmp_path / "archive")
    save_all(tmp_path / "c", [30], keep=2)
    assert listed(os.listdir(tmp_path / "c")) == ["step-00000020", "step-00000030"], "the link is gone, nothing else"
    assert sorted(os.listdir(tmp_path / "archive")) == ["manifest.json", "shard-00000-of-00001.safetensors"]


def rewrite(path: Path, manifest: Manifest) -> None:
    """As somebody who proves what he claims."""
    body = msgspec.json.encode(manifest)
    path.write_bytes(b'{"crc32c":"%08x","body":%b}' % (crc32c(body), body))


@pytest.mark.parametrize("number", [-1, 1 << 32, -(1 << 63), (1 << 64) - 1])
def test_a_manifest_with_a_checksum_that_is_none_is_passed_over(tmp_path: Path, number: int) -> None:
    save_all(tmp_path, [10, 20])
    path = tmp_path / "step-00000020" / "manifest.json"
    manifest = decode_manifest(path.read_bytes())
    (shard,) = manifest.shards
    first = msgspec.structs.replace(shard.tensors[0], crc32c=number)
    shard = msgspec.structs.replace(shard, tensors=(first, *shard.tensors[1:]))
    rewrite(path, msgspec.structs.replace(manifest, shards=(shard,)))
    restored = newest(tmp_path)
    assert same(restored, 10)
    assert ["checksum that is out of range" in entry.reason for entry in restored.passed_over] == [True]


@pytest.mark.parametrize("other", ["own/00/x", "own/+0/x", "own/٠/x", "own/0 /x"])
def test_two_own_tensors_that_seem_to_have_one_name_are_read_into_memory_of_their_own(
    tmp_path: Path, other: str
) -> None:
    disk, values = RealDisk(), {"own/0/x": 1, other: 2}
    disk.mkdir(f"{tmp_path}/t")
    placed = place(TensorSpec(name, "U8", (5,)) for name in values)
    record = write_stream(
        disk,
        f"{tmp_path}/t/{shard_name(0, 1)}",
        header_of(placed, step=1, rank=0),
        placed,
        lambda spec: [memoryview(bytes([values[spec.name]] * 5))],
    )
    commit_manifest(disk, str(tmp_path), "step-00000001", "t", Manifest(1, 1, 0, 1, (record,), {}))
    restored = newest(tmp_path)
    assert restored.own is not None
    assert {name: tensor.tolist() for name, tensor in restored.own.items()} == {"x": [1] * 5}
    assert {name: tensor.tolist() for name, tensor in restored.shared.items()} == {other: [2] * 5}


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
    rewrite(path, msgspec.structs.replace(manifest, shards=(shard,)))
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
    assert listed(os.listdir(tmp_path)) == ["step-00000010"]


def test_text_that_no_manifest_can_hold_is_refused_at_the_save_by_name(tmp_path: Path) -> None:
    with manager(tmp_path) as ours:
        for values, named in (
            ({"file": "model\udcff"}, r"state.values\['file'\] is"),
            ({"a\udcff": 1}, "a key of state.v"),
        ):
            with pytest.raises(UsageError, match=f"{named}.*no valid Unicode"):
                ours.save(10, State({}, {}, values))
        ours.save(20, state_of(20), blocking=True).result()
    assert listed(os.listdir(tmp_path)) == ["step-00000020"]


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
    def open(self, path: str, *, direct: bool = False) -> RealFile:
        if "step-00000020/shard" in path:
            raise Busy(f"open {path}: too many open files")
        return super().open(path, direct=direct)


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
    device.faults = [Fault(kind=FaultKind.DENIED, path_contains="/c/.writer-")]
    with pytest.raises(PermissionDenied, match=r"/c/\.writer-.*: permission denied"):
        manager("/c", disk=device.mount(), period_steps=10)
    manager("/c", disk=device.mount()).close()  # nothing is to be saved: it may be read-only


def test_a_job_that_starts_on_a_full_disk_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    device = SimDisk()
    device.mount().mkdir("/c")
    device.faults = [Fault(kind=FaultKind.NO_SPACE, path_contains="/trial")]
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
        assert listed(disk.list("/c")) == ["step-00000010"], "the failed attempt is cleared away"
        device.capacity_bytes = None
        ours.save(30, state_of(30), blocking=True).result()
    assert [(report.step, report.error is None) for report in reports] == [(10, True), (20, False), (30, True)]
    assert reports[0].bytes > 0
    assert same(newest("/c", disk=disk), 30)
