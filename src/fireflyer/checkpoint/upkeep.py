"""What people do with checkpoints: keep one, remove one, find out what is wrong with one."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import NamedTuple

from fireflyer.base.errors import Exists, FireflyerError, NotFound, PermissionDenied, TransientError, UsageError
from fireflyer.base.ports import Disk
from fireflyer.checkpoint.core.names import MANIFEST_FILE, candidates, is_pinned, parse_final, pin_name, trash_name
from fireflyer.checkpoint.engine.directory import remove_tree, write_file
from fireflyer.checkpoint.engine.loading import wrong_tensors
from fireflyer.checkpoint.engine.steps import run_steps
from fireflyer.checkpoint.reader import look, open_checkpoint
from fireflyer.checkpoint.storage import CheckpointPath, open_storage

__all__ = ["damages", "pin", "remove", "unpin"]


class _Located(NamedTuple):
    disk: Disk
    root: str
    """The directory of checkpoints."""
    name: str
    shown: str
    """The path for people."""


def _locate(path: CheckpointPath, disk: Disk | None) -> _Located:
    """The checkpoint that `path` names, whole or damaged. Raises `NotFound`, and `UsageError` for another directory."""
    disk, where, shown = open_storage(path, disk=disk)
    root, _, name = where.rpartition("/")
    if not disk.is_dir(where):
        raise NotFound(f"{shown} is no directory; give a checkpoint, as checkpoints/step-00000100")
    if parse_final(name) is None and not disk.exists(f"{where}/{MANIFEST_FILE}"):
        raise UsageError(f"{shown} is no checkpoint; give one of those in it, as {shown}/step-00000100")
    return _Located(disk, root or "/", name, shown)


@contextlib.contextmanager
def _permitted(shown: str, done: str) -> Iterator[None]:
    """Who may not write is told what was not done, and not which name beside the checkpoint could not be made."""
    try:
        yield
    except PermissionDenied as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EROFS:
            raise PermissionDenied(f"{shown} is not {done}: the file system is read-only") from None
        above = shown.rpartition("/")[0]
        raise PermissionDenied(
            f"{shown} is not {done}: permission denied; that needs the right to write in {above}"
        ) from None


def pin(path: CheckpointPath, disk: Disk | None = None) -> bool:
    """From now on no job and no `remove` removes the checkpoint, durably. Returns whether it was not pinned before.
    Raises `NotFound`, also where a job removes it at this moment."""
    disk, root, name, shown = _locate(path, disk)
    marker = f"{root}/{pin_name(name)}"
    try:
        with _permitted(shown, "pinned"):
            run_steps(write_file(disk, marker, b""))
    except Exists:
        disk.sync_dir(root)  # who made it may have died before it could
        return False
    disk.sync_dir(root)
    if not disk.is_dir(f"{root}/{name}"):
        with contextlib.suppress(NotFound):
            disk.remove(marker)
        raise NotFound(f"{shown} was removed by the job that saves there")
    return True


def unpin(path: CheckpointPath, disk: Disk | None = None) -> bool:
    """It may be removed again, durably. Returns whether it was pinned."""
    disk, root, name, shown = _locate(path, disk)
    try:
        with _permitted(shown, "unpinned"):
            disk.remove(f"{root}/{pin_name(name)}")
    except NotFound:
        disk.sync_dir(root)  # as in `pin`
        return False
    disk.sync_dir(root)
    return True


def remove(path: CheckpointPath, *, force: bool = False, disk: Disk | None = None) -> None:
    """Removes a checkpoint. Raises `UsageError` for a pinned one, and without `force` for one that is whole where no
    other is: others are read until one is found, newest first. Raises `TransientError` and `PermissionDenied` where
    that cannot be found out, and `PermissionDenied` where it may not be removed; then it is as it was."""
    disk, root, name, shown = _locate(path, disk)
    names = disk.list(root)
    if is_pinned(name, names):
        raise _pinned(shown)
    if not force and _is_last(disk, root, name, names):
        raise UsageError(f"{shown} is the last whole checkpoint there; give --force to remove it all the same")
    trash = trash_name(name, names)
    with _permitted(shown, "removed"):
        disk.rename(f"{root}/{name}", f"{root}/{trash}")
    disk.sync_dir(root)
    if disk.exists(f"{root}/{pin_name(name)}"):  # who pins looks after its marker is there whether the checkpoint is
        disk.rename(f"{root}/{trash}", f"{root}/{name}")
        disk.sync_dir(root)
        raise _pinned(shown)
    try:
        run_steps(remove_tree(disk, f"{root}/{trash}"))
    except PermissionDenied:  # its directory is another user's: the first file was refused, so all are there
        disk.rename(f"{root}/{trash}", f"{root}/{name}")
        disk.sync_dir(root)
        raise PermissionDenied(
            f"{shown} is not removed: permission denied; that needs the right to write in it, too"
        ) from None


def _pinned(shown: str) -> UsageError:
    return UsageError(f"{shown} is pinned; run `ff ckpt unpin {shown}` first")


def _is_last(disk: Disk, root: str, name: str, names: list[str]) -> bool:
    """Whether it is whole, and no other that a restore would take is."""
    others = [candidate.name for candidate in candidates(names) if candidate.name != name]
    denied = ""
    for other in others:
        found = look(disk, root, other, names, deep=True)
        if found.problem is None:
            return False
        denied = found.problem if found.denied else denied
    found = look(disk, root, name, names, deep=True)
    if found.problem is not None and not found.denied:
        return False
    if found.denied or denied:
        why = found.problem or denied
        raise PermissionDenied(
            f"{why}; nobody can tell whether it is the last whole checkpoint there (--force removes it)"
        )
    return True


def damages(disk: Disk, root: str, name: str) -> Iterator[str]:
    """Reads every byte. Everything that is wrong, by file and tensor. Raises `TransientError`, `PermissionDenied`."""
    try:
        manifest = open_checkpoint(f"{root}/{name}", disk).manifest
    except (TransientError, PermissionDenied):
        raise
    except FireflyerError as error:
        yield error.message
        return
    for shard in manifest.shards:
        try:
            yield from wrong_tensors(disk, root, name, shard)
        except (TransientError, PermissionDenied):
            raise
        except FireflyerError as error:  # of the file: its length, its header
            yield error.message
