"""Jobs by agents that are resident on machines: agents, guards, links and launchers that end; who is let in."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest
from tests.e2e.jobs.test_several_machines import DUMPS_NOTE, LEASE_S, SCRIPT, Job, notices_in, ranks_on, state_of
from tests.support.jobs.arguments import none_in_arguments
from tests.support.jobs.launching import wait_until
from tests.support.machines.machines import USER, WORK, Machine, MachineProcess, Machines, needs_machines
from tests.support.patience import allowed_s

from fireflyer.base.events import AttemptFailed, AttemptSized, NodeLost

pytestmark = [needs_machines, pytest.mark.processes]
HOME: Final = f"/home/{USER}"
STATE: Final = f"{HOME}/.local/state/fireflyer"
AGENT: Final = ["ff", "agent", "run"]
STEPS: Final = 30
HELD: Final = f"{HOME}/held"
"""Where this file is, ranks wait at step 20."""
HELD_SCRIPT: Final = SCRIPT.replace(
    "        gradient =",
    f"        while number == 20 and os.path.exists({HELD!r}): time.sleep(0.01)\n        gradient =",
    1,
)


@pytest.fixture(scope="module")
def running() -> Iterator[Machines]:
    with Machines(["a", "b", "c"]) as machines:
        yield machines


@pytest.fixture
def machines(running: Machines) -> Machines:
    running.reset()
    for machine in running.values():
        machine.path(f"{WORK}/job.py").write_text(HELD_SCRIPT)
    return running


class AgentJob(Job):
    """`ff run --via agent` on machine a, by a user without rights. Rank 0, which keeps the state, is on a."""

    def __init__(self, machines: Machines, *options: str, steps: int = STEPS, run_dir: str = "run") -> None:
        self.machines = machines
        self._run_dir = machines["a"].path(f"{HOME}/{run_dir}")
        state = f"{HOME}/sums"
        machines["a"].run(["mkdir", "-p", state], user=USER, check=True)
        directory = ["--run-dir", f"{HOME}/{run_dir}"]
        command = ["ff", "run", *directory, f"--lease={LEASE_S}", *options, "job.py", state, str(steps)]
        self.process = machines["a"].start(command, user=USER, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def all_ready(machines: Machines, *names: str, user: str = USER) -> None:
    """Agents, when they serve."""
    for process in [machines[name].start(AGENT, user=user, stdout=subprocess.PIPE) for name in names]:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready "), line


def agent_pid(machine: Machine) -> int:
    return next(pid for pid, argv in machine.processes() if argv[-2:] == ["agent", "run"])


def issue(machines: Machines, *names: str, expires: str = "60s") -> tuple[MachineProcess, dict[str, str]]:
    """`ff agent token` on machine a, and the tokens."""
    command = ["ff", "agent", "token", "--expires", expires, *names]
    issuer = machines["a"].start(command, user=USER, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert issuer.stdout is not None
    assert issuer.stderr is not None
    tokens = dict(issuer.stdout.readline().split() for _ in names) if len(names) > 1 else {
        names[0]: issuer.stdout.readline().strip()
    }  # fmt: skip
    assert "waiting" in issuer.stderr.readline()
    return issuer, tokens


def join(machine: Machine, token: str, user: str = USER) -> subprocess.CompletedProcess[str]:
    return machine.run(["ff", "agent", "join", "a:29441"], user=user, given=f"{token}\n")


def join_all(machines: Machines, *names: str, user: str = USER) -> None:
    issuer, tokens = issue(machines, *names)
    with ThreadPoolExecutor() as pool:
        for done in pool.map(lambda name: join(machines[name], tokens[name], user), names):
            assert done.returncode == 0, done.stdout + done.stderr
    assert issuer.wait(allowed_s(20)) == 0
    all_ready(machines, *names, user=user)


def others(machine: Machine) -> list[tuple[int, list[str]]]:
    """Processes of jobs: all but the agent."""
    return [(pid, argv) for pid, argv in machine.processes() if argv[-2:] != ["agent", "run"]]


def nothing_left(machines: Machines) -> None:
    def gone() -> bool:
        return not any(others(machine) for machine in machines.values())

    wait_until(gone, allowed_s(LEASE_S + 15))


@pytest.fixture(scope="module")
def undisturbed(running: Machines) -> str:
    """The same job on one machine, without agents."""
    running.reset()
    for machine in running.values():
        machine.path(f"{WORK}/job.py").write_text(HELD_SCRIPT)
    code, out, error = AgentJob(running, "--nodes=2").end()
    assert code == 0, out + error
    return state_of(out)


def test_agents_that_are_killed_and_started_again_adopt_what_runs_and_the_job_goes_on(
    machines: Machines, undisturbed: str
) -> None:
    join_all(machines, "a", "b")
    for name in "ab":
        machines[name].path(HELD).touch()
    job = AgentJob(machines, "--hosts=a,b", "--via=agent")
    job.wait_for_step(5)
    memberships = [machines[name].path(f"{STATE}/agent/membership.json").read_bytes() for name in "ab"]
    credentials = [json.loads(data)["credential"].encode() for data in memberships]
    none_in_arguments([machines[name] for name in "ab"], [job.secret(), *credentials], program="job.py")
    before = ranks_on(machines["b"])
    for name in "ab":
        machines[name].kill(agent_pid(machines[name]))
    job.wait_for_step(19)
    all_ready(machines, "a", "b")
    listed = machines["b"].run(["ff", "agent", "list"], user=USER, check=True).stdout
    assert [line.split()[1:4] for line in listed.splitlines()[1:]] == [["job", "1", "running"]]
    assert ranks_on(machines["b"]) == before
    for name in "ab":
        machines[name].path(HELD).unlink()
    code, out, error = job.end()
    assert code == 0, out + error
    assert state_of(out) == undisturbed
    assert not [event for event in job.events() if isinstance(event, AttemptFailed | NodeLost)]
    assert error == ""
    assert notices_in(out) == [
        "job job: 2 nodes x 1 rank",
        "job ended after TIME: all ranks exited with code 0",
    ]
    nothing_left(machines)
    assert os.listdir(machines["b"].path(f"{STATE}/agent/guards")) == []


@pytest.mark.slow
def test_the_agent_is_no_ancestor_of_ranks(machines: Machines) -> None:
    join_all(machines, "a", "b")
    machines["b"].run(["mkdir", "-p", f"{HOME}/sums"], user=USER, check=True)  # rank 0 is there, and may come to save
    job = AgentJob(machines, "--hosts=b", "--via=agent", steps=100_000)
    wait_until(lambda: bool(ranks_on(machines["b"])), allowed_s(30))
    (pid,) = ranks_on(machines["b"])
    ancestors = []
    while pid > 1:
        stat = machines["b"].path(f"/proc/{pid}/stat").read_text()
        pid = int(stat.rpartition(")")[2].split()[1])
        ancestors.append(pid)
    assert agent_pid(machines["b"]) not in ancestors
    assert ancestors[-1] == 1
    machines["b"].run(["ff", "agent", "stop", token_on(machines["b"])], user=USER, check=True)
    code, _, error = job.end()
    assert code != 0
    assert "node 0" in error
    nothing_left(machines)


def token_on(machine: Machine) -> str:
    return os.listdir(machine.path(f"{STATE}/agent/guards"))[0]


@pytest.mark.slow
def test_a_guard_that_is_killed_costs_one_restart(machines: Machines, undisturbed: str) -> None:
    join_all(machines, "a", "b")
    job = AgentJob(machines, "--hosts=a,b", "--via=agent", "--max-restarts=1")
    job.wait_for_step(5)
    pid = next(pid for pid, argv in machines["b"].processes() if any(word.endswith("guard.py") for word in argv))
    machines["b"].kill(pid)
    code, out, error = job.end()
    assert code == 0, out + error
    assert state_of(out) == undisturbed
    assert len([event for event in job.events() if isinstance(event, AttemptFailed)]) == 1
    assert error in ("", DUMPS_NOTE.format(f"{HOME}/run/flight"))
    ended = "the process that guards its ranks ended"
    assert notices_in(out) == [
        "job job: 2 nodes x 1 rank",
        f"node 1 (b) lost: {ended}",
        f"attempt 0 failed: node 1 (b) was lost: {ended}; restarting",
        "attempt 1 starts",
        "job ended after TIME: all ranks exited with code 0",
    ]
    nothing_left(machines)


@pytest.mark.slow
def test_a_spare_takes_the_place_of_a_machine_that_is_cut_off_and_a_guard_without_agent_ends_by_its_lease(
    machines: Machines, undisturbed: str
) -> None:
    join_all(machines, "a", "b", "c")
    job = AgentJob(machines, "--hosts=a,b,c", "--via=agent", "--spares=1", "--max-restarts=2")
    job.wait_for_step(5)
    machines["b"].kill(agent_pid(machines["b"]))
    machines.cut("b")
    wait_until(lambda: not machines["b"].processes(), allowed_s(LEASE_S + 15))
    code, out, error = job.end()
    assert code == 0, out + error
    assert state_of(out) == undisturbed
    assert "on c" in out
    nothing_left(machines)


@pytest.mark.slow
def test_a_job_goes_on_with_the_machines_that_are_left(machines: Machines) -> None:
    """To the same bits as a job of three nodes up to the step at which a machine is lost, and one of two from there."""
    expected = None
    for nodes, steps in ((3, 19), (2, STEPS)):
        code, out, error = AgentJob(machines, f"--nodes={nodes}", steps=steps, run_dir=f"alone-{nodes}").end()
        assert code == 0, out + error
        expected = state_of(out)
    machines["a"].path(f"{HOME}/sums/state.npy").unlink()
    join_all(machines, "a", "b", "c")
    for machine in machines.values():
        machine.path(HELD).touch()
    options = ["--hosts=a,b,c", "--via=agent", "--nodes=2:3", f"--last-call={int(allowed_s(4))}s", "--max-restarts=1"]
    job = AgentJob(machines, *options)
    job.wait_for_step(19)
    machines.cut("b")
    wait_until(lambda: not others(machines["b"]), allowed_s(LEASE_S + 15))
    for machine in machines.values():
        machine.path(HELD).unlink()
    code, out, error = job.end()
    assert code == 0, out + error
    assert [event.hosts for event in job.events() if isinstance(event, AttemptSized)] == [("a", "b", "c"), ("a", "c")]
    assert state_of(out) == expected
    silent = "no heartbeat from its supervisor for TIME"
    absent = ("node 1 (b) lost: it was not there within", "node 1 (b) lost: its agent cannot be used")
    assert [line for line in notices_in(out)[2:] if not line.startswith(absent)] == [
        f"node 1 (b) lost: {silent}",
        f"attempt 0 failed: node 1 (b) was lost: {silent}; restarting",
        "attempt 1 starts",
        "attempt 1 has 2 nodes, not 3: a, c",
        "job ended after TIME: all ranks exited with code 0",
    ]
    nothing_left(machines)


@pytest.mark.slow
def test_nothing_is_left_when_the_launcher_is_killed_and_a_link_is_cut(machines: Machines) -> None:
    join_all(machines, "a", "b")
    job = AgentJob(machines, "--hosts=a,b", "--via=agent", steps=100_000)
    job.wait_for_step(3)
    machines.cut("b")
    job.process.kill()
    nothing_left(machines)


@pytest.mark.slow
def test_join_tokens_are_valid_once_and_a_revoked_credential_is_refused(machines: Machines) -> None:
    issuer, tokens = issue(machines, "b", "c")
    assert join(machines["b"], tokens["b"]).returncode == 0
    again = join(machines["c"], tokens["b"])
    assert again.returncode == 1
    assert again.stderr.startswith("error: connect to a:29441: the server does not accept this token")
    assert not machines["c"].path(f"{STATE}/agent/membership.json").exists()
    issuer.send_signal(signal.SIGINT)
    assert issuer.wait(allowed_s(20)) != 0
    issuer, _ = issue(machines, "a")  # the next one serves at the same port, and knows no token of the former
    assert join(machines["c"], tokens["c"]).returncode == 1
    all_ready(machines, "b")
    stolen = machines["a"].path(f"{STATE}/machines/machines.json").read_bytes()
    machines["a"].run(["ff", "agent", "revoke", "b"], user=USER, check=True)
    assert fault_of(machines) == "has not joined, or was revoked; let it join: ff agent token b"
    path = machines["a"].path(f"{STATE}/machines/machines.json")
    status = path.stat()
    path.write_bytes(stolen)
    os.chown(path, status.st_uid, status.st_gid)
    assert "the server does not accept this token" in fault_of(machines)


def fault_of(machines: Machines) -> str:
    command = ["ff", "run", "--hosts=b", "--via=agent", "--run-dir", f"{HOME}/refused", "job.py"]
    done = machines["a"].run(command, user=USER)
    assert done.returncode == 2
    table = done.stderr.splitlines()
    assert table[0] == "HOST  FAULT"
    return table[1].removeprefix("b     ")


@pytest.mark.slow
def test_an_agent_of_root_takes_no_work(machines: Machines) -> None:
    join_all(machines, "b", user="root")
    assert fault_of(machines).startswith("cannot be used: its agent runs as root and takes work only from a platform")


@pytest.mark.slow
def test_the_unit_for_systemd_is_valid(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze")
    text = subprocess.run(
        [sys.executable, "-P", "-m", "fireflyer", "agent", "unit"], capture_output=True, text=True, check=True
    ).stdout
    (tmp_path / "fireflyer-agent.service").write_text(text)
    done = subprocess.run(
        [analyze, "verify", str(tmp_path / "fireflyer-agent.service")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
