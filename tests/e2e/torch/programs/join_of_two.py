"""Uneven inputs of two joinable objects at a time: a model, and an optimizer whose state is in parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from tests.e2e.torch.programs.models import digest, network, train
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel


def main() -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # slow, and warns when it is imported

    model = DistributedDataParallel(network(), bucket_cap_mb=1e-3)
    optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with Join([model, optimizer]):
        losses = train(model, 2 + 2 * dist.get_rank(), optimizer)
    return [losses, digest(model)]
