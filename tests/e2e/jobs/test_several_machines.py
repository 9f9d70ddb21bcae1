"""Jobs on several machines: started over ssh, and what happens when a link, a supervisor, a guard or the launcher
fails.

The job adds numbers up, and saves what it has after each step: an undisturbed job and one that was restarted must end
with the same bits."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from tests.support.campaigns.shards import rotating
from tests.support.jobs.arguments import none_in_arguments
from tests.support.jobs.launching import wait_until
from tests.support.jobs.transcripts import Transcript, notices
from tests.support.machines.machines import USER, WORK, Machine, MachineProcess, Machines, needs_machines
from tests.support.patience import allowed_s

from fireflyer.base.events import AttemptFailed, JobEvent, NodeLost, StepReport, decode_log
from fireflyer.cluster.launcher.job import SECRET_NAME

pytestmark = [needs_machines, pytest.mark.processes]

LEASE_S: Final = 3
STEPS: Final = 60
DUMPS_NOTE: Final = (
    "note: ranks wrote flight recorder dumps; to see which rank held up the others: ff collectives explain {}\n"
)
"""On stderr, where a collective of a rank that lives noticed that another one was gone."""
SCRIPT: Final = """
import hashlib, os, sys, time
import numpy as np
from fireflyer.base.events import StepReport
from fireflyer.cluster import Reporter
from fireflyer.collectives import Communicator
from fireflyer.runtime import read_environment

directory, steps = sys.argv[1], int(sys.argv[2])
env = read_environment()
path = os.path.join(directory, "state.npy")
with Communicator.from_environment(env) as comm, Reporter.from_environment(env) as reporter:
    step, state = np.zeros(1, np.int64), np.zeros(1000)
    if comm.rank == 0 and os.path.exists(path):
        kept = np.load(path)
        step[0], state = int(kept[0]), kept[1:]
    comm.broadcast(step, root=0)
    comm.broadcast(state, root=0)
    for number in range(int(step[0]) + 1, steps + 1):
        begun = time.monotonic_ns()
        while number == 20 and os.path.exists(os.path.join(directory, "held")):
            time.sleep(0.01)
        time.sleep(0.05)
        gradient = np.random.default_rng([comm.rank, number]).random(1000).astype(np.float32)
        comm.allreduce(gradient)
        state += gradient
        if comm.rank == 0:
            np.save(path + ".part.npy", np.concatenate([[number], state]))
            os.replace(path + ".part.npy", path)
        reporter.step(StepReport(comm.rank, env.attempt, number, 1, 1, None, time.monotonic_ns() - begun))
    print("state", hashlib.sha256(state.tobytes()).hexdigest(), "on", os.uname().nodename, flush=True)
"""


@pytest.fixture(scope="module")
def shared(module_path: Path) -> Path:
    return module_path


@pytest.fixture(scope="module")
def running(shared: Path) -> Iterator[Machines]:
    with Machines(["a", "b", "c"], shared=[shared]) as machines:
        yield machines


@pytest.fixture
def machines(running: Machines) -> Machines:
    running.reset()
    for machine in running.values():
        machine.path(f"{WORK}/job.py").write_text(SCRIPT)
    return running


class Job:
    """`ff run` on machine a, whose run directory is its own, unless that is given with an absolute path."""

    def __init__(self, machines: Machines, directory: Path, *options: str, steps: int = STEPS, run_dir: str = "run"):
        directory.mkdir(exist_ok=True)
        self.machines = machines
        self._run_dir = machines["a"].path(os.path.join(WORK, run_dir))
        command = [
            "ff",
            "run",
            "--run-dir",
            run_dir,
            f"--lease={LEASE_S}",
            *options,
            "job.py",
            str(directory),
            str(steps),
        ]
        self.process: MachineProcess = machines["a"].start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def secret(self) -> bytes:
        """Of the job, while it runs."""
        return (self._run_dir / SECRET_NAME).read_bytes()

    def events(self) -> list[JobEvent]:
        try:
            data = (self._run_dir / "events.jsonl").read_bytes()
        except FileNotFoundError:
            return []
        return [entry.event for entry in decode_log(data.splitlines(keepends=True))]

    def wait_for_step(self, step: int, *, attempt: int = 0) -> None:
        def reached() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            reports = [event for event in self.events() if isinstance(event, StepReport) and event.attempt == attempt]
            return any(report.step >= step for report in reports)

        wait_until(reached, allowed_s(60))

    def end(self) -> tuple[int, str, str]:
        out, error = self.process.communicate(timeout=allowed_s(90))
        return self.process.returncode, out, error


def notices_in(out: str) -> list[str]:
    """What the launcher says, line by line, before its report."""
    return notices(Transcript(0, out, "", Path(WORK)))


def state_of(out: str) -> str:
    states: set[str] = set(re.findall(r"state ([0-9a-f]{64})", out))
    assert len(states) == 1, out
    return states.pop()


def ranks_on(machine: Machine) -> list[int]:
    return [pid for pid, argv in machine.processes() if "job.py" in argv and "-u" in argv]


def nothing_left(machines: Machines) -> None:
    wait_until(lambda: not any(machine.processes() for machine in machines.values()), allowed_s(LEASE_S + 10))


@pytest.fixture(scope="module")
def undisturbed(running: Machines, shared: Path) -> str:
    running.reset()  # before the first test that needs it, others may have cut a link
    for machine in running.values():
        machine.path(f"{WORK}/job.py").write_text(SCRIPT)
    code, out, error = Job(running, shared / "undisturbed", "--hosts", "a,b", run_dir="undisturbed").end()
    assert code == 0, out + error
    return state_of(out)


def test_a_job_runs_on_machines_that_share_no_run_directory_and_its_logs_are_in_one_place(
    machines: Machines, shared: Path, undisturbed: str
) -> None:
    job = Job(machines, shared / "logs", "--hosts", "a,b")
    job.wait_for_step(1)
    none_in_arguments([machines[name] for name in "ab"], [job.secret()], program="job.py")
    code, out, error = job.end()
    assert code == 0, out + error
    assert state_of(out) == undisturbed
    logs = machines["a"].path(f"{WORK}/run/logs/attempt-0")
    assert {path.name: path.read_text().split()[-1] for path in logs.iterdir()} == {
        "rank-0.log": "a",
        "rank-1.log": "b",
    }
    nothing_left(machines)
    assert not list(machines["b"].path("/tmp").glob("fireflyer-*/*")), "files of the job are left"


@pytest.mark.slow
def test_a_spare_takes_the_place_of_a_machine_that_is_cut_off(
    machines: Machines, tmp_path: Path, undisturbed: str, shared: Path
) -> None:
    job = Job(machines, shared / "spare", "--hosts", "a,b,c", "--spares", "1", "--max-restarts", "2")
    job.wait_for_step(5)
    machines.cut("b")
    begun_s = time.monotonic()
    wait_until(lambda: any(isinstance(event, NodeLost) for event in job.events()), allowed_s(20))
    job.wait_for_step(6, attempt=1)
    assert time.monotonic() - begun_s > LEASE_S, "a replacement was started while ranks could still run on b"
    wait_until(lambda: not machines["b"].processes(), allowed_s(LEASE_S + 10))
    code, out, error = job.end()
    assert code == 0, out + error
    assert state_of(out) == undisturbed
    assert "on c" in out
    assert [event.node for event in job.events() if isinstance(event, NodeLost)] == [1]
    assert error == ""
    silent = "no heartbeat from its supervisor for TIME"
    assert notices_in(out) == [
        "job job: 2 nodes x 1 rank",
        f"node 1 (b) lost: {silent}",
        f"attempt 0 failed: node 1 (b) was lost: {silent}; restarting",
        "attempt 1 starts",
        "node 1 is on c now, not on b",
        "job ended after TIME: all ranks exited with code 0",
    ]
    nothing_left(machines)


@pytest.mark.slow
def test_a_machine_that_is_reached_again_goes_on_in_its_place_and_one_that_shares_the_run_directory_needs_no_other(
    machines: Machines, shared: Path, undisturbed: str
) -> None:
    """Without a spare. Cuts that are over before the machine counts as lost cost nothing."""
    run_dir, held = shared / "run-of-all", shared / "healed" / "held"
    held.parent.mkdir()
    held.touch()
    job = Job(machines, held.parent, "--hosts", "a,b", "--max-restarts", "1", run_dir=str(run_dir))
    for step in range(2, 8):
        job.wait_for_step(step)
        machines.cut("b")
        machines.heal("b")
    assert not [event for event in job.events() if isinstance(event, NodeLost | AttemptFailed)]
    assert not machines["b"].path("/tmp/fireflyer-0").exists(), "a private directory beside the shared one"
    assert len((run_dir / "logs/attempt-0/rank-1.log").read_text()) == 0
    machines.cut("b")
    wait_until(lambda: any(isinstance(event, NodeLost) for event in job.events()), allowed_s(20))
    wait_until(lambda: not machines["b"].processes(), allowed_s(LEASE_S + 10))
    machines.heal("b")
    held.unlink()
    code, out, error = job.end()
    assert code == 0, out + error
    assert state_of(out) == undisturbed
    silent = "no heartbeat from its supervisor for TIME"
    assert notices_in(out) == [
        "job job: 2 nodes x 1 rank",
        f"node 1 (b) lost: {silent}",
        f"attempt 0 failed: node 1 (b) was lost: {silent}; restarting",
        "attempt 1 starts",
        "job ended after TIME: all ranks exited with code 0",
    ]
    logs = {path.name: path.read_text().split()[-1] for path in (run_dir / "logs/attempt-1").iterdir()}
    assert logs == {"rank-0.log": "a", "rank-1.log": "b"}
    nothing_left(machines)


@pytest.mark.slow
def test_nothing_is_left_anywhere_when_the_launcher_is_killed(machines: Machines, shared: Path) -> None:
    job = Job(machines, shared / "launcher", "--hosts", "a,b", steps=100_000)
    job.wait_for_step(3)
    job.process.kill()
    nothing_left(machines)


@pytest.mark.slow
def test_nothing_is_left_on_a_machine_that_is_cut_off_when_the_launcher_is_killed(
    machines: Machines, shared: Path
) -> None:
    job = Job(machines, shared / "cut-launcher", "--hosts", "a,b", steps=100_000)
    job.wait_for_step(3)
    machines.cut("b")
    job.process.kill()
    nothing_left(machines)


VICTIMS: Final = {
    "guard": (
        "guard.py",
        "the connection to it ended without a message: the process that guards its ranks was killed, or its sshd",
    ),
    "supervisor": ("fireflyer.cluster.supervisor", "its supervisor was killed by SIGKILL"),
    "rank": ("job.py", ""),
}


@pytest.mark.parametrize(
    "victim",
    [pytest.param(one, marks=pytest.mark.slow if one == "guard" else rotating(expected_s=6)) for one in VICTIMS],
)
def test_a_process_that_is_killed_on_another_machine_costs_one_restart(
    machines: Machines, shared: Path, undisturbed: str, victim: str
) -> None:
    job = Job(machines, shared / f"killed-{victim}", "--hosts", "a,b", "--max-restarts", "1")
    job.wait_for_step(5)
    program, lost = VICTIMS[victim]
    processes = [argv for argv in machines["b"].processes() if any(word.endswith(program) for word in argv[1])]
    machines["b"].kill(min(processes, key=lambda one: len(one[1]))[0], signal.SIGKILL)
    code, out, error = job.end()
    assert code == 0, out + error
    assert state_of(out) == undisturbed
    assert len([event for event in job.events() if isinstance(event, AttemptFailed)]) == 1
    assert error in ("", DUMPS_NOTE.format("run/flight"))
    seen = f"node 1 (b) lost: {lost}" if lost else "rank 1 (node 1) was killed by SIGKILL"
    first, noticed, *rest = notices_in(out)
    assert noticed == seen or (
        not lost and noticed.startswith("rank 0 failed because of rank 1: rank 1 (node 1, host b)")
    )
    assert [first, *rest] == [
        "job job: 2 nodes x 1 rank",
        f"attempt 0 failed: {seen.replace(') lost', ') was lost')}; restarting",
        "attempt 1 starts",
        "job ended after TIME: all ranks exited with code 0",
    ]
    nothing_left(machines)


def test_all_faults_of_all_hosts_are_shown_before_anything_is_started(machines: Machines, shared: Path) -> None:
    machines["b"].path(f"{WORK}/job.py").write_text("print('another script')\n")
    machines.cut("c")
    job = Job(machines, shared / "faults", "--hosts", "a,b,c", "--ssh", "ssh -o BatchMode=yes -o ConnectTimeout=2")
    code, out, error = job.end()
    assert code == 2
    assert out == ""
    table, _, last = error.rstrip().rpartition("\n")
    assert table.splitlines() == [
        "HOST  FAULT",
        "b     has another job.py (its SHA-256 differs); copy this machine's there",
        "c     cannot be reached: ssh: connect to host c port 22: Connection timed out",
    ]
    assert last.startswith("error: 2 of 3 hosts cannot run this job: b has another job.py")
    assert not machines["a"].path(f"{WORK}/run/events.jsonl").exists()


@pytest.mark.slow
def test_a_user_without_rights_runs_a_job_over_ssh(machines: Machines, undisturbed: str) -> None:
    home = f"/home/{USER}"
    for name in "ab":
        machines[name].run(["mkdir", f"{home}/state"], user=USER, check=True)
    command = ["ff", "run", "--run-dir", f"{home}/run", "--hosts", "a,b", "job.py", f"{home}/state", str(STEPS)]
    done = machines["a"].run(command, user=USER, timeout_s=90)
    assert done.returncode == 0, done.stdout + done.stderr
    assert state_of(done.stdout) == undisturbed
    nothing_left(machines)


@pytest.mark.slow
def test_what_a_killed_job_left_is_removed_by_the_next_one(machines: Machines, shared: Path) -> None:
    job = Job(machines, shared / "leaves", "--hosts", "a,b", steps=100_000)
    job.wait_for_step(2)
    job.process.kill()
    nothing_left(machines)
    left = machines["b"].path("/tmp/fireflyer-0")
    (old,) = left.iterdir()
    code, out, error = Job(machines, shared / "next", "--hosts", "a,b", run_dir="next", steps=2).end()
    assert code == 0, out + error
    assert not old.exists()
