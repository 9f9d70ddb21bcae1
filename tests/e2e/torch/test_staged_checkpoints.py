"""A model that is cut into pipeline stages is restored bit for bit by any other number of stages."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.checkpoints.staged_ranks import LAYERS
from tests.support.torch_ranks.processes import run_torch_ranks

from fireflyer.checkpoint import verify
from fireflyer.checkpoint.core.manifest import decode_manifest

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def run(directory: Path, ranks: int, stages: int, last: int, *, fsdp: bool = False) -> dict[str, dict[str, str]]:
    """The union of what the ranks found; ranks of one stage must have found the same."""
    module = "tests.support.checkpoints.staged_ranks"
    ended = run_torch_ranks(module, (0,) * ranks, directory=str(directory), stages=stages, fsdp=fsdp, last=last)
    assert [rank.code for rank in ended] == [0] * ranks, [rank.errors[-3000:] for rank in ended]
    found: dict[str, dict[str, str]] = {"restored": {}, "saved": {}}
    for rank in ended:
        for when, digests in found.items():
            for name, digest in rank.result[when].items():
                assert digests.setdefault(name, digest) == digest
    return found


def test_two_stages_then_one_process_then_four_stages_then_two_of_fsdp_have_the_same_bits(tmp_path: Path) -> None:
    """The first with two ranks for each stage, the last with the parameters of a stage sharded over two."""
    two = run(tmp_path, 4, 2, 2)
    assert len(two["saved"]) == 8 * LAYERS, "weight and bias of each layer, and three of the optimizer for each"
    one = run(tmp_path, 1, 1, 4)
    four = run(tmp_path, 4, 4, 6)
    sharded = run(tmp_path, 4, 2, 8, fsdp=True)
    again = run(tmp_path, 1, 1, 8)
    assert one["restored"] == two["saved"]
    assert four["restored"] == one["saved"] != two["saved"]
    assert sharded["restored"] == four["saved"]
    assert again["restored"] == sharded["saved"]

    assert all(info.problem is None for info in verify(str(tmp_path)))
    manifest = decode_manifest((tmp_path / "step-00000008" / "manifest.json").read_bytes())
    sizes = [sum(one.size_bytes for one in shard.tensors if "rng/" not in one.name) for shard in manifest.shards]
    assert min(sizes) > 0.8 * max(sizes), "all ranks write about the same"
