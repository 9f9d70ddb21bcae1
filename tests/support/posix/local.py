"""A directory of this machine's file system as a `Place`: real system calls, in a process for each user.

Needs root, for the users; and a file system with all that is compared: `local_place` finds one, or says what is
missing.
"""

from __future__ import annotations

import marshal
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from tests.support.posix.places import BOB, ROOT, Identity, User, errno_of

__all__ = ["LocalPlace", "local_place", "missing_abilities"]

HELPER: Final = Path(__file__).with_name("local_helper.py")
COARSE_CLOCK: Final = 5
"""CLOCK_REALTIME_COARSE, the one of file systems."""
EXT_MAGIC: Final = "ef53"
IMAGE_BYTES: Final = 1 << 28
OPEN_TO_ALL: Final = 0o777


class _Helper:
    """One user's process."""

    def __init__(self, directory: str, who: Identity) -> None:
        ours, theirs = socket.socketpair()
        groups = ",".join(map(str, who.groups))
        with theirs:
            words = [str(theirs.fileno()), directory, str(who.uid), str(who.gid), groups]
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(HELPER), *words],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        with ours:
            self._stream = cast("BinaryIO", ours.makefile("rwb"))
        self.directory = "/"

    def call(self, name: str, arguments: tuple[Any, ...]) -> object:
        marshal.dump((name, arguments), self._stream)
        self._stream.flush()
        number, value = marshal.load(self._stream)
        if number:
            raise OSError(number, os.strerror(number))
        return value

    def close(self) -> None:
        self._stream.close()
        self._process.wait(60)


class LocalPlace:
    """In `directory`, which becomes everybody's root: searchable by all, on a file system with everything."""

    def __init__(self, directory: str, name: str = "local") -> None:
        self.name = name
        self._directory = directory
        self._helpers: dict[Identity, _Helper] = {}
        self._top = "/"

    @property
    def top(self) -> str:
        return self._top

    def renew(self, top: str) -> None:
        """A new working directory, which must not be there yet."""
        self._top = top
        os.mkdir(self._directory + self._top)
        os.chmod(self._directory + self._top, OPEN_TO_ALL)  # whatever our umask is

    def below(self, name: str) -> str:
        """A new directory of root's in it, for programs that are no place's calls."""
        path = self.there(name)
        os.mkdir(path)
        return path

    def there(self, name: str) -> str:
        return f"{self._directory}/{name}"

    def enter(self, top: str) -> None:
        """As `renew`, of one that somebody else has made."""
        self._top = top

    def call(self, who: Identity, name: str, arguments: tuple[object, ...]) -> object:
        helper = self._helpers.get(who)
        if helper is None:
            helper = self._helpers[who] = _Helper(self._directory, who)
        if helper.directory != self._top:
            helper.call("chdir", (self._top,))
            helper.directory = self._top
        return helper.call(name, arguments)

    def tick(self) -> None:
        """The clock of file systems stands still for a few milliseconds at a time."""
        before = time.clock_gettime_ns(COARSE_CLOCK)
        while time.clock_gettime_ns(COARSE_CLOCK) == before:
            time.sleep(0.0005)

    def close(self) -> None:
        for helper in self._helpers.values():
            helper.close()


def missing_abilities(place: LocalPlace) -> list[str]:
    """What its file system, or this process, cannot do of what is compared."""
    place.renew("/abilities")
    root, bob = User(place, ROOT), User(place, BOB)
    root.create("a")
    root.create("b", mode=0o666)
    number = root.open("a", os.O_RDWR)
    acts = {
        "user attributes": lambda: root.setxattr("a", "user.colour", b"red"),
        "device nodes": lambda: root.mknod("device", 0o020666, os.makedev(1, 3)),
        "exchange of two names": lambda: root.rename("a", "b", 2),
        "holes": lambda: root.fallocate(number, 3, 0, 1),
        "zeroed ranges": lambda: root.fallocate(number, 16, 0, 1),
        "change of owner": lambda: root.chown("b", 5, 6),
        "times to the nanosecond": lambda: root.utimens("b", 1, 1),
        "other users": lambda: bob.listdir("."),
    }
    missing = [ability for ability, act in acts.items() if errno_of(act)]
    if not missing and root.stat("b").mtime_ns != 1:
        missing.append("times to the nanosecond")
    root.close(number)
    return missing


@contextmanager
def local_place(candidates: Sequence[str]) -> Iterator[LocalPlace | str]:
    """In the first of these directories that is on an ext4 with everything, or in an ext4 of our own in a file; else
    why there is none. Other file systems differ where POSIX lets them."""
    if os.geteuid() != 0:
        yield "other users' system calls need root"
        return
    with ExitStack() as stack:
        reasons = []
        for candidate in (*candidates, None):
            where = candidate or _image(candidates[0], stack)
            missing = [f"{where} is not there"] if not os.path.isdir(where) else [] if _is_ext4(where) else ["ext4"]
            if not missing:
                directory = tempfile.mkdtemp(prefix="posix-", dir=where)
                stack.callback(shutil.rmtree, directory)
                os.chmod(directory, 0o755)
                place = LocalPlace(directory)
                stack.callback(place.close)
                try:
                    missing = missing_abilities(place)
                except (OSError, EOFError) as error:
                    missing = [f"{type(error).__name__} ({error})"]
                if not missing:
                    yield place
                    return
            reasons.append(f"{where} lacks {', '.join(missing)}")
        yield "; ".join(reasons)


def _is_ext4(directory: str) -> bool:
    done = subprocess.run(["stat", "-f", "-c", "%t", directory], capture_output=True, text=True, check=False)
    return done.stdout.strip() == EXT_MAGIC


def _image(near: str, stack: ExitStack) -> str:
    """The directory on which a new ext4 in a file is mounted, or why not."""
    base = stack.enter_context(tempfile.TemporaryDirectory(prefix="ext4-", dir=near))
    image, directory = f"{base}/image", f"{base}/mounted"
    os.mkdir(directory)
    with open(image, "wb") as file:
        file.truncate(IMAGE_BYTES)
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    for command in (["mke2fs", "-q", "-F", "-t", "ext4", image], ["mount", "-o", "loop", image, directory]):
        program = shutil.which(command[0], path=path)
        if program is None:
            return f"{command[0]} for an image of ext4"
        done = subprocess.run([program, *command[1:]], capture_output=True, text=True, check=False)
        if done.returncode:
            return f"an image of ext4 ({command[0]}: {done.stderr.strip()})"
    stack.callback(subprocess.run, ["umount", directory], check=True)
    return directory
