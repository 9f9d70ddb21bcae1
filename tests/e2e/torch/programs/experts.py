"""Tokens go to the rank of their expert and come back: all-to-all with counts that differ."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def main() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    tokens = torch.arange(10.0).reshape(5, 2) + 100 * rank
    expert = (torch.arange(5) * (rank + 1)) % size
    order = torch.argsort(expert, stable=True)
    counts = torch.bincount(expert, minlength=size)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts)
    sent, received = counts.tolist(), theirs.tolist()
    work = torch.empty(sum(received), 2)
    dist.all_to_all_single(work, tokens[order], received, sent)
    back = torch.empty_like(tokens)
    dist.all_to_all_single(back, work * (rank + 1), sent, received)
    return back[torch.argsort(order, stable=True)].tolist()
