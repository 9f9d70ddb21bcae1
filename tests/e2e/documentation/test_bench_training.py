"""The benchmark of training runs, checks its results, and writes every family. Its figures are not judged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from bench.report import Figure, Result
from tests.support.patience import allowed_s

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.processes
def test_a_tiny_run_measures_every_family_beside_its_peers(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "training", "--tiny"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=allowed_s(200), check=False
    )
    assert run.returncode == 0, run.stderr
    lines = (tmp_path / "build/bench/training.jsonl").read_bytes().splitlines()
    results = [msgspec.json.decode(line, type=Result) for line in lines]
    assert {one.suite for one in results} == {"training"}
    assert {one.case.split("/")[0] for one in results} == {"dispatch", "pipeline", "codec", "fsdp"}
    by_case = {(one.case, one.metric): one for one in results}
    both = by_case["dispatch/1x2/memory/bf16/both", "time_s"]
    assert isinstance(both.peers["gloo"], Figure)
    assert both.more["sent_bytes"] > 0
    exposed = by_case["fsdp/1x2", "exposed_share"]
    assert exposed.ours.median < 1
    assert isinstance(by_case["pipeline/1x2/1f1b", "overhead_per_action_s"].peers["torch"], Figure)
    assert by_case["pipeline/1x4/1f1b", "simulated_share"].ours.median < 1
