"""A PostgreSQL server of our own: its data in a temporary directory, reached by a Unix socket only.

As root it runs as an unprivileged user, since PostgreSQL refuses root. The kernel kills it when this process dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.patience import allowed_s

__all__ = ["PostgresServer", "postgres_programs", "running_postgres"]

_PR_SET_PDEATHSIG = 1
_LIMIT_S = 60.0


def postgres_programs() -> str | None:
    """The directory of initdb and postgres: Debian keeps them out of PATH. None if there are none."""
    found = sorted(glob.glob("/usr/lib/postgresql/*/bin/initdb"), key=lambda path: float(path.split("/")[4]))
    path = found[-1] if found else shutil.which("initdb")
    return os.path.dirname(path) if path else None


class PostgresServer:
    """`start`, `stop` and `crash` may be repeated; the data stay until `remove`."""

    def __init__(self, programs: str, *, durable: bool = False) -> None:
        self._programs = programs
        self._user = _unprivileged()
        self._numbers = itertools.count(1)
        # Not below pytest's own directory: another user must reach it, and a socket's path is short.
        self.directory = tempfile.mkdtemp(prefix="ff-pg-", dir="/tmp")
        if self._user is not None:
            os.chown(self.directory, self._user.pw_uid, self._user.pw_gid)
        self._data = os.path.join(self.directory, "data")
        self._log = os.path.join(self.directory, "log")
        self._process: subprocess.Popen[bytes] | None = None
        arguments = ["initdb", "-D", self._data, "-U", "fireflyer", "-A", "trust", "-E", "UTF8", "--locale=C"]
        self._run([*arguments, "--no-sync"])
        unsafe = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off"}
        settings = {"listen_addresses": "", "unix_socket_directories": self.directory, "max_connections": "64"}
        settings |= {"autovacuum": "off"}  # its processes would come at any time
        settings |= {} if durable else unsafe
        lines = [f"{name} = '{value}'\n" for name, value in settings.items()]
        with open(os.path.join(self._data, "postgresql.conf"), "a") as file:
            file.writelines(lines)

    def url(self, *, table: str | None = None) -> str:
        """Of a table that no other test uses."""
        table = table or f"test_{next(self._numbers)}"
        return f"postgresql:///postgres?host={self.directory}&user=fireflyer&table={table}"

    def start(self) -> None:
        """Returns when it takes connections."""
        libc = ctypes.CDLL(None)
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [os.path.join(self._programs, "postgres"), "-D", self._data],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                user=None if self._user is None else self._user.pw_uid,
                group=None if self._user is None else self._user.pw_gid,
                extra_groups=None if self._user is None else [],
                preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
            )
        deadline = time.monotonic() + allowed_s(_LIMIT_S)
        ready = [os.path.join(self._programs, "pg_isready"), "-q", "-h", self.directory, "-t", "5"]
        while subprocess.run(ready, check=False).returncode != 0:
            assert self._process.poll() is None, Path(self._log).read_text()
            assert time.monotonic() < deadline, Path(self._log).read_text()
            time.sleep(0.02)

    def stop(self) -> None:
        """Ends its connections, then itself."""
        self._end(signal.SIGINT)

    def crash(self) -> None:
        """As after a power cut, except that the kernel's cache survives: it recovers from its log at the next start."""
        self._end(signal.SIGQUIT)

    def remove(self) -> None:
        if self._process is not None:
            self.crash()
        shutil.rmtree(self.directory)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        assert process is not None, "it does not run"
        process.send_signal(number)
        try:
            process.wait(allowed_s(_LIMIT_S))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise

    def _run(self, arguments: list[str]) -> None:
        done = subprocess.run(
            [os.path.join(self._programs, arguments[0]), *arguments[1:]],
            cwd=self.directory,
            capture_output=True,
            text=True,
            check=False,
            user=None if self._user is None else self._user.pw_uid,
            group=None if self._user is None else self._user.pw_gid,
            extra_groups=None if self._user is None else [],
        )
        assert done.returncode == 0, done.stdout + done.stderr


@contextlib.contextmanager
def running_postgres(programs: str, *, durable: bool = False) -> Iterator[PostgresServer]:
    server = PostgresServer(programs, durable=durable)
    try:
        server.start()
        yield server
    finally:
        server.remove()


def _unprivileged() -> pwd.struct_passwd | None:
    if os.getuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise AssertionError("no unprivileged user to run PostgreSQL as")
