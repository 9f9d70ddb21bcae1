"""The logs of a run as files on the node of its launcher.

    RECORD/log                                  launcher
    RUN_DIR/events.jsonl                        events
    RUN_DIR/logs/node-0.log                     node-0
    RUN_DIR/logs/attempt-1/rank-3.log           attempt-1-rank-3
    RUN_DIR/logs/attempt-1/rank-3.check.log     attempt-1-rank-3-check

The run directory belongs to the account of the run, which may put there what it likes, and the agent may be root's:
only regular files of that account are read, and no link is followed on the way to them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
from collections.abc import Iterator
from typing import Final, NamedTuple

from fireflyer.base.launch import LOGS_NAME
from fireflyer.cluster.core.objects.log_shipper import MAX_STREAMS
from fireflyer.cluster.schema.logs import LAUNCHER, stream_of_rank

__all__ = ["LauncherLog", "RunLogFiles"]

_log = logging.getLogger(__name__)
_EVENTS: Final = "events.jsonl"
_ATTEMPT: Final = re.compile(r"attempt-(0|[1-9][0-9]{0,8})")
_RANK: Final = re.compile(r"rank-(0|[1-9][0-9]{0,8})(\.check)?\.log")
_NODE: Final = re.compile(r"(node-(?:0|[1-9][0-9]{0,8}))\.log")
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class LauncherLog:
    """What the launcher itself says: a file of the agent. For `ship_logs`, as `RunLogFiles` is."""

    def __init__(self, path: str) -> None:
        self._path = path

    def sizes(self) -> dict[str, int]:
        try:
            return {LAUNCHER: os.stat(self._path).st_size}
        except OSError:
            return {}

    def read(self, _stream: str, offset: int, length: int) -> bytes:
        with open(self._path, "rb") as file:
            return os.pread(file.fileno(), length, offset)


class _Place(NamedTuple):
    folders: tuple[str, ...]
    """Below the run directory."""
    name: str


class RunLogFiles:
    """All other logs of the run in `run_dir`. Used by one thread at a time, but for `read`."""

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir
        self._places: dict[str, _Place] = {}
        self._seen_attempts: set[int] = set()
        self._too_many = False

    def sizes(self) -> dict[str, int]:
        """Those beyond `MAX_STREAMS` are left out, and those of attempts before the last two, once they were told:
        the files of an attempt are closed before the next one starts."""
        found: dict[str, int] = {}
        self._look((), {_EVENTS: "events"}, found)
        attempts = []
        nodes = {}
        for name in self._names((LOGS_NAME,)):
            if match := _NODE.fullmatch(name):
                nodes[name] = match[1]
            elif match := _ATTEMPT.fullmatch(name):
                attempts.append(int(match[1]))
        self._look((LOGS_NAME,), nodes, found)
        attempts.sort()
        for attempt in attempts:
            if attempt not in self._seen_attempts:
                self._look_at_attempt(attempt, found)
        self._seen_attempts.update(attempts[:-2])
        return found

    def _look_at_attempt(self, attempt: int, found: dict[str, int]) -> None:
        folders = (LOGS_NAME, f"attempt-{attempt}")
        streams = {}
        for name in self._names(folders):
            if match := _RANK.fullmatch(name):
                streams[name] = stream_of_rank(attempt, int(match[1])) + ("-check" if match[2] else "")
        self._look(folders, streams, found)

    def _names(self, folders: tuple[str, ...]) -> list[str]:
        try:
            with _opened(self._run_dir, folders) as (directory, _):
                return sorted(os.listdir(directory))
        except OSError:
            return []

    def _look(self, folders: tuple[str, ...], streams: dict[str, str], found: dict[str, int]) -> None:
        """`streams`: names of files in the folder, with those of their logs."""
        with contextlib.suppress(OSError), _opened(self._run_dir, folders) as (directory, uid):
            for name, stream in streams.items():
                try:
                    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                except OSError:
                    continue  # not there yet
                if not stat.S_ISREG(status.st_mode) or status.st_uid != uid:
                    continue
                if stream not in self._places and len(self._places) >= MAX_STREAMS:
                    self._say_too_many()
                    continue
                self._places[stream] = _Place(folders, name)
                found[stream] = status.st_size

    def _say_too_many(self) -> None:
        if not self._too_many:
            self._too_many = True
            _log.warning(
                "a run has more than %d logs; the others stay on this node path=%s", MAX_STREAMS, self._run_dir
            )

    def read(self, stream: str, offset: int, length: int) -> bytes:
        """Nothing, where there is something else now than a file of the account."""
        place = self._places[stream]
        with _opened(self._run_dir, place.folders) as (directory, uid):
            fd = os.open(place.name, _FILE, dir_fd=directory)
            try:
                status = os.fstat(fd)
                mine = stat.S_ISREG(status.st_mode) and status.st_uid == uid
                return os.pread(fd, length, offset) if mine else b""
            finally:
                os.close(fd)


@contextlib.contextmanager
def _opened(run_dir: str, folders: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """A directory, and whose the run directory is. Raises `OSError` where a link is on the way."""
    fd = os.open(run_dir, _DIRECTORY)
    try:
        uid = os.fstat(fd).st_uid
        for folder in folders:
            below = os.open(folder, _DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = below
        yield fd, uid
    finally:
        os.close(fd)
