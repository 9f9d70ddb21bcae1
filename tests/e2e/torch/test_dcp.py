"""`torch.distributed.checkpoint` over our format: saved by two ranks, loaded by three that shard in another way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.checkpoints.states import flip
from tests.support.torch_ranks.processes import run_torch_ranks

from fireflyer.checkpoint import verify
from fireflyer.checkpoint.core.manifest import decode_manifest

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def run(size: int, **arguments: Any) -> list[dict[str, Any]]:
    ended = run_torch_ranks("tests.support.checkpoints.dcp_ranks", (0,) * size, **arguments)
    assert [rank.code for rank in ended] == [0] * size, [rank.errors[-3000:] for rank in ended]
    return [rank.result for rank in ended]


def test_other_ranks_load_what_was_saved_in_our_format_and_in_dcps(tmp_path: Path) -> None:
    before = run(2, how="fsdp", load=[], save=str(tmp_path))
    ours = [str(tmp_path / "ours" / f"step-0000000{step}") for step in (2, 3, 4)]
    theirs = str(tmp_path / "theirs")
    assert [info.problem for info in verify(str(tmp_path / "ours"))] == [None] * 3
    records = [decode_manifest((Path(path) / "manifest.json").read_bytes()) for path in ours]
    slices = [tensor.slice for tensor in records[0].shards[0].tensors if tensor.whole_name == "model.0.weight"]
    assert [(part.mesh, part.placements) for part in slices if part] in (
        [((2,), ("S(0)",))],
        [((2,), ("Shard(dim=0)",))],
    )

    damaged = tmp_path / "ours" / "step-00000004" / "shard-00001-of-00002.safetensors"
    after = run(3, how="tp", load=[*ours, theirs])
    for rank in after:
        assert rank["loaded"] == {path: [before[0]["saved"], 7] for path in (*ours, theirs)}

    tensor = next(one for one in records[2].shards[1].tensors if one.whole_name == "model.2.weight")
    flip(damaged, tensor.offset)
    (alone,) = run(1, how="ddp", load=[ours[0]], refuse=ours[2])
    assert alone["loaded"][ours[0]] == [before[0]["saved"], 7]
    assert alone["refused"].startswith(f"DataCorruption: tensor {tensor.name!r} in {damaged} does not match")
