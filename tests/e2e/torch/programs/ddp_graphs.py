"""DDP with a static graph, with parameters that a pass does not use, and with gradients that are views of buckets."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from tests.e2e.torch.programs.models import WIDTH, digest, network, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class TwoWays(nn.Module):
    """Rank 0 uses one layer, the others the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.ways = nn.ModuleList([nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.ways[min(1, dist.get_rank())](x)
        return result


def main() -> Any:
    models = (
        DistributedDataParallel(network(), static_graph=True, bucket_cap_mb=1e-3),
        DistributedDataParallel(TwoWays(), find_unused_parameters=True),
        DistributedDataParallel(network(), gradient_as_bucket_view=True, bucket_cap_mb=1e-3),
    )
    return [[train(model, 4), digest(model)] for model in models]
