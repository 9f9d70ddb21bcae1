"""The benchmark of checkpoints runs and measures every contender. Its figures are not judged."""

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
@pytest.mark.timeout(600)
def test_a_tiny_run_measures_saves_stalls_and_loads_beside_every_peer(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "checkpoint", "--tiny", "--only", "8x64KiB"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    limit_s = min(550.0, allowed_s(60))
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
    )
    assert run.returncode == 0, run.stderr
    lines = (tmp_path / "build/bench/checkpoint.jsonl").read_bytes().splitlines()
    results = {
        (result.case, result.metric): result
        for result in [msgspec.json.decode(line, type=Result) for line in lines]
        if not result.case.startswith("gpu/")  # where there is one
    }
    save, existing, new = "save/8x64KiB", "load/8x64KiB/existing", "load/8x64KiB/new"
    assert results.keys() == {
        *((save, metric) for metric in ("committed_s", "processor_s", "peak_bytes")),
        ("stall/8x64KiB", "stall_s"),
        *((existing, metric) for metric in ("loaded_s", "processor_s", "peak_bytes")),
        *((new, metric) for metric in ("loaded_s", "processor_s")),
        ("save/3FS/8x64KiB", "committed_s"),
        ("load/3FS/8x64KiB/existing", "loaded_s"),
    }
    for result in results.values():
        assert all(isinstance(peer, Figure) for peer in result.peers.values()), result.peers
    peers = {"O_DIRECT program", "torch.save", "safetensors", "DCP", "DCP async"}
    assert results[save, "committed_s"].peers.keys() == peers
    assert results[save, "committed_s"].bound is not None
    assert results["save/3FS/8x64KiB", "committed_s"].peers.keys() == {"chunk client"}
    assert results["stall/8x64KiB", "stall_s"].ours.median > 0
    assert not [left for left in (tmp_path / "build/bench").iterdir() if left.is_dir()]
