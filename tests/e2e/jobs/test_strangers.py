"""Strangers at every port of a running job: it computes the same bits, and they cost its processes nothing that stays.

`ff run`'s launcher in a process of its own, a supervisor for each of two nodes, four ranks that sum gradients and
exchange parts while the strangers come. MASTER_PORT is not among the ports: torch's store listens there, where a script
uses it, and authenticates nobody (docs/safety.md).
"""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.fuzz.parsers import PARSERS
from tests.support.jobs.launching import events_of, leftovers, started_launcher, wait_until, write_script
from tests.support.network.strangers import Cost, cost_of, places_of, strangers
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

def train(comm, steps):
    weights = np.zeros(4000, "f4")
    for step in range(steps):
        gradient = data.T @ (data @ weights - target) / 64
        comm.allreduce(gradient)
        parts = np.empty_like(gradient)
        comm.all_to_all(parts, gradient)
        weights -= (1e-4 * (gradient + parts)).astype("f4")
    return hashlib.sha256(weights.tobytes()).hexdigest()

with Communicator.from_environment(env) as comm:
    reporter.step(StepReport(rank, attempt, 1, 64, 0, None, 1))  # connects to the launcher
    first = train(comm, 20)
    open(ready, "w").close()
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
    print("DIGEST", rank, first, train(comm, 50), flush=True)
"""


def digests(spec: JobSpec) -> list[str]:
    text = Path(spec.run_dir + ".out").read_text(encoding="utf-8")
    return sorted(line.partition("DIGEST ")[2] for line in text.splitlines() if "DIGEST " in line)


def spec_in(directory: Path) -> JobSpec:
    directory.mkdir()
    script = write_script(directory, TRAINING)
    return JobSpec(
        script=script,
        args=(str(directory),),
        run_dir=str(directory / "run"),
        nodes=2,
        ranks_per_node=RANKS // 2,
        devices="cpu",
    )


def finished(launcher: subprocess.Popen[bytes], spec: JobSpec) -> list[str]:
    assert launcher.wait(allowed_s(60)) == 0, Path(spec.run_dir + ".out").read_text(encoding="utf-8")[-3000:]
    return digests(spec)


def undisturbed(directory: Path) -> list[str]:
    spec = spec_in(directory)
    for name in ("start", "flooded"):
        (directory / name).touch()
    with started_launcher(spec) as launcher:
        return finished(launcher, spec)


def disturbed(directory: Path, count: int) -> list[str]:
    spec = spec_in(directory)
    samples = [sample for name in ("handshake, accepting", "frames") for sample in PARSERS[name].samples]
    with started_launcher(spec) as launcher:
        wait_until(lambda: len(list(directory.glob("ready-*"))) == RANKS, allowed_s(60))
        wait_until(lambda: reported(spec) >= RANKS, allowed_s(60))
        pids = [pid for pid, _ in leftovers(spec.run_dir)]
        places = places_of([*pids, launcher.pid])
        assert len(places) >= 1 + 2 * RANKS, "the launcher, and two for each rank"
        before = costs(pids)
        (directory / "start").touch()
        with ThreadPoolExecutor(CALLERS) as callers:
            came = [
                callers.submit(strangers, places, samples, count=count // CALLERS, seed=seed) for seed in range(CALLERS)
            ]
            assert sum(one.result() for one in came) > 0.9 * count, "most of them were accepted"
        wait_until(lambda: not grown(before), allowed_s(30), lambda: f"grown: {grown(before)}")
        (directory / "flooded").touch()
        return finished(launcher, spec)


def reported(spec: JobSpec) -> int:
    return sum(isinstance(entry.event, StepReport) for entry in events_of(spec.run_dir + "/events.jsonl"))


def costs(pids: list[int]) -> dict[int, Cost]:
    return {pid: cost_of(pid) for pid in pids}


def grown(before: dict[int, Cost]) -> dict[int, tuple[Cost, Cost]]:
    """Processes that hold more than they did."""
    found = {}
    for pid, was in before.items():
        now = cost_of(pid)
        more = now.descriptors - was.descriptors, now.resident_bytes - was.resident_bytes
        if more[0] > MOST_DESCRIPTORS or more[1] > MOST_BYTES:
            found[pid] = was, now
    return found


@pytest.mark.parametrize("count", [4000, pytest.param(100_000, marks=pytest.mark.campaign)])
def test_a_job_among_strangers_computes_the_same_bits(count: int, tmp_path: Path) -> None:
    calm = undisturbed(tmp_path / "calm")
    assert len(calm) == RANKS
    assert disturbed(tmp_path / "disturbed", count) == calm
