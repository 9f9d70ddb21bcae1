"""A directory that is filled under a temporary name and then gets its own, for saves that no `SaveMachine` makes."""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterator
from typing import Final

from fireflyer.base.errors import Busy, Exists, FireflyerError, PermissionDenied, UsageError
from fireflyer.base.ports import Disk, DiskLock, Held
from fireflyer.checkpoint.core.manifest import Manifest, decode_manifest, encode_manifest
from fireflyer.checkpoint.core.names import MANIFEST_FILE, is_temporary, parse_final
from fireflyer.checkpoint.engine.directory import ensure_directory, remove_tree, write_file
from fireflyer.checkpoint.engine.steps import run_steps

__all__ = ["abandoned", "begin", "commit", "commit_manifest", "filling", "temporary_names"]

_FILLED: Final = re.compile(r"\.tmp-(.+)-[0-9a-f]{16}(-locked)?")
_LOCKED: Final = "-locked"
"""Ends the name of what one process fills, which holds a lock meanwhile. Ranks of DCP fill without one."""


def temporary_names(disk: Disk, parent: str, name: str) -> list[str]:
    """Of what is being filled, or was left, to become `parent`/`name`."""
    prefix = _prefix(name)
    found = [each for each in disk.list(parent) if each.startswith(prefix)]
    return [each for each in found if re.fullmatch("[0-9a-f]{16}(-locked)?", each.removeprefix(prefix))]


def begin(disk: Disk, parent: str, name: str, tag: str) -> str:
    """Makes the directory to fill, after removing what earlier ones left; returns its name in `parent`. `tag`: 16
    hexadecimal digits. Raises `UsageError` where `name` exists, `Busy` where another process is `filling` it."""
    with _owning(disk, parent, name) as alone:
        return _make(disk, parent, name, tag, temporary_names(disk, parent, name) if alone else [])


@contextlib.contextmanager
def filling(disk: Disk, parent: str, name: str) -> Iterator[str]:
    """As `begin`, for one process, which is alone with it until the end. What an error leaves is removed: on a full
    disk it would take the space that is needed to try again. What was filled without the lock may be filled still, by
    ranks of DCP, and stays."""
    with _owning(disk, parent, name) as alone:
        found = temporary_names(disk, parent, name) if alone else []
        left = [each for each in found if each.endswith(_LOCKED)]
        temporary = _make(disk, parent, name, secrets.token_hex(8) + (_LOCKED if alone else ""), left)
        try:
            yield temporary
        except BaseException:
            with contextlib.suppress(FireflyerError):
                run_steps(remove_tree(disk, f"{parent}/{temporary}"))
            raise


@contextlib.contextmanager
def _owning(disk: Disk, parent: str, name: str) -> Iterator[bool]:
    """Holds the lock of `name`. False: nobody can tell whether there are others."""
    if disk.exists(f"{parent}/{name}"):
        raise _exists(disk, parent, name)
    run_steps(ensure_directory(disk, parent))
    try:
        lock = disk.hold(f"{parent}/{_lock_name(name)}")
    except Held:
        raise Busy(
            f"another process is writing {disk.shown(f'{parent}/{name}')}; wait for it, or choose another directory"
        ) from None
    with _released(lock):
        yield lock is not None


@contextlib.contextmanager
def _released(lock: DiskLock | None) -> Iterator[None]:
    """In the end. Who cannot release it loses it with the process, or with the session on 3FS."""
    try:
        yield
    finally:
        if lock is not None:
            with contextlib.suppress(FireflyerError):
                lock.release()


@contextlib.contextmanager
def abandoned(disk: Disk, parent: str, name: str) -> Iterator[bool]:
    """Whether `name` in `parent` is a checkpoint that nobody fills any more, as nobody begins to before the end, or
    nothing that is filled here. False where it cannot be known, as of what ranks of DCP fill, and for what is to become
    no checkpoint: who fills that again removes it."""
    found = _FILLED.fullmatch(name)
    if found is None or is_temporary(name):
        yield True
        return
    if parse_final(found[1]) is None or not found[2]:
        yield False
        return
    try:
        lock = disk.hold(f"{parent}/{_lock_name(found[1])}", wait=False)
    except Held:
        lock = None
    with _released(lock):
        yield lock is not None


def _make(disk: Disk, parent: str, name: str, tag: str, left: list[str]) -> str:
    if disk.exists(f"{parent}/{name}"):  # who was waited for has made it
        raise _exists(disk, parent, name)
    for each in left:
        with contextlib.suppress(PermissionDenied):  # another user's: it takes space, and is in nobody's way
            run_steps(remove_tree(disk, f"{parent}/{each}"))
    temporary = f"{_prefix(name)}{tag}"
    disk.mkdir(f"{parent}/{temporary}")
    return temporary


def commit_manifest(disk: Disk, parent: str, name: str, temporary: str, manifest: Manifest) -> None:
    """Writes the manifest, and gives the directory its name. Raises as `commit`, and what a manifest that cannot be
    read again raises."""
    data = encode_manifest(manifest)
    decode_manifest(data)
    run_steps(write_file(disk, f"{parent}/{temporary}/{MANIFEST_FILE}", data))
    commit(disk, parent, name, temporary)


def commit(disk: Disk, parent: str, name: str, temporary: str) -> None:
    """Gives a directory, whose files are durable, its name: durable when this returns."""
    disk.sync_dir(f"{parent}/{temporary}")
    try:
        disk.rename(f"{parent}/{temporary}", f"{parent}/{name}")
    except Exists:
        raise _exists(disk, parent, name) from None
    disk.sync_dir(parent)


def _prefix(name: str) -> str:
    return f".tmp-{name}-"


def _lock_name(name: str) -> str:
    return f".lock-{name}"


def _exists(disk: Disk, parent: str, name: str) -> UsageError:
    return UsageError(f"{disk.shown(f'{parent}/{name}')} exists already; give another path")
