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
from fireflyer.base.ports import Disk, DiskFile
from fireflyer.checkpoint.core.manifest import Manifest, PlanRecord, ShardRecord, TensorRecord, plans_of
from fireflyer.checkpoint.core.names import Candidate, candidates
from fireflyer.checkpoint.executor import PIECE_BYTES, read_manifest
from fireflyer.checkpoint.opening import stored_plan
from fireflyer.native import crc32c
from fireflyer.runtime.disk import RealDisk

__all__ = ["CheckpointInfo", "Sink", "choose", "describe", "load", "stored_job_plan", "stored_plans", "verify"]

Sink = Callable[[int, TensorRecord], memoryview | None]
"""Given the rank whose shard holds it and the record of a tensor, says where its bytes go; None to only verify it."""


class CheckpointInfo(msgspec.Struct, frozen=True):
    name: str
    step: int
    attempt: int | None
    world_size: int | None
    size_bytes: int | None
    problem: str | None
    """None: nothing wrong was found, as far as was looked."""


def load(disk: Disk, root: str, name: str, manifest: Manifest, sink: Sink, *, only_wanted: bool = False) -> None:
    """Reads and verifies every shard; with `only_wanted` just the tensors for which `sink` gives a place.
    Raises `DataCorruption` and what the disk raises; then what `sink` gave holds nothing usable."""
    for shard in manifest.shards:
        path = f"{root}/{name}/{shard.file}"
        with contextlib.closing(disk.open(path)) as file:
            _check_frame(file, path, shard)  # before `sink` takes memory for what the manifest only claims
            for tensor in shard.tensors:
                place = sink(shard.rank, tensor)
                if place is not None or not only_wanted:
                    _read_tensor(file, path, tensor, place)


def _check_frame(file: DiskFile, path: str, shard: ShardRecord) -> None:
    size = file.size()
    if size != shard.file_bytes:
        raise DataCorruption(f"{path} has {size} bytes instead of {shard.file_bytes}")
    if crc32c(file.pread(shard.header_bytes, 0)) != shard.header_crc32c:
        raise DataCorruption(f"the header of {path} does not match its checksum")


def _read_tensor(file: DiskFile, path: str, tensor: TensorRecord, place: memoryview | None) -> None:
    crc = 0
    for start in range(0, tensor.size_bytes, PIECE_BYTES):
        length = min(PIECE_BYTES, tensor.size_bytes - start)
        piece = file.pread(length, tensor.offset + start)
        if len(piece) != length:
            raise DataCorruption(f"{path} ends within tensor {tensor.name!r}")
        crc = crc32c(piece, crc)
        if place is not None:
            place[start : start + length] = piece
    if crc != tensor.crc32c:
        raise DataCorruption(f"tensor {tensor.name!r} in {path} does not match its checksum")


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
