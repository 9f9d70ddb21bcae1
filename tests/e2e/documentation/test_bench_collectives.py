"""The benchmark runs, checks its sums, and writes what a reader of build/bench expects. Its figures are not judged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from bench.report import Figure, Result
from tests.support.network import namespaces

REPOSITORY = Path(__file__).parents[3]


def run_bench(directory: Path, timeout_s: int, *options: str) -> dict[str, Result]:
    command = [sys.executable, "-m", "bench", "collectives", "--tiny", *options]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "written to build/bench/collectives.jsonl" in run.stdout
    lines = (directory / "build/bench/collectives.jsonl").read_bytes().splitlines()
    return {result.case: result for result in [msgspec.json.decode(line, type=Result) for line in lines]}


@pytest.mark.processes
def test_a_tiny_run_measures_ours_the_peers_and_the_bounds_side_by_side(tmp_path: Path) -> None:
    results = run_bench(tmp_path, 100, "--only", "allreduce/*x[12]/private/*", "--only", "latency/*/python/*")
    assert {"/".join(case.split("/")[:2]) for case in results} == {"allreduce/1x2", "allreduce/2x1", "latency/1x2"}
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


@pytest.mark.processes
@pytest.mark.slow
def test_every_family_of_cases_runs(tmp_path: Path) -> None:
    results = run_bench(tmp_path, 600)
    expected = {"allreduce", "latency", "ddp", "waiting"} | (set() if namespaces.missing() else {"netns"})
    assert {case.split("/")[0] for case in results} >= expected
    assert any("/native/" in case for case in results)
