"""`torch.distributed.checkpoint` over our format: saved by two ranks, loaded by three that shard in another way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.checkpoints.places import checkpoint_parent, disconnected, flip_stored, manifest_of
from tests.support.torch_ranks.processes import run_torch_ranks

from fireflyer.checkpoint import open_storage, verify

__all__ = ["checkpoint_parent", "disconnected"]

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]


def run(size: int, **arguments: Any) -> list[dict[str, Any]]:
    ended = run_torch_ranks("tests.support.checkpoints.dcp_ranks", (0,) * size, limit_s=200, **arguments)
    assert [rank.code for rank in ended] == [0] * size, [rank.errors[-3000:] for rank in ended]
    return [rank.result for rank in ended]


@pytest.mark.parametrize("checkpoint_parent", ["directory", "3fs"], indirect=True)
def test_other_ranks_load_what_was_saved_in_our_format_and_in_dcps(checkpoint_parent: str, tmp_path: Path) -> None:
    parent, theirs = f"{checkpoint_parent}/ours", str(tmp_path / "theirs")
    before = run(2, how="fsdp", load=[], save=parent, theirs=theirs)
    ours = [f"{parent}/step-0000000{step}" for step in (2, 3, 4, 6)]
    assert [(info.step, info.problem) for info in verify(parent)] == [(6, None), (4, None), (3, None), (2, None)]
    records = [manifest_of(parent, step) for step in (2, 3, 4)]
    slices = [tensor.slice for tensor in records[0].shards[0].tensors if tensor.whole_name == "model.0.weight"]
    assert [(part.mesh, part.placements) for part in slices if part] in (
        [((2,), ("S(0)",))],
        [((2,), ("Shard(dim=0)",))],
    )

    damaged = f"{ours[2]}/shard-00001-of-00002.safetensors"
    after = run(3, how="tp", load=[*ours, theirs])
    for rank in after:
        assert rank["loaded"] == {path: [before[0]["saved"], 7] for path in (*ours, theirs)}

    tensor = next(one for one in records[2].shards[1].tensors if one.whole_name == "model.2.weight")
    flip_stored(damaged, tensor.offset)
    (alone,) = run(1, how="ddp", load=[ours[0]], refuse=ours[2])
    assert alone["loaded"][ours[0]] == [before[0]["saved"], 7]
    wrong = f"tensor {tensor.name!r} in {open_storage(damaged).root}"
    assert alone["refused"].startswith(f"DataCorruption: {wrong} does not match")
