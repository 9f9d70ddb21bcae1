"""Python values as arrays and scalars of Arrow, from buffers.

`pyarrow.array` and `pyarrow.scalar` import pandas wherever it is installed, which takes longer than to read a million
rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["array_of", "scalar_of"]


def array_of(values: Sequence[Any], kind: Any) -> Any:
    """A `pyarrow.Array` of the type `kind`: string, int64 or bool. None is null. Raises `OverflowError` for what does
    not fit."""
    import pyarrow

    known = np.fromiter((value is not None for value in values), dtype=np.bool_, count=len(values))
    nulls = len(values) - int(known.sum())
    validity = None if nulls == 0 else _bits(known)
    if kind == pyarrow.string():
        encoded = [b"" if value is None else value.encode() for value in values]
        offsets = np.zeros(len(values) + 1, dtype=np.int64)
        np.cumsum(np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded)), out=offsets[1:])
        if offsets[-1] > np.iinfo(np.int32).max:
            raise OverflowError("an array of text may have at most 2 GiB")
        data = [pyarrow.py_buffer(offsets.astype(np.int32)), pyarrow.py_buffer(b"".join(encoded))]
    elif kind == pyarrow.bool_():
        flags = np.fromiter((bool(value) for value in values), dtype=np.bool_, count=len(values))
        data = [_bits(flags)]
    else:
        numbers = np.fromiter((value or 0 for value in values), dtype=np.int64, count=len(values))
        data = [pyarrow.py_buffer(numbers)]
    return pyarrow.Array.from_buffers(kind, len(values), [validity, *data], nulls)


def scalar_of(value: Any, kind: Any) -> Any:
    """A `pyarrow.Scalar` of the type `kind`; None is null."""
    return array_of([value], kind)[0]


def _bits(flags: np.ndarray) -> Any:
    import pyarrow

    return pyarrow.py_buffer(np.packbits(flags, bitorder="little"))
