"""Half precision: under autocast with parameters in float32, and of the whole model, with gradients in bfloat16."""

from __future__ import annotations

from typing import Any

import torch
from tests.e2e.torch.programs.models import batch, digest, network
from torch.nn.parallel import DistributedDataParallel


def main() -> Any:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = DistributedDataParallel(network().to(dtype), bucket_cap_mb=1e-3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(batch(step).to(dtype)).float().square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
        found.append([losses, digest(model)])
    return found
