"""A sharded state is restored bit for bit by any other number of ranks, sharded in any other way."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from tests.support.torch_ranks.processes import run_torch_ranks

from fireflyer.checkpoint import verify
from fireflyer.checkpoint.core.manifest import Manifest, decode_manifest

pytestmark = [pytest.mark.processes, pytest.mark.slow]

JOBS = {
    "ddp": ("ddp", "ddp", "ddp"),
    "fsdp": ("fsdp", "fsdp", "fsdp"),
    "hsdp": ("hsdp", "hsdp", "hsdp"),
    "tp": ("tp", "tp", "tp"),
    "changing": ("ddp", "fsdp of tp", "tp"),
    "other": ("tp", "hsdp", "ddp"),
    "more": ("fsdp", "tp in replicas", "fsdp"),
}
"""How each job shards its model on 2, then on 4, then on 3 ranks."""
SIZES = (2, 4, 3)


def run(directory: Path, stage: int) -> list[dict[str, Any]]:
    """What each rank found, for all jobs."""
    jobs = {str(directory / name): ways[stage] for name, ways in JOBS.items()}
    module = "tests.support.checkpoints.sharded_ranks"
    ended = run_torch_ranks(module, (0,) * SIZES[stage], jobs=jobs, last=2 * stage + 2)
    assert [rank.code for rank in ended] == [0] * SIZES[stage], [rank.errors[-3000:] for rank in ended]
    return [{Path(job).name: found for job, found in rank.result.items()} for rank in ended]


def manifest_of(directory: Path, step: int) -> Manifest:
    return decode_manifest((directory / f"step-{step:08d}" / "manifest.json").read_bytes())


def test_two_then_four_then_three_ranks_have_the_same_bits(tmp_path: Path) -> None:
    stages = [run(tmp_path, stage) for stage in range(3)]
    for name in JOBS:
        for before, after in itertools.pairwise(stages):
            assert {rank[name]["restored"] for rank in after} == {rank[name]["saved"] for rank in before}, name
        assert all(info.problem is None for info in verify(str(tmp_path / name)))
    assert stages[1][0]["fsdp"]["sharded"] == 12, "four parameters, and both moments of each"

    whole = sum(tensor.size_bytes for shard in manifest_of(tmp_path / "ddp", 4).shards for tensor in shard.tensors)
    for name in JOBS:
        for step in (4, 6):
            shards = manifest_of(tmp_path / name, step).shards
            stored = [[tensor.size_bytes for tensor in shard.tensors] for shard in shards]
            own = whole - sum(map(sum, stored))
            assert abs(own) < 50_000, f"{name}: everything is written once, but the generators of each rank"
