"""Runs the checks of a node, one program at a time, and bounds it: in time, in bytes, in lines, in priority."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
import stat
import subprocess
import sys
from typing import Final, NamedTuple

from fireflyer.base.errors import FireflyerError
from fireflyer.base.health_event import MAX_LINE_BYTES
from fireflyer.base.units import SECOND, format_duration
from fireflyer.cluster.schema.job import SHIPPED_NODE_CHECK
from fireflyer.cluster.schema.sync import SHIPPED_HEALTH
from fireflyer.runtime.processes.guarded import exit_code_of, start_with_parent_death_signal, watch_exit

__all__ = ["MAX_LINES", "MAX_OUTPUT_BYTES", "Printed", "refused", "run_health_program"]

MAX_OUTPUT_BYTES: Final = 128 << 10
MAX_LINES: Final = 256
_NICE: Final = 10
_KILL_S: Final = 5.0
_LAST_S: Final = 1.0
_SHIPPED: Final = {
    SHIPPED_HEALTH: (sys.executable, "-P", "-m", "fireflyer", "health", "--json"),
    SHIPPED_NODE_CHECK: (sys.executable, "-P", "-m", "fireflyer.validators"),
}


class Printed(NamedTuple):
    lines: tuple[bytes, ...] = ()
    exit_code: int | None = None
    """None: it did not end by itself, or was not started."""
    failure: str = ""
    """Why it came to no result; empty: it did."""


CHECKS_DIRECTORY: Final = "/etc/fireflyer/health"
_POLICY: Final = "--policy"
_QUANTITY: Final = r"[0-9][0-9.]{0,15}[A-Za-z]{0,4}"
_OPTIONS: Final[dict[str, dict[str, str]]] = {
    SHIPPED_HEALTH: {"--check": r"[a-z][a-z0-9_]{0,63}", _POLICY: r"/.{1,4095}"},
    SHIPPED_NODE_CHECK: {"--memory": _QUANTITY, "--memory-time": _QUANTITY},
}
"""That managers may give to what comes with Fire-Flyer, and what may follow each. A policy names programs to be run,
and other options name where files are written."""


def refused(program: tuple[str, ...]) -> str:
    """Why an agent of root that runs nothing of users as root does not run this as root, whatever managers say; empty:
    it comes with Fire-Flyer and has only options that do no harm, or root has put it into `CHECKS_DIRECTORY`."""
    name, *arguments = program
    if name in _SHIPPED:
        return _refused_arguments(name, arguments)
    if _lies_in_directory(name):
        return ""
    return f"{name} is not run as root: put it into {CHECKS_DIRECTORY} on this node, and name it there"


def _refused_arguments(name: str, arguments: list[str]) -> str:
    options = _OPTIONS[name]
    for option, value in itertools.zip_longest(arguments[::2], arguments[1::2], fillvalue=""):
        if option not in options or re.fullmatch(options[option], value) is None:
            return (
                f"{name} is not run as root with {f'{option} {value}'.strip()[:200]}: allowed are {', '.join(options)}"
            )
        if option == _POLICY and not (_lies_in_directory(value) and _only_root_writes(value)):
            return (
                f"{value[:200]} is not read as root: put the policy into {CHECKS_DIRECTORY} on this node, as a file of "
                "root that nobody else may write"
            )
    return ""


def _lies_in_directory(path: str) -> bool:
    return os.path.normpath(path) == path and os.path.dirname(path) == CHECKS_DIRECTORY


def _only_root_writes(path: str) -> bool:
    """A file, no link, that nobody else may replace or change; root is the account of the agent."""
    try:
        file, directory = os.lstat(path), os.lstat(os.path.dirname(path))
    except (OSError, ValueError):
        return False
    if not (stat.S_ISREG(file.st_mode) and stat.S_ISDIR(directory.st_mode)):
        return False
    return all(one.st_uid in (0, os.geteuid()) and not one.st_mode & 0o022 for one in (file, directory))


async def run_health_program(program: tuple[str, ...], limit_ns: int) -> Printed:
    """Never raises: what it returns says what went wrong. At the limit the program and its process group are killed."""
    command = (*_SHIPPED.get(program[0], program[:1]), *program[1:])
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FF_"))}
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    try:
        try:
            process = start_with_parent_death_signal(
                command, environment=environment, stdout=writer, stderr=subprocess.DEVNULL, directory="/"
            )
        finally:
            os.close(writer)
        return await _Running(process, reader, program[0], limit_ns).result()
    except FireflyerError as error:
        return Printed(failure=f"{program[0]} cannot be started: {error}"[:1000])
    finally:
        os.close(reader)


class _Running:
    def __init__(self, process: subprocess.Popen[bytes], reader: int, name: str, limit_ns: int) -> None:
        self._process, self._reader, self._name, self._limit_ns = process, reader, name, limit_ns
        self._output = bytearray()
        self._ended = asyncio.Event()
        self._over = asyncio.Event()
        """It has ended, or printed too much."""

    async def result(self) -> Printed:
        loop = asyncio.get_running_loop()
        watch_exit(loop, self._process.pid, self._on_exit)
        loop.add_reader(self._reader, self._read)
        with contextlib.suppress(OSError):  # ranks come first
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICE)
        try:
            return await self._until_over()
        except asyncio.CancelledError:  # the agent ends
            self._kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LAST_S)
            raise
        finally:
            loop.remove_reader(self._reader)

    async def _until_over(self) -> Printed:
        in_time = await _within(self._limit_ns / SECOND, self._over)
        ended_itself = in_time and self._ended.is_set()
        self._kill()
        if not await _within(_KILL_S, self._ended):  # it hangs in the kernel, and ends when that lets it
            self._reap_later()
            return Printed(failure=f"{self._name} hangs, and cannot be killed")
        exit_code = exit_code_of(self._process.wait())
        self._read()  # what was in the pipe when it ended
        if len(self._output) > MAX_OUTPUT_BYTES:
            return Printed(failure=f"{self._name} printed more than {MAX_OUTPUT_BYTES} bytes")
        if not ended_itself:
            return Printed(failure=f"{self._name} did not end within {format_duration(self._limit_ns)}, and was killed")
        if exit_code in (126, 127) and not self._output:
            return Printed(exit_code=exit_code, failure=f"{self._name} cannot be started (exit code {exit_code})")
        return self._lines(exit_code)

    def _lines(self, exit_code: int) -> Printed:
        lines = [line for line in bytes(self._output).split(b"\n") if line.strip()]
        if len(lines) > MAX_LINES or any(len(line) > MAX_LINE_BYTES for line in lines):
            words = f"{self._name} printed {len(lines)} lines; {MAX_LINES} of {MAX_LINE_BYTES} bytes are allowed"
            return Printed(failure=words, exit_code=exit_code)
        return Printed(tuple(lines), exit_code)

    def _reap_later(self) -> None:
        loop = asyncio.get_running_loop()

        async def reap() -> None:
            await self._ended.wait()
            self._process.wait()

        _reapers.add(task := loop.create_task(reap()))
        task.add_done_callback(_reapers.discard)

    def _kill(self) -> None:
        with contextlib.suppress(OSError):  # whatever it has left behind, too
            os.killpg(self._process.pid, signal.SIGKILL)

    def _on_exit(self) -> None:
        self._ended.set()
        self._over.set()

    def _read(self) -> None:
        try:
            while len(self._output) <= MAX_OUTPUT_BYTES:
                data = os.read(self._reader, 65536)
                if not data:
                    asyncio.get_running_loop().remove_reader(self._reader)
                    return
                self._output += data
        except BlockingIOError:
            return
        self._over.set()


async def _within(limit_s: float, event: asyncio.Event) -> bool:
    try:
        async with asyncio.timeout(limit_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


_reapers: Final[set[asyncio.Task[None]]] = set()
