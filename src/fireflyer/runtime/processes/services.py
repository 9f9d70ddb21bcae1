"""Services of a cluster on this machine: started, watched, started again when they die, ended in order.

One that dies at once again and again is started again all the same, with longer pauses: whether that is hopeless is for
who has all of them to decide (`crash_looping`).

They are direct children with a parent-death signal (`runtime.processes.parent_death_signal`): whatever happens to this
process, they die with it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from fireflyer.base.errors import PermanentError, Timeout
from fireflyer.base.os_errors import translate_os_error
from fireflyer.runtime.processes.guarded import (
    child_environment,
    exit_code_of,
    start_with_parent_death_signal,
    watch_exit,
)
from fireflyer.runtime.service_log import LOG_FILE_VARIABLE, make_room

__all__ = ["AT_ONCE_S", "MAX_DEATHS", "READY", "CrashHistory", "LocalProcess"]

READY: Final = b"ready "
"""What a process prints, with its address, when it serves."""
PAUSE_S: Final = 0.5
MAX_PAUSE_S: Final = 10.0
"""Between a death and the next start: doubles while it dies again before it was ready."""
AT_ONCE_S: Final = 2.0
"""A process that dies so soon after it was ready has died at once."""
MAX_DEATHS: Final = 5
"""At once, in a row: then it is hopeless. About 15 s with the pauses."""
GRACE_S: Final = 10.0
"""From SIGTERM to SIGKILL."""
MAX_LINE_BYTES: Final = 4096
LAST_LINE_BYTES: Final = 2048


class CrashHistory:
    """Of one process and those that were started in its place: is there hope? Times are of one clock."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._ready_s: float | None = None
        """Of the present one."""

    def ready(self, now_s: float) -> None:
        self._ready_s = now_s

    def ended(self, now_s: float) -> None:
        self._in_a_row = 0 if self._lives(now_s) else self._in_a_row + 1
        self._ready_s = None

    def crash_looping(self, now_s: float) -> bool:
        """Not of one that has come to live after all."""
        return self._in_a_row >= MAX_DEATHS and not self._lives(now_s)

    def _lives(self, now_s: float) -> bool:
        return self._ready_s is not None and now_s - self._ready_s >= AT_ONCE_S


class LocalProcess:
    """`ff ARGUMENTS`. `say` is told, in a line, of a death and of each new start."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        log_file: str,
        say: Callable[[str], None],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment`: variables beside those of this process."""
        self.name = name
        self.address = ""
        """Where it listens; empty while it is not ready."""
        self._command = [sys.executable, "-P", "-m", "fireflyer", *arguments]
        self._log_file = log_file
        self._say = say
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = asyncio.Event()
        self._ended = asyncio.Event()
        self._ended.set()
        self._stopping = False
        self._pause_s = PAUSE_S
        self._failed: str | None = None
        self._deaths = CrashHistory()
        self._again: asyncio.TimerHandle | None = None

    @property
    def crash_looping(self) -> str:
        """Why it has died at once again and again; empty while there is hope."""
        return (self._failed or "") if self._deaths.crash_looping(asyncio.get_running_loop().time()) else ""

    def start(self) -> None:
        """Raises `FireflyerError` when it cannot be started."""
        read_fd, write_fd = os.pipe()
        try:
            make_room(self._log_file)
            with open(self._log_file, "ab") as log:
                self._process = start_with_parent_death_signal(
                    self._command,
                    environment=child_environment({**self._environment, LOG_FILE_VARIABLE: self._log_file}),
                    stdout=write_fd,
                    stderr=log.fileno(),
                )
        except OSError as error:
            os.close(read_fd)
            raise translate_os_error(error, f"write {self._log_file}") from error
        finally:
            os.close(write_fd)
        self._ended.clear()
        loop = asyncio.get_running_loop()
        os.set_blocking(read_fd, False)
        loop.add_reader(read_fd, self._listen, read_fd, bytearray())
        watch_exit(loop, self._process.pid, self._on_exit)

    async def wait_ready(self, timeout_s: float) -> str:
        """Its address. Raises `PermanentError` when it ended instead: what it said last; `Timeout`."""
        ready = asyncio.ensure_future(self._ready.wait())
        ended = asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait([ready, ended], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
            ended.cancel()
        if self._ready.is_set():
            return self.address
        if self._ended.is_set():
            raise PermanentError(f"{self.name} did not start: {self._failed}; its log is {self._log_file}")
        raise Timeout(f"{self.name} was not ready within {timeout_s:.0f} s; its log is {self._log_file}")

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL when that does not help. It is not started again."""
        self._stopping = True
        if self._again is not None:
            self._again.cancel()
        if self._process is None or self._ended.is_set():
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(GRACE_S):
                await self._ended.wait()
        except TimeoutError:
            self._say(f"{self.name} does not stop within {GRACE_S:.0f} s and is killed")
            self._process.kill()
            await self._ended.wait()

    def _listen(self, fd: int, line: bytearray) -> None:
        try:
            data = os.read(fd, MAX_LINE_BYTES)
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)
            return
        line += data[: MAX_LINE_BYTES - len(line)]
        if not self._ready.is_set() and b"\n" in line and line.startswith(READY):
            self.address = bytes(line).split(b"\n")[0][len(READY) :].decode(errors="replace")
            self._pause_s = PAUSE_S
            self._deaths.ready(asyncio.get_running_loop().time())
            self._ready.set()

    def _on_exit(self) -> None:
        if self._process is None:
            return
        code = self._process.wait()
        how, last = _described(code), self._last_line() if code >= 0 else ""
        self._failed = last or how
        self._deaths.ended(asyncio.get_running_loop().time())
        self._ready.clear()
        self.address = ""
        self._ended.set()
        if self._stopping:
            return
        self._again = asyncio.get_running_loop().call_later(self._pause_s, self._restart)
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        self._say(f"{self.name} died ({how}{last and f': {last}'}) and is started again")

    def _restart(self) -> None:
        try:
            self.start()
        except (PermanentError, OSError) as error:
            self._say(f"{self.name} cannot be started: {error}")
            self._again = asyncio.get_running_loop().call_later(MAX_PAUSE_S, self._restart)

    def _last_line(self) -> str:
        try:
            with open(self._log_file, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_LINE_BYTES))
                lines = file.read().decode(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1].removeprefix("error: ") if lines and lines[-1].startswith("error: ") else ""


def _described(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {exit_code_of(code)}"
