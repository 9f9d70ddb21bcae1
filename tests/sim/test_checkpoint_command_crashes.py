"""Saves through DCP and the commands that change checkpoints are crashed at every write, fsync and rename.

Each command runs on a simulated disk in pieces of 4 KiB; at every operation it dies before it, dies after it, or gets
EIO, and then the power goes too, with every outcome up to a limit. What has its name must be whole, what was
acknowledged must be there, and the command must work when it is run again.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from tests.support.checkpoints.jobs import Wrap
from tests.support.checkpoints.weak_disks import WithoutSync
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from fireflyer.base.errors import FireflyerError
from fireflyer.base.ports import Disk
from fireflyer.checkpoint import fresh, upkeep, verify
from fireflyer.checkpoint.core.exporting import INDEX_FILE
from fireflyer.checkpoint.core.names import MANIFEST_FILE, candidates
from fireflyer.checkpoint.core.slices import whole
from fireflyer.checkpoint.dcp import FireFlyerWriter
from fireflyer.checkpoint.engine import stream
from fireflyer.checkpoint.engine.directory import remove_tree, write_file
from fireflyer.checkpoint.engine.ranges import Request, TensorReader
from fireflyer.checkpoint.engine.steps import Steps, run_steps
from fireflyer.checkpoint.exporting import export
from fireflyer.checkpoint.importing import import_checkpoint
from fireflyer.checkpoint.reader import open_checkpoint
from fireflyer.sim import Fault, FaultKind, SimDisk, enumerate_outcomes
from fireflyer.sim.world import SimCrash

ROOT = "/checkpoints"
FEW = 5
"""Outcomes of a power loss, the telling ones first."""
KINDS = (FaultKind.CRASH_BEFORE, FaultKind.CRASH_AFTER, FaultKind.EIO)
SHARED = {"w": torch.arange(3000.0), "b": torch.full((7,), 3.0)}
OF_RANKS = [{"own0": torch.full((5,), 1.0)}, {"own1": torch.arange(2500.0) + 1}]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "WRITE_BYTES", 4096)


@dataclass(frozen=True)
class Command:
    start: SimDisk
    run: Callable[[SimDisk, Wrap], None]
    check: Callable[[SimDisk, bool], None]
    """Of what a crash has left. True: the command had said that it was done."""


def attempt(command: Command, disk: SimDisk, wrap: Wrap) -> bool:
    """Whether the command said that it was done."""
    try:
        command.run(disk, wrap)
    except (SimCrash, FireflyerError):
        return False
    finally:
        disk.faults = []
    return True


def survivors(disk: SimDisk, limit: int) -> Iterator[SimDisk]:
    """The processes alone die, one rank's machine dies, or all power is lost."""
    for owner in (None, "rank1"):
        for outcome in enumerate_outcomes(disk.pending(owner), limit=limit):
            left = disk.clone()
            left.crash(outcome, owner=owner)
            yield left


def campaign(
    command: Command,
    *,
    wrap: Wrap = lambda disk: disk,
    limit: int = FEW,
    kinds: Sequence[FaultKind] = (FaultKind.CRASH_BEFORE,),
) -> int:
    """Returns how many different disks crashes have left."""
    first = len(command.start.operations)
    undisturbed = command.start.clone()
    assert attempt(command, undisturbed, wrap)
    seen: set[tuple[bytes, bool, str]] = set()
    for index, kind in itertools.product(range(first, len(undisturbed.operations)), kinds):
        disk = command.start.clone()
        disk.faults = [Fault(kind=kind, index=index)]
        done = attempt(command, disk, wrap)
        for left in (disk.clone(), *survivors(disk, limit)):
            state = (left.digest(), done, repr(left.pending()))
            if state in seen:
                continue
            seen.add(state)
            command.check(left.clone(), done)
            again = attempt(command, left, wrap)
            left.crash()
            command.check(left, again)
    return len(seen)


def tensors_of(disk: SimDisk, step: int) -> dict[str, bytes]:
    opened = open_checkpoint(f"{ROOT}/step-{step:08d}", disk.mount())
    reader = TensorReader(opened.disk, opened.root, opened.name, opened.manifest)
    found = {name: bytearray(tensor.size_bytes) for name, tensor in reader.tensors.items()}
    reader.read([Request(name, whole(reader.tensors[name].shape), memoryview(data)) for name, data in found.items()])
    return {name: bytes(data) for name, data in found.items()}


def steps_of(disk: SimDisk) -> list[int]:
    """Of the checkpoints that are there; all of them must be whole."""
    if not disk.mount().is_dir(ROOT):
        return []
    infos = verify(ROOT, disk.mount())
    assert [info.problem for info in infos if info.problem] == []
    return [info.step for info in infos]


def leftovers(disk: SimDisk, directory: str) -> list[str]:
    return [name for name in disk.mount().list(directory) if name.startswith(".tmp-")]


def bytes_of(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def check_new(disk: SimDisk, done: bool, before: list[int], wanted: dict[str, torch.Tensor]) -> None:
    """Step 2 is there as a whole or not at all, and what was there `before` still is."""
    mount = disk.mount()
    names = candidates(mount.list(ROOT)) if mount.is_dir(ROOT) else []
    steps = [candidate.step for candidate in names]
    assert steps in (before, [2, *before])
    assert all(step in steps_of(disk) for step in before)
    if 2 in steps:
        assert tensors_of(disk, 2) == bytes_of(wanted)
    if done:
        assert steps == [2, *before]
        assert leftovers(disk, ROOT) == []


# The commands.


def importing(*, before: list[int] | None = None) -> Command:
    source, start = "/model.safetensors", SimDisk()
    run_steps(write_file(start.mount(), source, save(SHARED)))
    start.mount().sync_dir("/")
    for step in before or []:
        import_checkpoint(source, ROOT, step=step, disk=start.mount())

    def run(disk: SimDisk, wrap: Wrap) -> None:
        import_checkpoint(source, ROOT, step=2, disk=wrap(disk.mount("command")))

    return Command(start, run, lambda disk, done: check_new(disk, done, before or [], SHARED))


def two_ranks_of_dcp() -> Command:
    """What `dcp.save` calls in each rank; between its barriers one rank after the other."""

    def run(disk: SimDisk, wrap: Wrap) -> None:
        writers = [FireFlyerWriter(ROOT, step=2, disk=wrap(disk.mount(f"rank{rank}"))) for rank in range(2)]
        planners = [DefaultSavePlanner() for _ in writers]
        for rank, (writer, planner) in enumerate(zip(writers, planners, strict=True)):
            writer.set_up_storage_writer(rank == 0)
            planner.set_up_planner({**SHARED, **OF_RANKS[rank]}, writer.storage_meta(), rank == 0)
        local = [writers[rank].prepare_local_plan(planners[rank].create_local_plan()) for rank in range(2)]
        plans, metadata = planners[0].create_global_plan(local)
        finals = [planners[rank].finish_plan(plan) for rank, plan in enumerate(writers[0].prepare_global_plan(plans))]
        results = [writers[rank].write_data(finals[rank], planners[rank]).value() for rank in range(2)]
        writers[0].finish(metadata, results)

    wanted = {**SHARED, **OF_RANKS[0], **OF_RANKS[1]}
    return Command(SimDisk(), run, lambda disk, done: check_new(disk, done, [], wanted))


def exporting() -> Command:
    """Into two files and their index."""
    start = importing(before=[1]).start

    def run(disk: SimDisk, wrap: Wrap) -> None:
        export(ROOT, "/out/model", max_file_bytes=12_000, disk=wrap(disk.mount("command")))

    def check(disk: SimDisk, done: bool) -> None:
        assert steps_of(disk) == [1]
        mount = disk.mount()
        assert mount.is_dir("/out/model") or not done
        if not mount.is_dir("/out/model"):
            return
        files = json.loads(disk.read(f"/out/model/{INDEX_FILE}"))["weight_map"]
        assert sorted({*files.values(), INDEX_FILE}) == mount.list("/out/model")
        found: dict[str, Any] = {}
        for file in set(files.values()):
            found |= load(disk.read(f"/out/model/{file}"))
        assert bytes_of(found) == bytes_of(SHARED)
        assert not done or leftovers(disk, "/out") == []

    return Command(start, run, check)


def pinning() -> Command:
    def run(disk: SimDisk, wrap: Wrap) -> None:
        upkeep.pin(f"{ROOT}/step-00000001", disk=wrap(disk.mount("command")))

    def check(disk: SimDisk, done: bool) -> None:
        assert steps_of(disk) == [2, 1]
        assert [info.pinned for info in verify(ROOT, disk.mount())][1] or not done

    return Command(two_checkpoints(), run, check)


def unpinning() -> Command:
    start = two_checkpoints()
    upkeep.pin(f"{ROOT}/step-00000001", disk=start.mount())

    def run(disk: SimDisk, wrap: Wrap) -> None:
        upkeep.unpin(f"{ROOT}/step-00000001", disk=wrap(disk.mount("command")))

    def check(disk: SimDisk, done: bool) -> None:
        assert steps_of(disk) == [2, 1]
        assert not (done and [info.pinned for info in verify(ROOT, disk.mount())][1])

    return Command(start, run, check)


def removing() -> Command:
    def run(disk: SimDisk, wrap: Wrap) -> None:
        upkeep.remove(f"{ROOT}/step-00000001", disk=wrap(disk.mount("command")))

    def check(disk: SimDisk, done: bool) -> None:
        assert steps_of(disk) in ([2], [2, 1])
        assert steps_of(disk) == [2] or not done

    return Command(two_checkpoints(), run, check)


def two_checkpoints() -> SimDisk:
    return importing(before=[2, 1]).start


COMMANDS = {importing: 40, two_ranks_of_dcp: 80, exporting: 50, pinning: 4, unpinning: 3, removing: 7}
"""How many different disks crashes leave at least: fewer means that a campaign looks at too little."""


@pytest.mark.parametrize(("command", "least_disks"), COMMANDS.items())
def test_a_command_crashed_at_every_operation_leaves_what_is_whole(
    command: Callable[[], Command], least_disks: int
) -> None:
    assert campaign(command()) >= least_disks


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_with_many_outcomes_of_each_power_loss(command: Callable[[], Command]) -> None:
    campaign(command(), limit=60, kinds=KINDS)


@pytest.mark.slow
def test_an_import_crashed_at_every_operation_leaves_the_checkpoints_that_were_there() -> None:
    campaign(importing(before=[1]), kinds=KINDS)


# Planted faults: each must be caught by the same campaign.


def caught(command: Command, wrap: Wrap = lambda disk: disk) -> bool:
    try:
        campaign(command, wrap=wrap)
    except (AssertionError, FireflyerError, ValueError, SafetensorError):
        return True
    return False


def shard(path: str) -> bool:
    return path.endswith(".safetensors")


@pytest.mark.parametrize(
    ("command", "operation", "affects"),
    [
        (importing, "fsync", shard),
        (importing, "fsync", lambda path: path.endswith(MANIFEST_FILE)),
        (importing, "sync_dir", lambda path: "/.tmp-" in path),
        (importing, "sync_dir", lambda path: path == ROOT),
        (importing, "sync_dir", lambda path: path == "/"),
        (two_ranks_of_dcp, "fsync", lambda path: "shard-00001" in path),
        (two_ranks_of_dcp, "sync_dir", lambda path: path == ROOT),
        (exporting, "fsync", shard),
        (exporting, "fsync", lambda path: path.endswith(INDEX_FILE)),
        (exporting, "sync_dir", lambda path: path == "/out"),
        (pinning, "sync_dir", lambda path: path == ROOT),
        (unpinning, "sync_dir", lambda path: path == ROOT),
        (removing, "sync_dir", lambda path: path == ROOT),
    ],
)
def test_a_missing_sync_is_caught(
    command: Callable[[], Command], operation: str, affects: Callable[[str], bool]
) -> None:
    assert caught(command(), lambda disk: WithoutSync(disk, operation, affects))


def test_a_removal_under_its_own_name_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(path: str, *, disk: Disk) -> None:
        run_steps(remove_tree(disk, path))
        disk.sync_dir(ROOT)

    monkeypatch.setattr(upkeep, "remove", hasty)
    assert caught(removing())


def test_a_name_before_the_manifest_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[tuple[str, bytes]] = []

    def later(_disk: Disk, path: str, data: bytes) -> Steps[None]:
        late.append((path, data))
        yield

    monkeypatch.setattr(fresh, "write_file", later)
    commit = fresh.commit

    def hasty(disk: Disk, parent: str, name: str, temporary: str) -> None:
        commit(disk, parent, name, temporary)
        path, data = late[-1]
        file = disk.create(path.replace(temporary, name))
        file.pwrite(data, 0)
        file.fsync()
        disk.sync_dir(f"{parent}/{name}")

    monkeypatch.setattr(fresh, "commit", hasty)
    assert caught(importing())
