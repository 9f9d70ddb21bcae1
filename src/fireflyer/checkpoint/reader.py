"""Reads checkpoints: verifies every byte that it hands out, and says why it passed over one.

A checkpoint is *valid* when its manifest proves itself and every shard has its length, its header and all its tensors
as recorded. Errors that may go away by themselves (`TransientError`) are raised: passing over a good checkpoint because
the machine was short of file descriptors would throw work away. A checkpoint that may not be read is passed over by a
restore, which says so; who asks about it, or exports the newest, is told `PermissionDenied`, and never damage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from fireflyer.base.errors import (
    DataCorruption,
    FireflyerError,
    NotFound,
    PermanentError,
    PermissionDenied,
    TransientError,
    error_to_wire,
)
from fireflyer.base.events import SkippedCheckpoint
from fireflyer.base.ports import Disk
from fireflyer.checkpoint.core.manifest import Manifest, PlanRecord, Saved, decode_manifest, plans_of
from fireflyer.checkpoint.core.names import MANIFEST_FILE, Candidate, candidates, is_pinned, parse_final
from fireflyer.checkpoint.engine.directory import read_file, read_manifest
from fireflyer.checkpoint.engine.loading import Sink, load, sink_of
from fireflyer.checkpoint.opening import stored_plan
from fireflyer.checkpoint.storage import CheckpointPath, Storage, open_storage

__all__ = [
    "CheckpointInfo",
    "Opened",
    "choose",
    "describe",
    "is_gone",
    "look",
    "open_checkpoint",
    "stored_job_plan",
    "stored_plans",
    "verify",
]

_LISTINGS: Final = 10
"""Of a directory whose checkpoints are removed while they are read."""


class CheckpointInfo(msgspec.Struct, frozen=True):
    """Checkpoint as it is listed; None where its manifest could not be read."""

    name: str
    step: int
    attempt: int | None
    world_size: int | None
    size_bytes: int | None
    problem: str | None
    """None: nothing wrong was found, as far as was looked."""
    pinned: bool = False
    saved: Saved | None = None
    denied: bool = False
    """Whether its `problem` is that this user may not read it: nothing is known of damage."""


def choose(
    disk: Disk, root: str, make_sink: Callable[[Manifest], Sink]
) -> tuple[tuple[Candidate, Manifest] | None, tuple[SkippedCheckpoint, ...]]:
    """Loads the newest valid checkpoint through the sink that `make_sink` makes for it. What is newer and was not
    valid comes with the reason, newest first. Raises `TransientError`."""
    passed_over: list[SkippedCheckpoint] = []
    for candidate in _candidates_in(disk, root):
        try:
            manifest = read_manifest(disk, root, candidate)
            load(disk, root, candidate.name, manifest, make_sink(manifest))
        except TransientError:
            raise
        except FireflyerError as error:
            passed_over.append(SkippedCheckpoint(candidate.name, error_to_wire(error)[1]))
        else:
            return (candidate, manifest), tuple(passed_over)
    return None, tuple(passed_over)


def _candidates_in(disk: Disk, root: str) -> list[Candidate]:
    try:
        return candidates(disk.list(root))
    except NotFound:
        return []


class Opened(NamedTuple):
    """A checkpoint whose manifest proves itself; its shards have not been looked at."""

    disk: Disk
    root: str
    """The directory of checkpoints that it is in."""
    name: str
    manifest: Manifest
    passed_over: tuple[SkippedCheckpoint, ...] = ()
    """What is newer and cannot be read, newest first."""


def open_checkpoint(path: CheckpointPath, disk: Disk | None = None) -> Opened:
    """The checkpoint in the directory `path` (as of `open_storage`), or the newest of those in it whose manifest can be
    read. Raises `NotFound` where there is none, `DataCorruption` where none can be read, `TransientError`, and
    `PermissionDenied`."""
    disk, root, shown = open_storage(path, disk=disk)
    if disk.exists(f"{root}/{MANIFEST_FILE}"):
        parent, _, name = root.rpartition("/")
        return Opened(disk, parent, name, _manifest_in(disk, parent, name))
    passed_over: list[SkippedCheckpoint] = []
    for _ in range(_LISTINGS):
        passed_over.clear()
        gone = False
        for candidate in _candidates_in(disk, root):
            try:
                manifest = read_manifest(disk, root, candidate)
            except (TransientError, PermissionDenied):
                raise
            except FireflyerError as error:
                gone |= is_gone(disk, root, candidate.name)
                passed_over.append(SkippedCheckpoint(candidate.name, error.message))
            else:
                return Opened(disk, root, candidate.name, manifest, tuple(passed_over))
        if not gone:
            break
    if passed_over:
        raise DataCorruption(
            f"none of the {len(passed_over)} checkpoints in {shown} can be read: {passed_over[0].reason}"
        )
    raise NotFound(f"{shown} is no checkpoint and holds none; give a directory with {MANIFEST_FILE}, or one of those")


def is_gone(disk: Disk, root: str, name: str) -> bool:
    """Whether the checkpoint was removed since `root` was listed: nobody says of it that it is damaged."""
    return not disk.exists(f"{root}/{name}")


def _manifest_in(disk: Disk, root: str, name: str) -> Manifest:
    """Of a checkpoint of any name."""
    candidate = parse_final(name)
    if candidate is not None:
        return read_manifest(disk, root, candidate)
    path = f"{root}/{name}/{MANIFEST_FILE}"
    return decode_manifest(read_file(disk, path), path)


def describe(directory: CheckpointPath, disk: Disk | None = None, *, other_names: bool = False) -> list[CheckpointInfo]:
    """All checkpoints in `directory` (as of `open_storage`), newest first, by their manifests alone: quick. With
    `other_names` also those that are not called `step-…`: a restore does not look at them, but users of DCP choose
    names. Raises `NotFound`, `TransientError`."""
    return _look_at_all(open_storage(directory, disk=disk), deep=False, other_names=other_names)


def verify(directory: CheckpointPath, disk: Disk | None = None) -> list[CheckpointInfo]:
    """All checkpoints in `directory`, newest first, with every byte read and checked. Raises `NotFound`,
    `TransientError`."""
    return _look_at_all(open_storage(directory, disk=disk), deep=True)


def stored_job_plan(directory: CheckpointPath, disk: Disk | None = None) -> dict[str, Any] | None:
    """The plan with which the job in `directory` was first started; None before that. Raises `DataCorruption`."""
    storage = open_storage(directory, disk=disk)
    return stored_plan(storage.disk, storage.root)


def stored_plans(directory: CheckpointPath, disk: Disk | None = None) -> tuple[PlanRecord, ...]:
    """Numbers of ranks and plans with which the job in `directory` came to its newest checkpoint whose manifest can
    be read; empty where there is none. Raises what the disk raises."""
    disk, root, _ = open_storage(directory, disk=disk)
    for candidate in _candidates_in(disk, root):
        with contextlib.suppress(DataCorruption, PermanentError):
            return plans_of(read_manifest(disk, root, candidate))
    return ()


def _look_at_all(storage: Storage, *, deep: bool, other_names: bool = False) -> list[CheckpointInfo]:
    disk, root, shown = storage
    try:
        names = disk.list(root)
    except NotFound:
        raise NotFound(f"{shown} is no directory; give the one in which a job saves its checkpoints") from None
    found = [candidate.name for candidate in candidates(names)]
    if other_names:
        others = [name for name in names if not name.startswith(".") and name not in found]
        found += [name for name in others if _has_manifest(disk, root, name)]
    looked = [look(disk, root, name, names, deep=deep) for name in found]
    there = [info for info in looked if info.problem is None or not is_gone(disk, root, info.name)]
    return sorted(there, key=lambda info: -info.step)


def _has_manifest(disk: Disk, root: str, name: str) -> bool:
    """Not where nobody lets us look: a checkpoint of another name cannot be told from another directory."""
    with contextlib.suppress(PermissionDenied):
        return disk.is_dir(f"{root}/{name}") and disk.exists(f"{root}/{name}/{MANIFEST_FILE}")
    return False


def look(disk: Disk, root: str, name: str, names: Sequence[str], *, deep: bool) -> CheckpointInfo:
    """The checkpoint `root`/`name`, by its manifest, or with `deep` every byte. `names`: all in `root`. Raises
    `TransientError`."""
    manifest: Manifest | None = None
    problem: str | None = None
    denied = False
    pinned = is_pinned(name, names)
    try:
        manifest = _manifest_in(disk, root, name)
        if deep:
            load(disk, root, name, manifest, sink_of(lambda _rank, _tensor: None))
    except TransientError:
        raise
    except FireflyerError as error:
        problem, denied = error.message, isinstance(error, PermissionDenied)
    candidate = parse_final(name)
    step = manifest.step if manifest is not None else candidate.step if candidate is not None else 0
    if manifest is None:
        return CheckpointInfo(name, step, None, None, None, problem, pinned, denied=denied)
    size_bytes = sum(shard.file_bytes for shard in manifest.shards)
    return CheckpointInfo(
        name, step, manifest.attempt, manifest.world_size, size_bytes, problem, pinned, manifest.saved, denied
    )
