"""Strangers at every port of a running job: it computes the same bits, and they cost its processes nothing that stays.

`ff run`'s launcher in a process of its own, a supervisor for each of two nodes, four ranks that sum gradients and
exchange parts while the strangers come. MASTER_PORT is not among the ports: torch's store listens there, where a script
uses it, and authenticates nobody (docs/safety.md).
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.jobs.launching import events_of, leftovers, started_launcher, wait_until, write_script
from tests.support.network.strangers import Cost, Place, cost_of, hellos, places_of, strangers
from tests.support.patience import allowed_s

from fireflyer.base.events import StepReport
from fireflyer.cluster.schema.job import JobSpec

pytestmark = [pytest.mark.processes, pytest.mark.slow]

RANKS = 4
CALLERS = 2
MOST_DESCRIPTORS, MOST_BYTES = 0, 48 << 20
"""More than before, when all strangers have gone: no descriptor, and memory that a heap keeps."""

TRAINING = """
import hashlib
import numpy as np
from fireflyer.base.events import StepReport
from fireflyer.collectives import Communicator
from fireflyer.runtime import read_environment
from fireflyer.runtime.reporter import Reporter

start, flooded, ready = (sys.argv[1] + "/" + name for name in ("start", "flooded", f"ready-{rank}"))
env = read_environment()
reporter = Reporter.from_environment(env)
data = np.random.default_rng(rank).normal(size=(64, 4000)).astype("f4")
target = np.sin(data.sum(axis=1))

torch_group = "torch" in sys.argv[2:]
if torch_group:
    import torch
    import torch.distributed as dist
    dist.init_process_group("hfreduce")

def train(comm, steps):
    weights = np.zeros(4000, "f4")
    for step in range(steps):
        gradient = data.T @ (data @ weights - target) / 64
        comm.allreduce(gradient)
        parts = np.empty_like(gradient)
        comm.all_to_all(parts, gradient)
        if torch_group: dist.all_reduce(torch.from_numpy(parts), op=dist.ReduceOp.AVG)
        weights -= (1e-4 * (gradient + parts)).astype("f4")
    return hashlib.sha256(weights.tobytes()).hexdigest()

with Communicator.from_environment(env) as comm:
    reporter.step(StepReport(rank, attempt, 1, 64, 0, None, 1))  # connects to the launcher
    first = train(comm, 20)
    with open(ready + ".part", "w") as file: file.write(os.environ["MASTER_PORT"])
    os.replace(ready + ".part", ready)
    while not os.path.exists(start): time.sleep(0.01)
    comm.barrier()
    rounds = 0
    while True:
        over = np.array([os.path.exists(flooded)], "i8")
        comm.broadcast(over, root=0)
        if over[0]: break
        again = train(comm, 20)
        assert again == first, (rounds, again, first)
        rounds += 1
        reporter.step(StepReport(rank, attempt, rounds + 1, 64, 0, None, 1))
    with open(f"{sys.argv[1]}/digest-{rank}", "w") as file: file.write(first + train(comm, 50))
if torch_group: dist.destroy_process_group()
"""
"""Steps until the file `flooded` is there. With the argument `torch` part of each sum is that of a torch group."""


def digests(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in directory.glob("digest-*")}


def spec_in(directory: Path, *args: str, ranks: int = RANKS, nodes: int = 2) -> JobSpec:
    directory.mkdir()
    script = write_script(directory, TRAINING)
    return JobSpec(
        script=script,
        args=(str(directory), *args),
        run_dir=str(directory / "run"),
        nodes=nodes,
        ranks_per_node=ranks // nodes,
        devices="cpu",
    )


def finished(launcher: subprocess.Popen[bytes], spec: JobSpec) -> dict[str, str]:
    assert launcher.wait(allowed_s(60)) == 0, Path(spec.run_dir + ".out").read_text(encoding="utf-8")[-3000:]
    return digests(Path(spec.args[0]))


def undisturbed(spec: JobSpec) -> dict[str, str]:
    for name in ("start", "flooded"):
        Path(spec.args[0], name).touch()
    with started_launcher(spec) as launcher:
        return finished(launcher, spec)


def flood(directory: Path, pids: Sequence[int], count: int, *, places: int, ranks: int = RANKS) -> None:
    """So many strangers come to what these processes listen at, which are so many places at least, while the job of the
    script in the directory trains."""
    found = but_torchs(places_of(pids), directory, ranks)
    assert len(found) >= places, found
    before = costs(pids)
    (directory / "start").touch()
    with ThreadPoolExecutor(CALLERS) as callers:
        came = [
            callers.submit(strangers, found, hellos(), count=count // CALLERS, seed=seed) for seed in range(CALLERS)
        ]
        assert sum(one.result() for one in came) > 0.9 * count, "most of them were accepted"
    wait_until(lambda: not grown(before), allowed_s(30), lambda: f"grown: {grown(before)}")
    (directory / "flooded").touch()


def but_torchs(places: Sequence[Place], directory: Path, ranks: int) -> list[Place]:
    """Without the store of torch, at MASTER_PORT."""
    master_ports = {int((directory / f"ready-{rank}").read_text()) for rank in range(ranks)}
    return [place for place in places if place.port not in master_ports]


def all_ready(directory: Path, events: Path, ranks: int) -> None:
    """When all ranks are connected to each other and to the launcher."""
    wait_until(lambda: len(list(directory.glob("ready-?"))) == ranks, allowed_s(60))
    wait_until(lambda: reported(events) >= ranks, allowed_s(60))


def disturbed(spec: JobSpec, count: int) -> dict[str, str]:
    directory = Path(spec.args[0])
    with started_launcher(spec) as launcher:
        all_ready(directory, Path(spec.run_dir, "events.jsonl"), RANKS)
        pids = [launcher.pid, *(pid for pid, _ in leftovers(spec.run_dir))]
        flood(directory, pids, count, places=1 + 2 * RANKS)
        return finished(launcher, spec)


def reported(events: Path) -> int:
    return sum(isinstance(entry.event, StepReport) for entry in events_of(str(events)))


def costs(pids: Sequence[int], proc: str = "/proc") -> dict[int, Cost]:
    return {pid: cost_of(pid, proc=proc) for pid in pids}


def grown(before: dict[int, Cost], proc: str = "/proc") -> dict[int, tuple[Cost, Cost]]:
    """Processes that hold more than they did."""
    found = {}
    for pid, was in before.items():
        now = cost_of(pid, proc=proc)
        more = now.descriptors - was.descriptors, now.resident_bytes - was.resident_bytes
        if more[0] > MOST_DESCRIPTORS or more[1] > MOST_BYTES:
            found[pid] = was, now
    return found


@pytest.mark.parametrize("count", [4000, pytest.param(100_000, marks=pytest.mark.campaign)])
def test_a_job_among_strangers_computes_the_same_bits(count: int, tmp_path: Path) -> None:
    calm = undisturbed(spec_in(tmp_path / "calm"))
    assert len(calm) == RANKS
    assert disturbed(spec_in(tmp_path / "disturbed"), count) == calm
