"""Fully sharded layers, and the whole parameters that they make."""

from __future__ import annotations

from typing import Any

from tests.e2e.torch.programs.models import network, train
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def main() -> Any:
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    losses = train(model, 4)
    whole = [p.full_tensor() for p in model.parameters() if isinstance(p, DTensor)]
    return [losses, [tensor.double().sum().item() for tensor in whole]]
