"""Runs one command of a build: as an account, bounded in time and size, killed with all that it started.

A build executes what the user's packages bring, which may fork and take a session of its own. So it runs below a guard
(`runtime.processes.guard`), which stays this process's account: nothing of a build outlives it, or this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO, Final, NamedTuple, cast

from fireflyer.base.units import SECOND
from fireflyer.runtime.processes import become_account
from fireflyer.runtime.processes.guard import KILL_TIMEOUT_S
from fireflyer.runtime.processes.guard_command import GuardCommand

__all__ = ["CommandEnd", "run_bounded"]

MAX_LINE_BYTES: Final = 500
_LOOK_S: Final = 0.2
_READ_S: Final = 5.0
"""For what is still in the pipe when all are dead."""
_GUARD_S: Final = KILL_TIMEOUT_S + 5.0
_EXITED: Final = re.compile(rb"^exited ([0-9]{1,3})$", re.MULTILINE)
_SIGNALLED: Final = 128
_GUARD_LOST: Final = -9
_ENVIRONMENT: Final = ("PATH", "LANG", "LC_ALL", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR")
_PREFIXES: Final = ("PIP_", "UV_", "http", "https", "HTTP", "HTTPS", "no_proxy", "NO_PROXY", "REQUESTS_CA")
_NO_CACHE: Final = {"PIP_NO_CACHE_DIR": "1", "UV_NO_CACHE": "1"}
"""Of the tools: it would be another copy of each package, which nothing bounds."""
_UNSHOWN: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x1f\x7f]")


class CommandEnd(NamedTuple):
    code: int | None
    """Negative for a signal. None: it was ended here, because of `why`."""
    lines: tuple[str, ...]
    why: str = ""


def run_bounded(
    command: Sequence[str],
    directory: str,
    limit_ns: int,
    *,
    account: tuple[int, int] | None,
    inherited_fd: int,
    last_lines: int,
    refused: Callable[[], str] = str,
) -> CommandEnd:
    """Runs it in `directory`, its home, as `account` (uid, gid); kills it after `limit_ns`, and all that it started at
    its end. Its environment is this process's settings of networks and package indexes, and nothing else. `refused` is
    asked again and again: why the command is to be ended, if it is."""
    given = {key: value for key, value in os.environ.items() if key in _ENVIRONMENT or key.startswith(_PREFIXES)}
    guard = GuardCommand.here(command if account is None else _as_account(account, directory, inherited_fd, command))
    try:
        process = subprocess.Popen(
            guard.argv,
            cwd=directory,
            env={**given, **_NO_CACHE, "HOME": directory},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=(inherited_fd,),
        )
    except OSError as error:
        return CommandEnd(127, (f"{guard.argv[0]}: {error.strerror}",))
    control, words, output = (cast("IO[bytes]", pipe) for pipe in (process.stdin, process.stdout, process.stderr))
    lines: deque[str] = deque(maxlen=last_lines)
    reader = threading.Thread(target=_read_lines, args=(output, lines), daemon=True)
    reader.start()
    why: str | None = ""
    try:
        why = _ended(process.pid, limit_ns, refused)
    finally:
        control.close()  # the guard kills all that lives
        _wait_for_guard(process)
    with words:
        exited = _EXITED.search(words.read())
    reader.join(_READ_S)
    if not reader.is_alive():  # else it waits for a process that the kernel does not let go
        output.close()
    if why is not None:
        return CommandEnd(None, tuple(lines), why)
    code = _GUARD_LOST if exited is None else int(exited[1])
    return CommandEnd(_SIGNALLED - code if code > _SIGNALLED else code, tuple(lines))


def _as_account(account: tuple[int, int], directory: str, kept_fd: int, command: Sequence[str]) -> list[str]:
    uid, gid = account
    who = {"uid": uid, "gid": gid, "groups": [], "home": directory, "keeps_environment": True}
    return [sys.executable, "-I", "-S", become_account.__file__, json.dumps(who), str(kept_fd), *command]


def _wait_for_guard(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GUARD_S)
        return
    process.kill()  # what it could not kill is stuck in the kernel
    process.wait()


def _ended(pid: int, limit_ns: int, refused: Callable[[], str]) -> str | None:
    """None: by itself; else why it is ended now, empty at its limit. `refused` is asked at intervals: the size of a
    directory that grows tells nobody."""
    fd = os.pidfd_open(pid)
    until_ns = time.monotonic_ns() + limit_ns
    try:
        while True:
            left_s = (until_ns - time.monotonic_ns()) / SECOND
            if select.select([fd], [], [], max(0.0, min(left_s, _LOOK_S)))[0]:
                return None
            if left_s <= 0:
                return ""
            if why := refused():
                return why
    finally:
        os.close(fd)


def _read_lines(stream: IO[bytes], lines: deque[str]) -> None:
    while line := stream.readline(MAX_LINE_BYTES):
        text = _UNSHOWN.sub("", line.decode(errors="replace")).strip()
        if text:
            lines.append(text)
