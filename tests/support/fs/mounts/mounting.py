"""Mounts in a mount namespace of their own: nothing of them is left when their process is gone, however it went.

The test's own process looks into the namespace through `/proc/PID/root`; programs are started in it with `nsenter`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from tests.support.patience import allowed_s

__all__ = ["Mount", "local_mount", "missing", "mounted", "needs_fuse"]

MOUNT_S: Final = 60.0
END_S: Final = 60.0
_ROOT: Final = Path(__file__).parents[4]


def missing() -> str:
    """What there is not, of what mounts need here."""
    if os.geteuid() != 0:
        return "only root makes mount namespaces"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        return f"/dev/fuse cannot be opened: {error.strerror}"
    if importlib.util.find_spec("fireflyer.native._fuse") is None:
        return "the extension of the mount was not built"
    tools = [name for name in ("unshare", "nsenter", "setpriv") if shutil.which(name) is None]
    if tools:
        return f"there is no {tools[0]}"
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else "mount namespaces are not permitted"


_MISSING: Final = missing()
needs_fuse: Final = pytest.mark.skipif(bool(_MISSING), reason=_MISSING)


@dataclass(slots=True)
class Mount:
    """`path`: where this process finds it. `place`: where it is in its namespace."""

    process: subprocess.Popen[str]
    place: str

    @property
    def path(self) -> str:
        return f"/proc/{self.process.pid}/root{self.place}"

    def command(self, command: Sequence[str]) -> list[str]:
        """To be run in its namespace, in it."""
        inside = ["sh", "-c", 'cd "$0" && exec "$@"', self.place, *command]
        return ["nsenter", f"--mount=/proc/{self.process.pid}/ns/mnt", "--", *inside]

    def unmount(self, *options: str) -> None:
        namespace = f"--mount=/proc/{self.process.pid}/ns/mnt"
        subprocess.run(["nsenter", namespace, "--", "umount", *options, self.place], check=True)

    def run(self, *command: str, timeout_s: float = 120.0) -> str:
        """In it, as its working directory; what it prints."""
        environment = {**os.environ, "LC_ALL": "C", "GIT_CONFIG_GLOBAL": "/dev/null", "HOME": "/nonexistent"}
        done = subprocess.run(
            self.command(command),
            capture_output=True,
            text=True,
            timeout=allowed_s(timeout_s),
            check=False,
            env=environment,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def end(self) -> str:
        """Waits until its process has ended by itself; what it printed."""
        out, _ = self.process.communicate(timeout=END_S)
        return out


@contextlib.contextmanager
def mounted(command: Sequence[str], place: str) -> Iterator[Mount]:
    """`command` mounts on `place`, and prints a line that begins with "Mounted" when it has. It dies with the test."""
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--propagation", "private", *command],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("Mounted"), line
        yield Mount(process, place)
    finally:
        process.kill()
        process.wait(END_S)
        if process.stdout is not None:
            process.stdout.close()


@contextlib.contextmanager
def local_mount(source: str, place: str, *, natively: bool, held: bool = False) -> Iterator[Mount]:
    """A local directory through the mount's own layer. `held`: reads of it, and looks for "held", wait until "go" is
    looked for, and "read" is there when they fill all memory."""
    os.makedirs(source, exist_ok=True)
    os.makedirs(place, exist_ok=True)
    how = "held" if held else "natively" if natively else "events"
    program = ["env", f"PYTHONPATH={_ROOT}", sys.executable, "-P", "-m", "tests.support.fs.mounts.local_directory"]
    with mounted([*program, source, place, how], place) as mount:
        yield mount
