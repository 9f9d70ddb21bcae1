"""Runs tools beside each other, each bounded in time and output, and leaves none behind."""

from __future__ import annotations

import math
import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Final

from fireflyer.base.errors import FireflyerError
from fireflyer.runtime.processes.guarded import exit_code_of, start_with_parent_death_signal
from fireflyer.runtime.processes.trusted_path import changed_by_others
from fireflyer.validators.core.checks.evidence import Output
from fireflyer.validators.core.checks.sources import MAX_OUTPUT_BYTES, Command

__all__ = ["MAX_AT_ONCE", "SEARCH_PATH", "TOOL_ENVIRONMENT", "run_commands"]

MAX_AT_ONCE: Final = 4
"""Processes: a round may use little of a node that computes."""
_READ_BYTES: Final = 1 << 16
_MAX_ERROR_BYTES: Final = 4096
_KILL_S: Final = 1.0
"""So long an ended group is waited for; one that the kernel holds (state D) is left to it."""
_OVER: Final = "the time of the round was over"
SEARCH_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TOOL_ENVIRONMENT: Final[Mapping[str, str]] = {"PATH": SEARCH_PATH, "LC_ALL": "C", "TZ": "UTC"}


def run_commands(
    commands: Sequence[tuple[str, Command]], *, path: str = SEARCH_PATH, ends_s: float = math.inf
) -> dict[str, Output]:
    """By key. Never raises: an `Output` says why there is none. In the calling thread, with whose end the tools would
    be killed. `path`: where tools are looked for; the environment of who started the round plays no part. `ends_s`: of
    the monotonic clock; what runs then is ended and does not count as hung, and nothing is started any more."""
    outputs: dict[str, Output] = {}
    waiting = list(reversed(commands))
    running: set[_Run] = set()
    selector = selectors.DefaultSelector()
    try:
        while waiting or running:
            while waiting and len(running) < MAX_AT_ONCE:
                key, command = waiting.pop()
                late = time.monotonic() >= ends_s
                started = Output(problem=f"{command.argv[0]}: {_OVER}") if late else _start(command, path, ends_s)
                if isinstance(started, Output):
                    outputs[key] = started
                    continue
                started.key = key
                started.register(selector)
                running.add(started)
            _wait(selector, running)
            for run in [one for one in running if one.finished()]:
                running.discard(run)
                outputs[run.key] = run.output()
    finally:
        for run in running:
            run.kill()
        selector.close()
    return outputs


def _wait(selector: selectors.BaseSelector, running: set[_Run]) -> None:
    if not selector.get_map():
        time.sleep(0.002 if running else 0)
        return
    limit_s = min((run.ends_s for run in running), default=0.0) - time.monotonic()
    for key, _ in selector.select(max(min(limit_s, 0.05), 0)):
        run: _Run = key.data
        run.read(key.fd, selector)
    for run in running:
        if time.monotonic() >= run.ends_s and not run.problem:
            tool = run.command.argv[0]
            if run.cut_short:
                run.stop(f"{tool}: {_OVER}, and it was killed", selector)
                continue
            run.hung = True
            run.stop(f"{tool} did not end within {run.command.limit_s:g} s, and was killed", selector)


def _start(command: Command, path: str, ends_s: float) -> _Run | Output:
    tool = command.argv[0]
    found = shutil.which(tool, path=path)
    if found is None:
        return Output(problem=f"{tool} is not installed", missing=True)
    if command.root and os.geteuid() != 0:
        return Output(problem=f"{tool} needs root")
    if command.of_site and os.geteuid() == 0 and (why := changed_by_others(found)):
        return Output(problem=f"{tool} is not run as root: {why}")
    out, err = os.pipe(), os.pipe()
    environment: Mapping[str, str] = {**TOOL_ENVIRONMENT, "PATH": path}
    try:
        process = start_with_parent_death_signal(
            (found, *command.argv[1:]), environment=environment, stdout=out[1], stderr=err[1], directory="/"
        )
    except FireflyerError as error:
        os.close(out[0])
        os.close(err[0])
        return Output(problem=str(error)[:300], hung=True)
    finally:
        os.close(out[1])
        os.close(err[1])
    return _Run(command, process, out[0], err[0], ends_s)


class _Run:
    """A tool that runs, with what it has printed so far."""

    def __init__(self, command: Command, process: subprocess.Popen[bytes], out: int, err: int, ends_s: float) -> None:
        self.key = command.name
        self.command = command
        self.problem = ""
        self.hung = False
        own_s = time.monotonic() + command.limit_s
        self.ends_s = min(own_s, ends_s)
        self.cut_short = ends_s < own_s
        self._process = process
        self._printed = {out: bytearray(), err: bytearray()}
        self._open = {out, err}
        self._out, self._err = out, err
        self._left_s: float | None = None

    def register(self, selector: selectors.BaseSelector) -> None:
        for fd in self._open:
            os.set_blocking(fd, False)
            selector.register(fd, selectors.EVENT_READ, self)

    def read(self, fd: int, selector: selectors.BaseSelector) -> None:
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._close(fd, selector)
            return
        printed = self._printed[fd]
        if fd == self._err:
            printed += data[: _MAX_ERROR_BYTES - len(printed)]
        elif len(printed) + len(data) > MAX_OUTPUT_BYTES:
            limit = f"{MAX_OUTPUT_BYTES >> 20} MiB"
            self.hung = True
            self.stop(f"{self.command.argv[0]} printed more than {limit}, and was killed", selector)
        else:
            printed += data

    def stop(self, problem: str, selector: selectors.BaseSelector) -> None:
        self.problem = problem
        for fd in list(self._open):
            self._close(fd, selector)
        self.kill()

    def kill(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except OSError:
            pass
        self._left_s = time.monotonic() + _KILL_S

    def finished(self) -> bool:
        """What it has started may hold its output open: the group is killed when the tool itself has ended, before
        that is removed, while its number still means this group."""
        if self._process.returncode is None:
            ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return self._left_s is not None and time.monotonic() > self._left_s
            self.kill()
            self._process.wait()
        return not self._open

    def output(self) -> Output:
        code = self._process.returncode
        printed = self._printed[self._out].decode(errors="replace")
        said = self._printed[self._err].decode(errors="replace")
        if self.problem or code is None:
            hung = self.hung or (code is None and not self.cut_short)
            return Output(problem=self.problem or f"{self.command.argv[0]} could not be ended", hung=hung)
        if code and not printed.strip():
            reason = " ".join(said.split())[:200] or f"exit code {exit_code_of(code)}"
            if code < 0:
                return Output(problem=f"{self.command.argv[0]} was ended by signal {-code}", hung=True)
            return Output(said, code, problem="" if said.strip() else f"{self.command.argv[0]}: {reason}")
        return Output(printed, exit_code_of(code))

    def _close(self, fd: int, selector: selectors.BaseSelector) -> None:
        if fd in self._open:
            self._open.discard(fd)
            selector.unregister(fd)
            os.close(fd)
