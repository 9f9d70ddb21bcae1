"""The benchmark of the chunk store runs and verifies what it reads. Its figures are not judged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from bench.report import Result
from tests.support.fs.mounts import mounting
from tests.support.network import namespaces
from tests.support.patience import allowed_s

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(700)
def test_every_family_of_cases_runs_beside_its_bounds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "fs", "--tiny"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=allowed_s(600), check=False
    )
    assert run.returncode == 0, run.stderr
    lines = (tmp_path / "build/bench/fs.jsonl").read_bytes().splitlines()
    results = [msgspec.json.decode(line, type=Result) for line in lines]
    mount = [] if mounting.missing() else ["mount"]
    incast = [] if namespaces.missing() else ["incast"]
    families = list(dict.fromkeys(result.case.split("/")[0] for result in results))
    assert families == ["read", "delay", "write", *incast, "recovery", "growth", "names", "files", "loading", *mount]
    for result in results:
        assert result.ours.median > 0, result
        beside_peers = result.case.startswith(("names/", "files/", "loading/")) or result.case.endswith(
            "/memory of a chunk"
        )
        assert beside_peers or (result.bound is not None and result.bound.value > 0)
    assert not namespaces.missing() or namespaces.missing() in run.stdout
