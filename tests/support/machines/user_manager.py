"""A real `systemd --user` on a machine of `Machines`, which no systemd has booted and on which nobody has logged in.

It is started as the user without rights, in a control group of its own that belongs to them. `systemd --user` refuses
to start where /run/systemd/system is missing, so the machine gets that directory. A reset of the machines ends the
manager but not its services, the end of the machines ends both.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from typing import Final, Self

import pytest
from tests.support.jobs.launching import wait_until
from tests.support.machines.machines import USER, Machine, MachineProcess, missing
from tests.support.machines.plan import HOME, USER_ID
from tests.support.patience import allowed_s

__all__ = ["UserManager", "needs_user_manager"]

_BESIDE_CONTROLLERS: Final = ("/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified")
"""Where systemd keeps its groups beside the controllers of cgroup 1."""
_CGROUP_2: Final = "/sys/fs/cgroup"
_SYSTEMD: Final = "/lib/systemd/systemd"
_RUNTIME: Final = "/run/of-the-user"
_START: Final = f"""
set -e
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/systemd/system
mkdir -m 700 {_RUNTIME}
chown {USER_ID}:{USER_ID} {_RUNTIME}
for hierarchy in $HIERARCHIES; do
    mount -o remount,bind,rw "$hierarchy"
    echo 0 > "$hierarchy/$GROUP/cgroup.procs"
done
exec setpriv --reuid {USER_ID} --regid {USER_ID} --clear-groups {_SYSTEMD} --user
"""


def _hierarchies() -> list[str]:
    named = [path for path in _BESIDE_CONTROLLERS if os.path.exists(f"{path}/cgroup.procs")]
    return named or [path for path in (_CGROUP_2,) if os.path.exists(f"{path}/cgroup.procs")]


def _missing() -> str:
    """Why there can be none here; empty: nothing."""
    if reason := missing():
        return reason
    lacking = [tool for tool in ("setpriv", "systemctl", _SYSTEMD) if shutil.which(tool) is None]
    if lacking:
        return f"no systemd --user: {', '.join(lacking)} not found (package systemd)"
    try:
        for path in _hierarchies():
            probe = f"{path}/ff-probe-{secrets.token_hex(8)}"
            os.mkdir(probe)
            os.rmdir(probe)
    except OSError as error:
        return f"no systemd --user: no control group can be made ({error})"
    return "" if _hierarchies() else "no systemd --user: no control groups"


_REASON: Final = _missing()
needs_user_manager: Final = pytest.mark.skipif(bool(_REASON), reason=_REASON)


class ControlGroup:
    """That of a manager, in each hierarchy. A context manager: at its end nothing may run there any more."""

    def __init__(self) -> None:
        self.name = f"ff-user-manager-{secrets.token_hex(8)}"

    def __enter__(self) -> Self:
        for hierarchy in _hierarchies():
            group = f"{hierarchy}/{self.name}"
            os.mkdir(group)
            for path in (group, f"{group}/cgroup.procs"):
                os.chown(path, USER_ID, USER_ID)
        return self

    def __exit__(self, *_: object) -> None:
        for hierarchy in _hierarchies():
            group = f"{hierarchy}/{self.name}"
            wait_until(lambda group=group: _removed(group), allowed_s(20))  # type: ignore[misc]


class UserManager:
    """Runs from construction until the machine is reset or ends."""

    def __init__(self, machine: Machine, group: ControlGroup) -> None:
        self.machine = machine
        environment = machine.environment(USER) | {
            "XDG_RUNTIME_DIR": _RUNTIME,
            "HIERARCHIES": " ".join(_hierarchies()),
            "GROUP": group.name,
        }
        self._process = machine.start(
            ["sh", "-c", _START], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        private = machine.path(f"{_RUNTIME}/systemd/private")
        wait_until(lambda: self._process.poll() is not None or private.exists(), allowed_s(30))
        assert self._process.poll() is None, self._process.stdout and self._process.stdout.read()

    def start(self, *words: str) -> MachineProcess:
        """As the user, in their home."""
        return self.machine.start(
            words, cwd=HOME, user=USER, env={"XDG_RUNTIME_DIR": _RUNTIME}, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *words: str, given: str = "") -> str:
        """What it printed. Raises `AssertionError` with its errors where it failed."""
        environment = {"XDG_RUNTIME_DIR": _RUNTIME}
        return self.machine.run(words, cwd=HOME, user=USER, env=environment, given=given, check=True).stdout

    def show(self, unit: str, *names: str) -> dict[str, str]:
        """Properties of a unit."""
        said = self.run("systemctl", "--user", "show", unit, *(f"--property={name}" for name in names))
        return dict(line.split("=", 1) for line in said.splitlines())

    def processes(self, unit: str) -> set[int]:
        """Of the control group of a unit, as the machine numbers them."""
        group = self.show(unit, "ControlGroup")["ControlGroup"]
        listed = self.run("cat", f"{_hierarchies()[0]}{group}/cgroup.procs") if group else ""
        return {int(line) for line in listed.split()}


def _removed(group: str) -> bool:
    """Whether the group and those in it are gone."""
    for directory, _, _ in os.walk(group, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(directory)
    return not os.path.exists(group)
