"""Who runs the cluster of a directory: a lock that dies with its holder, and the holder's name to find it by.

A process is named by its number and the time of its start, and signalled through a descriptor of it, so a number that
was given to another process in the meantime is never hit.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
from shlex import quote
from typing import Final, Self

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, decode_json
from fireflyer.base.errors import Busy, NotFound, Timeout
from fireflyer.base.os_errors import translate_os_error

__all__ = ["END_NOW", "RunLock", "end_holder", "seems_held", "signal_holder"]

MAX_BYTES: Final = 4096
FILE_SYSTEM: Final = "ff fs"
END_NOW: Final = signal.SIGUSR1
"""To `ff up`: end at once, and leave its runs to who sent this."""


class _Holder(msgspec.Struct, frozen=True):
    pid: int
    started: int


class RunLock:
    """Held until `release`, or the end of this process."""

    def __init__(self, path: str, commands: str = FILE_SYSTEM) -> None:
        """`commands`: those that start and end what the lock is for. Raises `Busy` while another process holds it."""
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise translate_os_error(error, f"open {path}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read(self._fd)
            os.close(self._fd)
            who = f"process {holder.pid}" if holder is not None else "another process"
            where = _where(path)
            shown = f"show it: ff fs status {where}; " if commands == FILE_SYSTEM else ""
            raise Busy(f"the cluster is running already ({who}); {shown}stop it: {commands} down {where}") from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, msgspec.json.encode(_Holder(os.getpid(), _started(os.getpid()) or 0)), 0)

    def in_place(self) -> bool:
        """Whether its path still names what is held: not when the directory was removed, moved or made anew."""
        try:
            there = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True
        held = os.fstat(self._fd)
        return (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)

    def release(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def end_holder(
    path: str,
    *,
    timeout_s: float,
    force: bool = False,
    number: signal.Signals = signal.SIGTERM,
    commands: str = FILE_SYSTEM,
) -> int:
    """Signal `number` (or SIGKILL) to who holds the lock; returns its number when it has ended. Raises `NotFound` where
    nobody does, `Timeout`."""
    pid = _holder(path)
    if pid is None:
        raise NotFound(f"the cluster in {os.path.dirname(path)} is not running")
    holder, descriptor = pid
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL if force else number)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            raise Timeout(
                f"process {holder} has not stopped within {timeout_s:.0f} s; kill it: {commands} down {_where(path)} "
                "--force"
            )
    finally:
        os.close(descriptor)
    return holder


def signal_holder(path: str, number: signal.Signals) -> None:
    """Raises `NotFound` where nobody holds the lock."""
    found = _holder(path)
    if found is None:
        raise NotFound(f"the cluster is not running; start it: ff fs up {_where(path)} -d")
    try:
        signal.pidfd_send_signal(found[1], number)
    finally:
        os.close(found[1])


def seems_held(path: str) -> bool:
    """Whether the process that took the lock last is alive. Takes no lock, so it is in nobody's way."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        holder = _read(fd)
    finally:
        os.close(fd)
    return holder is not None and _started(holder.pid) == holder.started


def _where(path: str) -> str:
    """As an option of the commands."""
    return f"--dir {quote(os.path.relpath(os.path.dirname(path)))}"


def _holder(path: str) -> tuple[int, int] | None:
    """Its number and a descriptor of it."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise translate_os_error(error, f"open {path}") from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            holder = _read(fd)
    finally:
        os.close(fd)
    if holder is None:
        return None
    try:
        descriptor = os.pidfd_open(holder.pid)
    except OSError:
        return None
    if _started(holder.pid) != holder.started:
        os.close(descriptor)
        return None
    return holder.pid, descriptor


def _read(fd: int) -> _Holder | None:
    try:
        return decode_json(os.pread(fd, MAX_BYTES, 0), _Holder)
    except DECODE_ERRORS:
        return None


def _started(pid: int) -> int | None:
    """In ticks since the machine was booted; None when it has ended, also when its parent has not asked for it yet."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
