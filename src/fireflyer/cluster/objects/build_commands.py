"""Runs one command of a build: as an account, bounded in time and size, killed with all that it started."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO, Final, NamedTuple, cast

from fireflyer.base.units import SECOND

__all__ = ["CommandEnd", "run_bounded"]

MAX_LINE_BYTES: Final = 500
_LOOK_S: Final = 0.2
_READ_S: Final = 5.0
"""For what is still in the pipe when the group is dead."""
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
    """Runs it in `directory`, its home, as `account` (uid, gid); kills it after `limit_ns`, and its process group at
    its end. Its environment is this process's settings of networks and package indexes, and nothing else. `refused` is
    asked again and again: why the command is to be ended, if it is."""
    given = {key: value for key, value in os.environ.items() if key in _ENVIRONMENT or key.startswith(_PREFIXES)}
    try:
        process = subprocess.Popen(
            list(command),
            cwd=directory,
            env={**given, **_NO_CACHE, "HOME": directory},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            user=None if account is None else account[0],
            group=None if account is None else account[1],
            extra_groups=None if account is None else [],
            pass_fds=(inherited_fd,),
        )
    except OSError as error:
        return CommandEnd(127, (f"{command[0]}: {error.strerror}",))
    output = cast("IO[bytes]", process.stdout)
    lines: deque[str] = deque(maxlen=last_lines)
    reader = threading.Thread(target=_read_lines, args=(output, lines), daemon=True)
    reader.start()
    why: str | None = ""
    try:
        why = _ended(process.pid, limit_ns, refused)
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # not reaped yet: the number is still this group's
        code = process.wait()
    reader.join(_READ_S)
    output.close()
    return CommandEnd(code, tuple(lines)) if why is None else CommandEnd(None, tuple(lines), why)


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
