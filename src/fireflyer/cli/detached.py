"""The same command again, in a session of its own: for commands with `--detach`, which return when it is up."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Final

import click

from fireflyer.base.errors import FireflyerError, PermanentError, UsageError

__all__ = ["command_line", "own_say", "report", "report_failure", "run_detached", "tell"]

MAX_REPORT_BYTES: Final = 1 << 16
_REPORT_FD: Final = "--report-fd"
_FAILED: Final = "\0"
"""What is reported after it is why it could not come up."""


def run_detached(arguments: Sequence[str], log_path: str) -> int:
    """Runs `ff` with these arguments but `-d`/`--detach`, and waits until it has called `report` or has failed: then
    the error is the one that its log ends with. Interrupted, it ends what it has started."""
    from fireflyer.runtime.service_log import LOG_FILE_VARIABLE, make_room

    options = [one for one in arguments if one not in ("-d", "--detach")]
    read_fd, write_fd = os.pipe()
    make_room(log_path)
    with open(log_path, "ab") as log, open(read_fd, "rb") as reported:
        began = log.tell()
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fireflyer", *options, _REPORT_FD, str(write_fd)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(write_fd,),
            env={**os.environ, LOG_FILE_VARIABLE: log_path},
            start_new_session=True,
        )
        os.close(write_fd)
        try:
            text = reported.read(MAX_REPORT_BYTES).decode()
        except KeyboardInterrupt:
            process.terminate()
            raise
    failure = text.removeprefix(_FAILED) if text.startswith(_FAILED) else ""
    if text and not failure:
        click.echo(text, nl=False)
        return 0
    code = process.wait()
    reason = failure or _last_error(log_path, began)
    error: FireflyerError = PermanentError(reason or f"the process exited with code {code}; its log is {log_path}")
    raise UsageError(error.message) if code == 2 else error


def command_line(arguments: Sequence[str]) -> str:
    """What a person gives to have the same again. `arguments`: of this process, which may run detached."""
    words = list(arguments)
    if _REPORT_FD in words:
        at = words.index(_REPORT_FD)
        words[at : at + 2] = ["--detach"]
    return shlex.join(["ff", *words])


def own_say() -> Callable[[str], None]:
    """Says a line in the log of this process where it runs detached, else on standard error."""
    from fireflyer.runtime.service_log import begin_log

    log = begin_log()
    return functools.partial(tell, err=True) if log is None else log.say


def tell(text: str, *, err: bool = False) -> None:
    """A line on the terminal. Never raises `OSError`: a service goes on when its terminal was closed."""
    with contextlib.suppress(OSError):
        click.echo(text, err=err)


def report(report_fd: int | None, text: str) -> None:
    """What the one who waits prints, if it is still there; on the terminal where nobody does."""
    if report_fd is None:
        tell(text.removesuffix("\n"))
        return
    with contextlib.suppress(BrokenPipeError):
        os.write(report_fd, text.encode())
    os.close(report_fd)


def report_failure(report_fd: int | None, why: str) -> None:
    """Instead of `report`, by who may have no log that says it."""
    if report_fd is not None:
        with contextlib.suppress(BrokenPipeError):
            os.write(report_fd, f"{_FAILED}{why}".encode()[:MAX_REPORT_BYTES])
        os.close(report_fd)


def _last_error(path: str, began: int) -> str:
    with open(path, "rb") as file:
        file.seek(began)
        lines = file.read(MAX_REPORT_BYTES).decode(errors="replace").splitlines()
    return next((line.removeprefix("error: ") for line in reversed(lines) if line.startswith("error: ")), "")
