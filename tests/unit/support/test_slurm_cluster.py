"""A Slurm cluster on machines of the harness: what jobs on it see, and a node that fails."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.machines import slurm
from tests.support.machines.machines import USER, Machines, needs_machines
from tests.support.machines.slurm import SlurmCluster, needs_slurm, slurm_cluster
from tests.support.patience import allowed_s

pytestmark = [needs_machines, needs_slurm, pytest.mark.slow, pytest.mark.processes]


@pytest.fixture(scope="module")
def machines(module_path: Path) -> Iterator[Machines]:
    with Machines(["a", "b", "c"], shared=[module_path], private=slurm.PRIVATE) as machines:
        yield machines


@pytest.fixture(scope="module")
def cluster(machines: Machines) -> Iterator[SlurmCluster]:
    with slurm_cluster(machines, slurmd_timeout_s=4) as cluster:
        yield cluster


@pytest.mark.parametrize("user", ["root", USER])
def test_a_step_runs_on_several_machines_as_who_started_it(
    cluster: SlurmCluster, machines: Machines, user: str
) -> None:
    step = "echo $SLURM_NODEID $(hostname) $(id -un)"
    done = machines["c"].run(["srun", "-N3", "sh", "-c", step], user=user, check=True)
    assert sorted(done.stdout.splitlines()) == [f"{number} {name} {user}" for number, name in enumerate("abc")]


def test_an_allocation_runs_its_command_where_it_was_asked_for(cluster: SlurmCluster, machines: Machines) -> None:
    script = "hostname; echo $SLURM_JOB_NUM_NODES; srun hostname"
    done = machines["c"].run(["salloc", "-N2", "sh", "-ec", script], user=USER, check=True)
    assert done.stdout.split()[:2] == ["c", "2"]
    assert len(set(done.stdout.split()[2:])) == 2


def test_a_batch_job_writes_into_a_shared_directory(
    cluster: SlurmCluster, machines: Machines, module_path: Path
) -> None:
    submit = ["sbatch", "--wait", "-N2", f"--output={module_path}/out", "--wrap", "srun hostname"]
    machines["b"].run(submit, check=True)
    assert len(set((module_path / "out").read_text().split())) == 2


def test_a_node_whose_daemon_was_killed_is_down_until_it_is_started_again(
    cluster: SlurmCluster, machines: Machines
) -> None:
    cluster.daemons["b"].kill()
    cluster.wait_for_states({"b": "down*"})
    refused = machines["a"].run(["srun", "--immediate=1", "-w", "b", "true"])
    assert refused.returncode != 0
    cluster.start_daemon(machines["b"])
    cluster.wait_for_states({"b": "idle"})
    assert machines["a"].run(["srun", "-w", "b", "hostname"], check=True).stdout == "b\n"


def test_a_step_is_killed_with_its_processes_on_all_machines(cluster: SlurmCluster, machines: Machines) -> None:
    script = "sleep 1000 & echo started; wait"
    step = machines["a"].start(["srun", "-N3", "sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert step.stdout is not None
    assert [step.stdout.readline() for _ in range(3)] == ["started\n"] * 3
    machines["b"].run(["scancel", "--full", "--user=root"], check=True)
    assert step.wait(allowed_s(120)) != 0
    cluster.wait_for_states(dict.fromkeys(machines, "idle"))
    assert not [argv for one in machines.values() for _, argv in one.processes() if argv[:1] == ["sleep"]]


def test_machines_without_a_directory_for_the_configuration_are_refused() -> None:
    refused = pytest.raises(ValueError, match=r"private=slurm\.PRIVATE")
    with Machines(["a"]) as machines, refused, slurm_cluster(machines):
        pass
