"""Runs a command in a machine: `python -m tests.support.machines.entry PID USER DIRECTORY STATUS COMMAND...`.

PID is the machine's first process, STATUS a pipe. A process that enters a process namespace stays outside of it and its
children are inside, so this program stays as the command's parent: it passes on signals, ends as the command ends, and
when it is killed the kernel kills the command. It writes "started N" to STATUS, N being the number of the command's
process in the machine, or "failed ERRNO TEXT", and then closes it.
"""

from __future__ import annotations

import os
import pwd
import resource
import signal
import sys
from typing import Final

from tests.support.machines.kernel import die_with_parent, enter

__all__ = ["main"]

_PASSED_ON: Final = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
)


def main() -> int:
    pid, user, directory, status = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    os.set_inheritable(status, False)
    try:
        enter(pid)
    except OSError as error:
        _say(status, error)
        return 1
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    child = os.fork()
    if child == 0:
        _become(user, directory, status, sys.argv[5:])
    os.close(status)
    for number in _PASSED_ON:
        signal.signal(number, lambda number, _: os.kill(child, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    _, how = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(how)
    return code if code >= 0 else _end_by(-code)


def _become(user: str, directory: str, status: int, command: list[str]) -> None:
    try:
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if signal.getsignal(number) not in (None, signal.SIG_DFL):
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.setsid()  # a terminal's signals come once, from this program
        account = pwd.getpwnam(user)
        if account.pw_uid != os.getuid():
            os.initgroups(user, account.pw_gid)
            os.setgid(account.pw_gid)
            os.setuid(account.pw_uid)
        die_with_parent()
        os.chdir(directory)
        os.write(status, f"started {os.getpid()}\n".encode())
        os.execvp(command[0], command)
    except OSError as error:
        _say(status, error)
    finally:
        os._exit(127)


def _say(status: int, error: OSError) -> None:
    os.write(status, f"failed {error.errno} {error}\n".encode())


def _end_by(number: int) -> int:
    """Ends this process by the signal that has ended the command, without a core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number


if __name__ == "__main__":
    sys.exit(main())
