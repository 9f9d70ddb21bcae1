"""Performs the effects of a save that concern the disk."""

from __future__ import annotations

from fireflyer.base.errors import NoSpace, UsageError, error_to_wire
from fireflyer.base.ports import Disk
from fireflyer.base.units import MIB
from fireflyer.checkpoint.core.effects import (
    Commit,
    Committed,
    Discard,
    Done,
    Effect,
    Event,
    Failed,
    Listed,
    Listing,
    Open,
    ShardWritten,
    WriteShard,
)
from fireflyer.checkpoint.engine.directory import OpenFiles, commit, discard, explain_failure
from fireflyer.checkpoint.engine.image import WRITE_BYTES, Share, write_shard
from fireflyer.checkpoint.engine.steps import Steps

__all__ = ["perform"]


def perform(
    effect: Effect,
    disk: Disk,
    root: str,
    share: Share | None,
    *,
    piece_bytes: int = WRITE_BYTES,
    files: OpenFiles | None = None,
) -> Steps[Event]:
    """Performs an effect that concerns the disk. Whatever goes wrong becomes a `Failed` event. `files`: of the rank
    that commits, the same for all effects of its save; to be closed at its end."""
    try:
        return (yield from _perform(effect, disk, root, share, piece_bytes, files))
    except Exception as error:
        return Failed(*error_to_wire(explain_failure(disk, root, _writer_directory(effect), error)))


def _writer_directory(effect: Effect) -> str:
    match effect:
        case Open(directory) | WriteShard(directory) | Commit(directory):
            return directory.rpartition("/")[0]
        case Discard(_, writer_directory):
            return writer_directory
    return ""


def _perform(
    effect: Effect, disk: Disk, root: str, share: Share | None, piece_bytes: int, files: OpenFiles | None
) -> Steps[Event]:
    match effect:
        case Open(directory):
            _expect_space(disk, root, share)
            disk.mkdir(f"{root}/{directory}")
            return Done()
        case WriteShard(directory, file) if share is not None:
            path = f"{root}/{directory}/{file}"
            return ShardWritten((yield from write_shard(disk, path, share, piece_bytes=piece_bytes, files=files)))
        case Commit(directory, step, manifest, first):
            return Committed((yield from commit(disk, root, directory, step, manifest, first=first, files=files)))
        case Listing():
            return Listed(tuple(disk.list(root)))
        case Discard(name, writer_directory):
            yield from discard(disk, root, name, writer_directory)
            return Done()
    raise UsageError(f"{type(effect).__name__} does not concern the disk")


def _expect_space(disk: Disk, root: str, share: Share | None) -> None:
    """A save that cannot fit fails before it writes. What all ranks write counts: they share the directory."""
    needed_bytes = share.total_bytes if share is not None else 0
    free_bytes = disk.free_bytes(root) if needed_bytes else 0
    if free_bytes < needed_bytes:
        raise NoSpace(
            f"no space left for a checkpoint in {root}: it needs {needed_bytes / MIB:.1f} MiB, {free_bytes / MIB:.1f} "
            "MiB are free; older checkpoints stay: free some space, or give a smaller keep"
        )
