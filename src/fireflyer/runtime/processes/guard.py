"""A guard: the parent of one process, which leaves nothing of it behind. Runs as a program of its own.

    python -I -S guard.py [--lease=SECONDS [--first-lease=SECONDS]] [--until=FILE] [--detached]
        [--forward] command argument ...

The guard is started with a pipe as standard input, which nobody but its owner holds open, and a pipe as standard
output, on which it says one line each: `started PID`, `exited CODE` when the command has ended, `clean` when nothing is
left. When its input ends (the owner closed it, or died, however it died), or when the command ends, the guard kills
everything that the command started and ends itself. A line `signal NUMBER` in its input goes to the process group that
the command leads: the guard has not waited for the command yet, so no other group has that number.

Nothing escapes by `setsid` or by forking twice: the guard is a *child subreaper*, so whoever loses its parent becomes
the guard's own child, and the guard looks for descendants until there are none. Who starts a guard marks it and thereby
all below it with `FF_JOB_TOKEN` in the environment, by which `marked` finds them when the guard itself was killed. A
guard kills nobody by the mark: a batch system runs jobs with the environment of who submitted them, and a job that was
submitted by a rank is not the rank's.

With `--lease` the command must also renew its lease: it writes the end of the lease, in nanoseconds of CLOCK_BOOTTIME
(which counts while a machine sleeps), as a line of digits to the descriptor that `FF_LEASE_FD` names. When the lease
ends the guard says `expired` and kills everything. No line can lengthen the lease to more than SECONDS from now. The
first lease begins with the guard and may be longer; the first line ends it. With `--detached` nobody owns the guard:
its input is not read, and SIGTERM asks it to kill everything. Its output may then be a file, from which a process that
was started later learns what happened. With `--forward` SIGUSR1 goes on to the command, and SIGUSR2 as SIGTERM: who
signals the guard never signals another process that was given the command's number. The command starts with both
blocked, and unblocks them when it hears them.

With `--until` a file says until when everything may run, in nanoseconds of CLOCK_BOOTTIME; whoever starts the guard
writes it anew from time to time. Without that file the guard ends.

Standard library only, and as little of it as possible: it starts in 10 ms and must outlive everything else.
"""

import ctypes
import os
import select
import signal
import sys
import time

__all__ = ["LEASE_FD", "MARKER", "Lease", "descendants", "main", "marked"]

MARKER = "FF_JOB_TOKEN"
KILL_TIMEOUT_S = 10.0
"""Processes that outlive SIGKILL for so long are stuck in the kernel; the guard says `left` instead of `clean`."""
MAX_ENVIRON_BYTES = 4 << 20
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LEASE_FD = "FF_LEASE_FD"
LEASE_CHECK_S = 0.2
_MAX_WORD_BYTES = 4096
UNTIL_CHECK_S = 1.0
_MAX_UNTIL_BYTES = 64
_FORWARDED = {signal.SIGUSR1: signal.SIGUSR1, signal.SIGUSR2: signal.SIGTERM}
_DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE, signal.SIGTTOU)


def processes() -> dict[int, int]:
    """Parent of every process that is not a zombie."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if fields and (fields[0] not in (b"Z", b"X") or _has_threads(name)):
                parents[int(name)] = int(fields[1])
    return parents


def _has_threads(pid: str) -> bool:
    """A process whose first thread has ended looks like a zombie while its other threads run on."""
    try:
        return len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def descendants(root: int) -> list[int]:
    """Living processes below `root`, parents before children."""
    children: dict[int, list[int]] = {}
    for pid, parent in processes().items():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.pop(queue.pop(), [])
        found += below
        queue += below
    return found


def marked(token: str, uid: int | None = None) -> list[int]:
    """Living processes of this user, or of `uid` as well, except the caller, that were started with the token, or with
    one that continues it after a dot."""
    needle = f"\0{MARKER}={token}".encode()
    found = []
    for pid in processes():
        if pid == os.getpid():
            continue
        try:
            if os.stat(f"/proc/{pid}").st_uid not in (os.getuid(), uid):
                continue
            with open(f"/proc/{pid}/environ", "rb") as file:
                environ = b"\0" + file.read(MAX_ENVIRON_BYTES) + b"\0"
        except OSError:
            continue
        at = environ.find(needle)
        if at >= 0 and environ[at + len(needle) : at + len(needle) + 1] in (b"\0", b"."):
            found.append(pid)
    return found


def _kill(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass


def _reap() -> list[tuple[int, int]]:
    """Children that have ended, with their exit codes as the shell says them."""
    ended = []
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            code = os.waitstatus_to_exitcode(status)
            ended.append((pid, code if code >= 0 else 128 - code))
    except ChildProcessError:
        pass
    return ended


def _kill_all() -> bool:
    """Kills until nothing is left; whoever forks meanwhile is found in the next round. Looking at all processes takes a
    while, in which one of them can change its parent and be missed: only the second look that finds none counts."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    pause_s = 0.001
    empty_looks = 0
    while time.monotonic() < deadline:
        victims = descendants(os.getpid())
        _kill(victims)
        _reap()
        empty_looks = 0 if victims else empty_looks + 1
        if empty_looks == 2:
            return True
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
    return False


def _say(text: str) -> None:
    try:
        os.write(1, text.encode() + b"\n")
    except OSError:
        pass


class Lease:
    """Until when the command may run; all times are nanoseconds of one clock. The first lease, in which the command has
    to come up, is no measure for those that it asks for: the first renewal replaces it, even by a shorter one."""

    def __init__(self, lease_ns: int, now_ns: int, first_ns: int = 0) -> None:
        self._lease_ns = lease_ns
        self.end_ns = now_ns + (first_ns or lease_ns)
        self._renewed = False
        self._rest = b""

    def take(self, data: bytes, now_ns: int) -> None:
        """What came from the command: any bytes, in any pieces. Lines that are no number change nothing."""
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-_MAX_WORD_BYTES:]
        for line in lines:
            if line.isdigit() and len(line) < 20:
                end_ns = min(int(line), now_ns + self._lease_ns)
                self.end_ns = max(self.end_ns, end_ns) if self._renewed else end_ns
                self._renewed = True

    def over(self, now_ns: int) -> bool:
        return now_ns >= self.end_ns


def _boottime_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class _Until:
    """The end of everything, from a file that is replaced atomically."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._looked_ns = 0
        self._end_ns = 0

    def over(self, now_ns: int) -> bool:
        if now_ns >= min(self._end_ns, self._looked_ns + int(UNTIL_CHECK_S * 1e9)):
            self._looked_ns, self._end_ns = now_ns, self._read()
        return now_ns >= self._end_ns

    def _read(self) -> int:
        try:
            with open(self._path, "rb") as file:
                word = file.read(_MAX_UNTIL_BYTES).split()[:1]
        except OSError:
            return 0
        return int(word[0]) if word and word[0].isdigit() and len(word[0]) < 20 else 0


def _become(command: list[str], guard: int, libc: ctypes.CDLL) -> None:
    """In the child: dies with the guard, hears signals again, and becomes the command."""
    try:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != guard:
            return
        for number in (*_DEAF_TO, signal.SIGCHLD, signal.SIGXFSZ, *_FORWARDED):
            signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(2, 1)
        os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        os.write(2, f"{command[0]}: {error}\n".encode(errors="replace"))
    finally:
        os._exit(127)


class _Guard:
    """One command, from its start to the death of the last process that it left."""

    def __init__(self, lease: Lease | None, until: _Until | None, *, detached: bool, forwards: bool) -> None:
        self._detached = detached
        self._forwards = forwards
        self._lease = lease
        self._until = until
        self._libc = ctypes.CDLL(None)
        self._libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._poll = select.poll()
        self._asked = b""
        self._wake = self._hear_signals()
        self._renewals = -1

    def _hear_signals(self) -> int:
        for number in _DEAF_TO:
            signal.signal(number, signal.SIG_IGN)
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        os.set_blocking(wake_read, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        heard = (signal.SIGCHLD, *((signal.SIGTERM,) if self._detached else ()))
        for number in (*heard, *(_FORWARDED if self._forwards else ())):
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # who starts us may have blocked SIGCHLD
        self._poll.register(wake_read, select.POLLIN)
        if not self._detached:
            self._poll.register(0, select.POLLIN)
        return wake_read

    def run(self, command: list[str]) -> bool:
        """True when nothing is left behind."""
        child = self._start(command)
        _say(f"started {child}")
        while self._may_run(child):
            pass
        clean = _kill_all()
        _say("clean" if clean else "left")
        return clean

    def _start(self, command: list[str]) -> int:
        renewals = -1
        if self._lease is not None:
            self._renewals, renewals = os.pipe()
            os.set_inheritable(renewals, True)
            os.environ[LEASE_FD] = str(renewals)
            self._poll.register(self._renewals, select.POLLIN)
        guard = os.getpid()
        if self._forwards:  # none is lost that comes before the command hears it
            signal.pthread_sigmask(signal.SIG_BLOCK, set(_FORWARDED.values()))
        child = os.fork()
        if child == 0:
            _become(command, guard, self._libc)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if renewals >= 0:
            os.close(renewals)
        return child

    def _may_run(self, child: int) -> bool:
        """Waits for the next thing to happen; False when all is to be killed."""
        limited = self._lease is not None or self._until is not None
        ready = [fd for fd, _ in self._poll.poll(1000 * LEASE_CHECK_S if limited else None)]
        if self._until is not None and self._until.over(_boottime_ns()):
            _say("expired")
            return False
        if self._lease is not None:
            if self._renewals in ready and not self._renew(self._lease):
                self._poll.unregister(self._renewals)
            if self._lease.over(_boottime_ns()):
                _say("expired")
                return False
        if 0 in ready and not self._hear_owner(child):
            return False
        heard = os.read(self._wake, 4096) if self._wake in ready else b""
        if signal.SIGTERM in heard and self._detached:
            return False
        if self._forwards:
            for number in _FORWARDED:
                if number in heard:
                    os.kill(child, _FORWARDED[number])  # it is ours and not waited for yet: the number is its own
        for pid, code in _reap():
            if pid == child:
                _say(f"exited {code}")
                return False
        return True

    def _hear_owner(self, child: int) -> bool:
        """False when the owner is gone."""
        data = os.read(0, 4096)
        *lines, rest = (self._asked + data).split(b"\n")
        self._asked = rest[-_MAX_WORD_BYTES:]
        for line in lines:
            word, _, number = line.partition(b" ")
            if word == b"signal" and number.isdigit() and len(number) < 3:
                try:
                    os.killpg(child, int(number))
                except OSError:
                    pass  # it has not yet a group of its own
        return bool(data)

    def _renew(self, lease: Lease) -> bool:
        """False when the command has closed its end: it renews no more, and the lease ends in time."""
        data = os.read(self._renewals, 4096)
        lease.take(data, _boottime_ns())
        return bool(data)


def main(arguments: list[str]) -> int:
    """0 when nothing is left behind."""
    lease_s, first_s, until, detached, forwards = 0.0, 0.0, "", False, False
    while arguments and arguments[0].startswith("--"):
        name, _, value = arguments.pop(0).partition("=")
        if name == "--lease":
            lease_s = float(value)
        elif name == "--first-lease":
            first_s = float(value)
        elif name == "--until":
            until = value
        elif name == "--detached":
            detached = True
        elif name == "--forward":
            forwards = True
    lease = Lease(int(lease_s * 1e9), _boottime_ns(), int(first_s * 1e9)) if lease_s else None
    guard = _Guard(lease, _Until(until) if until else None, detached=detached, forwards=forwards)
    return 0 if guard.run(arguments) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
