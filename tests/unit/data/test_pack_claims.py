"""Of several packs into one directory at most one comes to its end, and what it made is whole."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.packing import Watch, content, files, jsonl, run
from tests.support.patience import allowed_s

from fireflyer.base.errors import Busy, FireflyerError
from fireflyer.data import RecordSet
from fireflyer.data import places as places_module
from fireflyer.data.inspection import find_damage
from fireflyer.data.packing import Packed
from fireflyer.runtime.disk import RealDisk, RealFile
from fireflyer.sim.disk import SimDisk
from fireflyer.sim.outcomes import enumerate_outcomes

TEXTS = [letter * 1500 for letter in "abcd"]
RECORDS = [text.encode() for text in TEXTS]
MANY = 100
"""More changes of names than a pack of these makes."""


@pytest.fixture
def lines(tmp_path: Path) -> str:
    return jsonl(tmp_path / "lines.jsonl", [{"text": text} for text in TEXTS])


def test_a_second_pack_is_told_that_one_is_running(tmp_path: Path, lines: str) -> None:
    told: list[str] = []

    def interfere(watch: Watch) -> None:
        for restart in (False, True):
            with pytest.raises(Busy) as caught:
                run(lines, tmp_path / "set", restart=restart)
            told.append(str(caught.value))

    run(lines, tmp_path / "set", Watch(interfere))
    assert content(tmp_path / "set") == RECORDS
    assert set(told) == {
        f"{tmp_path}/set: another pack into this directory is running; wait until it has ended, or choose another "
        "directory"
    }


def test_the_lock_of_a_packer_that_was_killed_is_in_nobodys_way(tmp_path: Path, lines: str) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / ".packing.lock").touch()
    run(lines, tmp_path / "set")
    assert sorted(files(tmp_path / "set")) == ["dataset.json", "shard-00000.ffr", "shard-00001.ffr"]


class LocklessDisk(RealDisk):
    """Of one packer, on a file system that has no locks. It stops after each file that it creates, before it is
    written, and before each other change of a name, once it has made `left` of these, until it may go on."""

    def __init__(self) -> None:
        self.left = 0
        self.stopped, self.may_go_on = threading.Event(), threading.Event()

    def hold(self, path: str, *, wait: bool = True) -> None:
        return None

    def _stop(self) -> None:
        if not self.left:
            self.stopped.set()
            assert self.may_go_on.wait(allowed_s(60))
            self.may_go_on.clear()
        self.left -= 1

    def create(self, path: str, *, direct: bool = False) -> RealFile:
        file = super().create(path)
        self._stop()
        return file

    def rename(self, source: str, target: str) -> None:
        self._stop()
        super().rename(source, target)

    def remove(self, path: str) -> None:
        self._stop()
        super().remove(path)


class Packer(threading.Thread):
    """A pack in a process of its own, as far as it can tell."""

    here = threading.local()

    def __init__(self, pack: Callable[[], Packed]) -> None:
        super().__init__()
        self.disk, self._pack = LocklessDisk(), pack
        self.packed: Packed | None = None
        self.ended = threading.Event()

    def run(self) -> None:
        self.here.disk = self.disk
        try:
            self.packed = self._pack()
        except FireflyerError:
            pass
        finally:
            self.ended.set()
            self.disk.stopped.set()

    def go(self, changes: int = MANY) -> None:
        """Returns when it has stopped or ended."""
        if self.ended.is_set():
            return
        self.disk.left = changes
        self.disk.stopped.clear()
        if self.ident is None:
            self.start()
        else:
            self.disk.may_go_on.set()
        assert self.disk.stopped.wait(allowed_s(60))
        if self.ended.is_set():
            self.join()


OTHERS = (1, 3, 8, MANY)
SCHEDULES = [(other, MANY) for other in OTHERS] + [(2, again) for again in (1, 3)]


def test_without_locks_a_pack_that_reports_success_made_a_whole_data_set(
    tmp_path: Path, lines: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One packer stops anywhere, as a client of 3FS whose session ends; a second one comes, and stops; the first one
    goes on, perhaps not to its end; then the second one ends, and the first one."""
    monkeypatch.setattr("os.fsync", lambda fd: None)
    monkeypatch.setattr(places_module, "default_disk", lambda given: given or Packer.here.disk)

    def packer(target: Path, *, restart: bool = False) -> Packer:
        return Packer(lambda: run(lines, target, restart=restart))

    ends = {"first": 0, "second": 0, "none": 0}
    for number, (begin, (other, again)) in enumerate(itertools.product(range(11), SCHEDULES)):
        target = tmp_path / f"{begin}-{other}-{again}"
        first, second = packer(target), packer(target, restart=number % 2 == 1)
        for one, changes in ((first, begin), (second, other), (first, again), (second, MANY), (first, MANY)):
            one.go(changes)
        assert not (first.packed and second.packed)
        ends["first" if first.packed else "second" if second.packed else "none"] += 1
        if not (target / "dataset.json").exists():
            assert not first.packed
            assert not second.packed
            last = packer(target)
            last.go()
            assert last.packed
        with RecordSet(str(target)) as records:
            assert list(find_damage(records)) == []
        assert content(target) == RECORDS
        assert sorted(files(target)) == ["dataset.json", "shard-00000.ffr", "shard-00001.ffr"]
    assert min(ends["first"], ends["second"]) > 10


def test_a_finished_pack_outlives_a_loss_of_power(tmp_path: Path, lines: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the directories that it made, or that one made who died before."""
    disk = SimDisk()
    disk.mount().mkdir("/new")
    monkeypatch.setattr(places_module, "default_disk", lambda given: given or disk.mount())
    run(lines, Path("/new/deep/set"))
    outcomes = list(enumerate_outcomes(disk.pending(), limit=64))
    assert outcomes
    for outcome in outcomes:
        survivor = disk.clone()
        survivor.crash(outcome)
        left = survivor.mount().list("/new/deep/set")
        assert {"dataset.json", "shard-00000.ffr", "shard-00001.ffr"} <= set(left)
