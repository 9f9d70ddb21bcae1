"""Norms on parts of the sequence, products on parts of the weights, and a loss of logits that no rank has whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 16, bias=False)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.down(self.up(self.norm(self.embed(tokens))).relu()))


def main() -> Any:
    torch.manual_seed(4)
    model = Block()
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, plan)
    parallelize_module(model.up, mesh, ColwiseParallel())
    tokens = torch.arange(24).reshape(2, 12) % 16
    with loss_parallel():
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1).flatten())
        loss.backward()  # type: ignore[no-untyped-call]
    gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
    return [loss.item(), [gradient.full_tensor().double().sum().item() for gradient in gradients]]
