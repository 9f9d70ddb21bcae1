"""Python environments of tasks: a directory that the user names, or one that the node builds once from a lock file.

An environment is named by the hash of its lock, the Python that builds it and the platform. Programs in an environment
begin with its path, so it cannot be built elsewhere and renamed: it is built in its own place, and counts from the
moment at which the file `complete` is beside it. What is there without that file was left by a killed builder and is
removed. One process builds, under a lock; the others wait. Whoever waited for a build that failed gets its error, and
does not repeat it; whoever asks later does.

Building executes code of the user's packages: with `account` it runs as that account. Whoever uses an environment holds
a shared lock on it, by a descriptor that the processes of the run may inherit: what is in use is not evicted.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import IO, Final, Literal, NamedTuple, Self, cast

from fireflyer.base.errors import Busy, JobFailed, NoSpace, NotFound, Timeout, UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.units import GIB, SECOND, format_bytes, format_duration
from fireflyer.cluster.core.objects.blobs import hash_of
from fireflyer.cluster.objects.directory import held_lock

__all__ = ["Environment", "EnvironmentCache", "LockFile", "LockKind", "check_environment", "environment_name"]

LockKind = Literal["requirements.txt", "pylock.toml"]
MAX_LOCK_BYTES: Final = 4 << 20
BUILD_NS: Final = 1800 * SECOND
DEFAULT_ENVIRONMENT_BYTES: Final = 200 * GIB
LAST_LINES: Final = 20
_POLL_S: Final = 0.05
MAX_LINE_BYTES: Final = 500
_READ_S: Final = 5.0
"""For what is still in the pipe when the group is dead."""
_ENVIRONMENT: Final = ("PATH", "LANG", "LC_ALL", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR")
_PREFIXES: Final = ("PIP_", "UV_", "http", "https", "HTTP", "HTTPS", "no_proxy", "NO_PROXY", "REQUESTS_CA")
_UNSHOWN: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x1f\x7f]")


class LockFile(NamedTuple):
    kind: LockKind
    data: bytes

    @classmethod
    def read(cls, path: str) -> Self:
        """Raises `UsageError`, `NotFound`."""
        name = os.path.basename(path)
        if name.startswith("pylock.") and name.endswith(".toml"):
            kind: LockKind = "pylock.toml"
        elif name.endswith(".txt"):
            kind = "requirements.txt"
        else:
            raise UsageError(f"{path} is no lock file; give a requirements file (.txt) or a pylock.toml")
        try:
            with open(path, "rb") as file:
                data = file.read(MAX_LOCK_BYTES + 1)
        except OSError as error:
            raise translate_os_error(error, f"read {path}") from error
        if len(data) > MAX_LOCK_BYTES:
            raise UsageError(f"{path} is longer than {MAX_LOCK_BYTES} bytes, so it is no lock file")
        return cls(kind, data)


class Environment:
    """In use until it is closed. `fd`: pass it on to the processes of a run, and it is in use until they end."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self.fd = fd

    @property
    def python(self) -> str:
        return os.path.join(self.path, "bin", "python")

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_environment(path: str) -> str:
    """The Python of an environment that is there already. Raises `UsageError`."""
    if not os.path.isabs(path):
        raise UsageError(f"the environment {path!r} is not an absolute path; nodes have other working directories")
    python = os.path.join(path, "bin", "python")
    if not os.path.isfile(python) or not os.access(python, os.X_OK):
        raise UsageError(f"{path} is no Python environment on this node: {python} is missing or not executable")
    return python


def environment_name(lock: LockFile, python_version: str, machine: str) -> str:
    return hash_of("\0".join((lock.kind, python_version, machine, hash_of(lock.data))).encode())[:32]


class EnvironmentCache:
    """Environments below `root`. One for each account: an environment belongs to who may change it."""

    def __init__(
        self,
        root: str,
        *,
        python: str = sys.executable,
        uv: str | None = None,
        account: tuple[int, int] | None = None,
        max_bytes: int = DEFAULT_ENVIRONMENT_BYTES,
        build_ns: int = BUILD_NS,
        pip_arguments: Sequence[str] = (),
    ) -> None:
        """`uv`: its program, where the node has one. `account`: uid and gid that build (needs root); they must be able
        to enter `root`, and only have what is below it."""
        self._root = os.path.abspath(root)
        self._python = python
        self._uv = uv
        self._account = account
        self._max_bytes = max_bytes
        self._build_ns = build_ns
        self._pip_arguments = tuple(pip_arguments)
        try:
            os.makedirs(self._root, mode=0o700, exist_ok=True)
            os.chmod(self._root, 0o700 if account is None else 0o711)
        except OSError as error:
            raise translate_os_error(error, f"make {root}") from error

    def get(self, lock: LockFile) -> Environment:
        """Builds it if it is not there. Blocks. Raises `JobFailed` with the last lines of a build that failed,
        `Timeout`, `UsageError` where the node cannot build this kind."""
        if lock.kind == "pylock.toml" and self._uv is None:
            raise UsageError("a pylock.toml needs uv, which this node does not have; give a requirements file instead")
        place = _Place(self._root, environment_name(lock, _version_of(self._python), platform.machine()))
        seen = place.failures()
        environment = place.used()
        if environment is not None:
            return environment
        fd, waited = self._wait_for_builder(place)
        try:
            environment = place.used()
            if environment is not None:
                return environment
            if waited and place.failures() > seen:
                raise JobFailed(place.last_failure())
            self._evict(place.name)
            self._build(place, lock, fd)
            environment = place.used()
        finally:
            os.close(fd)
        if environment is None:
            raise Busy(f"the environment {place.path} was removed as soon as it was built; ask again")
        return environment

    def _wait_for_builder(self, place: _Place) -> tuple[int, bool]:
        """The builder's lock, by its descriptor, and whether it was waited for."""
        fd = os.open(place.builder_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        deadline_ns = time.monotonic_ns() + self._build_ns
        waited = False
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return fd, waited
            except BlockingIOError:
                waited = True
            if time.monotonic_ns() > deadline_ns:
                os.close(fd)
                raise Timeout(f"{place.path} is being built for {format_duration(self._build_ns)}; ask again")
            time.sleep(_POLL_S)

    def _build(self, place: _Place, lock: LockFile, fd: int) -> None:
        """As the account. The commands inherit the builder's lock: no other builder begins while one of them lives."""
        place.remove()
        try:
            os.mkdir(place.directory, 0o700)
            locked = os.path.join(place.directory, lock.kind)
            with open(locked, "xb") as file:
                file.write(lock.data)
            if self._account is not None:
                os.chown(place.directory, *self._account)
                os.chown(locked, *self._account)
        except OSError as error:
            raise translate_os_error(error, f"make {place.directory}") from error
        deadline_ns = time.monotonic_ns() + self._build_ns
        for command in self._commands(place.path, locked):
            left_ns = max(1, deadline_ns - time.monotonic_ns())
            end = _run_bounded(
                command, place.directory, left_ns, account=self._account, inherited_fd=fd, last_lines=LAST_LINES
            )
            if end.code != 0:
                how = (
                    f"took longer than {format_duration(self._build_ns)}"
                    if end.code is None
                    else f"exit code {end.code}"
                )
                text = f"the environment of {lock.kind} could not be built ({how}): {' | '.join(end.lines)}"
                place.note_failure(text)
                place.remove()
                raise JobFailed(text, exit_code=end.code or 1)
        place.complete()

    def _commands(self, path: str, locked: str) -> Iterator[list[str]]:
        if self._uv is not None:
            yield [self._uv, "venv", "--quiet", "--python", self._python, path]
            yield [self._uv, "pip", "sync", "--quiet", "--python", os.path.join(path, "bin", "python"), locked]
            return
        yield [self._python, "-m", "venv", path]
        # With hashes in the file pip asks for all of them; without, it takes what the index has for the versions.
        pip = [os.path.join(path, "bin", "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        yield [*pip, "--no-input", *self._pip_arguments, "-r", locked]

    def _evict(self, kept: str) -> None:
        """The least recently used environments, until there is room; never one in use."""
        places = [_Place(self._root, name) for name in sorted(os.listdir(self._root)) if _is_name(name)]
        sizes = {place.name: _tree_bytes(place.directory) for place in places}
        used_bytes = sum(sizes.values())
        for place in sorted(places, key=lambda one: one.used_ns()):
            if used_bytes <= self._max_bytes:
                return
            if place.name != kept and place.evicted():
                used_bytes -= sizes[place.name]
        if used_bytes > self._max_bytes:
            raise NoSpace(f"environments in use have {format_bytes(used_bytes)}; make room in {self._root}")


class _Place:
    """Where one environment is, with the files beside it: `builder` and `users` (locks), `complete`, `failed`."""

    def __init__(self, root: str, name: str) -> None:
        self.name = name
        self.directory = os.path.join(root, name)
        self.path = os.path.join(self.directory, "environment")
        self.builder_path = f"{self.directory}.builder"
        self._users_path = f"{self.directory}.users"
        self._complete_path = f"{self.directory}.complete"
        self._failed_path = f"{self.directory}.failed"

    def used(self) -> Environment | None:
        """In use from now on, if it is complete."""
        fd = os.open(self._users_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(fd, fcntl.LOCK_SH)
        if os.path.exists(self._complete_path) and os.access(os.path.join(self.path, "bin", "python"), os.X_OK):
            os.utime(self._users_path)
            return Environment(self.path, fd)
        os.close(fd)
        return None

    def used_ns(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            return os.stat(self._users_path).st_mtime_ns
        return 0

    def evicted(self) -> bool:
        """Not while it is used or built."""
        try:
            with (
                held_lock(self.builder_path, fcntl.LOCK_EX | fcntl.LOCK_NB),
                held_lock(self._users_path, fcntl.LOCK_EX | fcntl.LOCK_NB),
            ):
                self.remove()
        except BlockingIOError:
            return False
        return True

    def remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._complete_path)
        shutil.rmtree(self.directory, ignore_errors=True)

    def complete(self) -> None:
        os.sync()  # an environment has 10,000 files; the mark must not be there without them
        fd = os.open(self._complete_path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        os.fsync(fd)
        os.close(fd)

    def failures(self) -> int:
        return self._failed()[0]

    def last_failure(self) -> str:
        return self._failed()[1]

    def note_failure(self, text: str) -> None:
        count = self.failures() + 1
        with open(f"{self._failed_path}.part", "w", encoding="utf-8") as file:
            json.dump([count, text[:4096]], file)
        os.replace(f"{self._failed_path}.part", self._failed_path)

    def _failed(self) -> tuple[int, str]:
        try:
            with open(self._failed_path, encoding="utf-8") as file:
                count, text = json.loads(file.read(64 << 10))
            return int(count), str(text)
        except (FileNotFoundError, ValueError, TypeError):
            return 0, ""


def _is_name(name: str) -> bool:
    return len(name) == 32 and not name.strip("0123456789abcdef")


def _version_of(python: str) -> str:
    """Of the interpreter: which file it is, without starting it. Another version is another file."""
    real = os.path.realpath(python)
    try:
        status = os.stat(real)
    except OSError as error:
        raise NotFound(f"{python} is not there ({error.strerror}); name a Python that the node has") from None
    return f"{real}:{status.st_size}:{status.st_mtime_ns}"


def _tree_bytes(path: str) -> int:
    return sum(
        os.lstat(os.path.join(directory, name)).st_size for directory, _, names in os.walk(path) for name in names
    )


class _CommandEnd(NamedTuple):
    code: int | None
    """None: it took too long and was killed."""
    lines: tuple[str, ...]


def _run_bounded(
    command: Sequence[str],
    directory: str,
    limit_ns: int,
    *,
    account: tuple[int, int] | None,
    inherited_fd: int,
    last_lines: int,
) -> _CommandEnd:
    """Runs it in `directory`, its home, as `account` (uid, gid); kills it after `limit_ns`, and its process group at
    its end. Its environment is this process's settings of networks and package indexes, and nothing else."""
    given = {key: value for key, value in os.environ.items() if key in _ENVIRONMENT or key.startswith(_PREFIXES)}
    try:
        process = subprocess.Popen(
            list(command),
            cwd=directory,
            env={**given, "HOME": directory},
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
        return _CommandEnd(127, (f"{command[0]}: {error.strerror}",))
    output = cast("IO[bytes]", process.stdout)
    lines: deque[str] = deque(maxlen=last_lines)
    reader = threading.Thread(target=_read_lines, args=(output, lines), daemon=True)
    reader.start()
    try:
        ended = _ends_within(process.pid, limit_ns)
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # not reaped yet: the number is still this group's
        code = process.wait()
    reader.join(_READ_S)
    output.close()
    return _CommandEnd(code if ended else None, tuple(lines))


def _ends_within(pid: int, limit_ns: int) -> bool:
    fd = os.pidfd_open(pid)
    try:
        return bool(select.select([fd], [], [], limit_ns / SECOND)[0])
    finally:
        os.close(fd)


def _read_lines(stream: IO[bytes], lines: deque[str]) -> None:
    while line := stream.readline(MAX_LINE_BYTES):
        text = _UNSHOWN.sub("", line.decode(errors="replace")).strip()
        if text:
            lines.append(text)
