"""The native codecs of token rows, said again in NumPy: the same signatures, the same bits.

A property test holds `fireflyer.native` to these; nothing falls back to them silently. A row of `width` bf16 values is
taken in tiles of 128; its payload is the codes of all tiles, then the headers of all tiles, little-endian.

| format | code | header of a tile |
|---|---|---|
| `fp8` | f8e4m3 of value * (1 / scale) | float32 scale = max(amax, 448 * 2**-126) / 448 |
| `fp8_ue8m0` | the same, scale rounded up to a power of two | its exponent + 127, a byte; 255 is NaN, 0 is 2**-127 |
| `e5m6` | 12 bits, no infinity and no NaN; scale as before, of 65024 | the same |
| `logfmt8` | sign and k of 7 bits | float32 least and largest magnitude |
| `logfmt10` | sign and k of 9 bits | bf16 least and largest magnitude |

Codes of more than 8 bits are the low 8 bits of all codes of the tile, then the others: of e5m6 byte j has the high 4
bits of codes j and 64 + j, of logfmt10 the high 2 of codes j, 32 + j, 64 + j and 96 + j.

The scaling is DeepGEMM's for activations, but for the least amax (1e-4 there, too large for gradients).

LogFMT-n (section 3.2 of the paper on DeepSeek-V3's hardware, and DeepEP's `internode_ll.cu`): with l = log2|x|, mx its
maximum in the tile, mn = max(min l, mx - 32), step = (mx - mn) / (2**(n-1) - 2), r = log2((1 + 2**step) / 2) / step:
k = floor(max(0, (l - mn) / step + 2 - r)); k = 0 decodes to zero, others to 2**(mn + (k - 1) step). That is the code
nearest to x itself, not to its logarithm. Zeros do not count for the minimum (in DeepEP they do, and then spoil the
tile), and subnormals are zeros. log2 and exp2 are polynomials, off by at most 2.1e-6 and 3e-6, and r is a series.

A tile with a NaN or an infinity decodes to NaNs. All arithmetic is in float32, rounded after each operation.
"""

from __future__ import annotations

from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from fireflyer.base.token_formats import TILE, TILE_BYTES, token_row_bytes
from fireflyer.collectives import kernels

__all__ = ["decode_token_rows", "encode_token_rows"]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[Any]
"""uint16."""
Words = npt.NDArray[Any]
"""uint32."""

_F: Final = np.float32
_NAN: Final = np.uint32(0x7FC00000)
_LARGEST_E5M6: Final = _F(65024)
_LOG2: Final = tuple(map(_F, (-0.02645741, 0.12345138, -0.27953802, 0.45827075, -0.71828191, 1.44255314)))
_EXP2: Final = tuple(map(_F, (0.01342668, 0.05224247, 0.24128021, 0.69304484, 1.0)))
_TO_INTEGER: Final = _F(1.5 * 2**23)


def encode_token_rows(payload: Any, values: Any, width: int, codec: str) -> None:
    """Rows of bf16 `values` into their payloads, one after the other. Raises `ValueError`, as all functions here."""
    words, out, tiles = _rows(values, payload, 2, width, codec)
    bits = words.view("<u2").reshape(len(words), tiles, TILE).astype(np.uint32)
    with np.errstate(all="ignore"):
        codes, headers = _encode_log(bits, codec) if codec.startswith("log") else _encode_scaled(bits, codec)
    split = tiles * codes.shape[2]
    out[:, :split] = codes.reshape(len(out), split)
    out[:, split:] = headers.reshape(len(out), out.shape[1] - split)


def decode_token_rows(values: Any, payload: Any, width: int, codec: str, dtype: str) -> None:
    """Payloads into rows of `dtype` f32 or, rounded to nearest even, bf16."""
    if dtype not in ("f32", "bf16"):
        raise ValueError(f"tokens are decoded as f32 or bf16, not as {dtype}")
    target, source, tiles = _rows(values, payload, 4 if dtype == "f32" else 2, width, codec)
    header_bytes = {"fp8": 4, "fp8_ue8m0": 1, "e5m6": 1, "logfmt8": 8, "logfmt10": 4}[codec]
    split = tiles * (TILE_BYTES[codec] - header_bytes)
    codes = source[:, :split].reshape(len(source), tiles, split // tiles)
    headers = np.ascontiguousarray(source[:, split:]).reshape(len(source), tiles, header_bytes)
    with np.errstate(all="ignore"):
        found = _decode_log(codes, headers, codec) if codec.startswith("log") else _decode_scaled(codes, headers, codec)
    target[:] = kernels.encode(found.reshape(-1), dtype).view(np.uint8).reshape(target.shape)


def _rows(values: Any, payload: Any, size: int, width: int, codec: str) -> tuple[Bytes, Bytes, int]:
    """Both buffers as bytes, a row each."""
    row_bytes = token_row_bytes(width, codec)
    rows, out = (_bytes(buffer) for buffer in (values, payload))
    if rows.size % (width * size):
        raise ValueError(f"values holds {rows.size // size} elements, not rows of {width}")
    count = rows.size // (width * size)
    if out.size != count * row_bytes:
        raise ValueError(f"payload holds {out.size} bytes, not the {count * row_bytes} of {count} rows")
    return rows.reshape(count, width * size), out.reshape(count, row_bytes), width // TILE


def _bytes(buffer: Any) -> Bytes:
    view = memoryview(buffer)
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


# --- fp8 and e5m6 ---


def _encode_scaled(bits: Words, codec: str) -> tuple[Bytes, Bytes]:
    top = (bits & 0x7FFF).max(axis=2, initial=0)
    amax = (top << 16).view(_F)
    largest = _LARGEST_E5M6 if codec == "e5m6" else _F(448)
    scale = np.maximum(amax, largest * _F(2.0**-126)) / largest
    header = scale.view(np.uint32)
    if codec != "fp8":
        header = (header + np.uint32(0x7FFFFF)) >> 23
        scale = (header << 23).view(_F)
    scaled = (bits << 16).view(_F) * (_F(1) / scale)[..., None]
    finite = top < 0x7F80
    scaled = np.where(finite[..., None], scaled, _F(0))
    codes = _pack(_nearest_e5m6(scaled), 4) if codec == "e5m6" else kernels.encode(scaled, "f8e4m3")
    codes = np.where(finite[..., None], codes, np.uint8(0))
    if codec == "fp8":
        return codes, np.where(finite, header, _NAN).astype("<u4")[..., None].view(np.uint8)
    return codes, np.where(finite, header, np.uint32(255)).astype(np.uint8)


def _decode_scaled(codes: Bytes, headers: Bytes, codec: str) -> Floats:
    if codec == "fp8":
        scale = headers.view("<f4")
    else:
        exponent = headers.astype(np.uint32)
        special = np.where(exponent == 255, _NAN, np.uint32(1 << 22))
        scale = np.where((exponent == 255) | (exponent == 0), special, exponent << 23).view(_F)
    numbers = _E5M6_VALUES[_unpack(codes, 4)] if codec == "e5m6" else kernels.decode(codes, "f8e4m3")
    return _canonical(numbers * scale)


def _e5m6_values() -> Floats:
    """The value of each of the 4096 codes."""
    exponent, fraction = np.divmod(np.arange(2048), 64)
    magnitudes = np.ldexp(np.minimum(exponent, 1) + fraction / 64, np.maximum(exponent, 1) - 15)
    return np.concatenate([magnitudes, -magnitudes]).astype(_F)


def _nearest_e5m6(values: Floats) -> Codes:
    """By scaling to integers, which `rint` rounds to even: another way than the kernels', on purpose."""
    _, power = np.frexp(np.abs(values).astype(np.float64))
    power = np.where(values == 0, -14, np.maximum(power - 1, -14))
    fraction = np.rint(np.ldexp(np.abs(values).astype(np.float64), 6 - power))
    code = (power + 14) * 64 + fraction
    return cast("Codes", (code.astype(np.uint16) | np.where(np.signbit(values), 0x800, 0)).astype(np.uint16))


# --- LogFMT ---


def _encode_log(bits: Words, codec: str) -> tuple[Bytes, Bytes]:
    n = int(codec[6:])
    magnitude = bits & 0x7FFF
    counted = np.where(magnitude < 0x80, np.uint32(0xFFFF), magnitude)
    amax, amin = magnitude.max(axis=2, initial=0), counted.min(axis=2, initial=0xFFFF)
    finite, empty = amax < 0x7F80, amax < 0x80
    amax, amin = np.where(empty, 0x3F80, amax).astype(np.uint32), np.where(empty, 0x3F80, amin).astype(np.uint32)
    least, step = _range(amin << 16, amax << 16, n)
    inverse = np.where(step > 0, _F(1) / step, _F(0))
    y = step * _F(0.34657359)
    rounding = _F(1.5) - (y * _F(0.25) - (y * y) * (y * _F(0.041666668)))
    t = (_log2(magnitude << 16) - least[..., None]) * inverse[..., None] + rounding[..., None]
    t = np.clip(np.where(magnitude < 0x80, _F(0), t), _F(0), _F(2 ** (n - 1) - 1))
    sign = (bits >> (16 - n)) & np.uint32(1 << (n - 1))
    wide = np.where(finite[..., None], t, _F(0)).astype(np.uint16) | np.where(finite[..., None], sign, 0).astype(
        np.uint16
    )
    ends = np.stack([np.where(finite, np.where(empty, 0, end), 0x7FC0) for end in (amin, amax)], axis=2)
    if n == 8:
        return wide.astype(np.uint8), (ends.astype("<u4") << 16).astype("<u4").view(np.uint8)
    return _pack(wide, n - 8), ends.astype("<u2").view(np.uint8)


def _decode_log(codes: Bytes, headers: Bytes, codec: str) -> Floats:
    n = int(codec[6:])
    ends = headers.view("<u4").copy() if n == 8 else headers.view("<u2").astype(np.uint32) << 16
    ends = (ends & np.uint32(0x7FFFFFFF)).astype(np.uint32)
    finite: npt.NDArray[np.bool_] = np.all(ends < 0x7F800000, axis=2)
    empty = ends[..., 1] < 0x800000
    amin = np.where(empty | (ends[..., 0] < 0x800000), np.uint32(0x800000), ends[..., 0])
    least, step = _range(amin, np.where(empty, np.uint32(0x800000), ends[..., 1]), n)
    wide = codes.astype(np.uint32) if n == 8 else _unpack(codes, n - 8).astype(np.uint32)
    k = wide & np.uint32((1 << (n - 1)) - 1)
    power = _exp2(least[..., None] + (k.astype(_F) - _F(1)) * step[..., None])
    magnitude = np.where((k == 0) | empty[..., None], np.uint32(0), power.view(np.uint32))
    found = magnitude | ((wide << np.uint32(32 - n)) & np.uint32(0x80000000))
    return cast("Floats", np.where(finite[..., None], found, _NAN).astype(np.uint32).view(_F))


def _range(amin: Words, amax: Words, n: int) -> tuple[Floats, Floats]:
    """mn and step of each tile."""
    top = _log2(amax)
    least = np.maximum(_log2(amin), top - _F(32))
    return least, (top - least) / _F(2 ** (n - 1) - 2)


def _log2(bits: Words) -> Floats:
    exponent = ((bits >> 23).astype(np.int32) - 127).astype(_F)
    u = ((bits & np.uint32(0x7FFFFF)) | np.uint32(0x3F800000)).view(_F) - _F(1)
    return exponent + u * _horner(u, _LOG2)


def _exp2(a: Floats) -> Floats:
    shifted = (a - _F(0.5)) + _TO_INTEGER
    p = _horner(a - (shifted - _TO_INTEGER), _EXP2)
    whole = shifted.view(np.uint32) - _TO_INTEGER.view(np.uint32)
    return (p.view(np.uint32) + (whole << np.uint32(23))).view(_F)


def _horner(x: Floats, coefficients: tuple[np.float32, ...]) -> Floats:
    total = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total


# --- bits ---


def _canonical(values: Floats) -> Floats:
    return cast("Floats", np.where(np.isnan(values), _F(np.nan), values))


def _pack(wide: Codes, high: int) -> Bytes:
    upper = (wide >> 8).reshape(*wide.shape[:-1], 8 // high, TILE * high // 8)
    packed = np.zeros((*wide.shape[:-1], TILE * high // 8), np.uint8)
    for k in range(8 // high):
        packed |= (upper[..., k, :] << (high * k)).astype(np.uint8)
    return np.concatenate([(wide & 0xFF).astype(np.uint8), packed], axis=-1)


def _unpack(codes: Bytes, high: int) -> Codes:
    upper = [(codes[..., TILE:] >> (high * k)) & ((1 << high) - 1) for k in range(8 // high)]
    return codes[..., :TILE].astype(np.uint16) | (np.concatenate(upper, axis=-1).astype(np.uint16) << 8)


_E5M6_VALUES: Final = _e5m6_values()
