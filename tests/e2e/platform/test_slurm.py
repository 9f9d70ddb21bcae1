"""Tasks as jobs of a real Slurm (munge, slurmctld, a slurmd on each of three machines), agents in its allocations."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from tests.support.machines import slurm
from tests.support.machines.machines import Machines, needs_machines
from tests.support.machines.slurm import SlurmCluster, needs_slurm, slurm_cluster
from tests.support.platform.running import task_of, wait_for
from tests.support.platform.slurm_desk import SlurmPlatform

from fireflyer.base.units import SECOND
from fireflyer.cluster.core.platform.commands import DrainNode, ResumeNode, ResumeTask, StopTask, SuspendTask
from fireflyer.cluster.schema.tasks import Cause, Outcome, TaskState

pytestmark = [needs_machines, needs_slurm, pytest.mark.slow, pytest.mark.processes]

JOB_AGENT: Final = "fireflyer.cluster.agent.job"
SAYS: Final = """\
import os, sys, time
rank = int(os.environ["RANK"])
with open(f"{sys.argv[1]}.{rank}", "a") as file:
    print(os.uname().nodename, os.environ["SLURM_JOB_ID"], file=file, flush=True)
while not os.path.exists(sys.argv[1] + ".go"):
    time.sleep(0.05)
sys.exit(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
"""
SAVES: Final = """\
import os, sys, time
from fireflyer.cluster.sdk import get_whole_life_state, go_suspend, set_whole_life_state, should_suspend
rank = int(os.environ["RANK"])
step = get_whole_life_state() or 0
with open(f"{sys.argv[1]}.{rank}", "a") as file:
    print("begins at", step, file=file, flush=True)
while not os.path.exists(sys.argv[1] + ".go"):
    if should_suspend():
        if rank == 0:
            set_whole_life_state(step + 7)
        go_suspend()
    time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def machines(module_path: Path) -> Iterator[Machines]:
    with Machines(["a", "b", "c"], shared=[module_path], private=slurm.PRIVATE) as machines:
        yield machines


@pytest.fixture(scope="module")
def cluster(machines: Machines) -> Iterator[SlurmCluster]:
    with slurm_cluster(machines, slurmd_timeout_s=30) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def platform(cluster: SlurmCluster, machines: Machines, module_path: Path) -> Iterator[SlurmPlatform]:
    with SlurmPlatform(machines, module_path / "platform") as platform:
        yield platform


@pytest.fixture(autouse=True)
def what_slurm_did(cluster: SlurmCluster, machines: Machines, request: pytest.FixtureRequest) -> Iterator[None]:
    """Printed when a test fails."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        print(machines["a"].run(["scontrol", "show", "job"]).stdout, cluster.logs(10_000), sep="\n")


@pytest.fixture
def script(module_path: Path, request: pytest.FixtureRequest) -> Path:
    path = module_path / f"{request.node.name}.py"
    path.write_text(SAYS)
    return path


def jobs_in_slurm(machines: Machines) -> list[list[str]]:
    shown = machines["a"].run(["squeue", "--noheader", "--states=all", "--format=%i %T %N"], check=True)
    return [line.split(" ") for line in shown.stdout.splitlines()]


def living_jobs(machines: Machines) -> list[list[str]]:
    return [job for job in jobs_in_slurm(machines) if job[1] in ("RUNNING", "PENDING", "COMPLETING")]


def wait_for_none_left(machines: Machines, what: str = "nothing is left") -> None:
    """Slurm is asked last and seldom: each question is a process."""

    def none_left() -> bool:
        agents = [argv for one in machines.values() for _, argv in one.processes() if JOB_AGENT in argv]
        return not agents and not living_jobs(machines)

    wait_for(none_left, what, pause_s=0.3)


def test_a_task_runs_on_the_nodes_of_its_job_which_ends_as_the_task_does(
    platform: SlurmPlatform, machines: Machines, module_path: Path, script: Path
) -> None:
    out = module_path / "two"
    task = platform.submit(task_of(script, "two", str(out), nodes=2))
    platform.until(task, lambda answer: answer.task.state is TaskState.RUNNING, "it runs")
    wait_for(lambda: all(Path(f"{out}.{rank}").exists() for rank in (0, 1)), "both ranks run")
    said = [Path(f"{out}.{rank}").read_text().split() for rank in (0, 1)]
    (job,) = [job for job in living_jobs(machines) if job[0] == said[0][1]]
    assert {name for name, _ in said} == set(job[2].split(","))
    assert [node.task for node in platform.nodes().values()].count(task) == 2
    Path(f"{out}.go").touch()
    answer = platform.finished(task)
    assert answer.task.outcome is Outcome.SUCCEEDED, (answer, platform.log())
    wait_for_none_left(machines)
    assert [one[1] for one in jobs_in_slurm(machines) if one[0] == job[0]] == ["COMPLETED"]


def test_a_task_that_fails_ends_with_its_exit_code_and_so_does_its_job(
    platform: SlurmPlatform, machines: Machines, module_path: Path, script: Path
) -> None:
    out = module_path / "fails"
    Path(f"{out}.go").touch()
    task = platform.submit(task_of(script, "fails", str(out), "7", max_restarts=0))
    answer = platform.finished(task)
    assert (answer.task.outcome, answer.task.exit_code) == (Outcome.FAILED, 7), (answer, platform.log())
    wait_for_none_left(machines)
    newest = max(jobs_in_slurm(machines), key=lambda job: int(job[0]))
    assert newest[1] == "FAILED", jobs_in_slurm(machines)


def test_a_manager_that_is_killed_after_sbatch_finds_the_job_and_asks_for_no_second_one(
    platform: SlurmPlatform, machines: Machines, module_path: Path, script: Path
) -> None:
    out = module_path / "killed"
    before = {job[0] for job in jobs_in_slurm(machines)}
    platform.kill_after_sbatch.touch()
    task = platform.submit(task_of(script, "killed", str(out)))
    platform.wait_killed()
    platform.end(signal.SIGKILL)
    platform.start()
    platform.until(task, lambda answer: answer.task.state is TaskState.RUNNING, "it runs")
    Path(f"{out}.go").touch()
    assert platform.finished(task).task.outcome is Outcome.SUCCEEDED
    wait_for_none_left(machines)
    assert len({job[0] for job in jobs_in_slurm(machines)} - before) == 1


def test_a_task_that_is_stopped_frees_its_nodes_and_one_that_waits_leaves_the_queue(
    platform: SlurmPlatform, machines: Machines, module_path: Path, script: Path
) -> None:
    out = module_path / "stopped"
    runs = platform.submit(task_of(script, "stopped", str(out), nodes=3))
    waits = platform.submit(task_of(script, "waits", str(out), nodes=3))
    platform.until(runs, lambda answer: answer.task.state is TaskState.RUNNING, "it runs")
    platform.until(waits, lambda answer: "waits: no nodes are free for it yet" in answer.why.text, "Slurm says why")
    platform.command(StopTask(waits))
    platform.command(StopTask(runs))
    assert platform.finished(waits).task.outcome is Outcome.STOPPED
    assert platform.finished(runs).task.outcome is Outcome.STOPPED
    wait_for_none_left(machines)


def test_a_job_that_is_cancelled_in_slurm_stops_its_task_and_leaves_no_process(
    platform: SlurmPlatform, machines: Machines, module_path: Path, script: Path
) -> None:
    task = platform.submit(task_of(script, "cancelled", str(module_path / "cancelled"), nodes=2))
    platform.until(task, lambda answer: answer.task.state is TaskState.RUNNING, "it runs")
    (job,) = living_jobs(machines)
    machines["a"].run(["scancel", job[0]], check=True)
    answer = platform.finished(task)
    assert answer.task.outcome is Outcome.STOPPED, (answer, platform.log())
    wait_for_none_left(machines)
    assert not [argv for one in machines.values() for _, argv in one.processes() if str(script) in argv]


def test_a_job_that_slurm_preempts_is_followed_by_another_though_the_manager_was_away_and_slurm_has_forgotten_it(
    platform: SlurmPlatform, machines: Machines, cluster: SlurmCluster, module_path: Path, script: Path
) -> None:
    """How and when it ended is read from the file of jobcomp."""
    out = module_path / "preempted"
    task = platform.submit(task_of(script, "preempted", str(out)))
    platform.until(task, lambda answer: answer.task.state is TaskState.RUNNING, "it runs")
    node = living_jobs(machines)[0][2]
    platform.end(signal.SIGKILL)
    machines["a"].run(["srun", "--partition=urgent", f"--nodelist={node}", "true"], check=True)
    wait_for_none_left(machines, "it has ended")
    ended_ns = time.time_ns()
    cluster.stop_controller()
    shutil.rmtree(cluster.state)
    cluster.state.mkdir()
    cluster.start_controller()
    cluster.wait_for_states(dict.fromkeys(machines, "idle"))
    platform.start()
    platform.until(task, lambda answer: answer.task.runs == 2 and answer.task.state is TaskState.RUNNING, "run 1")
    Path(f"{out}.go").touch()
    answer = platform.finished(task)
    assert answer.task.outcome is Outcome.SUCCEEDED, (answer, platform.log())
    assert (answer.runs[0].cause, answer.task.requeues) == (Cause.INTERRUPTED, 0)
    assert answer.runs[0].over_ns is not None
    assert answer.runs[0].over_ns < ended_ns
    assert 0 < answer.task.account.unknown_ns < ended_ns - answer.task.submitted_ns
    wait_for_none_left(machines)


def test_a_task_saves_what_it_did_when_slurm_preempts_its_job_and_grants_a_grace_time(
    platform: SlurmPlatform, machines: Machines, module_path: Path
) -> None:
    out, script = module_path / "polite", module_path / "saves.py"
    script.write_text(SAVES)
    task = platform.submit(task_of(script, "polite", str(out), node_group="polite"))
    wait_for(lambda: Path(f"{out}.0").exists(), "its rank runs", limit_s=60)
    (first,) = living_jobs(machines)
    began_s = time.monotonic()
    machines["a"].run(["srun", "--partition=urgent", f"--nodelist={first[2]}", "true"], check=True)
    assert time.monotonic() - began_s < slurm.GRACE_S, "it left before Slurm's patience was over"
    platform.until(task, lambda answer: answer.task.runs == 2 and answer.task.state is TaskState.RUNNING, "run 1")
    Path(f"{out}.go").touch()
    answer = platform.finished(task)
    assert answer.task.outcome is Outcome.SUCCEEDED, (answer, platform.log())
    assert (answer.runs[0].cause, answer.task.requeues) == (Cause.SUSPENDED, 0)
    assert "Slurm preempts its job" in answer.runs[0].leave_reason
    assert Path(f"{out}.0").read_text() == "begins at 0\nbegins at 7\n"
    assert [job[1] for job in jobs_in_slurm(machines) if job[0] == first[0]] == ["COMPLETED"], platform.log()
    wait_for_none_left(machines)


def test_a_task_that_its_user_suspends_gives_its_job_up_and_gets_another_when_it_is_resumed(
    platform: SlurmPlatform, machines: Machines, module_path: Path, script: Path
) -> None:
    out = module_path / "suspended"
    task = platform.submit(task_of(script, "suspended", str(out), nodes=2, grace_ns=SECOND))
    platform.until(task, lambda answer: answer.task.state is TaskState.RUNNING, "it runs")
    wait_for(lambda: Path(f"{out}.0").exists(), "its ranks run")
    platform.command(SuspendTask(task))
    platform.until(task, lambda answer: answer.task.state is TaskState.SUSPENDED, "it is suspended")
    wait_for_none_left(machines, "its nodes are free")
    assert "resume it" in platform.task(task).why.text
    Path(f"{out}.go").touch()
    platform.command(ResumeTask(task))
    assert platform.finished(task).task.outcome is Outcome.SUCCEEDED
    wait_for_none_left(machines)


def test_nodes_are_drained_from_both_sides(
    platform: SlurmPlatform, machines: Machines, cluster: SlurmCluster, module_path: Path, script: Path
) -> None:
    wait_for(lambda: {"b", "c"} <= set(platform.nodes()), "the manager has read Slurm's nodes")
    platform.command(DrainNode("b", "bad | fan"))
    cluster.wait_for_states({"b": "drained"})
    machines["a"].run(["scontrol", "update", "NodeName=c", "State=DRAIN", "Reason=disk"], check=True)
    wait_for(lambda: platform.nodes()["c"].state == "drained", "c is shown drained")
    shown = platform.nodes()
    assert [shown[name].state for name in "ab"] == ["idle", "drained"]
    assert (shown["b"].drain_reason, shown["c"].drain_reason) == ("admin: bad | fan", "disk")
    task = platform.submit(task_of(script, "waits", str(module_path / "drained"), nodes=2))
    platform.until(task, lambda answer: "Slurm job" in answer.why.text and " waits: " in answer.why.text, "why")
    platform.command(ResumeNode("b"))
    platform.command(ResumeNode("c"))
    platform.until(task, lambda answer: answer.task.state is TaskState.RUNNING, "it runs")
    Path(module_path / "drained.go").touch()
    assert platform.finished(task).task.outcome is Outcome.SUCCEEDED
    wait_for_none_left(machines)


def test_tasks_run_on_and_nothing_is_lost_while_slurm_is_away(
    platform: SlurmPlatform, machines: Machines, cluster: SlurmCluster, module_path: Path, script: Path
) -> None:
    """slurmctld is killed before it has saved the newest job. It gives that one's number to the next job, whose nodes
    then refuse to start it and cancel it: nobody wanted that."""
    known, out = module_path / "known", module_path / "away"
    first = platform.submit(task_of(script, "known", str(known)))
    platform.until(first, lambda answer: answer.task.state is TaskState.RUNNING, "it runs")
    ((number, _, on),) = living_jobs(machines)
    cluster.wait_for_saved(number)
    shutil.copytree(cluster.state, module_path / "state")
    task = platform.submit(task_of(script, "away", str(out)))
    platform.until(task, lambda answer: answer.task.state is TaskState.RUNNING, "it runs")
    (node,) = {job[2] for job in living_jobs(machines)} - {on}
    cluster.stop_controller()
    shutil.rmtree(cluster.state)
    shutil.copytree(module_path / "state", cluster.state)
    waits = platform.submit(task_of(script, "later", str(out), only=(node,)))
    platform.until(waits, lambda answer: "Slurm does not answer" in answer.why.text, "why")
    Path(f"{out}.go").touch()
    assert platform.finished(task).task.outcome is Outcome.SUCCEEDED
    cluster.start_controller()
    platform.until(waits, lambda answer: answer.task.requeues == 1, "its job was cancelled")
    cluster.wait_for_states({node: "drained"})  # Slurm's own answer to the number that was given twice
    machines["a"].run(["scontrol", "update", f"NodeName={node}", "State=RESUME"], check=True)
    later = platform.finished(waits).task
    assert (later.outcome, later.requeues) == (Outcome.SUCCEEDED, 1), (later, platform.log())
    Path(f"{known}.go").touch()
    through = platform.finished(first).task
    assert (through.outcome, through.runs) == (Outcome.SUCCEEDED, 1), (through, platform.log())
    wait_for_none_left(machines)
