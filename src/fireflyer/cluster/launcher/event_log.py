"""The file that the event log is: one JSON line per entry, appended."""

from __future__ import annotations

import os

from fireflyer.base.errors import FireflyerError
from fireflyer.base.events import Logged, encode_log_line
from fireflyer.runtime.disk import RealDisk, translate_os_error

__all__ = ["EventLog"]


class EventLog:
    """Raises `FireflyerError` when it cannot be made or written. After a failed write nothing more is written, and the
    file ends with a complete line."""

    def __init__(self, directory: str, name: str) -> None:
        self.directory = directory
        self.path = path = os.path.join(directory, name)
        self._good_bytes = 0
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise translate_os_error(error, f"create {path}") from error
        RealDisk().sync_dir(directory)  # the name must survive a crash as well as what is written beneath it

    @property
    def empty(self) -> bool:
        return self._good_bytes == 0

    def remove(self) -> None:
        """Nothing worth keeping was written."""
        self.close()
        try:
            os.unlink(self.path)
        except OSError:
            pass

    def append(self, entry: Logged) -> None:
        if self._fd < 0:
            return
        line = encode_log_line(entry)
        done = 0
        try:
            while done < len(line):
                done += os.write(self._fd, line[done:])
        except OSError as error:
            failure = self._give_up(error)
            raise failure from error
        self._good_bytes += len(line)

    def sync(self) -> None:
        """What was appended survives a crash of the machine when this returns."""
        if self._fd < 0:
            return
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise translate_os_error(error, f"write {self.path}") from error

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _give_up(self, error: OSError) -> FireflyerError:
        try:
            os.ftruncate(self._fd, self._good_bytes)
        except OSError:
            pass
        self.close()
        return translate_os_error(error, f"write {self.path}")
