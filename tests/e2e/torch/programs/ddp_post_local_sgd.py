"""Post-local SGD: all sum at first, then only subgroups do, and parameters are averaged from time to time."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from tests.e2e.torch.programs.models import digest, network, train
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel


def main() -> Any:
    found = []
    for sums_in_subgroup in (True, False):
        subgroup, _ = dist.new_subgroups(group_size=1)  # type: ignore[no-untyped-call]
        model = DistributedDataParallel(network())
        state = local.PostLocalSGDState(  # type: ignore[no-untyped-call]
            None, subgroup, 2, post_local_gradient_allreduce=sums_in_subgroup
        )
        model.register_comm_hook(state, local.post_localSGD_hook)
        optimizer = PostLocalSGDOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), PeriodicModelAverager(period=3, warmup_steps=2)
        )
        found.append([train(model, 8, optimizer), digest(model)])
    return found
