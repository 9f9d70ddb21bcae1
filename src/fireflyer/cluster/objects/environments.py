"""Python environments of tasks: a directory that the user names, or one that the node builds once from a lock file.

An environment is named by the hash of its lock, the Python that builds it and the platform. Programs in an environment
begin with its path, so it cannot be built elsewhere and renamed: it is built in its own place, and counts from the
moment at which the file `complete` is beside it. What is there without that file was left by a killed builder and is
removed. One process builds, under a lock; the others wait. Whoever waited for a build that failed gets its error, and
does not repeat it; whoever asks later does.

Building executes code of the user's packages: with `account` it runs as that account. So each account has a cache of
its own: what one has built is never used by another, who would run what the first one may change. Whoever uses an
environment holds a shared lock on it, by a descriptor that the processes of the run may inherit: what is in use is not
evicted.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Self

from fireflyer.base.errors import (
    Aborted,
    Busy,
    FireflyerError,
    JobFailed,
    NoSpace,
    NotFound,
    PermanentError,
    Timeout,
    UsageError,
)
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.units import GIB, SECOND, format_bytes, format_duration
from fireflyer.cluster.core.objects.blobs import hash_of
from fireflyer.cluster.core.objects.builds import build_failure
from fireflyer.cluster.objects.build_commands import run_bounded
from fireflyer.cluster.objects.directory import held_lock
from fireflyer.cluster.objects.lock_files import LockFile
from fireflyer.cluster.objects.trees import remove_tree, tree_bytes

__all__ = ["Environment", "EnvironmentCache", "check_environment", "environment_name", "hold_environment"]

BUILD_NS: Final = 1800 * SECOND
DEFAULT_ENVIRONMENT_BYTES: Final = 200 * GIB
MAX_ENVIRONMENT_BYTES: Final = 40 * GIB
"""Of one."""
LAST_LINES: Final = 20
_POLL_S: Final = 0.05
_MEASURE_NS: Final = 5 * SECOND
_STOPPED: Final = "the run was stopped while its environment was built"


class Environment:
    """Environment in use until it is closed; where `fd` is passed on to the processes of a run, until they end."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self.fd = fd

    @property
    def python(self) -> str:
        return os.path.join(self.path, "bin", "python")

    def close(self) -> None:
        if self.fd >= 0:
            os.utime(self.fd)  # it is kept for its time from now
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


def hold_environment(path: str) -> Environment | None:
    """The environment that an earlier process got from a cache, by its path; None: it is not there any more."""
    directory = os.path.dirname(path)
    place = _Place(os.path.dirname(directory), os.path.basename(directory))
    if place.path != path or not _is_name(place.name):
        return None
    try:
        return place.used()
    except OSError:
        return None


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
        max_environment_bytes: int = MAX_ENVIRONMENT_BYTES,
        build_ns: int = BUILD_NS,
        require_hashes: bool = False,
        keep_mode: bool = False,
        pip_arguments: Sequence[str] = (),
    ) -> None:
        """`uv`: its program, where the node has one. `account`: uid and gid that build (needs root); they must be able
        to enter `root`, and only have what is below it. `keep_mode`: `root` is another account's, and nothing is
        built."""
        self._root = os.path.abspath(root)
        self._python = python
        self._uv = uv
        self._account = account
        self._max_bytes = max_bytes
        self._max_environment_bytes = max_environment_bytes
        self._require_hashes = require_hashes
        self._build_ns = build_ns
        self._pip_arguments = tuple(pip_arguments)
        try:
            os.makedirs(self._root, mode=0o700, exist_ok=True)
            if not keep_mode:
                os.chmod(self._root, 0o700 if account is None else 0o711)
        except OSError as error:
            raise translate_os_error(error, f"make {root}") from error

    def get(
        self, lock: LockFile, *, stopped: threading.Event | None = None, on_build: Callable[[], None] | None = None
    ) -> Environment:
        """Builds it if it is not there: `on_build` is called when that, or waiting for another builder, begins. Blocks,
        until it is `stopped`.

        Raises `JobFailed`, with what the tool said, where the lock file is at fault; `NoSpace`, `PermanentError` where
        the node is; `Timeout`; `Aborted`; `UsageError` where the node cannot build this kind, or a `uv.lock` has what
        cannot be installed by hashes.
        """
        stopped = stopped or threading.Event()
        lock = lock.installable()
        if lock.kind == "pylock.toml" and self._uv is None:
            raise UsageError("a pylock.toml needs uv, which this node does not have; give a requirements file instead")
        place = _Place(self._root, environment_name(lock, _version_of(self._python), platform.machine()))
        seen = place.failures()
        environment = place.used()
        if environment is not None:
            return environment
        if on_build is not None:
            on_build()
        fd, waited = self._wait_for_builder(place, stopped)
        try:
            environment = place.used()
            if environment is not None:
                return environment
            if waited and place.failures() > seen:
                raise place.last_failure()
            self._evict(place.name)
            self._build(place, lock, fd, stopped)
            environment = place.used()
        finally:
            os.close(fd)
        if environment is None:
            raise Busy(f"the environment {place.path} was removed as soon as it was built; ask again")
        return environment

    def collect(self, unused_ns: int) -> int:
        """Removes environments that nobody has used for so long; how many."""
        before_ns = time.time_ns() - unused_ns
        return sum(place.used_ns() < before_ns and place.evicted() for place in self._places())

    def _wait_for_builder(self, place: _Place, stopped: threading.Event) -> tuple[int, bool]:
        """The builder's lock, by its descriptor, and whether it was waited for. It is asked for again and again: flock
        waits without a limit, and cannot be told to give up."""
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
            if stopped.wait(_POLL_S):
                os.close(fd)
                raise Aborted(_STOPPED)

    def _build(self, place: _Place, lock: LockFile, fd: int, stopped: threading.Event) -> None:
        """As the account. The commands inherit the builder's lock: no other builder begins while one of them lives."""
        place.remove()
        try:
            os.mkdir(place.directory, 0o700)
            locked = os.path.join(place.directory, lock.kind)
            with open(locked, "xb") as file:
                file.write(lock.data)
                if self._account is not None:
                    os.fchown(file.fileno(), *self._account)
            if self._account is not None:  # the last of all: from now on the account may put links here
                os.chown(place.directory, *self._account)
        except OSError as error:
            raise translate_os_error(error, f"make {place.directory}") from error
        deadline_ns = time.monotonic_ns() + self._build_ns
        refused = _Refused(place.directory, self._max_environment_bytes, stopped)
        for command in self._commands(place.path, locked, whole=lock.whole):
            left_ns = max(1, deadline_ns - time.monotonic_ns())
            end = run_bounded(
                command,
                place.directory,
                left_ns,
                account=self._account,
                inherited_fd=fd,
                last_lines=LAST_LINES,
                refused=refused,
            )
            if stopped.is_set():
                place.remove()
                raise Aborted(_STOPPED)
            if end.code is None:
                why = end.why or f"it took longer than {format_duration(self._build_ns)}"
                said = f": {' | '.join(end.lines)}" if end.lines else ""
                raise self._failed(place, f"the environment of {lock.title} could not be built ({why}){said}", 1)
            if end.code != 0:
                failure = build_failure(lock.title, end.code, end.lines)
                raise self._failed(place, failure.text, end.code, of_user=failure.of_user)
        if why := refused.too_large():
            raise self._failed(place, f"the environment of {lock.title} cannot be used: {why}", 1)
        place.complete()

    def _failed(self, place: _Place, text: str, code: int, *, of_user: bool = True) -> FireflyerError:
        place.note_failure(text, code, of_user=of_user)
        place.remove()
        return place.last_failure()

    def _commands(self, path: str, locked: str, *, whole: bool) -> Iterator[list[str]]:
        if self._uv is not None:
            yield [self._uv, "venv", "--quiet", "--python", self._python, path]
            hashed = ["--require-hashes"] if self._require_hashes and locked.endswith(".txt") else []
            yield [self._uv, "pip", "sync", "--quiet", *hashed, "--python", os.path.join(path, "bin", "python"), locked]
            return
        yield [self._python, "-m", "venv", path]
        # With hashes in the file pip asks for all of them; without, it takes what the index has for the versions.
        pip = [os.path.join(path, "bin", "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        hashed = ["--require-hashes"] if self._require_hashes else []
        alone = ["--no-deps"] if whole else []  # `uv pip sync` looks for no dependencies anyway
        yield [*pip, "--no-input", *hashed, *alone, *self._pip_arguments, "-r", locked]

    def _places(self) -> list[_Place]:
        return [_Place(self._root, name) for name in sorted(os.listdir(self._root)) if _is_name(name)]

    def _evict(self, kept: str) -> None:
        """The least recently used environments, until there is room; never one in use."""
        places = self._places()
        sizes = {place.name: tree_bytes(place.directory) for place in places}
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
        if os.path.lexists(self.directory):
            remove_tree(self.directory)

    def complete(self) -> None:
        os.sync()  # an environment has 10,000 files; the mark must not be there without them
        fd = os.open(self._complete_path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        os.fsync(fd)
        os.close(fd)

    def failures(self) -> int:
        return self._failed()[0]

    def last_failure(self) -> FireflyerError:
        _, text, code, of_user = self._failed()
        return JobFailed(text, exit_code=code) if of_user else PermanentError(text)

    def note_failure(self, text: str, code: int, *, of_user: bool) -> None:
        count = self.failures() + 1
        with open(f"{self._failed_path}.part", "w", encoding="utf-8") as file:
            json.dump([count, text[:4096], code, of_user], file)
        os.replace(f"{self._failed_path}.part", self._failed_path)

    def _failed(self) -> tuple[int, str, int, bool]:
        try:
            with open(self._failed_path, encoding="utf-8") as file:
                count, text, code, of_user = json.loads(file.read(64 << 10))
            return int(count), str(text), int(code), bool(of_user)
        except (FileNotFoundError, ValueError, TypeError):
            return 0, "", 1, False


class _Refused:
    """Why a build that goes on is to be ended; empty: it is not."""

    def __init__(self, directory: str, max_bytes: int, stopped: threading.Event) -> None:
        self._directory, self._max_bytes, self._stopped = directory, max_bytes, stopped
        self._measured_ns = time.monotonic_ns()

    def __call__(self) -> str:
        if self._stopped.is_set():
            return _STOPPED
        if time.monotonic_ns() - self._measured_ns < _MEASURE_NS:
            return ""
        why = self.too_large()
        self._measured_ns = time.monotonic_ns()
        return why

    def too_large(self) -> str:
        if tree_bytes(self._directory) <= self._max_bytes:
            return ""
        return f"it has more than {format_bytes(self._max_bytes)}; lock fewer packages, or name one with --python"


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
