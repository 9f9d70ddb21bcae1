"""Which slices the ranks of a mesh have of a tensor, on one rank of many that are not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fireflyer.base.errors import UsageError
from fireflyer.checkpoint.core.slices import Box
from fireflyer.checkpoint.sharding import box_of, describe
from fireflyer.checkpoint.snapshot import describe_state

Placements = tuple[Placement, ...]


@contextmanager
def mesh_of(*axes: int, rank: int = 0) -> Iterator[DeviceMesh]:
    names = tuple(f"axis{number}" for number in range(len(axes)))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=torch.Size(axes).numel())
    try:
        yield init_device_mesh("cpu", axes, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def tensor_on(mesh: DeviceMesh, shape: tuple[int, ...], placements: Placements, held: tuple[int, ...]) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        torch.zeros(held), mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_rank_whose_rows_do_not_lie_together_is_refused(rank: int) -> None:
    """Two ranks have {0, 2} and {1, 3}: as boxes they would be [0:2] and [1:3]."""
    with mesh_of(2, 2, rank=rank) as mesh:
        tensor = tensor_on(mesh, (8,), (Shard(0), _StridedShard(0, split_factor=2)), (2,))
        with pytest.raises(UsageError, match=r"tensor 'w' is sharded as .* do not lie together"):
            describe("w", tensor)
        with pytest.raises(UsageError, match=r"tensor of shape \(8,\) is sharded as .* do not lie together"):
            box_of(tensor)


@pytest.mark.parametrize(
    ("shape", "placements", "box", "slices"),
    [
        ((8,), (_StridedShard(0, split_factor=2), Shard(0)), Box((0,), (2,)), 4),
        ((8,), (Shard(0), Shard(0)), Box((0,), (2,)), 4),
        ((7, 3), (Shard(0), Shard(1)), Box((0, 0), (4, 2)), 4),
        ((7, 3), (Shard(1), Replicate()), Box((0, 0), (7, 2)), 2),
        ((3, 3), (Shard(0), Shard(0)), Box((0, 0), (1, 3)), 3),
        ((3, 3), (Replicate(), Replicate()), Box((0, 0), (3, 3)), 1),
        ((0, 3), (Shard(0), Shard(1)), Box((0, 0), (0, 2)), 1),
    ],
)
def test_slices_that_are_boxes_are_counted_without_replicas_and_empty_ones(
    shape: tuple[int, ...], placements: Placements, box: Box, slices: int
) -> None:
    with mesh_of(2, 2) as mesh:
        tensor = tensor_on(mesh, shape, placements, box.shape)
        assert (box_of(tensor), describe("w", tensor).slices) == (box, slices)


def test_a_state_in_more_slices_than_a_manifest_can_list_is_refused_before_anything_is_written() -> None:
    """As a model of 70 billion parameters with Adam, each of which 1,024 ranks share."""
    with mesh_of(1024) as mesh:
        tensor = tensor_on(mesh, (8192, 8192), (Shard(0),), (8, 8192))
        names = [f"optimizer/model.layers.{number // 9}.mlp.gate_proj.weight.{number % 9}" for number in range(3 * 723)]
        with pytest.raises(UsageError, match=r"manifest of 2221056 tensors and slices .* shard over fewer ranks"):
            describe_state(dict.fromkeys(names, tensor), {})
    with mesh_of(16, 64) as mesh:
        tensor = tensor_on(mesh, (8192, 8192), (Replicate(), Shard(0)), (128, 8192))
        assert len(describe_state(dict.fromkeys(names, tensor), {}).held) == len(names)
