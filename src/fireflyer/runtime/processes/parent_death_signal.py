"""Becomes a command that dies with its parent. Runs as a program of its own, between fork and the command.

    python -I -S parent_death_signal.py PARENT_PID command argument ...

Done by a program because code between `fork` and `exec` in a process with threads or an event loop is not safe. It
asks the kernel for SIGKILL when the parent dies, gives every signal its default meaning again (an ignored signal would
stay ignored in the command), and executes the command. Costs 10 ms. Exit code 127: no such command; 126: not
executable, as the shell says them.
"""

import ctypes
import os
import signal
import sys

__all__ = ["main"]

PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> int:
    """Returns only when the command cannot be executed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return 128 + signal.SIGKILL
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        try:
            signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):
            pass
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode(errors="replace"))
        return 127 if isinstance(error, FileNotFoundError) else 126


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
