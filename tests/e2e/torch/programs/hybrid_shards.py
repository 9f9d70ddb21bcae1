"""Shards inside of a part of the ranks and replicas between the parts, accumulation, and the norm of all gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from tests.e2e.torch.programs.models import batch, network
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def main() -> Any:
    size = dist.get_world_size()
    found = []
    for shape in ((1, size), (size, 1)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
        model: Any = network()
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(4):
            model.set_requires_gradient_sync(step % 2 == 1)
            model(batch(step)).square().mean().backward()
            if step % 2 == 1:
                norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                found.append(norm.full_tensor().item())
                optimizer.step()
                optimizer.zero_grad()
        found += [p.full_tensor().double().sum().item() for p in model.parameters() if isinstance(p, DTensor)]
    return found
