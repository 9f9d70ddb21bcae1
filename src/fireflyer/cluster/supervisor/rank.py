"""One rank's process, its two pipes and its log file; and why it ended."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import stat
import subprocess
import sysconfig
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from fireflyer.base.errors import FireflyerError
from fireflyer.base.suspension import SUSPENDED_EXIT_CODE
from fireflyer.cluster.core.tracebacks import (
    MAX_ERROR_FILE_BYTES,
    MAX_TAIL_BYTES,
    parse_error_file,
    parse_traceback,
)
from fireflyer.cluster.schema.wire import OutputLine, RankEnd, RankError, RankToStart
from fireflyer.cluster.supervisor.memory_events import MemoryEvents, killed_in_kernel_log, memory_groups
from fireflyer.cluster.supervisor.output import LineSplitter
from fireflyer.runtime.disk import translate_os_error
from fireflyer.runtime.log_writer import RankLogs
from fireflyer.runtime.processes.guarded import (
    child_environment,
    descendants,
    exit_code_of,
    start_with_parent_death_signal,
    watch_exit,
)

__all__ = ["RankProcess"]

READ_BYTES = 64 << 10
LAST_READ_BYTES = 1 << 20
"""Read from each pipe when the rank has ended, before its end is told."""
_CANNOT_START = 126
_UNCAUGHT = 1
"""What Python exits with after an exception that nobody caught."""
_KILLED = 128 + signal.SIGKILL
_INTERRUPTED = 128 + signal.SIGINT
_LIBRARIES = tuple(
    {
        os.path.realpath(path) + os.sep
        for name, path in sysconfig.get_paths().items()
        if name.endswith(("lib", "stdlib"))
    }
    | {os.path.realpath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 2)) + os.sep}
)
"""Where Python, what is installed into it, and this package are."""


class RankProcess:
    """Calls `on_line`, `on_log_error` (its log cannot be made) and `on_exit`, all on the event loop. `has_left` says
    whether the rank called `go_suspend()`."""

    def __init__(
        self,
        attempt: int,
        rank: int,
        *,
        writer: RankLogs,
        on_line: Callable[[OutputLine], None],
        on_log_error: Callable[[str], None],
        on_exit: Callable[[RankEnd], None],
        has_left: Callable[[], bool] = lambda: False,
    ) -> None:
        self.attempt = attempt
        self.rank = rank
        self.pid = 0
        self.end: RankEnd | None = None
        self._told = False
        self._over = False
        self._has_left = has_left
        self._on_line, self._on_log_error, self._on_exit = on_line, on_log_error, on_exit
        self._loop = asyncio.get_running_loop()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipes: list[_Pipe] = []
        self._writer = writer
        self._log: Any = None
        self._stacks: Any = None
        self.stderr_tail = b""
        self._asking: asyncio.Task[None] | None = None
        self._closed = asyncio.Event()
        self._error_file = ""
        self._memory_events = MemoryEvents([])
        self._started_ns = 0

    def start(self, command: Sequence[str], plan: RankToStart, log_path: str) -> None:
        """Never raises: a rank that cannot be started ends with a note."""
        ends: list[int] = []
        try:
            self._log = self._open_log(log_path)
            for stream, path in (("stdout", plan.stdout_file), ("stderr", plan.stderr_file)):
                file = self._open_log(path) if path else None
                reader, writer = os.pipe2(os.O_CLOEXEC)
                ends.append(writer)
                self._pipes.append(_Pipe(self, reader, stream, file))
            environment = child_environment(plan.environment)
            self._error_file = plan.environment.get("TORCHELASTIC_ERROR_FILE", "")
            self._memory_events, self._started_ns = MemoryEvents(memory_groups()), time.monotonic_ns()
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
        if self._over or self.end is not None or self._process is None:
            return
        self._told = True
        for sent in (number, signal.SIGCONT):
            try:
                os.killpg(self.pid, sent)
            except OSError:
                pass

    def take_stacks(self, path: str) -> bool:
        """Ends the rank by SIGABRT, for which Python's faulthandler (PYTHONFAULTHANDLER is set) writes the stacks of
        all threads to stderr: they go to the file and to the rank's log, and are not shown. A program that starts
        Python has its stacks taken as well. False, and nothing is done, where no process would write them."""
        if self._over or self.end is not None or self._process is None:
            return True
        pid = next((pid for pid in (self.pid, *descendants(self.pid)) if _writes_stacks(pid)), None)
        if pid is None:
            return False
        try:
            self._stacks = self._open_log(path)
            for pipe in self._pipes:
                pipe.divert(self._stacks)
            _forbid_core_file(pid)
            os.kill(pid, signal.SIGABRT)
            os.killpg(self.pid, signal.SIGCONT)
        except OSError:
            return False
        self._told = True
        return True

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
        for file in (self._log, self._stacks):
            self.close_log(file)
        self._log = self._stacks = None

    def _ended(self) -> None:
        process = self._process
        if process is None:
            return
        for pipe in list(self._pipes):
            pipe.read(LAST_READ_BYTES)
        exit_code = exit_code_of(process.wait())
        self._over = True  # its number may be another process's from now on
        left = exit_code == SUSPENDED_EXIT_CODE and self._has_left()
        if exit_code == 0 or self._told or left:
            self._finish(exit_code, "", suspended=left)
        else:  # in a thread: files may be on a disk that is busy with somebody's checkpoint
            self._asking = self._loop.create_task(self._find_cause(exit_code))

    async def _find_cause(self, exit_code: int) -> None:
        error, out_of_memory = await asyncio.to_thread(self._cause, exit_code)
        self._finish(exit_code, "", error, out_of_memory)

    def _cause(self, exit_code: int) -> tuple[RankError | None, str]:
        """The exception that ended the rank, or whose memory ran out."""
        if exit_code == _KILLED:
            killed = killed_in_kernel_log(self.pid, self._started_ns)
            return None, self._memory_events.killed_since() or killed
        if exit_code > 128 and exit_code != _INTERRUPTED:
            return None, ""
        error = parse_error_file(_read_error_file(self._error_file), is_library)
        if error is None and exit_code in (_UNCAUGHT, _INTERRUPTED):
            error = parse_traceback(self.stderr_tail, is_library)
        interrupted = exit_code == _INTERRUPTED
        return (error if error is None or interrupted == (error.type == "KeyboardInterrupt") else None), ""

    def _finish(
        self,
        exit_code: int,
        note: str,
        error: RankError | None = None,
        out_of_memory: str = "",
        *,
        suspended: bool = False,
    ) -> None:
        if self.end is None:
            self.end = RankEnd(self.attempt, self.rank, exit_code, self._told, note, error, out_of_memory, suspended)
            self._on_exit(self.end)
            if self._process is None:
                self.close()

    def _open_log(self, path: str) -> Any:
        try:
            return self._writer.open(path)
        except OSError as error:
            self._on_log_error(str(translate_os_error(error, f"write {path}")))
            raise

    def write_log(self, data: bytes, file: Any) -> None:
        """To the rank's log and to that of the stream."""
        for each in (self._log, file):
            if each is not None:
                self._writer.write(each, data)

    def write_stacks(self, data: bytes, file: Any) -> None:
        self._writer.write(file, data)

    def close_log(self, file: Any) -> None:
        if file is not None:
            self._writer.close(file)

    def emit(self, stream: Literal["stdout", "stderr"], lines: list[tuple[str, bool]]) -> None:
        for text, cut in lines:
            self._on_line(OutputLine(self.rank, self.attempt, stream, text, cut))

    def forget(self, pipe: _Pipe) -> None:
        self._pipes.remove(pipe)
        if not self._pipes:
            self._closed.set()


class _Pipe:
    """The reading end of a rank's stdout or stderr."""

    def __init__(self, owner: RankProcess, fd: int, stream: str, file: Any) -> None:
        self._owner = owner
        self._fd = fd
        self._file = file
        self._stream: Literal["stdout", "stderr"] = "stdout" if stream == "stdout" else "stderr"
        self._splitter = LineSplitter()
        self._stacks: Any = None
        self._reading = False
        self._loop = asyncio.get_running_loop()
        os.set_blocking(fd, False)

    def divert(self, stacks: Any) -> None:
        """What comes on stderr from now on are stacks."""
        if self._stream == "stderr":
            self._owner.emit(self._stream, self._splitter.flush())
            self._stacks = stacks

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
            self._owner.write_log(data, self._file)
            if self._stacks is not None:
                self._owner.write_stacks(data, self._stacks)
                continue
            if self._stream == "stderr":
                self._owner.stderr_tail = (self._owner.stderr_tail + data)[-MAX_TAIL_BYTES:]
            self._owner.emit(self._stream, self._splitter.feed(data))

    def close(self) -> None:
        self.pause()
        self._owner.emit(self._stream, self._splitter.flush())
        os.close(self._fd)
        self._owner.close_log(self._file)
        self._owner.forget(self)


def is_library(path: str) -> bool:
    """Whether a frame of this file is not of the user's code: of Python, of an installed package, or of this one."""
    return path.startswith("<") or f"{os.sep}site-packages{os.sep}" in path or path.startswith(_LIBRARIES)


def _writes_stacks(pid: int) -> bool:
    """Whether it is a Python that catches SIGABRT."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            caught = next((line for line in file.read().splitlines() if line.startswith(b"SigCgt:")), b"SigCgt:\t0")
        name = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return False
    return name.startswith("python") and bool(int(caught.split()[1], 16) >> (signal.SIGABRT - 1) & 1)


def _forbid_core_file(pid: int) -> None:
    """A limit of 1 byte, unlike 0, also counts where cores are piped to a program (core(5))."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_CORE)
    resource.prlimit(pid, resource.RLIMIT_CORE, (1 if hard != 0 else 0, hard))


def _read_error_file(path: str) -> bytes:
    """Empty where the rank wrote none. The path is the rank's to write: a link or a pipe there is not followed."""
    if not path:
        return b""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return b""
        with open(fd, "rb", closefd=False) as file:
            return file.read(MAX_ERROR_FILE_BYTES + 1)
    except OSError:
        return b""
    finally:
        os.close(fd)
