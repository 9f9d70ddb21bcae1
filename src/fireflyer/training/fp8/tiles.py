"""Quantization of a matrix to FP8 E4M3 with a scale for each tile: 1x128 (activations, gradients), 128x128 (weights).

The scheme is that of `fireflyer.collectives.kernels.quantize_fp8_blocks`, to the bit, for tiles of two dimensions, in
torch, with scales that may be powers of two. The second dimension is the one that a product contracts.

A scale is max(amax, 448 * 2**-126) / 448 in float32, where amax is the largest magnitude of the tile; a code is value /
scale, rounded to nearest, ties to even. No scale is zero or subnormal: a tile of zeros has codes of zero. A tile with a
NaN or an infinity has the scale NaN and is NaN throughout. UE8M0 scales are rounded up, so that nothing saturates; the
cast to `torch.float8_e8m0fnu` rounds to nearest and is not used.

A cast to E4M3 saturates without a sign of it, so the magnitudes are checked here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from fireflyer.base.errors import UsageError
from fireflyer.training.fp8.config import DEFAULT, Fp8Config
from fireflyer.training.fp8.counts import KINDS

__all__ = ["TILE", "Quantized", "dequantize", "quantize"]

TILE: Final = 128
_LARGEST: Final = 448.0
_SMALLEST_AMAX: Final = 448.0 * 2.0**-126
_ROUNDED_TO_LARGEST: Final = 464.0
"""Halfway between 448 and what would be the next number: magnitudes above it saturate."""
_MANTISSA: Final = 0x007FFFFF
_ACCEPTED: Final = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix of `rows` rows as codes and scales."""

    codes: Tensor
    """float8_e4m3fn `[rows, 128 * tiles]`; the last tile is filled up with zeros."""
    scales: Tensor
    """float32 `[rows, tiles]`, or `[ceil(rows / 128), tiles]` where `rows_per_scale` is 128."""
    rows_per_scale: int
    counts: Tensor
    """int64 of `counts.KINDS`: elements, and how many of them underflowed, saturated, were not finite."""

    def scales_of_rows(self) -> Tensor:
        """float32 `[rows, tiles]`."""
        if self.rows_per_scale == 1:
            return self.scales
        return self.scales.repeat_interleave(self.rows_per_scale, dim=0)[: self.codes.shape[0]]


def quantize(values: Tensor, rows_per_scale: int, config: Fp8Config = DEFAULT) -> Quantized:
    """`values [rows, columns]`, float32, bfloat16 or float16, in tiles of `rows_per_scale` (1 or 128) by 128.

    Raises `UsageError` for other shapes, types and tiles.
    """
    if values.dim() != 2 or values.dtype not in _ACCEPTED:
        raise UsageError(
            f"cannot quantize a tensor of shape {tuple(values.shape)} and {values.dtype}; it must be a matrix of "
            "float32, bfloat16 or float16"
        )
    if rows_per_scale not in (1, TILE):
        raise UsageError(f"rows_per_scale {rows_per_scale}: tiles are 1x{TILE} or {TILE}x{TILE}")
    rows, columns = values.shape
    exact = functional.pad(values.detach().float(), (0, -columns % TILE, 0, -rows % rows_per_scale))
    tiles = exact.view(exact.shape[0] // rows_per_scale, rows_per_scale, exact.shape[1] // TILE, TILE)
    magnitudes = tiles.abs().amax(dim=(1, 3))
    if config.granularity == "tensor" and magnitudes.numel():
        magnitudes = magnitudes.amax().expand_as(magnitudes)
    scales = _scales(magnitudes, config)
    scaled = tiles / scales[:, None, :, None]
    codes = scaled.to(torch.float8_e4m3fn)
    kept = codes.view(exact.shape)[:rows]
    return Quantized(kept, scales, rows_per_scale, _count(values, tiles, scaled, codes))


def dequantize(quantized: Quantized, columns: int) -> Tensor:
    """The float32 matrix `[rows, columns]` that codes and scales stand for."""
    rows, tiles = quantized.codes.shape[0], quantized.scales.shape[1]
    values = quantized.codes.float().view(rows, tiles, TILE) * quantized.scales_of_rows()[:, :, None]
    return values.view(rows, tiles * TILE)[:, :columns]


def _scales(magnitudes: Tensor, config: Fp8Config) -> Tensor:
    scales = magnitudes.clamp_min(_SMALLEST_AMAX) / torch.tensor(_LARGEST, device=magnitudes.device)
    if config.scales == "ue8m0":
        # float32 is ordered as its bits: adding the mantissa's largest value carries into the exponent unless it is 0
        scales = (scales.view(torch.int32) + _MANTISSA).bitwise_and(~_MANTISSA).view(torch.float32)
    return torch.where(magnitudes.isfinite(), scales, torch.nan)


def _count(values: Tensor, tiles: Tensor, scaled: Tensor, codes: Tensor) -> Tensor:
    """Filled-up zeros add to none of the counts but the elements, which are those of `values`."""
    finite = tiles.isfinite()
    found = {
        "elements": torch.tensor(values.numel(), device=values.device),
        "underflowed": ((codes.float() == 0) & (tiles != 0) & finite).sum(),
        "saturated": (scaled.abs() > _ROUNDED_TO_LARGEST).sum(),
        "nonfinite": (~finite).sum(),
    }
    return torch.stack([found[kind] for kind in KINDS])
