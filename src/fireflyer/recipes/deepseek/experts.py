"""Feed-forward layers: a dense one, and the routed experts of a layer as products of groups of rows."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from fireflyer.base.errors import UsageError

__all__ = ["FeedForward", "RoutedExperts", "grouped_linear"]

_GROUPED: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})
_ALIGNMENT_BYTES: Final = 16


class FeedForward(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`; all shared experts of a layer are one of these."""

    def __init__(self, hidden: int, inner: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Result `[..., h]` for `tokens [..., h]`."""
        result: Tensor = self.down_proj(functional.silu(self.gate_proj(tokens)) * self.up_proj(tokens))
        return result


class RoutedExperts(nn.Module):
    """Experts with the numbers `numbers` of a layer: all of them, or those of one rank of expert parallelism."""

    def __init__(self, hidden: int, inner: int, numbers: range) -> None:
        super().__init__()
        if len(numbers) < 1 or numbers.step != 1:
            raise UsageError(f"experts {numbers} are no range of one or more consecutive numbers")
        self.numbers = numbers
        self.gate_proj = nn.Parameter(torch.empty(len(numbers), inner, hidden))
        self.up_proj = nn.Parameter(torch.empty(len(numbers), inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(len(numbers), hidden, inner))
        self.grouped_linear: nn.Module = GroupedLinear()  # `training.fp8` puts another in its place

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Results `[M, h]` for `rows [M, h]`, which are in the order of the experts: `counts [experts]` rows each."""
        gate = self.grouped_linear(rows, self.gate_proj, counts)
        up = self.grouped_linear(rows, self.up_proj, counts)
        result: Tensor = self.grouped_linear(functional.silu(gate) * up, self.down_proj, counts)
        return result


class GroupedLinear(nn.Module):
    """`grouped_linear` as a module without parameters."""

    def forward(self, rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        return grouped_linear(rows, weights, counts)


def grouped_linear(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Rows `[M, out]`: `rows [M, in]` times the transposed matrix of their group, `weights [G, out, in]`; the groups
    have `counts [G]` rows. One product of groups where PyTorch has it, else (fp64, widths that are no multiple of 16
    bytes) one product for each group. Under autocast in its dtype, but for fp64, as `functional.linear` does."""
    if rows.dtype != torch.float64 and _is_autocast_enabled(rows.device.type):
        dtype = torch.get_autocast_dtype(rows.device.type)  # autocast does not know products of groups
        rows, weights = rows.to(dtype), weights.to(dtype)
    if len(rows) and _can_group(rows, weights):
        result = functional.grouped_mm(
            rows, weights.transpose(1, 2), offs=counts.cumsum(0).to(device=rows.device, dtype=torch.int32)
        )
        if result.requires_grad:  # its backward refuses gradients that are expanded, as that of a sum
            result.register_hook(torch.Tensor.contiguous)  # type: ignore[no-untyped-call]
        return result
    parts = torch.split(rows, counts.tolist())
    return torch.cat([functional.linear(part, weight) for part, weight in zip(parts, weights, strict=True)])


def _is_autocast_enabled(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def _can_group(rows: Tensor, weights: Tensor) -> bool:
    aligned = all(width * rows.element_size() % _ALIGNMENT_BYTES == 0 for width in weights.shape[1:])
    return aligned and rows.dtype in _GROUPED and weights.dtype == rows.dtype
