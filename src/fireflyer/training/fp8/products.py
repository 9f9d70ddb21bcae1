"""The product of two quantized matrices, A B^T, computed on the CPU so that each bit of it is defined.

The contracted dimension is cut into tiles of 128. For each tile, in ascending order:

    sum of 128 products of codes -> times both scales, rounded to float32 -> added to a float32 accumulator

With `fp32` the sum is exact: a product of codes is a multiple of 2**-18 below 2**18, so that 128 of them need 43 bits,
and float64 adds them without rounding in any order. With `fp22` the sum is that of the tensor cores of Hopper (Insights
into DeepSeek-V3, 3.1.1; FP22: 1 sign, 8 exponent and 13 mantissa bits). For each 32 products, in ascending order:

    1. products are aligned to the largest exponent E among them, and bits below 2**(E - 13) are cut off;
    2. their sum is added to an FP22 register, and bits below its 13 mantissa bits are cut off.

Cutting off is towards zero. The register begins at zero for each tile: sums are promoted to float32 every 128. NVIDIA
does not publish these units; this is how the paper describes them, and no measurement of a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fireflyer.base.errors import UsageError
from fireflyer.training.fp8.config import Accumulation
from fireflyer.training.fp8.tiles import TILE, Quantized

__all__ = ["PRODUCT", "check_device", "product"]

PRODUCT: Final = "fireflyer::fp8_product"
"""Name of the operator of a product. It is one, so that recomputation and counts of FLOPs see a product as of other
matrices, and not what is computed for each tile."""

_GROUP: Final = 32
_FRACTION_BITS: Final = 13
_FLOAT32_EXPONENT: Final = 0x7F800000
_FLOAT64_FRACTION_BITS: Final = 52
_CUT_OFF: Final = (1 << (_FLOAT64_FRACTION_BITS - _FRACTION_BITS)) - 1
_MOST_PRODUCTS: Final = 1 << 21
"""Held at a time while `fp22` sums them: 8 MiB."""


def product(a: Quantized, b: Quantized, accumulation: Accumulation = "fp32") -> Tensor:
    """float32 `[rows of a, rows of b]`. Raises `UsageError` if the contracted dimensions differ, or off the CPU."""
    check_device(a.codes.device)
    check_device(b.codes.device)
    if a.codes.shape[1] != b.codes.shape[1]:
        raise UsageError(f"operands contract {a.codes.shape[1]} and {b.codes.shape[1]} columns (multiples of {TILE})")
    operator: Any = torch.ops.fireflyer.fp8_product
    result: Tensor = operator(a.codes, a.scales_of_rows(), b.codes, b.scales_of_rows(), accumulation)
    return result


def _product(a: Tensor, scales_a: Tensor, b: Tensor, scales_b: Tensor, accumulation: Accumulation) -> Tensor:
    """Of codes `[rows, 128 * tiles]` and scales `[rows, tiles]`."""
    total = torch.zeros(a.shape[0], b.shape[0])
    wide_a, wide_b = scales_a.double(), scales_b.double()
    for tile in range(a.shape[1] // TILE):
        columns = slice(tile * TILE, (tile + 1) * TILE)
        sums = _sums(a[:, columns], b[:, columns], accumulation)
        sums.mul_(wide_a[:, tile, None] * wide_b[:, tile])
        total += sums.float()
    return total


def _flops(a: Sequence[int], _scales: object, b: Sequence[int], *_: object, **__: object) -> int:
    """Of shapes."""
    return 2 * a[0] * a[1] * b[0]


torch.library.define(PRODUCT, "(Tensor a, Tensor scales_a, Tensor b, Tensor scales_b, str accumulation) -> Tensor")
torch.library.impl(PRODUCT, "cpu", _product)
register_flop_formula(torch.ops.fireflyer.fp8_product)(_flops)


def check_device(device: torch.device) -> None:
    """Raises `UsageError` unless it is the CPU: torch's FP8 kernels for GPUs, whose accumulation is another, are not
    used."""
    if device.type != "cpu":
        raise UsageError(
            f"FP8 products are computed on the CPU only, and the operand is on {device}; the FP8 kernels of torch "
            "accumulate otherwise than stated here and were not compared: leave the model in bfloat16 on this device"
        )


def _sums(a: Tensor, b: Tensor, accumulation: Accumulation) -> Tensor:
    """float64 `[rows of a, rows of b]` of codes `[rows, 128]`."""
    if accumulation == "fp32":
        return a.double() @ b.double().T
    register = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64)
    at_a_time = max(1, _MOST_PRODUCTS // max(1, b.shape[0] * _GROUP))
    for group in range(0, TILE, _GROUP):
        right = b[:, group : group + _GROUP].float()
        for row in range(0, a.shape[0], at_a_time):
            left = a[row : row + at_a_time, group : group + _GROUP].float()
            part = register[row : row + at_a_time]
            part.copy_(_fp22(part + _aligned_sum(left[:, None] * right).double()))
    return register


def _aligned_sum(products: Tensor) -> Tensor:
    """float32 `[...]` of exact products `[..., 32]`: each is cut off 13 bits below the largest exponent."""
    largest = products.abs().amax(dim=-1)
    power = (largest.view(torch.int32) & _FLOAT32_EXPONENT).view(torch.float32)
    unit = torch.where(power == 0, 1.0, power * 2.0**-_FRACTION_BITS)
    # at most 32 whole numbers below 2**14: the sum is exact. A NaN has the unit infinity, and stays
    return products.div_(unit[..., None]).trunc_().sum(dim=-1) * unit


def _fp22(values: Tensor) -> Tensor:
    return (values.view(torch.int64) & ~_CUT_OFF).view(torch.float64)
