"""Runs the checks of a node, and bounds them: in time, in bytes, in lines, in priority."""

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
from collections.abc import Mapping
from typing import Final, NamedTuple

from fireflyer.base.errors import FireflyerError
from fireflyer.base.health_event import MAX_LINE_BYTES
from fireflyer.base.units import SECOND, format_duration
from fireflyer.cluster.schema.job import SHIPPED_NODE_CHECK
from fireflyer.cluster.schema.sync import SHIPPED_HEALTH, SHIPPED_VALIDATE
from fireflyer.runtime.processes.guarded import exit_code_of, start_with_parent_death_signal, watch_exit
from fireflyer.runtime.processes.trusted_path import changed_by_others

__all__ = ["MAX_LINES", "MAX_OUTPUT_BYTES", "Child", "Printed", "refused", "run_health_program"]

MAX_OUTPUT_BYTES: Final = 128 << 10
MAX_LINES: Final = 256
_NICE: Final = 10
_KILL_S: Final = 5.0
_LAST_S: Final = 1.0
_HEALTH: Final = (sys.executable, "-P", "-m", "fireflyer", "health")
_VALIDATE: Final = (sys.executable, "-P", "-m", "fireflyer", "validate")
_SHIPPED: Final = {
    SHIPPED_HEALTH: _HEALTH,
    SHIPPED_VALIDATE: _VALIDATE,
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
_PEERS: Final = "--peers"
_NAME: Final = r"[a-z][a-z0-9_]{0,63}"
_QUANTITY: Final = r"[0-9][0-9.]{0,15}[A-Za-z]{0,4}"
_OPTIONS: Final[dict[str, dict[str, str]]] = {
    SHIPPED_HEALTH: {"--check": _NAME, _POLICY: r"/.{1,4095}"},
    SHIPPED_VALIDATE: {"--only": _NAME, "--time": _QUANTITY, _POLICY: r"/.{1,4095}", _PEERS: r"/.{1,4095}"},
    SHIPPED_NODE_CHECK: {"--memory": _QUANTITY, "--memory-time": _QUANTITY},
}
"""That managers may give to what comes with Fire-Flyer, and what may follow each. A policy names programs to be run,
and other options name where files are written."""


def refused(program: tuple[str, ...]) -> str:
    """Why an agent of root that runs nothing of users as root does not run this as root, whatever managers say. Empty:
    it comes with Fire-Flyer and has only options that do no harm, or root has put it into `CHECKS_DIRECTORY`, and
    nobody else can change it."""
    name, *arguments = program
    if name in _SHIPPED:
        return _refused_arguments(name, arguments)
    if not _lies_in_directory(name):
        return f"{name} is not run as root: put it into {CHECKS_DIRECTORY} on this node, and name it there"
    why = changed_by_others(name)
    return f"{name} is not run as root: {why}" if why else ""


def _refused_arguments(name: str, arguments: list[str]) -> str:
    options = _OPTIONS[name]
    for option, value in itertools.zip_longest(arguments[::2], arguments[1::2], fillvalue=""):
        if option not in options or re.fullmatch(options[option], value) is None:
            return (
                f"{name} is not run as root with {f'{option} {value}'.strip()[:200]}: allowed are {', '.join(options)}"
            )
        if option in (_POLICY, _PEERS) and not (_lies_in_directory(value) and _only_root_writes(value)):
            return (
                f"{value[:200]} is not read as root: put it into {CHECKS_DIRECTORY} on this node, as a file of root "
                "that nobody else may write"
            )
    return ""


def _lies_in_directory(path: str) -> bool:
    return os.path.normpath(path) == path and os.path.dirname(path) == CHECKS_DIRECTORY


def _only_root_writes(path: str) -> bool:
    """A file, no link, that nobody else may replace or change; root is the account of the agent."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode) and not changed_by_others(path)
    except (OSError, ValueError):
        return False


async def run_health_program(
    program: tuple[str, ...], limit_ns: int, state: str = "", *, idle: bool = False, environment: Mapping[str, str] = {}
) -> Printed:
    """Never raises: what it returns says what went wrong. At the limit the program and its process group are killed.
    `state`: directory for the counters of what comes with Fire-Flyer; empty: that of whoever runs it. `idle`: no
    run lives on the node, which what comes with Fire-Flyer is told. `environment`: variables beside those of this
    process."""
    try:
        child = Child(program, state, idle=idle, more=environment)
    except FireflyerError as error:
        return Printed(failure=f"{program[0]} cannot be started: {error}"[:1000])
    try:
        return await _Running(child, program[0], limit_ns).result()
    finally:
        os.close(child.reader)


class Child:
    """A program of health checks, in a process group of its own, at low priority, that dies with the agent."""

    def __init__(
        self, program: tuple[str, ...], state: str, *, follows: bool = False, idle: bool = False,
        more: Mapping[str, str] = {},
    ) -> None:  # fmt: skip
        """`follows`: it prints what happens, and does not end. `more`: of its environment. In the loop's thread. Raises
        `FireflyerError`."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FF_"))}
        environment |= more
        self.ended = asyncio.Event()
        self.reader, writer = os.pipe()
        """Of what it prints; not blocking, to be closed by who has started it."""
        os.set_blocking(self.reader, False)
        try:
            self._process = start_with_parent_death_signal(
                _command(program, state, follows=follows, idle=idle), environment=environment, stdout=writer,
                stderr=subprocess.DEVNULL, directory="/",
            )  # fmt: skip
            watch_exit(asyncio.get_running_loop(), self._process.pid, self.ended.set)
        except FireflyerError:
            os.close(self.reader)
            raise
        finally:
            os.close(writer)
        with contextlib.suppress(OSError):  # ranks come first
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICE)

    def kill(self) -> None:
        with contextlib.suppress(OSError):  # whatever it has left behind, too
            os.killpg(self._process.pid, signal.SIGKILL)

    async def end(self) -> int | None:
        """Kills it; its exit code. None: it hangs in the kernel, and ends when that lets it."""
        self.kill()
        if await _within(_KILL_S, self.ended):
            return exit_code_of(self._process.wait())
        self._reap_later()
        return None

    def end_now(self) -> None:
        """Kills it and waits a moment: the agent ends."""
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_S)

    def _reap_later(self) -> None:
        async def reap() -> None:
            await self.ended.wait()
            self._process.wait()

        _reapers.add(task := asyncio.get_running_loop().create_task(reap()))
        task.add_done_callback(_reapers.discard)


def _command(program: tuple[str, ...], state: str, *, follows: bool, idle: bool) -> tuple[str, ...]:
    name, *arguments = program
    if name == SHIPPED_HEALTH:
        how = ("--follow", "--no-rounds") if follows else ("--json", *(("--idle",) if idle else ()))
        return (*_HEALTH, *how, *(("--state", state) if state else ()), *arguments)
    if name == SHIPPED_VALIDATE:
        return (*_VALIDATE, "--json", *(("--directory", state) if state else ()), *arguments)
    return (*_SHIPPED.get(name, (name,)), *arguments)


class _Running:
    def __init__(self, child: Child, name: str, limit_ns: int) -> None:
        self._child, self._reader, self._name, self._limit_ns = child, child.reader, name, limit_ns
        self._output = bytearray()
        self._too_much = asyncio.Event()

    async def result(self) -> Printed:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._reader, self._read)
        try:
            return await self._until_over()
        except asyncio.CancelledError:  # the agent ends
            self._child.end_now()
            raise
        finally:
            loop.remove_reader(self._reader)

    async def _until_over(self) -> Printed:
        in_time = await _within(self._limit_ns / SECOND, self._child.ended, self._too_much)
        ended_itself = in_time and self._child.ended.is_set()
        exit_code = await self._child.end()
        if exit_code is None:
            return Printed(failure=f"{self._name} hangs, and cannot be killed")
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
        words = f"{self._name} printed nothing, and ended with exit code {exit_code}" if exit_code and not lines else ""
        return Printed(tuple(lines), exit_code, words)

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
        self._too_much.set()


async def _within(limit_s: float, *events: asyncio.Event) -> bool:
    """Whether one of them has been set until then."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        done, _ = await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return bool(done)


_reapers: Final[set[asyncio.Task[None]]] = set()
