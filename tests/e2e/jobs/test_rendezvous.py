"""The same command on each machine, as with torchrun: they meet at an address of the first."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from tests.e2e.jobs.test_several_machines import LEASE_S, SCRIPT, Job, nothing_left, notices_in, ranks_on, state_of
from tests.support.jobs.arguments import none_in_arguments
from tests.support.jobs.launching import wait_until
from tests.support.machines.machines import WORK, MachineProcess, Machines, needs_machines
from tests.support.patience import allowed_s

from fireflyer.base.events import NodeLost

pytestmark = [needs_machines, pytest.mark.processes]
ENDPOINT: Final = "a:29400"
STEPS: Final = 60
LAUNCHER_LOST: Final = (
    f"error: the launcher at {ENDPOINT} was lost, so the ranks of this machine were ended; to run the job again give "
    "the same command on each machine\n"
)


@pytest.fixture(scope="module")
def running(module_path: Path) -> Iterator[Machines]:
    with Machines(["a", "b", "c"], shared=[module_path]) as machines:
        yield machines


@pytest.fixture
def machines(running: Machines) -> Machines:
    running.reset()
    for machine in running.values():
        machine.path(f"{WORK}/job.py").write_text(SCRIPT)
        secret = machine.path(f"{WORK}/secret")
        secret.write_bytes(bytes(range(32)))
        secret.chmod(0o600)
    return running


def options(*more: str) -> list[str]:
    return ["--nodes=2", f"--rdzv-endpoint={ENDPOINT}", "--secret-file=secret", *more]


def join(machines: Machines, name: str, directory: Path, *more: str, steps: int = STEPS) -> MachineProcess:
    command = ["ff", "run", *options(*more), "job.py", str(directory), str(steps)]
    return machines[name].start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def end_of(process: MachineProcess) -> tuple[int, str, str]:
    out, error = process.communicate(timeout=allowed_s(90))
    return process.returncode, out, error


@pytest.fixture(scope="module")
def undisturbed(running: Machines, module_path: Path) -> str:
    running.reset()  # before the first test that needs it, others may have cut a link
    running["a"].path(f"{WORK}/job.py").write_text(SCRIPT)
    code, out, error = Job(running, module_path / "undisturbed", "--nodes=2", run_dir="undisturbed").end()
    assert code == 0, out + error
    return state_of(out)


def test_machines_meet_and_end_with_the_code_of_the_job(
    machines: Machines, module_path: Path, undisturbed: str
) -> None:
    joined = join(machines, "b", module_path / "meet")  # before there is a launcher
    job = Job(machines, module_path / "meet", *options())
    job.wait_for_step(1)
    none_in_arguments([machines[name] for name in "ab"], [bytes(range(32)), job.secret()], program="job.py")
    code, out, error = job.end()
    assert code == 0, out + error
    assert state_of(out) == undisturbed
    code, out, error = end_of(joined)
    assert (code, error) == (0, "")
    assert out.endswith(
        f"ff     | machine 1 of job job; the launcher at {ENDPOINT} shows what ranks print\n"
        "ff     | job ended: all ranks exited with code 0\n"
    )
    nothing_left(machines)


@pytest.mark.slow
def test_a_machine_that_left_joins_again_in_its_old_place(
    machines: Machines, module_path: Path, undisturbed: str
) -> None:
    directory = module_path / "again"
    job = Job(machines, directory, *options("--max-restarts=1"))
    joined = join(machines, "b", directory)
    job.wait_for_step(5)
    joined.kill()
    wait_until(lambda: not ranks_on(machines["b"]), allowed_s(20))
    again = join(machines, "b", directory, "--node-rank=1")
    code, out, error = job.end()
    assert code == 0, out + error
    assert state_of(out) == undisturbed
    assert end_of(again)[0] == 0
    nothing_left(machines)


@pytest.mark.slow
def test_a_spare_that_has_joined_takes_the_place_of_a_machine_that_is_cut_off(
    machines: Machines, module_path: Path, undisturbed: str
) -> None:
    directory = module_path / "spare"
    job = Job(machines, directory, *options("--spares=1", "--max-restarts=1"))
    others = [join(machines, name, directory, f"--node-rank={number}") for number, name in ((1, "b"), (2, "c"))]
    job.wait_for_step(5)
    machines.cut("b")
    code, out, error = job.end()
    assert code == 0, out + error
    assert state_of(out) == undisturbed
    assert "on c" in out
    assert [event.node for event in job.events() if isinstance(event, NodeLost)] == [1]
    assert end_of(others[1])[0] == 0
    wait_until(lambda: not ranks_on(machines["b"]), allowed_s(20))
    machines.heal("b")
    others[0].kill()
    nothing_left(machines)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--node-rank=2"], "error: --node-rank 2 must be from 1 to 1; 0 is the launcher's machine\n"),
        (["--ranks-per-node=2"], "error: --ranks-per-node 2 is more than the 1 of machine 0; give the machine with the "
                                 "most ranks --node-rank 0\n"),
        (["--nodes=3"], "error: --nnodes 3 is not that of the job, which has 2 nodes; give the same command on each "
                        "machine\n"),
    ],
)  # fmt: skip
def test_a_machine_that_does_not_fit_is_refused_and_the_job_waits_for_another(
    machines: Machines, module_path: Path, more: list[str], said: str
) -> None:
    directory = module_path / f"refused{more[0]}"
    job = Job(machines, directory, *options(), steps=2)
    code, _, error = end_of(join(machines, "b", directory, *more))
    assert (code, error) == (2, said)
    joined = join(machines, "c", directory)
    code, out, error = job.end()
    assert code == 0, out + error
    assert end_of(joined)[0] == 0


def test_a_stranger_without_the_secret_does_not_join(machines: Machines, module_path: Path) -> None:
    directory = module_path / "stranger"
    job = Job(machines, directory, *options(), steps=2)
    machines["c"].path(f"{WORK}/secret").write_bytes(bytes(32))
    code, _, error = end_of(join(machines, "c", directory))
    assert code != 0
    assert "secret" in error, error
    joined = join(machines, "b", directory)
    assert job.end()[0] == 0
    assert end_of(joined)[0] == 0


@pytest.mark.slow
def test_another_script_is_told_to_all(machines: Machines, module_path: Path) -> None:
    directory = module_path / "script"
    machines["b"].path(f"{WORK}/job.py").write_text("print('another')\n")
    job = Job(machines, directory, *options())
    joined = join(machines, "b", directory)
    code, _, error = job.end()
    assert code == 2
    assert "machine 1  has another job.py" in error
    code, _, error = end_of(joined)
    assert code == 2
    assert "machine 1 has another job.py" in error


def restarted(why: str) -> list[str]:
    """What the launcher says, after that it waits for machine 1, of a job that loses this machine once."""
    return [
        "job job: 2 nodes x 1 rank",
        f"node 1 (machine 1) lost: {why}",
        f"attempt 0 failed: node 1 (machine 1) was lost: {why}; restarting",
        "attempt 1 starts",
        "job ended after TIME: all ranks exited with code 0",
    ]


@pytest.mark.slow
def test_nothing_is_left_when_the_launcher_is_killed(machines: Machines, module_path: Path) -> None:
    directory = module_path / "launcher"
    job = Job(machines, directory, *options(), steps=100_000)
    joined = join(machines, "b", directory, steps=100_000)
    job.wait_for_step(3)
    job.process.kill()
    code, _, error = end_of(joined)
    assert (code, error) == (1, LAUNCHER_LOST)
    nothing_left(machines)


@pytest.mark.slow
def test_a_guard_that_is_killed_costs_one_restart(machines: Machines, module_path: Path, undisturbed: str) -> None:
    directory = module_path / "guard"
    job = Job(machines, directory, *options("--max-restarts=1"))
    joined = join(machines, "b", directory)
    job.wait_for_step(5)
    pid = next(pid for pid, argv in machines["b"].processes() if any(word.endswith("guard.py") for word in argv))
    machines["b"].kill(pid)
    code, out, error = job.end()
    assert code == 0, out + error
    assert state_of(out) == undisturbed
    assert notices_in(out)[1:] == restarted("the process that guards its ranks ended")
    assert end_of(joined)[0] == 0
    nothing_left(machines)


@pytest.mark.slow
def test_a_machine_that_is_cut_off_without_a_spare_ends_the_job(machines: Machines, module_path: Path) -> None:
    directory = module_path / "ended"
    job = Job(machines, directory, *options(), steps=100_000)
    joined = join(machines, "b", directory, steps=100_000)
    job.wait_for_step(3)
    machines.cut("b")
    code, _, error = job.end()
    why = "node 1 (machine 1) was lost: no heartbeat from its supervisor for 1.5 s"
    assert (code, error) == (1, f"error: {why}; not restarted (--max-restarts is 0); logs are in {WORK}/run/logs\n")
    wait_until(lambda: [pid for pid, _ in machines["b"].processes()] == [joined.pid_inside], allowed_s(LEASE_S + 10))
    machines.heal("b")
    code, _, error = end_of(joined)
    assert (code, error) == (1, LAUNCHER_LOST)
    nothing_left(machines)


@pytest.mark.slow
def test_a_machine_that_is_reached_again_goes_on_in_its_place(
    machines: Machines, module_path: Path, undisturbed: str
) -> None:
    directory = module_path / "healed"
    job = Job(machines, directory, *options("--max-restarts=1"))
    joined = join(machines, "b", directory)
    job.wait_for_step(5)
    machines.cut("b")
    wait_until(lambda: any(isinstance(event, NodeLost) for event in job.events()), allowed_s(20))
    wait_until(lambda: not ranks_on(machines["b"]), allowed_s(LEASE_S + 10))
    machines.heal("b")
    code, out, error = job.end()
    assert code == 0, out + error
    assert state_of(out) == undisturbed
    assert notices_in(out)[1:] == restarted("no heartbeat from its supervisor for TIME")
    assert end_of(joined)[0] == 0
    nothing_left(machines)
