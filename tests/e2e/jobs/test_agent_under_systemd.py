"""The unit of `ff agent unit` under a real systemd: what a start, a restart, a crash and a stop of it leave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from tests.support.jobs.launching import wait_until
from tests.support.machines.machines import MachineProcess, Machines
from tests.support.machines.plan import HOME
from tests.support.machines.user_manager import ControlGroup, UserManager, needs_user_manager
from tests.support.patience import allowed_s

pytestmark = [needs_user_manager, pytest.mark.processes, pytest.mark.slow]

UNIT = "fireflyer-agent.service"
UNITS = ".config/systemd/user"
SCRIPT = """
import os, time
print("pid", os.getpid(), flush=True)
while not os.path.exists("release"):
    time.sleep(0.05)
print("released", flush=True)
"""


@pytest.fixture(scope="module")
def running() -> Iterator[UserManager]:
    with ExitStack() as stack:
        groups = stack.enter_context(ControlGroup())
        manager = UserManager(stack.enter_context(Machines(["a"]))["a"], groups)
        prepare(manager)
        yield manager


def prepare(manager: UserManager) -> None:
    """Installs the unit, and lets the machine join as `here`."""
    manager.run("sh", "-c", f"mkdir -p {UNITS}; ff agent unit > {UNITS}/{UNIT}")
    manager.run("systemctl", "--user", "daemon-reload")
    issuer = manager.start("ff", "agent", "token", "here")
    assert issuer.stdout is not None
    token = issuer.stdout.readline()
    manager.run("ff", "agent", "join", "127.0.0.1:29441", given=token)
    assert issuer.wait(allowed_s(20)) == 0
    manager.machine.path(f"{HOME}/job.py").write_text(SCRIPT)


@pytest.fixture
def manager(running: UserManager) -> Iterator[UserManager]:
    yield running
    running.run("rm", "-rf", "release", "run")
    running.run("systemctl", "--user", "stop", UNIT)


def main_pid(manager: UserManager) -> int:
    return int(manager.show(UNIT, "MainPID")["MainPID"])


def start_job(manager: UserManager) -> tuple[MachineProcess, int]:
    """The launcher, and the process of its rank when that runs."""
    job = manager.start("ff", "run", "--quiet", "--run-dir=run", "--hosts=here", "--via=agent", "--lease=60", "job.py")
    assert job.stdout is not None
    line = job.stdout.readline()
    assert " pid " in line, (line, job.stderr.read() if job.stderr and not line else "")
    return job, int(line.split()[-1])


def test_the_service_is_started_when_the_agent_serves_and_stops_with_it(manager: UserManager) -> None:
    manager.run("systemctl", "--user", "start", UNIT)
    assert manager.show(UNIT, "ActiveState", "SubState", "KillMode", "OOMPolicy", "Delegate") == {
        "ActiveState": "active", "SubState": "running", "KillMode": "process", "OOMPolicy": "continue",
        "Delegate": "yes",
    }  # fmt: skip
    assert manager.show(UNIT, "TasksMax") == {"TasksMax": "infinity"}
    assert manager.run("ff", "agent", "list").startswith("TOKEN"), "it answers"
    manager.run("systemctl", "--user", "stop", UNIT)
    state = manager.show(UNIT, "ActiveState", "Result", "ExecMainStatus")
    assert state == {"ActiveState": "inactive", "Result": "success", "ExecMainStatus": "0"}


def test_ranks_outlive_a_restart_and_a_crash_of_the_service_and_are_found_again(manager: UserManager) -> None:
    manager.run("systemctl", "--user", "start", UNIT)
    job, rank = start_job(manager)
    before = main_pid(manager)
    assert rank in manager.processes(UNIT), "a rank is in the control group of the service"
    manager.run("systemctl", "--user", "restart", UNIT)
    restarted = main_pid(manager)
    assert restarted not in (0, before)
    assert rank in manager.processes(UNIT)
    assert " running" in manager.run("ff", "agent", "list")
    manager.run("kill", "-KILL", str(restarted))
    wait_until(lambda: main_pid(manager) not in (0, restarted), allowed_s(30))
    wait_until(lambda: manager.show(UNIT, "ActiveState")["ActiveState"] == "active", allowed_s(30))
    assert manager.show(UNIT, "NRestarts") == {"NRestarts": "1"}
    assert rank in manager.processes(UNIT)
    manager.run("touch", "release")
    out, error = job.communicate(timeout=allowed_s(60))
    assert (job.returncode, error) == (0, ""), out
    wait_until(lambda: manager.processes(UNIT) == {main_pid(manager)}, allowed_s(30))


def test_ranks_of_a_service_that_is_stopped_run_to_their_end(manager: UserManager) -> None:
    manager.run("systemctl", "--user", "start", UNIT)
    job, rank = start_job(manager)
    manager.run("systemctl", "--user", "stop", UNIT)
    assert manager.show(UNIT, "ActiveState") == {"ActiveState": "inactive"}
    assert rank in manager.processes(UNIT)
    manager.run("touch", "release")
    manager.run("systemctl", "--user", "start", UNIT)
    out, error = job.communicate(timeout=allowed_s(60))
    assert (job.returncode, error) == (0, ""), out
    wait_until(lambda: manager.run("ls", ".local/state/fireflyer/agent/guards") == "", allowed_s(20))
