"""Checkpoints in a cluster of real processes: what holds in a directory holds there, also when a storage node dies."""

from __future__ import annotations

import os
import random
import secrets
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.checkpoints.places import disconnected
from tests.support.checkpoints.ranks import Ranks
from tests.support.checkpoints.states import SHARD, listed, manager, newest, same, save_all, state_of
from tests.support.fs.clusters.local_cluster import LocalCluster

import fireflyer.fs
from fireflyer.base.errors import DataCorruption, Fenced, NoSpace, Timeout, TransientError, UsageError
from fireflyer.base.launch import RankEnvironment
from fireflyer.base.ports import Transfer
from fireflyer.base.units import MIB, SECOND
from fireflyer.checkpoint import State, TrainingLoop, describe, open_storage, stored_job_plan, verify
from fireflyer.checkpoint import storage as storage_of_checkpoints
from fireflyer.checkpoint.core.names import candidates
from fireflyer.checkpoint.engine.directory import read_manifest
from fireflyer.checkpoint.engine.loading import load, sink_of
from fireflyer.cli.checkpoints import command as command_of_checkpoints
from fireflyer.cli.main import main
from fireflyer.fs.client.files.disk import FileSystemFile
from fireflyer.fs.client.files.file_system import FileSystem
from fireflyer.fs.client.files.open_inode import BegunRead
from fireflyer.fs.client.meta import MetaClient
from fireflyer.fs.schema.meta import Close, Request

__all__ = ["disconnected"]

pytestmark = pytest.mark.processes


@pytest.fixture
def url(shared_cluster: LocalCluster) -> str:
    """Of a directory that nobody has made yet."""
    return shared_cluster.url(f"/ckpt-{secrets.token_hex(8)}/run")


@pytest.fixture
def files(shared_cluster: LocalCluster) -> Iterator[FileSystem]:
    """Another client of the same cluster."""
    with fireflyer.fs.connect(f"ff://{shared_cluster.directory}") as found:
        yield found


def root_of(url: str) -> str:
    return open_storage(url).root


def test_what_was_saved_is_listed_verified_and_restored_and_older_ones_are_removed(url: str, files: FileSystem) -> None:
    save_all(url, [10, 20, 30], keep=2, disk=None, job_plan={"model": "small"})
    assert listed(files.listdir(root_of(url))) == ["job.json", "step-00000020", "step-00000030"]
    assert [(info.step, info.problem) for info in describe(url)] == [(30, None), (20, None)]
    assert [(info.step, info.problem) for info in verify(url)] == [(30, None), (20, None)]
    assert stored_job_plan(url) == {"model": "small"}
    assert same(newest(url, disk=None), 30)


def test_a_small_save_waits_for_five_answers_of_the_meta_service(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a round trip, and but for the first a transaction on the disk: they are most of what it takes."""
    asked: list[str] = []
    call = MetaClient.call_in_session

    async def counted(self: MetaClient, request: Request, **options: Any) -> Any:
        if not isinstance(request, Close):  # ended lazily: nobody waits
            asked.append(type(request).__name__)
        return await call(self, request, **options)

    with manager(url, disk=None, keep=1) as ours:
        ours.save(1, state_of(1), blocking=True).result()
        monkeypatch.setattr(MetaClient, "call_in_session", counted)
        ours.save(2, state_of(2)).result()
        committed = asked.index("Rename") + 1
        ours.wait()
    waited = ["GetSpace", "MakeDirectory", "Open", "Open", "Report", "Report", "Rename"]
    assert asked[:committed] == waited, "both files are opened together, and reported together"
    removed = ["Stat", "ListDirectory", "Stat", "ListDirectory", "Rename", "Stat", "RemoveTree"]
    assert [one for one in asked[committed:] if one != "ClientHeartbeat"] == removed


def test_ranks_commit_a_checkpoint_together_and_restore_with_another_number(url: str) -> None:
    ranks = Ranks(url, 3, None)
    handles = ranks.together(lambda ours: ours.save(7, state_of(7), blocking=True))
    assert {handle.result() for handle in handles} == {"step-00000007"}
    ranks.close()
    fewer = Ranks(url, 2, None, attempt=1)
    for restored in fewer.together(lambda ours: ours.restore()):
        assert same(restored, 7)
    fewer.close()


def test_a_part_is_read_without_the_rest(url: str) -> None:
    large = State({"small": torch.arange(5.0), "large": torch.ones(3 * MIB)}, {}, {})
    with manager(url, disk=None) as ours:
        ours.save(1, large, blocking=True).result()
    disk, root, _ = open_storage(url)
    (candidate,) = candidates(disk.list(root))
    manifest, place = read_manifest(disk, root, candidate), bytearray(20)
    load(
        disk, root, candidate.name, manifest,
        sink_of(lambda _, tensor: memoryview(place) if tensor.name == "small" else None), only_wanted=True,
    )  # fmt: skip
    assert torch.equal(torch.frombuffer(place, dtype=torch.float32), torch.arange(5.0))


def test_a_newer_job_takes_the_directory_and_the_older_one_can_neither_commit_nor_remove(url: str) -> None:
    old = manager(url, disk=None, launch="first")
    old.save(1, state_of(1), blocking=True).result()
    new = manager(url, disk=None, launch="second")
    assert same(new.restore(), 1)
    with pytest.raises(Fenced):
        old.save(2, state_of(2), blocking=True).result()
    new.save(3, state_of(3), blocking=True).result()
    assert [info.step for info in describe(url)] == [3, 1]
    old.close()
    new.close()


def test_a_training_loop_goes_on_where_it_stopped(url: str) -> None:
    def train(last: int) -> list[float]:
        torch.manual_seed(3)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = []
        with TrainingLoop(url, model, optimizer, period_steps=2, env=RankEnvironment()) as loop:
            for _ in loop.steps(last):
                loss = model(torch.rand(8, 4)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses

    first, second = train(3), train(6)
    for info in describe(url):
        assert info.problem is None
    assert (len(first), len(second)) == (3, 3)
    disk, root, _ = open_storage(url)
    for name in disk.list(root):
        if name.startswith("step-"):
            disk.rename(f"{root}/{name}", f"{root}/.aside-{name}")
    assert train(6) == first + second


def test_one_wrong_byte_anywhere_is_found_and_the_checkpoint_before_is_used(url: str, files: FileSystem) -> None:
    save_all(url, [10, 20], disk=None)
    directory = f"{root_of(url)}/step-00000020"
    manifest = read_manifest(open_storage(url).disk, root_of(url), candidates(["step-00000020"])[0])
    (shard,) = manifest.shards
    places = [(SHARD, 0), (SHARD, shard.header_bytes - 1)]
    places += [(SHARD, tensor.offset + tensor.size_bytes // 2) for tensor in shard.tensors]
    size = files.stat(f"{directory}/manifest.json").st_size
    places += [("manifest.json", random.Random(at).randrange(size - 1)) for at in range(5)]
    for name, offset in places:
        flip(files, f"{directory}/{name}", offset)
        restored = newest(url, disk=None)
        assert same(restored, 10), (name, offset)
        assert [one.name for one in restored.passed_over] == ["step-00000020"]
        flip(files, f"{directory}/{name}", offset)
    assert same(newest(url, disk=None), 20)
    for step in (10, 20):
        flip(files, f"{root_of(url)}/step-000000{step}/{SHARD}", -3)
    with manager(url, disk=None) as ours, pytest.raises(DataCorruption, match="none of the 2 checkpoints in ff://"):
        ours.restore()


def flip(files: FileSystem, path: str, offset: int) -> None:
    with files.open_file(path, os.O_RDWR) as file:
        at = offset % file.stat().st_size
        (byte,) = file.pread(at, 1)
        file.pwrite(bytes([byte ^ 1]), at)


def test_a_checkpoint_that_cannot_be_read_now_is_not_passed_over(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save_all(url, [10, 20], disk=None)

    async def no_answer(_: BegunRead) -> int:
        raise Timeout("no replica answered in time")

    with manager(url, disk=None) as ours:
        with monkeypatch.context() as patch:
            patch.setattr(BegunRead, "end", no_answer)
            with pytest.raises(Timeout, match=r"read ff://.*/step-00000020/.*: no replica answered"):
                ours.restore()
        assert same(ours.restore(), 20)


def test_a_save_that_exceeds_the_quota_fails_before_it_writes_and_the_older_one_stays(
    url: str, files: FileSystem
) -> None:
    files.makedirs(root_of(url))
    files.set_quota(root_of(url), bytes=2 * MIB)
    with manager(url, disk=None) as ours:
        ours.save(1, state_of(1), blocking=True).result()
        with pytest.raises(NoSpace):
            ours.save(2, State({"large": torch.ones(MIB)}, {}, {}), blocking=True).result()
        assert [info.step for info in describe(url)] == [1]
        ours.save(3, state_of(3), blocking=True).result()
    assert same(newest(url, disk=None), 3)


@pytest.mark.parametrize("wrong", ["ff:///", "ff://host:7000/", "ff:///a/../b", "ff://%2Fcluster"])
def test_an_address_that_names_no_directory_is_refused(wrong: str) -> None:
    with pytest.raises(UsageError, match="checkpoint directory"):
        manager(wrong, disk=None)


def test_managers_want_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FIREFLYER_FS_TOKEN_FILE", raising=False)
    with pytest.raises(UsageError, match="FIREFLYER_FS_TOKEN_FILE"):
        open_storage("ff://127.0.0.1:1/ckpt")


# A storage node dies.


def large_state(step: int) -> State:
    """Of several pieces, on all chains."""
    generator = torch.Generator().manual_seed(step)
    weights = torch.randint(0, 255, (40 * MIB,), dtype=torch.uint8, generator=generator)
    return State({"weights": weights}, {}, {"step": step})


class Kills:
    """At the `at`-th transfer of a file a node is killed, before the others go out."""

    def __init__(self, cluster: LocalCluster, node: str, at: int) -> None:
        self._pid = cluster.process(node)
        self._left = at
        self.done = False

    def count(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(self._pid, signal.SIGKILL)
            self.done = True


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_any_storage_process_may_be_killed_during_a_save_and_during_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = LocalCluster(tmp_path)
    write, read = FileSystemFile.start_pwrite, FileSystemFile.start_pread
    try:
        cluster.ff("up", "--detach", "--relaxed", "--failure-timeout", "2", "--targets-per-node", "2")
        url = cluster.url("/ckpt/run")
        with manager(url, disk=None, keep=1) as ours:
            ours.save(1, large_state(1), blocking=True).result()
            for number in (1, 2, 3):
                step = number + 1
                during_save, during_load = Kills(cluster, f"node-{number}", 2), None

                def counted_write(
                    file: FileSystemFile, data: memoryview, offset: int, kills: Kills = during_save
                ) -> Transfer:
                    kills.count()
                    return write(file, data, offset)

                monkeypatch.setattr(FileSystemFile, "start_pwrite", counted_write)
                ours.save(step, large_state(step), blocking=True).result()
                assert during_save.done
                monkeypatch.setattr(FileSystemFile, "start_pwrite", write)
                cluster.wait(cluster.whole)
                during_load = Kills(cluster, f"node-{number}", 3)

                def counted_read(
                    file: FileSystemFile, target: memoryview, offset: int, kills: Kills = during_load
                ) -> Transfer:
                    kills.count()
                    return read(file, target, offset)

                monkeypatch.setattr(FileSystemFile, "start_pread", counted_read)
                restored = ours.restore()
                assert during_load.done
                monkeypatch.setattr(FileSystemFile, "start_pread", read)
                assert restored is not None
                assert (restored.step, restored.passed_over) == (step, ())
                assert torch.equal(restored.shared["weights"], large_state(step).shared["weights"])
                cluster.wait(cluster.whole)
    finally:
        cluster.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_checkpoints_that_no_storage_node_serves_are_neither_damaged_nor_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of three nodes do not answer: every command ends within its patience, and says which chain is away."""
    monkeypatch.setattr(command_of_checkpoints, "PATIENCE_NS", 2 * SECOND)
    cluster = LocalCluster(tmp_path)
    stopped: list[int] = []

    def ff(*arguments: str) -> tuple[int, str, str]:
        code = main(["ckpt", *arguments])
        found = capsys.readouterr()
        return code, found.out, found.err

    try:
        cluster.ff("up", "--detach", "--relaxed", "--failure-timeout", "2", "--targets-per-node", "2")
        url = cluster.url("/ckpt/run")
        with manager(url, disk=None, keep=5) as ours:
            for step in (10, 20):
                ours.save(step, large_state(step), blocking=True).result()
        stopped = [cluster.process(f"node-{number}") for number in (1, 2)]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        cluster.wait(lambda status: status["summary"]["readable"] < status["summary"]["chains"])
        monkeypatch.setattr(storage_of_checkpoints, "_patience_ns", 2 * SECOND)  # of connections from now on
        impatience = pytest.raises(TransientError, match="not done before the deadline")
        with impatience, manager(url, disk=None, keep=5) as impatient:
            impatient.restore()
        for line in (("verify", url), ("export", url, str(tmp_path / "out")), ("rm", f"{url}/step-00000010")):
            code, out, err = ff(*line)
            assert (code, out, err.count("\n")) == (1, "", 1), line
            assert "is unavailable: none of its targets is serving; `ff fs status` shows it" in err, line
        for line in (("ls", url), ("ls", "--json", url), ("show", url)):  # a manifest is one chunk: of any chain
            code, out, err = ff(*line)
            assert (code, out != "", err != "") in ((0, True, False), (1, False, True)), line
            assert "damaged" not in out + err
            assert not code or "none of its targets is serving" in err
        assert not (tmp_path / "out").exists()
        while stopped:
            os.kill(stopped.pop(), signal.SIGCONT)
        cluster.wait(cluster.whole)
        monkeypatch.setattr(storage_of_checkpoints, "_patience_ns", None)
        with manager(url, disk=None, keep=5) as ours:
            ours.save(40, large_state(40), blocking=True).result()
        assert [(info.step, info.problem) for info in verify(url)] == [(40, None), (20, None), (10, None)]
        assert ff("rm", f"{url}/step-00000010")[0] == 0
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        cluster.close()


@pytest.fixture
def small_cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """Two replicas of everything on a file system of 1,500 MiB."""
    (tmp_path / "fs").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1500m", "tmpfs", str(tmp_path / "fs")]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount file systems")
    cluster = LocalCluster(tmp_path)
    try:
        cluster.ff("up", "--detach", "--relaxed", "--nodes", "2")
        yield cluster
    finally:
        cluster.close()
        subprocess.run(["umount", "--lazy", str(tmp_path / "fs")], check=True)


@pytest.mark.slow
def test_a_save_on_full_disks_fails_and_works_again_when_old_checkpoints_are_removed(
    small_cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    url = small_cluster.url("/ckpt/run")
    disk, root, _ = open_storage(url)
    refusals: list[str] = []
    with manager(url, disk=None, keep=100) as ours:

        def saved(step: int) -> bool:
            try:
                ours.save(step, large_state(step), blocking=True).result()
            except NoSpace as error:
                refusals.append(error.message)
                return False
            return True

        last = next(step for step in range(1, 100) if not saved(step)) - 1
        assert last >= 4
        assert "\n" not in refusals[0]
        assert "the storage nodes have no space left; remove old checkpoints" in refusals[0]
        names = disk.list(root)
        assert listed(names) == [f"step-{step:08d}" for step in range(1, last + 1)]
        assert [disk.list(f"{root}/{name}") for name in names if name.startswith(".writer")] == [[]]
        restored = ours.restore()
        assert restored is not None
        assert (restored.step, restored.passed_over) == (last, ())
        for step in (1, 2, 3):
            assert main(["ckpt", "rm", f"{url}/step-{step:08d}"]) == 0, capsys.readouterr()
        again = last + 1
        small_cluster.wait(lambda _: saved(again))  # what was removed is given back by and by
    assert [(info.step, info.problem) for info in verify(url)] == [(step, None) for step in range(again, 3, -1)]
