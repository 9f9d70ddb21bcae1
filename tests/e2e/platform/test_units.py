"""The units of `--unit` under a real systemd: a manager of 3FS, a storage process, a manager of the platform."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from tests.support.jobs.launching import wait_until
from tests.support.machines.machines import Machines
from tests.support.machines.plan import HOME
from tests.support.machines.user_manager import ControlGroup, UserManager, needs_user_manager
from tests.support.patience import allowed_s

pytestmark = [needs_user_manager, pytest.mark.processes, pytest.mark.slow]

UNITS = ".config/systemd/user"
SECRET = f'secret_file = "{HOME}/secret"'
MANAGER = f"""
name = "m1"
cluster = "lab"
store = "embedded:{HOME}/meta"
listen = "127.0.0.1:7000"
{SECRET}
[files]
trusted_root = true
"""
STORAGE = f"""
cluster = "lab"
node = 1
managers = ["127.0.0.1:7000"]
host = "127.0.0.1"
port = 7100
root_disk = true
{SECRET}
[[targets]]
id = 1001
directory = "{HOME}/disk1"
"""
PLATFORM = f"""
name = "head"
cluster = "{"5f" * 16}"
store = "embedded:{HOME}/platform/store"
directory = "{HOME}/platform"
listen = "127.0.0.1:9440"
listen_agents = "127.0.0.1:9441"
{SECRET}
"""
ADMIN = ("--manager", "127.0.0.1:7000", "--secret-file", "secret")


@pytest.fixture(scope="module")
def manager() -> Iterator[UserManager]:
    with ExitStack() as stack:
        groups = stack.enter_context(ControlGroup())
        manager = UserManager(stack.enter_context(Machines(["a"]))["a"], groups)
        for name, text in (("manager", MANAGER), ("storage", STORAGE), ("platform", PLATFORM)):
            manager.machine.path(f"{HOME}/{name}.toml").write_text(text)
        manager.run("sh", "-c", f"umask 77; mkdir -p meta platform {UNITS}; head -c 32 /dev/urandom > secret")
        yield manager


def start(manager: UserManager, unit: str, *command: str) -> None:
    """Returns when systemd has heard that it serves."""
    manager.run("sh", "-c", f"ff {' '.join(command[:-1])} --unit user {command[-1]} > {UNITS}/{unit}.service")
    manager.run("systemctl", "--user", "daemon-reload")
    manager.run("systemctl", "--user", "start", unit)
    assert manager.show(unit, "ActiveState", "SubState") == {"ActiveState": "active", "SubState": "running"}


def stop(manager: UserManager, unit: str) -> None:
    manager.run("systemctl", "--user", "stop", unit)
    ended = manager.show(unit, "ActiveState", "Result", "ExecMainStatus")
    assert ended == {"ActiveState": "inactive", "Result": "success", "ExecMainStatus": "0"}


def test_a_file_system_of_units_serves_when_they_are_started_and_after_a_crash(manager: UserManager) -> None:
    start(manager, "fireflyer-fs-manager", "fs", "manager", "manager.toml")
    manager.run("ff", "fs", "admin", "register-node", *ADMIN, "--node", "1", "--target", "1001")
    made = manager.start("ff", "fs", "storage", "--make-targets", "storage.toml")
    assert made.stdout is not None
    assert made.stdout.readline().startswith("ready ")
    made.send_signal(signal.SIGTERM)
    assert made.wait(allowed_s(30)) == 0
    start(manager, "fireflyer-fs-storage", "fs", "storage", "storage.toml")
    manager.run("ff", "fs", "admin", "add-chains", *ADMIN, "--replicas", "1")
    manager.run("ff", "fs", "put", *ADMIN, "-", "/kept", given="kept\n")
    before = main_pid(manager, "fireflyer-fs-storage")
    manager.machine.kill(before)
    wait_until(lambda: main_pid(manager, "fireflyer-fs-storage") not in (0, before), allowed_s(30))
    assert manager.run("ff", "fs", "cat", *ADMIN, "/kept") == "kept\n"
    stop(manager, "fireflyer-fs-storage")
    stop(manager, "fireflyer-fs-manager")


def test_a_manager_of_the_platform_is_active_when_it_serves(manager: UserManager) -> None:
    token = manager.run("ff", "manager", "--new-admin", "ops", "platform.toml")
    start(manager, "fireflyer-manager", "manager", "run", "platform.toml")
    manager.run("ff", "login", "http://127.0.0.1:9440", given=token)
    assert manager.run("ff", "user", "list").count("ops") == 1
    stop(manager, "fireflyer-manager")


def main_pid(manager: UserManager, unit: str) -> int:
    return int(manager.show(unit, "MainPID")["MainPID"])
