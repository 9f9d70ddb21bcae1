"""Log files are written by a thread of their own.

A write to a file may block for seconds while the kernel writes back somebody's checkpoint. The supervisor's event loop
must not: its heartbeats would stop, and a node that is merely writing would be taken for dead.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

from fireflyer.base.units import format_bytes
from fireflyer.runtime.disk import translate_os_error

__all__ = ["HIGH_BYTES", "LOW_BYTES", "LogFile", "LogLimit", "LogWriter", "RankLogs"]

HIGH_BYTES = 4 << 20
LOW_BYTES = 1 << 20


class RankLogs(Protocol):
    """Where the bytes that ranks print are kept; `file` is what `open` gave."""

    def open(self, path: str) -> Any: ...

    def write(self, file: Any, data: bytes) -> None: ...

    def close(self, file: Any) -> None: ...

    async def drained(self) -> None: ...

    async def run(self) -> None: ...

    def stop(self) -> None: ...


class LogFile:
    """Opened for appending; made private. Raises `OSError`."""

    def __init__(self, path: str) -> None:
        self.path = path
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.cut = False
        """Nothing more is written: its directory has reached its limit."""


class LogLimit:
    """At most `most_bytes` of logs below `directory`, those of earlier attempts and other processes counted, and in
    each that is cut a line that says so. Stacks of hung ranks are written all the same: there is little of them. Used
    by one thread."""

    def __init__(self, directory: str, most_bytes: int) -> None:
        self._left_bytes = most_bytes - sum(
            _size(os.path.join(folder, name)) for folder, _, names in os.walk(directory) for name in names
        )
        self._notice = (
            f"[fireflyer] logs of this run have reached {format_bytes(most_bytes)}: no more is kept\n".encode()
        )

    def allowed(self, file: LogFile, data: bytes) -> bytes:
        """What of it is written."""
        if file.cut:
            return b""
        room = max(0, self._left_bytes)
        self._left_bytes -= min(room, len(data))
        if len(data) <= room or not file.path.endswith(".log"):
            return data
        file.cut = True
        kept = data[:room]
        return kept + (b"" if kept.endswith(b"\n") or _ends_with_a_line(file, kept) else b"\n") + self._notice


class LogWriter:
    """Used from one event loop, on which the callbacks run: `full` when more than `HIGH_BYTES` wait (stop reading the
    pipes), `free` when less than `LOW_BYTES` do, `on_log_error` with one line when a file cannot be written, once each.
    """

    def __init__(
        self,
        *,
        full: Callable[[], None],
        free: Callable[[], None],
        on_log_error: Callable[[str], None],
        limit: LogLimit | None = None,
    ) -> None:
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._full, self._free, self._on_log_error = full, free, on_log_error
        self._waiting_bytes = 0
        self._is_full = False
        self._queue: queue.SimpleQueue[tuple[LogFile, bytes] | Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="rank logs", daemon=True)
        self._thread.start()

    def open(self, path: str) -> LogFile:
        """Raises `OSError`."""
        return LogFile(path)

    async def run(self) -> None:
        """The thread does the work."""
        await asyncio.Event().wait()

    def write(self, file: LogFile, data: bytes) -> None:
        self._waiting_bytes += len(data)
        self._queue.put((file, data))
        if self._waiting_bytes > HIGH_BYTES and not self._is_full:
            self._is_full = True
            self._full()

    def close(self, file: LogFile) -> None:
        """Behind what was written before."""
        self._queue.put(lambda: _close(file))

    async def drained(self) -> None:
        """Waits until all that was written before is in the files."""
        done = asyncio.Event()
        self._queue.put(lambda: self._tell(done.set))
        await done.wait()

    def stop(self) -> None:
        self._queue.put(None)

    def _written(self, count: int) -> None:
        self._waiting_bytes -= count
        if self._is_full and self._waiting_bytes < LOW_BYTES:
            self._is_full = False
            self._free()

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, tuple):
                self._write(*item)
            else:
                item()

    def _write(self, file: LogFile, data: bytes) -> None:
        count = len(data)
        if self._limit is not None:
            data = self._limit.allowed(file, data)
        try:
            while data and file.fd >= 0:
                data = data[os.write(file.fd, data) :]
        except OSError as error:
            _close(file)
            reason = str(translate_os_error(error, f"write {file.path}"))
            self._tell(lambda: self._on_log_error(reason))
        self._tell(lambda: self._written(count))

    def _tell(self, call: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            pass  # the loop is closed: the supervisor ends


def _size(path: str) -> int:
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except OSError:
        return 0


def _ends_with_a_line(file: LogFile, kept: bytes) -> bool:
    """What is in the file already, where nothing is added."""
    if kept:
        return False
    try:
        with open(file.path, "rb") as read:
            read.seek(-1, os.SEEK_END)
            return read.read(1) == b"\n"
    except OSError:  # empty
        return True


def _close(file: LogFile) -> None:
    if file.fd >= 0:
        os.close(file.fd)
        file.fd = -1
