"""How rows of values, the tokens of an expert-parallel layer, travel. Pure NumPy over native kernels.

| name | bytes of a token of 7168 | error of Gaussian bf16 values, of their norm |
|---|---|---|
| `bf16` | 14336 | none; 0.0017 of other values |
| `fp8` | 7392 | 0.026 |
| `fp8_ue8m0` | 7224 | 0.027 |
| `e5m6` | 10808 | 0.0041 |
| `logfmt8` | 7616 | 0.014 |
| `logfmt10` | 9184 | 0.0035 |
| `f32`, `f64` | 28672, 57344 | none |

Values are float32, float64, or bf16 as uint16. All formats but `f32` and `f64` take their values as bf16: what comes
in another type is rounded to bf16 first, a float64 by way of float32. They decode to float32, or to what is rounded
from it.
`twins` has the formats to the bit.

A codec of tiles also has the methods of `compression.Codec`, so gradients may travel in it: `Compression(token_codec(
"logfmt10"))`.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from fireflyer.base.errors import UsageError
from fireflyer.base.token_formats import TILE, TILE_BYTES, token_row_bytes
from fireflyer.native import decode_token_rows, encode_token_rows, reduce_to_accum, round_from_accum

__all__ = ["TOKEN_CODECS", "TileCodec", "TokenCodec", "ValueCodec", "token_codec"]

Rows = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_BF16: Final[np.dtype[Any]] = np.dtype(np.uint16)
_VALUES: Final[dict[str, np.dtype[Any]]] = {
    "bf16": _BF16,
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
}


class TokenCodec(Protocol):
    """Must be deterministic."""

    @property
    def name(self) -> str: ...

    def row_bytes(self, width: int) -> int:
        """Bytes of a row of `width` values. Raises `UsageError` for a width that it cannot take."""

    def encode_rows(self, values: Rows, payload: Bytes) -> None:
        """(n, width) values into (n, row_bytes) bytes, both contiguous. Raises `UsageError` for other shapes."""

    def decode_rows(self, payload: Bytes, values: Rows) -> None:
        """The other way."""


class ValueCodec:
    """Each value by itself, in its own type or rounded to bf16."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._dtype = _VALUES[name]

    def row_bytes(self, width: int) -> int:
        """Any width."""
        return width * self._dtype.itemsize

    def encode_rows(self, values: Rows, payload: Bytes) -> None:
        """Encode rows as `TokenCodec.encode_rows` says."""
        _check(self, values, payload)
        payload.view(self._dtype)[:] = _as_bf16(values) if self._dtype == _BF16 else _as_floats(values)

    def decode_rows(self, payload: Bytes, values: Rows) -> None:
        """Decode rows as `TokenCodec.decode_rows` says."""
        _check(self, values, payload)
        _put(values, payload.view(self._dtype))


class TileCodec:
    """Tiles of 128 values that share a scale or a range. A width that is no multiple of 128 is refused."""

    summed_as: str | None = None
    unit = TILE

    def __init__(self, name: str) -> None:
        self.name = name

    def row_bytes(self, width: int) -> int:
        """Raises `UsageError` for a width that is no multiple of 128."""
        try:
            return token_row_bytes(width, self.name)
        except ValueError as error:
            raise UsageError(f"codec {self.name!r}: {error}; pad the rows, or use bf16") from None

    def encode_rows(self, values: Rows, payload: Bytes) -> None:
        """Encode rows as `TokenCodec.encode_rows` says."""
        _check(self, values, payload)
        if values.size:
            encode_token_rows(payload, _as_bf16(values), values.shape[1], self.name)

    def decode_rows(self, payload: Bytes, values: Rows) -> None:
        """Decode rows as `TokenCodec.decode_rows` says."""
        _check(self, values, payload)
        if not values.size:
            return
        if values.dtype in (_BF16, np.float32):
            decode_token_rows(values, payload, values.shape[1], self.name, "bf16" if values.dtype == _BF16 else "f32")
            return
        wide = np.empty(values.shape, np.float32)
        decode_token_rows(wide, payload, values.shape[1], self.name, "f32")
        values[:] = wide

    # --- what compression asks for: an array is a row ---

    def payload_bytes(self, elements: int) -> int:
        """Bytes of `elements` values, a multiple of `unit`."""
        return self.row_bytes(elements) if elements else 0

    def encode(self, values: Floats, payload: Bytes) -> None:
        """All values as one row."""
        self.encode_rows(values[None], payload[None])

    def decode(self, payload: Bytes, values: Floats) -> None:
        """One row as all values."""
        self.decode_rows(payload[None], values[None])


TOKEN_CODECS: Final = (*_VALUES, *TILE_BYTES)


def token_codec(codec: str | TokenCodec) -> TokenCodec:
    """The codec of that name, one of `TOKEN_CODECS`; another object as it is. Raises `UsageError`."""
    if not isinstance(codec, str):
        return codec
    if codec not in TOKEN_CODECS:
        raise UsageError(f"token codec {codec!r} is not known; use one of {', '.join(TOKEN_CODECS)}, or an object")
    return ValueCodec(codec) if codec in _VALUES else TileCodec(codec)


def _check(codec: TokenCodec, values: Rows, payload: Bytes) -> None:
    if values.ndim != 2 or values.dtype not in _VALUES.values():
        raise UsageError(
            f"tokens are rows of float32, float64, or bf16 as uint16, not {values.ndim} dimensions of {values.dtype}"
        )
    expected = (values.shape[0], codec.row_bytes(values.shape[1]))
    if payload.shape != expected or payload.dtype != np.uint8:
        raise UsageError(f"the payload of {codec.name} has shape {payload.shape}, not {expected} of uint8")


def _as_floats(values: Rows) -> Rows:
    if values.dtype != _BF16:
        return values
    wide = np.empty(values.shape, np.float32)
    reduce_to_accum(wide, [np.ascontiguousarray(values)], "bf16")
    return wide


def _as_bf16(values: Rows) -> Rows:
    if values.dtype == _BF16:
        return np.ascontiguousarray(values)
    rounded = np.empty(values.shape, np.uint16)
    with np.errstate(over="ignore"):
        round_from_accum(rounded, np.ascontiguousarray(values, np.float32), "bf16")
    return rounded


def _put(target: Rows, values: Rows) -> None:
    """Converts between the three types."""
    if target.dtype == values.dtype:
        target[:] = values
    else:
        target[:] = _as_bf16(values) if target.dtype == _BF16 else _as_floats(values)
