"""The native kernels, said again in NumPy: the same signatures, the same bits.

These functions are the definition that `fireflyer.native` is held to by a property test; nothing falls back to them
silently. Buffers are anything with the buffer protocol, contiguous; element types go by name:

| name | bytes | sums are kept in | overflow of a rounding |
|---|---|---|---|
| `f64`, `f32` | 8, 4 | the type itself | infinity |
| `f16`, `bf16` | 2 | float32 | infinity |
| `f8e5m2` | 1 | float32 | infinity |
| `f8e4m3` (no infinity) | 1 | float32 | saturates to 448, infinities too, as PyTorch 2.13 casts do |
| `i32`, `i64`, `i8`, `u8` | 4, 8, 1, 1 | the type itself | wraps (two's complement) |

Floats are combined strictly from left to right and rounded once, to nearest even. Every NaN result is the positive
quiet NaN of its type (0x7ff8<<48, 0x7fc00000, 0x7e00, 0x7fc0, 0x7f), since which payload survives an addition is a
compiler's whim.

The operations are `sum`, `min`, `max`, `product`, for integers `band`, `bor` and `bxor` (of their bits), and `mean`: a
sum which the function that rounds divides by its `divisor` (the number of ranks), in the type that sums are kept in,
before it rounds. An integer sum, which may have wrapped, is divided towards zero, as C divides. A NaN among the inputs
of `min` and `max` makes the result NaN, and -0 is less than +0, so that the order of the inputs does not matter.

What rounds returns how many elements left the range of an fp8 type: for `f8e4m3` what was clipped to 448, infinities
included; for `f8e5m2` the finite numbers that became infinity. For the other types that is 0.

CRC-32C is that of RFC 3720 appendix B.4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from typing_extensions import Buffer

    # NumPy arrays declare the buffer protocol from Python 3.12 on only.
    AnyBuffer = Buffer | npt.NDArray[Any]

__all__ = [
    "BITWISE",
    "DTYPES",
    "INTEGERS",
    "OPS",
    "accum_dtype",
    "crc32c",
    "crc32c_copy",
    "decode",
    "dequantize_fp8_blocks",
    "encode",
    "quantize_fp8_blocks",
    "reduce",
    "reduce_many",
    "reduce_to_accum",
    "round_from_accum",
]

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

_STORED: dict[str, str] = {
    "f64": "<f8",
    "f32": "<f4",
    "f16": "<f2",
    "bf16": "<u2",
    "f8e4m3": "u1",
    "f8e5m2": "u1",
    "i32": "<i4",
    "i64": "<i8",
    "i8": "i1",
    "u8": "u1",
}
# Both in the order of the codes in cpp/include/fireflyer/collectives/kernels/dtype.hpp.
DTYPES = tuple(_STORED)
OPS = ("sum", "min", "max", "product", "mean", "band", "bor", "bxor")
BITWISE = ("band", "bor", "bxor")
INTEGERS = tuple(name for name in DTYPES if name[0] in "iu")
_BIT_COMBINED: dict[str, Callable[[Array, Array], Array]] = {
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
_LARGEST_E4M3 = np.float32(448)
_SMALLEST_AMAX = np.float32(448 * 2.0**-126)
_CRC_POLYNOMIAL = 0x82F63B78


def accum_dtype(dtype: str) -> str:
    """The type that sums of `dtype` are kept in: `f32` for the small floats, otherwise the type itself."""
    _check(dtype)
    return "f32" if dtype in ("f16", "bf16", "f8e4m3", "f8e5m2") else dtype


def reduce(out: AnyBuffer, inputs: Sequence[AnyBuffer], dtype: str, op: str = "sum", divisor: int = 1) -> int:
    """`out[i] = inputs[0][i] op inputs[1][i] op ...`, divided and rounded to `dtype` once; `out` may be an input.

    Returns how many elements saturated. `mean` does not divide by itself: pass `divisor=len(inputs)`.
    """
    return reduce_many([out], inputs, dtype, op, divisor)


def reduce_many(
    outs: Sequence[AnyBuffer], inputs: Sequence[AnyBuffer], dtype: str, op: str = "sum", divisor: int = 1
) -> int:
    """The same into each of `outs`, which may be inputs."""
    if len(outs) == 0:
        raise ValueError("outs must not be empty")
    targets = [_elements(out, dtype, writable=True) for out in outs]
    for index, target in enumerate(targets):
        _check_count(target, targets[0].size, f"outs[{index}]")
    values = _divide(_reduced(inputs, dtype, op, targets[0].size), dtype, divisor)
    for target in targets:
        target[:] = encode(values, dtype)
    return _saturated(values, dtype)


def reduce_to_accum(acc: AnyBuffer, inputs: Sequence[AnyBuffer], dtype: str, op: str = "sum") -> int:
    """The same result, stored in `accum_dtype(dtype)`: neither divided nor rounded to `dtype`. Returns 0."""
    target = _elements(acc, accum_dtype(dtype), writable=True)
    target[:] = encode(_reduced(inputs, dtype, op, target.size), accum_dtype(dtype))
    return 0


def round_from_accum(out: AnyBuffer, acc: AnyBuffer, dtype: str, divisor: int = 1) -> int:
    """`out[i] = acc[i]`, of `accum_dtype(dtype)`, divided and rounded to `dtype`. Returns how many saturated."""
    target = _elements(out, dtype, writable=True)
    source = _elements(acc, accum_dtype(dtype))
    _check_count(source, target.size, "acc")
    values = _divide(source.copy(), dtype, divisor)
    target[:] = encode(values, dtype)
    return _saturated(values, dtype)


def quantize_fp8_blocks(codes: AnyBuffer, scales: AnyBuffer, values: AnyBuffer, block: int = 128) -> None:
    """Blocks of `block` float32 `values` (the last may be shorter) as `f8e4m3` `codes` and a float32 scale each.

    A scale is max(amax, 448 * 2**-126) / 448, where amax is the largest magnitude of its block; a code is value /
    scale, rounded. So nothing saturates. A block with a NaN or an infinity has a scale that is none and decodes to NaN.
    The scheme is DeepGEMM's for activations, but for the least amax (1e-4 there, too large for gradients).
    """
    source, coded, per_block = _blocks(codes, scales, values, block)
    with np.errstate(invalid="ignore", over="ignore"):
        for index in range(per_block.size):
            part = slice(index * block, (index + 1) * block)
            amax = np.max(np.abs(source[part]))
            scale = np.float32(np.nan) if np.isnan(amax) else np.maximum(amax, _SMALLEST_AMAX) / _LARGEST_E4M3
            per_block[index] = scale
            coded[part] = encode(source[part] / scale, "f8e4m3")


def dequantize_fp8_blocks(values: AnyBuffer, codes: AnyBuffer, scales: AnyBuffer, block: int = 128) -> None:
    """`values[i]` = the value of `codes[i]` times the scale of its block, in float32."""
    target, coded, per_block = _blocks(codes, scales, values, block)
    with np.errstate(invalid="ignore", over="ignore"):
        product = decode(coded, "f8e4m3") * np.repeat(per_block, block)[: coded.size]
    target[:] = encode(product, "f32")


def crc32c(data: AnyBuffer, crc: int = 0) -> int:
    """CRC-32C of `data`, which follows bytes whose checksum is `crc`; byte by byte, for comparison only."""
    state = crc ^ 0xFFFFFFFF
    for byte in _view(data).tobytes():
        state = (state >> 8) ^ _CRC_TABLE[(state ^ byte) & 0xFF]
    return state ^ 0xFFFFFFFF


def crc32c_copy(out: AnyBuffer, data: AnyBuffer, crc: int = 0) -> int:
    """Copies `data` into `out`, of the same size and apart from it, and returns `crc32c(data, crc)`."""
    target = _elements(out, "u8", writable=True)
    source = _elements(data, "u8")
    if target.size != source.size:
        raise ValueError(f"out holds {target.size} bytes, not the {source.size} of data")
    target[:] = source
    return crc32c(data, crc)


def decode(stored: Array, dtype: str) -> Array:
    """The elements as numbers of `accum_dtype(dtype)`; exact, since the small floats are a part of float32.

    `stored` has the storage type: unsigned integers for `bf16`, `f8e4m3` and `f8e5m2`, the NumPy type of the rest.
    """
    _check(dtype)
    if dtype == "f16":
        return stored.astype(np.float32)
    if dtype == "bf16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    if dtype in _BYTE_VALUES:
        return _BYTE_VALUES[dtype][stored]
    return stored


def encode(values: Array, dtype: str) -> Array:
    """Numbers of `accum_dtype(dtype)` rounded to nearest even, in the storage type; NaNs as the module says."""
    _check(dtype)
    if dtype in INTEGERS:
        return values
    if dtype == "bf16":
        bits = values.view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)
    if dtype in _BYTE_VALUES:
        return _nearest_byte(values, dtype)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.where(np.isnan(values), np.nan, values).astype(_STORED[dtype])


def _reduced(inputs: Sequence[AnyBuffer], dtype: str, op: str, count: int) -> Array:
    if len(inputs) == 0:
        raise ValueError("inputs must not be empty")
    if op not in OPS:
        raise ValueError(f"op {op!r} is not one of {' '.join(OPS)}")
    if op in BITWISE and dtype not in INTEGERS:
        raise ValueError(f"{op} combines the bits of integers, not of {dtype}")
    arrays = [_elements(item, dtype) for item in inputs]
    for index, array in enumerate(arrays):
        _check_count(array, count, f"inputs[{index}]")
    total = decode(arrays[0], dtype).copy()
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for array in arrays[1:]:
            total = _combine(total, decode(array, dtype), op)
    return total


def _combine(total: Array, value: Array, op: str) -> Array:
    combined: Array
    if op in ("sum", "mean"):
        combined = total + value
    elif op == "product":
        combined = total * value
    elif op in BITWISE:
        combined = _BIT_COMBINED[op](total, value)
    elif op == "min":
        combined = np.where(_less(value, total) | np.isnan(value), value, total)
    else:
        combined = np.where(_less(total, value) | np.isnan(value), value, total)
    return combined


def _less(a: Array, b: Array) -> npt.NDArray[np.bool_]:
    """Whether a < b, or a is -0 and b is +0; false with a NaN."""
    smaller: npt.NDArray[np.bool_] = a < b
    if a.dtype.kind == "f":
        smaller |= (a == b) & np.signbit(a) & ~np.signbit(b)
    return smaller


def _divide(values: Array, dtype: str, divisor: int) -> Array:
    if divisor < 1:
        raise ValueError(f"a sum cannot be divided by {divisor}")
    if divisor == 1:
        return values
    if dtype in INTEGERS:
        wide = values.astype(np.int64)
        quotients = wide // divisor
        quotients += (wide < 0) & (quotients * divisor != wide)
        return quotients.astype(values.dtype)
    with np.errstate(invalid="ignore", under="ignore"):
        return cast("Array", values / values.dtype.type(divisor))


def _saturated(values: Array, dtype: str) -> int:
    if dtype == "f8e4m3":
        return int(np.count_nonzero(np.abs(values) > 464))  # half-way to the 480 that is missing; it goes down to 448
    if dtype == "f8e5m2":
        return int(np.count_nonzero((np.abs(values) >= 61440) & np.isfinite(values)))  # half-way to 65536; goes up
    return 0


def _blocks(codes: AnyBuffer, scales: AnyBuffer, values: AnyBuffer, block: int) -> tuple[Array, Array, Array]:
    if block < 1:
        raise ValueError("a block needs at least one element")
    numbers, coded, per_block = _elements(values, "f32"), _elements(codes, "f8e4m3"), _elements(scales, "f32")
    _check_count(coded, numbers.size, "codes")
    if per_block.size != -(-numbers.size // block):
        raise ValueError(f"scales holds {per_block.size} elements, not one for each block of {block}")
    return numbers, coded, per_block


def _byte_values(mantissa: int, bias: int, finite: int) -> Floats:
    """The value of each of the 256 codes; the codes above `finite` are NaN (infinity is put in by the caller)."""
    values = np.full(256, np.nan, np.float32)
    for code in range(finite + 1):
        exponent, fraction = code >> mantissa, code & ((1 << mantissa) - 1)
        normal = min(exponent, 1)
        values[code] = (normal + fraction / (1 << mantissa)) * 2.0 ** (max(exponent, 1) - bias)
        values[code | 0x80] = -values[code]
    return values


def _nearest_byte(values: Floats, dtype: str) -> npt.NDArray[np.uint8]:
    """By searching among the midpoints of neighbours: a different way from the kernels', on purpose."""
    midpoints = _BYTE_MIDPOINTS[dtype]
    magnitude = np.abs(values)
    code = np.searchsorted(midpoints, magnitude, side="left")
    tie = midpoints[np.minimum(code, midpoints.size - 1)] == magnitude
    code += tie & (code % 2 == 1)
    code |= np.where(np.signbit(values), 0x80, 0)
    return np.where(np.isnan(values), 0x7F, code).astype(np.uint8)


def _midpoints(magnitudes: Floats) -> Floats:
    return ((magnitudes[1:] + magnitudes[:-1]) / 2).astype(np.float32)


def _crc_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (_CRC_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


def _elements(buffer: AnyBuffer, dtype: str, *, writable: bool = False) -> Array:
    _check(dtype)
    view = _view(buffer)
    if not view.c_contiguous or (writable and view.readonly):
        raise ValueError("a buffer must be contiguous" + (" and writable" if writable else ""))
    itemsize = np.dtype(_STORED[dtype]).itemsize
    if view.nbytes % itemsize:
        raise ValueError(f"a buffer holds {view.nbytes} bytes, not a multiple of the {itemsize} of {dtype}")
    return np.frombuffer(view, np.uint8).view(_STORED[dtype]) if view.nbytes else np.empty(0, _STORED[dtype])


def _view(buffer: AnyBuffer) -> memoryview:
    return memoryview(cast("Buffer", buffer))


def _check(dtype: str) -> None:
    if dtype not in _STORED:
        raise ValueError(f"dtype {dtype!r} is not one of {' '.join(DTYPES)}")


def _check_count(array: Array, expected: int, name: str) -> None:
    if array.size != expected:
        raise ValueError(f"{name} holds {array.size} elements, not the {expected} of the output")


_CRC_TABLE = _crc_table()
_BYTE_VALUES = {"f8e4m3": _byte_values(3, 7, 0x7E), "f8e5m2": _byte_values(2, 15, 0x7B)}
# What follows the largest e5m2, were there one more, is 65536: from half-way to it on, a number becomes infinity. e4m3
# has no such code, and everything beyond its last midpoint stays at 448.
_BYTE_MIDPOINTS = {
    "f8e4m3": _midpoints(_BYTE_VALUES["f8e4m3"][:0x7F]),
    "f8e5m2": _midpoints(np.append(_BYTE_VALUES["f8e5m2"][:0x7C], np.float32(65536))),
}
_BYTE_VALUES["f8e5m2"][[0x7C, 0xFC]] = np.inf, -np.inf
