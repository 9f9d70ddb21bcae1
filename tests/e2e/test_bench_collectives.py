"""The benchmark runs, checks its sums, and writes what a reader of build/bench expects. Its figures are not judged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from bench.report import Figure, Result

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.serial
def test_a_tiny_run_measures_ours_gloo_and_the_memory_side_by_side(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "collectives", "--tiny"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "memory bandwidth in this run" in run.stdout
    lines = (tmp_path / "build/bench/collectives.jsonl").read_bytes().splitlines()
    results = [msgspec.json.decode(line, type=Result) for line in lines]
    assert [result.case for result in results] == ["allreduce/1x4/private/fp32/1MiB"]
    assert isinstance(results[0].peers["gloo"], Figure)
    assert results[0].bound is not None
    assert results[0].more["memory_bandwidth_bytes_per_s"] > 0
