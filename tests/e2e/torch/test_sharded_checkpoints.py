"""A sharded state is restored bit for bit by any other number of ranks, sharded in any other way."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from tests.support.checkpoints.places import checkpoint_parent, disconnected, manifest_of
from tests.support.torch_ranks.processes import run_torch_ranks

from fireflyer.checkpoint import verify

__all__ = ["checkpoint_parent", "disconnected"]

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

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


def run(parent: str, stage: int) -> list[dict[str, Any]]:
    """What each rank found, for all jobs."""
    jobs = {f"{parent}/{name}": ways[stage] for name, ways in JOBS.items()}
    module = "tests.support.checkpoints.sharded_ranks"
    ended = run_torch_ranks(module, (0,) * SIZES[stage], limit_s=200, jobs=jobs, last=2 * stage + 2)
    assert [rank.code for rank in ended] == [0] * SIZES[stage], [rank.errors[-3000:] for rank in ended]
    return [{job.rpartition("/")[2]: found for job, found in rank.result.items()} for rank in ended]


@pytest.mark.parametrize("checkpoint_parent", ["directory", "3fs"], indirect=True)
def test_two_then_four_then_three_ranks_have_the_same_bits(checkpoint_parent: str) -> None:
    stages = [run(checkpoint_parent, stage) for stage in range(3)]
    for name in JOBS:
        for before, after in itertools.pairwise(stages):
            assert {rank[name]["restored"] for rank in after} == {rank[name]["saved"] for rank in before}, name
        assert all(info.problem is None for info in verify(f"{checkpoint_parent}/{name}"))
    assert stages[1][0]["fsdp"]["sharded"] == 12, "four parameters, and both moments of each"

    whole = sum(
        tensor.size_bytes for shard in manifest_of(f"{checkpoint_parent}/ddp", 4).shards for tensor in shard.tensors
    )
    for name in JOBS:
        for step in (4, 6):
            shards = manifest_of(f"{checkpoint_parent}/{name}", step).shards
            stored = [[tensor.size_bytes for tensor in shard.tensors] for shard in shards]
            own = whole - sum(map(sum, stored))
            assert abs(own) < 50_000, f"{name}: everything is written once, but the generators of each rank"
