"""A mesh of two axes, tensors that are spread over it, and their products."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def main() -> Any:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("data", "model"))
    left = torch.arange(12.0 * size).reshape(3 * size, 4)
    right = torch.arange(8.0 * size).reshape(4, 2 * size)
    along = mesh["model"]
    rows = distribute_tensor(left, along, [Shard(0)])
    columns = distribute_tensor(right, along, [Shard(1)])
    product: Any = rows.redistribute(along, [Replicate()]) @ columns
    total: Any = rows.sum()
    found = [product.full_tensor().tolist(), total.full_tensor().item()]
    return [*found, rows.redistribute(along, [Shard(1)]).to_local().tolist()]
