"""A rank that hangs in a collective is named by the launcher, and the job goes on without it hanging again."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.launching import run, write_script

from fireflyer.base.events import AttemptFailed, PeerFailureReport
from fireflyer.cluster.schema.job import JobSpec

pytestmark = pytest.mark.serial

SUMMING = """
import numpy as np
from fireflyer.base.errors import PeerFailed
from fireflyer.cluster import Reporter
from fireflyer.collectives import Communicator
from fireflyer.runtime import read_environment

env = read_environment()
with Reporter.from_environment(env) as reporter, Communicator.from_environment(env, timeout_ns=10**9) as comm:
    for step in range(5):
        if (env.attempt, env.rank, step) == (0, 2, 3):
            time.sleep(600)
        try:
            x = np.ones(1000)
            comm.allreduce(x)
            assert x[0] == 4
        except PeerFailed as error:
            reporter.peer_failed(error)
            sys.exit(7)
"""


def test_a_rank_that_hangs_is_named_and_the_job_starts_again(tmp_path: Path) -> None:
    spec = JobSpec(
        script=write_script(tmp_path, SUMMING),
        run_dir=str(tmp_path / "run"),
        nodes=2,
        ranks_per_node=2,
        max_restarts=1,
        devices="cpu",
    )
    job = run(spec)
    assert (job.result.exit_code, job.result.attempts) == (0, 2)
    (failed,) = job.of(AttemptFailed)
    assert (failed.node, failed.rank) == (1, 2)
    assert "rank 2 (node 1" in failed.reason
    assert "has not entered allreduce #3" in failed.reason
    assert {report.peer for report in job.of(PeerFailureReport)} == {2}
