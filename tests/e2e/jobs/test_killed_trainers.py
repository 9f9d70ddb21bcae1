"""Lightning and `transformers.Trainer` over several ranks under `ff run`: after SIGKILL of one, the bits are those of
an undisturbed job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.jobs.launching import JobRun, run

from fireflyer.cluster.schema.job import JobSpec

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PROGRAMS = Path(__file__).parents[2] / "support" / "integrations"
RANKS = 2
STEPS = 10


def train(program: str, directory: Path, die_at: int) -> tuple[JobRun, list[dict[str, Any]]]:
    """The job, and what each rank wrote at the end of its last attempt."""
    directory.mkdir()
    spec = JobSpec(
        script=str(PROGRAMS / program),
        args=(str(directory), str(die_at)),
        run_dir=str(directory / "run"),
        nodes=1,
        ranks_per_node=RANKS,
        devices="cpu",
        max_restarts=1,
    )
    job = run(spec, limit_s=110)
    assert job.result.exit_code == 0, job.lines[-20:]
    attempt = 1 if die_at > 0 else 0
    return job, [json.loads((directory / f"{rank}-{attempt}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.campaign(expected_s=45)
@pytest.mark.rotates
@pytest.mark.timeout(900)
@pytest.mark.parametrize("program", ["killed_lightning.py", "killed_transformers.py"])
def test_a_job_of_which_a_rank_was_killed_ends_bitwise_as_one_that_was_never_disturbed(
    tmp_path: Path, program: str
) -> None:
    _, whole = train(program, tmp_path / "whole", 0)
    _, resumed = train(program, tmp_path / "killed", 7)
    for rank, (expected, found) in enumerate(zip(whole, resumed, strict=True)):
        assert list(expected["losses"]) == [str(step) for step in range(STEPS)]
        first = min(map(int, found["losses"]))
        assert first in (2, 4, 6), "from a checkpoint; a save that is due while another is in flight is skipped"
        assert found["losses"] == {step: loss for step, loss in expected["losses"].items() if int(step) >= first}
        assert found["weights"] == expected["weights"], f"rank {rank}"
    assert whole[0]["losses"] != whole[1]["losses"], "each rank has batches of its own"
