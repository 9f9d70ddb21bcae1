"""Tensors of different lengths are gathered: lengths first, then all padded to the longest."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def main() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.arange(3 + 2 * rank, dtype=torch.int64)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([mine.numel()]))
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.int64)
    padded[: mine.numel()] = mine
    gathered = [torch.zeros_like(padded) for _ in range(size)]
    dist.all_gather(gathered, padded)
    return [part[: int(length)].tolist() for part, length in zip(gathered, lengths, strict=True)]
