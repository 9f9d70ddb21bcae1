"""How operands are scaled and products are accumulated."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

__all__ = ["Accumulation", "Fp8Config", "Granularity", "ScaleFormat"]

ScaleFormat = Literal["fp32", "ue8m0"]
Accumulation = Literal["fp32", "fp22"]
Granularity = Literal["tiles", "tensor"]


class Fp8Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numerics of FP8 linear layers. The defaults are those of DeepSeek-V3 with its accumulation in FP32."""

    scales: ScaleFormat = "fp32"
    """`fp32`: largest magnitude / 448, rounded to FP32. `ue8m0`: that, rounded up to a power of two."""
    accumulation: Accumulation = "fp32"
    """`fp32`: exact sums of 128 products, added up in FP32. `fp22`: these sums as by Hopper's tensor cores."""
    granularity: Granularity = "tiles"
    """`tiles`: 1x128 for activations and gradients, 128x128 for weights. `tensor`: one scale, for comparison only."""


DEFAULT: Final = Fp8Config()
