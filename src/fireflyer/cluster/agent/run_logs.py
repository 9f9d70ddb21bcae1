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
MAX_ATTEMPTS: Final = 2048
"""Directories that are looked for in a run directory."""


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
    """All other logs of the run in `run_dir`."""

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir
        self._places: dict[str, _Place] = {}
        self._too_many = False

    def sizes(self) -> dict[str, int]:
        """Those beyond `MAX_STREAMS` are left out."""
        found: dict[str, int] = {}
        with contextlib.suppress(OSError), _opened(self._run_dir, ()) as (directory, uid):
            self._look(found, directory, uid, "events", _Place((), _EVENTS))
        for stream, place in self._candidates():
            if len(found) >= MAX_STREAMS:
                self._say_too_many()
                break
            with contextlib.suppress(OSError), _opened(self._run_dir, place.folders) as (directory, uid):
                self._look(found, directory, uid, stream, place)
        return found

    def _candidates(self) -> Iterator[tuple[str, _Place]]:
        attempts = []
        for name in self._names((LOGS_NAME,)):
            if match := _NODE.fullmatch(name):
                yield match[1], _Place((LOGS_NAME,), name)
            elif match := _ATTEMPT.fullmatch(name):
                attempts.append(int(match[1]))
        for attempt in sorted(attempts)[:MAX_ATTEMPTS]:
            folders = (LOGS_NAME, f"attempt-{attempt}")
            for name in self._names(folders):
                if match := _RANK.fullmatch(name):
                    stream = stream_of_rank(attempt, int(match[1])) + ("-check" if match[2] else "")
                    yield stream, _Place(folders, name)

    def _names(self, folders: tuple[str, ...]) -> list[str]:
        try:
            with _opened(self._run_dir, folders) as (directory, _):
                return sorted(os.listdir(directory))
        except OSError:
            return []

    def _look(self, found: dict[str, int], directory: int, uid: int, stream: str, place: _Place) -> None:
        status = os.stat(place.name, dir_fd=directory, follow_symlinks=False)
        if stat.S_ISREG(status.st_mode) and status.st_uid == uid:
            found[stream] = status.st_size
            self._places[stream] = place

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
