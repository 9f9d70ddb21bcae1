"""The SSH server of a machine: on port 22 of its network namespace, with the files that `plan` describes."""

from __future__ import annotations

import os
import select
import subprocess
from typing import Final

__all__ = ["FILES", "LOG", "PROGRAM", "listener", "start"]

PROGRAM: Final = "/usr/sbin/sshd"
LOG: Final = "/run/sshd.log"
_DIRECTORY: Final = "/run/sshd"
_PID_FILE: Final = "/run/sshd.pid"
FILES: Final = (LOG, _DIRECTORY, _PID_FILE)
"""What it needs while it runs."""
_START_S: Final = 60.0


def start() -> None:
    """Returns when it listens. It writes its number into a file after it has begun to listen: the file is a pipe at
    first. Raises `RuntimeError` with its log when it ends instead."""
    os.makedirs(_DIRECTORY, 0o755, exist_ok=True)  # its processes without privileges have this as root
    os.mkfifo(_PID_FILE, 0o600)
    written = os.open(_PID_FILE, os.O_RDONLY | os.O_NONBLOCK)
    with open(LOG, "ab") as log:
        process = subprocess.Popen(
            [PROGRAM, "-D", "-e"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env={"PATH": os.environ["PATH"]},
            start_new_session=True,
        )
    ended = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(written, select.POLLIN)
        poll.register(ended, select.POLLIN)
        ready = [fd for fd, _ in poll.poll(_START_S * 1000)]
        if ready != [written]:
            with open(LOG, encoding="utf-8", errors="replace") as file:
                raise RuntimeError(f"sshd did not start; it wrote: {file.read()[-2000:]}")
    finally:
        os.close(written)
        os.close(ended)
    os.unlink(_PID_FILE)
    with open(_PID_FILE, "w", encoding="ascii") as file:
        file.write(f"{process.pid}\n")
    process.returncode = 0  # the first process of the machine reaps it


def listener() -> int | None:
    """The number of the process that listens, if there is one."""
    try:
        with open(_PID_FILE, encoding="ascii") as file:
            pid = int(file.read())
        return pid if os.readlink(f"/proc/{pid}/exe") == os.path.realpath(PROGRAM) else None
    except (OSError, ValueError):
        return None
