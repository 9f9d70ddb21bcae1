"""Rows that are gathered, encoded, decoded and added up by native kernels, each in one pass over their bytes.

Functions are those of `row_twins`, which serve codecs that come from outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fireflyer import native
from fireflyer.collectives.dispatch import row_twins
from fireflyer.collectives.dispatch.plan import Numbers
from fireflyer.collectives.tokens import TileCodec, TokenCodec, ValueCodec

__all__ = ["decode_rows", "encode_rows", "gather_rows", "same_bytes", "sum_rows"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

_NAMES: Final = {np.dtype(np.uint16): "bf16", np.dtype(np.float32): "f32", np.dtype(np.float64): "f64"}


def same_bytes(codec: TokenCodec, dtype: np.dtype[Any]) -> bool:
    """Whether values of `dtype` are their own encoding."""
    return type(codec) is ValueCodec and codec.name == _NAMES[dtype]


def gather_rows(out: Bytes, payloads: Sequence[Bytes], index: Numbers) -> None:
    """`out[i]` (entries, row_bytes): row `index[i]`, of which `payloads` (rows, row_bytes) are counted one after the
    other."""
    if index.size:
        native.gather_rows(out, payloads, index, out.shape[1])


def encode_rows(out: Bytes, values: Array, index: Numbers, codec: TokenCodec) -> None:
    """`out[i]` (entries, row_bytes): `values[index[i]]`, of (rows, width), encoded."""
    if not _is_native(codec):
        row_twins.encode_rows(out, values, index, codec)
    elif index.size:
        native.encode_rows(out, [values], index, values.shape[1], codec.name, _NAMES[values.dtype])


def decode_rows(out: Array, payloads: Sequence[Bytes], index: Numbers, codec: TokenCodec) -> None:
    """`out[i]` (entries, width): the values of row `index[i]`."""
    if not _is_native(codec):
        row_twins.decode_rows(out, payloads, index, codec)
    elif index.size:
        native.decode_rows(out, payloads, index, out.shape[1], codec.name, _NAMES[out.dtype])


def sum_rows(
    out: Bytes,
    payloads: Sequence[Bytes],
    index: Numbers,
    first: Numbers,
    codecs: tuple[TokenCodec, TokenCodec],
    width: int,
    dtype: np.dtype[Any],
) -> None:
    """`out[i]` (sums, row_bytes): the sum of the rows that `index[first[i]:first[i + 1]]` names, from left to right in
    `dtype`, float32 or float64, then encoded. `codecs`: of the rows, and of the sums."""
    if not all(map(_is_native, codecs)):
        row_twins.sum_rows(out, payloads, index, first, codecs, width, dtype)
    elif first.size > 1:
        native.sum_rows(out, payloads, index, first, width, codecs[0].name, codecs[1].name, _NAMES[dtype])


def _is_native(codec: TokenCodec) -> bool:
    return type(codec) in (ValueCodec, TileCodec)
