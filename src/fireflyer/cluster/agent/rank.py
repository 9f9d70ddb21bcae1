"""One rank's process, its two pipes and its log file."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from typing import Literal

from fireflyer.base.errors import FireflyerError
from fireflyer.cluster.agent.log_writer import LogFile, LogWriter
from fireflyer.cluster.agent.output import LineSplitter
from fireflyer.cluster.schema.wire import Exited, OutputLine, RankToStart
from fireflyer.runtime.disk import translate_os_error
from fireflyer.runtime.processes.guarded import (
    child_environment,
    exit_code_of,
    start_with_parent_death_signal,
    watch_exit,
)

__all__ = ["RankProcess"]

READ_BYTES = 64 << 10
LAST_READ_BYTES = 1 << 20
"""Read from each pipe when the rank has ended, before its end is told."""
_CANNOT_START = 126


class RankProcess:
    """Calls `on_line`, `on_log_error` (its log cannot be made) and `on_exit`, all on the event loop."""

    def __init__(
        self,
        attempt: int,
        rank: int,
        *,
        writer: LogWriter,
        on_line: Callable[[OutputLine], None],
        on_log_error: Callable[[str], None],
        on_exit: Callable[[Exited], None],
    ) -> None:
        self.attempt = attempt
        self.rank = rank
        self.pid = 0
        self.end: Exited | None = None
        self._told = False
        self._on_line, self._on_log_error, self._on_exit = on_line, on_log_error, on_exit
        self._loop = asyncio.get_running_loop()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipes: list[_Pipe] = []
        self._writer = writer
        self._log: LogFile | None = None
        self._closed = asyncio.Event()

    def start(self, command: Sequence[str], plan: RankToStart, log_path: str) -> None:
        """Never raises: a rank that cannot be started ends with a note."""
        ends: list[int] = []
        try:
            self._open_log(log_path)
            for stream in ("stdout", "stderr"):
                reader, writer = os.pipe2(os.O_CLOEXEC)
                ends.append(writer)
                self._pipes.append(_Pipe(self, reader, stream))
            environment = child_environment(plan.environment)
            self._process = start_with_parent_death_signal(
                command, environment=environment, stdout=ends[0], stderr=ends[1]
            )
            self.pid = self._process.pid
            watch_exit(self._loop, self.pid, self._ended)
        except (FireflyerError, OSError) as error:
            reason = (
                error if isinstance(error, FireflyerError) else translate_os_error(error, f"start rank {self.rank}")
            )
            self._loop.call_soon(self._finish, _CANNOT_START, str(reason)[:1000])
        finally:
            for writer in ends:
                os.close(writer)
        for pipe in self._pipes:
            pipe.resume()

    def signal(self, number: int) -> None:
        """To the rank and what it forked, unless it has ended."""
        if self.end is not None or self._process is None:
            return
        self._told = True
        for sent in (number, signal.SIGCONT):
            try:
                os.killpg(self.pid, sent)
            except OSError:
                pass

    def pause(self) -> None:
        for pipe in self._pipes:
            pipe.pause()

    def resume(self) -> None:
        for pipe in self._pipes:
            pipe.resume()

    async def closed(self) -> None:
        """Waits until nobody holds the rank's pipes any more and all that was written to them has been read."""
        await self._closed.wait()

    def close(self) -> None:
        for pipe in list(self._pipes):
            pipe.close()
        if self._log is not None:
            self._writer.close(self._log)
            self._log = None

    def _ended(self) -> None:
        process = self._process
        if process is not None:
            for pipe in list(self._pipes):
                pipe.read(LAST_READ_BYTES)
            self._finish(exit_code_of(process.wait()), "")

    def _finish(self, exit_code: int, note: str) -> None:
        if self.end is None:
            self.end = Exited(self.attempt, self.rank, exit_code, self._told, note)
            self._on_exit(self.end)
            if self._process is None:
                self.close()

    def _open_log(self, path: str) -> None:
        try:
            self._log = LogFile(path)
        except OSError as error:
            self._on_log_error(str(translate_os_error(error, f"write {path}")))
            raise

    def write_log(self, data: bytes) -> None:
        if self._log is not None:
            self._writer.write(self._log, data)

    def emit(self, stream: Literal["stdout", "stderr"], lines: list[tuple[str, bool]]) -> None:
        for text, cut in lines:
            self._on_line(OutputLine(self.rank, self.attempt, stream, text, cut))

    def forget(self, pipe: _Pipe) -> None:
        self._pipes.remove(pipe)
        if not self._pipes:
            self._closed.set()


class _Pipe:
    """The reading end of a rank's stdout or stderr."""

    def __init__(self, owner: RankProcess, fd: int, stream: str) -> None:
        self._owner = owner
        self._fd = fd
        self._stream: Literal["stdout", "stderr"] = "stdout" if stream == "stdout" else "stderr"
        self._splitter = LineSplitter()
        self._reading = False
        self._loop = asyncio.get_running_loop()
        os.set_blocking(fd, False)

    def resume(self) -> None:
        if not self._reading:
            self._reading = True
            self._loop.add_reader(self._fd, self.read)

    def pause(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def read(self, limit_bytes: int = READ_BYTES) -> None:
        """At most about `limit_bytes`; closes at the end of the stream."""
        done = 0
        while done < limit_bytes:
            try:
                data = os.read(self._fd, READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                self.close()
                return
            done += len(data)
            self._owner.write_log(data)
            self._owner.emit(self._stream, self._splitter.feed(data))

    def close(self) -> None:
        self.pause()
        self._owner.emit(self._stream, self._splitter.flush())
        os.close(self._fd)
        self._owner.forget(self)
