"""Puts a machine back into the state in which it was started: `python -m tests.support.machines.reset DIRECTORY...`.

Runs in the machine, as root. Kills all processes but the first one, sshd and itself, unmounts what was mounted since,
empties the given directories, fills homes, and starts sshd where it is gone.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from typing import Final

from tests.support.machines import filesystem, sshd
from tests.support.machines.processes import living

__all__ = ["main"]

_KILL_S: Final = 60.0


def main() -> int:
    kept = {1, os.getpid(), sshd.listener()}
    deadline_s = time.monotonic() + _KILL_S
    while victims := [process.pid for process in living() if process.pid not in kept]:
        for pid in victims:
            _kill(pid, deadline_s)
    filesystem.unmount_new()
    _remove_ipc()
    listens = sshd.listener() is not None
    filesystem.empty_private(sys.argv[1:], kept=sshd.FILES if listens else ())
    filesystem.fill_homes()
    if not listens:
        sshd.start()
    return 0


def _kill(pid: int, deadline_s: float) -> None:
    """Waits until it has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        if not select.select([fd], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
            raise TimeoutError(f"process {pid} did not end within {_KILL_S:.0f} s of SIGKILL")
    except ProcessLookupError:
        pass
    finally:
        os.close(fd)


def _remove_ipc() -> None:
    """Shared memory, semaphores and queues of System V."""
    for name in ("shm", "sem", "msg"):
        with open(f"/proc/sysvipc/{name}", encoding="ascii") as file:
            if len(file.readlines()) > 1:
                subprocess.run(["ipcrm", f"--all={name}"], check=True)


if __name__ == "__main__":
    sys.exit(main())
