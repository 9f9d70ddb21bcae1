"""Starting processes that cannot be left behind.

`Guarded` starts a command under a guard (see `fireflyer.runtime.processes.guard`): when this process closes it or dies,
the command and all that it started are killed. `start_with_parent_death_signal` starts a direct child that dies with
this process (see
`fireflyer.runtime.processes.parent_death_signal`); on top of that it has a session of its own, so that `killpg` reaches
what it forks.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import secrets
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Final, cast

from fireflyer.base.os_errors import translate_os_error
from fireflyer.runtime.processes import guard, parent_death_signal
from fireflyer.runtime.processes.guard import MARKER, descendants, marked
from fireflyer.runtime.processes.guard_command import PYTHON, GuardCommand

__all__ = [
    "MARKER",
    "Guarded",
    "become_subreaper",
    "child_environment",
    "descendants",
    "exit_code_of",
    "kill_marked",
    "marked",
    "new_token",
    "reap_orphans",
    "start_with_parent_death_signal",
    "watch_exit",
]

KILL_TIMEOUT_S = 10.0
MAX_WORD_BYTES: Final = 4096
_LAST_READS: Final = 32


def new_token() -> str:
    """Marks the processes of one job; not a secret."""
    return secrets.token_hex(12)


def child_environment(additions: Mapping[str, str]) -> dict[str, str]:
    """This process's environment and, over it, the additions."""
    return {**os.environ, **additions}


def exit_code_of(returncode: int) -> int:
    """As the shell says it: 128 + n for signal n."""
    return returncode if returncode >= 0 else 128 - returncode


def become_subreaper() -> None:
    """Descendants that lose their parent become children of this process from now on; see `reap_orphans`."""
    ctypes.CDLL(None).prctl(guard.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans(known: Callable[[int], bool]) -> None:
    """Removes ended children that nobody waits for. `known` says which ones somebody does; those stay."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or known(ended.si_pid):
            return
        os.waitpid(ended.si_pid, os.WNOHANG)


def watch_exit(loop: asyncio.AbstractEventLoop, pid: int, on_exit: Callable[[], None]) -> None:
    """Calls `on_exit` once when the child has ended (it is still to be waited for). Raises `FireflyerError`."""
    try:
        fd = os.pidfd_open(pid)
    except OSError as error:
        raise translate_os_error(error, f"watch process {pid}") from error

    def ended() -> None:
        loop.remove_reader(fd)
        os.close(fd)
        on_exit()

    loop.add_reader(fd, ended)


def start_with_parent_death_signal(
    command: Sequence[str], *, environment: Mapping[str, str], stdout: int, stderr: int, directory: str | None = None
) -> subprocess.Popen[bytes]:
    """A child in a session of its own with the given environment (complete), standard input empty. A command that
    cannot be executed ends with 127 or 126 and says why on its standard error. Raises `FireflyerError`."""
    try:
        return subprocess.Popen(
            [*PYTHON, parent_death_signal.__file__, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=dict(environment),
            cwd=directory,
            start_new_session=True,
        )
    except OSError as error:
        raise translate_os_error(error, f"start {command[0]}") from error


async def kill_marked(token: str, uid: int | None = None) -> bool:
    """Kills every process of this user, and of `uid`, that carries the token until none is left; False when some
    outlive SIGKILL."""
    deadline_s = asyncio.get_running_loop().time() + KILL_TIMEOUT_S
    pause_s = 0.002
    while pids := marked(token, uid):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        if asyncio.get_running_loop().time() >= deadline_s:
            return False
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
    return True


class Guarded:
    """A command under a guard, and all that it starts. Made and used on one event loop."""

    def __init__(
        self,
        command: Sequence[str] | GuardCommand,
        *,
        token: str,
        environment: Mapping[str, str],
        log: IO[bytes],
        on_exit: Callable[[int], None],
        pass_fds: Sequence[int] = (),
    ) -> None:
        """`on_exit` is called with the exit code when the command itself has ended: what it started may still run.
        Output of the command goes to `log`. `pass_fds`: descriptors that guard and command inherit. Raises
        `FireflyerError`."""
        how = command if isinstance(command, GuardCommand) else GuardCommand.here(command)
        self.token = token
        self.pid: int | None = None
        self._remote = how.remote
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._said = b""
        self._has_exited = False
        self._clean = False
        try:
            self._process = subprocess.Popen(
                how.argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**environment, MARKER: token},
                start_new_session=True,
                pass_fds=tuple(pass_fds),
            )
        except OSError as error:
            raise translate_os_error(error, f"start {how.argv[0]}") from error
        self._control_pipe = cast("IO[bytes]", self._process.stdin)
        self._words = cast("IO[bytes]", self._process.stdout)
        os.set_blocking(self._words.fileno(), False)
        try:
            if how.orders:
                os.write(self._control_pipe.fileno(), how.orders)  # at most MAX_ORDERS_BYTES: it does not block
            os.set_blocking(self._control_pipe.fileno(), False)
            watch_exit(self._loop, self._process.pid, self._ended)
        except BaseException:
            self._control_pipe.close()
            self._words.close()
            self._process.wait()
            raise
        self._loop.add_reader(self._words.fileno(), self._listen)

    def signal(self, number: int) -> None:
        """To the process group that the command leads; nothing happens where it leads none, or has ended. The guard
        sends it, to whom the command's number belongs until it says how that ended."""
        if not self._control_pipe.closed:
            try:
                os.write(self._control_pipe.fileno(), b"signal %d\n" % number)
            except OSError:
                pass  # the guard has just ended, or hears nothing: then thousands of signals wait for it

    def kill(self) -> None:
        """SIGKILL to the command and everything below it; returns at once, `wait_gone` says when it is done."""
        self._control_pipe.close()
        if not self._gone.done():
            self._process.send_signal(signal.SIGCONT)

    async def wait_gone(self, timeout_s: float = KILL_TIMEOUT_S) -> bool:
        """Waits until the guard has ended by itself or, after `kill`, until `timeout_s` is over; a guard that does not
        answer is killed as well. True when nothing is left."""
        if not self._control_pipe.closed:
            await asyncio.shield(self._gone)
        else:
            try:
                async with asyncio.timeout(timeout_s):
                    await asyncio.shield(self._gone)
            except TimeoutError:
                self._process.kill()
                await asyncio.shield(self._gone)
        if not self._clean and not self._remote:
            self._clean = await kill_marked(self.token)
        return self._clean

    def _listen(self) -> bool:
        """Reads what has come. False when that was all: nothing more is there, or will come."""
        try:
            words = os.read(self._words.fileno(), 4096)
        except BlockingIOError:
            return False
        if not words:
            self._loop.remove_reader(self._words.fileno())
            return False
        *lines, rest = (self._said + words).split(b"\n")
        self._said = rest[-MAX_WORD_BYTES:]
        for line in lines:
            self._take(line)
        return True

    def _take(self, line: bytes) -> None:
        """One line. A shell of another machine may print what it likes before the guard speaks."""
        word, _, number = line.partition(b" ")
        is_number = number.isdigit() and len(number) < 10
        if word == b"started" and is_number:
            self.pid = int(number)
        elif word == b"exited" and is_number and not self._has_exited:
            self._has_exited = True
            self._on_exit(int(number))
        elif line == b"clean":
            self._clean = True

    def _ended(self) -> None:
        if not self._words.closed:
            for _ in range(_LAST_READS):  # all that was in the pipe; whoever holds it still may go on writing
                if not self._listen():
                    break
            self._loop.remove_reader(self._words.fileno())
            self._words.close()
        self._control_pipe.close()
        self._process.wait()
        if not self._gone.done():
            self._gone.set_result(None)
