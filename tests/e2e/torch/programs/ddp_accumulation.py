"""Gradient accumulation: two batches without a sum, the third with one."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from tests.e2e.torch.programs.models import batch, digest, network
from torch.nn.parallel import DistributedDataParallel


def main() -> Any:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(6):
        last = step % 3 == 2
        with nullcontext() if last else model.no_sync():
            model(batch(step)).square().mean().backward()
        if last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return digest(model)
