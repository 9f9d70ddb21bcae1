"""A target's directory: which target it is, and whether it has everything that was acknowledged.

    DIRECTORY/target.json     cluster and number, written once: a directory without it is no target
    DIRECTORY/run.json        of the last process: the boot of its machine, and what it left behind
    DIRECTORY/chain.json      which chain it last served, in which version, and beside whom (`chain.served_notes`)
    DIRECTORY/chunks/         the engine's
    DIRECTORY/chunks.damaged/ what an engine refused to open; kept once, for people

A target is *clean*, that is: has everything that it acknowledged, unless

- it is new: a directory that was removed and made again must not pass for the old one (who is given a new chain serves,
  and is clean from then on);
- its last process did not wait for the disk, ended without saying that it had flushed, and its machine has been booted
  since (the page cache outlives a process, not a kernel);
- its last process did not wait for the disk, and was told by it of a failure: what was acknowledged may be gone;
- or its chunks are gone or were put aside: then it begins with nothing, and is synced;
- or it was not clean before, and has not been synced or given the chain since.

All of it is read and written by who holds the lock of `chunks`.
"""

from __future__ import annotations

import os
from typing import Annotated, Final

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, json_decoder
from fireflyer.base.errors import DataCorruption, Exists, NotFound, PermissionDenied, UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.units import KIB
from fireflyer.fs.core.chain.served_notes import ServedNote
from fireflyer.fs.schema.ids import TargetId
from fireflyer.identity.private_files import read_private_file, write_private_file

__all__ = ["TargetDirectory", "make_target"]

_IDENTITY: Final = "target.json"
_RUN: Final = "run.json"
_CHAIN: Final = "chain.json"
_CHUNKS: Final = "chunks"
_DAMAGED: Final = "chunks.damaged"
_MAX_BYTES: Final = 4 * KIB
_ROOT: Final = "/"


class _Identity(msgspec.Struct, frozen=True):
    version: int
    cluster: Annotated[str, msgspec.Meta(max_length=128)]
    target: TargetId


class _Run(msgspec.Struct, frozen=True):
    boot: str
    durable: bool
    clean: bool = msgspec.field(name="sure")
    flushed: bool
    """It ended in order: all that it had is on the disk."""


_VERSION: Final = 1
_identity_decoder = json_decoder(_Identity)
_run_decoder = json_decoder(_Run)
_note_decoder = json_decoder(ServedNote)


def make_target(directory: str, cluster: str, target: TargetId, *, root_disk: bool = True) -> None:
    """Makes a directory the target's: it must be empty, or not there. Repeating it changes nothing. Raises `Exists` for
    a directory that has something else, and without `root_disk` `UsageError` for one that would be new in the file
    system of `/`: where a disk is not mounted, its mount point is there."""
    if not root_disk and not os.path.exists(os.path.join(directory, _IDENTITY)) and _is_on_root_disk(directory):
        raise UsageError(
            f"{directory} is in the file system of {_ROOT}, so target {target} is not made there: mount its disk "
            "first, or write root_disk = true in the configuration of storage if it shall be there"
        )
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        names = os.listdir(directory)
    except OSError as error:
        raise translate_os_error(error, f"make target directory {directory}") from error
    wanted = _Identity(_VERSION, cluster, target)
    if _IDENTITY in names:
        found = _read_identity(directory)
        if found != wanted:
            raise Exists(f"{directory} is target {found.target} of cluster {found.cluster!r}; choose another directory")
        return
    others = [one for one in names if one != "lost+found"]
    if others:
        raise Exists(f"{directory} is not empty (it has {min(others)!r}); a target needs an empty directory")
    write_private_file(os.path.join(directory, _IDENTITY), msgspec.json.encode(wanted))


def _is_on_root_disk(directory: str) -> bool:
    """Where it is, or would be made."""
    above = os.path.abspath(directory)
    while not os.path.exists(above):
        above = os.path.dirname(above)
    try:
        return os.stat(above).st_dev == os.stat(_ROOT).st_dev
    except OSError as error:
        raise translate_os_error(error, f"find the disk of {directory}") from error


class TargetDirectory:
    """`prepare`, then the engine opens `chunks`, then `begin`; `end` when the engine has closed in order."""

    def __init__(self, directory: str, cluster: str, target: TargetId, boot: str) -> None:
        self.path = os.path.abspath(directory)
        self.chunks = os.path.join(self.path, _CHUNKS)
        self.clean = False
        self._failed = False
        self._cluster, self._target, self._boot = cluster, target, boot
        self._durable = True
        self._lost = True
        """There are no chunks: none were made, or somebody has removed them."""
        self._place: tuple[int, int] | None = None
        """Which directory the engine has open, whatever is at its path later."""

    def prepare(self) -> None:
        """Raises `NotFound` where this is no target's directory, `PermissionDenied` where it is another one's."""
        self.check()
        try:
            os.makedirs(self.chunks, mode=0o700, exist_ok=True)
            self._lost = not os.listdir(self.chunks)
        except OSError as error:
            raise translate_os_error(error, f"make {self.chunks}") from error

    def check(self) -> None:
        """Whether it is still there, and still this target's; after `begin` also whether its chunks are those that the
        engine has open."""
        found = _read_identity(self.path)
        if (found.cluster, found.target) != (self._cluster, self._target):
            raise PermissionDenied(
                f"{self.path} is target {found.target} of cluster {found.cluster!r}, not {self._target} of "
                f"{self._cluster!r}; correct the configuration"
            )
        if self._place is not None and (_place_of(self.chunks) != self._place or _is_empty(self.chunks)):
            raise NotFound(f"{self.chunks} was removed or replaced while the target was open")

    def put_aside(self) -> None:
        """The engine refuses to open its chunks: it shall begin anew, and be synced. Raises `Exists` if that has
        happened before and nobody has looked."""
        damaged = os.path.join(self.path, _DAMAGED)
        if os.path.exists(damaged):
            raise Exists(f"{damaged} exists from an earlier failure; move it away or remove it first")
        try:
            os.rename(self.chunks, damaged)
            os.mkdir(self.chunks, 0o700)
        except OSError as error:
            raise translate_os_error(error, f"rename {self.chunks}") from error
        self._lost = True

    def begin(self, *, durable: bool) -> None:
        """The engine is open. Sets `clean`."""
        before = self._read()
        self._durable = durable
        if before is not None and not before.durable and not before.flushed:
            self._sync_chunks()  # what the page cache still has of it is shown from now on
        kept = before is not None and before.clean and (before.durable or before.flushed or before.boot == self._boot)
        self.clean = kept and not self._lost
        self._place = _place_of(self.chunks)
        self._write(_Run(self._boot, durable, self.clean, False))

    def noted(self) -> ServedNote | None:
        """What `note` has written last; None for nothing, for what cannot be read, and where its chunks are gone."""
        try:
            found = _note_decoder.decode(read_private_file(os.path.join(self.path, _CHAIN), _MAX_BYTES))
        except (NotFound, *DECODE_ERRORS):
            return None
        return None if self._lost else found

    def note(self, note: ServedNote) -> None:
        """Durable when it returns."""
        write_private_file(os.path.join(self.path, _CHAIN), msgspec.json.encode(note))

    def mark_clean(self) -> None:
        """It was synced, or serves."""
        if not self.clean and not self._failed:
            self._write(_Run(self._boot, self._durable, True, False))
            self.clean = True

    def failed(self) -> None:
        """The disk refused something: what was acknowledged without waiting for it may be lost."""
        if not self._durable:
            self._failed, self.clean = True, False
            self._write(_Run(self._boot, self._durable, False, False))

    def end(self) -> None:
        """The engine has closed, and has written all that it had."""
        if not self._durable:
            self._sync_chunks()
        self._write(_Run(self._boot, self._durable, self.clean, True))

    def _sync_chunks(self) -> None:
        """The engine did not wait for the disk. Raises what the disk says."""
        try:
            for name in os.listdir(self.chunks):
                fd = os.open(os.path.join(self.chunks, name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)
            fd = os.open(self.chunks, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise translate_os_error(error, f"sync {self.chunks}") from error

    def _read(self) -> _Run | None:
        try:
            return _run_decoder.decode(read_private_file(os.path.join(self.path, _RUN), _MAX_BYTES))
        except NotFound:
            return None
        except DECODE_ERRORS:
            return _Run("", False, False, False)

    def _write(self, run: _Run) -> None:
        write_private_file(os.path.join(self.path, _RUN), msgspec.json.encode(run))


def _place_of(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError as error:
        raise translate_os_error(error, f"read {path}") from error
    return found.st_dev, found.st_ino


def _is_empty(path: str) -> bool:
    try:
        with os.scandir(path) as names:
            return next(names, None) is None
    except OSError as error:
        raise translate_os_error(error, f"list {path}") from error


def _read_identity(directory: str) -> _Identity:
    path = os.path.join(directory, _IDENTITY)
    try:
        found = _identity_decoder.decode(read_private_file(path, _MAX_BYTES))
    except NotFound:
        raise NotFound(
            f"{directory} is not a target directory ({_IDENTITY} is missing); was the disk mounted? "
            "'ff fs storage --make-targets' makes new ones"
        ) from None
    except DECODE_ERRORS as error:
        raise DataCorruption(f"{path} is damaged ({error}); make a new target in another directory") from None
    if found.version != _VERSION:
        raise DataCorruption(f"{path} has version {found.version}, this release reads {_VERSION}; upgrade")
    return found
