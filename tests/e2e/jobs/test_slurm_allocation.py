"""`ff run` inside of a Slurm allocation, whose nodes are machines with real sshd: nobody names hosts or ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.jobs.launching import wait_until
from tests.support.machines import slurm
from tests.support.machines.machines import WORK, Machines, needs_machines
from tests.support.patience import allowed_s

pytestmark = [needs_machines, slurm.needs_slurm, pytest.mark.processes, pytest.mark.slow]

SCRIPT = """
import os
print("ran", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "on", os.uname().nodename, flush=True)
"""
BATCH = """#!/bin/sh
ff run --run-dir {shared}/batch job.py >{shared}/out 2>&1
mv {shared}/out {shared}/said
"""


@pytest.fixture(scope="module")
def shared(module_path: Path) -> Path:
    return module_path


@pytest.fixture(scope="module")
def machines(shared: Path) -> Iterator[Machines]:
    with Machines(["a", "b", "c"], shared=[shared], private=slurm.PRIVATE) as machines:
        for machine in machines.values():
            machine.path(f"{WORK}/job.py").write_text(SCRIPT)
        with slurm.slurm_cluster(machines):
            yield machines


def ran(said: str) -> list[tuple[int, int, str]]:
    """(rank, of how many, machine)"""
    return sorted(
        (int(rank), int(size), where) for rank, size, where in re.findall(r"ran (\d+) of (\d+) on (\S+)", said)
    )


def test_a_job_takes_the_hosts_and_ranks_of_the_allocation(machines: Machines, shared: Path) -> None:
    def allocated(*command: str, run_dir: str) -> str:
        """What `ff run` prints in an allocation of b and c, which a, where salloc runs, is not part of."""
        allocation = ["salloc", "--quiet", "-N2", "--nodelist=b,c", "--ntasks-per-node=2"]
        run = ["ff", "run", "--run-dir", f"{shared}/{run_dir}", *command, "job.py"]
        done = machines["a"].run([*allocation, *run])
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    said = allocated(run_dir="all")
    assert ran(said) == [(0, 4, "b"), (1, 4, "b"), (2, 4, "c"), (3, 4, "c")]
    first, second = [line for line in said.splitlines() if line.startswith("ff ")][:2]
    assert re.fullmatch(r"ff +\| hosts: the 2 nodes of Slurm job \d+; for this machine alone give --standalone", first)
    assert re.fullmatch(r"ff +\| job job: 2 nodes x 2 ranks", second)

    for number, here in enumerate((["--standalone"], ["--nnodes=1"])):
        said = allocated(*here, run_dir=f"here-{number}")
        assert ran(said) == [(0, 1, "a")]
        assert "Slurm" not in said

    machines["a"].path(f"{WORK}/batch").write_text(BATCH.format(shared=shared))
    machines["a"].run(["sbatch", "-N2", "--nodelist=a,b", "--output=/dev/null", "batch"], check=True)
    wait_until((shared / "said").exists, allowed_s(60))
    said = (shared / "said").read_text()
    ranks = len(ran(said)) // 2
    assert ranks > 0, said
    assert ran(said) == [(rank, 2 * ranks, "ab"[rank // ranks]) for rank in range(2 * ranks)]
