"""Rows that are gathered, encoded, decoded and added up: in NumPy, to the bit what the native kernels of `rows` give.

Rows of several payloads are counted one payload after the other. Any codec will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fireflyer.collectives.dispatch.plan import Numbers, add_in_order
from fireflyer.collectives.tokens import TokenCodec

__all__ = ["decode_rows", "encode_rows", "sum_rows"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


def encode_rows(out: Bytes, values: Array, index: Numbers, codec: TokenCodec) -> None:
    """`out[i]` (entries, row_bytes): `values[index[i]]`, of (rows, width), encoded."""
    codec.encode_rows(np.ascontiguousarray(values[index]), out)


def decode_rows(out: Array, payloads: Sequence[Bytes], index: Numbers, codec: TokenCodec) -> None:
    """`out[i]` (entries, width): the values of row `index[i]`."""
    payload = np.concatenate(payloads)
    values = np.empty((len(payload), out.shape[1]), out.dtype)
    codec.decode_rows(payload, values)
    out[:] = values[index]


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
    `dtype`, float32 or float64, then encoded. `codecs`: of the rows, and of the sums. Every NaN is the positive quiet
    one."""
    values = np.empty((index.size, width), dtype)
    decode_rows(values, payloads, index, codecs[0])
    sums = add_in_order(values, np.repeat(np.arange(first.size - 1), np.diff(first)), first.size - 1)
    sums[np.isnan(sums)] = np.nan
    codecs[1].encode_rows(sums, out)
