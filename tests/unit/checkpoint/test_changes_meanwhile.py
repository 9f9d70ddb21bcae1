"""What people and jobs do with checkpoints that others pin, remove or write at the same time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.support.checkpoints.states import listed, manager, newest, save_all, state_of

from fireflyer.base.errors import NotFound, PermissionDenied, UsageError
from fireflyer.checkpoint import describe, storage
from fireflyer.checkpoint.fresh import filling
from fireflyer.checkpoint.reader import open_checkpoint, verify
from fireflyer.checkpoint.upkeep import pin, remove
from fireflyer.cli.main import main
from fireflyer.runtime.disk import RealDisk, RealFile

STEP_1, STEP_2 = "step-00000001", "step-00000002"


class Meanwhile(RealDisk):
    """Something happens once, before the first rename of `name`, or before its manifest is read."""

    def __init__(self, name: str, happens: Callable[[], object], *, at: str) -> None:
        self._name, self._happens, self._at = name, happens, at

    def _now(self, path: str, at: str) -> None:
        if at == self._at and f"/{self._name}" in path:
            self._at = ""
            self._happens()

    def rename(self, source: str, target: str) -> None:
        self._now(source, "rename")
        super().rename(source, target)

    def open(self, path: str, *, direct: bool = False) -> RealFile:
        self._now(path, "read")
        return super().open(path, direct=direct)


def names(directory: Path) -> list[str]:
    return [name for name in listed(path.name for path in directory.iterdir()) if name.startswith("step-")]


def test_a_checkpoint_that_is_pinned_while_it_is_removed_stays(tmp_path: Path) -> None:
    save_all(tmp_path, [1, 2])
    with pytest.raises(UsageError, match=f"{STEP_1} is pinned; run `ff ckpt unpin"):
        remove(tmp_path / STEP_1, disk=Meanwhile(STEP_1, lambda: pin(tmp_path / STEP_1), at="rename"))
    assert [(info.name, info.pinned, info.problem) for info in verify(tmp_path)] == [
        (STEP_2, False, None),
        (STEP_1, True, None),
    ]


def test_a_checkpoint_that_is_pinned_while_a_job_removes_it_stays(tmp_path: Path) -> None:
    save_all(tmp_path, [1])
    with manager(tmp_path, keep=1, disk=Meanwhile(STEP_1, lambda: pin(tmp_path / STEP_1), at="rename")) as job:
        for step in (2, 3):
            job.save(step, state_of(step), blocking=True).result()
            job.wait()
    assert [(info.step, info.pinned, info.problem) for info in verify(tmp_path)] == [(3, False, None), (1, True, None)]
    assert names(tmp_path) == [STEP_1, f"{STEP_1}.pinned", "step-00000003"]


def test_who_pins_a_checkpoint_that_has_lost_its_name_is_told_so(tmp_path: Path) -> None:
    save_all(tmp_path, [1, 2])

    class Late(RealDisk):
        def create(self, path: str, *, direct: bool = False) -> RealFile:
            remove(tmp_path / STEP_1)
            return super().create(path, direct=direct)

    with pytest.raises(NotFound, match=f"{STEP_1} was removed by the job"):
        pin(tmp_path / STEP_1, disk=Late())
    assert names(tmp_path) == [STEP_2]


def test_a_checkpoint_that_is_removed_while_one_looks_is_not_damaged(tmp_path: Path) -> None:
    save_all(tmp_path, [1, 2])
    disk = Meanwhile(STEP_1, lambda: remove(tmp_path / STEP_1), at="read")
    assert [(info.name, info.problem) for info in describe(tmp_path, disk=disk)] == [(STEP_2, None)]


def test_one_that_is_removed_while_its_bytes_are_verified_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_all(tmp_path, [1, 2])
    disk = Meanwhile(f"{STEP_1}/shard", lambda: remove(tmp_path / STEP_1), at="read")
    monkeypatch.setattr(storage, "RealDisk", lambda: disk)
    assert main(["ckpt", "verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(f"{STEP_2}: whole")


def test_the_only_checkpoint_is_replaced_while_it_is_opened(tmp_path: Path) -> None:
    save_all(tmp_path, [1])

    def replace() -> None:
        save_all(tmp_path, [2])
        remove(tmp_path / STEP_1)

    assert open_checkpoint(tmp_path, Meanwhile(STEP_1, replace, at="read")).name == STEP_2


class Unreadable(RealDisk):
    def open(self, path: str, *, direct: bool = False) -> RealFile:
        if STEP_2 in path:
            raise PermissionDenied(f"open {path}: permission denied")
        return super().open(path, direct=direct)


def test_nobody_is_told_that_a_checkpoint_is_the_last_whole_one_where_others_cannot_be_read(tmp_path: Path) -> None:
    save_all(tmp_path, [1, 2])
    with pytest.raises(PermissionDenied, match="nobody can tell whether it is the last whole checkpoint there"):
        remove(tmp_path / STEP_1, disk=Unreadable())
    assert names(tmp_path) == [STEP_1, STEP_2]


def test_a_job_that_starts_leaves_what_others_write_and_removes_what_nobody_writes(tmp_path: Path) -> None:
    save_all(tmp_path, [1])
    of_dcp, of_dead, other = (
        tmp_path / f".tmp-{name}"
        for name in ("step-00000003-" + 16 * "a", "step-00000004-" + 16 * "b" + "-locked", "x-" + 16 * "c")
    )
    for one in (of_dcp, of_dead, other):
        one.mkdir()
        (one / "shard").write_bytes(b"part")
    with filling(RealDisk(), str(tmp_path), "step-00000005") as temporary:
        save_all(tmp_path, [2])
        left = {path.name for path in tmp_path.iterdir() if path.name.startswith(".tmp-")}
        assert left == {of_dcp.name, other.name, temporary}
    assert torch.equal(newest(tmp_path).shared["w0"], state_of(2).shared["w0"])
