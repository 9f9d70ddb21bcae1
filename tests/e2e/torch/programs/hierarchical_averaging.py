"""Parameters averaged in small groups often, and over all ranks seldom."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from tests.e2e.torch.programs.models import batch, digest, network
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager


def main() -> Any:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    size = dist.get_world_size()
    averager: Any = HierarchicalModelAverager(  # type: ignore[no-untyped-call]
        period_group_size_dict=OrderedDict([(2, 2), (4, size)] if size > 2 else [(2, size)]), warmup_steps=1
    )
    found = []
    for step in range(6):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
        averager.average_parameters(model.parameters())
        found.append(digest(model))
    return found
