"""Logs of services: files of bounded size, of which the last ones are kept.

    PATH, PATH.1 (older), … PATH.KEPT (oldest)

Who starts a service opens PATH for appending, as its standard error, and names it in `FF_LOG_FILE`. The service itself
begins a new file when a line would take PATH beyond the bound, and puts the new file below the descriptors: nobody
stands between a process and its log, so no kill loses a line that was written, and what native code or the interpreter
prints in a crash is in the same file. A line is one write, behind which the file may be changed: none is in two files.
The new file is made before the others are renamed: a process that is killed between two renames leaves a name free,
and no log without a name. A line is cut at `MAX_LINE_BYTES`, so what strangers cause to be logged is bounded as well.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
from typing import Final

from fireflyer.base.errors import UsageError
from fireflyer.base.os_errors import translate_os_error

__all__ = ["LOG_FILE_VARIABLE", "RotatingLog", "begin_log", "make_room", "open_log", "start_logging"]

LOG_FILE_VARIABLE: Final = "FF_LOG_FILE"
MAX_BYTES: Final = 8 << 20
KEPT: Final = 3
"""Beside the one that is written."""
MAX_LINE_BYTES: Final = 16 << 10
_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s %(message)s"
_STANDARD: Final = (1, 2)
_APPEND: Final = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


class RotatingLog:
    """The log `path` of this process, below `descriptors`. Lines may come from any thread."""

    def __init__(
        self, path: str, descriptors: tuple[int, ...], *, max_bytes: int = MAX_BYTES, kept: int = KEPT
    ) -> None:
        self._path = path
        self._descriptors = descriptors
        self._max_bytes = max_bytes
        self._kept = kept
        self._lock = threading.Lock()
        self._torn = _ends_within_a_line(path)

    def say(self, text: str) -> None:
        """One line, or several of one message, in one write. Never raises: a full disk does not end a service."""
        data = _bounded(text.encode(errors="replace")) + b"\n"
        with self._lock, contextlib.suppress(OSError):
            fd = self._descriptors[0]
            if os.fstat(fd).st_size + len(data) + 1 > self._max_bytes:
                self._begin_file()
            if self._torn:
                data = b"\n" + data
            self._torn = True
            self._torn = os.write(fd, data) < len(data)

    def _begin_file(self) -> None:
        try:
            fd = _new_file(self._path, self._kept)
        except OSError:
            os.ftruncate(self._descriptors[0], 0)  # no room for a second file: the bound counts more than old lines
        else:
            for each in self._descriptors:
                os.dup2(fd, each)
            os.close(fd)
        self._torn = False


class _Handler(logging.Handler):
    def __init__(self, log: RotatingLog) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._log.say(self.format(record))
        except Exception:  # a message whose arguments do not fit it
            self.handleError(record)


def begin_log() -> RotatingLog | None:
    """Of this process, if who started it has given it a log. Children do not inherit it."""
    path = os.environ.pop(LOG_FILE_VARIABLE, "")
    if not path:
        return None
    try:
        found = os.stat(path)
    except OSError:
        return None
    descriptors = tuple(fd for fd in _STANDARD if _is_same(fd, found))
    return RotatingLog(path, descriptors) if descriptors and stat.S_ISREG(found.st_mode) else None


def open_log(path: str) -> RotatingLog:
    """For a process that was not given one. Its standard error stays what it is. Raises `FireflyerError`."""
    try:
        make_room(path)
        fd = os.open(path, _APPEND, 0o600)
    except OSError as error:
        raise translate_os_error(error, f"write log {path}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UsageError(f"log {path} is not a regular file; name one that can be renamed")
    return RotatingLog(path, (fd,))


def start_logging(log: RotatingLog | None = None) -> None:
    """Messages of `logging` go to the log of this process, or to standard error where it has none."""
    log = log or begin_log()
    if log is None:
        logging.basicConfig(level=logging.INFO, format=_FORMAT)
    else:
        logging.basicConfig(level=logging.INFO, format=_FORMAT, handlers=[_Handler(log)])


def make_room(path: str, *, max_bytes: int = MAX_BYTES, kept: int = KEPT) -> None:
    """Before a process gets the log: one that earlier processes have filled becomes `PATH.1`. Raises `OSError`."""
    try:
        size = os.stat(path).st_size
    except FileNotFoundError:
        return
    if size > max_bytes - MAX_LINE_BYTES and os.path.isfile(path):
        os.close(_new_file(path, kept))


def _new_file(path: str, kept: int) -> int:
    new = f"{path}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)  # of a process that was killed here
    fd = os.open(new, _APPEND | os.O_EXCL, 0o600)
    try:
        names = [path, *(f"{path}.{number}" for number in range(1, kept + 1))]
        for older, newer in zip(reversed(names), reversed(names[:-1]), strict=False):
            with contextlib.suppress(FileNotFoundError):
                os.rename(newer, older)
        os.rename(new, path)
    except OSError:
        os.close(fd)
        raise
    return fd


def _bounded(data: bytes) -> bytes:
    rest = len(data) - MAX_LINE_BYTES
    return data if rest <= 0 else data[:MAX_LINE_BYTES] + f" … ({rest} more bytes)".encode()


def _ends_within_a_line(path: str) -> bool:
    """A process was killed while it wrote."""
    try:
        with open(path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:  # empty
        return False


def _is_same(fd: int, found: os.stat_result) -> bool:
    try:
        one = os.fstat(fd)
    except OSError:
        return False
    return (one.st_dev, one.st_ino) == (found.st_dev, found.st_ino)
