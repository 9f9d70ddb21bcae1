"""Runs the program of `--on-failure` on this node, when no rank is left on it."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
from typing import Final

import msgspec

from fireflyer.base.errors import FireflyerError
from fireflyer.base.node_counters import COUNTERS_NAME, NodeCounters
from fireflyer.base.units import SECOND
from fireflyer.cluster.schema.job import SHIPPED_NODE_CHECK
from fireflyer.cluster.schema.wire import Check, Checked
from fireflyer.runtime.disk import translate_os_error
from fireflyer.runtime.log_writer import LogFile
from fireflyer.runtime.processes.guarded import (
    child_environment,
    exit_code_of,
    start_with_parent_death_signal,
    watch_exit,
)

__all__ = ["MAX_LOG_BYTES", "is_check", "run_check"]

MAX_LOG_BYTES = 64 << 20
"""It cannot print more: EFBIG, or SIGXFSZ where it does not ignore that."""


_SHIPPED: Final = (sys.executable, "-P", "-m", "fireflyer.validators")
_LAST_BYTES: Final = 4096
_MAX_WORDS: Final = 1000


_checks: Final[set[int]] = set()


def is_check(pid: int) -> bool:
    """A child whose end somebody here waits for: who removes ended children leaves it, or its exit code is lost."""
    return pid in _checks


async def run_check(check: Check, counters: NodeCounters | None = None) -> Checked:
    """Never raises: the answer says what went wrong. At the time limit the program and its process group are killed.
    `counters`: of the node, when the ranks were started."""
    check = _as_here(check, counters)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    process: subprocess.Popen[bytes] | None = None
    try:
        log = await asyncio.to_thread(LogFile, check.log)
        try:
            process = start_with_parent_death_signal(
                check.command, environment=child_environment(check.environment), stdout=log.fd, stderr=log.fd
            )
        finally:
            os.close(log.fd)
        _checks.add(process.pid)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (MAX_LOG_BYTES, MAX_LOG_BYTES))
        watch_exit(loop, process.pid, ended.set)
    except (FireflyerError, OSError) as error:
        if process is not None:
            _checks.discard(process.pid)
        reason = error if isinstance(error, FireflyerError) else translate_os_error(error, f"start {check.command[0]}")
        return Checked(check.attempt, 126, note=str(reason)[:1000], limit_ns=check.limit_ns)
    timed_out = False
    try:
        async with asyncio.timeout(check.limit_ns / SECOND):
            await ended.wait()
    except TimeoutError:
        timed_out = True
    finally:  # whatever it has left behind, too
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except OSError:
            pass
    await ended.wait()
    exit_code = exit_code_of(process.wait())
    _checks.discard(process.pid)
    words = await asyncio.to_thread(_last_line, check.log)
    return Checked(check.attempt, exit_code, timed_out, limit_ns=check.limit_ns, words=words)


def _as_here(check: Check, counters: NodeCounters | None) -> Check:
    command, environment = check.command, dict(check.environment)
    if command[:1] == (SHIPPED_NODE_CHECK,):
        command = (*_SHIPPED, *command[1:])
        # Modules of the user's that have the names of ours or of Python's are not for this program.
        environment = {name: value for name, value in environment.items() if not name.startswith("PYTHON")}
    if counters is not None:
        environment[COUNTERS_NAME] = msgspec.json.encode(counters).decode()
    return msgspec.structs.replace(check, command=command, environment=environment)


def _last_line(path: str) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - _LAST_BYTES, 0))
            lines = file.read(_LAST_BYTES).decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:_MAX_WORDS]
