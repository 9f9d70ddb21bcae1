"""Ranks with different numbers of batches train together; the gradients are divided in both ways."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from tests.e2e.torch.programs.models import digest, network, train
from torch.nn.parallel import DistributedDataParallel


def main() -> Any:
    found = []
    for by_all in (True, False):
        model = DistributedDataParallel(network(), bucket_cap_mb=1e-3)
        with model.join(divide_by_initial_world_size=by_all):
            losses = train(model, 2 + 2 * dist.get_rank())
        found.append([losses, digest(model)])
    return found
