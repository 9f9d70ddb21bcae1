"""Two layers in the way of Megatron: columns, then rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def main() -> Any:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.ones(3, 8)
    loss = model(x).square().mean()
    loss.backward()
    gradients: list[Any] = [p.grad for p in model.parameters()]
    return [loss.item(), [gradient.full_tensor().double().sum().item() for gradient in gradients]]
