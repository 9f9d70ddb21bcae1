"""The benchmark of operators' commands runs and counts right. Its figures are not judged."""

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
def test_a_tiny_run_measures_every_case(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "bench",
        "operators",
        "--tiny",
        "--rounds",
        "1",
        "--only",
        "reliability/",
        "--only",
        "fleet/20",
    ]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=allowed_s(120), check=False
    )
    assert run.returncode == 0, run.stderr
    lines = (tmp_path / "build/bench/operators.jsonl").read_bytes().splitlines()
    results = {result.case: result for result in [msgspec.json.decode(line, type=Result) for line in lines]}
    fleet = {case for case in results if case.startswith("fleet/")}
    assert {"fleet/20/failure_share", "fleet/20/processor_s"} <= fleet
    assert results.keys() - fleet == {f"reliability/{case}" for case in ("report", "lemons", "why", "import-sacct")}
    importing = results["reliability/import-sacct"]
    assert isinstance(importing.peers["csv.reader, times as integers"], Figure)
    assert importing.bound is not None
