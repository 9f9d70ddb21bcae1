"""The benchmark of the chunk store runs and verifies what it reads. Its figures are not judged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from bench.report import Result

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.serial
def test_a_tiny_run_measures_reads_writes_and_delays_beside_their_bounds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "fs", "--tiny"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    lines = (tmp_path / "build/bench/fs.jsonl").read_bytes().splitlines()
    results = [msgspec.json.decode(line, type=Result) for line in lines]
    assert [result.case.split("/")[0] for result in results] == ["read", "read", "delay", "write", "write"]
    assert all(result.bound is not None and result.bound.value > 0 for result in results)
