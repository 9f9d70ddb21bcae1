"""FP8 quantization and products again, by another way: NumPy in float64, with each rounding written out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["oracle_product", "oracle_quantize"]

Matrix = npt.NDArray[Any]
TILE = 128


def oracle_quantize(values: Matrix, rows: int, scales: str) -> tuple[Matrix, Matrix]:
    """Codes as numbers `[rows of values, 128 * tiles]`, and a scale for each row and tile."""
    height, width = values.shape
    tiles = -(-width // TILE)
    codes = np.zeros((height, tiles * TILE))
    of_rows = np.zeros((height, tiles))
    for top in range(0, height, rows):
        for tile in range(tiles):
            part = values[top : top + rows, tile * TILE : (tile + 1) * TILE].astype(np.float64)
            scale = _scale(float(np.abs(part).max()), scales) if np.isfinite(part).all() else math.nan
            of_rows[top : top + rows, tile] = scale
            for row in range(part.shape[0]):
                for column in range(part.shape[1]):
                    codes[top + row, tile * TILE + column] = _e4m3(_f32(part[row, column] / scale))
    return codes, of_rows


def oracle_product(a: tuple[Matrix, Matrix], b: tuple[Matrix, Matrix], accumulation: str) -> Matrix:
    result = np.zeros((len(a[0]), len(b[0])))
    for i in range(len(a[0])):
        for j in range(len(b[0])):
            total = 0.0
            for tile in range(a[1].shape[1]):
                part = slice(tile * TILE, (tile + 1) * TILE)
                products = [float(x) * float(y) for x, y in zip(a[0][i, part], b[0][j, part], strict=True)]
                summed = math.fsum(products) if accumulation == "fp32" else _tensor_core(products)
                total = _f32(total + _f32(summed * (a[1][i, tile] * b[1][j, tile])))
            result[i, j] = total
    return result


def _tensor_core(products: list[float]) -> float:
    """Groups of 32, aligned to the largest exponent, into a register of 13 mantissa bits."""
    register = 0.0
    for begin in range(0, len(products), 32):
        group = products[begin : begin + 32]
        if any(math.isnan(one) for one in group):
            return math.nan
        top = max(abs(one) for one in group)
        if top:
            unit = 2.0 ** (math.frexp(top)[1] - 1 - 13)
            register += sum(math.trunc(one / unit) for one in group) * unit
        mantissa, exponent = math.frexp(register)  # 0.5 <= mantissa < 1: one bit and 13 behind it
        register = math.ldexp(math.trunc(math.ldexp(mantissa, 14)), exponent - 14)
    return register


def _scale(magnitude: float, scales: str) -> float:
    scale = _f32(max(magnitude, 448 * 2.0**-126) / 448)
    if scales == "ue8m0":
        mantissa, exponent = math.frexp(scale)
        scale = 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)
    return scale


def _e4m3(value: float) -> float:
    """To nearest, ties to even: 3 mantissa bits, exponents from -6; what is above is cut to 448."""
    if math.isnan(value) or value == 0:
        return value
    unit = 2.0 ** (max(math.frexp(value)[1] - 1, -6) - 3)
    return math.copysign(min(448.0, abs(round(value / unit)) * unit), value)


def _f32(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(value))
