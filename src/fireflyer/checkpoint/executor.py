"""Performs the effects of a save on a disk: the one sequence of operations, for the real disk and the simulated one.

Everything here is a generator that yields between two operations. The real shell runs it to its end in a background
thread and stops at the next yield when the save is given up; the simulation lets other ranks run in between, and kills
the rank at every operation in turn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

import msgspec

from fireflyer.base.errors import (
    Aborted,
    DataCorruption,
    FireflyerError,
    NotFound,
    UsageError,
    error_to_wire,
)
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
from fireflyer.checkpoint.core.fence import fenced, overtaken_by, parse_writer
from fireflyer.checkpoint.core.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    ShardRecord,
    TensorRecord,
    decode_manifest,
)
from fireflyer.checkpoint.core.names import MANIFEST_FILE, Candidate, final_name, trash_name
from fireflyer.checkpoint.core.safetensors import PlacedTensor, build_header
from fireflyer.native import crc32c

__all__ = [
    "PIECE_BYTES",
    "RunningSums",
    "Share",
    "Steps",
    "commit",
    "discard",
    "explain_failure",
    "perform",
    "read_file",
    "read_manifest",
    "remove_tree",
    "run_steps",
    "write_file",
    "write_shard",
]

PIECE_BYTES = 8 * MIB
"""One write. Also the most that is read, or copied, at once."""

T = TypeVar("T")
Steps = Generator[None, None, T]


def run_steps(steps: Steps[T], stopped: Callable[[], bool] = lambda: False) -> T:
    """Runs to the end. Raises `Aborted` between two operations when `stopped` says so."""
    while True:
        if stopped():
            steps.close()
            raise Aborted("the save was given up because a newer one began")
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


class Share(msgspec.Struct, frozen=True):
    """What one rank writes: the data section of its shard, as one contiguous buffer of bytes."""

    rank: int
    step: int
    layout: int
    placed: Sequence[PlacedTensor]
    data: memoryview


class RunningSums:
    """CRC32C of each of several ranges that lie back to back, from pieces that are cut anywhere."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._done = 0
        self.sums = [0] * len(sizes)
        self._index = 0

    def update(self, piece: memoryview) -> None:
        while len(piece):
            while self._done == self._sizes[self._index]:
                self._index, self._done = self._index + 1, 0
            part = piece[: self._sizes[self._index] - self._done]
            self.sums[self._index] = crc32c(part, self.sums[self._index])
            self._done += len(part)
            piece = piece[len(part) :]


def write_shard(disk: Disk, path: str, share: Share, *, piece_bytes: int = PIECE_BYTES) -> Steps[ShardRecord]:
    """Creates the shard file `path`; the file and its name are durable at the end. Raises what the disk raises."""
    header = build_header(share.placed, {"step": str(share.step), "rank": str(share.rank)})
    sums = RunningSums([item.spec.size_bytes for item in share.placed])
    file = disk.create(path)
    with contextlib.closing(file):
        yield
        file.pwrite(header, 0)
        for start in range(0, len(share.data), piece_bytes):
            yield
            piece = share.data[start : start + piece_bytes]
            sums.update(piece)
            file.pwrite(piece, len(header) + start)
        yield
        file.fsync()
    yield
    directory, _, name = path.rpartition("/")
    disk.sync_dir(directory)
    tensors = [
        TensorRecord(
            item.spec.name, item.spec.dtype, item.spec.shape, len(header) + item.offset, item.spec.size_bytes, crc
        )
        for item, crc in zip(share.placed, sums.sums, strict=True)
    ]
    file_bytes = len(header) + len(share.data)
    return ShardRecord(share.rank, name, file_bytes, len(header), crc32c(header), share.layout, tuple(tensors))


def write_file(disk: Disk, path: str, content: bytes) -> Steps[None]:
    with contextlib.closing(disk.create(path)) as file:
        yield
        file.pwrite(content, 0)
        yield
        file.fsync()
    yield


def commit(disk: Disk, root: str, directory: str, step: int, manifest: bytes) -> Steps[str]:
    """Writes the manifest and gives the directory its final name, which is returned and durable."""
    yield from write_file(disk, f"{root}/{directory}/{MANIFEST_FILE}", manifest)
    disk.sync_dir(f"{root}/{directory}")
    yield
    name = final_name(step, disk.list(root))
    disk.rename(f"{root}/{directory}", f"{root}/{name}")
    yield
    disk.sync_dir(root)
    return name


def discard(disk: Disk, root: str, name: str, writer_directory: str) -> Steps[None]:
    """Moves `name` (from `root`) into the writer's directory, durably, and then removes it: who writes into it finds it
    gone, and a writer that has been fenced can remove nothing. Gone already is fine."""
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
        yield
        disk.sync_dir(f"{root}/{directory}" if directory else root)
        yield
        last = trash
    yield from remove_tree(disk, f"{place}/{last}")


def remove_tree(disk: Disk, path: str) -> Steps[None]:
    """Of a symbolic link it removes the link: what somebody moved elsewhere and linked to is theirs."""
    with contextlib.suppress(NotFound):
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


def perform(
    effect: Effect, disk: Disk, root: str, share: Share | None, *, piece_bytes: int = PIECE_BYTES
) -> Steps[Event]:
    """Performs an effect that concerns the disk. Whatever goes wrong becomes a `Failed` event."""
    try:
        return (yield from _perform(effect, disk, root, share, piece_bytes))
    except Exception as error:
        return Failed(*error_to_wire(explain_failure(disk, root, _writer_directory(effect), error)))


def _writer_directory(effect: Effect) -> str:
    match effect:
        case Open(directory) | WriteShard(directory) | Commit(directory):
            return directory.rpartition("/")[0]
        case Discard(_, writer_directory):
            return writer_directory
    return ""


def _perform(effect: Effect, disk: Disk, root: str, share: Share | None, piece_bytes: int) -> Steps[Event]:
    match effect:
        case Open(directory):
            disk.mkdir(f"{root}/{directory}")
            return Done()
        case WriteShard(directory, file) if share is not None:
            record = yield from write_shard(disk, f"{root}/{directory}/{file}", share, piece_bytes=piece_bytes)
            return ShardWritten(record)
        case Commit(directory, step, manifest):
            return Committed((yield from commit(disk, root, directory, step, manifest)))
        case Listing():
            return Listed(tuple(disk.list(root)))
        case Discard(name, writer_directory):
            yield from discard(disk, root, name, writer_directory)
            return Done()
    raise UsageError(f"{type(effect).__name__} does not concern the disk")
