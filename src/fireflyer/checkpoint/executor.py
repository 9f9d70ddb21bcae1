"""Performs the effects of a save on a disk: the one sequence of operations, for the real disk and the simulated one.

Everything here is a generator that yields between two operations. The real shell runs it to its end in a background
thread and stops at the next yield when the save is given up; the simulation lets other ranks run in between, and kills
the rank at every operation in turn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from fireflyer.base.errors import (
    Aborted,
    DataCorruption,
    Exists,
    FireflyerError,
    NoSpace,
    NotFound,
    PermanentError,
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
from fireflyer.checkpoint.core.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    ShardRecord,
    TensorRecord,
    check_plain,
    decode_job_plan,
    decode_manifest,
    encode_job_plan,
)
from fireflyer.checkpoint.core.names import JOB_FILE, MANIFEST_FILE, Candidate, candidates, final_name, trash_name
from fireflyer.checkpoint.core.retention import leftovers
from fireflyer.checkpoint.core.safetensors import PlacedTensor, build_header
from fireflyer.native import crc32c

__all__ = [
    "PIECE_BYTES",
    "RunningSums",
    "Share",
    "commit",
    "discard",
    "ensure_directory",
    "open_root",
    "perform",
    "read_manifest",
    "run_steps",
    "stored_plan",
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


def _write_file(disk: Disk, path: str, content: bytes) -> Steps[None]:
    with contextlib.closing(disk.create(path)) as file:
        yield
        file.pwrite(content, 0)
        yield
        file.fsync()
    yield


def commit(disk: Disk, root: str, directory: str, step: int, manifest: bytes) -> Steps[str]:
    """Writes the manifest and gives the directory its final name, which is returned and durable."""
    yield from _write_file(disk, f"{root}/{directory}/{MANIFEST_FILE}", manifest)
    disk.sync_dir(f"{root}/{directory}")
    yield
    name = final_name(step, disk.list(root))
    disk.rename(f"{root}/{directory}", f"{root}/{name}")
    yield
    disk.sync_dir(root)
    return name


def discard(disk: Disk, root: str, name: str) -> Steps[None]:
    """Moves `name` aside, durably, and then removes it; whoever writes into it finds it gone. Gone already is fine."""
    if not name.startswith(".trash-"):
        trash = trash_name(name, disk.list(root))
        try:
            disk.rename(f"{root}/{name}", f"{root}/{trash}")
        except NotFound:
            return
        yield
        disk.sync_dir(root)
        yield
        name = trash
    yield from _remove_tree(disk, f"{root}/{name}")


def _remove_tree(disk: Disk, path: str) -> Steps[None]:
    """Of a symbolic link it removes the link: what somebody moved elsewhere and linked to is theirs."""
    with contextlib.suppress(NotFound):
        with contextlib.suppress(UsageError):  # it is a directory
            disk.remove(path)
            return
        for name in disk.list(path):
            yield from _remove_tree(disk, f"{path}/{name}")
            yield
        disk.rmdir(path)


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


def read_manifest(disk: Disk, root: str, candidate: Candidate) -> Manifest:
    """Raises `DataCorruption`, and what the disk raises."""
    path = f"{root}/{candidate.name}/{MANIFEST_FILE}"
    manifest = decode_manifest(_read_file(disk, path), path)
    if manifest.step != candidate.step:
        raise DataCorruption(f"{path} is of step {manifest.step}")
    return manifest


def _read_file(disk: Disk, path: str) -> bytes:
    with contextlib.closing(disk.open(path)) as file:
        size = file.size()
        if size > MAX_MANIFEST_BYTES:
            raise DataCorruption(f"{path} has {size} bytes, above {MAX_MANIFEST_BYTES}")
        return file.pread(size, 0)


def stored_plan(disk: Disk, root: str) -> dict[str, Any] | None:
    """The job's plan: from `job.json`, or when that is damaged or gone from the newest manifest that has one. None when
    no job was started here. Raises `DataCorruption` when it is damaged and no manifest has it."""
    path = f"{root}/{JOB_FILE}"
    damage: DataCorruption | None = None
    try:
        return decode_job_plan(_read_file(disk, path), path)
    except DataCorruption as error:
        damage = error
    except NotFound:
        pass
    for candidate in candidates(disk.list(root)) if disk.is_dir(root) else []:
        with contextlib.suppress(DataCorruption, PermanentError):
            manifest = read_manifest(disk, root, candidate)
            if manifest.job_plan is not None:
                return manifest.job_plan
    if damage is not None:
        raise DataCorruption(f"{damage.message}; restore it from a copy, or remove it to start with another job_plan")
    return None


def open_root(disk: Disk, root: str, job_plan: Mapping[str, Any] | None, *, will_save: bool = True) -> Steps[list[str]]:
    """What rank 0 does before anything else: makes the directory, removes what dead attempts left, makes sure that it
    can be written if the job is going to save, and stores the job's plan, or holds the given one to the stored one
    (`UsageError`). Returns what needs attention: what could not be removed, and why; that there is no space."""
    yield from ensure_directory(disk, root)
    notes: list[str] = []
    # A dead process may have moved something aside without syncing that: it must stick before anything is removed.
    disk.sync_dir(root)
    yield
    for name in leftovers(disk.list(root)):
        try:
            yield from discard(disk, root, name)
        except FireflyerError as error:
            notes.append(error.message)
    if will_save:  # the time to hear that a directory cannot be written is hours before the first save
        trial = f"{root}/.tmp-trial"
        try:
            yield from _write_file(disk, trial, b"trial")
            disk.remove(trial)
        except NoSpace as error:  # there may be some when the first save is due: the job may start
            notes.append(error.message)
        yield
    if job_plan is None:
        return notes
    plan = check_plain(job_plan, "job_plan")
    stored = stored_plan(disk, root)
    if stored is None:
        temporary = f"{root}/.tmp-{JOB_FILE}"
        yield from _write_file(disk, temporary, encode_job_plan(plan))
        disk.rename(temporary, f"{root}/{JOB_FILE}")
        yield
        disk.sync_dir(root)
    elif stored != plan:
        raise UsageError(
            f"{root} belongs to a job with another job_plan: {_difference(stored, plan)}; "
            "resume with the same settings, or use another directory"
        )
    return notes


def _difference(stored: dict[str, Any], given: dict[str, Any]) -> str:
    for key in sorted({**stored, **given}):
        if stored.get(key) != given.get(key):
            return f"{key} was {str(stored.get(key))[:100]!r}, now it is {str(given.get(key))[:100]!r}"
    return "the job plans differ"


def perform(
    effect: Effect, disk: Disk, root: str, share: Share | None, *, piece_bytes: int = PIECE_BYTES
) -> Steps[Event]:
    """Performs an effect that concerns the disk. Whatever goes wrong becomes a `Failed` event."""
    try:
        return (yield from _perform(effect, disk, root, share, piece_bytes))
    except Exception as error:
        return Failed(*error_to_wire(error))


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
        case Discard(name):
            yield from discard(disk, root, name)
            return Done()
    raise UsageError(f"{type(effect).__name__} does not concern the disk")
