"""What changes a checkpoint directory: files, the commit by rename, removals. Also what reads a manifest.

One sequence of operations, for the real disk and the simulated one.
"""

from __future__ import annotations

import contextlib

from fireflyer.base.errors import DataCorruption, Exists, FireflyerError, NotFound, UsageError
from fireflyer.base.ports import Disk, DiskFile
from fireflyer.checkpoint.core.fence import fenced, overtaken_by, parse_writer
from fireflyer.checkpoint.core.manifest import MAX_MANIFEST_BYTES, Manifest, decode_manifest
from fireflyer.checkpoint.core.names import (
    MANIFEST_FILE,
    Candidate,
    final_name,
    parse_final,
    pin_name,
    trash_name,
)
from fireflyer.checkpoint.engine.steps import Steps

__all__ = [
    "OpenFiles",
    "commit",
    "discard",
    "ensure_directory",
    "explain_failure",
    "read_file",
    "read_manifest",
    "remove_tree",
    "sync_names",
    "write_file",
]


def ensure_directory(disk: Disk, path: str) -> Steps[None]:
    """Makes `path` and what is missing above it, durably. What is there already may have been made by a process that
    died before it could sync, so it is synced again, as far as we may."""
    if path in ("", "/"):
        return
    parent = path.rpartition("/")[0] or "/"
    yield from ensure_directory(disk, parent)
    made = not disk.is_dir(path)
    if made:
        with contextlib.suppress(Exists):
            disk.mkdir(path)
        yield
    with contextlib.nullcontext() if made else contextlib.suppress(FireflyerError):
        disk.sync_dir(parent)
    yield


def sync_names(disk: Disk, directory: str) -> Steps[None]:
    """What was created, renamed or removed in `directory` is durable at the end. One operation, or none where names
    are durable anyway: who has lost the directory meanwhile hears of it from the next operation there."""
    if not disk.durable_names:
        yield
        disk.sync_dir(directory)


def write_file(disk: Disk, path: str, content: bytes) -> Steps[None]:
    with contextlib.closing(disk.create(path)) as file:
        yield
        file.pwrite(content, 0)
        yield
        file.fsync()
    yield


class OpenFiles:
    """What a rank that is alone keeps open from one effect of its save to the next, so that what can be done at once
    is: the manifest is created with the shard, and both are synced together. Without, each of these is a round trip and
    a transaction of its own on 3FS. Not where other ranks write too: while rank 0 waited for them a session could end
    and take the open manifest with it, and fail a save whose shards are all durable."""

    def __init__(self) -> None:
        self.manifest: DiskFile | None = None
        self.shard: DiskFile | None = None
        """Written, and not synced."""

    def all(self) -> list[DiskFile]:
        return [file for file in (self.shard, self.manifest) if file is not None]

    def close(self) -> None:
        """Idempotent. What was not synced is not wanted any more."""
        files, self.shard, self.manifest = self.all(), None, None
        for file in files:
            with contextlib.suppress(FireflyerError):
                file.close()


def commit(
    disk: Disk,
    root: str,
    directory: str,
    step: int,
    manifest: bytes,
    *,
    first: bool = False,
    files: OpenFiles | None = None,
) -> Steps[str]:
    """Writes the manifest and gives the directory its final name, which is returned and durable. `first`: no checkpoint
    of this step, or of a later one, was there when this attempt began, nor has it committed one; so nobody has to look
    which names are taken."""
    if files is None or files.manifest is None:
        yield from write_file(disk, f"{root}/{directory}/{MANIFEST_FILE}", manifest)
    else:
        with contextlib.closing(files):
            files.manifest.pwrite(manifest, 0)
            yield
            disk.sync_files(files.all())
        yield
    yield from sync_names(disk, f"{root}/{directory}")
    yield
    name = final_name(step, [] if first else disk.list(root))
    try:
        disk.rename(f"{root}/{directory}", f"{root}/{name}")
    except Exists:
        if not first:
            raise
        name = final_name(step, disk.list(root))  # somebody has copied one there
        disk.rename(f"{root}/{directory}", f"{root}/{name}")
    yield from sync_names(disk, root)
    return name


def discard(disk: Disk, root: str, name: str, writer_directory: str) -> Steps[None]:
    """Moves `name` (from `root`) into the writer's directory, durably, and then removes it: who writes into it finds it
    gone, and a writer that has been fenced can remove nothing. Gone already is fine. A checkpoint that somebody has
    pinned since `root` was listed gets its name back: who pins writes the marker first, and looks then."""
    directory, _, last = name.rpartition("/")
    place = f"{root}/{writer_directory}"
    if directory != writer_directory or not last.startswith(".trash-"):
        trash = trash_name(last, disk.list(place))
        try:
            disk.rename(f"{root}/{name}", f"{place}/{trash}")
        except NotFound:
            if writer_directory and not disk.is_dir(place):
                raise
            return
        if parse_final(name) is not None and disk.exists(f"{root}/{pin_name(name)}"):
            disk.rename(f"{place}/{trash}", f"{root}/{name}")
            yield from sync_names(disk, root)
            return
        yield from sync_names(disk, f"{root}/{directory}" if directory else root)
        yield
        last = trash
    yield from remove_tree(disk, f"{place}/{last}")


def remove_tree(disk: Disk, path: str) -> Steps[None]:
    """Of a symbolic link it removes the link: what somebody moved elsewhere and linked to is theirs."""
    with contextlib.suppress(NotFound):
        if disk.remove_tree(path):
            return
        with contextlib.suppress(UsageError):  # it is a directory
            disk.remove(path)
            return
        for name in disk.list(path):
            yield from remove_tree(disk, f"{path}/{name}")
            yield
        disk.rmdir(path)


def read_manifest(disk: Disk, root: str, candidate: Candidate) -> Manifest:
    """Raises `DataCorruption`, and what the disk raises."""
    path = f"{root}/{candidate.name}/{MANIFEST_FILE}"
    manifest = decode_manifest(read_file(disk, path), path)
    if manifest.step != candidate.step:
        raise DataCorruption(f"{path} is of step {manifest.step}")
    return manifest


def read_file(disk: Disk, path: str) -> bytes:
    with contextlib.closing(disk.open(path)) as file:
        size = file.size()
        if size > MAX_MANIFEST_BYTES:
            raise DataCorruption(f"{path} has {size} bytes, above {MAX_MANIFEST_BYTES}")
        return file.pread(size, 0)


def explain_failure(disk: Disk, root: str, writer_directory: str, error: Exception) -> Exception:
    """`Fenced`, where `error` comes of a newer attempt that has emptied the writer's directory, and will remove it or
    has; else `error`."""
    writer = parse_writer(writer_directory)
    if writer is None:
        return error
    try:
        newer = overtaken_by(disk.list(root), writer)
        if newer is None or not (isinstance(error, NotFound) or not disk.is_dir(f"{root}/{writer_directory}")):
            return error
    except FireflyerError:
        return error
    return fenced(root, f"attempt {writer.attempt}", newer)
