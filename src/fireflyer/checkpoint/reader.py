"""Reads checkpoints: verifies every byte that it hands out, and says why it passed over one.

A checkpoint is *valid* when its manifest proves itself and every shard has its length, its header and all its tensors
as recorded. Errors that may go away by themselves (`TransientError`) are raised: passing over a good checkpoint because
the machine was short of file descriptors would throw work away.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from fireflyer.base.errors import DataCorruption, FireflyerError, NotFound, PermanentError, TransientError
from fireflyer.base.events import SkippedCheckpoint
from fireflyer.base.ports import Disk
from fireflyer.checkpoint.core.manifest import Manifest, PlanRecord, decode_manifest, plans_of
from fireflyer.checkpoint.core.names import MANIFEST_FILE, Candidate, candidates, parse_final
from fireflyer.checkpoint.engine.directory import read_file, read_manifest
from fireflyer.checkpoint.engine.loading import Sink, load
from fireflyer.checkpoint.opening import stored_plan
from fireflyer.runtime.disk import RealDisk

__all__ = [
    "CheckpointInfo",
    "Opened",
    "choose",
    "describe",
    "open_checkpoint",
    "stored_job_plan",
    "stored_plans",
    "verify",
]


class CheckpointInfo(msgspec.Struct, frozen=True):
    name: str
    step: int
    attempt: int | None
    world_size: int | None
    size_bytes: int | None
    problem: str | None
    """None: nothing wrong was found, as far as was looked."""


def choose(
    disk: Disk, root: str, make_sink: Callable[[Manifest], Sink]
) -> tuple[tuple[Candidate, Manifest] | None, tuple[SkippedCheckpoint, ...]]:
    """Loads the newest valid checkpoint through the sink that `make_sink` makes for it. What is newer and was not
    valid comes with the reason, newest first. Raises `TransientError`."""
    passed_over: list[SkippedCheckpoint] = []
    for candidate in candidates(disk.list(root)) if disk.is_dir(root) else []:
        try:
            manifest = read_manifest(disk, root, candidate)
            load(disk, root, candidate.name, manifest, make_sink(manifest))
        except TransientError:
            raise
        except FireflyerError as error:
            passed_over.append(SkippedCheckpoint(candidate.name, error.message))
        else:
            return (candidate, manifest), tuple(passed_over)
    return None, tuple(passed_over)


class Opened(NamedTuple):
    """A checkpoint whose manifest proves itself; its shards have not been looked at."""

    root: str
    name: str
    manifest: Manifest


def open_checkpoint(disk: Disk, path: str) -> Opened:
    """The checkpoint in the directory `path`, or the newest of those in it whose manifest can be read. Raises
    `NotFound` where there is none, `DataCorruption` where none can be read, and `TransientError`."""
    root, _, name = path.rstrip("/").rpartition("/")
    if disk.exists(f"{path}/{MANIFEST_FILE}"):
        return Opened(root, name, _manifest_in(disk, root, name))
    found = candidates(disk.list(path)) if disk.is_dir(path) else []
    damage: FireflyerError | None = None
    for candidate in found:
        try:
            return Opened(path, candidate.name, read_manifest(disk, path, candidate))
        except TransientError:
            raise
        except FireflyerError as error:
            damage = damage or error
    if damage is not None:
        raise DataCorruption(f"none of the {len(found)} checkpoints in {path} can be read: {damage.message}")
    raise NotFound(f"{path} is no checkpoint and holds none; give a directory with {MANIFEST_FILE}, or one of those")


def _manifest_in(disk: Disk, root: str, name: str) -> Manifest:
    """Of a checkpoint of any name."""
    candidate = parse_final(name)
    if candidate is not None:
        return read_manifest(disk, root, candidate)
    path = f"{root}/{name}/{MANIFEST_FILE}"
    return decode_manifest(read_file(disk, path), path)


def describe(directory: str, disk: Disk | None = None) -> list[CheckpointInfo]:
    """All checkpoints in `directory`, newest first, by their manifests alone: quick. Raises `NotFound`."""
    return _look_at_all(directory, disk or RealDisk(), deep=False)


def verify(directory: str, disk: Disk | None = None) -> list[CheckpointInfo]:
    """All checkpoints in `directory`, newest first, with every byte read and checked. Raises `NotFound`."""
    return _look_at_all(directory, disk or RealDisk(), deep=True)


def stored_job_plan(directory: str, disk: Disk | None = None) -> dict[str, Any] | None:
    """The plan with which the job in `directory` was first started; None before that. Raises `DataCorruption`."""
    return stored_plan(disk or RealDisk(), directory)


def stored_plans(directory: str, disk: Disk | None = None) -> tuple[PlanRecord, ...]:
    """With how many ranks, and by which plan, the job in `directory` came to its newest checkpoint whose manifest can
    be read; empty where there is none. Raises what the disk raises."""
    disk = disk or RealDisk()
    for candidate in candidates(disk.list(directory)) if disk.is_dir(directory) else []:
        with contextlib.suppress(DataCorruption, PermanentError):
            return plans_of(read_manifest(disk, directory, candidate))
    return ()


def _look_at_all(directory: str, disk: Disk, *, deep: bool) -> list[CheckpointInfo]:
    return [_look(disk, directory, candidate, deep=deep) for candidate in candidates(disk.list(directory))]


def _look(disk: Disk, root: str, candidate: Candidate, *, deep: bool) -> CheckpointInfo:
    manifest: Manifest | None = None
    problem: str | None = None
    try:
        manifest = read_manifest(disk, root, candidate)
        if deep:
            load(disk, root, candidate.name, manifest, lambda _rank, _tensor: None)
    except FireflyerError as error:
        problem = error.message
    if manifest is None:
        return CheckpointInfo(candidate.name, candidate.step, None, None, None, problem)
    size_bytes = sum(shard.file_bytes for shard in manifest.shards)
    return CheckpointInfo(candidate.name, candidate.step, manifest.attempt, manifest.world_size, size_bytes, problem)
