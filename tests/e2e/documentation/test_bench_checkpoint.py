"""The benchmark of checkpoints runs and measures every contender. Its figures are not judged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from bench.report import Figure, Result
from tests.support.fs.mounts.mounting import missing
from tests.support.patience import allowed_s

REPOSITORY = Path(__file__).parents[3]


def measured(directory: Path, pattern: str) -> dict[tuple[str, str], Result]:
    """The results of a tiny run, by case and metric."""
    command = [sys.executable, "-m", "bench", "checkpoint", "--tiny", "--only", pattern]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    limit_s = min(550.0, allowed_s(60))
    run = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
    )
    assert run.returncode == 0, run.stderr
    lines = (directory / "build/bench/checkpoint.jsonl").read_bytes().splitlines()
    results = [msgspec.json.decode(line, type=Result) for line in lines]
    told = [line.partition(":")[0] for line in run.stderr.splitlines() if not line.startswith("/")]  # a file that warns
    assert [case for case in told if "/" in case and " " not in case] == [one.case for one in results]
    return {
        (result.case, result.metric): result
        for result in results
        if not result.case.startswith("gpu/")  # where there is one
    }


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_a_tiny_run_measures_saves_stalls_and_loads_beside_every_peer(tmp_path: Path) -> None:
    results = measured(tmp_path, "8x64KiB")
    save_3fs, load_3fs, new_3fs = "save/3FS/8x64KiB", "load/3FS/8x64KiB/existing", "load/3FS/8x64KiB/new"
    save, existing, new = "save/disk/8x64KiB", "load/disk/8x64KiB/existing", "load/disk/8x64KiB/new"
    assert results.keys() == {
        *((save, metric) for metric in ("committed_s", "processor_s", "peak_bytes")),
        ("stall/disk/8x64KiB", "stall_s"),
        *((existing, metric) for metric in ("loaded_s", "processor_s", "peak_bytes")),
        *((new, metric) for metric in ("loaded_s", "processor_s")),
        *((save_3fs, metric) for metric in ("committed_s", "processor_s", "peak_bytes")),
        ("stall/3FS/8x64KiB", "stall_s"),
        *((load_3fs, metric) for metric in ("loaded_s", "processor_s", "peak_bytes")),
        *((new_3fs, metric) for metric in ("loaded_s", "processor_s")),
    }
    for result in results.values():
        for name, peer in result.peers.items():
            if name.endswith(", FUSE") and missing():
                assert peer == f"not mounted: {missing()}"
            else:
                assert isinstance(peer, Figure), result.peers
                assert peer.median > 0
    peers = {"O_DIRECT program", "torch.save", "safetensors", "DCP", "DCP async"}
    assert results[save, "committed_s"].peers.keys() == peers
    assert results[save, "committed_s"].bound is not None
    mounted = {"O_DIRECT program, FUSE", "torch.save, FUSE", "safetensors, FUSE", "DCP, FUSE"}
    bounds = {"chunk client", "raw disk"}
    assert results[save_3fs, "committed_s"].peers.keys() == {*bounds, "DCP async, FUSE", *mounted}
    for case in (load_3fs, new_3fs):
        assert results[case, "loaded_s"].peers.keys() == {*bounds, *mounted}
    assert results[load_3fs, "peak_bytes"].peers.keys() == mounted
    assert results["stall/3FS/8x64KiB", "stall_s"].peers.keys() == {"DCP async, FUSE"}
    for case in ("stall/disk/8x64KiB", "stall/3FS/8x64KiB"):
        assert results[case, "stall_s"].ours.median > 0
    assert not [left for left in (tmp_path / "build/bench").iterdir() if left.is_dir()]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_a_state_that_has_room_for_one_image_is_measured_beside_the_program_or_the_chunk_client_alone(
    tmp_path: Path,
) -> None:
    results = measured(tmp_path, "4x96KiB")
    for place, peers in (("disk", {"O_DIRECT program"}), ("3FS", {"chunk client", "raw disk"})):
        for kind in ("existing", "new"):
            assert results[f"load/{place}/4x96KiB/{kind}", "loaded_s"].peers.keys() == peers
        assert results[f"save/{place}/4x96KiB", "committed_s"].peers.keys() == peers
        for case in (f"save/{place}/4x96KiB", f"load/{place}/4x96KiB/existing"):
            assert results[case, "peak_bytes"].ours.median > 0
    assert not [left for left in (tmp_path / "build/bench").iterdir() if left.is_dir()]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_what_ranks_agree_on_is_measured_beside_the_planning_of_dcp(tmp_path: Path) -> None:
    results = measured(tmp_path, "agreement/")
    assert results.keys() == {(f"agreement/{ranks}-ranks/50-tensors", "agreed_s") for ranks in (2, 4)}
    for result in results.values():
        assert result.peers.keys() == {"DCP", "DCP, plans cached", "all_gather_object"}
        assert all(isinstance(peer, Figure) and peer.median > 0 for peer in result.peers.values())
        assert result.ours.median > 0
