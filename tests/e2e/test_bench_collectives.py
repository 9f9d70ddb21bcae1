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
def test_a_tiny_run_measures_ours_the_peers_and_the_bounds_side_by_side(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "collectives", "--tiny"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "written to build/bench/collectives.jsonl" in run.stdout
    lines = (tmp_path / "build/bench/collectives.jsonl").read_bytes().splitlines()
    results = {result.case: result for result in (msgspec.json.decode(line, type=Result) for line in lines)}
    one_node = results["allreduce/1x2/private/fp32/1MiB"]
    two_nodes = results["allreduce/2x1/private/fp32/1MiB"]
    for result in (one_node, two_nodes):
        assert isinstance(result.peers["gloo"], Figure)
        assert result.bound is not None
        assert 0 < result.ours.min <= result.ours.median <= result.ours.max
        assert result.verdicts.keys() == {"faster than gloo"}
        assert result.more["memory_bytes_per_s"] > 0
    assert {"openmpi", "openmpi ring", "openmpi han"} <= one_node.peers.keys()
    assert "plain programs" in two_nodes.bound.formula if two_nodes.bound else False
