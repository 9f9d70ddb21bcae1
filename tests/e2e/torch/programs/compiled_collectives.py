"""Functional collectives in a graph that is compiled as a whole, forward and back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional


def exchange(x: torch.Tensor, group: Any) -> torch.Tensor:
    gathered = functional.all_gather_single(x.sin(), 0, group)
    scattered = functional.reduce_scatter_single(gathered * 2, "sum", 0, group)
    total: torch.Tensor = functional.all_reduce(scattered.cos(), "sum", group)
    return total + x


def main() -> Any:
    torch._dynamo.reset()
    compiled = torch.compile(exchange, backend="aot_eager", fullgraph=True)
    x = torch.arange(6.0) + dist.get_rank()
    return [compiled(x, dist.group.WORLD).tolist(), exchange(x, dist.group.WORLD).tolist()]
