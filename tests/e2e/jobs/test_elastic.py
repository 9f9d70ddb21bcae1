"""A job that goes on with fewer machines: `ff run --nodes 2:3`, and one of three machines is cut off.

The script is that of a user: a torch model, our sampler, `TrainingLoop`. At which step the machine is cut off, and
which checkpoints there are then, follows from the script itself, so that one history can be had twice."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from tests.e2e.jobs.test_several_machines import SCRIPT as SUMS
from tests.e2e.jobs.test_several_machines import Job, nothing_left, ranks_on
from tests.support.jobs.launching import wait_until
from tests.support.machines.machines import WORK, MachineProcess, Machines, needs_machines
from tests.support.patience import allowed_s

from fireflyer.base.events import AttemptSized
from fireflyer.checkpoint import PlanRecord, stored_plans
from fireflyer.checkpoint.core.manifest import decode_manifest

pytestmark = [needs_machines, pytest.mark.processes]

STEPS: Final = 24
LOST_AT: Final = 14
SAVED_EVERY: Final = 5
TOLERANCE: Final = 1e-5
"""Relative, of the losses: docs/how-to/several-machines.md states it."""
SCRIPT: Final = """
import os, pathlib, signal, sys

import torch

from fireflyer.checkpoint import TrainingLoop
from fireflyer.cluster import Reporter
from fireflyer.collectives import Communicator
from fireflyer.data import ResumableSampler
from fireflyer.runtime import read_environment

directory, steps, lost_at = sys.argv[1], int(sys.argv[2]), 14
torch.set_num_threads(1)
env = read_environment()
torch.manual_seed(0)
inputs = torch.randn(512, 8)
targets = inputs.square().mean(1, keepdim=True)
sampler = ResumableSampler(512, global_batch=12, seed=1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
reporter = Reporter.from_environment(env)
with Communicator.from_environment(env) as comm, reporter, TrainingLoop(
    directory, model, optimizer, period_steps=5, reporter=reporter, keep=100
) as loop:
    for step in loop.steps(steps):
        loop.manager.wait()
        if step == lost_at and env.attempt == 0 and env.node == 1:
            pathlib.Path(directory, "lost").touch()
            signal.pause()
        batch = sampler.batch((step - 1) * sampler.global_batch, comm.rank, comm.world_size)
        optimizer.zero_grad()
        loss = (model(inputs[batch]) - targets[batch]).square().sum() / sampler.global_batch
        loss.backward()
        for parameter in model.parameters():
            comm.allreduce(parameter.grad)
        total = loss.detach().clone()
        comm.allreduce(total)
        optimizer.step()
        loop.record(loss=total.item(), samples=len(batch))
        if comm.rank == 0:
            print("step", step, "loss", total.item().hex(), flush=True)
"""
"""The gradients are sums over ranks of parts of the mean over the whole batch, so its size does not matter."""


@pytest.fixture(scope="module")
def running(module_path: Path) -> Iterator[Machines]:
    with Machines(["a", "b", "c"], shared=[module_path]) as machines:
        yield machines


@pytest.fixture
def machines(running: Machines) -> Machines:
    running.reset()
    for machine in running.values():
        machine.path(f"{WORK}/job.py").write_text(SCRIPT)
    return running


def checksums(directory: Path) -> dict[str, int]:
    """Of the model and the optimizer in the last checkpoint."""
    manifest = decode_manifest((directory / f"step-{STEPS:08}" / "manifest.json").read_bytes())
    tensors = [tensor for shard in manifest.shards for tensor in shard.tensors]
    return {tensor.name: tensor.crc32c for tensor in tensors if not tensor.name.startswith("own/")}


def losses(out: str) -> dict[int, float]:
    """Of each step, as the last attempt that took it has printed it."""
    return {int(step): float.fromhex(value) for step, value in re.findall(r"step (\d+) loss (\S+)", out)}


@pytest.mark.slow
@pytest.mark.campaign(expected_s=50)
@pytest.mark.rotates
@pytest.mark.timeout(900)
def test_a_job_goes_on_with_the_machines_that_are_left_and_one_history_gives_the_same_bits(
    machines: Machines, module_path: Path
) -> None:
    """Two jobs lose the same machine at the same step; machine a has two ranks, the others have one."""
    options = [
        "--hosts=a:2,b:1,c:1",
        "--nodes=2:3",
        "--max-restarts=2",
        "--ssh=ssh -o BatchMode=yes -o ConnectTimeout=2",
    ]
    directories = [module_path / "first", module_path / "second"]
    jobs = [Job(machines, directory, *options, steps=STEPS, run_dir=directory.name) for directory in directories]
    alone = module_path / "alone"
    alone.mkdir()
    command = [sys.executable, "job.py", str(alone), str(STEPS)]
    done = machines["a"].run(command, timeout_s=allowed_s(60))
    assert done.returncode == 0, done.stdout + done.stderr
    undisturbed = losses(done.stdout)
    assert sorted(undisturbed) == list(range(1, STEPS + 1))
    for job, directory in zip(jobs, directories, strict=True):
        wait_until(lambda job=job, at=directory / "lost": job.process.poll() is not None or at.exists(), allowed_s(90))  # type: ignore[misc]
        assert job.process.poll() is None, job.end()
    machines.cut("b")
    ended = [job.end() for job in jobs]
    for (code, out, error), job, directory in zip(ended, jobs, directories, strict=True):
        assert code == 0, out + error
        assert "ff     | job job: 2 to 3 nodes, ranks: 2,1(x2)\n" in out
        assert "ff     | attempt 1 has 2 nodes (ranks: 2,1), not 3: a, c\n" in out
        sized = [event for event in job.events() if isinstance(event, AttemptSized)]
        assert sized == [
            AttemptSized(0, 3, ("a", "b", "c"), node_ranks=(2, 1, 1)),
            AttemptSized(1, 2, ("a", "c"), node_ranks=(2, 1)),
        ]
        resumed = LOST_AT - 1 - (LOST_AT - 1) % SAVED_EVERY
        assert stored_plans(str(directory)) == (PlanRecord(1, 4), PlanRecord(resumed + 1, 3))
        assert losses(out) == pytest.approx(undisturbed, rel=TOLERANCE)
    first, second = (losses(out) for _, out, _ in ended)
    assert first == second
    assert checksums(directories[0]) == checksums(directories[1])
    machines.heal("b")
    nothing_left(machines)


@pytest.mark.slow
def test_a_machine_that_joins_after_the_last_call_takes_part_from_the_next_restart_on(
    machines: Machines, module_path: Path
) -> None:
    directory = module_path / "joined"
    for machine in machines.values():
        machine.path(f"{WORK}/job.py").write_text(SUMS)
        secret = machine.path(f"{WORK}/secret")
        secret.write_bytes(bytes(range(32)))
        secret.chmod(0o600)
    last_call = f"--last-call={int(allowed_s(4))}s"
    options = ["--nodes=2:3", "--rdzv-endpoint=a:29400", "--secret-file=secret", "--max-restarts=1", last_call]
    job = Job(machines, directory, *options, steps=60)

    def join(name: str) -> MachineProcess:
        command = ["ff", "run", *options, "job.py", str(directory), "60"]
        return machines[name].start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    others = [join("b")]
    job.wait_for_step(2)
    others.append(join("c"))
    wait_until(lambda: has_joined(others[1]), allowed_s(30))
    machines["b"].kill(ranks_on(machines["b"])[0], signal.SIGKILL)
    code, out, error = job.end()
    assert code == 0, out + error
    sized = [event.hosts for event in job.events() if isinstance(event, AttemptSized)]
    assert sized == [("machine 0", "machine 1"), ("machine 0", "machine 1", "machine 2")]
    assert "ff     | attempt 1 has 3 nodes, not 2: machine 0, machine 1, machine 2\n" in out
    assert [other.wait(allowed_s(30)) for other in others] == [0, 0]
    nothing_left(machines)


def has_joined(process: MachineProcess) -> bool:
    assert process.stdout is not None
    return "machine 2 of job job" in process.stdout.readline()
