"""What `ff health slurm` keeps on a node, as far as its disk allows: a disk that is full or read-only keeps no node
from draining."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import getpass
import os
import time
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from fireflyer.base.errors import Busy, FireflyerError, UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.cluster.core.health.remedies import Remedy
from fireflyer.cluster.core.slurm.node_record import DrainRecord
from fireflyer.cluster.core.slurm.repair import NodeRepair
from fireflyer.validators.checks.rounds import HealthRounds
from fireflyer.validators.checks.state_file import KeptFile, StateFile

__all__ = ["DIRECTORY", "NodeMemory", "person", "validating"]

DIRECTORY: Final = "slurm"
"""Below that of `ff health`, which would take events from these rounds if they shared their counters."""
_LOCK: Final = "slurm.lock"
_VALIDATION_LOCK: Final = "validate.lock"
"""Held while validators load the node, and until what they have found is acted on."""
_POLL_S: Final = 0.1
_PATIENCE_S: Final = 60.0
"""Of a person; a round takes no longer."""


def person() -> str:
    """Who calls, also by sudo."""
    return os.environ.get("SUDO_USER", "")[:64] or getpass.getuser()


class NodeMemory:
    """Its record and the counters of its rounds. `fail` is told what cannot be read or kept."""

    def __init__(self, state: str, fail: Callable[[str], None]) -> None:
        self._directory = os.path.join(state, DIRECTORY)
        self._tell = fail
        self._told: set[str] = set()
        self._alone = True
        self._counters: StateFile | None = None
        self._kept: KeptFile[DrainRecord] | None = None
        self._loaded: DrainRecord | None = None
        try:
            self._counters = StateFile(self._directory)
            self._kept = KeptFile(self._directory, "slurm.json", DrainRecord)
        except FireflyerError as error:
            self._fail(f"nothing is remembered from one round to the next: {error}")

    @contextlib.contextmanager
    def alone(self, limit_s: float) -> Iterator[None]:
        """Prologs, epilogs and the program of this node, one after the other. One that waits for `limit_s` in vain goes
        on and keeps nothing: what it finds is found again."""
        fd = self._open_lock() if self._kept is not None else None
        try:
            if fd is not None and not _locked(fd, limit_s):
                self._alone = False
                self._fail(f"another round has {self._directory} for {limit_s:g} s: this one is not remembered")
            yield
        finally:
            if fd is not None:
                os.close(fd)

    def is_under_validation(self) -> bool:
        with contextlib.suppress(OSError):
            fd = os.open(os.path.join(self._directory, _VALIDATION_LOCK), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                return not _locked(fd, 0)
            finally:
                os.close(fd)
        return False

    def rounds(self) -> HealthRounds:
        rounds = HealthRounds(self._counters)
        if rounds.note:
            self._fail(f"counters from before are not used: {rounds.note}")
        return rounds

    def record(self) -> DrainRecord:
        if self._kept is None:
            return DrainRecord()
        self._loaded, note = self._kept.load()
        if note:
            self._fail(f"what was remembered is not used: {note}")
        return self._loaded or DrainRecord()

    def save(self, record: DrainRecord, rounds: HealthRounds | None = None) -> None:
        """The counters last: they say that what was found is acted on or kept."""
        if self._kept is None or not self._alone:
            return
        try:
            if record != (self._loaded or DrainRecord()):
                self._kept.save(record)
                self._loaded = record
        except FireflyerError as error:
            self._fail(f"this round is not remembered: {error}")
            return
        if rounds is not None:
            rounds.save()
            if rounds.unsaved:
                self._fail(f"this round is not remembered: {rounds.unsaved}")

    def repair(self, node: str, now_ns: int, remedy: Remedy, words: str, by: str) -> NodeRepair:
        """Keeps what a person has done to the node, between two rounds. Raises `FireflyerError`."""
        if self._kept is None:
            raise UsageError("nothing is remembered of this node; give the --state of its rounds")
        with self.alone(_PATIENCE_S):
            record = self.record()
            repair = NodeRepair(node, record.repair)
            repair.repaired(remedy, words, by, now_ns)
            if not self._alone:
                raise Busy("a round of the node's checks is under way; say it again in a minute")
            self._kept.save(msgspec.structs.replace(record, repair=repair.record))
        return repair

    def _fail(self, words: str) -> None:
        """Once."""
        if words not in self._told:
            self._told.add(words)
            self._tell(words)

    def _open_lock(self) -> int | None:
        """The directory: it can be locked on a disk that is full or read-only. NFS locks only what is open for
        writing."""
        with contextlib.suppress(OSError):
            fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno == errno.EWOULDBLOCK:
                    return fd
                os.close(fd)
            else:
                return fd
        path = os.path.join(self._directory, _LOCK)
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self._fail(f"another round may run beside this one: {path}: {(error.strerror or '').lower()}")
            return None


@contextlib.contextmanager
def validating(state: str) -> Iterator[bool]:
    """False: another process validates the node. Raises `FireflyerError`."""
    path = os.path.join(state, DIRECTORY, _VALIDATION_LOCK)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise translate_os_error(error, f"lock {path}") from error
    try:
        yield _locked(fd, 0)
    finally:
        os.close(fd)


def _locked(fd: int, limit_s: float) -> bool:
    ends_s = time.monotonic() + limit_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= ends_s:
                return False
            time.sleep(_POLL_S)
        except OSError:
            return True  # it cannot be locked, by nobody
        else:
            return True
