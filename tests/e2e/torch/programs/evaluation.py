"""Figures of an evaluation, of shares that differ: sums, the best, the mean, counts of classes, and examples."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def main() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    scores = torch.linspace(0, 1 + rank, 5 + 3 * rank, dtype=torch.float64)
    counted = torch.tensor([scores.numel(), int((scores > 0.5).sum())])
    dist.all_reduce(counted)
    best, worst = scores.max(), scores.min() - rank
    dist.all_reduce(best, op=dist.ReduceOp.MAX)
    dist.reduce(worst, dst=0, op=dist.ReduceOp.MIN)
    classes = torch.bincount((scores * 3).long(), minlength=8).reshape(2, 4)
    dist.all_reduce(classes)
    examples: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object([(rank, value) for value in scores.tolist()], examples, dst=0)
    stop = torch.tensor(rank == 1)
    votes = [torch.zeros_like(stop) for _ in range(size)]
    dist.all_gather(votes, stop)
    seen = [counted.tolist(), best.item(), classes.tolist(), [bool(vote) for vote in votes]]
    return [seen, worst.item() if rank == 0 else None, examples]
