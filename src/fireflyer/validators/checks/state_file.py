"""Keeps what one round knows for the next, in a directory that is the checks' own.

Rounds and a process that only follows the kernel's log have a file each, and read that of the other: what one has told
of the log, the other does not tell again.
"""

from __future__ import annotations

import os
import stat
from typing import Final, Generic, TypeVar

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, decode_json
from fireflyer.base.errors import UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.validators.core.checks.evidence import Counters

__all__ = ["MAX_STATE_BYTES", "KeptFile", "StateFile", "state_directory"]

MAX_STATE_BYTES: Final = 8 << 20
_OF_ROUNDS: Final = "counters.json"
_OF_LOG: Final = "log.json"
T = TypeVar("T", bound=msgspec.Struct)


def state_directory() -> str:
    """Of who calls, where no other is given."""
    if os.geteuid() == 0:
        return "/var/lib/fireflyer/health"
    return os.path.join(os.path.expanduser("~"), ".local/state/fireflyer/health")


class KeptFile(Generic[T]):
    """In a directory that is made if it is not there; only its owner may write into it, who must be the caller."""

    def __init__(self, directory: str, name: str, kind: type[T]) -> None:
        """Raises `FireflyerError`."""
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            found = os.lstat(directory)
        except OSError as error:
            raise translate_os_error(error, f"state directory {directory}") from error
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise UsageError(
                f"state directory {directory} is not a directory that only this user may write to; "
                "give another with --state"
            )
        self._path = os.path.join(directory, name)
        self._kind = kind

    def load(self) -> tuple[T | None, str]:
        """What was kept; and, where there is a file that is not what we write, why nothing was taken from it."""
        return _load(self._path, self._kind)

    def save(self, kept: T) -> None:
        """Replaces the file as a whole; what was kept is there after a loss of power. Raises `FireflyerError`."""
        data = msgspec.json.encode(kept)
        new = f"{self._path}.new"
        try:
            if len(data) > MAX_STATE_BYTES:
                raise UsageError(f"what is kept of a round takes {len(data)} bytes; {MAX_STATE_BYTES} are allowed")
            if os.path.lexists(new):
                os.unlink(new)
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(fd)
            os.replace(new, self._path)
            _sync_directory(os.path.dirname(self._path))
        except OSError as error:
            raise translate_os_error(error, f"write {self._path}") from error


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _load(path: str, kind: type[T]) -> tuple[T | None, str]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, f"{path}: {(error.strerror or '').lower()}"
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None, f"{path} is not a file"
        data = file.read(MAX_STATE_BYTES + 1)
    if len(data) > MAX_STATE_BYTES:
        return None, f"{path} is larger than {MAX_STATE_BYTES >> 20} MiB"
    try:
        return decode_json(data, kind), ""
    except DECODE_ERRORS as error:
        return None, f"{path}: {str(error)[:200]}"


class StateFile(KeptFile[Counters]):
    """The counters of a round."""

    def __init__(self, directory: str, *, only_log: bool = False) -> None:
        """`only_log`: of who runs no rounds. Raises `FireflyerError`."""
        super().__init__(directory, _OF_LOG if only_log else _OF_ROUNDS, Counters)
        self._other = os.path.join(directory, _OF_ROUNDS if only_log else _OF_LOG)

    def load_other(self) -> Counters | None:
        """What the process has kept that shares the directory; None: there is none, or its file is not to be read."""
        return _load(self._other, Counters)[0]
