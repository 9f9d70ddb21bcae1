"""Each rank trains alone; every third step the parameters are averaged."""

from __future__ import annotations

from typing import Any

import torch
from tests.e2e.torch.programs.models import batch, digest, network
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager


def main() -> Any:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = PeriodicModelAverager(period=3, warmup_steps=1)
    for step in range(7):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
        averager.average_parameters(model.parameters())
    return digest(model)
