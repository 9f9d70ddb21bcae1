"""The units of `--unit` under a real systemd: a manager of 3FS, a storage process, a manager of the platform; all of a
host, a meta service and a mount."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from tests.support.fs.mounts.mounting import needs_fuse
from tests.support.jobs.launching import wait_until
from tests.support.machines.machines import Machines
from tests.support.machines.plan import HOME
from tests.support.machines.postgres import start_postgres
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
HOST = f"""
cluster = "{"5f" * 16}"
store = "STORE"
directory = "{HOME}/host"
secret_file = "{HOME}/secret"
node_{SECRET}
[ports]
platform = 19440
agents = 19441
accounts = 19442
files = 17000
storage = 17100
[storage]
root_disk = true
[[hosts]]
name = "here"
address = "127.0.0.1"
manager = true
agent = false
node = 1
targets = {{ 1001 = "{HOME}/disk2" }}
"""
META = f"""
name = "names"
cluster = "{"5f" * 16}"
store = "STORE?table=fireflyer_files"
listen = "127.0.0.1:17001"
managers = ["127.0.0.1:17000"]
{SECRET}
[files]
trusted_root = true
"""
LET_USERS_MOUNT = """
mkdir /run/dev && mount -t tmpfs -o dev,mode=755 tmpfs /run/dev
mknod -m 666 /run/dev/fuse c 10 229 && mount --bind /run/dev/fuse /dev/fuse
"""
"""On this machine alone, as udev lets them everywhere."""
OF_HOST = ("--manager", "127.0.0.1:17000", "--secret-file", "secret")
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


@needs_fuse
def test_a_host_a_meta_service_and_a_mount_are_units_and_a_mount_that_was_killed_is_there_again(
    manager: UserManager,
) -> None:
    _, store = start_postgres(manager.machine, f"{manager.machine.address}/32")
    for name, text in (("cluster", HOST), ("meta", META)):
        manager.machine.path(f"{HOME}/{name}.toml").write_text(text.replace("STORE", store))
    start(manager, "fireflyer", "host", "run", "--name", "here", "cluster.toml")
    manager.run("ff", "fs", "admin", "add-chains", *OF_HOST, "--replicas", "1")
    start(manager, "fireflyer-fs-meta", "fs", "meta", "meta.toml")
    manager.run("ff", "fs", "mkdir", *OF_HOST, "-m", "777", "/all")
    manager.run("ff", "fs", "put", *OF_HOST, "-", "/all/kept", given="kept\n")

    manager.machine.run(["sh", "-c", LET_USERS_MOUNT], check=True)
    manager.run("mkdir", "place")
    start(manager, "fireflyer-mount", "fs", "mount", *OF_HOST, "place")
    assert manager.run("cat", "place/all/kept") == "kept\n"
    before = main_pid(manager, "fireflyer-mount")
    manager.machine.kill(before)
    wait_until(lambda: main_pid(manager, "fireflyer-mount") not in (0, before), allowed_s(60))
    wait_until(lambda: manager.show("fireflyer-mount", "ActiveState")["ActiveState"] == "active", allowed_s(60))
    assert manager.run("cat", "place/all/kept") == "kept\n"
    stop(manager, "fireflyer-mount")
    assert manager.run("ls", "place") == ""
    stop(manager, "fireflyer-fs-meta")
    stop(manager, "fireflyer")


def main_pid(manager: UserManager, unit: str) -> int:
    return int(manager.show(unit, "MainPID")["MainPID"])
