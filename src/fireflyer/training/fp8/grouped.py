"""Products of groups of rows with a matrix each, as experts compute them, with FP8 operands.

Each group is computed as by an FP8 linear layer, so tiles along tokens end with the rows of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from fireflyer.training.fp8.config import DEFAULT, Fp8Config
from fireflyer.training.fp8.counts import Counts
from fireflyer.training.fp8.linear import fp8_linear
from fireflyer.training.fp8.products import check_device

__all__ = ["Fp8GroupedLinear"]


class Fp8GroupedLinear(nn.Module):
    """Has no parameters: takes the place of a module of the same call in one that has stacked matrices."""

    def __init__(self, config: Fp8Config = DEFAULT) -> None:
        super().__init__()
        self.fp8_config = config
        self.fp8_counts = Counts()

    def forward(self, rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """`[M, out]`: `rows [M, in]`, `counts [G]` of them for each group, times the transposed matrix of their group,
        `weights [G, out, in]`. Raises `UsageError` for float64, and off the CPU."""
        check_device(rows.device)
        parts = torch.split(rows, counts.tolist())
        # A group without rows has no tiles; its part of the graph stays, so that its gradient is zeros.
        return torch.cat(
            [
                fp8_linear(part, weight, None, self.fp8_config, self.fp8_counts)
                if len(part)
                else functional.linear(part, weight)
                for part, weight in zip(parts, weights, strict=True)
            ]
        )
