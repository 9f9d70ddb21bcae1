"""An allreduce that a program makes itself, of sends and receives around a ring, in batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def main() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    total = torch.arange(7.0) + rank
    moving = total.clone()
    for _ in range(size - 1):
        arriving = torch.empty_like(moving)
        operations = [
            dist.P2POp(dist.isend, moving, (rank + 1) % size),
            dist.P2POp(dist.irecv, arriving, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        total += arriving
        moving = arriving
    return total.tolist()
