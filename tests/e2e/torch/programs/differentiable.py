"""Collectives inside the graph: their gradients are collectives, too."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable


def main() -> Any:
    rank = dist.get_rank()
    x = torch.arange(4.0, requires_grad=True)
    mean = differentiable.all_reduce(x * (rank + 1)) / dist.get_world_size()  # type: ignore[no-untyped-call]
    parts = differentiable.all_gather(x.square())  # type: ignore[no-untyped-call]
    (mean.square().sum() + sum(part.sum() for part in parts)).backward()
    assert x.grad is not None
    return [mean.tolist(), x.grad.tolist()]
