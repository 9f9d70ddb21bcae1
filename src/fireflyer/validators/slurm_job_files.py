"""Files of validations that are jobs of Slurm, in a private directory that their nodes have, too.

A file is made before its job is submitted, so a command that is killed leaves the names of its jobs. The command holds
a lock in the directory while it lives: one whose lock is free, and still there, was killed, and the next command
cancels its jobs. Locks of some shared file systems hold within one machine only, so the lock names its machine, and is
touched: seen from another one its command is dead when it has not been touched for 10 minutes as well.

`sbatch` outlives a command that is killed, and may be heard by Slurm only after the next command has looked: a name
that Slurm does not show stays, with the lock, until its file is 10 minutes old.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from fireflyer.base.os_errors import translate_os_error
from fireflyer.cluster.core.slurm.output import Phase, SlurmJob
from fireflyer.validators.core.validation.reports import MAX_REPORT_BYTES, parse_node_report

__all__ = ["JobFiles", "cancel_left_jobs", "file_text"]

_PREFIX: Final = "ff-validate-"
_LOCK: Final = "lock"
_OUTPUT: Final = re.compile(rf"({_PREFIX}[0-9a-f]{{8}})\.out")
_MAX_LEFT: Final = 1000
"""Directories that one command looks at."""
_BATCH: Final = 1000
"""Jobs that Slurm is asked for at a time."""
_SILENT_S: Final = 600.0
"""A command touches its lock at each look, every few seconds, where Slurm is slow a minute."""
_UNHEARD_S: Final = 600.0
"""`sbatch` tries again for about two minutes where slurmctld is busy."""


class Slurm(Protocol):
    """Of `SlurmCommands`."""

    async def jobs(self, names: Sequence[str]) -> tuple[SlurmJob, ...]: ...
    async def cancel(self, slurm_id: int, name: str) -> None: ...


class JobFiles:
    """Those of one command, below `outputs`. Raises `FireflyerError`."""

    def __init__(self, outputs: str) -> None:
        self._leaves = False
        try:
            self._directory = tempfile.mkdtemp(prefix=_PREFIX, dir=outputs)
            self._lock = _opened(self._directory, os.O_CREAT)
            with contextlib.suppress(OSError):  # no locks there: what is left is for a person
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(self._lock, socket.gethostname().encode())
        except OSError as error:
            raise translate_os_error(error, f"make a directory in {outputs}") from error

    def new(self, name: str) -> str:
        """The path for the output of the job of this name. Raises `FireflyerError`."""
        path = os.path.join(self._directory, f"{name}.out")
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise translate_os_error(error, f"make {path}") from error
        return path

    def touch(self) -> None:
        """Says to commands on other machines that this one lives."""
        with contextlib.suppress(OSError):
            os.utime(self._lock)

    def leave(self) -> None:
        """Some job could not be cancelled: `close` leaves the lock, by which the next command does it."""
        self._leaves = True

    def close(self) -> None:
        """Files of jobs that have written no report stay, for people."""
        if not self._leaves:
            _remove(os.path.join(self._directory, _LOCK))
        os.close(self._lock)
        with contextlib.suppress(OSError):
            os.rmdir(self._directory)


async def cancel_left_jobs(slurm: Slurm, outputs: str, say: Callable[[str], None]) -> None:
    """Of commands of this account that were killed. Raises `FireflyerError` where Slurm does not answer."""
    for directory in _left(outputs):
        lock = _locked(directory)
        if lock is None:
            continue
        try:
            await _cancel(slurm, directory, say)
        finally:
            os.close(lock)


async def _cancel(slurm: Slurm, directory: str, say: Callable[[str], None]) -> None:
    """Raises `FireflyerError`."""
    try:
        there = sorted(os.listdir(directory))
    except FileNotFoundError:  # a command on another machine did it
        return
    except OSError as error:
        raise translate_os_error(error, f"read {directory}") from error
    names = [found[1] for one in there if (found := _OUTPUT.fullmatch(one))]
    unheard = 0
    for first in range(0, len(names), _BATCH):
        unheard += await _cancel_these(slurm, directory, names[first : first + _BATCH], say)
    if unheard:
        return
    _remove(os.path.join(directory, _LOCK))
    with contextlib.suppress(OSError):  # files without a report stay, for people
        os.rmdir(directory)


async def _cancel_these(slurm: Slurm, directory: str, names: Sequence[str], say: Callable[[str], None]) -> int:
    """How many of these Slurm may yet hear of. Raises `FireflyerError`."""
    cancelled, unheard = set(), set(names)
    for job in await slurm.jobs(names):
        if job.uid != os.geteuid():
            continue
        unheard.discard(job.name)
        if job.phase is not Phase.ENDED:
            await slurm.cancel(job.id, job.name)
            cancelled.add(job.name)
            say(f"a validation that was killed left job {job.id}: cancelled")
    kept = 0
    for name in names:
        path = os.path.join(directory, f"{name}.out")
        text = file_text(path)
        if name in unheard and not text and _is_young(path):
            kept += 1
        elif not text or name in cancelled or parse_node_report(text) is not None:
            _remove(path)
    return kept


def _is_young(path: str) -> bool:
    """A file is made just before its job is submitted."""
    try:
        return time.time() - os.stat(path, follow_symlinks=False).st_mtime < _UNHEARD_S
    except OSError:
        return False


def _left(outputs: str) -> list[str]:
    """Directories of this account that have a lock."""
    with contextlib.suppress(OSError), os.scandir(outputs) as entries:
        own = [one.path for one in entries if one.name.startswith(_PREFIX) and _is_own(one)]
        return sorted(path for path in own if os.path.lexists(os.path.join(path, _LOCK)))[:_MAX_LEFT]
    return []


def _is_own(entry: os.DirEntry[str]) -> bool:
    try:
        there = entry.stat(follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISDIR(there.st_mode) and there.st_uid == os.geteuid()


def _opened(directory: str, flags: int = 0) -> int:
    """NFS locks only what is open for writing."""
    path = os.path.join(directory, _LOCK)
    return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)


def _locked(directory: str) -> int | None:
    """None: its command lives, has ended meanwhile, or nobody can know."""
    try:
        fd = _opened(directory)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held, named = os.fstat(fd), os.lstat(os.path.join(directory, _LOCK))
        is_there = (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino)
        is_of_here = os.pread(fd, 256, 0) == socket.gethostname().encode()[:256]
        if is_there and (is_of_here or time.time() - held.st_mtime > _SILENT_S):
            return fd
    except OSError:
        pass
    os.close(fd)
    return None


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def file_text(path: str) -> str:
    """The end of it: the report is the last line. Empty where it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 2 * MAX_REPORT_BYTES))
            return file.read(2 * MAX_REPORT_BYTES).decode(errors="replace")
    except OSError:
        return ""
