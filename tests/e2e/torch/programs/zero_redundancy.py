"""Optimizer state in parts, one on each rank, and gathered for a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from tests.e2e.torch.programs.models import digest, network, train
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def main() -> Any:
    model = DistributedDataParallel(network())
    optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    losses = train(model, 4, optimizer)
    optimizer.consolidate_state_dict(0)
    entries = len(optimizer.state_dict()["state"]) if dist.get_rank() == 0 else 0
    return [losses, digest(model), entries]
