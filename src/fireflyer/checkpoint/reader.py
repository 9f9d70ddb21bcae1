"""Reads checkpoints: verifies every byte that it hands out, and says why it passed over one.

A checkpoint is *valid* when its manifest proves itself and every shard has its length, its header and all its tensors
as recorded. Errors that may go away by themselves (`TransientError`) are raised: passing over a good checkpoint because
the machine was short of file descriptors would throw work away.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec

from fireflyer.base.errors import DataCorruption, FireflyerError, PermanentError, TransientError
from fireflyer.base.events import SkippedCheckpoint
from fireflyer.base.ports import Disk
from fireflyer.checkpoint.core.manifest import Manifest, PlanRecord, plans_of
from fireflyer.checkpoint.core.names import Candidate, candidates
from fireflyer.checkpoint.engine.directory import read_manifest
from fireflyer.checkpoint.engine.loading import Sink, load
from fireflyer.checkpoint.opening import stored_plan
from fireflyer.checkpoint.storage import CheckpointPath, Storage, open_storage

__all__ = ["CheckpointInfo", "choose", "describe", "stored_job_plan", "stored_plans", "verify"]


class CheckpointInfo(msgspec.Struct, frozen=True):
    """Checkpoint as it is listed; None where its manifest could not be read."""

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


def describe(directory: CheckpointPath, disk: Disk | None = None) -> list[CheckpointInfo]:
    """All checkpoints in `directory` (as of `open_storage`), newest first, by their manifests alone: quick. Raises
    `NotFound`."""
    return _look_at_all(open_storage(directory, disk=disk), deep=False)


def verify(directory: CheckpointPath, disk: Disk | None = None) -> list[CheckpointInfo]:
    """All checkpoints in `directory`, newest first, with every byte read and checked. Raises `NotFound`."""
    return _look_at_all(open_storage(directory, disk=disk), deep=True)


def stored_job_plan(directory: CheckpointPath, disk: Disk | None = None) -> dict[str, Any] | None:
    """The plan with which the job in `directory` was first started; None before that. Raises `DataCorruption`."""
    storage = open_storage(directory, disk=disk)
    return stored_plan(storage.disk, storage.root)


def stored_plans(directory: CheckpointPath, disk: Disk | None = None) -> tuple[PlanRecord, ...]:
    """Numbers of ranks and plans with which the job in `directory` came to its newest checkpoint whose manifest can
    be read; empty where there is none. Raises what the disk raises."""
    disk, root, _ = open_storage(directory, disk=disk)
    for candidate in candidates(disk.list(root)) if disk.is_dir(root) else []:
        with contextlib.suppress(DataCorruption, PermanentError):
            return plans_of(read_manifest(disk, root, candidate))
    return ()


def _look_at_all(storage: Storage, *, deep: bool) -> list[CheckpointInfo]:
    disk, root, _ = storage
    return [_look(disk, root, candidate, deep=deep) for candidate in candidates(disk.list(root))]


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
