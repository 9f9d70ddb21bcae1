"""The benchmark of the key-value engines runs and counts right. Its figures are not judged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from bench.report import Figure, Result
from tests.support.kvstore.postgres import postgres_programs
from tests.support.patience import allowed_s

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.processes
def test_a_tiny_run_measures_every_engine_beside_its_peer(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "kvstore", "--tiny"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=allowed_s(120), check=False
    )
    assert run.returncode == 0, run.stderr
    lines = (tmp_path / "build/bench/kvstore.jsonl").read_bytes().splitlines()
    results = {result.case: result for result in [msgspec.json.decode(line, type=Result) for line in lines]}
    engines = ["memory", "embedded", *(["postgres"] if postgres_programs() else [])]
    assert results.keys() == {f"{w}/{e}/{n}" for w in ("increment", "read") for e in engines for n in (1, 8, 64)}
    embedded = results["increment/embedded/8"]
    assert isinstance(embedded.peers["bare LMDB"], Figure)
    assert embedded.bound is not None
