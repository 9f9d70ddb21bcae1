"""A linear layer whose three products have FP8 operands.

    Fprop   y  = x  W^T   x in tiles of 1x128 along inputs,   W in blocks of 128x128
    Dgrad   dx = dy W     dy in tiles of 1x128 along outputs, W in the same blocks
    Wgrad   dW = dy^T x   both in tiles of 1x128 along tokens

Input and weight are kept for backward in their own types, as by `nn.Linear`, and quantized again there: the tiles of
Wgrad are rounded once, not twice, and weights that FSDP gathers anew need nothing else. The bias, and its gradient, are
added in float32. Results have the type of the input, or that of autocast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fireflyer.base.errors import UsageError
from fireflyer.training.fp8.config import DEFAULT, Fp8Config
from fireflyer.training.fp8.counts import Counts
from fireflyer.training.fp8.products import check_device, product
from fireflyer.training.fp8.tiles import TILE, quantize

__all__ = ["Fp8Linear", "fp8_linear"]


class Fp8Linear(nn.Linear):
    """`nn.Linear` with FP8 products: the same parameters, names and types, so checkpoints of both are the same."""

    fp8_config: Fp8Config = DEFAULT
    fp8_counts: Counts

    def __init__(self, in_features: int, out_features: int, bias: bool = True, config: Fp8Config = DEFAULT) -> None:
        super().__init__(in_features, out_features, bias)
        self.use_fp8(config)

    def use_fp8(self, config: Fp8Config) -> None:
        """Compute with `config` from now on; counts begin anew."""
        self.fp8_config = config
        self.fp8_counts = Counts()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name that nn.Linear gives it
        """`[..., in_features]` to `[..., out_features]`. Raises `UsageError` for float64, and off the CPU."""
        if type(self.weight) not in (Tensor, nn.Parameter):
            raise UsageError(
                f"the weight of an FP8 linear layer is a {type(self.weight).__name__} in forward; FSDP may shard it, "
                "tensor parallelism may not: leave the layer out with keep="
            )
        check_device(input.device)
        rows = input.reshape(-1, self.in_features)
        output = fp8_linear(rows, self.weight, self.bias, self.fp8_config, self.fp8_counts)
        return output.reshape(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        config = self.fp8_config
        return f"{super().extra_repr()}, scales={config.scales}, accumulation={config.accumulation}"


def fp8_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, config: Fp8Config, counts: Counts) -> Tensor:
    """`[M, out]` for `rows [M, in]` and `weight [out, in]`, in the type of the rows, or that of autocast."""
    kind = rows.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows.dtype
    products: Callable[..., Tensor] = _Products.apply
    return products(rows.to(dtype), weight, bias, config, counts)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, config: Fp8Config, counts: Counts
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.config, ctx.counts = config, counts
        ctx.bias_dtype = None if bias is None else bias.dtype
        left, right = quantize(rows, 1, config), quantize(weight, TILE, config)
        counts.add("input", left.counts)
        counts.add("weight", right.counts)
        output = product(left, right, config.accumulation)
        if bias is not None:
            output = output + bias.float()  # a product that recomputation keeps is not changed in place
        return output.to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        config, counts = ctx.config, ctx.counts
        of_rows = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            left = quantize(gradient, 1, config)
            counts.add("gradient", left.counts)
            of_rows = product(left, quantize(weight.T, TILE, config), config.accumulation).to(rows.dtype)
        if ctx.needs_input_grad[1]:
            left, right = quantize(gradient.T, 1, config), quantize(rows.T, 1, config)
            counts.add("gradient_of_wgrad", left.counts)
            counts.add("input_of_wgrad", right.counts)
            of_weight = product(left, right, config.accumulation).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            of_bias = gradient.float().sum(dim=0).to(ctx.bias_dtype)
        return of_rows, of_weight, of_bias, None, None
