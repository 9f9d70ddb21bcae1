"""What an agent has on disk: its membership, and a directory for each guard, from which a later agent goes on.

    DIRECTORY/membership.json       the machine's name and credential; absent: not joined, or revoked
    DIRECTORY/lock                  held by the agent that runs
    DIRECTORY/leader.json           the leader that was heard last, and all managers
    DIRECTORY/incarnation           number of starts
    DIRECTORY/lease                 until when runs of the platform may run; see `runtime.processes.guard`
    DIRECTORY/runs/TOKEN/           of one run of the platform: `run.json`, what it is; those of a guard, where its
                                    launcher is here; and `job`, its run directory, unless that is another account's
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
import time
from typing import Annotated, Final, TypeVar

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, decode_json
from fireflyer.base.errors import Busy, DataCorruption, FireflyerError, NotFound
from fireflyer.base.os_errors import translate_os_error
from fireflyer.cluster.core.agent import End, Found, Order
from fireflyer.cluster.core.runs import FoundRun, RunRecord
from fireflyer.cluster.objects.trees import remove_tree
from fireflyer.cluster.schema.tickets import ticket_key
from fireflyer.identity.handshake import UserKey, token_id_of, token_key
from fireflyer.identity.private_files import read_private_file, require_own_directory, write_private_file
from fireflyer.runtime.processes.identity import ProcessIdentity, boot_id

__all__ = ["ISSUER", "AgentDirectory", "GuardRecord", "Leader", "Membership", "state_directory"]

_log = logging.getLogger(__name__)
ISSUER: Final = "issuer"
"""Who has the machine's credential, beside the machine."""
_MAX_BYTES: Final = 64 << 10
_TAIL_BYTES: Final = 4096
_RUN_TOKEN = re.compile(r"[0-9a-f]{8,64}")
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
    address: str = ""
    """At which it is reached; empty: that from which its connections come."""
    managers: tuple[str, ...] = ()
    """Of the platform that the machine joined; empty: it joined no platform."""

    def __repr__(self) -> str:
        return f"Membership({self.machine}, joined at {self.issuer})"


class Leader(msgspec.Struct, frozen=True, kw_only=True):
    """The leader of the platform's managers whose orders were followed last."""

    term: int = 0
    managers: tuple[str, ...] = ()
    """`host:port` of all of them."""
    stop_after_ns: int = 0


class AgentDirectory:
    """Made if it is absent. Raises `PermissionDenied` where others could change it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._guards = os.path.join(path, "guards")
        self._runs = os.path.join(path, "runs")
        self._membership = os.path.join(path, "membership.json")
        self.lease_file = os.path.join(path, "lease")
        self.health_state = os.path.join(os.path.abspath(path), "health")
        """Directory for the counters of this node's checks."""
        try:
            os.makedirs(self._guards, mode=_MODE, exist_ok=True)
            os.makedirs(self._runs, mode=_MODE, exist_ok=True)
        except OSError as error:
            raise translate_os_error(error, f"make {path}") from error
        for directory in (path, self._guards, self._runs):
            require_own_directory(directory)

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

    async def find(self, token_id: str) -> UserKey | None:
        """For `Accepts`: whoever has the credential, as long as it is valid, or a ticket that was made from it."""
        try:
            membership = self.membership()
        except FireflyerError as error:
            _log.error("nobody is let in reason=%s", error)
            return None
        if membership is None:
            return None
        if token_id_of(membership.credential) == token_id:
            return UserKey(ISSUER, token_key(membership.credential))
        key = ticket_key(token_id, token_key(membership.credential), time.time())
        return None if key is None else UserKey(token_id, key)

    def record(self, token: str) -> GuardRecord:
        return GuardRecord(os.path.join(self._guards, token))

    # -- runs of the platform ------------------------------------------------------------------------------------------

    def leader(self) -> Leader:
        try:
            return _read(os.path.join(self.path, "leader.json"), Leader)
        except NotFound:
            return Leader()

    def write_leader(self, leader: Leader) -> None:
        write_private_file(os.path.join(self.path, "leader.json"), msgspec.json.encode(leader))

    def next_incarnation(self, now_s: int) -> int:
        """Larger than all before, also where the directory was lost. `now_s`: Unix time."""
        path = os.path.join(self.path, "incarnation")
        try:
            before = int(read_private_file(path, 64))
        except (NotFound, ValueError):
            before = 0
        incarnation = max(before + 1, now_s)
        write_private_file(path, str(incarnation).encode())
        return incarnation

    def lease_ends_ns(self) -> int:
        """Of CLOCK_BOOTTIME; 0 where none was written since the machine started."""
        try:
            ends, boot = read_private_file(self.lease_file, 256).decode().split()
            return int(ends) if boot == boot_id() else 0
        except (NotFound, ValueError):
            return 0

    def write_lease(self, ends_ns: int) -> None:
        """Not through a crash of the machine, which ends everything anyway. Raises `FireflyerError`."""
        temporary = f"{self.lease_file}.new"
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with open(fd, "wb") as file:
                file.write(f"{ends_ns} {boot_id()}\n".encode())
            os.rename(temporary, self.lease_file)
        except OSError as error:
            raise translate_os_error(error, f"write {self.lease_file}") from error

    def end_lease(self) -> None:
        """Guards of runs of the platform end within a second or two. Raises `FireflyerError`."""
        try:
            os.unlink(self.lease_file)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise translate_os_error(error, f"remove {self.lease_file}") from error

    def living_guards(self) -> list[str]:
        """Tokens of guards of which a process lives; for a directory whose agent does not run."""
        runs = [name for name in sorted(os.listdir(self._runs)) if _RUN_TOKEN.fullmatch(name)]
        guards = [name for name in sorted(os.listdir(self._guards)) if _TOKEN.fullmatch(name)]
        return [name for name in runs if self.run_record(name).lives()] + [
            name for name in guards if self.record(name).lives()
        ]

    def run_record(self, token: str) -> GuardRecord:
        return GuardRecord(os.path.join(self._runs, token))

    def write_run(self, record: RunRecord) -> None:
        directory = os.path.join(self._runs, record.token)
        try:
            os.makedirs(directory, mode=_MODE, exist_ok=True)
        except OSError as error:
            raise translate_os_error(error, f"make {directory}") from error
        write_private_file(os.path.join(directory, "run.json"), msgspec.json.encode(record))

    def remove_run(self, token: str) -> None:
        """With its run directory, where that is here. Blocks; what a killed agent leaves of it, the next one finds."""
        record = self.run_record(token)
        remove_tree(record.file("job"))
        record.remove()

    def found_runs(self) -> tuple[FoundRun, ...]:
        found = []
        for name in sorted(os.listdir(self._runs)):
            path = os.path.join(self._runs, name, "run.json")
            if _RUN_TOKEN.fullmatch(name):
                try:
                    record = _read(path, RunRecord)
                    age_ns = max(0, time.time_ns() - os.stat(path).st_mtime_ns)
                    found.append(FoundRun(record, age_ns))
                except NotFound:
                    self.remove_run(name)  # an agent was killed as it made or removed it: nothing lives
                except (FireflyerError, OSError) as error:
                    _log.error("a directory of runs is left alone reason=%s", error)
        return tuple(found)

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
        return decode_json(read_private_file(path, _MAX_BYTES), kind)
    except DECODE_ERRORS as error:
        raise DataCorruption(f"{path} is damaged: {error}") from None


def _tail(path: str) -> list[str]:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - _TAIL_BYTES))
            return file.read(_TAIL_BYTES).decode(errors="replace").split("\n")
    except OSError:
        return []
