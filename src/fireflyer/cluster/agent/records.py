"""What an agent has on disk: its membership, and a directory for each guard, from which a later agent goes on.

    DIRECTORY/membership.json       the machine's name and credential; absent: not joined, or revoked
    DIRECTORY/lock                  held by the agent that runs
    DIRECTORY/guards/TOKEN/         of one guard:
        order.json                  what it is for; written before it is started
        lock                        held by its processes: who can take it knows that none of them lives
        process.json                which process the guard is; written by itself
        words, log                  what the guard says (see `runtime.processes.guard`); its supervisor's log
        end.json                    how it ended

Everything is private to the user. A directory that cannot be read is left where it is and named in the log.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
from typing import Annotated, Final, TypeVar

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS
from fireflyer.base.errors import Busy, DataCorruption, FireflyerError, NotFound
from fireflyer.base.os_errors import translate_os_error
from fireflyer.cluster.core.agent import End, Found, Order
from fireflyer.identity.handshake import UserKey, token_id_of, token_key
from fireflyer.identity.private_files import read_private_file, require_own_directory, write_private_file
from fireflyer.runtime.processes.identity import ProcessIdentity

__all__ = ["ISSUER", "AgentDirectory", "GuardRecord", "Membership", "state_directory"]

_log = logging.getLogger(__name__)
ISSUER: Final = "issuer"
"""Who has the machine's credential, beside the machine."""
_MAX_BYTES: Final = 64 << 10
_TAIL_BYTES: Final = 4096
_TOKEN = re.compile(r"[0-9a-f]{8,64}\.[0-9]{1,9}\.[0-9]{1,9}")
_MODE: Final = 0o700
_T = TypeVar("_T")


def state_directory(name: str) -> str:
    """Of this user, for `name`: below XDG_STATE_HOME, by default ~/.local/state."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(base, "fireflyer", name)


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    """`credential` is as good as a login of this user on this machine."""

    machine: str
    issuer: str
    """`host:port` that the machine joined."""
    credential: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    """Where the agent listens."""

    def __repr__(self) -> str:
        return f"Membership({self.machine}, joined at {self.issuer})"


class AgentDirectory:
    """Made if it is absent. Raises `PermissionDenied` where others could change it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._guards = os.path.join(path, "guards")
        self._membership = os.path.join(path, "membership.json")
        try:
            os.makedirs(self._guards, mode=_MODE, exist_ok=True)
        except OSError as error:
            raise translate_os_error(error, f"make {self._guards}") from error
        require_own_directory(path)
        require_own_directory(self._guards)

    def take(self) -> int:
        """The lock of the running agent: a descriptor that is to stay open. Raises `Busy`."""
        fd = _lock(os.path.join(self.path, "lock"))
        if fd is None:
            raise Busy(f"another agent runs with {self.path}; stop that one first")
        return fd

    def membership(self) -> Membership | None:
        """None: the machine has not joined, or its credential is revoked. Raises `DataCorruption`."""
        try:
            return _read(self._membership, Membership)
        except NotFound:
            return None

    def join(self, membership: Membership) -> None:
        write_private_file(self._membership, msgspec.json.encode(membership))

    def leave(self) -> bool:
        """The credential is not valid here any more. False: there was none."""
        try:
            os.unlink(self._membership)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise translate_os_error(error, f"remove {self._membership}") from error
        return True

    def find(self, token_id: str) -> UserKey | None:
        """For `Accepts`: whoever has the credential, as long as it is valid."""
        try:
            membership = self.membership()
        except FireflyerError as error:
            _log.error("nobody is let in reason=%s", error)
            return None
        if membership is None or token_id_of(membership.credential) != token_id:
            return None
        return UserKey(ISSUER, token_key(membership.credential))

    def record(self, token: str) -> GuardRecord:
        return GuardRecord(os.path.join(self._guards, token))

    def found(self) -> tuple[Found, ...]:
        """The guards of earlier agents."""
        found = []
        for name in sorted(os.listdir(self._guards)):
            if not _TOKEN.fullmatch(name):
                continue
            record = self.record(name)
            try:
                order = _read(record.file("order.json"), Order)
                found.append(Found(order, record.end()))
            except NotFound:
                record.remove()  # an agent was killed as it made it: nothing was started
            except FireflyerError as error:
                _log.error("a guard cannot be adopted token=%s reason=%s", name, error)
        return tuple(found)


class GuardRecord:
    """The directory of one guard."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def file(self, name: str) -> str:
        return os.path.join(self._directory, name)

    def write_order(self, order: Order) -> None:
        try:
            os.makedirs(self._directory, mode=_MODE, exist_ok=True)
        except OSError as error:
            raise translate_os_error(error, f"make {self._directory}") from error
        write_private_file(self.file("order.json"), msgspec.json.encode(order))

    def write_end(self, end: End) -> None:
        write_private_file(self.file("end.json"), msgspec.json.encode(end))

    def end(self) -> End | None:
        try:
            return _read(self.file("end.json"), End)
        except NotFound:
            return None

    def process(self) -> ProcessIdentity | None:
        """None as long as the guard has not begun."""
        try:
            return _read(self.file("process.json"), ProcessIdentity)
        except NotFound:
            return None

    def lock(self) -> int | None:
        """A descriptor that the guard is to inherit; None where a process of the guard lives."""
        return _lock(self.file("lock"))

    def lives(self) -> bool:
        """Whether any process holds the lock."""
        fd = self.lock()
        if fd is not None:
            os.close(fd)
        return fd is None

    def words(self) -> tuple[int | None, bool, bool]:
        """Exit code of the supervisor if it was seen to end, whether the lease ended, whether nothing is left."""
        exit_code, expired, clean = None, False, False
        for line in _tail(self.file("words")):
            word, _, number = line.partition(" ")
            if word == "exited" and number.isdecimal():
                exit_code = min(int(number[:4]), 255)
            expired |= word == "expired"
            clean |= word == "clean"
        return exit_code, expired, clean

    def last_log_line(self) -> str:
        shown = ("".join(char for char in line if char.isprintable()).strip() for line in _tail(self.file("log")))
        return next((line[:300] for line in reversed(list(shown)) if line), "")

    def remove(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


def _lock(path: str) -> int | None:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise translate_os_error(error, f"lock {path}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def _read(path: str, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(read_private_file(path, _MAX_BYTES), type=kind)
    except DECODE_ERRORS as error:
        raise DataCorruption(f"{path} is damaged: {error}") from None


def _tail(path: str) -> list[str]:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - _TAIL_BYTES))
            return file.read(_TAIL_BYTES).decode(errors="replace").split("\n")
    except OSError:
        return []
