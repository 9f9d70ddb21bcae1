"""What rank 0 does to a checkpoint directory before anything else: makes it, fences older attempts, tidies up.

Generators as in `engine.directory`, so that the simulation crashes them and lets other attempts run in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec

from fireflyer.base.errors import (
    Busy,
    DataCorruption,
    Exists,
    FireflyerError,
    NoSpace,
    NotFound,
    PermanentError,
    PermissionDenied,
    UsageError,
)
from fireflyer.base.ports import Disk
from fireflyer.checkpoint.core.fence import Writer, check_start, next_writer, overtaken_by, smaller
from fireflyer.checkpoint.core.manifest import decode_job_plan, encode_job_plan
from fireflyer.checkpoint.core.names import JOB_FILE, candidates, trash_name
from fireflyer.checkpoint.core.plain import check_plain
from fireflyer.checkpoint.core.retention import leftovers
from fireflyer.checkpoint.engine.directory import (
    discard,
    ensure_directory,
    explain_failure,
    read_file,
    read_manifest,
    write_file,
)
from fireflyer.checkpoint.engine.steps import Steps
from fireflyer.checkpoint.fresh import abandoned

__all__ = ["Opened", "become_writer", "open_root", "stored_plan"]

_MAX_TRIES = 100
"""Attempts that begin at the same moment, and saves that an older one begins while it is being fenced."""


class Opened(msgspec.Struct, frozen=True):
    writer: Writer | None
    """None: the directory cannot be written now, and nobody was fenced. A save tries again."""
    notes: tuple[str, ...]
    """What needs attention: what could not be removed, and why; that there is no space."""
    newest_step: int | None = None
    """Of the checkpoints that were there when no older attempt could commit any more, -1 without any. None: nobody was
    fenced."""


def stored_plan(disk: Disk, root: str) -> dict[str, Any] | None:
    """The job's plan: from `job.json`, or when that is damaged or gone from the newest manifest that has one. None when
    no job was started here. Raises `DataCorruption` when it is damaged and no manifest has it."""
    path = f"{root}/{JOB_FILE}"
    damage: DataCorruption | None = None
    try:
        return decode_job_plan(read_file(disk, path), path)
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


def open_root(
    disk: Disk,
    root: str,
    job_plan: Mapping[str, Any] | None,
    *,
    launch: str,
    attempt: int,
    tag: str,
    will_save: bool = True,
) -> Steps[Opened]:
    """Makes the directory, becomes the one that may change it (`fence`), removes what dead attempts left, makes sure
    that it can be written if the job is going to save, and stores the job's plan, or holds the given one to the stored
    one (`UsageError`). Raises `Fenced` where a newer attempt has begun."""
    yield from ensure_directory(disk, root)
    notes: list[str] = []
    # A dead process may have moved something aside without syncing that: it must stick before anything is removed.
    disk.sync_dir(root)
    yield
    writer: Writer | None = None
    try:
        writer = yield from become_writer(disk, root, launch=launch, attempt=attempt, tag=tag)
    except NoSpace as error:  # there may be some when the first save is due: the job may start
        notes.append(error.message)
    except PermissionDenied:  # the time to hear that a directory cannot be written is hours before the first save
        if will_save:
            raise
    newest_step: int | None = None
    try:
        if writer is not None:
            newest_step = max((found.step for found in candidates(disk.list(root))), default=-1)
            notes += yield from _clear(disk, root, writer)
        if will_save and writer is not None:
            notes += yield from _try_to_write(disk, root, writer)
        if job_plan is not None:
            yield from _hold_to_plan(disk, root, check_plain(job_plan, "job_plan"), writer)
    except FireflyerError as error:
        raise explain_failure(disk, root, "" if writer is None else writer.name, error) from error
    return Opened(writer, tuple(notes), newest_step)


def become_writer(disk: Disk, root: str, *, launch: str, attempt: int, tag: str) -> Steps[Writer]:
    """The steps 1 to 4 of `fence`: when this returns, no older attempt can commit or remove anything any more."""
    for number in range(_MAX_TRIES):
        names = disk.list(root)
        check_start(names, launch=launch, attempt=attempt, root=root)
        writer = next_writer(names, launch=launch, attempt=attempt, tag=f"{tag}{number:x}" if number else tag)
        try:
            disk.mkdir(f"{root}/{writer.name}")
        except Exists:
            continue
        yield
        disk.sync_dir(root)
        yield
        try:
            overtaken = yield from _fence_smaller(disk, root, writer)
        except BaseException:
            _leave(disk, root, writer)
            raise
        if not overtaken:
            return writer
        _leave(disk, root, writer)
        yield
    raise Busy(f"{_MAX_TRIES} other attempts began in {root} at the same time; a job needs a directory of its own")


def _leave(disk: Disk, root: str, writer: Writer) -> None:
    """An attempt that does not begin. What it has moved into its directory already stays, for the next one to clear."""
    with contextlib.suppress(FireflyerError):
        disk.rmdir(f"{root}/{writer.name}")


def _fence_smaller(disk: Disk, root: str, writer: Writer) -> Steps[bool]:
    """Whether a newer writer has begun instead."""
    names = disk.list(root)
    check_start(names, launch=writer.launch, attempt=writer.attempt, root=root)
    if overtaken_by(names, writer) is not None:
        return True
    older = smaller(names, writer)
    for other in older:
        yield from _fence(disk, root, writer, other)
    if older:
        disk.sync_dir(root)
        yield
    names = disk.list(root)
    check_start(names, launch=writer.launch, attempt=writer.attempt, root=root)
    return writer.name not in names


def _fence(disk: Disk, root: str, writer: Writer, other: Writer) -> Steps[None]:
    """Empties and removes the directory of `other`: from then on nothing can be renamed out of it or into it."""
    theirs, ours = f"{root}/{other.name}", f"{root}/{writer.name}"
    for _ in range(_MAX_TRIES):
        try:
            names = disk.list(theirs)
            for name in names:
                trash = trash_name(name, disk.list(ours))
                with contextlib.suppress(NotFound):  # its owner has committed it in this moment
                    disk.rename(f"{theirs}/{name}", f"{ours}/{trash}")
                yield
            if names:
                disk.sync_dir(theirs)
                yield
            disk.rmdir(theirs)
        except NotFound:
            return  # another attempt was faster, with this directory or with ours
        except Exists:  # not empty: its owner lives, and has begun another save
            yield
            continue
        yield
        return
    raise Busy(f"{root}/{other.name} is filled faster than it can be emptied; end the job that saves there")


def _clear(disk: Disk, root: str, writer: Writer) -> Steps[list[str]]:
    """Removes what dead attempts left, and imports that nobody makes any more. Returns what could not be removed, and
    why."""
    notes: list[str] = []
    aside = [f"{writer.name}/{name}" for name in disk.list(f"{root}/{writer.name}")]
    for name in [*leftovers(disk.list(root)), *aside]:
        try:
            with abandoned(disk, root, name) as free:
                if free:
                    yield from discard(disk, root, name, writer.name)
        except FireflyerError as error:
            notes.append(error.message)
    return notes


def _try_to_write(disk: Disk, root: str, writer: Writer) -> Steps[list[str]]:
    trial = f"{root}/{writer.name}/trial"
    try:
        yield from write_file(disk, trial, b"trial")
        disk.remove(trial)
    except NoSpace as error:
        return [error.message]
    yield
    return []


def _hold_to_plan(disk: Disk, root: str, plan: dict[str, Any], writer: Writer | None) -> Steps[None]:
    stored = stored_plan(disk, root)
    if stored is None:
        temporary = f"{root}/{writer.name if writer else ''}/.tmp-{JOB_FILE}"
        yield from write_file(disk, temporary, encode_job_plan(plan))
        disk.rename(temporary, f"{root}/{JOB_FILE}")
        yield
        disk.sync_dir(root)
    elif stored != plan:
        raise UsageError(
            f"{root} belongs to a job with another job_plan: {_difference(stored, plan)}; "
            "resume with the same settings, or use another directory"
        )


def _difference(stored: dict[str, Any], given: dict[str, Any]) -> str:
    for key in sorted({**stored, **given}):
        if stored.get(key) != given.get(key):
            return f"{key} was {str(stored.get(key))[:100]!r}, now it is {str(given.get(key))[:100]!r}"
    return "the job plans differ"
