"""A rank that hangs in a collective is named by the launcher, and the job goes on without it hanging again."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from tests.support.jobs.launching import run, write_script

from fireflyer.base.events import AttemptFailed, PeerFailureReport, RankExited
from fireflyer.base.units import SECOND
from fireflyer.cluster.schema.job import JobSpec, Timeouts
from fireflyer.collectives import Plan
from fireflyer.collectives.bootstrap.job import KeptPlan
from fireflyer.collectives.flight import find_dumps, read_dumps
from fireflyer.collectives.planning.declaration import Declaration
from fireflyer.topology import count_crossings

pytestmark = pytest.mark.processes

SUMMING = """
import numpy as np
from fireflyer.collectives import Communicator
from fireflyer.runtime import read_environment

env = read_environment()
with Communicator.from_environment(env, timeout_ns=10**9) as comm:
    for step in range(5):
        if (env.attempt, env.rank, step) == (0, 2, 3):
            HAPPENS
        x = np.ones(1000)
        comm.allreduce(x)
        assert x[0] == 4
"""


PATIENT = Timeouts(settle_ns=20 * SECOND, blame_ns=20 * SECOND)
"""A rank that ends by itself does so, and is heard, before any is blamed, however busy the machine is."""


@pytest.mark.parametrize(
    ("happens", "reason", "timeouts"),
    [
        ("time.sleep(600)", "has not entered allreduce #3", Timeouts()),
        ('raise ValueError("bad sample")', ": ValueError: bad sample, at ", PATIENT),
    ],
    ids=["hangs", "raises"],
)
def test_a_rank_that_holds_the_others_up_is_named_and_the_job_starts_again(
    happens: str, reason: str, timeouts: Timeouts, tmp_path: Path
) -> None:
    spec = JobSpec(
        script=write_script(tmp_path, SUMMING.replace("HAPPENS", happens)),
        run_dir=str(tmp_path / "run"),
        nodes=2,
        ranks_per_node=2,
        max_restarts=1,
        devices="cpu",
        timeouts=timeouts,
    )
    job = run(spec)
    assert (job.result.exit_code, job.result.attempts) == (0, 2)
    (failed,) = job.of(AttemptFailed)
    assert (failed.node, failed.rank) == (1, 2)
    assert "rank 2 (node 1" in failed.reason
    assert reason in failed.reason
    assert {report.peer for report in job.of(PeerFailureReport)} == {2}


DYING = """
import numpy as np
from fireflyer.collectives import Communicator
from fireflyer.runtime import read_environment

env = read_environment()
with Communicator.from_environment(env) as comm:
    x = np.ones(1000)
    comm.allreduce(x)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    # When this is written the launcher is about to stop the others.
    while "rank_exited" not in open(env.run_dir + "/events.jsonl").read():
        time.sleep(0.001)
    comm.allreduce(x)
"""


def test_who_outlives_a_rank_leaves_its_dump_before_it_is_stopped(tmp_path: Path) -> None:
    spec = JobSpec(
        script=write_script(tmp_path, DYING),
        run_dir=str(tmp_path / "run"),
        ranks_per_node=2,
        devices="cpu",
        timeouts=Timeouts(settle_ns=20 * SECOND),  # it ends by itself, however busy the machine is
    )
    job = run(spec)
    assert job.result.reason == "rank 1 was killed by SIGKILL; not restarted (--max-restarts is 0)"
    assert {event.rank: event.exit_code for event in job.of(RankExited)} == {0: 1, 1: 128 + 9}
    ((_, dump),) = read_dumps(find_dumps([str(tmp_path / "run" / "flight")]))
    assert dump.rank == 0
    assert any("PeerFailed" in text for text in job.texts(0, "stderr"))


PLANNED = """
import json
import numpy as np
from fireflyer.collectives import Communicator
from fireflyer.runtime import read_environment
import msgspec

env = read_environment()
with Communicator.from_environment(env) as comm:
    x = np.random.default_rng(env.rank).standard_normal(300_000).astype(np.float32)
    comm.allreduce(x)
    sums = x.view(np.uint32).astype(np.uint64).sum()
    said = {"plan": msgspec.to_builtins(comm.plan), "sums": int(sums), "asked": comm._config.transport}
    print(json.dumps(said), flush=True)
    comm.barrier()
if env.attempt == 0 and env.rank == 0:
    sys.exit(7)
"""


@pytest.mark.parametrize("tune", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_restart_sums_alike_by_the_plan_that_the_job_keeps(tmp_path: Path, tune: bool) -> None:
    """The plan comes from what was declared, or also measured; only the first attempt decides."""
    spec = JobSpec(
        script=write_script(tmp_path, PLANNED),
        run_dir=str(tmp_path / "run"),
        nodes=3,
        max_restarts=1,
        devices="cpu",
        topology=msgspec.json.encode(Declaration(zones=(0, 0, 1), algorithms=("ring",), window=8)),
        tune=tune,
        transport="auto",
    )
    job = run(spec)
    assert (job.result.exit_code, job.result.attempts) == (0, 2)
    said = [json.loads(text) for rank in range(3) for text in job.texts(rank)]
    assert len(said) == 6
    assert said[0]["asked"] == "auto"
    assert all(each == said[0] for each in said)
    plan = msgspec.convert(said[0]["plan"], Plan)
    assert plan.window == 8
    assert plan.route("allreduce", 10_000).algorithm == "ring"
    assert len(count_crossings(plan.trees, (0, 0, 1)).pairs) == 1
    kept = msgspec.json.decode((tmp_path / "run/collectives/world.json").read_bytes(), type=KeptPlan)
    assert kept.plan == plan
    assert (kept.measured is not None) == tune
