"""The benchmark runs, checks its sums, and writes what a reader of build/bench expects. Its figures are not judged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from bench.report import Figure, Result
from tests.support.campaigns.shards import rotating
from tests.support.network import namespaces
from tests.support.patience import allowed_s

pytestmark = pytest.mark.processes

REPOSITORY = Path(__file__).parents[3]


def run_bench(directory: Path, *options: str) -> dict[str, Result]:
    command = [sys.executable, "-m", "bench", "collectives", *options]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=allowed_s(600), check=False
    )
    assert run.returncode == 0, run.stderr
    assert "written to build/bench/collectives.jsonl" in run.stdout
    lines = (directory / "build/bench/collectives.jsonl").read_bytes().splitlines()
    return {result.case: result for result in [msgspec.json.decode(line, type=Result) for line in lines]}


@pytest.mark.parametrize("scale", [pytest.param("--tiny", marks=rotating(expected_s=30))])
def test_every_family_runs_and_ours_the_peers_and_the_bounds_are_measured_side_by_side(
    scale: str, tmp_path: Path
) -> None:
    results = run_bench(tmp_path, scale)
    expected = {"allreduce", "latency", "ddp", "waiting"} | (set() if namespaces.missing() else {"netns"})
    assert {case.split("/")[0] for case in results} >= expected
    assert any("/native/" in case for case in results)
    one_node = results["allreduce/1x2/private/fp32/1MiB"]
    two_nodes = results["allreduce/2x1/private/fp32/1MiB"]
    for result in (one_node, two_nodes):
        assert isinstance(result.peers["gloo"], Figure)
        assert result.bound is not None
        assert 0 < result.ours.min <= result.ours.median <= result.ours.max
        assert result.verdicts.keys() == {"faster than gloo", "faster than best openmpi"}
        assert result.more["memory_bytes_per_s"] > 0
    assert {"openmpi", "openmpi ring", "openmpi han"} <= one_node.peers.keys()
    assert isinstance(one_node.peers["process_vm"], Figure)
    assert isinstance(results["waiting/1x2/wake-up of an idle rank"].peers["futex"], Figure)
    assert "plain programs" in two_nodes.bound.formula if two_nodes.bound else False


@pytest.mark.slow
def test_a_part_can_be_chosen(tmp_path: Path) -> None:
    assert {case.split("/")[0] for case in run_bench(tmp_path, "--tiny", "--only", "latency/1x2/python/*")} == {
        "latency"
    }
